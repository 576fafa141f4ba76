//! Counters of an engine. One event moves one counter.
#![forbid(unsafe_code)]

mod storm;

use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) use self::storm::Storm;

use crate::engine::ReadError;
use crate::fabric::Carrier;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Live counters and gauges, updated by the engine's threads.
        #[derive(Debug, Default)]
        pub struct EngineStats {
            $($(#[$doc])* pub $name: AtomicU64,)*
        }

        /// A copy of [`EngineStats`] at one moment.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct EngineSnapshot {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl EngineStats {
            /// Copies every counter.
            #[must_use]
            pub fn snapshot(&self) -> EngineSnapshot {
                EngineSnapshot { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Gauge: reads queued, not yet worked on.
    queued,
    /// Gauge: reads worked on.
    active,
    /// Gauge: destination blocks that may still be written.
    quarantined,
    /// Reads that were submitted.
    submitted,
    /// Reads that were refused at submission.
    refused,
    /// Reads whose blocks have landed.
    landed,
    /// Bytes of blocks that have landed.
    bytes,
    /// Bytes of blocks that have landed over EFA.
    bytes_efa,
    /// Bytes of blocks that have landed over other RDMA devices.
    bytes_rdma,
    /// Bytes of blocks that have landed from GPU to GPU within the node.
    bytes_nvlink,
    /// Bytes of blocks that have landed through memory of the node.
    bytes_shm,
    /// Bytes of blocks that have landed over sockets.
    bytes_tcp,
    /// Bytes of blocks that have landed by ways that are not known, or several.
    bytes_unknown,
    /// Descriptors posted by reads that have landed.
    descriptors,
    /// Reads that failed because the lease had ended.
    failed_lease,
    /// Reads that failed because the peer could not be met or was another life of itself.
    failed_peer,
    /// Reads that failed in the transport.
    failed_transport,
    /// Reads that did not end in time.
    failed_deadline,
    /// Reads that were cancelled or whose handle was dropped.
    failed_cancelled,
    /// Reads that failed otherwise.
    failed_other,
    /// Peers met.
    meetings,
    /// Peers that could not be met.
    meetings_failed,
    /// Agents given up: lost peers, fences, idle peers.
    partings,
    /// Releases told to holders.
    releases,
    /// Renewals asked of holders.
    renewals,
    /// Notices that were taken from readers.
    notices,
    /// Notices that were not understood.
    notices_malformed,
    /// Gauge: leases that hold.
    leases,
    /// Gauge: blocks under leases.
    leased_blocks,
}

impl EngineStats {
    /// Bytes that have landed, and by what way.
    pub(crate) fn count_bytes(&self, bytes: u64, carrier: Option<Carrier>) {
        let way = match carrier {
            Some(Carrier::Efa) => &self.bytes_efa,
            Some(Carrier::Rdma) => &self.bytes_rdma,
            Some(Carrier::Nvlink) => &self.bytes_nvlink,
            Some(Carrier::Shm) => &self.bytes_shm,
            Some(Carrier::Tcp) => &self.bytes_tcp,
            None => &self.bytes_unknown,
        };
        way.fetch_add(bytes, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn count_failure(&self, error: &ReadError) {
        let counter = match error {
            ReadError::LeaseLost { .. } => &self.failed_lease,
            ReadError::Connect { .. }
            | ReadError::PeerRestarted { .. }
            | ReadError::PeerSilent { .. } => &self.failed_peer,
            ReadError::Transport { .. } | ReadError::Fenced { .. } => &self.failed_transport,
            ReadError::Deadline { .. } => &self.failed_deadline,
            ReadError::Cancelled => &self.failed_cancelled,
            _ => &self.failed_other,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

//! Counters of an engine. One event moves one counter.
#![forbid(unsafe_code)]

mod storm;

use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) use self::storm::Storm;

use crate::engine::ReadError;
use crate::fabric::Carrier;

/// How a number moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MetricKind {
    /// It only grows.
    Counter,
    /// It goes up and down.
    Gauge,
}

/// One number of an [`EngineSnapshot`], for programs that hand all of them on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Metric {
    /// A stable name: that of the field.
    pub name: &'static str,
    /// What is counted, for people.
    pub help: &'static str,
    /// How it moves.
    pub kind: MetricKind,
    /// Its value.
    pub value: u64,
}

macro_rules! counters {
    ($(#[doc = $doc:literal] $name:ident: $kind:ident,)*) => {
        /// Live counters and gauges, updated by the engine's threads.
        #[derive(Debug, Default)]
        pub struct EngineStats {
            $(#[doc = $doc] pub $name: AtomicU64,)*
        }

        /// A copy of [`EngineStats`] at one moment.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct EngineSnapshot {
            $(#[doc = $doc] pub $name: u64,)*
        }

        impl EngineStats {
            /// Copies every counter.
            #[must_use]
            pub fn snapshot(&self) -> EngineSnapshot {
                EngineSnapshot { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }

        impl EngineSnapshot {
            /// All of them, with their names: what an engine that exports metrics needs, so that new ones
            /// are exported too.
            pub fn metrics(&self) -> impl Iterator<Item = Metric> + use<> {
                [$(Metric {
                    name: stringify!($name),
                    help: $doc.trim_ascii(),
                    kind: MetricKind::$kind,
                    value: self.$name,
                },)*]
                .into_iter()
            }
        }
    };
}

counters! {
    /// Reads queued now, not yet worked on.
    queued: Gauge,
    /// Reads worked on now.
    active: Gauge,
    /// Destination blocks that may still be written now.
    quarantined: Gauge,
    /// Reads that were submitted.
    submitted: Counter,
    /// Reads that were refused at submission.
    refused: Counter,
    /// Reads whose blocks have landed.
    landed: Counter,
    /// Bytes of blocks that have landed.
    bytes: Counter,
    /// Bytes of blocks that have landed over EFA.
    bytes_efa: Counter,
    /// Bytes of blocks that have landed over other RDMA devices.
    bytes_rdma: Counter,
    /// Bytes of blocks that have landed from GPU to GPU within the node.
    bytes_nvlink: Counter,
    /// Bytes of blocks that have landed through memory of the node.
    bytes_shm: Counter,
    /// Bytes of blocks that have landed over sockets.
    bytes_tcp: Counter,
    /// Bytes of blocks that have landed by ways that are not known, or several.
    bytes_unknown: Counter,
    /// Descriptors posted by reads that have landed.
    descriptors: Counter,
    /// Reads that failed because the lease had ended.
    failed_lease: Counter,
    /// Reads that failed because the peer could not be met or was another life of itself.
    failed_peer: Counter,
    /// Reads that failed in the transport.
    failed_transport: Counter,
    /// Reads that did not end in time.
    failed_deadline: Counter,
    /// Reads that were cancelled or whose handle was dropped.
    failed_cancelled: Counter,
    /// Reads that failed otherwise.
    failed_other: Counter,
    /// Peers met.
    meetings: Counter,
    /// Peers that could not be met.
    meetings_failed: Counter,
    /// Agents given up: lost peers, fences, idle peers.
    partings: Counter,
    /// Releases told to holders.
    releases: Counter,
    /// Renewals asked of holders.
    renewals: Counter,
    /// Notices that were taken from readers.
    notices: Counter,
    /// Notices that were not understood.
    notices_malformed: Counter,
    /// Leases that hold now.
    leases: Gauge,
    /// Blocks under leases now.
    leased_blocks: Gauge,
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::*;
    use crate::ids::{EngineId, LeaseId};
    use crate::transport::{FailureKind, TransportError};

    #[test]
    fn each_kind_of_failure_has_its_own_counter() {
        let engine = EngineId::new("e").unwrap();
        let failures = [
            (
                "failed_lease",
                ReadError::LeaseLost {
                    engine: engine.clone(),
                    lease: LeaseId(1),
                    expected: 1,
                    found: 2,
                },
            ),
            (
                "failed_peer",
                ReadError::PeerSilent {
                    engine: engine.clone(),
                    after: Duration::from_secs(5),
                },
            ),
            (
                "failed_transport",
                ReadError::Transport {
                    engine: engine.clone(),
                    cause: TransportError {
                        operation: "read",
                        kind: FailureKind::Backend,
                        cause: String::new(),
                        raw: None,
                    },
                },
            ),
            (
                "failed_deadline",
                ReadError::Deadline {
                    engine: engine.clone(),
                    limit: Duration::from_secs(1),
                    phase: "queued",
                },
            ),
            ("failed_cancelled", ReadError::Cancelled),
            (
                "failed_other",
                ReadError::NoSuchWord {
                    engine,
                    slot: 1,
                    slots: 1,
                },
            ),
        ];
        for (name, error) in failures {
            let stats = EngineStats::default();
            stats.count_failure(&error);
            let counted: Vec<_> = stats
                .snapshot()
                .metrics()
                .filter(|metric| metric.value > 0)
                .map(|metric| (metric.name, metric.value))
                .collect();
            assert_eq!(counted, [(name, 1)], "{error}");
        }
    }

    #[test]
    fn every_number_has_a_name_a_kind_and_a_help() {
        let stats = EngineStats::default();
        stats.landed.store(3, Ordering::Relaxed);
        stats.leases.store(2, Ordering::Relaxed);
        let metrics: Vec<Metric> = stats.snapshot().metrics().collect();
        let named = |name: &str| metrics.iter().find(|metric| metric.name == name);
        assert_eq!(
            named("landed").map(|metric| (metric.value, metric.kind, metric.help)),
            Some((3, MetricKind::Counter, "Reads whose blocks have landed."))
        );
        assert_eq!(
            named("leases").map(|metric| (metric.value, metric.kind)),
            Some((2, MetricKind::Gauge))
        );
        for (at, metric) in metrics.iter().enumerate() {
            assert!(!metric.help.is_empty() && metric.help.ends_with('.'));
            assert!(metrics[..at].iter().all(|other| other.name != metric.name));
        }
        assert_eq!(
            size_of::<EngineSnapshot>(),
            metrics.len() * size_of::<u64>()
        );
    }
}

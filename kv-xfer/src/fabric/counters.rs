//! What the NICs themselves have counted: the witness that bytes went over them.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::devices::{names, text};

/// Bytes that a port has counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortBytes {
    /// Received, of every kind.
    pub received: u64,
    /// Sent, of every kind.
    pub sent: u64,
    /// Read from others, one-sidedly, where the device tells these apart.
    pub read: Option<u64>,
    /// Written to others, one-sidedly, where the device tells these apart.
    pub written: Option<u64>,
}

/// The counters of every port at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    ports: BTreeMap<(String, String), PortBytes>,
}

/// Which way the bytes went, seen from this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moved {
    /// They were read from a peer.
    Read,
    /// They were written to a peer.
    Written,
}

/// The counters say something else than the transport.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{expected} bytes should have gone over RDMA devices, whose counters moved by {counted}: \
     they went another way"
)]
pub struct NotCounted {
    /// Bytes that were moved.
    pub expected: u64,
    /// Bytes that the devices counted.
    pub counted: u64,
}

impl Counters {
    /// Reads them below a root folder, `/` for this machine. The kernel renews them every 10 ms: wait that long after a
    /// transfer. Ports without counters are left out.
    #[must_use]
    pub fn read(root: &Path) -> Self {
        let class = root.join("sys/class/infiniband");
        let mut ports = BTreeMap::new();
        for device in names(&class) {
            let folder = class.join(&device).join("ports");
            for port in names(&folder) {
                if let Some(bytes) = port_bytes(&folder.join(&port)) {
                    ports.insert((device.clone(), port), bytes);
                }
            }
        }
        Self { ports }
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ports.is_empty()
    }

    /// Bytes of each port since an earlier moment. A port that was not there then, or whose counters have started anew,
    /// counts nothing.
    pub fn since<'a>(
        &'a self,
        earlier: &'a Self,
    ) -> impl Iterator<Item = (&'a str, &'a str, PortBytes)> {
        self.ports.iter().filter_map(|((device, port), now)| {
            let then = earlier.ports.get(&(device.clone(), port.clone()))?;
            let less = |now: Option<u64>, then: Option<u64>| Some(now?.saturating_sub(then?));
            let bytes = PortBytes {
                received: now.received.saturating_sub(then.received),
                sent: now.sent.saturating_sub(then.sent),
                read: less(now.read, then.read),
                written: less(now.written, then.written),
            };
            Some((device.as_str(), port.as_str(), bytes))
        })
    }

    /// Whether the devices have counted what a transfer moved since an earlier moment: at least nine tenths of it, for the
    /// last renewal may be missing. Others' traffic may hide a transfer that went another way, on ports that cannot tell
    /// one-sided bytes apart.
    ///
    /// # Errors
    /// [`NotCounted`].
    pub fn witness(&self, earlier: &Self, moved: Moved, bytes: u64) -> Result<u64, NotCounted> {
        let counted = self
            .since(earlier)
            .map(|(_, _, port)| match moved {
                Moved::Read => port.read.unwrap_or(port.received),
                Moved::Written => port.written.unwrap_or(port.sent),
            })
            .fold(0_u64, u64::saturating_add);
        if counted >= bytes - bytes / 10 {
            Ok(counted)
        } else {
            Err(NotCounted {
                expected: bytes,
                counted,
            })
        }
    }
}

fn port_bytes(port: &Path) -> Option<PortBytes> {
    let number =
        |folder: &str, name: &str| -> Option<u64> { text(&port.join(folder), name)?.parse().ok() };
    // EFA.
    let hardware = number("hw_counters", "rx_bytes").zip(number("hw_counters", "tx_bytes"));
    // InfiniBand and RoCE count in words of four bytes.
    let words = || {
        let received = number("counters", "port_rcv_data")?.saturating_mul(4);
        Some((
            received,
            number("counters", "port_xmit_data")?.saturating_mul(4),
        ))
    };
    let (received, sent) = hardware.or_else(words)?;
    Some(PortBytes {
        received,
        sent,
        read: number("hw_counters", "rdma_read_bytes"),
        written: number("hw_counters", "rdma_write_bytes"),
    })
}

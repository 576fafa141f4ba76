//! What the two processes of the check say to each other, one JSON object a line.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bench::proto::Shape;
use crate::memory::PoolMemory;

/// What is asked of the holder.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum ToHolder {
    /// Make a pool and serve it. What was there before is given up first.
    Setup {
        /// Its geometry.
        shape: Shape,
        /// Where it is.
        memory: PoolMemory,
    },
    /// Fill blocks and lease them.
    Lease {
        /// The blocks in token order.
        blocks: Vec<u32>,
        /// What they are filled with.
        seed: u64,
    },
    /// Revoke the lease after a while, and overwrite its blocks at once.
    Revoke {
        /// After how long, microseconds.
        after_us: u64,
        /// What they are overwritten with.
        seed: u64,
    },
}

/// What the holder answers.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum FromHolder {
    /// It serves.
    Ready {
        /// Host of its side channel.
        host: String,
        /// Port of its side channel.
        port: u16,
    },
    /// The blocks are leased.
    Leased {
        /// Their description.
        kv_transfer_params: Value,
    },
    /// The lease is over.
    Revoked {
        /// Whether it still held.
        held: bool,
    },
    /// It could not be done.
    Failed {
        /// Why.
        why: String,
    },
}

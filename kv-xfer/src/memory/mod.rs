//! Memory that blocks live in: host, foreign and simulated pools, and the words that leases need.
#![allow(unsafe_code)]

use std::fmt;

use thiserror::Error;

use crate::ids::WordSlot;
use crate::layout::RegionGeometry;

mod claims;
mod foreign;
mod host;
mod mapping;
mod maps;
mod pool;
mod publish;
mod words;

pub use claims::{ClaimError, ClaimRefusal};
pub use foreign::{ForeignError, ForeignMemory};
pub use host::{HostMemory, HostMemoryError, HostOptions, HostReport, Wish};
pub use maps::MapsError;
pub use pool::{AccessError, KvPool, OwnedBlocks, PoolError};
pub use words::HostWords;

/// Why an access to a pool's bytes was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The range is not inside one mapping of the memory.
    #[error("{len} bytes at {addr:#x} are not inside this memory")]
    OutOfRange {
        /// First address.
        addr: u64,
        /// Length, bytes.
        len: u64,
    },
    /// The memory cannot be reached by the processor (device memory).
    #[error("this memory cannot be reached by the processor; copy it through its device")]
    NotHostAccessible,
}

/// Bytes that a pool's regions point into. Every access is bounds-checked; an implementation keeps
/// its memory mapped for as long as it lives.
pub trait Memory: Send + Sync + fmt::Debug {
    /// Copies `out.len()` bytes from `addr`.
    ///
    /// # Errors
    /// [`MemoryError`] when the range is not inside this memory; nothing is copied then.
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), MemoryError>;

    /// Copies `data` to `addr`.
    ///
    /// # Errors
    /// [`MemoryError`] when the range is not inside this memory; nothing is copied then.
    fn write(&self, addr: u64, data: &[u8]) -> Result<(), MemoryError>;
}

/// A table of 64-bit words in host memory that a transport can register: lease words at the holder,
/// landing places for their copies at the reader.
pub trait ControlWords: Send + Sync + fmt::Debug {
    /// The table as a region of one block per word, to be registered and put on the card.
    fn region(&self) -> RegionGeometry;

    /// The word in `slot`, with acquire ordering; `None` past the end of the table.
    fn load(&self, slot: WordSlot) -> Option<u64>;

    /// Stores a word with release ordering, followed by a full fence, so that no later store (of a
    /// block's next content) can be seen before it. False past the end of the table.
    fn store(&self, slot: WordSlot, value: u64) -> bool;
}

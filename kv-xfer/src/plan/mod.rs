//! From block pairs to runs to descriptors.
//!
//! The cost of a read follows its descriptors, not its bytes, and allocators like to hand out
//! descending block ids, which a transport cannot merge. So the pairs are sorted once by remote
//! block, blocks that follow each other on both sides become [runs](PairRun), and a run becomes one
//! descriptor in every region whose blocks touch. Descriptors are made lazily, window by window and
//! in layer order, so that a reader can start on the first layers while later ones are in flight.
//!
//! Everything is checked when the plan is made: lengths, block ranges, that no local block is
//! written twice, and that no address or sum overflows. What comes after cannot fail.
#![forbid(unsafe_code)]

mod runs;
mod windows;

pub use runs::PairRun;
pub use windows::{
    Cursor, DEFAULT_MAX_DESCRIPTOR_BYTES, Plan, PlanInput, PlanLimits, RunsInput, WindowInfo,
};

use thiserror::Error;

use crate::ids::BlockId;

/// Which side of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// The holder, whose blocks are read.
    Remote,
    /// The reader, whose blocks are written.
    Local,
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Remote => "remote",
            Self::Local => "local",
        })
    }
}

/// Why no plan can be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// No blocks were given.
    #[error("there are no blocks to read; release the lease instead of reading")]
    NoBlocks,
    /// No region pairs were given.
    #[error("there are no regions to read; pair the pools' layouts first")]
    NoRegions,
    /// The two lists do not pair up.
    #[error(
        "{remote} remote blocks cannot be paired with {local} local ones; pass as many of each"
    )]
    LengthMismatch {
        /// Remote blocks given.
        remote: usize,
        /// Local blocks given.
        local: usize,
    },
    /// More blocks than block ids exist.
    #[error("{blocks} blocks are more than a pool can have; the descriptor is damaged: recompute")]
    TooManyBlocks {
        /// Blocks given.
        blocks: usize,
    },
    /// A block id lies outside its pool.
    #[error(
        "{side} block {block} is outside the pool of {blocks} blocks; \
         recompute, and check what named it"
    )]
    BlockOutOfRange {
        /// Whose block.
        side: Side,
        /// The block.
        block: BlockId,
        /// How many blocks the pool has.
        blocks: u32,
    },
    /// Two remote blocks would be written into one local block.
    #[error("local block {block} is given twice; allocate a block of its own for every block read")]
    DuplicateLocalBlock {
        /// The block.
        block: BlockId,
    },
    /// A region pair moves no bytes.
    #[error("region pair {pair} moves no bytes; leave it out")]
    EmptyRegion {
        /// Its place in the list.
        pair: usize,
    },
    /// The blocks of a region pair overlap.
    #[error("region pair {pair}: {side} stride {stride} is less than the {len} bytes of a block")]
    StrideTooShort {
        /// Its place in the list.
        pair: usize,
        /// Which side.
        side: Side,
        /// Its stride, bytes.
        stride: u64,
        /// Bytes per block.
        len: u64,
    },
    /// A region pair runs over the end of the address space.
    #[error("region pair {pair}: {side} block {block} is past the end of the address space")]
    Wraps {
        /// Its place in the list.
        pair: usize,
        /// Which side.
        side: Side,
        /// The block.
        block: BlockId,
    },
    /// The read has more bytes than can be counted.
    #[error("the read has more than 2^64 bytes; the region pairs are damaged")]
    TooManyBytes,
}

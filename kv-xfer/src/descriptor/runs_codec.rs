//! The bytes of a block list.
//!
//! A run count, then for each run the signed distance from the last id of the run before it (0 before
//! the first), and its length less one with the direction in the lowest bit; all as varints. A run in
//! a pool of up to 2²⁰ blocks takes at most six bytes, a scattered block about four. One list has
//! one encoding.

use thiserror::Error;

use super::limits::DescriptorLimits;
use super::runs::{BlockRun, BlockRuns, Step};
use super::wire::{Input, Malformed, put_varint, unzigzag, zigzag};
use crate::ids::BlockId;

/// The fewest bytes that a run takes.
const MIN_RUN_BYTES: u64 = 2;

/// Why bytes are not a block list, or a list was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RunsError {
    /// The bytes end early.
    #[error("the block list is cut short; ask its sender for a new descriptor")]
    Truncated,
    /// Bytes are left over.
    #[error("{extra} bytes follow the block list; it is damaged")]
    Trailing {
        /// How many.
        extra: usize,
    },
    /// An integer, a run or the division into runs is not in its one form.
    #[error("the block list is not in its one form at run {run}; it is damaged")]
    NotCanonical {
        /// Index of the run.
        run: usize,
    },
    /// A run leaves the range of ids.
    #[error("run {run} of the block list leaves the ids up to {max_block_id}; recompute")]
    IdOutOfRange {
        /// Index of the run.
        run: usize,
        /// The highest id accepted.
        max_block_id: u32,
    },
    /// More blocks than accepted.
    #[error("the descriptor names more than {max_blocks} blocks; raise the limit or recompute")]
    TooManyBlocks {
        /// The most accepted.
        max_blocks: u32,
    },
    /// A block lies outside the holder's pool.
    #[error("block {block} is outside the holder's pool of {pool_blocks} blocks; recompute")]
    OutsidePool {
        /// The block.
        block: BlockId,
        /// Blocks in the pool.
        pool_blocks: u32,
    },
}

impl BlockRuns {
    /// Appends the encoding.
    pub fn encode_into(&self, out: &mut Vec<u8>) {
        put_varint(out, u64::try_from(self.runs().len()).unwrap_or(u64::MAX));
        let mut previous = 0_i64;
        for run in self.runs() {
            let first = i64::from(run.first().0);
            put_varint(out, zigzag(first.wrapping_sub(previous)));
            let direction = match run.step() {
                Step::Ascending => 0,
                Step::Descending => 1,
            };
            let steps = u64::from(run.len().saturating_sub(1));
            put_varint(out, steps.wrapping_shl(1) | direction);
            previous = i64::from(run.last().0);
        }
    }

    /// Decodes what [`encode_into`](Self::encode_into) wrote. Allocates at most in proportion to the
    /// bytes given.
    ///
    /// # Errors
    /// [`RunsError`] for every other sequence of bytes, and for lists beyond the limits.
    pub fn decode(bytes: &[u8], limits: &DescriptorLimits) -> Result<Self, RunsError> {
        let mut input = Input::new(bytes);
        let runs = Self::decode_from(&mut input, limits)?;
        match input.remaining() {
            0 => Ok(runs),
            extra => Err(RunsError::Trailing { extra }),
        }
    }

    pub(super) fn decode_from(
        input: &mut Input<'_>,
        limits: &DescriptorLimits,
    ) -> Result<Self, RunsError> {
        let malformed = |run| {
            move |error| match error {
                Malformed::Short => RunsError::Truncated,
                Malformed::Varint => RunsError::NotCanonical { run },
            }
        };
        let count = input.varint().map_err(malformed(0))?;
        let remaining = u64::try_from(input.remaining()).unwrap_or(u64::MAX);
        if count
            .checked_mul(MIN_RUN_BYTES)
            .is_none_or(|n| n > remaining)
        {
            return Err(RunsError::Truncated);
        }
        let count = usize::try_from(count).map_err(|_| RunsError::Truncated)?;
        let mut runs = Self::with_capacity(count);
        let mut blocks_left = limits.max_blocks;
        let mut previous = 0_i64;
        for index in 0..count {
            let distance = unzigzag(input.varint().map_err(malformed(index))?);
            let shape = input.varint().map_err(malformed(index))?;
            let outside = RunsError::IdOutOfRange {
                run: index,
                max_block_id: limits.max_block_id,
            };
            let step = if shape & 1 == 0 {
                Step::Ascending
            } else {
                Step::Descending
            };
            let len = u32::try_from(shape.wrapping_shr(1))
                .ok()
                .and_then(|steps| steps.checked_add(1))
                .ok_or(outside)?;
            blocks_left = blocks_left
                .checked_sub(len)
                .ok_or(RunsError::TooManyBlocks {
                    max_blocks: limits.max_blocks,
                })?;
            let run = previous
                .checked_add(distance)
                .and_then(|first| u32::try_from(first).ok())
                .and_then(|first| BlockRun::new(BlockId(first), len, step))
                .filter(|run| run.highest().0 <= limits.max_block_id)
                .ok_or(outside)?;
            if run.step() != step || !runs.is_fresh(run) {
                return Err(RunsError::NotCanonical { run: index });
            }
            previous = i64::from(run.last().0);
            runs.push_fresh(run);
        }
        Ok(runs)
    }
}

//! The bytes of a block list.
//!
//! A run count as a varint, then one byte with two widths, then for each run two little-endian
//! integers of those widths: the signed distance (zigzag) from the last id of the run before it, 0
//! before the first; and its length less one with the direction in the lowest bit. The widths are the
//! least that hold every run. A run in a pool of up to 2²⁰ blocks takes at most six bytes, a
//! scattered block about three. One list has one encoding.
//!
//! Widths of the whole list instead of varints: a run is then two masked loads, without a branch that
//! would depend on its size.

use thiserror::Error;

use super::limits::DescriptorLimits;
use super::runs::{BlockRun, BlockRuns, Step, to_usize};
use super::wire::{Input, Malformed, put_varint, unzigzag, zigzag};
use crate::ids::BlockId;

/// The widest integer: 33 bits, for the distance between any two ids and for any length.
const MAX_WIDTH: usize = 5;

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
        if self.is_empty() {
            return;
        }
        let (distances, shapes) = integers(self.runs()).fold((0, 0), |(distances, shapes), run| {
            (distances | run.0, shapes | run.1)
        });
        let widths = Widths::of(distances, shapes);
        out.push(widths.to_byte());
        // Each integer is written as a word and overwritten from its own end on by the next one.
        let start = out.len();
        let bytes = self.runs().len().saturating_mul(widths.sum());
        let end = start.saturating_add(bytes);
        out.resize(end.saturating_add(8), 0);
        let mut rest = out.get_mut(start..).unwrap_or_default();
        for (distance, shape) in integers(self.runs()) {
            rest = put_word(rest, distance, widths.distance);
            if widths.shape > 0 {
                rest = put_word(rest, shape, widths.shape);
            }
        }
        out.truncate(end);
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
        if count == 0 {
            return Ok(Self::new());
        }
        let widths = Widths::from_byte(input.u8().map_err(malformed(0))?)
            .ok_or(RunsError::NotCanonical { run: 0 })?;
        let count = usize::try_from(count).map_err(|_| RunsError::Truncated)?;
        let bytes = count
            .checked_mul(widths.sum())
            .and_then(|bytes| input.take(bytes).ok())
            .ok_or(RunsError::Truncated)?;
        // The bytes are there, at least one for each run: only now is room made for them.
        if widths.shape == 0 {
            decode_runs::<false>(bytes, count, widths, limits)
        } else {
            decode_runs::<true>(bytes, count, widths, limits)
        }
    }
}

/// Decodes the runs themselves. Twice in the program: scattered lists have no shapes, and take half
/// the time without them.
fn decode_runs<const SHAPED: bool>(
    bytes: &[u8],
    count: usize,
    widths: Widths,
    limits: &DescriptorLimits,
) -> Result<BlockRuns, RunsError> {
    let mut runs = Vec::with_capacity(count);
    let mut ends = Vec::with_capacity(count);
    let mut end = 0_usize;
    let mut blocks_left = limits.max_blocks;
    let mut previous = 0_i64;
    let (mut distances, mut shapes) = (0, 0);
    let mut rest = bytes;
    for index in 0..count {
        let distance;
        (distance, rest) = take_word(rest, widths.distance);
        let mut shape = 0;
        if SHAPED {
            (shape, rest) = take_word(rest, widths.shape);
        }
        distances |= distance;
        shapes |= shape;
        let distance = unzigzag(distance);
        let outside = || RunsError::IdOutOfRange {
            run: index,
            max_block_id: limits.max_block_id,
        };
        let first = u32::try_from(previous.wrapping_add(distance).cast_unsigned())
            .ok()
            .filter(|first| *first <= limits.max_block_id)
            .ok_or_else(outside)?;
        // Most runs of a scattered list are one block, and need no more than the above.
        let run = match shape {
            0 => BlockRun::single(BlockId(first)),
            _ => run_of(first, shape)
                .filter(|run| run.highest().0 <= limits.max_block_id)
                .ok_or_else(outside)?,
        };
        blocks_left = blocks_left
            .checked_sub(run.len())
            .ok_or(RunsError::TooManyBlocks {
                max_blocks: limits.max_blocks,
            })?;
        // A list that could be written with fewer runs, or one block that descends.
        let neighbour = matches!(distance, 1 | -1);
        if shape == 1
            || (neighbour
                && runs
                    .last()
                    .is_some_and(|last: &BlockRun| last.is_continued_by(run)))
        {
            return Err(RunsError::NotCanonical { run: index });
        }
        previous = i64::from(run.last().0);
        end = end.saturating_add(to_usize(run.len()));
        runs.push(run);
        ends.push(end);
    }
    if Widths::of(distances, shapes) != widths {
        return Err(RunsError::NotCanonical { run: 0 });
    }
    Ok(BlockRuns::from_parts(runs, ends))
}

/// How many bytes the two integers of each run take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Widths {
    /// At least one, so that every run takes a byte.
    distance: usize,
    /// Zero where every run is one block.
    shape: usize,
}

impl Widths {
    /// The least widths that hold all distances and all shapes, or-ed together.
    fn of(distances: u64, shapes: u64) -> Self {
        let width = |bits: u64| {
            let bits = 64_u32.wrapping_sub(bits.leading_zeros());
            usize::try_from(bits.div_ceil(8)).unwrap_or(MAX_WIDTH)
        };
        Self {
            distance: width(distances).max(1),
            shape: width(shapes),
        }
    }

    fn to_byte(self) -> u8 {
        let nibble = |width: usize| u8::try_from(width).unwrap_or(0x0f);
        nibble(self.distance) | nibble(self.shape).wrapping_shl(4)
    }

    fn from_byte(byte: u8) -> Option<Self> {
        let (distance, shape) = (usize::from(byte & 0x0f), usize::from(byte.wrapping_shr(4)));
        ((1..=MAX_WIDTH).contains(&distance) && shape <= MAX_WIDTH)
            .then_some(Self { distance, shape })
    }

    fn sum(self) -> usize {
        self.distance.saturating_add(self.shape)
    }
}

/// The two integers of each run.
fn integers(runs: &[BlockRun]) -> impl Iterator<Item = (u64, u64)> + '_ {
    let mut previous = 0_i64;
    runs.iter().map(move |run| {
        let distance = zigzag(i64::from(run.first().0).wrapping_sub(previous));
        previous = i64::from(run.last().0);
        let direction = match run.step() {
            Step::Ascending => 0,
            Step::Descending => 1,
        };
        let steps = u64::from(run.len().saturating_sub(1));
        (distance, steps.wrapping_shl(1) | direction)
    })
}

/// The run from `first` of this shape.
fn run_of(first: u32, shape: u64) -> Option<BlockRun> {
    let step = if shape & 1 == 0 {
        Step::Ascending
    } else {
        Step::Descending
    };
    let steps = u32::try_from(shape.wrapping_shr(1)).ok()?;
    BlockRun::new(BlockId(first), steps.checked_add(1)?, step)
}

/// Writes a whole word and returns what comes after its first `width` bytes.
#[inline]
fn put_word(place: &mut [u8], value: u64, width: usize) -> &mut [u8] {
    if let Some(word) = place.first_chunk_mut() {
        *word = value.to_le_bytes();
    }
    place.get_mut(width..).unwrap_or_default()
}

/// Reads an integer of `width` bytes, at most [`MAX_WIDTH`], and returns what comes after it.
#[inline]
fn take_word(from: &[u8], width: usize) -> (u64, &[u8]) {
    let word = match from.first_chunk() {
        Some(word) => *word,
        None => {
            // The last words of the list: pad them.
            let mut word = [0; 8];
            for (to, byte) in word.iter_mut().zip(from) {
                *to = *byte;
            }
            word
        }
    };
    let bits = u32::try_from(width).unwrap_or(0).wrapping_mul(8);
    let mask = 1_u64.wrapping_shl(bits).wrapping_sub(1);
    (
        u64::from_le_bytes(word) & mask,
        from.get(width..).unwrap_or_default(),
    )
}

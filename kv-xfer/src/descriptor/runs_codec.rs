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
use super::runs::{BlockRun, BlockRuns, Step};
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
        self.encode_with(self.widths(), out);
    }

    /// The widths that the encoding takes.
    pub(super) fn widths(&self) -> Widths {
        // What most lists are, runs of one block with ids of 31 bits, takes a few vector operations.
        let (mut ids, mut shapes, mut distances) = (0, 0, 0);
        let mut last = BlockId(0);
        for run in self.runs() {
            ids |= run.first().0;
            shapes |= run.first().0 ^ run.last().0;
            distances |= short_distance(last, run.first());
            last = run.last();
        }
        if ids <= LONGEST_SHORT && shapes == 0 {
            return Widths::of(u64::from(distances), 0);
        }
        let (distances, shapes) = integers(self.runs()).fold((0, 0), |(distances, shapes), run| {
            (distances | run.0, shapes | run.1)
        });
        Widths::of(distances, shapes)
    }

    /// Appends the encoding, of the list's own [`widths`](Self::widths).
    pub(super) fn encode_with(&self, widths: Widths, out: &mut Vec<u8>) {
        put_varint(out, u64::try_from(self.runs().len()).unwrap_or(u64::MAX));
        if self.is_empty() {
            return;
        }
        out.push(widths.to_byte());
        let start = out.len();
        out.resize(start.saturating_add(widths.bytes(self.runs().len())), 0);
        let place = out.get_mut(start..).unwrap_or_default();
        match widths {
            Widths {
                distance: 1,
                shape: 0,
            } => put_scattered::<1>(self.runs(), place),
            Widths {
                distance: 2,
                shape: 0,
            } => put_scattered::<2>(self.runs(), place),
            Widths {
                distance: 3,
                shape: 0,
            } => put_scattered::<3>(self.runs(), place),
            Widths {
                distance: 4,
                shape: 0,
            } => put_scattered::<4>(self.runs(), place),
            _ => {
                let mut rest = place;
                for (distance, shape) in integers(self.runs()) {
                    rest = put_word(rest, distance, widths.distance);
                    rest = put_word(rest, shape, widths.shape);
                }
            }
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
        let scattered = match widths {
            Widths {
                distance: 1,
                shape: 0,
            } => take_scattered::<1>(bytes, limits),
            Widths {
                distance: 2,
                shape: 0,
            } => take_scattered::<2>(bytes, limits),
            Widths {
                distance: 3,
                shape: 0,
            } => take_scattered::<3>(bytes, limits),
            Widths {
                distance: 4,
                shape: 0,
            } => take_scattered::<4>(bytes, limits),
            _ => None,
        };
        match scattered {
            Some(runs) => Ok(runs),
            None => decode_runs(bytes, count, widths, limits),
        }
    }
}

/// The highest id of 31 bits. Distances between ids up to it take 32 bits.
const LONGEST_SHORT: u32 = u32::MAX >> 1;

/// The zigzag distance between ids of 31 bits.
#[inline]
fn short_distance(from: BlockId, to: BlockId) -> u32 {
    let distance = to.0.wrapping_sub(from.0).cast_signed();
    (distance.wrapping_shl(1) ^ distance.wrapping_shr(31)).cast_unsigned()
}

/// Writes distances of `W` bytes, for runs of one block.
fn put_scattered<const W: usize>(runs: &[BlockRun], place: &mut [u8]) {
    let (places, _) = place.as_chunks_mut::<W>();
    let mut previous = 0;
    for (place, run) in places.iter_mut().zip(runs) {
        let id = i64::from(run.first().0);
        let distance = zigzag(id.wrapping_sub(previous));
        previous = id;
        if let Some(low) = distance.to_le_bytes().first_chunk() {
            *place = *low;
        }
    }
}

/// Decodes a list whose runs are all one block, from distances of `W` bytes. What is wrong is noted
/// and looked at in the end. `None` when anything is, or may be: [`decode_runs`] says what.
fn take_scattered<const W: usize>(bytes: &[u8], limits: &DescriptorLimits) -> Option<BlockRuns> {
    let (distances, _) = bytes.as_chunks::<W>();
    if u32::try_from(distances.len()).ok()? > limits.max_blocks
        || limits.max_block_id > LONGEST_SHORT
    {
        return None;
    }
    let mut all = 0_u32;
    let mut wrong = false;
    let mut id = 0_u32;
    let mut runs = vec![BlockRun::single(BlockId(0)); distances.len()];
    for (run, bytes) in runs.iter_mut().zip(distances) {
        let distance = bytes
            .iter()
            .rev()
            .fold(0_u32, |word, byte| word.wrapping_shl(8) | u32::from(*byte));
        all |= distance;
        // From an id of 31 bits, every step out of them ends above them.
        id = id.wrapping_add(distance.wrapping_shr(1) ^ (distance & 1).wrapping_neg());
        wrong |= id > limits.max_block_id;
        // One up or down would be a run of two blocks, or more. (Not at the first id, but this is rare.)
        wrong |= distance.wrapping_sub(1) < 2;
        *run = BlockRun::single(BlockId(id));
    }
    (!wrong && Widths::of(u64::from(all), 0).distance == W).then(|| BlockRuns::of_singles(runs))
}

/// Decodes any list, one run after the other, and says what is wrong with it.
fn decode_runs(
    bytes: &[u8],
    count: usize,
    widths: Widths,
    limits: &DescriptorLimits,
) -> Result<BlockRuns, RunsError> {
    let mut runs: Vec<BlockRun> = Vec::with_capacity(count);
    let mut blocks_left = limits.max_blocks;
    let mut previous = 0_i64;
    let (mut distances, mut shapes) = (0, 0);
    let mut rest = bytes;
    for index in 0..count {
        let (distance, shape);
        (distance, rest) = take_word(rest, widths.distance);
        (shape, rest) = take_word(rest, widths.shape);
        distances |= distance;
        shapes |= shape;
        let distance = unzigzag(distance);
        let outside = || RunsError::IdOutOfRange {
            run: index,
            max_block_id: limits.max_block_id,
        };
        let run = u32::try_from(previous.wrapping_add(distance).cast_unsigned())
            .ok()
            .and_then(|first| run_of(first, shape))
            .filter(|run| run.highest().0 <= limits.max_block_id)
            .ok_or_else(outside)?;
        blocks_left = blocks_left
            .checked_sub(run.len())
            .ok_or(RunsError::TooManyBlocks {
                max_blocks: limits.max_blocks,
            })?;
        // A list that could be written with fewer runs, or one block that descends.
        if shape == 1
            || runs
                .last()
                .is_some_and(|last| last.is_continued_by(run.first()))
        {
            return Err(RunsError::NotCanonical { run: index });
        }
        previous = i64::from(run.last().0);
        runs.push(run);
    }
    if Widths::of(distances, shapes) != widths {
        return Err(RunsError::NotCanonical { run: 0 });
    }
    Ok(BlockRuns::from_runs(runs))
}

/// How many bytes the two integers of each run take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Widths {
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

    /// Bytes of that many runs.
    pub(super) fn bytes(self, runs: usize) -> usize {
        runs.saturating_mul(self.sum())
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

/// Writes the low `width` bytes of a word and returns what comes after them.
#[inline]
fn put_word(place: &mut [u8], value: u64, width: usize) -> &mut [u8] {
    let (place, rest) = place.split_at_mut_checked(width).unwrap_or_default();
    for (byte, value) in place.iter_mut().zip(value.to_le_bytes()) {
        *byte = value;
    }
    rest
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Both ways of reading distances of `W` bytes agree, but for a first one that is left to the
    /// slow way.
    fn agree<const W: usize>(bytes: &[u8], limits: &DescriptorLimits) -> Result<(), TestCaseError> {
        let (words, _) = bytes.as_chunks::<W>();
        let widths = Widths {
            distance: W,
            shape: 0,
        };
        let bytes = words.as_flattened();
        let slow = decode_runs(bytes, words.len(), widths, limits).ok();
        let first = words.first().map(|word| word.map(u32::from));
        let rare = first.is_some_and(|word| matches!(word.iter().sum(), 1 | 2));
        match take_scattered::<W>(bytes, limits) {
            None if rare => {}
            quick => prop_assert_eq!(quick, slow),
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn scattered_lists_are_read_alike(
            bytes in prop::collection::vec(prop_oneof![any::<u8>(), 0_u8..4], 1..200),
            max_block_id in prop_oneof![0_u32..1 << 20, Just(LONGEST_SHORT), any::<u32>()],
            max_blocks in 0_u32..200,
        ) {
            let limits = DescriptorLimits {
                max_blocks,
                max_block_id: max_block_id.min(LONGEST_SHORT),
                ..DescriptorLimits::default()
            };
            agree::<1>(&bytes, &limits)?;
            agree::<2>(&bytes, &limits)?;
            agree::<3>(&bytes, &limits)?;
            agree::<4>(&bytes, &limits)?;
        }

        #[test]
        fn scattered_lists_round_trip(
            ids in prop::collection::vec(0_u32..=LONGEST_SHORT, 1..200),
            shift in 0_u32..31,
        ) {
            let runs: BlockRuns = ids.into_iter().map(|id| BlockId(id >> shift)).collect();
            let mut bytes = Vec::new();
            runs.encode_into(&mut bytes);
            prop_assert_eq!(BlockRuns::decode(&bytes, &DescriptorLimits::default()), Ok(runs));
        }
    }
}

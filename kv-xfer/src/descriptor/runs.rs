//! Block ids as runs: what one descriptor can move, and a compact way to write a list down.

use std::fmt;
use std::ops::Range;

use super::runs_codec::RunsError;
use crate::ids::BlockId;

/// Which way a run's ids go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// Each id is one above the id before it. A run of one block counts as ascending.
    Ascending,
    /// Each id is one below the id before it. Allocators that free in reverse order hand these out.
    Descending,
}

impl Step {
    /// The id `n` steps after `id`; `None` outside the 32-bit range.
    #[inline]
    fn after(self, id: u32, n: u32) -> Option<u32> {
        match self {
            Self::Ascending => id.checked_add(n),
            Self::Descending => id.checked_sub(n),
        }
    }

    /// The step from one id to the next, if they are neighbours.
    #[inline]
    fn between(id: u32, next: u32) -> Option<Self> {
        if id.checked_add(1) == Some(next) {
            Some(Self::Ascending)
        } else if id.checked_sub(1) == Some(next) {
            Some(Self::Descending)
        } else {
            None
        }
    }
}

/// Consecutive block ids. Fields are read-only so that a run always lies inside the id range.
///
/// Its two ends say all: which way it goes, and how long it is. At most `u32::MAX` blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockRun {
    first: BlockId,
    last: BlockId,
}

impl BlockRun {
    /// A run of `len` blocks from `first`. A run of one block is ascending, whatever is asked for.
    /// `None` when it is empty or leaves the range of ids.
    #[must_use]
    #[inline]
    pub fn new(first: BlockId, len: u32, step: Step) -> Option<Self> {
        let last = step.after(first.0, len.checked_sub(1)?)?;
        Some(Self {
            first,
            last: BlockId(last),
        })
    }

    #[inline]
    pub(super) fn single(id: BlockId) -> Self {
        Self {
            first: id,
            last: id,
        }
    }

    /// The first id of the run, in list order.
    #[must_use]
    #[inline]
    pub fn first(self) -> BlockId {
        self.first
    }

    /// The last id of the run, in list order.
    #[must_use]
    #[inline]
    pub fn last(self) -> BlockId {
        self.last
    }

    /// Number of blocks; at least one.
    #[must_use]
    #[allow(clippy::len_without_is_empty)] // A run is never empty.
    #[inline]
    pub fn len(self) -> u32 {
        self.first.0.abs_diff(self.last.0).saturating_add(1)
    }

    /// Which way the ids go.
    #[must_use]
    #[inline]
    pub fn step(self) -> Step {
        if self.first <= self.last {
            Step::Ascending
        } else {
            Step::Descending
        }
    }

    /// The lowest id of the run.
    #[must_use]
    #[inline]
    pub fn lowest(self) -> BlockId {
        self.first.min(self.last)
    }

    /// The highest id of the run.
    #[must_use]
    #[inline]
    pub fn highest(self) -> BlockId {
        self.first.max(self.last)
    }

    /// The id at `index`; `None` past the end.
    #[must_use]
    pub fn get(self, index: u32) -> Option<BlockId> {
        (index < self.len()).then(|| self.at(index))
    }

    /// The ids in list order.
    pub fn iter(self) -> impl Iterator<Item = BlockId> {
        (0..self.len()).map(move |index| self.at(index))
    }

    /// The id at an index below the length; in range, as was checked when the run was made.
    #[inline]
    fn at(self, index: u32) -> BlockId {
        BlockId(match self.step() {
            Step::Ascending => self.first.0.saturating_add(index),
            Step::Descending => self.first.0.saturating_sub(index),
        })
    }

    /// The `len` blocks from `start`; `None` when they are not all in the run, or are none.
    fn part(self, start: u32, len: u32) -> Option<Self> {
        if start.checked_add(len)? > self.len() {
            return None;
        }
        Self::new(self.get(start)?, len, self.step())
    }

    /// Whether `next` continues this run. So it also tells whether a run that starts with `next`
    /// would make two of what is one.
    #[inline]
    pub(super) fn is_continued_by(self, next: BlockId) -> bool {
        is_neighbour(self.last, next)
            && Step::between(self.last.0, next.0)
                .is_some_and(|step| self.first == self.last || step == self.step())
            && self.len() < u32::MAX
    }
}

/// The last of the ids that make a run with `first`, and the ids after it.
fn run_end(first: BlockId, rest: &[BlockId]) -> (BlockId, &[BlockId]) {
    let step = rest.first().and_then(|next| Step::between(first.0, next.0));
    let Some(step) = step else {
        return (first, rest);
    };
    let mut expected = Some(first.0);
    let steps = rest
        .iter()
        .take_while(|next| {
            expected = expected.and_then(|id| step.after(id, 1));
            expected == Some(next.0)
        })
        .take(to_usize(u32::MAX.saturating_sub(1)))
        .count();
    let (run, rest) = rest.split_at_checked(steps).unwrap_or((rest, &[]));
    (run.last().copied().unwrap_or(first), rest)
}

/// Whether the ids are neighbours, or the highest and the lowest of all: cheap, and almost exact.
#[inline]
fn is_neighbour(id: BlockId, next: BlockId) -> bool {
    // The distance and one: 0 going down, 2 going up.
    next.0.wrapping_sub(id.0).wrapping_add(1) & !2 == 0
}

/// A list of block ids in order, held as runs. Equal lists have equal runs: ids join the run before
/// them whenever they can.
///
/// ```
/// use kv_xfer::descriptor::BlockRuns;
/// use kv_xfer::ids::BlockId;
///
/// let ids = [7, 8, 9, 4, 3, 2, 11].map(BlockId);
/// let runs = BlockRuns::from_ids(&ids);
/// assert_eq!(runs.runs().len(), 3);
/// assert!(runs.iter().eq(ids));
/// assert_eq!(runs.get(4), Some(BlockId(3)));
/// ```
#[derive(Clone, Default, PartialEq, Eq)]
pub struct BlockRuns {
    runs: Vec<BlockRun>,
    /// Number of blocks.
    len: usize,
    /// How many blocks there are before every [`MARK_EVERY`]th run, from the first one on. Makes
    /// `get` a binary search, and takes next to no memory.
    marks: Vec<usize>,
}

/// Runs from one mark to the next.
const MARK_EVERY: usize = 32;

impl BlockRuns {
    /// An empty list.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The list of these ids, in this order. Duplicates are kept.
    #[must_use]
    pub fn from_ids(ids: &[BlockId]) -> Self {
        // Room for nearly all runs, and no more: one that turns back at its end counts as none here.
        let pairs = ids.iter().zip(ids.iter().skip(1));
        let breaks = pairs
            .filter(|(id, next)| !is_neighbour(**id, **next))
            .count();
        let room = breaks.saturating_add(1).min(ids.len());
        if room == ids.len() {
            return Self::of_singles(ids.iter().copied().map(BlockRun::single).collect());
        }
        let mut runs = Vec::with_capacity(room);
        let mut rest = ids;
        while let Some((&first, after)) = rest.split_first() {
            let (last, after) = run_end(first, after);
            runs.push(BlockRun { first, last });
            rest = after;
        }
        Self::from_runs(runs)
    }

    /// Number of blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when there are no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The runs, in list order.
    #[must_use]
    pub fn runs(&self) -> &[BlockRun] {
        &self.runs
    }

    /// The ids, in list order.
    pub fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.runs.iter().flat_map(|run| run.iter())
    }

    /// The id at `index`; `None` past the end. Costs a binary search over the runs, nearly.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<BlockId> {
        let (run, within) = self.locate(index)?;
        self.runs.get(run)?.get(within)
    }

    /// The first `n` blocks, or all of them where there are fewer.
    #[must_use]
    pub fn first_n(&self, n: usize) -> Self {
        self.slice(0..n.min(self.len())).unwrap_or_default()
    }

    /// The blocks at `range`; `None` when it reaches past the end. Costs per run, not per block.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.len() {
            return None;
        }
        let mut out = Self::new();
        let mut left = range.end.saturating_sub(range.start);
        if left == 0 {
            return Some(out);
        }
        let (first, mut skip) = self.locate(range.start)?;
        let (last, _) = self.locate(range.end.checked_sub(1)?)?;
        for (index, run) in self.runs.iter().enumerate().skip(first) {
            if index < last
                && index > first
                && out.runs.last() == self.runs.get(index.checked_sub(1)?)
            {
                // The run before came through whole, so none up to the last joins another: the rest
                // is copied as it stands.
                out.append_runs(self.runs.get(index..last)?);
                let take = range.end.checked_sub(range.start)?.checked_sub(out.len)?;
                out.push_run(self.runs.get(last)?.part(0, u32::try_from(take).ok()?)?);
                break;
            }
            let available = run.len().checked_sub(skip)?;
            let take = u32::try_from(left).unwrap_or(u32::MAX).min(available);
            out.push_run(run.part(skip, take)?);
            left = left.saturating_sub(usize::try_from(take).ok()?);
            skip = 0;
            if left == 0 {
                break;
            }
        }
        Some(out)
    }

    /// The highest id; `None` when there are no blocks.
    #[must_use]
    pub fn max_id(&self) -> Option<BlockId> {
        self.runs.iter().map(|run| run.highest()).max()
    }

    /// Checks that every block lies in a pool of `pool_blocks` blocks. Costs per run.
    ///
    /// # Errors
    /// [`RunsError::OutsidePool`] with the first run's offending id.
    pub fn check_within(&self, pool_blocks: u32) -> Result<(), RunsError> {
        match self
            .runs
            .iter()
            .map(|run| run.highest())
            .find(|id| id.0 >= pool_blocks)
        {
            Some(block) => Err(RunsError::OutsidePool { block, pool_blocks }),
            None => Ok(()),
        }
    }

    /// Appends runs that join neither each other nor what is there.
    fn append_runs(&mut self, runs: &[BlockRun]) {
        self.runs.reserve(runs.len());
        for run in runs {
            self.push_fresh(*run);
        }
    }

    /// Appends one id.
    #[inline]
    pub fn push(&mut self, id: BlockId) {
        if let Some(last) = self.runs.last_mut()
            && last.is_continued_by(id)
        {
            last.last = id;
            self.len = self.len.saturating_add(1);
            return;
        }
        self.push_fresh(BlockRun::single(id));
    }

    /// Appends the ids of a run, joining them to the last run where they continue it.
    pub fn push_run(&mut self, run: BlockRun) {
        self.push(run.first);
        let Some(rest) = run.len().checked_sub(1).and_then(|n| run.part(1, n)) else {
            return;
        };
        // Having taken the first id, the last run takes all of the rest or none of it: it takes the
        // first of them only when it goes the same way, or is that one id.
        if let Some(last) = self.runs.last_mut()
            && last.is_continued_by(rest.first)
            && last.len().checked_add(rest.len()).is_some()
        {
            last.last = rest.last;
            self.len = self.len.saturating_add(to_usize(rest.len()));
            return;
        }
        self.push_fresh(rest);
    }

    /// Appends a run that does not continue the last one.
    fn push_fresh(&mut self, run: BlockRun) {
        if self.runs.len().is_multiple_of(MARK_EVERY) {
            self.marks.push(self.len);
        }
        self.runs.push(run);
        self.len = self.len.saturating_add(to_usize(run.len()));
    }

    /// A list of runs of which none continues the one before it.
    pub(super) fn from_runs(runs: Vec<BlockRun>) -> Self {
        let mut marks = Vec::with_capacity(runs.len().div_ceil(MARK_EVERY));
        let mut len = 0_usize;
        for some in runs.chunks(MARK_EVERY) {
            marks.push(len);
            len = some
                .iter()
                .fold(len, |sum, run| sum.saturating_add(to_usize(run.len())));
        }
        Self { runs, len, marks }
    }

    /// A list of runs of one block each, of which none continues the one before it.
    pub(super) fn of_singles(runs: Vec<BlockRun>) -> Self {
        let len = runs.len();
        Self {
            runs,
            len,
            marks: (0..len).step_by(MARK_EVERY).collect(),
        }
    }

    /// The run that holds the block at `index`, and the block's place in it.
    fn locate(&self, index: usize) -> Option<(usize, u32)> {
        let mark = self.marks.partition_point(|&before| before <= index);
        let mark = mark.checked_sub(1)?;
        let start = mark.checked_mul(MARK_EVERY)?;
        let mut within = index.checked_sub(*self.marks.get(mark)?)?;
        for (place, run) in self.runs.get(start..)?.iter().take(MARK_EVERY).enumerate() {
            match within.checked_sub(to_usize(run.len())) {
                Some(left) => within = left,
                None => return Some((start.checked_add(place)?, u32::try_from(within).ok()?)),
            }
        }
        None
    }
}

pub(super) fn to_usize(n: u32) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

impl FromIterator<BlockId> for BlockRuns {
    fn from_iter<I: IntoIterator<Item = BlockId>>(ids: I) -> Self {
        let mut out = Self::new();
        for id in ids {
            out.push(id);
        }
        out
    }
}

/// Writes runs, not ids: `7..=9, 4..=2, 11`.
impl fmt::Debug for BlockRuns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BlockRuns[")?;
        for (index, run) in self.runs.iter().enumerate() {
            if index > 0 {
                f.write_str(", ")?;
            }
            match run.len() {
                1 => write!(f, "{}", run.first)?,
                _ => write!(f, "{}..={}", run.first, run.last())?,
            }
        }
        f.write_str("]")
    }
}

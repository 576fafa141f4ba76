//! Runs: blocks that follow each other on both sides.

use super::{PlanError, Side};
use crate::descriptor::{BlockRun, BlockRuns};
use crate::ids::BlockId;

/// `len` pairs of blocks: `remote_first + i` is read into `local_first + i`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PairRun {
    /// First block at the holder.
    pub remote_first: BlockId,
    /// First block here.
    pub local_first: BlockId,
    /// How many blocks; at least one.
    pub len: u32,
}

/// What the block lists come to.
#[derive(Debug)]
pub(super) struct Runs {
    pub(super) runs: Vec<PairRun>,
    pub(super) longest: u32,
    pub(super) max_remote: u32,
    pub(super) max_local: u32,
}

/// The order that the pairs are given in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Ascending,
    Descending,
    Mixed,
}

/// Checks the pairs and cuts them into runs, ascending by remote block.
pub(super) fn find(
    remote: &[BlockId],
    local: &[BlockId],
    remote_count: u32,
    local_count: u32,
) -> Result<Runs, PlanError> {
    if remote.len() != local.len() {
        return Err(PlanError::LengthMismatch {
            remote: remote.len(),
            local: local.len(),
        });
    }
    if u32::try_from(remote.len()).is_err() {
        return Err(PlanError::TooManyBlocks {
            blocks: remote.len(),
        });
    }
    let in_remote = bounds(Side::Remote, remote, remote_count)?;
    let in_local = bounds(Side::Local, local, local_count)?;
    let pairs = || remote.iter().copied().zip(local.iter().copied());
    let mut out = Merger::default();
    match order(remote) {
        Order::Ascending => pairs().for_each(|p| out.add(p)),
        Order::Descending => pairs().rev().for_each(|p| out.add(p)),
        Order::Mixed => match by_place(remote, local, in_remote) {
            Some(table) => {
                let present = (in_remote.min..).zip(table).filter(|(_, l)| *l != ABSENT);
                present.for_each(|(r, l)| out.add((BlockId(r), BlockId(l))));
            }
            None => {
                let mut keys: Vec<u64> = pairs().map(pack).collect();
                keys.sort_unstable();
                keys.into_iter().for_each(|key| out.add(unpack(key)));
            }
        },
    }
    let runs = out.finish();
    refuse_duplicates(&runs, in_local, local.len())?;
    let longest = runs.iter().map(|r| r.len).max().unwrap_or(0);
    Ok(Runs {
        runs,
        longest,
        max_remote: in_remote.max,
        max_local: in_local.max,
    })
}

/// Lists with more runs than one for so many blocks are planned block by block.
const BLOCKS_PER_RUN: usize = 4;

/// Like [`find`], in time that follows the runs of the lists rather than their blocks.
pub(super) fn find_in_runs(
    remote: &BlockRuns,
    local: &BlockRuns,
    remote_count: u32,
    local_count: u32,
) -> Result<Runs, PlanError> {
    let blocks = remote.len();
    let runs = remote.runs().len().saturating_add(local.runs().len());
    // Whatever is wrong with the lists is found and named there.
    if blocks != local.len()
        || u32::try_from(blocks).is_err()
        || runs.saturating_mul(BLOCKS_PER_RUN) > blocks
    {
        let remote: Vec<BlockId> = collect(remote);
        let local: Vec<BlockId> = collect(local);
        return find(&remote, &local, remote_count, local_count);
    }
    let in_remote = bounds_of_runs(Side::Remote, remote, remote_count)?;
    let in_local = bounds_of_runs(Side::Local, local, local_count)?;
    let mut pieces = Vec::with_capacity(runs);
    let (mut theirs, mut ours) = (Walk::new(remote), Walk::new(local));
    while let (Some(a), Some(b)) = (theirs.rest(), ours.rest()) {
        let len = a.len().min(b.len());
        pair_up(theirs.take(a, len), ours.take(b, len), &mut pieces);
    }
    pieces.sort_unstable_by_key(|run| (run.remote_first, run.local_first));
    let mut out = Merger::default();
    pieces.into_iter().for_each(|run| out.add_run(run));
    let runs = out.finish();
    refuse_duplicates(&runs, in_local, blocks)?;
    let longest = runs.iter().map(|r| r.len).max().unwrap_or(0);
    Ok(Runs {
        runs,
        longest,
        max_remote: in_remote.max,
        max_local: in_local.max,
    })
}

fn collect(runs: &BlockRuns) -> Vec<BlockId> {
    let mut ids = Vec::with_capacity(runs.len());
    ids.extend(runs.iter());
    ids
}

fn bounds_of_runs(side: Side, blocks: &BlockRuns, count: u32) -> Result<Bounds, PlanError> {
    let ends = |run: &BlockRun| [run.lowest(), run.highest()];
    let ends: Vec<BlockId> = blocks.runs().iter().flat_map(ends).collect();
    bounds(side, &ends, count)
}

/// Goes along a list of runs in pieces of any length.
struct Walk<'a> {
    runs: std::slice::Iter<'a, BlockRun>,
    rest: Option<BlockRun>,
}

impl<'a> Walk<'a> {
    fn new(blocks: &'a BlockRuns) -> Self {
        let mut runs = blocks.runs().iter();
        let rest = runs.next().copied();
        Self { runs, rest }
    }

    fn rest(&self) -> Option<BlockRun> {
        self.rest
    }

    /// The first `len` blocks of what is left of the present run.
    fn take(&mut self, rest: BlockRun, len: u32) -> BlockRun {
        let left = rest.len().saturating_sub(len);
        let next = rest.get(len);
        self.rest = next
            .and_then(|first| BlockRun::new(first, left, rest.step()))
            .or_else(|| self.runs.next().copied());
        BlockRun::new(rest.first(), len, rest.step()).unwrap_or(rest)
    }
}

/// Pairs two runs of one length.
fn pair_up(remote: BlockRun, local: BlockRun, out: &mut Vec<PairRun>) {
    let len = remote.len();
    let same_way = remote.step() == local.step() || len == 1;
    if same_way {
        out.push(PairRun {
            remote_first: remote.lowest(),
            local_first: local.lowest(),
            len,
        });
        return;
    }
    let pairs = remote.iter().zip(local.iter());
    out.extend(pairs.map(|(remote_first, local_first)| PairRun {
        remote_first,
        local_first,
        len: 1,
    }));
}

/// The block ids of a list.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    min: u32,
    max: u32,
}

impl Bounds {
    /// How many ids lie between, if a table of them is no more than `limit` long: one that is much
    /// longer than the list costs more than sorting does.
    fn span(self, limit: usize) -> Option<usize> {
        let span = usize::try_from(self.max - self.min).ok()?;
        (span < limit).then(|| span + 1)
    }

    fn place(self, id: u32) -> Option<usize> {
        usize::try_from(id.checked_sub(self.min)?).ok()
    }
}

/// Smallest and largest block, both inside the pool.
fn bounds(side: Side, blocks: &[BlockId], count: u32) -> Result<Bounds, PlanError> {
    let (min, max) = blocks
        .iter()
        .fold((u32::MAX, 0), |(lo, hi), b| (lo.min(b.0), hi.max(b.0)));
    if blocks.is_empty() {
        return Err(PlanError::NoBlocks);
    }
    if max >= count {
        return Err(PlanError::BlockOutOfRange {
            side,
            block: BlockId(max),
            blocks: count,
        });
    }
    Ok(Bounds { min, max })
}

fn order(blocks: &[BlockId]) -> Order {
    if blocks.is_sorted() {
        Order::Ascending
    } else if blocks.is_sorted_by(|a, b| a >= b) {
        Order::Descending
    } else {
        Order::Mixed
    }
}

/// No local block. No pool has a block of this id: ids are below its block count.
const ABSENT: u32 = u32::MAX;

/// The local block of every remote one from `within.min` on, which sorts in two passes. `None` when
/// the remote blocks are too far apart for it, or one is there twice.
fn by_place(remote: &[BlockId], local: &[BlockId], within: Bounds) -> Option<Vec<u32>> {
    let mut table = vec![ABSENT; within.span(remote.len().saturating_mul(8))?];
    for (r, l) in remote.iter().zip(local) {
        let entry = table.get_mut(within.place(r.0)?)?;
        if *entry != ABSENT {
            return None;
        }
        *entry = l.0;
    }
    Some(table)
}

fn pack((remote, local): (BlockId, BlockId)) -> u64 {
    (u64::from(remote.0) << 32) | u64::from(local.0)
}

fn unpack(key: u64) -> (BlockId, BlockId) {
    let low = |x: u64| BlockId(u32::try_from(x & u64::from(u32::MAX)).unwrap_or(u32::MAX));
    (low(key >> 32), low(key))
}

/// Joins pairs that continue the run before them.
#[derive(Debug, Default)]
struct Merger {
    runs: Vec<PairRun>,
    open: Option<PairRun>,
}

impl Merger {
    #[inline]
    fn add(&mut self, (remote_first, local_first): (BlockId, BlockId)) {
        self.add_run(PairRun {
            remote_first,
            local_first,
            len: 1,
        });
    }

    #[inline]
    fn add_run(&mut self, next: PairRun) {
        if let Some(run) = &mut self.open {
            let follows =
                |first: BlockId, next: BlockId| next.0.checked_sub(first.0) == Some(run.len);
            if follows(run.remote_first, next.remote_first)
                && follows(run.local_first, next.local_first)
            {
                // At most as many as there are pairs, which fits.
                run.len = run.len.saturating_add(next.len);
                return;
            }
            self.runs.push(*run);
        }
        self.open = Some(next);
    }

    fn finish(mut self) -> Vec<PairRun> {
        self.runs.extend(self.open);
        self.runs
    }
}

/// Makes sure that no local block is in two runs. Within a run there are no duplicates.
fn refuse_duplicates(runs: &[PairRun], within: Bounds, blocks: usize) -> Result<(), PlanError> {
    let ascending = runs
        .iter()
        .zip(runs.iter().skip(1))
        .all(|(a, b)| end(a) <= u64::from(b.local_first.0));
    if ascending {
        return Ok(());
    }
    let duplicate = match within.span(blocks.saturating_mul(64)) {
        Some(span) => twice_by_place(runs, within, span),
        None => twice_by_order(runs),
    };
    duplicate.map_or(Ok(()), |block| {
        Err(PlanError::DuplicateLocalBlock { block })
    })
}

/// A local block that is there twice, found with one bit for every block.
fn twice_by_place(runs: &[PairRun], within: Bounds, span: usize) -> Option<BlockId> {
    let mut seen = vec![0_u64; span.div_ceil(64)];
    let ids = |r: &PairRun| (r.local_first.0..).take(usize::try_from(r.len).unwrap_or(usize::MAX));
    for id in runs.iter().flat_map(ids) {
        let at = within.place(id)?;
        let word = seen.get_mut(at / 64)?;
        let bit = 1_u64 << (at % 64);
        if *word & bit != 0 {
            return Some(BlockId(id));
        }
        *word |= bit;
    }
    None
}

/// A local block that is there twice, found by sorting the runs.
fn twice_by_order(runs: &[PairRun]) -> Option<BlockId> {
    let mut spans: Vec<(u64, u64)> = runs
        .iter()
        .map(|r| (u64::from(r.local_first.0), end(r)))
        .collect();
    spans.sort_unstable();
    let overlap = spans
        .iter()
        .zip(spans.iter().skip(1))
        .find(|(a, b)| b.0 < a.1)?;
    u32::try_from(overlap.1.0).ok().map(BlockId)
}

/// First local block after a run.
fn end(run: &PairRun) -> u64 {
    u64::from(run.local_first.0) + u64::from(run.len)
}

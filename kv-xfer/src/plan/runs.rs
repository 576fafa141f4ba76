//! Runs: blocks that follow each other on both sides.

use super::{PlanError, Side};
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
    fn add(&mut self, (remote, local): (BlockId, BlockId)) {
        if let Some(run) = &mut self.open {
            let follows =
                |first: BlockId, next: BlockId| next.0.checked_sub(first.0) == Some(run.len);
            if follows(run.remote_first, remote) && follows(run.local_first, local) {
                // At most as many as there are pairs, which fits.
                run.len += 1;
                return;
            }
            self.runs.push(*run);
        }
        self.open = Some(PairRun {
            remote_first: remote,
            local_first: local,
            len: 1,
        });
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

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
    let (_, max_remote) = bounds(Side::Remote, remote, remote_count)?;
    let (min_local, max_local) = bounds(Side::Local, local, local_count)?;
    let pairs = || remote.iter().copied().zip(local.iter().copied());
    let mut out = Merger::default();
    match order(remote) {
        Order::Ascending => pairs().for_each(|p| out.add(p)),
        Order::Descending => pairs().rev().for_each(|p| out.add(p)),
        Order::Mixed => {
            let mut keys: Vec<u64> = pairs().map(pack).collect();
            keys.sort_unstable();
            keys.into_iter().for_each(|key| out.add(unpack(key)));
        }
    }
    let runs = out.finish();
    refuse_duplicates(&runs, min_local, max_local)?;
    let longest = runs.iter().map(|r| r.len).max().unwrap_or(0);
    Ok(Runs {
        runs,
        longest,
        max_remote,
        max_local,
    })
}

/// Smallest and largest block, both inside the pool.
fn bounds(side: Side, blocks: &[BlockId], count: u32) -> Result<(u32, u32), PlanError> {
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
    Ok((min, max))
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
fn refuse_duplicates(runs: &[PairRun], min: u32, max: u32) -> Result<(), PlanError> {
    let _ = (min, max);
    let ascending = runs
        .iter()
        .zip(runs.iter().skip(1))
        .all(|(a, b)| end(a) <= u64::from(b.local_first.0));
    if ascending {
        return Ok(());
    }
    let mut spans: Vec<(u64, u64)> = runs
        .iter()
        .map(|r| (u64::from(r.local_first.0), end(r)))
        .collect();
    spans.sort_unstable();
    for (a, b) in spans.iter().zip(spans.iter().skip(1)) {
        if b.0 < a.1 {
            let block = BlockId(u32::try_from(b.0).unwrap_or(u32::MAX));
            return Err(PlanError::DuplicateLocalBlock { block });
        }
    }
    Ok(())
}

/// First local block after a run.
fn end(run: &PairRun) -> u64 {
    u64::from(run.local_first.0) + u64::from(run.len)
}

//! The plan of one read, and its windows.

use super::runs::{self, PairRun};
use super::{PlanError, Side};
use crate::descriptor::BlockRuns;
use crate::ids::BlockId;
use crate::layout::RegionPair;
use crate::transport::{Descriptor, Ends};

/// Most bytes that runs are merged into one descriptor for, unless told otherwise: 1 MiB. Cost per
/// descriptor is gone before that (some 256 KiB), no post over shared memory takes longer than some
/// 0.3 ms, and lanes, rails and queue pairs all get their part of a long read.
pub const DEFAULT_MAX_DESCRIPTOR_BYTES: u64 = 1 << 20;

/// Bounds of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanLimits {
    /// Blocks are merged into one descriptor up to this many bytes. A block is never split: one
    /// that is longer is one descriptor by itself. Zero merges nothing.
    pub max_descriptor_bytes: u64,
}

impl Default for PlanLimits {
    fn default() -> Self {
        Self {
            max_descriptor_bytes: DEFAULT_MAX_DESCRIPTOR_BYTES,
        }
    }
}

/// What a plan is made from.
#[derive(Debug, Clone, Copy)]
pub struct PlanInput<'a> {
    /// Blocks to read, at the holder. The same block may be read into several local ones.
    pub remote_blocks: &'a [BlockId],
    /// Blocks to read into, as many, in the same order, each at most once.
    pub local_blocks: &'a [BlockId],
    /// What moves of each block, in layer order.
    pub pairs: &'a [RegionPair],
    /// Blocks of the holder's pool.
    pub remote_block_count: u32,
    /// Blocks of the own pool.
    pub local_block_count: u32,
    /// Bounds.
    pub limits: PlanLimits,
}

/// What a plan is made from, its blocks given as runs.
#[derive(Debug, Clone, Copy)]
pub struct RunsInput<'a> {
    /// Blocks to read, at the holder, as in [`PlanInput`].
    pub remote_blocks: &'a BlockRuns,
    /// Blocks to read into, as in [`PlanInput`].
    pub local_blocks: &'a BlockRuns,
    /// What moves of each block, in layer order.
    pub pairs: &'a [RegionPair],
    /// Blocks of the holder's pool.
    pub remote_block_count: u32,
    /// Blocks of the own pool.
    pub local_block_count: u32,
    /// Bounds.
    pub limits: PlanLimits,
}

/// One region pair, with what was worked out about it.
#[derive(Debug, Clone, Copy)]
struct Step {
    pair: RegionPair,
    ends: Ends,
    /// Most blocks in one descriptor; 1 where blocks do not touch.
    blocks_per_descriptor: u32,
    /// Layers that are complete when this step and all before it are.
    layers: u32,
}

/// Which descriptors move the blocks of one read.
#[derive(Debug, Clone)]
pub struct Plan {
    steps: Vec<Step>,
    runs: Vec<PairRun>,
    blocks: u32,
    bytes: u64,
    descriptors: u64,
}

/// How far a plan has been cut into windows. The default is its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cursor {
    step: usize,
    run: usize,
    /// Blocks of the run that are done.
    block: u32,
}

/// What a window holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowInfo {
    /// Where all of its descriptors lie.
    pub ends: Ends,
    /// How many descriptors.
    pub descriptors: usize,
    /// How many bytes.
    pub bytes: u64,
    /// How many layers, from the first on, are complete once this window and all before it have
    /// landed.
    pub layers: u32,
    /// Whether this is the last window of the plan.
    pub last: bool,
}

impl Plan {
    /// Checks everything and works out the runs.
    ///
    /// # Errors
    /// [`PlanError`]. A read of no blocks is [`PlanError::NoBlocks`]: there is nothing to wait for,
    /// so it must not become a read.
    pub fn new(input: PlanInput<'_>) -> Result<Self, PlanError> {
        let found = runs::find(
            input.remote_blocks,
            input.local_blocks,
            input.remote_block_count,
            input.local_block_count,
        )?;
        Self::of(found, input.remote_blocks.len(), input.pairs, input.limits)
    }

    /// Like [`new`](Self::new), in time that follows the runs of the lists: contiguous lists cost the
    /// same however long they are.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn from_runs(input: RunsInput<'_>) -> Result<Self, PlanError> {
        let found = runs::find_in_runs(
            input.remote_blocks,
            input.local_blocks,
            input.remote_block_count,
            input.local_block_count,
        )?;
        Self::of(found, input.remote_blocks.len(), input.pairs, input.limits)
    }

    fn of(
        found: runs::Runs,
        blocks: usize,
        pairs: &[RegionPair],
        limits: PlanLimits,
    ) -> Result<Self, PlanError> {
        if pairs.is_empty() {
            return Err(PlanError::NoRegions);
        }
        // Checked in `find`; the fallback is refused below as too many bytes, never planned.
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        let layers = layers_after(pairs);
        let mut steps = Vec::with_capacity(pairs.len());
        let mut bytes = 0_u64;
        for ((at, pair), layers) in pairs.iter().enumerate().zip(layers) {
            check_pair(at, pair, found.max_remote, found.max_local)?;
            bytes = u64::from(blocks)
                .checked_mul(pair.len)
                .and_then(|more| bytes.checked_add(more))
                .ok_or(PlanError::TooManyBytes)?;
            steps.push(Step {
                pair: *pair,
                ends: ends(pair),
                blocks_per_descriptor: blocks_per_descriptor(pair, limits),
                layers,
            });
        }
        let descriptors = count_descriptors(&steps, &found.runs, found.longest, blocks);
        Ok(Self {
            steps,
            runs: found.runs,
            blocks,
            bytes,
            descriptors,
        })
    }

    /// How many blocks the read has.
    #[must_use]
    pub const fn blocks(&self) -> u32 {
        self.blocks
    }

    /// How many bytes it moves.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How many descriptors its windows have together.
    #[must_use]
    pub const fn descriptors(&self) -> u64 {
        self.descriptors
    }

    /// How many descriptors it would take without merging: one for every block of every region.
    #[must_use]
    pub fn descriptors_unmerged(&self) -> u64 {
        u64::from(self.blocks).saturating_mul(u64::try_from(self.steps.len()).unwrap_or(u64::MAX))
    }

    /// The runs, ascending by remote block.
    #[must_use]
    pub fn runs(&self) -> &[PairRun] {
        &self.runs
    }

    /// How many layers are complete once everything has landed.
    #[must_use]
    pub fn layers(&self) -> u32 {
        self.steps.last().map_or(0, |s| s.layers)
    }

    /// Fills `out` (cleared first) with the next descriptors, in the order of the region pairs:
    /// at most `max_descriptors` and at most `max_bytes` of them, but at least one, and only such
    /// as have the same [`Ends`]. `None` at the end of the plan, with `out` empty.
    pub fn next_window(
        &self,
        cursor: &mut Cursor,
        max_descriptors: usize,
        max_bytes: u64,
        out: &mut Vec<Descriptor>,
    ) -> Option<WindowInfo> {
        out.clear();
        let ends = self.steps.get(cursor.step)?.ends;
        let mut room = Room {
            descriptors: max_descriptors.max(1),
            bytes: max_bytes,
            used: 0,
        };
        while let Some(step) = self.steps.get(cursor.step).filter(|s| s.ends == ends) {
            if !fill(step, &self.runs, cursor, &mut room, out) {
                break;
            }
            *cursor = Cursor {
                step: cursor.step + 1,
                ..Cursor::default()
            };
        }
        Some(WindowInfo {
            ends,
            descriptors: out.len(),
            bytes: room.used,
            layers: cursor
                .step
                .checked_sub(1)
                .and_then(|done| self.steps.get(done))
                .map_or(0, |s| s.layers),
            last: cursor.step >= self.steps.len(),
        })
    }
}

/// What a window may hold, and what it holds.
#[derive(Debug)]
struct Room {
    descriptors: usize,
    bytes: u64,
    used: u64,
}

/// Emits what fits of one step; true when the step is done. The first descriptor of a window always
/// fits.
fn fill(
    step: &Step,
    runs: &[PairRun],
    cursor: &mut Cursor,
    room: &mut Room,
    out: &mut Vec<Descriptor>,
) -> bool {
    let pair = &step.pair;
    let rest = runs.get(cursor.run..).unwrap_or_default();
    out.reserve(rest.len().min(room.descriptors.saturating_sub(out.len())));
    let Cursor { mut block, .. } = *cursor;
    let mut used = room.used;
    for (at, run) in (cursor.run..).zip(rest) {
        while block < run.len {
            let blocks = (run.len - block).min(step.blocks_per_descriptor);
            // None of this can overflow: `Plan::new` has checked the address after the last byte
            // of the highest block on both sides, and the sum of all bytes.
            let len = u64::from(blocks) * pair.len;
            let taken = out.len();
            if taken >= room.descriptors || (taken > 0 && used + len > room.bytes) {
                cursor.run = at;
                cursor.block = block;
                room.used = used;
                return false;
            }
            let remote = u64::from(run.remote_first.0) + u64::from(block);
            let local = u64::from(run.local_first.0) + u64::from(block);
            out.push(Descriptor {
                remote: pair.remote_base + remote * pair.remote_stride,
                local: pair.local_base + local * pair.local_stride,
                len,
            });
            used += len;
            block += blocks;
        }
        block = 0;
    }
    room.used = used;
    true
}

const fn ends(pair: &RegionPair) -> Ends {
    Ends {
        remote_mem: pair.remote_mem,
        remote_device: pair.remote_device,
        local_mem: pair.local_mem,
        local_device: pair.local_device,
    }
}

fn check_pair(
    at: usize,
    pair: &RegionPair,
    max_remote: u32,
    max_local: u32,
) -> Result<(), PlanError> {
    if pair.len == 0 {
        return Err(PlanError::EmptyRegion { pair: at });
    }
    let sides = [
        (
            Side::Remote,
            pair.remote_base,
            pair.remote_stride,
            max_remote,
        ),
        (Side::Local, pair.local_base, pair.local_stride, max_local),
    ];
    for (side, base, stride, max) in sides {
        if stride < pair.len {
            return Err(PlanError::StrideTooShort {
                pair: at,
                side,
                stride,
                len: pair.len,
            });
        }
        let end = u64::from(max)
            .checked_mul(stride)
            .and_then(|offset| base.checked_add(offset))
            .and_then(|start| start.checked_add(pair.len));
        if end.is_none() {
            return Err(PlanError::Wraps {
                pair: at,
                side,
                block: BlockId(max),
            });
        }
    }
    Ok(())
}

fn blocks_per_descriptor(pair: &RegionPair, limits: PlanLimits) -> u32 {
    if pair.len != pair.remote_stride || pair.len != pair.local_stride {
        return 1;
    }
    let blocks = limits
        .max_descriptor_bytes
        .checked_div(pair.len)
        .unwrap_or(0);
    u32::try_from(blocks).unwrap_or(u32::MAX).max(1)
}

/// For every pair, how many layers are complete when it and all before it have landed. A pair names
/// only the last of its layers, so a layer counts as complete once no pair of that layer or of one
/// before it is left; pairs of one layer (keys, values) complete it together.
fn layers_after(pairs: &[RegionPair]) -> Vec<u32> {
    let mut last_layers: Vec<u32> = pairs.iter().map(|p| p.layer).collect();
    last_layers.sort_unstable();
    let mut out = vec![0; pairs.len()];
    // The lowest layer among the pairs that are left; above all of them when none is.
    let mut left = u64::MAX;
    for (pair, out) in pairs.iter().zip(&mut out).rev() {
        let below = last_layers.partition_point(|&l| u64::from(l) < left);
        *out = below
            .checked_sub(1)
            .and_then(|at| last_layers.get(at))
            .map_or(0, |l| l.saturating_add(1));
        left = left.min(u64::from(pair.layer));
    }
    out
}

fn count_descriptors(steps: &[Step], runs: &[PairRun], longest: u32, blocks: u32) -> u64 {
    let runs_len = u64::try_from(runs.len()).unwrap_or(u64::MAX);
    // Layers of a model mostly share one block length, so few different answers are worked out.
    let mut known: Vec<(u32, u64)> = Vec::new();
    let mut total = 0_u64;
    for step in steps {
        let per = step.blocks_per_descriptor;
        let count = if per == 1 {
            u64::from(blocks)
        } else if per >= longest {
            runs_len
        } else if let Some((_, count)) = known.iter().find(|(p, _)| *p == per) {
            *count
        } else {
            let count = runs.iter().map(|r| u64::from(r.len.div_ceil(per))).sum();
            known.push((per, count));
            count
        };
        total = total.saturating_add(count);
    }
    total
}

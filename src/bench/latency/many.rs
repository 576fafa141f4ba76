//! Reads of very many descriptors: what each costs, and for how long submitting keeps the caller.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_xfer::engine::{ReadRequest, ReleasePolicy};
use kv_xfer::transport::nixl::NixlTransport;

use super::LatencySize;
use crate::bench::bare::{Bare, BareTiming};
use crate::bench::fixture::{self, BenchError, LIMIT};
use crate::bench::pair::Pair;
use crate::bench::probe::Timing;
use crate::bench::proto::Shape;
use crate::bench::row::{Row, Who};
use crate::bench::rows::{blank, hold, tell, timed};
use crate::bench::stats::Times;
use crate::proc::Interrupt;

/// Rounds of reads that take some milliseconds each.
const ROUNDS: u32 = 21;
/// What the engine posts at once.
const WINDOW: usize = 64;
/// A block of the large read.
const LARGE_BLOCK: u64 = 4096;

/// Scattered blocks of 8 KiB in one region: engine and NIXL in turn.
pub(super) fn overhead(
    size: &LatencySize,
    transport: &Arc<NixlTransport>,
    interrupt: &Interrupt,
) -> Result<Vec<Row>, BenchError> {
    let shape = Shape {
        regions: 1,
        blocks: size.random_blocks,
        block_bytes: 8192,
    };
    let case = format!("random-{}x8KiB", size.random_blocks);
    let pair = Pair::start("random", shape, transport, interrupt)?;
    let address = pair.holders.address(0)?;
    let (mut bare, _) = Bare::meet("bare-random", transport, pair.engine.pool(), &address)?;
    let plan = bare.plan(&pair.remote, &pair.local)?;
    let count = pair.remote.len();
    let (_, wrong) = pair.read(0, count, true)?;
    bare.read(&plan, usize::MAX)?;
    let (mut engine, mut whole, mut windows) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        engine.push(pair.read(0, count, false)?.0);
        whole.push(bare.read(&plan, usize::MAX)?);
        windows.push(bare.read(&plan, WINDOW)?);
    }
    bare.end()?;
    pair.end()?;
    let each = plan.len().max(1) as f64;
    let bare_row = |setting: &str, timings: &[BareTiming]| {
        let mut row = blank(&case, Who::OneDescriptor, setting);
        row.descriptors = plan.len() as u64;
        row.bytes = plan.iter().map(|d| d.len).sum();
        let mut row = timed(row, &timings.iter().map(|t| t.total).collect());
        let posts: Times = timings.iter().map(|t| t.post).collect();
        tell(&mut row, "post_ns_each", posts.median() * 1e3 / each);
        row
    };
    let whole_row = bare_row("NIXL alone, one post", &whole);
    let window_row = bare_row("NIXL alone, windows of 64", &windows);
    let mut row = blank(&case, Who::KvXfer, "engine");
    row.bytes = whole_row.bytes;
    row.descriptors = engine.last().map_or(0, |t| t.report.descriptors);
    let mut row = timed(row, &times(&engine, |t| t.total));
    submitted(&mut row, &engine);
    let over =
        |bare: &[BareTiming], part: fn(&Timing) -> Duration, of: fn(&BareTiming) -> Duration| {
            // Round by round, so that what slowed a whole round down counts on both sides.
            let pairs = engine.iter().zip(bare);
            let differences: Times = pairs
                .map(|(t, b)| (part(t).as_secs_f64() - of(b).as_secs_f64()) * 1e9 / each)
                .collect();
            differences.median()
        };
    let total = over(&whole, |t| t.total, |b| b.total);
    tell(&mut row, "over_one_post_ns_each", total);
    let windowed = over(&windows, |t| t.total, |b| b.total);
    tell(&mut row, "over_windows_ns_each", windowed);
    let posting = over(&windows, |t| t.report.posting, |b| b.post);
    tell(&mut row, "posting_over_windows_ns_each", posting);
    let outside = times(&engine, |t| t.total.saturating_sub(t.report.posting)).median();
    tell(&mut row, "outside_posting_ns_each", outside * 1e3 / each);
    hold(&mut row, "within_200_ns", windowed <= 200.0);
    row.verified = wrong == 0;
    hold(&mut row, "ok", wrong == 0);
    Ok(vec![row, whole_row, window_row])
}

/// 64 regions of scattered blocks: submission alone, then the whole read.
pub(super) fn submit(
    size: &LatencySize,
    transport: &Arc<NixlTransport>,
    interrupt: &Interrupt,
) -> Result<Vec<Row>, BenchError> {
    let shape = Shape {
        regions: 64,
        blocks: size.large_blocks,
        block_bytes: LARGE_BLOCK,
    };
    let pair = Pair::start("large", shape, transport, interrupt)?;
    let count = pair.remote.len();
    let descriptors = 64 * count as u64;
    let (_, wrong) = pair.read(0, count, true)?;
    let mut reads = Vec::new();
    for _ in 0..ROUNDS {
        reads.push(pair.read(0, count, false)?.0);
    }
    let mut row = blank(format!("large-64x{count}x4KiB"), Who::KvXfer, "engine");
    if let Some(last) = reads.last() {
        row.bytes = last.report.bytes;
        row.descriptors = last.report.descriptors;
    }
    let mut row = timed(row, &times(&reads, |t| t.total));
    submitted(&mut row, &reads);
    let first = times(&reads, |t| t.report.first_layer);
    row.first_layer_ms = Some(first.median() / 1e3);
    let share = first.median() / times(&reads, |t| t.report.total).median().max(1e-3);
    tell(&mut row, "first_layer_share", share);
    tell(
        &mut row,
        "queued_p50_us",
        times(&reads, |t| t.report.queued).median(),
    );
    row.verified = wrong == 0;
    hold(&mut row, "ok", wrong == 0);

    // Dropped at once: whether they ran or not, the blocks come back.
    let mut alone = Vec::new();
    let mut lost = 0_u64;
    for _ in 0..size.samples.clamp(1, 200) {
        let blocks = fixture::claim(&pair.engine, pair.local.iter().copied())?;
        let start = Instant::now();
        let handle = pair.engine.read(ReadRequest {
            offer: &pair.offer,
            hashes: &pair.hashes,
            span: 0..count,
            blocks,
            timeout: LIMIT,
            release: ReleasePolicy::Never,
        });
        alone.push(start.elapsed());
        drop(handle.map_err(|refused| BenchError::Submit(refused.to_string()))?);
        match pair.engine.returned().recv_timeout(LIMIT) {
            Ok(back) => lost += u64::from(back.blocks.len() != count),
            Err(_) => {
                return Err(BenchError::TookTooLong {
                    what: "the return of a dropped read's blocks",
                    waited: LIMIT,
                });
            }
        }
    }
    pair.end()?;
    let mut submits = blank(
        format!("submit-{descriptors}-descriptors"),
        Who::KvXfer,
        "engine",
    );
    submits.descriptors = descriptors;
    let alone: Times = alone.into_iter().collect();
    let mut submits = timed(submits, &alone);
    submits.submit_us = alone.median();
    submits.submit_max_us = alone.max();
    hold(&mut submits, "within_50_us", alone.quantile(0.99) <= 50.0);
    hold(&mut submits, "ok", lost == 0);
    Ok(vec![row, submits])
}

fn times(timings: &[Timing], part: impl Fn(&Timing) -> Duration) -> Times {
    timings.iter().map(part).collect()
}

fn submitted(row: &mut Row, timings: &[Timing]) {
    let submits = times(timings, |t| t.submit);
    row.submit_us = submits.median();
    row.submit_max_us = submits.max();
}

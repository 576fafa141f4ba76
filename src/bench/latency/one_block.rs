//! One block at a time, nothing else going on.

use std::sync::Arc;

use kv_xfer::transport::nixl::NixlTransport;

use super::LatencySize;
use crate::bench::bare::{Bare, BareTiming};
use crate::bench::fixture::BenchError;
use crate::bench::pair::Pair;
use crate::bench::probe::Probes;
use crate::bench::proto::Shape;
use crate::bench::row::{Row, Who};
use crate::bench::rows::{blank, hold, tell, timed};
use crate::bench::stats::Times;
use crate::proc::Interrupt;

/// Blocks of each pool.
const BLOCKS: u32 = 64;
/// Reads before those that count.
const WARM: u32 = 50;

/// Sixteen tokens of one rank of eight of Qwen3-32B, layer by layer; the same bytes side by side;
/// and one layer of them.
const SHAPES: [(&str, u32, u64); 3] = [
    ("layer-first-64x8KiB", 64, 8 << 10),
    ("block-first-1x512KiB", 1, 512 << 10),
    ("single-1x8KiB", 1, 8 << 10),
];

pub(super) fn measure(
    size: &LatencySize,
    transport: &Arc<NixlTransport>,
    interrupt: &Interrupt,
) -> Result<Vec<Row>, BenchError> {
    let mut rows = Vec::new();
    for (name, regions, block_bytes) in SHAPES {
        let shape = Shape {
            regions,
            blocks: BLOCKS,
            block_bytes,
        };
        let pair = Pair::start(name, shape, transport, interrupt)?;
        rows.extend(of_shape(name, &pair, size, transport)?);
        pair.end()?;
    }
    Ok(rows)
}

fn of_shape(
    name: &str,
    pair: &Pair,
    size: &LatencySize,
    transport: &NixlTransport,
) -> Result<[Row; 2], BenchError> {
    let case = format!("one-block-{name}");
    let address = pair.holders.address(0)?;
    let bare_name = format!("bare-{name}");
    let (mut bare, _) = Bare::meet(&bare_name, transport, pair.engine.pool(), &address)?;
    let mut probes = Probes::default();
    let mut alone: Vec<BareTiming> = Vec::new();
    let mut with_word: Vec<BareTiming> = Vec::new();
    let mut descriptors = 0;
    let mut wrong = 0;
    for n in 0..size.samples.saturating_add(WARM) {
        let at = (n % BLOCKS) as usize;
        let (timing, bad) = pair.read(at, 1, n < WARM)?;
        wrong += bad;
        // Another block, which is no more in the caches than the engine's was. Nobody else writes
        // there: the engine has given its claims up, and the bench is alone.
        let other = ((n + BLOCKS / 2) % BLOCKS) as usize;
        let (Some(remote), Some(local)) = (pair.remote.get(other), pair.local.get(other)) else {
            continue;
        };
        let plan = bare.plan(&[*remote], &[*local])?;
        descriptors = plan.len() as u64;
        let read = bare.read(&plan, usize::MAX)?;
        let word = bare.read_word()?;
        if n >= WARM {
            probes.take(timing);
            alone.push(read);
            with_word.push(BareTiming {
                post: read.post + word.post,
                total: read.total + word.total,
            });
        }
    }
    bare.end()?;
    let mut engine = probes.row(&case, "engine");
    engine.verified = wrong == 0;
    hold(&mut engine, "ok", wrong == 0);
    let total = |timings: &[BareTiming]| timings.iter().map(|t| t.total).collect::<Times>();
    let (alone_times, word_times) = (total(&alone), total(&with_word));
    let mut nixl = blank(&case, Who::OneDescriptor, "NIXL alone, same descriptors");
    nixl.bytes = engine.bytes;
    nixl.descriptors = descriptors;
    let mut nixl = timed(nixl, &alone_times);
    let posts: Times = alone.iter().map(|t| t.post).collect();
    tell(&mut nixl, "post_p50_us", posts.median());
    tell(&mut nixl, "with_word_p50_us", word_times.median());
    tell(&mut nixl, "with_word_p99_us", word_times.quantile(0.99));
    let times = probes.total();
    for (name, share) in [("p50", 0.5), ("p99", 0.99)] {
        let bare = alone_times.quantile(share);
        tell(
            &mut engine,
            &format!("{name}_to_nixl"),
            times.quantile(share) / bare.max(1e-3),
        );
        tell(
            &mut engine,
            &format!("{name}_over_nixl_us"),
            times.quantile(share) - bare,
        );
    }
    Ok([engine, nixl])
}

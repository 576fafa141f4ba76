//! After a pause: the first read, and what waiting costs.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kv_xfer::transport::nixl::NixlTransport;

use super::LatencySize;
use crate::bench::fixture::BenchError;
use crate::bench::holders::Usage;
use crate::bench::pair::Pair;
use crate::bench::probe::Probes;
use crate::bench::proto::Shape;
use crate::bench::row::{Row, Who};
use crate::bench::rows::{blank, hold, tell};
use crate::proc::Interrupt;

/// Pauses after which everything has gone to sleep.
const PAUSE: Duration = Duration::from_millis(20);
const PAUSES: u32 = 200;
/// Part of a long pause that a signal is looked for in.
const NAP: Duration = Duration::from_millis(100);

pub(super) fn measure(
    size: &LatencySize,
    transport: &Arc<NixlTransport>,
    interrupt: &Interrupt,
) -> Result<Vec<Row>, BenchError> {
    let shape = Shape {
        regions: 64,
        blocks: 64,
        block_bytes: 8 << 10,
    };
    let mut pair = Pair::start("idle", shape, transport, interrupt)?;
    pair.read(0, 1, false)?;
    let mut probes = Probes::default();
    for n in 0..PAUSES.min(size.samples) {
        thread::sleep(PAUSE);
        probes.take(pair.read((n % shape.blocks) as usize, 1, false)?.0);
    }
    let short = probes.row("one-block-layer-first-64x8KiB", "after 20 ms idle");

    let (reader, holder) = (Usage::now(), pair.holders.usage()?);
    let start = Instant::now();
    while start.elapsed() < size.idle && !interrupt.is_raised() {
        thread::sleep(NAP.min(size.idle));
    }
    let passed = start.elapsed();
    // The holder wakes up to be asked, and its agent's thread may: the read comes first.
    let (timing, wrong) = pair.read(0, 1, false)?;
    let reader = Usage::now().percent_since(&reader, passed);
    let holder = pair.holders.usage()?.percent_since(&holder, passed);
    pair.end()?;
    let mut probes = Probes::default();
    probes.take(timing);
    let seconds = size.idle.as_secs();
    let first = probes.row(
        "one-block-layer-first-64x8KiB",
        &format!("after {seconds} s idle"),
    );
    let mut idle = blank(
        format!("idle-{seconds}s"),
        Who::KvXfer,
        "one link, one lease",
    );
    idle.rounds = 1;
    idle.median_ms = passed.as_secs_f64() * 1e3;
    (idle.min_ms, idle.max_ms) = (idle.median_ms, idle.median_ms);
    tell(&mut idle, "reader_cpu_percent", reader);
    tell(&mut idle, "holder_cpu_percent", holder);
    hold(&mut idle, "within_2_percent", reader < 2.0 && holder < 2.0);
    hold(&mut idle, "ok", wrong == 0);
    Ok(vec![short, first, idle])
}

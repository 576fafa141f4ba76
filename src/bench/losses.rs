//! How reads from other peers fare while one dies, or stands still.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kv_xfer::engine::{Engine, Offer};
use kv_xfer::transport::nixl::NixlTransport;

use super::fixture::{self, BenchError, LIMIT};
use super::holders::Holders;
use super::load::{Done, Lane, Load};
use super::row::{Row, Who};
use super::rows::{blank, hold, tell};
use super::scale::{HOLDER_BLOCKS, READ_BLOCKS, ScaleSize, join, shape, wait_for};
use crate::proc::Interrupt;

/// Peers that go on, at most.
const OTHERS: u32 = 8;
/// Reads in flight from each peer.
const READS_EACH: u32 = 4;
/// How long the loss has happened after the load began.
const BEFORE_LOSS: Duration = Duration::from_millis(50);
/// What others must keep of their rate.
const KEPT: f64 = 0.9;

/// What happens to the peer.
#[derive(Debug, Clone, Copy)]
enum Loss {
    /// Its process is killed.
    Killed,
    /// Its process stands still.
    Stopped,
}

impl Loss {
    fn name(self) -> &'static str {
        match self {
            Self::Killed => "killed",
            Self::Stopped => "stopped",
        }
    }
}

/// A row for each kind of loss.
///
/// # Errors
/// [`BenchError`].
pub(super) fn measure(
    size: &ScaleSize,
    transport: &Arc<NixlTransport>,
    interrupt: &Interrupt,
) -> Result<[Row; 2], BenchError> {
    Ok([
        beside(Loss::Killed, size, transport, interrupt)?,
        beside(Loss::Stopped, size, transport, interrupt)?,
    ])
}

fn beside(
    loss: Loss,
    size: &ScaleSize,
    transport: &Arc<NixlTransport>,
    interrupt: &Interrupt,
) -> Result<Row, BenchError> {
    let others = size.peers.clamp(1, OTHERS);
    let mut going_on = Holders::start("others", 0..others, shape(HOLDER_BLOCKS), 64, interrupt)?;
    let numbers = others..others.saturating_add(1);
    let mut lost = Holders::start("lost", numbers, shape(HOLDER_BLOCKS), 64, interrupt)?;
    let blocks = fixture::shuffled(HOLDER_BLOCKS, 1);
    let hashes = fixture::hashes(blocks.len());
    let peers = others.saturating_add(1);
    let reads = peers.saturating_mul(READS_EACH);
    let pool = fixture::pool(&shape(reads.saturating_mul(READ_BLOCKS)))?;
    let engine = fixture::start("reader", &pool, transport, |config| {
        config.reader.connect_timeout = LIMIT;
    })?;
    let mut offers = Vec::new();
    for (process, engines) in [(&mut going_on, others), (&mut lost, 1)] {
        for n in 0..engines {
            let params = process.offer(n, blocks.clone())?;
            offers.push(fixture::accept(&engine, params)?);
        }
    }
    let lanes = (0..reads)
        .map(|n| {
            let ids = n * READ_BLOCKS..(n + 1) * READ_BLOCKS;
            let first = n / peers % (HOLDER_BLOCKS / READ_BLOCKS) * READ_BLOCKS;
            let blocks = fixture::claim(&engine, ids)?;
            Ok(Lane::new((n % peers) as usize, first as usize, blocks))
        })
        .collect::<Result<Vec<_>, BenchError>>()?;
    let mut lost = Some(lost);
    let mut load = Load::new(&engine, &offers, &hashes, lanes);
    // Once for all to be met.
    load.run(Instant::now() + size.busy / 4)?;
    let before = load.run(Instant::now() + size.busy)?;
    let (during, since) = thread::scope(|scope| {
        let load = &mut load;
        let loader = scope.spawn(move || load.run(Instant::now() + size.busy));
        thread::sleep(BEFORE_LOSS);
        let since = Instant::now();
        let happened = match (loss, &lost) {
            (Loss::Stopped, Some(lost)) => lost.freeze(),
            _ => {
                lost = None;
                Ok(())
            }
        };
        let during = join(loader).and_then(|done| done);
        happened.and(during.map(|during| (during, since)))
    })?;
    // Its own reads have ended by now; those that go on are checked.
    load.leave(others as usize);
    let wrong = load.check(&blocks)?;
    drop(load);
    if let Some(lost) = &lost {
        lost.thaw()?;
    }
    let mut row = row(loss, others, &before, &during, since);
    tell(&mut row, "wrong_bytes", wrong as f64);
    row.verified = wrong == 0;
    give_back(&engine, &offers)?;
    let quarantined = engine.shutdown(LIMIT).quarantined;
    hold(&mut row, "ok", wrong == 0 && quarantined == 0);
    going_on.stop()?;
    if let Some(lost) = lost {
        lost.stop()?;
    }
    Ok(row)
}

/// Releases what is still offered, and waits until no block is claimed for a read any more.
fn give_back(engine: &Engine, offers: &[Offer]) -> Result<(), BenchError> {
    for offer in offers {
        // A release that finds no room is made by the lease's end.
        let _ = engine.release(offer);
    }
    // Blocks of failed reads come back once nothing can write into them.
    let returned = engine.returned();
    wait_for("the return of all blocks", || {
        returned.try_iter().for_each(drop);
        engine.stats().quarantined == 0 && engine.pool().claimed_blocks() == 0
    })?;
    Ok(())
}

fn row(loss: Loss, others: u32, before: &Done, during: &Done, since: Instant) -> Row {
    let rate = |done: &Done| {
        let bytes: u64 = done.bytes.iter().take(others as usize).sum();
        bytes as f64 / done.took.as_secs_f64().max(1e-6) / 1e9
    };
    let case = format!("{others}-peers-beside-one-{}", loss.name());
    let mut row = blank(case, Who::KvXfer, "");
    row.rounds = 1;
    row.bytes = during.bytes.iter().take(others as usize).sum();
    row.gbps = rate(during);
    row.median_ms = during.took.as_secs_f64() * 1e3;
    (row.min_ms, row.max_ms) = (row.median_ms, row.median_ms);
    tell(&mut row, "gbps_before", rate(before));
    let kept = rate(during) / rate(before).max(1e-9);
    tell(&mut row, "rate_to_before", kept);
    hold(&mut row, "kept_90_percent", kept >= KEPT);
    tell(&mut row, "failed", during.failed as f64);
    if let Some(why) = &during.why {
        row.more.insert("why".to_owned(), why.clone().into());
    }
    if let Some(last) = during.last_failure {
        let last = last.saturating_duration_since(since);
        tell(&mut row, "last_failure_ms", last.as_secs_f64() * 1e3);
    }
    row
}

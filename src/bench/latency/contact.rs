//! The first read from a peer, and meeting several at once.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kv_xfer::engine::Engine;
use kv_xfer::transport::nixl::NixlTransport;

use super::LatencySize;
use crate::bench::bare::{Bare, Meeting};
use crate::bench::fixture::{self, BenchError, LIMIT};
use crate::bench::holders::Holders;
use crate::bench::pair::Pair;
use crate::bench::probe::Probes;
use crate::bench::proto::Shape;
use crate::bench::row::{Row, Who};
use crate::bench::rows::{blank, hold, tell, timed};
use crate::bench::stats::Times;
use crate::proc::Interrupt;

/// Budget of a first contact.
const BUDGET_MS: f64 = 50.0;
/// Budget of a card.
const CARD_BYTES: usize = 1 << 20;
/// Peers met at once.
const CROWD: u32 = 16;
/// Blocks of a small pool.
const FEW: u32 = 1000;
/// How often each first contact is made, with a fresh pair each time.
const ROUNDS: u32 = 3;

pub(super) fn measure(
    size: &LatencySize,
    transport: &Arc<NixlTransport>,
    interrupt: &Interrupt,
) -> Result<Vec<Row>, BenchError> {
    let mut rows = Vec::new();
    let mut numbers: Vec<u32> = vec![FEW.min(size.contact_blocks), size.contact_blocks];
    numbers.dedup();
    for blocks in numbers {
        rows.extend(first_read(blocks, transport, interrupt)?);
    }
    rows.push(crowd(transport, interrupt)?);
    Ok(rows)
}

fn first_read(
    blocks: u32,
    transport: &Arc<NixlTransport>,
    interrupt: &Interrupt,
) -> Result<[Row; 2], BenchError> {
    let shape = Shape {
        regions: 64,
        blocks,
        block_bytes: 64,
    };
    let case = format!("first-contact-64x{blocks}");
    let (mut cold, mut warm) = (Probes::default(), Probes::default());
    let mut meetings = Vec::new();
    let mut wrong = 0;
    for round in 0..ROUNDS {
        let pair = Pair::start(
            &format!("cold-{blocks}-{round}"),
            shape,
            transport,
            interrupt,
        )?;
        let (timing, bad) = pair.read(0, 1, true)?;
        cold.take(timing);
        wrong += bad;
        pair.end()?;

        let pair = Pair::start(
            &format!("warm-{blocks}-{round}"),
            shape,
            transport,
            interrupt,
        )?;
        pair.engine.connect(pair.holders.address(0)?);
        met(&pair.engine, 1)?;
        let (timing, bad) = pair.read(0, 1, true)?;
        warm.take(timing);
        wrong += bad;
        pair.end()?;

        // The steps of a meeting, one by one, by an agent of the bench's own.
        let name = format!("steps-{blocks}-{round}");
        let pair = Pair::start(&name, shape, transport, interrupt)?;
        let address = pair.holders.address(0)?;
        let (bare, meeting) = Bare::meet(&name, transport, pair.engine.pool(), &address)?;
        bare.end()?;
        meetings.push(meeting);
        pair.end()?;
    }
    let mut row = cold.row(&case, "no connect before");
    row.verified = wrong == 0;
    let card = meetings.iter().map(|m| m.card_bytes).max().unwrap_or(0);
    tell(&mut row, "card_bytes", card as f64);
    type Step = fn(&Meeting) -> Duration;
    let parts: [(&str, Step); 6] = [
        ("card", |m| m.card),
        ("pair", |m| m.pair),
        ("open_agent", |m| m.open),
        ("register", |m| m.register),
        ("load_peer", |m| m.load),
        ("first_word", |m| m.first),
    ];
    for (name, part) in parts {
        let times: Times = meetings.iter().map(part).collect();
        tell(&mut row, &format!("step_{name}_ms"), times.median() / 1e3);
    }
    let within = row.median_ms <= BUDGET_MS;
    hold(&mut row, "within_50_ms", within);
    hold(&mut row, "card_within_1_mib", card <= CARD_BYTES);
    hold(&mut row, "ok", wrong == 0);
    let mut connected = warm.row(&case, "after connect");
    connected.verified = wrong == 0;
    Ok([row, connected])
}

/// One peer, then several at once.
fn crowd(transport: &Arc<NixlTransport>, interrupt: &Interrupt) -> Result<Row, BenchError> {
    let shape = Shape {
        regions: 64,
        blocks: 64,
        block_bytes: 64,
    };
    let holders = Holders::start("crowd", 0..CROWD + 1, shape, 64, interrupt)?;
    let pool = fixture::pool(&shape)?;
    let engine = fixture::start("crowd-reader", &pool, transport, |_| {})?;
    let start = Instant::now();
    engine.connect(holders.address(CROWD)?);
    met(&engine, 1)?;
    let one = start.elapsed();
    let start = Instant::now();
    for n in 0..CROWD {
        engine.connect(holders.address(n)?);
    }
    met(&engine, u64::from(CROWD) + 1)?;
    let all: Times = [start.elapsed()].into_iter().collect();
    engine.shutdown(LIMIT);
    holders.stop()?;
    let mut row = timed(
        blank(format!("meet-{CROWD}-peers"), Who::KvXfer, "at once"),
        &all,
    );
    tell(&mut row, "one_ms", one.as_secs_f64() * 1e3);
    let each = row.median_ms / f64::from(CROWD);
    tell(&mut row, "each_ms", each);
    Ok(row)
}

fn met(engine: &Engine, meetings: u64) -> Result<(), BenchError> {
    let end = Instant::now() + LIMIT;
    while engine.stats().meetings < meetings {
        if Instant::now() >= end || engine.stats().meetings_failed > 0 {
            let (what, waited) = ("a meeting", LIMIT);
            return Err(BenchError::TookTooLong { what, waited });
        }
        thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}

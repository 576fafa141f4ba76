//! `kvx bench scale`: one reader and very many holders, reads and leases.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kv_xfer::engine::{Engine, FailedBlocks, Offer, ReadRequest, ReleasePolicy, SubmitError};
use kv_xfer::identity::BlockHash;
use kv_xfer::transport::nixl::NixlTransport;

use super::fixture::{self, BenchError, LIMIT};
use super::here::{self, Waits};
use super::holders::{Account, Holders, Usage};
use super::load::{Done, Lane, Load};
use super::losses;
use super::machine;
use super::probe::{self, Probes};
use super::proto::Shape;
use super::row::{BenchReport, Row, Who};
use super::rows::{blank, hold, tell};
use super::stats::Times;
use crate::proc::Interrupt;
use crate::require;

/// Holder engines in one process.
const PER_PROCESS: u32 = 16;
/// A block of the holders: eight layers of 8 KiB.
const REGIONS: u32 = 8;
const BLOCK_BYTES: u64 = 8192;
/// Blocks of a holder, all of them offered in one lease.
pub(super) const HOLDER_BLOCKS: u32 = 64;
/// Blocks of each read under load.
pub(super) const READ_BLOCKS: u32 = 8;
/// Pause between the one-block reads that are made beside the load.
const PROBE_PAUSE: Duration = Duration::from_millis(1);
/// One-block reads on an idle engine.
const IDLE_PROBES: u32 = 1000;
/// How long nothing is done, to see what waiting costs.
const REST: Duration = Duration::from_secs(2);
/// How often memory is looked at.
const LOOK: Duration = Duration::from_millis(100);
/// What counts as flat: growth of resident memory over the load, bytes.
const FLAT: u64 = 64 << 20;

/// How large it is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScaleSize {
    /// Holder engines that are read from at once.
    pub peers: u32,
    /// Reads in flight.
    pub reads: u32,
    /// Leases of one holder.
    pub leases: u32,
    /// For how long the reads are kept up.
    pub busy: Duration,
}

/// Everything that is there during the bench.
struct Site {
    engine: Engine,
    holders: Vec<Holders>,
    /// The last one is the peer of the one-block reads.
    offers: Vec<Offer>,
    /// The blocks of every offer, in its order.
    blocks: Vec<u32>,
    hashes: Vec<BlockHash>,
}

/// Runs it.
///
/// # Errors
/// [`BenchError`] when something fails that no row could tell.
pub fn measure(size: &ScaleSize, interrupt: &Interrupt) -> Result<BenchReport, BenchError> {
    let transport = require::open()?;
    let machine = machine::look(true);
    let fresh = Usage::now();
    let mut rows = Vec::new();
    let (mut site, meeting) = Site::start(size, &transport, interrupt)?;
    rows.push(meeting);
    let met = Usage::now();
    rows.extend(site.fan_in(size)?);
    rows.push(site.bounded_queue(&transport)?);
    let (returned, quarantined) = site.end()?;
    rows.push(returned);
    rows.push(resources(&fresh, &met, quarantined));
    rows.extend(losses::measure(size, &transport, interrupt)?);
    rows.push(leases(size, interrupt)?);
    let ok = rows
        .iter()
        .all(|row| row.more.get("ok").is_none_or(|ok| ok == true));
    Ok(BenchReport {
        bench: "scale".to_owned(),
        machine,
        rows,
        absent: Vec::new(),
        ok,
    })
}

/// A pool of so many of these blocks.
pub(super) fn shape(blocks: u32) -> Shape {
    Shape {
        regions: REGIONS,
        blocks,
        block_bytes: BLOCK_BYTES,
    }
}

impl Site {
    fn start(
        size: &ScaleSize,
        transport: &Arc<NixlTransport>,
        interrupt: &Interrupt,
    ) -> Result<(Self, Row), BenchError> {
        // The last process has one engine: the peer of the one-block reads is nobody's neighbour.
        let mut holders = Vec::new();
        let mut first = 0;
        while first < size.peers {
            let end = size.peers.min(first.saturating_add(PER_PROCESS));
            let name = format!("holders-{first}");
            holders.push(Holders::start(
                &name,
                first..end,
                shape(HOLDER_BLOCKS),
                64,
                interrupt,
            )?);
            first = end;
        }
        let other = size.peers..size.peers.saturating_add(1);
        holders.push(Holders::start(
            "holder-other",
            other,
            shape(HOLDER_BLOCKS),
            64,
            interrupt,
        )?);

        let blocks = fixture::shuffled(HOLDER_BLOCKS, 1);
        let reader_blocks = size.reads.saturating_mul(READ_BLOCKS).saturating_add(1);
        let pool = fixture::pool(&shape(reader_blocks))?;
        let engine = fixture::start("reader", &pool, transport, |config| {
            config.reader.max_peers = size.peers as usize + 8;
            config.reader.queue = size.reads as usize + 64;
            config.reader.active = size.reads.saturating_add(64);
            config.reader.connect_timeout = LIMIT;
        })?;
        let mut offers = Vec::new();
        for process in &mut holders {
            for n in 0..process.engines() {
                let params = process.offer(n, blocks.clone())?;
                offers.push(fixture::accept(&engine, params)?);
            }
        }
        // The other one alone, then all at once.
        let start = Instant::now();
        for (at, process) in holders.iter().enumerate().rev() {
            for n in 0..process.engines() {
                if !engine.connect(process.address(n)?) {
                    return Err(BenchError::OutOfTurn(
                        "the engine is too busy to meet peers",
                    ));
                }
            }
            if at + 1 == holders.len() {
                wait_for("a meeting", || engine.stats().meetings >= 1)?;
            }
        }
        let one = start.elapsed();
        let all = u64::from(size.peers) + 1;
        let start = Instant::now();
        wait_for("the meetings", || engine.stats().meetings >= all)?;
        let many = start.elapsed();
        let mut row = blank(format!("meet-{}-peers", size.peers), Who::KvXfer, "");
        tell(&mut row, "one_ms", one.as_secs_f64() * 1e3);
        row.rounds = 1;
        row.median_ms = many.as_secs_f64() * 1e3;
        (row.min_ms, row.max_ms) = (row.median_ms, row.median_ms);
        let each = row.median_ms / f64::from(size.peers.max(1));
        tell(&mut row, "each_ms", each);
        let hashes = fixture::hashes(blocks.len());
        let site = Self {
            engine,
            holders,
            offers,
            blocks,
            hashes,
        };
        Ok((site, row))
    }

    /// The other peer's offer.
    fn other(&self) -> Result<&Offer, BenchError> {
        self.offers
            .last()
            .ok_or(BenchError::OutOfTurn("there is no other peer"))
    }

    /// One-block reads from the other peer until `over`; at most `most`.
    fn probe(&self, most: u32, pause: Duration, over: &AtomicBool) -> Result<Probes, BenchError> {
        let offer = self.other()?;
        let block = self.engine.pool().block_count().saturating_sub(1);
        let mut blocks = fixture::claim(&self.engine, std::iter::once(block))?;
        let mut probes = Probes::default();
        let waits = Waits::with("kvx-driver");
        for n in 0..most {
            if over.load(Ordering::Acquire) {
                break;
            }
            let first = (n % HOLDER_BLOCKS) as usize;
            let waited = waits.so_far();
            let (back, mut timing) = probe::read(&self.engine, offer, &self.hashes, first, blocks)?;
            timing.kept_waiting = waits.so_far().saturating_sub(waited);
            blocks = back;
            probes.take(timing);
            if !pause.is_zero() {
                thread::sleep(pause);
            }
        }
        Ok(probes)
    }

    /// Percent of a processor that the reader and all holders use while nothing is done.
    fn resting(&mut self) -> Result<[f64; 2], BenchError> {
        // What has just been used is tended more often for a while.
        thread::sleep(REST);
        let start = Instant::now();
        let reader = Usage::now();
        let before = usages(&mut self.holders)?;
        thread::sleep(REST);
        let reader = Usage::now().percent_since(&reader, start.elapsed());
        let after = usages(&mut self.holders)?;
        let passed = start.elapsed();
        let each = after.iter().zip(&before);
        let holders = each.map(|(after, before)| after.percent_since(before, passed));
        Ok([reader, holders.sum()])
    }

    /// One-block reads while nothing else is going on, then beside reads from all peers.
    fn fan_in(&mut self, size: &ScaleSize) -> Result<[Row; 3], BenchError> {
        let never = AtomicBool::new(false);
        self.probe(50, Duration::ZERO, &never)?;
        let resting = self.resting()?;
        let idle = self.probe(IDLE_PROBES, PROBE_PAUSE, &never)?;
        let peers = self.offers.len().saturating_sub(1);
        let lanes = (0..size.reads)
            .map(|n| {
                let ids = n * READ_BLOCKS..(n + 1) * READ_BLOCKS;
                let starts = HOLDER_BLOCKS / READ_BLOCKS;
                let first = n / u32::try_from(peers.max(1)).unwrap_or(1) % starts * READ_BLOCKS;
                let blocks = fixture::claim(&self.engine, ids)?;
                Ok(Lane::new(n as usize % peers.max(1), first as usize, blocks))
            })
            .collect::<Result<Vec<_>, BenchError>>()?;
        let mut load = Load::new(&self.engine, &self.offers, &self.hashes, lanes);
        // Once for everything to have been used, and for the memory that this takes.
        load.run(Instant::now() + size.busy / 4)?;
        let before = Usage::now();
        let holders_before = usages(&mut self.holders)?;
        let over = AtomicBool::new(false);
        let this = &*self;
        let (done, busy, peak) = thread::scope(|scope| {
            let load = &mut load;
            let over = &over;
            let loader = scope.spawn(move || {
                let done = load.run(Instant::now() + size.busy);
                over.store(true, Ordering::Release);
                done
            });
            let looker = scope.spawn(move || {
                let mut peak = 0;
                while !over.load(Ordering::Acquire) {
                    peak = here::resident().max(peak);
                    thread::sleep(LOOK);
                }
                peak
            });
            let busy = this.probe(u32::MAX, PROBE_PAUSE, over);
            (join(loader).and_then(|done| done), busy, join(looker))
        });
        let (done, busy, peak) = (done?, busy?, peak?);
        let after = Usage::now();
        let holders_after = usages(&mut self.holders)?;
        let wrong = load.check(&self.blocks)?;
        drop(load);
        let mut fan = fan_in_row(size, &done, &before, &after, peak);
        let holders_us: u64 = holders_after
            .iter()
            .zip(&holders_before)
            .map(|(after, before)| after.cpu_us.saturating_sub(before.cpu_us))
            .sum();
        let gib = done.bytes.iter().sum::<u64>() as f64 / f64::from(1 << 30);
        let reader_us = after.cpu_us.saturating_sub(before.cpu_us);
        if gib > 0.0 {
            fan.cpu_s_per_gib = (reader_us + holders_us) as f64 / 1e6 / gib;
        }
        tell(&mut fan, "wrong_bytes", wrong as f64);
        fan.verified = wrong == 0;
        hold(&mut fan, "ok", wrong == 0 && done.failed == 0);
        let mut idle_row = idle.row("one-block", "idle");
        let engines = self.offers.len() as f64;
        tell(&mut idle_row, "reader_cpu_percent", resting[0]);
        tell(
            &mut idle_row,
            "holder_cpu_percent_each",
            resting[1] / engines,
        );
        let mut busy_row = busy.row(
            "one-block",
            &format!("{} reads from {} peers", size.reads, size.peers),
        );
        let ratio = busy.total().quantile(0.99) / idle.total().quantile(0.99).max(1e-3);
        tell(&mut busy_row, "p99_to_idle", ratio);
        hold(&mut busy_row, "p99_within_3x", ratio <= 3.0);
        // How much of it is threads of ours that were ready to run and had no processor.
        let mut running = [0.0; 2];
        let rows = [(&idle, &mut idle_row), (&busy, &mut busy_row)];
        for ((probes, row), running) in rows.into_iter().zip(&mut running) {
            let waited = probes.of(|timing| timing.kept_waiting);
            let rest = probes.of(|timing| timing.total.saturating_sub(timing.kept_waiting));
            *running = rest.quantile(0.99);
            tell(row, "no_processor_p99_us", waited.quantile(0.99));
            tell(row, "with_processor_p99_us", *running);
        }
        let [idle, busy] = running;
        tell(
            &mut busy_row,
            "with_processor_p99_to_idle",
            busy / idle.max(1e-3),
        );
        Ok([fan, idle_row, busy_row])
    }
}

fn usages(holders: &mut [Holders]) -> Result<Vec<Usage>, BenchError> {
    holders.iter_mut().map(Holders::usage).collect()
}

fn fan_in_row(size: &ScaleSize, done: &Done, before: &Usage, after: &Usage, peak: u64) -> Row {
    let case = format!("fan-in-{}-peers-{}-reads", size.peers, size.reads);
    let mut row = blank(case, Who::KvXfer, "");
    let peers = done.bytes.len().saturating_sub(1);
    let each: Times = done
        .bytes
        .iter()
        .take(peers)
        .map(|bytes| *bytes as f64)
        .collect();
    let bytes: u64 = done.bytes.iter().sum();
    let mean = bytes as f64 / peers.max(1) as f64;
    let took = done.took.as_secs_f64().max(1e-6);
    row.rounds = 1;
    row.bytes = bytes;
    row.gbps = bytes as f64 / took / 1e9;
    row.median_ms = took * 1e3;
    (row.min_ms, row.max_ms) = (row.median_ms, row.median_ms);
    row.descriptors = u64::from(REGIONS * READ_BLOCKS);
    tell(&mut row, "reads", done.reads as f64);
    tell(&mut row, "reads_per_s", done.reads as f64 / took);
    tell(&mut row, "failed", done.failed as f64);
    if let Some(why) = &done.why {
        row.more.insert("why".to_owned(), why.clone().into());
    }
    tell(&mut row, "share_min_to_mean", each.min() / mean.max(1.0));
    tell(&mut row, "share_max_to_mean", each.max() / mean.max(1.0));
    hold(&mut row, "fair", each.min() >= 0.5 * mean);
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    tell(&mut row, "resident_before_mib", mib(before.resident));
    tell(&mut row, "resident_peak_mib", mib(peak));
    tell(&mut row, "resident_after_mib", mib(after.resident));
    hold(
        &mut row,
        "memory_flat",
        peak.max(after.resident).saturating_sub(before.resident) < FLAT,
    );
    tell(
        &mut row,
        "reader_cpu_percent",
        after.percent_since(before, done.took),
    );
    row
}

impl Site {
    /// What happens to reads beyond the queue: another engine with room for few.
    fn bounded_queue(&mut self, transport: &Arc<NixlTransport>) -> Result<Row, BenchError> {
        const BURST: u32 = 512;
        const QUEUE: usize = 32;
        let pool = fixture::pool(&shape(BURST))?;
        let engine = fixture::start("bounded", &pool, transport, |config| {
            config.reader.queue = QUEUE;
            config.reader.active = 16;
        })?;
        let last = self.holders.last_mut();
        let params = last
            .ok_or(BenchError::OutOfTurn("there are no holders"))?
            .offer(0, self.blocks.clone())?;
        let offer = fixture::accept(&engine, params)?;
        let mut handles = Vec::new();
        let (mut refused, mut lost) = (0_u32, 0_u32);
        for block in 0..BURST {
            let submitted = engine.read(ReadRequest {
                offer: &offer,
                hashes: &self.hashes,
                span: 0..1,
                blocks: fixture::claim(&engine, std::iter::once(block))?,
                timeout: LIMIT,
                release: ReleasePolicy::Never,
            });
            match submitted {
                Ok(handle) => handles.push(handle),
                Err(back) if matches!(back.error, SubmitError::QueueFull { .. }) => {
                    refused += 1;
                    lost += u32::from(back.blocks.len() != 1);
                }
                Err(back) => return Err(BenchError::Submit(back.to_string())),
            }
        }
        let (taken, mut landed, mut failed) = (handles.len(), 0_u32, 0_u32);
        for handle in handles {
            match handle.wait() {
                Ok(done) => {
                    landed += 1;
                    lost += u32::from(done.blocks.len() != 1);
                }
                Err(failure) => {
                    failed += 1;
                    if let FailedBlocks::Quarantined { .. } = failure.blocks {
                        lost += 1;
                    }
                }
            }
        }
        let claimed = pool.claimed_blocks();
        engine.release(&offer);
        let report = engine.shutdown(LIMIT);
        let mut row = blank(format!("queue-of-{QUEUE}"), Who::KvXfer, "");
        row.rounds = 1;
        tell(&mut row, "burst", f64::from(BURST));
        tell(&mut row, "taken", taken as f64);
        tell(&mut row, "refused", f64::from(refused));
        tell(&mut row, "landed", f64::from(landed));
        tell(&mut row, "failed", f64::from(failed));
        let ok = lost == 0 && failed == 0 && claimed == 0 && report.quarantined == 0 && refused > 0;
        hold(&mut row, "ok", ok);
        Ok(row)
    }

    /// Gives every lease back, shuts everything down, and counts what came back. Also returns the
    /// blocks that the reader may not use again.
    fn end(mut self) -> Result<(Row, u64), BenchError> {
        let start = Instant::now();
        for offer in &self.offers {
            let end = Instant::now() + LIMIT;
            while !self.engine.release(offer) && Instant::now() < end {
                thread::sleep(Duration::from_micros(100));
            }
        }
        let mut account = Account::default();
        wait_for("the end of all leases", || {
            account = Account::default();
            self.holders
                .iter_mut()
                .filter_map(|process| process.account().ok())
                .for_each(|one| account += one);
            account.is_settled()
        })
        .or_else(|error| match error {
            // Told by the row.
            BenchError::TookTooLong { .. } => Ok(()),
            other => Err(other),
        })?;
        let took = start.elapsed();
        let claimed = self.engine.pool().claimed_blocks();
        let report = self.engine.shutdown(LIMIT);
        for process in self.holders {
            process.stop()?;
        }
        let mut row = blank("give-back", Who::KvXfer, "");
        row.rounds = 1;
        row.median_ms = took.as_secs_f64() * 1e3;
        (row.min_ms, row.max_ms) = (row.median_ms, row.median_ms);
        tell(&mut row, "leases", account.leases as f64);
        tell(&mut row, "ended", account.ended as f64);
        tell(&mut row, "blocks", account.blocks as f64);
        tell(&mut row, "returned", account.returned as f64);
        tell(&mut row, "twice", account.wrong as f64);
        tell(&mut row, "still_claimed", claimed as f64);
        let ok = account.is_settled() && claimed == 0 && report.quarantined == 0;
        hold(&mut row, "ok", ok);
        Ok((row, report.quarantined))
    }
}

/// What the reader's process used with all peers met, and what is left of it after its end.
fn resources(fresh: &Usage, met: &Usage, quarantined: u64) -> Row {
    let end = Usage::now();
    let mut row = blank("resources", Who::KvXfer, "reader");
    row.rounds = 1;
    tell(&mut row, "open_files_before", fresh.open_files as f64);
    tell(&mut row, "open_files_met", met.open_files as f64);
    tell(&mut row, "open_files_after", end.open_files as f64);
    tell(&mut row, "threads_before", fresh.threads as f64);
    tell(&mut row, "threads_met", met.threads as f64);
    tell(&mut row, "threads_after", end.threads as f64);
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    tell(&mut row, "resident_before_mib", mib(fresh.resident));
    tell(&mut row, "resident_met_mib", mib(met.resident));
    tell(&mut row, "resident_after_mib", mib(end.resident));
    // What libraries keep open for the process, such as logs and event queues, is few.
    let files = end.open_files <= fresh.open_files + 16;
    hold(&mut row, "ok", files && quarantined == 0);
    row
}

/// Very many leases at one holder.
fn leases(size: &ScaleSize, interrupt: &Interrupt) -> Result<Row, BenchError> {
    let small = Shape {
        regions: 1,
        blocks: 1024,
        block_bytes: 64,
    };
    // Room for those that are granted while the others end.
    let most = size.leases.saturating_mul(2).max(1024);
    let mut holder = Holders::start("leases", 0..1, small, most, interrupt)?;
    let costs = holder.leases(size.leases)?;
    holder.stop()?;
    let mut row = blank(format!("leases-{}", size.leases), Who::KvXfer, "");
    row.rounds = 1;
    let pairs = [
        ("grant", costs.grant_us),
        ("renew", costs.renew_us),
        ("revoke", costs.revoke_us),
    ];
    for (name, [p50, p99]) in pairs {
        tell(&mut row, &format!("{name}_p50_us"), p50);
        tell(&mut row, &format!("{name}_p99_us"), p99);
    }
    tell(&mut row, "expire_us", costs.expire_us);
    tell(
        &mut row,
        "grant_while_expiring_max_us",
        costs.grant_while_expiring_max_us,
    );
    tell(&mut row, "bytes_each", costs.bytes_each);
    tell(&mut row, "lost", costs.lost as f64);
    hold(&mut row, "ok", costs.lost == 0);
    Ok(row)
}

pub(super) fn wait_for(
    what: &'static str,
    mut happened: impl FnMut() -> bool,
) -> Result<(), BenchError> {
    let end = Instant::now() + LIMIT;
    while !happened() {
        if Instant::now() >= end {
            let waited = LIMIT;
            return Err(BenchError::TookTooLong { what, waited });
        }
        thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}

pub(super) fn join<T>(thread: thread::ScopedJoinHandle<'_, T>) -> Result<T, BenchError> {
    thread
        .join()
        .map_err(|_| BenchError::OutOfTurn("a thread of the bench panicked"))
}

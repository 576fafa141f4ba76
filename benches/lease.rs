//! What the lease table costs with 100,000 leases in it. No transport, no threads.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use criterion::{BenchmarkGroup, Criterion, criterion_group};
use kv_xfer::clock::MonoTime;
use kv_xfer::ids::{BlockId, RequestId, WordSlot};
use kv_xfer::layout::{MemKind, RegionGeometry};
use kv_xfer::lease::{EndedLease, Grant, LeaseConfig, LeaseTable, NewLease};
use kv_xfer::memory::ControlWords;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use common::{Budgets, US};

type Group<'a> = BenchmarkGroup<'a, criterion::measurement::WallTime>;

const LEASES: u32 = 100_000;
/// Operations timed together, so that reading the clock does not count.
const CHUNK: u32 = 500;

#[derive(Debug)]
struct Words(Vec<AtomicU64>);

impl ControlWords for Words {
    fn region(&self) -> RegionGeometry {
        RegionGeometry {
            base: 0,
            block_len: 8,
            block_stride: 8,
            block_count: LEASES + CHUNK,
            mem: MemKind::Dram,
            device: 0,
        }
    }

    fn load(&self, slot: WordSlot) -> Option<u64> {
        Some(self.0.get(slot.0 as usize)?.load(Ordering::Acquire))
    }

    fn store(&self, slot: WordSlot, value: u64) -> bool {
        let Some(word) = self.0.get(slot.0 as usize) else {
            return false;
        };
        word.store(value, Ordering::Release);
        std::sync::atomic::fence(Ordering::SeqCst);
        true
    }
}

/// A table of 100,000 leases that stays that full between chunks.
struct Leases {
    table: LeaseTable,
    words: Words,
    granted: Vec<Grant>,
    rng: ChaCha8Rng,
    next_request: u64,
    now: MonoTime,
}

impl Leases {
    fn new() -> Self {
        let config = LeaseConfig::new(LEASES + CHUNK, 7);
        let words = Words((0..config.max_leases).map(|_| AtomicU64::new(0)).collect());
        let table = LeaseTable::new(config).unwrap();
        table.publish_words(&words).unwrap();
        let mut this = Self {
            table,
            words,
            granted: Vec::new(),
            rng: ChaCha8Rng::seed_from_u64(1),
            next_request: 0,
            now: MonoTime::ZERO,
        };
        let new = this.requests(LEASES);
        this.grant(new);
        this
    }

    fn requests(&mut self, count: u32) -> Vec<NewLease> {
        let one = |_| {
            self.next_request += 1;
            NewLease {
                request: RequestId::new(format!("cmpl-{:032x}", self.next_request)).unwrap(),
                blocks: vec![BlockId(1); 8],
                ttl: Some(Duration::from_millis(
                    self.rng.random_range(480_000..600_000),
                )),
            }
        };
        (0..count).map(one).collect()
    }

    fn grant(&mut self, new: Vec<NewLease>) {
        for new in new {
            self.granted.push(self.table.grant(self.now, new).unwrap());
        }
    }

    /// Takes random leases off the list of those granted.
    fn pick(&mut self) -> Vec<Grant> {
        (0..CHUNK)
            .map(|_| {
                let at = self.rng.random_range(0..self.granted.len());
                self.granted.swap_remove(at)
            })
            .collect()
    }

    fn retire(&mut self, ended: Vec<EndedLease>) {
        for one in ended {
            let _ = black_box(self.table.retire(one, &self.words).unwrap());
        }
    }

    fn refill(&mut self) {
        let new = self.requests(CHUNK);
        self.grant(new);
    }
}

/// Runs `chunk`, which times `CHUNK` operations, until there are enough; then holds one operation
/// against its budget.
fn per_op(
    group: &mut Group<'_>,
    budgets: &mut Budgets,
    name: &str,
    mut chunk: impl FnMut() -> Duration,
) {
    let budget = format!("lease/{name}, of 100,000");
    budgets.spent(&budget, US, || chunk() / CHUNK);
    group.bench_function(name, |b| {
        b.iter_custom(|iters| {
            let chunks = iters.div_ceil(u64::from(CHUNK));
            let total: Duration = (0..chunks).map(|_| chunk()).sum();
            let ops = chunks * u64::from(CHUNK);
            total.mul_f64(iters as f64 / ops as f64)
        });
    });
}

fn lease(c: &mut Criterion) {
    let mut group = c.benchmark_group("lease");
    group.measurement_time(Duration::from_secs(3));
    let mut budgets = Budgets::default();
    let mut t = Leases::new();
    per_op(&mut group, &mut budgets, "grant", || {
        let new = t.requests(CHUNK);
        let start = Instant::now();
        t.grant(new);
        let took = start.elapsed();
        let ended = t
            .pick()
            .iter()
            .filter_map(|g| t.table.revoke(g.lease))
            .collect();
        t.retire(ended);
        took
    });
    per_op(&mut group, &mut budgets, "renew", || {
        let picked = t.pick();
        t.now = t.now + Duration::from_micros(1);
        let start = Instant::now();
        for g in &picked {
            black_box(t.table.renew(t.now, g.lease, Duration::from_secs(700)));
        }
        let took = start.elapsed();
        t.granted.extend(picked);
        took
    });
    per_op(&mut group, &mut budgets, "release", || {
        let picked = t.pick();
        let start = Instant::now();
        let ended: Vec<_> = picked
            .iter()
            .filter_map(|g| t.table.release(g.lease, g.word).ended())
            .collect();
        let took = start.elapsed();
        t.retire(ended);
        t.refill();
        took
    });
    per_op(&mut group, &mut budgets, "release_by_request", || {
        let names: Vec<_> = t
            .pick()
            .iter()
            .map(|g| t.table.get(g.lease).unwrap().request.clone())
            .collect();
        let start = Instant::now();
        let ended: Vec<_> = names
            .iter()
            .filter_map(|r| t.table.release_request(r, 1).ended())
            .collect();
        let took = start.elapsed();
        t.retire(ended);
        t.refill();
        took
    });
    per_op(&mut group, &mut budgets, "retire", || {
        let ended: Vec<_> = t
            .pick()
            .iter()
            .filter_map(|g| t.table.revoke(g.lease))
            .collect();
        let start = Instant::now();
        t.retire(ended);
        let took = start.elapsed();
        t.refill();
        took
    });
    drop(t);
    // Leases that all fall due together, at a time before everybody else's.
    let mut t = Leases::new();
    per_op(&mut group, &mut budgets, "expire", || {
        let keep = t.granted.len();
        let mut new = t.requests(CHUNK);
        for one in &mut new {
            one.ttl = Some(Duration::from_secs(1));
        }
        t.grant(new);
        t.granted.truncate(keep);
        let due = t.now + Duration::from_secs(1);
        let start = Instant::now();
        let ended = t.table.expire(due);
        let took = start.elapsed();
        assert_eq!(ended.len(), CHUNK as usize);
        t.retire(ended);
        took
    });
    group.finish();
    budgets.print("lease");
}

criterion_group!(benches, lease);
criterion::criterion_main!(benches);

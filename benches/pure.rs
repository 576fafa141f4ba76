//! What the pure parts cost: the lease table, the decision and the plan. No transport, no threads.
//!
//! The sizes are those of the budgets: 100,000 leases, 1,500 blocks to decide about, and 105,024
//! (region, block) pairs to plan: 64 regions of 1,641 blocks, a 26,000-token prompt in blocks of 16.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::HashMap;
use std::hint::black_box;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use kv_xfer::clock::MonoTime;
use kv_xfer::identity::{BlockHash, matching_prefix};
use kv_xfer::ids::{BlockId, RequestId, WordSlot};
use kv_xfer::layout::{MemKind, RegionGeometry, RegionPair};
use kv_xfer::lease::{EndedLease, Grant, LeaseConfig, LeaseTable, NewLease};
use kv_xfer::memory::ControlWords;
use kv_xfer::plan::{Cursor, Plan, PlanInput, PlanLimits};
use kv_xfer::policy::{DecisionInput, decide};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

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

/// Runs `chunk`, which times `CHUNK` operations, until there are enough.
fn per_op(group: &mut Group<'_>, name: &str, mut chunk: impl FnMut() -> Duration) {
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
    let mut t = Leases::new();
    per_op(&mut group, "grant", || {
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
    per_op(&mut group, "renew", || {
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
    per_op(&mut group, "release", || {
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
    per_op(&mut group, "release_by_request", || {
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
    per_op(&mut group, "retire", || {
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
    per_op(&mut group, "expire", || {
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
}

fn decision(c: &mut Criterion) {
    let mut group = c.benchmark_group("decide");
    let hashes: Vec<BlockHash> = {
        let mut rng = ChaCha8Rng::seed_from_u64(2);
        (0..1500).map(|_| BlockHash(rng.random())).collect()
    };
    let remote = hashes.clone();
    let blocks = shuffled(1500, 3);
    let input = DecisionInput {
        remote_tokens: 24_000,
        prompt_tokens: 30_000,
        lease_remaining: Some(Duration::from_secs(400)),
        ..DecisionInput::new(NonZeroU32::new(16).unwrap())
    };
    group.bench_function("bare", |b| b.iter(|| decide(black_box(&input))));
    group.bench_function("1500_blocks", |b| {
        b.iter(|| {
            let inside = black_box(&blocks).iter().all(|b| b.0 < 1500);
            let matched = matching_prefix(black_box(&hashes), black_box(&remote));
            decide(&DecisionInput {
                matched_tokens: matched as u64 * 16,
                peer_ok: inside,
                ..input
            })
        });
    });
    group.finish();
}

fn shuffled(blocks: u32, seed: u64) -> Vec<BlockId> {
    let mut ids: Vec<_> = (0..blocks).map(BlockId).collect();
    ids.shuffle(&mut ChaCha8Rng::seed_from_u64(seed));
    ids
}

fn regions(count: u64) -> Vec<RegionPair> {
    let one = |i| RegionPair {
        remote_base: i << 33,
        remote_stride: 8192,
        local_base: (i + 100) << 33,
        local_stride: 8192,
        len: 8192,
        layer: u32::try_from(i).unwrap(),
        remote_mem: MemKind::Vram,
        remote_device: 0,
        local_mem: MemKind::Vram,
        local_device: 0,
    };
    (0..count).map(one).collect()
}

fn plan(c: &mut Criterion) {
    let mut group = c.benchmark_group("plan");
    let up = |n| (0..n).map(BlockId).collect::<Vec<_>>();
    let down = |n| (0..n).rev().map(BlockId).collect::<Vec<_>>();
    // No two blocks follow each other on both sides, the remote ones in no order.
    let strided = |n: u32| {
        (0..n)
            .map(|b| BlockId((b * 2) % n + u32::from(b * 2 >= n)))
            .collect()
    };
    let cases: HashMap<&str, (Vec<BlockId>, Vec<BlockId>, u64)> = HashMap::from([
        ("worst_64x1641", (shuffled(1641, 4), shuffled(1641, 5), 64)),
        (
            "worst_1x105024",
            (shuffled(105_024, 4), shuffled(105_024, 5), 1),
        ),
        ("ordered_64x1640", (up(1640), strided(1640), 64)),
        ("contiguous_64x1641", (up(1641), up(1641), 64)),
        ("reversed_64x1641", (down(1641), down(1641), 64)),
        ("contiguous_1x105024", (up(105_024), up(105_024), 1)),
    ]);
    let mut names: Vec<_> = cases.keys().copied().collect();
    names.sort_unstable();
    for name in names {
        let (remote, local, count) = &cases[name];
        let pairs = regions(*count);
        let blocks = u32::try_from(remote.len()).unwrap();
        let input = PlanInput {
            remote_blocks: remote,
            local_blocks: local,
            pairs: &pairs,
            remote_block_count: blocks,
            local_block_count: blocks,
            limits: PlanLimits::default(),
        };
        group.throughput(Throughput::Elements(u64::from(blocks) * count));
        let mut out = Vec::with_capacity(1024);
        group.bench_function(name, |b| {
            b.iter(|| {
                let plan = Plan::new(black_box(input)).unwrap();
                let mut cursor = Cursor::default();
                while let Some(info) = plan.next_window(&mut cursor, 1024, u64::MAX, &mut out) {
                    black_box((info, &out));
                }
                plan
            });
        });
    }
    group.finish();
}

criterion_group!(benches, lease, decision, plan);
criterion_main!(benches);

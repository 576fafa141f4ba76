//! Reads from several holders at once over the real NIXL, and what they do to a small one beside them.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::time::{Duration, Instant};

use common::Budgets;
use criterion::{Criterion, Throughput};
use kv_xfer::transport::nixl::BackendConfig;
use kvx::bench::fixture;
use kvx::bench::holders::Holders;
use kvx::bench::load::{Lane, Load};
use kvx::bench::proto::Shape;
use kvx::bench::report::percentile;
use kvx::bench::scale::{ScaleSize, measure};
use kvx::proc::Interrupt;

const LANES: u32 = 64;
const BLOCKS: u32 = 64;
const READ_BLOCKS: u32 = 8;

fn shape(blocks: u32) -> Shape {
    Shape {
        regions: 8,
        blocks,
        block_bytes: 8192,
    }
}

/// The same 64 reads from one peer and from several.
fn fan_in(c: &mut Criterion) {
    let transport = kvx::runtime::open(BackendConfig::default()).unwrap();
    let interrupt = Interrupt::default();
    let mut group = c.benchmark_group("fan_in");
    group.sample_size(20);
    group.measurement_time(Duration::from_secs(4));
    for peers in [1, 4, 16_u32] {
        let name = format!("fan-in-{peers}");
        let mut holders = Holders::start(&name, 0..peers, shape(BLOCKS), 64, &interrupt).unwrap();
        let pool = fixture::pool(&shape(LANES * READ_BLOCKS)).unwrap();
        let engine = fixture::start(&name, &pool, &transport, |_| {}).unwrap();
        let offers: Vec<_> = (0..peers)
            .map(|n| {
                let params = holders.offer(n, fixture::shuffled(BLOCKS, 1)).unwrap();
                fixture::accept(&engine, params).unwrap()
            })
            .collect();
        let lanes = (0..LANES)
            .map(|n| {
                let ids = n * READ_BLOCKS..(n + 1) * READ_BLOCKS;
                let first = n % (BLOCKS / READ_BLOCKS) * READ_BLOCKS;
                let blocks = fixture::claim(&engine, ids).unwrap();
                Lane::new((n % peers) as usize, first as usize, blocks)
            })
            .collect();
        let hashes = fixture::hashes(BLOCKS as usize);
        let mut load = Load::new(&engine, &offers, &hashes, lanes);
        load.run(Instant::now()).unwrap();
        let bytes = u64::from(LANES * READ_BLOCKS) * 8 * 8192;
        group.throughput(Throughput::Bytes(bytes));
        group.bench_function(format!("64_reads_from_{peers}"), |b| {
            b.iter(|| {
                let done = load.run(Instant::now()).unwrap();
                assert_eq!((done.reads, done.failed), (u64::from(LANES), 0));
            });
        });
        drop(load);
        engine.shutdown(Duration::from_secs(5));
        holders.stop().unwrap();
    }
    group.finish();
}

/// A small `kvx bench scale`.
fn properties(budgets: &mut Budgets) {
    let (peers, reads, leases, busy) = if common::is_test() {
        (2, 4, 200, 100)
    } else {
        (16, 256, 100_000, 2000)
    };
    let size = ScaleSize {
        peers,
        reads,
        leases,
        busy: Duration::from_millis(busy),
    };
    let report = measure(&size, &Interrupt::default()).unwrap();
    assert!(report.ok, "{report:#?}");
    for row in &report.rows {
        for (name, budget, unit) in [
            ("p99_to_idle", 3.0, "x"),
            ("grant_p50_us", 10.0, "us"),
            ("renew_p50_us", 1.0, "us"),
            ("revoke_p50_us", 1.0, "us"),
        ] {
            if row.more.contains_key(name) {
                let name_of = format!("{}, {}: {name}", row.case, row.setting);
                budgets.number(&name_of, budget, percentile(row, name), unit);
            }
        }
        if row.more.contains_key("share_min_to_mean") {
            let unfair = 1.0 - percentile(row, "share_min_to_mean");
            budgets.number("share of the slowest peer below the mean", 0.5, unfair, "");
        }
    }
}

fn main() {
    common::prepare();
    let mut criterion = Criterion::default().configure_from_args();
    let mut budgets = Budgets::default();
    fan_in(&mut criterion);
    properties(&mut budgets);
    criterion.final_summary();
    budgets.print("scale");
}

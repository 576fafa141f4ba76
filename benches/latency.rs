//! One block over the real NIXL, between two processes: by the engine, and by NIXL alone.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::Budgets;
use criterion::Criterion;
use kv_xfer::transport::nixl::BackendConfig;
use kvx::bench::bare::Bare;
use kvx::bench::pair::Pair;
use kvx::bench::probe::Probes;
use kvx::bench::proto::Shape;
use kvx::proc::Interrupt;

const BLOCKS: u32 = 64;

fn one_block(c: &mut Criterion, budgets: &mut Budgets) {
    let transport = kvx::runtime::open(BackendConfig::default()).unwrap();
    let mut group = c.benchmark_group("one_block");
    group.measurement_time(Duration::from_secs(3));
    for (name, regions, block_bytes) in [
        ("layer_first_64x8KiB", 64, 8 << 10),
        ("block_first_1x512KiB", 1, 512 << 10),
        ("single_1x8KiB", 1, 8 << 10),
    ] {
        let shape = Shape {
            regions,
            blocks: BLOCKS,
            block_bytes,
        };
        let pair = Pair::start(name, shape, &transport, &Interrupt::default()).unwrap();
        let address = pair.holders.address(0).unwrap();
        let pool = pair.engine.pool();
        let (mut bare, _) = Bare::meet(name, &transport, pool, &address).unwrap();
        let (_, wrong) = pair.read(0, 1, true).unwrap();
        assert_eq!(wrong, 0);
        let mut next = (0..BLOCKS as usize).cycle();
        group.bench_function(format!("{name}/engine"), |b| {
            b.iter(|| pair.read(next.next().unwrap(), 1, false).unwrap());
        });
        let plans: Vec<_> = (0..BLOCKS as usize)
            .map(|at| bare.plan(&[pair.remote[at]], &[pair.local[at]]).unwrap())
            .collect();
        group.bench_function(format!("{name}/nixl_alone"), |b| {
            b.iter(|| bare.read(&plans[next.next().unwrap()], usize::MAX).unwrap());
        });
        let reads = if common::is_test() { 3 } else { 1000 };
        let mut probes = Probes::default();
        let mut alone = Vec::new();
        for _ in 0..reads {
            probes.take(pair.read(next.next().unwrap(), 1, false).unwrap().0);
            let plan = &plans[next.next().unwrap()];
            alone.push(bare.read(plan, usize::MAX).unwrap().total);
        }
        let alone: kvx::bench::stats::Times = alone.into_iter().collect();
        let times = probes.total();
        let over = |share| times.quantile(share) - alone.quantile(share);
        budgets.number(
            &format!("{name}, p50 over NIXL alone"),
            30.0,
            over(0.5),
            "us",
        );
        budgets.number(
            &format!("{name}, p99 over NIXL alone"),
            100.0,
            over(0.99),
            "us",
        );
        let submits = probes.of(|timing| timing.submit);
        let p99 = submits.quantile(0.99);
        budgets.number(&format!("{name}, submit p99"), 50.0, p99, "us");
        budgets.number(&format!("{name}, p99"), 1000.0, times.quantile(0.99), "us");
        bare.end().unwrap();
        pair.end().unwrap();
    }
    group.finish();
}

fn main() {
    common::prepare();
    let mut criterion = Criterion::default().configure_from_args();
    let mut budgets = Budgets::default();
    one_block(&mut criterion, &mut budgets);
    criterion.final_summary();
    budgets.print("latency");
}

//! What a plan costs, with all windows cut from it. The worst case is 105,024 (region, block) pairs:
//! 64 regions of 1,641 blocks, a 26,000-token prompt in blocks of 16.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::collections::HashMap;
use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group};
use kv_xfer::descriptor::BlockRuns;
use kv_xfer::ids::BlockId;
use kv_xfer::layout::{MemKind, RegionPair};
use kv_xfer::plan::{Cursor, Plan, PlanInput, PlanLimits, RunsInput};
use kv_xfer::transport::Descriptor;

use common::{Budgets, US, shuffled};

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
        group.throughput(Throughput::Elements(u64::from(blocks) * count));
        let mut out = Vec::with_capacity(1024);
        group.bench_function(name, |b| b.iter(|| cut(remote, local, &pairs, &mut out)));
    }
    group.finish();
    budgets(&cases);
}

/// Plans and cuts every window.
fn cut(
    remote: &[BlockId],
    local: &[BlockId],
    pairs: &[RegionPair],
    out: &mut Vec<Descriptor>,
) -> Plan {
    let blocks = u32::try_from(remote.len()).unwrap();
    let input = PlanInput {
        remote_blocks: remote,
        local_blocks: local,
        pairs,
        remote_block_count: blocks,
        local_block_count: blocks,
        limits: PlanLimits::default(),
    };
    let plan = Plan::new(black_box(input)).unwrap();
    let mut cursor = Cursor::default();
    while let Some(info) = plan.next_window(&mut cursor, 1024, u64::MAX, out) {
        black_box((info, &out));
    }
    plan
}

fn budgets(cases: &HashMap<&str, (Vec<BlockId>, Vec<BlockId>, u64)>) {
    let mut budgets = Budgets::default();
    let mut out = Vec::with_capacity(1024);
    for name in ["worst_64x1641", "worst_1x105024", "ordered_64x1640"] {
        let (remote, local, count) = &cases[name];
        let pairs = regions(*count);
        let budget = 3000 * US;
        budgets.time(&format!("plan/{name}, all windows"), budget, || {
            cut(remote, local, &pairs, &mut out)
        });
    }
    // As the engine does it: by runs. Windows are cut as they are posted, and follow the bytes.
    let pairs = regions(64);
    let mut first = None;
    for blocks in [1_000, 10_000, 100_000, 150_000_u32] {
        let ids: Vec<_> = (0..blocks).map(BlockId).collect();
        let runs = BlockRuns::from_ids(&ids);
        let name = format!("plan/contiguous 64 x {blocks}, from its runs");
        let mut spent = Vec::new();
        let start = std::time::Instant::now();
        while spent.len() < 3 || start.elapsed().as_millis() < 200 {
            let start = std::time::Instant::now();
            let input = RunsInput {
                remote_blocks: &runs,
                local_blocks: &runs,
                pairs: &pairs,
                remote_block_count: blocks,
                local_block_count: blocks,
                limits: PlanLimits::default(),
            };
            black_box(Plan::from_runs(black_box(input)).unwrap());
            spent.push(start.elapsed());
        }
        spent.sort();
        let median = spent[spent.len() / 2].as_secs_f64() * 1e6;
        // Independent of the number of blocks: no more than twice what a thousand take.
        let budget = *first.get_or_insert(median * 2.0);
        budgets.number(&name, budget.round(), median, "us");
    }
    budgets.print("plan");
}

criterion_group!(benches, plan);
criterion::criterion_main!(benches);

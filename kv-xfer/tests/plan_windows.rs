//! Plans: the right bytes, in windows that partition them, whatever the blocks look like.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;

use kv_xfer::descriptor::BlockRuns;
use kv_xfer::ids::BlockId;
use kv_xfer::layout::{MemKind, RegionPair};
use kv_xfer::plan::{
    Cursor, PairRun, Plan, PlanError, PlanInput, PlanLimits, RunsInput, Side, WindowInfo,
};
use kv_xfer::transport::{Descriptor, Ends};
use proptest::prelude::*;

const BLOCKS: u32 = 64;
const MERGE: PlanLimits = PlanLimits {
    max_descriptor_bytes: u64::MAX,
};

/// Region `i`, far from every other on both sides.
fn pair(i: u64, len: u64, remote_gap: u64, local_gap: u64, layer: u32) -> RegionPair {
    RegionPair {
        remote_base: 0x10_0000 * (i + 1),
        remote_stride: len + remote_gap,
        local_base: 0x9000_0000 + 0x10_0000 * i,
        local_stride: len + local_gap,
        len,
        layer,
        remote_mem: MemKind::Vram,
        remote_device: 3,
        local_mem: MemKind::Vram,
        local_device: 1,
    }
}

fn ids(ids: impl IntoIterator<Item = u32>) -> Vec<BlockId> {
    ids.into_iter().map(BlockId).collect()
}

fn plan(
    remote: &[BlockId],
    local: &[BlockId],
    pairs: &[RegionPair],
    limits: PlanLimits,
) -> Result<Plan, PlanError> {
    let plan = Plan::new(PlanInput {
        remote_blocks: remote,
        local_blocks: local,
        pairs,
        remote_block_count: BLOCKS,
        local_block_count: BLOCKS,
        limits,
    });
    // Planned by runs, it moves the same pairs, in no more pieces.
    let by_runs = Plan::from_runs(RunsInput {
        remote_blocks: &BlockRuns::from_ids(remote),
        local_blocks: &BlockRuns::from_ids(local),
        pairs,
        remote_block_count: BLOCKS,
        local_block_count: BLOCKS,
        limits,
    });
    match (&plan, &by_runs) {
        (Ok(plan), Ok(by_runs)) => {
            assert_eq!(moved(plan), moved(by_runs));
            assert!(by_runs.runs().len() <= plan.runs().len());
            assert!(by_runs.descriptors() <= plan.descriptors());
            assert_eq!(by_runs.bytes(), plan.bytes());
        }
        (Err(error), Err(by_runs)) => {
            assert_eq!(
                std::mem::discriminant(error),
                std::mem::discriminant(by_runs)
            );
        }
        _ => panic!("{plan:?} but by runs {by_runs:?}"),
    }
    plan
}

/// The pairs of blocks that a plan moves.
fn moved(plan: &Plan) -> Vec<(u32, u32)> {
    let pairs = |run: &PairRun| {
        let (remote, local) = (run.remote_first.0, run.local_first.0);
        (0..run.len).map(move |i| (remote + i, local + i))
    };
    let mut all: Vec<(u32, u32)> = plan.runs().iter().flat_map(pairs).collect();
    all.sort_unstable();
    all
}

fn windows(plan: &Plan, descriptors: usize, bytes: u64) -> Vec<(WindowInfo, Vec<Descriptor>)> {
    let mut cursor = Cursor::default();
    let mut out = vec![Descriptor {
        remote: 1,
        local: 1,
        len: 1,
    }];
    let mut all = Vec::new();
    while let Some(info) = plan.next_window(&mut cursor, descriptors, bytes, &mut out) {
        all.push((info, out.clone()));
    }
    assert!(out.is_empty());
    all
}

fn descriptors(plan: &Plan) -> Vec<Descriptor> {
    windows(plan, usize::MAX, u64::MAX)
        .into_iter()
        .flat_map(|w| w.1)
        .collect()
}

fn run(remote: u32, local: u32, len: u32) -> PairRun {
    PairRun {
        remote_first: BlockId(remote),
        local_first: BlockId(local),
        len,
    }
}

#[test]
fn a_contiguous_read_is_one_descriptor_a_region() {
    let pairs = [pair(0, 100, 0, 0, 0), pair(1, 100, 0, 0, 1)];
    let p = plan(&ids(5..25), &ids(30..50), &pairs, MERGE).unwrap();
    assert_eq!(p.runs(), [run(5, 30, 20)]);
    assert_eq!(
        (p.descriptors(), p.descriptors_unmerged(), p.bytes()),
        (2, 40, 4000)
    );
    let expected = |p: &RegionPair| Descriptor {
        remote: p.remote_base + 500,
        local: p.local_base + 3000,
        len: 2000,
    };
    assert_eq!(descriptors(&p), [expected(&pairs[0]), expected(&pairs[1])]);
}

#[test]
fn descending_blocks_merge_like_ascending_ones() {
    let pairs = [pair(0, 100, 0, 0, 0)];
    let up = plan(&ids(5..25), &ids(30..50), &pairs, MERGE).unwrap();
    let down = plan(&ids((5..25).rev()), &ids((30..50).rev()), &pairs, MERGE).unwrap();
    assert_eq!(up.runs(), down.runs());
    assert_eq!(descriptors(&up), descriptors(&down));
    // Opposite directions share no runs.
    let crossed = plan(&ids(5..25), &ids((30..50).rev()), &pairs, MERGE).unwrap();
    assert_eq!(crossed.runs().len(), 20);
}

#[test]
fn interleaved_lists_are_sorted_out() {
    let pairs = [pair(0, 10, 0, 0, 0)];
    let p = plan(
        &ids([7, 20, 8, 21, 6, 22]),
        &ids([1, 11, 2, 12, 0, 13]),
        &pairs,
        MERGE,
    )
    .unwrap();
    assert_eq!(p.runs(), [run(6, 0, 3), run(20, 11, 3)]);
}

#[test]
fn blocks_far_apart_and_blocks_read_twice_are_sorted_too() {
    let pairs = [pair(0, 10, 0, 0, 0)];
    let p = plan(&ids([60, 1, 2]), &ids([9, 4, 5]), &pairs, MERGE).unwrap();
    assert_eq!(p.runs(), [run(1, 4, 2), run(60, 9, 1)]);
    let p = plan(&ids([3, 2, 3]), &ids([9, 8, 4]), &pairs, MERGE).unwrap();
    assert_eq!(p.runs(), [run(2, 8, 1), run(3, 4, 1), run(3, 9, 1)]);
}

#[test]
fn runs_are_split_between_blocks() {
    let pairs = [pair(0, 100, 0, 0, 0)];
    let lens = |max| {
        let limits = PlanLimits {
            max_descriptor_bytes: max,
        };
        let p = plan(&ids(0..10), &ids(0..10), &pairs, limits).unwrap();
        let lens: Vec<_> = descriptors(&p).iter().map(|d| d.len).collect();
        assert_eq!(p.descriptors(), lens.len() as u64);
        lens
    };
    assert_eq!(lens(1000), [1000]);
    assert_eq!(lens(999), [900, 100]);
    assert_eq!(lens(400), [400, 400, 200]);
    // A block is never split.
    assert_eq!(lens(100), [100; 10]);
    assert_eq!(lens(99), [100; 10]);
    assert_eq!(lens(0), [100; 10]);
}

#[test]
fn blocks_that_do_not_touch_are_not_merged() {
    for (remote_gap, local_gap) in [(1, 0), (0, 1), (28, 28)] {
        let pairs = [pair(0, 100, remote_gap, local_gap, 0)];
        let p = plan(&ids(0..10), &ids(0..10), &pairs, MERGE).unwrap();
        assert_eq!(p.runs().len(), 1);
        assert_eq!(p.descriptors(), 10);
        assert!(descriptors(&p).iter().all(|d| d.len == 100));
    }
}

#[test]
fn windows_never_mix_ends() {
    let host = |p: RegionPair| RegionPair {
        remote_mem: MemKind::Dram,
        ..p
    };
    let pairs = [
        pair(0, 8, 0, 0, 0),
        pair(1, 8, 0, 0, 1),
        host(pair(2, 8, 0, 0, 2)),
        pair(3, 8, 0, 0, 3),
    ];
    let p = plan(&ids([1, 3]), &ids([1, 3]), &pairs, MERGE).unwrap();
    let w = windows(&p, 100, 1000);
    let seen: Vec<_> = w
        .iter()
        .map(|(i, d)| (i.ends.remote_mem, d.len(), i.layers, i.last))
        .collect();
    assert_eq!(
        seen,
        [
            (MemKind::Vram, 4, 2, false),
            (MemKind::Dram, 2, 3, false),
            (MemKind::Vram, 2, 4, true)
        ]
    );
    assert_eq!(
        w[0].0.ends,
        Ends {
            remote_mem: MemKind::Vram,
            remote_device: 3,
            local_mem: MemKind::Vram,
            local_device: 1
        }
    );
}

#[test]
fn windows_keep_to_their_limits_and_always_advance() {
    let pairs = [pair(0, 100, 0, 0, 0), pair(1, 100, 0, 0, 1)];
    // Two runs, of 3 blocks and of 1.
    let p = plan(&ids([1, 2, 3, 9]), &ids([1, 2, 3, 9]), &pairs, MERGE).unwrap();
    let sizes = |descriptors, bytes| -> Vec<_> {
        let w = windows(&p, descriptors, bytes);
        w.iter()
            .map(|(i, d)| (d.len(), i.bytes, i.layers))
            .collect()
    };
    assert_eq!(
        sizes(1, u64::MAX),
        [(1, 300, 0), (1, 100, 1), (1, 300, 1), (1, 100, 2)]
    );
    assert_eq!(sizes(0, u64::MAX), sizes(1, u64::MAX));
    assert_eq!(sizes(3, u64::MAX), [(3, 700, 1), (1, 100, 2)]);
    assert_eq!(sizes(9, 400), [(2, 400, 1), (2, 400, 2)]);
    // A descriptor over the limit goes alone.
    assert_eq!(
        sizes(9, 299),
        [(1, 300, 0), (1, 100, 1), (1, 300, 1), (1, 100, 2)]
    );
    assert_eq!(sizes(9, 0), sizes(1, u64::MAX));
}

/// The layers that are complete as each window of one region pair ends.
fn progress(layers: &[u32]) -> Vec<u32> {
    let pairs: Vec<_> = layers
        .iter()
        .zip(0..)
        .map(|(&layer, i)| pair(i, 8, 0, 0, layer))
        .collect();
    let p = plan(&ids([1]), &ids([1]), &pairs, MERGE).unwrap();
    assert_eq!(Some(p.layers()), layers.iter().max().map(|l| l + 1));
    windows(&p, 1, u64::MAX)
        .iter()
        .map(|(i, _)| i.layers)
        .collect()
}

#[test]
fn a_layer_is_complete_with_the_last_of_its_regions() {
    assert_eq!(progress(&[0, 1, 2]), [1, 2, 3]);
    // Keys and values apart.
    assert_eq!(progress(&[0, 0, 1, 1]), [0, 1, 1, 2]);
    assert_eq!(progress(&[0, 1, 2, 0, 1, 2]), [0, 0, 0, 1, 2, 3]);
    // All layers in one region, and groups of four: a pair names the last of its layers.
    assert_eq!(progress(&[31]), [32]);
    assert_eq!(progress(&[3, 7]), [4, 8]);
    assert_eq!(progress(&[7, 3]), [0, 8]);
    assert_eq!(progress(&[u32::MAX - 1]), [u32::MAX]);
}

#[test]
fn faults_are_named() {
    let good = [pair(0, 8, 0, 0, 0)];
    let refuse = |remote: &[BlockId], local: &[BlockId], pairs: &[RegionPair]| {
        plan(remote, local, pairs, MERGE).unwrap_err()
    };
    assert_eq!(refuse(&[], &[], &good), PlanError::NoBlocks);
    assert_eq!(refuse(&ids([1]), &ids([1]), &[]), PlanError::NoRegions);
    let mismatch = PlanError::LengthMismatch {
        remote: 2,
        local: 1,
    };
    assert_eq!(refuse(&ids([1, 2]), &ids([1]), &good), mismatch);
    for (remote, local, side) in [(BLOCKS, 0, Side::Remote), (0, u32::MAX, Side::Local)] {
        let fault = PlanError::BlockOutOfRange {
            side,
            block: BlockId(remote.max(local)),
            blocks: BLOCKS,
        };
        assert_eq!(refuse(&ids([1, remote]), &ids([1, local]), &good), fault);
    }
    let twice = PlanError::DuplicateLocalBlock { block: BlockId(5) };
    assert_eq!(refuse(&ids([1, 2]), &ids([5, 5]), &good), twice);
    assert_eq!(refuse(&ids([1, 2, 3, 9]), &ids([4, 5, 6, 5]), &good), twice);
    assert_eq!(refuse(&ids([9, 1, 2, 3]), &ids([5, 4, 5, 6]), &good), twice);
    assert_eq!(refuse(&ids([9, 8, 7]), &ids([5, 60, 5]), &good), twice);
    // Far apart, where no table of blocks is made.
    let wide = Plan::new(PlanInput {
        remote_blocks: &ids([4_000_000_000, 5, 6]),
        local_blocks: &ids([5, 4_000_000_000, 5]),
        pairs: &good,
        remote_block_count: u32::MAX,
        local_block_count: u32::MAX,
        limits: MERGE,
    });
    assert_eq!(wide.unwrap_err(), twice);
    let empty = PlanError::EmptyRegion { pair: 1 };
    assert_eq!(
        refuse(&ids([1]), &ids([1]), &[good[0], pair(1, 0, 0, 0, 0)]),
        empty
    );
    let short = RegionPair {
        local_stride: 7,
        ..good[0]
    };
    let fault = PlanError::StrideTooShort {
        pair: 0,
        side: Side::Local,
        stride: 7,
        len: 8,
    };
    assert_eq!(refuse(&ids([1]), &ids([1]), &[short]), fault);
}

#[test]
fn nothing_overflows() {
    let at = |remote_base, remote_stride, len| RegionPair {
        remote_base,
        remote_stride,
        len,
        local_base: 0,
        local_stride: len,
        ..pair(0, 8, 0, 0, 0)
    };
    let of = |block, p| plan(&ids([block]), &ids([0]), &[p], MERGE);
    // The last byte of the address space cannot be ended at by an exclusive end: one before can.
    assert!(of(1, at(u64::MAX - 16, 8, 8)).is_ok());
    let wraps = |p, block| {
        let fault = PlanError::Wraps {
            pair: 0,
            side: Side::Remote,
            block: BlockId(block),
        };
        assert_eq!(of(block, p).unwrap_err(), fault);
    };
    wraps(at(u64::MAX - 15, 8, 8), 1);
    wraps(at(0, u64::MAX, 8), 2);
    wraps(at(1, u64::MAX, 8), 1);
    let huge = [at(0, 1 << 63, 1 << 63), at(0, 1 << 63, 1 << 63)];
    let sum = plan(&ids([0]), &ids([0]), &huge, MERGE);
    assert_eq!(sum.unwrap_err(), PlanError::TooManyBytes);
    let last = of(1, at(u64::MAX - 16, 8, 8)).unwrap();
    assert_eq!(descriptors(&last)[0].remote, u64::MAX - 8);
}

#[test]
fn a_cursor_of_another_plan_does_no_harm() {
    let big = plan(
        &ids([1, 3, 5]),
        &ids([1, 3, 5]),
        &[pair(0, 8, 0, 0, 0); 3],
        MERGE,
    )
    .unwrap();
    let small = plan(&ids([1]), &ids([1]), &[pair(0, 8, 0, 0, 0)], MERGE).unwrap();
    let mut cursor = Cursor::default();
    let mut out = Vec::new();
    for _ in 0..8 {
        assert!(big.next_window(&mut cursor, 1, 8, &mut out).is_some());
    }
    assert_eq!(small.next_window(&mut cursor, 1, 8, &mut out), None);
}

fn block_pairs() -> impl Strategy<Value = Vec<(u32, u32)>> {
    let n = BLOCKS;
    let contiguous = (0..n, 0..n, 1..=n).prop_map(move |(r, l, len)| {
        let len = len.min(n - r).min(n - l);
        (0..len).map(|i| (r + i, l + i)).collect::<Vec<_>>()
    });
    let shuffled = (
        Just((0..n).collect::<Vec<_>>()).prop_shuffle(),
        prop::collection::vec(0..n, 1..=n as usize),
    )
        .prop_map(|(local, remote)| remote.into_iter().zip(local).collect::<Vec<_>>());
    // Pieces of a contiguous read, each possibly reversed, in any order, some left out.
    let pieces = (
        contiguous.clone(),
        prop::collection::vec((1..6_usize, any::<bool>()), 1..20),
    )
        .prop_flat_map(|(pairs, cuts)| {
            let mut rest = pairs.as_slice();
            let mut out = Vec::new();
            for (len, reverse) in cuts {
                let (head, tail) = rest.split_at(len.min(rest.len()));
                let mut head = head.to_vec();
                if reverse {
                    head.reverse();
                }
                out.push(head);
                rest = tail;
            }
            Just(out).prop_shuffle()
        })
        .prop_map(|pieces| pieces.into_iter().step_by(2).flatten().collect::<Vec<_>>())
        .prop_filter("no blocks", |pairs| !pairs.is_empty());
    let interleaved = (0..8_u32, 2..30_u32).prop_map(|(shift, len)| {
        (0..len)
            .map(|i| {
                if i % 2 == 0 {
                    i / 2
                } else {
                    40 + i / 2 - i % 3
                }
            })
            .map(|b| (b, b + shift))
            .collect::<BTreeMap<_, _>>()
            .into_iter()
            .collect::<Vec<_>>()
    });
    prop_oneof![
        contiguous.clone(),
        contiguous.prop_map(|mut p| {
            p.reverse();
            p
        }),
        shuffled,
        pieces,
        interleaved,
    ]
}

fn regions() -> impl Strategy<Value = Vec<RegionPair>> {
    let gap = || prop_oneof![3 => Just(0_u64), 1 => 1..9_u64];
    let region = (1..20_u64, gap(), gap(), 0..4_u32, prop::bool::weighted(0.2));
    prop::collection::vec(region, 1..6).prop_map(|regions| {
        let numbered = regions.into_iter().zip(0..);
        let pairs = numbered.map(
            |((len, remote_gap, local_gap, layer, host), i)| RegionPair {
                remote_mem: if host { MemKind::Dram } else { MemKind::Vram },
                ..pair(i, len, remote_gap, local_gap, layer)
            },
        );
        pairs.collect()
    })
}

/// For every local byte, the remote byte that goes there.
fn bytes(moves: impl IntoIterator<Item = Descriptor>) -> BTreeMap<u64, u64> {
    let mut map = BTreeMap::new();
    for d in moves {
        for i in 0..d.len {
            assert_eq!(map.insert(d.local + i, d.remote + i), None, "written twice");
        }
    }
    map
}

fn naive(blocks: &[(u32, u32)], pair: &RegionPair) -> Vec<Descriptor> {
    let one = |&(r, l): &(u32, u32)| Descriptor {
        remote: pair.remote_base + u64::from(r) * pair.remote_stride,
        local: pair.local_base + u64::from(l) * pair.local_stride,
        len: pair.len,
    };
    blocks.iter().map(one).collect()
}

fn ends_of(p: &RegionPair) -> Ends {
    Ends {
        remote_mem: p.remote_mem,
        remote_device: p.remote_device,
        local_mem: p.local_mem,
        local_device: p.local_device,
    }
}

/// Lists of few runs, each up or down.
fn run_lists() -> impl Strategy<Value = (Vec<BlockId>, Vec<BlockId>)> {
    let side = || {
        prop::collection::vec((0..BLOCKS, 1..24_u32, any::<bool>()), 1..5).prop_map(|runs| {
            let mut list = Vec::new();
            for (first, len, up) in runs {
                let last = (first + len).min(BLOCKS);
                if up {
                    list.extend(first..last);
                } else {
                    list.extend((first..last).rev());
                }
            }
            list
        })
    };
    (side(), side()).prop_map(|(mut remote, mut local)| {
        let mut seen = std::collections::HashSet::new();
        local.retain(|id| seen.insert(*id));
        let len = remote.len().min(local.len());
        remote.truncate(len);
        local.truncate(len);
        (ids(remote), ids(local))
    })
}

#[test]
fn contiguous_lists_are_one_run_however_they_are_given() {
    let up = ids(0..BLOCKS);
    let down = ids((0..BLOCKS).rev());
    let halves = |i: u32| {
        if i.is_multiple_of(2) {
            i / 2
        } else {
            BLOCKS / 2 + i / 2
        }
    };
    let dealt = ids((0..BLOCKS).map(halves));
    for list in [up, down, dealt] {
        let plan = plan(&list, &list, &[pair(0, 8, 0, 0, 0)], MERGE).unwrap();
        assert_eq!(plan.runs().len(), 1);
    }
}

proptest! {
    #[test]
    fn lists_of_few_runs_are_planned_alike((remote, local) in run_lists()) {
        // Compared within.
        let _ = plan(&remote, &local, &[pair(0, 8, 0, 0, 0)], MERGE);
    }

    #[test]
    fn the_plan_moves_the_bytes_of_the_naive_plan(
        blocks in block_pairs(),
        regions in regions(),
        max_descriptor_bytes in prop_oneof![0..100_u64, Just(u64::MAX)],
        max_descriptors in 1..40_usize,
        max_bytes in prop_oneof![0..500_u64, Just(u64::MAX)],
    ) {
        let (remote, local): (Vec<_>, Vec<_>) =
            blocks.iter().map(|&(r, l)| (BlockId(r), BlockId(l))).unzip();
        let limits = PlanLimits { max_descriptor_bytes };
        let p = plan(&remote, &local, &regions, limits).unwrap();
        let windows = windows(&p, max_descriptors, max_bytes);

        // Windows partition the plan and keep to their limits.
        let all: Vec<Descriptor> = windows.iter().flat_map(|w| w.1.iter().copied()).collect();
        prop_assert_eq!(&all, &descriptors(&p));
        prop_assert_eq!(all.len() as u64, p.descriptors());
        prop_assert!(p.descriptors() <= p.descriptors_unmerged());
        prop_assert_eq!(p.descriptors_unmerged(), (blocks.len() * regions.len()) as u64);
        prop_assert_eq!(all.iter().map(|d| d.len).sum::<u64>(), p.bytes());
        for (i, (info, window)) in windows.iter().enumerate() {
            prop_assert_eq!(info.descriptors, window.len());
            prop_assert_eq!(info.bytes, window.iter().map(|d| d.len).sum::<u64>());
            prop_assert_eq!(info.last, i + 1 == windows.len());
            prop_assert!((1..=max_descriptors).contains(&window.len()));
            prop_assert!(info.bytes <= max_bytes || window.len() == 1);
        }

        // Exactly the bytes of the naive plan.
        let expected = bytes(regions.iter().flat_map(|r| naive(&blocks, r)));
        prop_assert_eq!(bytes(all.iter().copied()), expected);

        // A descriptor is one block, or blocks that touch, up to the limit.
        let region = |d: &Descriptor| {
            regions.iter().position(|r| (r.local_base..r.local_base + 0x10_0000).contains(&d.local))
        };
        for d in &all {
            let r = &regions[region(d).unwrap()];
            let touching = r.len == r.remote_stride && r.len == r.local_stride;
            prop_assert_eq!(d.len % r.len, 0);
            prop_assert!(d.len == r.len || (touching && d.len <= max_descriptor_bytes));
        }
        prop_assert!(all.iter().map(region).is_sorted());

        // Progress: a layer is reported exactly when no byte of it or of an earlier one is left.
        let mut left: Vec<u64> = vec![0; regions.len()];
        for d in &all {
            left[region(d).unwrap()] += d.len;
        }
        for (info, window) in &windows {
            for d in window {
                let r = region(d).unwrap();
                prop_assert_eq!(info.ends, ends_of(&regions[r]));
                left[r] -= d.len;
            }
            let lowest_left =
                regions.iter().zip(&left).filter(|(_, l)| **l > 0).map(|(r, _)| r.layer).min();
            let done = regions
                .iter()
                .map(|r| r.layer)
                .filter(|l| lowest_left.is_none_or(|low| *l < low))
                .max();
            prop_assert_eq!(info.layers, done.map_or(0, |l| l + 1));
        }
    }

    #[test]
    fn any_input_is_planned_or_refused(
        blocks in prop::collection::vec((any::<u32>(), any::<u32>()), 0..20),
        high in prop::bool::weighted(0.5),
        numbers in prop::array::uniform5((any::<u64>(), 0..64_u32)),
        counts in prop::array::uniform2(prop_oneof![2 => Just(u32::MAX), 1 => any::<u32>()]),
    ) {
        let [remote_base, remote_gap, local_base, local_gap, len] =
            numbers.map(|(number, shift)| number >> shift);
        let pairs = [RegionPair {
            remote_base,
            remote_stride: len.saturating_add(remote_gap),
            local_base,
            local_stride: len.saturating_add(local_gap),
            len,
            ..pair(0, 1, 0, 0, u32::MAX)
        }];
        let shift = if high { 0 } else { 16 };
        let planned = Plan::new(PlanInput {
            remote_blocks: &ids(blocks.iter().map(|b| b.0 >> shift)),
            local_blocks: &ids(blocks.iter().map(|b| b.1 >> shift)),
            pairs: &pairs,
            remote_block_count: counts[0],
            local_block_count: counts[1],
            limits: PlanLimits::default(),
        });
        if let Ok(p) = planned {
            prop_assert_eq!(descriptors(&p).len() as u64, p.descriptors());
        }
    }
}

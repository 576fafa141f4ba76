//! Pairs of regions move each layer's bytes to where the other pool keeps that layer.
#![allow(clippy::unwrap_used)]

use kv_xfer::layout::{
    Component, Dtype, KvLayout, KvSplit, LayoutFactor, MemKind, ModelGeometry, PairingError,
    PoolOrder, Preset, RegionError, RegionGeometry, RegionPair, Side, pair_regions,
};

const BLOCKS: u32 = 4;

/// A pool in a `Vec`, whose regions have gaps between blocks and between each other.
struct Pool {
    layout: KvLayout,
    regions: Vec<RegionGeometry>,
    memory: Vec<u8>,
}

impl Pool {
    fn new(layout: KvLayout, gap: u64) -> Self {
        let mut base = 64;
        let regions: Vec<RegionGeometry> = layout
            .regions()
            .iter()
            .map(|spec| {
                let region = RegionGeometry {
                    base,
                    block_len: spec.block_len,
                    block_stride: spec.block_len + gap,
                    block_count: BLOCKS,
                    mem: MemKind::Dram,
                    device: 0,
                };
                base += region.block_stride * u64::from(BLOCKS) + gap;
                region
            })
            .collect();
        Self {
            layout,
            regions,
            memory: vec![0; base as usize],
        }
    }

    /// Calls `f` with every byte of every chunk and with what it should hold.
    fn each_byte(&mut self, block: u32, mut f: impl FnMut(&mut u8, u8)) {
        for chunk in self.layout.chunks() {
            let region = &self.regions[chunk.region as usize];
            for i in 0..chunk.len {
                let at = region.base + u64::from(block) * region.block_stride + chunk.offset + i;
                let component = match chunk.component {
                    Component::K => 1,
                    Component::V => 2,
                    _ => 3,
                };
                let content = (u64::from(chunk.layer) * 7 + component * 31 + i) % 250 + 1;
                f(&mut self.memory[at as usize], content as u8);
            }
        }
    }
}

fn copy(pairs: &[RegionPair], from: &Pool, r: u32, to: &mut Pool, l: u32) {
    for pair in pairs {
        let source = (pair.remote_base + u64::from(r) * pair.remote_stride) as usize;
        let target = (pair.local_base + u64::from(l) * pair.local_stride) as usize;
        let len = pair.len as usize;
        to.memory[target..target + len].copy_from_slice(&from.memory[source..source + len]);
    }
}

fn models() -> Vec<(ModelGeometry, KvSplit)> {
    let small = |preset: Preset, layers, indexer| {
        let model = preset.geometry_with(Dtype::Int8);
        ModelGeometry::new("m", layers, model.attention(), Dtype::Int8, indexer).unwrap()
    };
    let indexer = kv_xfer::layout::Indexer {
        bytes_per_token: 132,
        layers: 2,
    };
    vec![
        (small(Preset::SmolLM2_135M, 3, None), KvSplit::Fused),
        (small(Preset::SmolLM2_135M, 3, None), KvSplit::Separate),
        (small(Preset::Glm5, 3, Some(indexer)), KvSplit::Fused),
    ]
}

fn layout(model: &ModelGeometry, order: PoolOrder, split: KvSplit) -> KvLayout {
    KvLayout::new(model, 1, 4, order, split).unwrap()
}

const ORDERS: [PoolOrder; 2] = [PoolOrder::LayerFirst, PoolOrder::BlockFirst];

#[test]
fn every_byte_arrives_in_its_layer_and_none_beside_it() {
    for (model, split) in models() {
        for local_order in ORDERS {
            for remote_order in ORDERS {
                let mut local = Pool::new(layout(&model, local_order, split), 5);
                let mut remote = Pool::new(layout(&model, remote_order, split), 3);
                remote.each_byte(3, |byte, content| *byte = content);
                let pairs = pair_regions(
                    &local.layout,
                    &local.regions,
                    &remote.layout,
                    &remote.regions,
                )
                .unwrap();
                copy(&pairs, &remote, 3, &mut local, 1);
                let mut bytes = 0;
                local.each_byte(1, |byte, content| {
                    assert_eq!(*byte, content);
                    bytes += 1;
                });
                assert_eq!(bytes, local.layout.block_bytes());
                let written = local.memory.iter().filter(|byte| **byte != 0).count();
                assert_eq!(written as u64, bytes);
                assert!(pairs.is_sorted_by_key(|pair| pair.layer));
                assert_eq!(pairs.last().unwrap().layer, 2);
            }
        }
    }
}

#[test]
fn as_few_pairs_as_the_orders_allow() {
    let (model, split) = (Preset::Qwen3_32B.geometry(), KvSplit::Separate);
    let count = |local, remote| {
        let local = Pool::new(layout(&model, local, split), 0);
        let remote = Pool::new(layout(&model, remote, split), 0);
        pair_regions(
            &local.layout,
            &local.regions,
            &remote.layout,
            &remote.regions,
        )
        .unwrap()
        .len()
    };
    assert_eq!(count(PoolOrder::BlockFirst, PoolOrder::BlockFirst), 1);
    assert_eq!(count(PoolOrder::LayerFirst, PoolOrder::LayerFirst), 128);
    assert_eq!(count(PoolOrder::LayerFirst, PoolOrder::BlockFirst), 128);
    assert_eq!(count(PoolOrder::BlockFirst, PoolOrder::LayerFirst), 128);
}

#[test]
fn unsound_pools_are_refused_by_name() {
    let (model, split) = models().remove(0);
    let good = Pool::new(layout(&model, PoolOrder::LayerFirst, split), 0);
    let with = |change: &dyn Fn(&mut Vec<RegionGeometry>)| {
        let mut regions = good.regions.clone();
        change(&mut regions);
        let as_local = pair_regions(&good.layout, &regions, &good.layout, &good.regions);
        let as_remote = pair_regions(&good.layout, &good.regions, &good.layout, &regions);
        (as_local.unwrap_err(), as_remote.unwrap_err())
    };
    let (local, remote) = with(&|r| r.truncate(2));
    assert!(matches!(
        local,
        PairingError::RegionCount {
            side: Side::Local,
            expected: 3,
            found: 2
        }
    ));
    assert!(matches!(
        remote,
        PairingError::RegionCount {
            side: Side::Remote,
            expected: 3,
            found: 2
        }
    ));
    let (_, remote) = with(&|r| r[1].base = u64::MAX - 8);
    assert!(matches!(
        &remote,
        PairingError::Region { side: Side::Remote, name, error: RegionError::Wraps { .. } }
            if name == "layers.1.kv"
    ));
    let (_, remote) = with(&|r| r[2].block_len -= 1);
    assert!(matches!(remote, PairingError::BlockLen { .. }));
    let (local, _) = with(&|r| r[2].block_count += 1);
    assert!(matches!(
        local,
        PairingError::BlockCount {
            side: Side::Local,
            expected: BLOCKS,
            ..
        }
    ));
    let (local, _) = with(&|r| r[0].block_stride = 1);
    assert!(matches!(
        local,
        PairingError::Region {
            error: RegionError::StrideTooShort { .. },
            ..
        }
    ));
}

#[test]
fn layouts_that_mean_different_things_are_refused_first() {
    let model = Preset::SmolLM2_135M.geometry();
    let ours = Pool::new(layout(&model, PoolOrder::LayerFirst, KvSplit::Fused), 0);
    let theirs = KvLayout::new(&model, 3, 4, PoolOrder::LayerFirst, KvSplit::Fused).unwrap();
    let error = pair_regions(&ours.layout, &ours.regions, &theirs, &[]).unwrap_err();
    assert!(matches!(
        error,
        PairingError::Mismatch(m) if m.factor == LayoutFactor::TensorParallel
    ));
}

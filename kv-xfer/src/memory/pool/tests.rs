use std::ptr::NonNull;

use proptest::prelude::*;
use rustix::mm::MapFlags;

use super::super::claims::ClaimRefusal;
use super::super::mapping::Mapping;
use super::*;
use crate::layout::{Attention, Dtype, KvSplit, ModelGeometry, PoolOrder};

/// Two layers, K and V apart: four regions of blocks of 512 bytes.
fn layout(order: PoolOrder) -> KvLayout {
    let attention = Attention::Gqa {
        kv_heads: 2,
        head_dim_k: 32,
        head_dim_v: 32,
    };
    let model = ModelGeometry::new("small", 2, attention, Dtype::Bf16, None).unwrap();
    KvLayout::new(&model, 1, 4, order, KvSplit::Separate).unwrap()
}

fn pool(blocks: u32) -> Arc<KvPool> {
    let layout = layout(PoolOrder::LayerFirst);
    KvPool::host(layout, blocks, &HostOptions::default())
        .unwrap()
        .0
}

fn ids(list: &[u32]) -> Vec<BlockId> {
    list.iter().copied().map(BlockId).collect()
}

#[test]
fn host_pools_are_cut_as_the_layout_says() {
    for order in [PoolOrder::LayerFirst, PoolOrder::BlockFirst] {
        let layout = layout(order);
        let (pool, report) = KvPool::host(layout.clone(), 9, &HostOptions::default()).unwrap();
        assert!(report.bytes >= 9 * layout.block_bytes());
        assert_eq!(pool.block_count(), 9);
        assert_eq!(pool.regions().len(), layout.regions().len());
        let mut end = 0;
        for (spec, region) in layout.regions().iter().zip(pool.regions()) {
            assert_eq!(region.block_len, spec.block_len);
            assert_eq!(region.block_stride, spec.block_len);
            assert_eq!(region.base % 4096, 0);
            assert!(region.base >= end, "regions overlap");
            end = region.base + region.byte_len().unwrap();
        }
    }
}

#[test]
fn impossible_pools_are_refused() {
    let layout = layout(PoolOrder::LayerFirst);
    let options = HostOptions::default();
    assert!(KvPool::host(layout.clone(), 0, &options).is_err());
    let huge = ModelGeometry::new(
        "huge",
        4096,
        Attention::Gqa {
            kv_heads: 1 << 20,
            head_dim_k: 1 << 10,
            head_dim_v: 1 << 10,
        },
        Dtype::F32,
        None,
    )
    .unwrap();
    let huge = KvLayout::new(&huge, 1, 256, PoolOrder::LayerFirst, KvSplit::Fused).unwrap();
    assert!(matches!(
        KvPool::host(huge, u32::MAX, &options),
        Err(PoolError::TooLarge { .. } | PoolError::Host(_))
    ));
}

#[test]
fn blocks_do_not_touch_each_other() {
    let pool = pool(3);
    for region in 0..4 {
        for block in 0..3 {
            let value = region as u8 * 3 + block as u8 + 1;
            pool.write_block(region, BlockId(block), 0, &[value; 512])
                .unwrap();
        }
    }
    let mut out = [0; 512];
    for region in 0..4 {
        for block in 0..3 {
            let value = region as u8 * 3 + block as u8 + 1;
            pool.read_block(region, BlockId(block), 0, &mut out)
                .unwrap();
            assert_eq!(out, [value; 512]);
        }
    }
}

#[test]
fn accesses_are_bounded() {
    let pool = pool(3);
    let write = |region, block, offset, len| {
        pool.write_block(region, BlockId(block), offset, &vec![0; len])
    };
    assert!(write(3, 2, 511, 1).is_ok());
    assert!(matches!(
        write(4, 0, 0, 1),
        Err(AccessError::NoSuchRegion {
            region: 4,
            regions: 4
        })
    ));
    for block in [3, u32::MAX] {
        assert!(matches!(
            write(0, block, 0, 1),
            Err(AccessError::Region(RegionError::BlockOutOfRange { .. }))
        ));
    }
    for (offset, len) in [(512, 1), (0, 513), (u64::MAX, 1), (u64::MAX - 1, 2)] {
        assert!(matches!(
            write(0, 0, offset, len),
            Err(AccessError::Region(RegionError::OutsideBlock { .. }))
        ));
    }
}

#[test]
fn claimed_blocks_are_written_by_their_owner_only() {
    let pool = pool(4);
    let mut owned = pool.claim(ids(&[3, 1])).unwrap();
    assert_eq!(pool.claimed_blocks(), 2);
    assert_eq!(
        pool.write_block(0, BlockId(3), 0, &[1]),
        Err(AccessError::Claimed { block: BlockId(3) })
    );
    pool.write_block(0, BlockId(2), 0, &[1]).unwrap();
    owned.write_at(0, 0, 5, &[7]).unwrap();
    assert!(matches!(
        owned.write_at(2, 0, 0, &[7]),
        Err(AccessError::NoSuchIndex { index: 2, len: 2 })
    ));
    let mut out = [0];
    owned.read_at(0, 0, 5, &mut out).unwrap();
    assert_eq!(out, [7]);
    pool.read_block(0, BlockId(3), 5, &mut out).unwrap();
    assert_eq!(out, [7]);
    assert_eq!(owned.into_ids(), ids(&[3, 1]));
    assert_eq!(pool.claimed_blocks(), 0);
    pool.write_block(0, BlockId(3), 0, &[1]).unwrap();
}

#[test]
fn a_refused_claim_hands_the_list_back() {
    let pool = pool(4);
    let owned = pool.claim(ids(&[0])).unwrap();
    for (list, why) in [
        (&[1, 4][..], ClaimRefusal::OutOfRange { blocks: 4 }),
        (&[1, 1], ClaimRefusal::Duplicate),
        (&[1, 0], ClaimRefusal::Claimed),
    ] {
        let error = pool.claim(ids(list)).unwrap_err();
        assert_eq!((error.block, error.why), (BlockId(list[1]), why));
        assert_eq!(error.ids, ids(list));
        assert_eq!(pool.claimed_blocks(), 1);
    }
    drop(owned);
    assert!(pool.claim(Vec::new()).unwrap().is_empty());
    assert_eq!(pool.claim(ids(&[1, 0])).unwrap().len(), 2);
    assert_eq!(pool.claimed_blocks(), 0);
}

#[test]
fn regions_of_another_layout_are_refused() {
    let good = pool(4);
    let layout = Arc::clone(good.layout());
    let change = |at: usize, edit: &dyn Fn(&mut RegionGeometry)| {
        let mut regions = good.regions().to_vec();
        edit(&mut regions[at]);
        KvPool::from_memory(Arc::clone(&layout), regions, Arc::clone(good.memory()))
    };
    assert!(change(0, &|_| {}).is_ok());
    assert!(matches!(
        change(1, &|r| r.block_len -= 1),
        Err(PoolError::BlockLen { .. })
    ));
    assert!(matches!(
        change(1, &|r| r.block_count = 3),
        Err(PoolError::BlockCount { .. })
    ));
    assert!(matches!(
        change(1, &|r| r.block_stride = 1),
        Err(PoolError::Region { .. })
    ));
    assert!(matches!(
        change(1, &|r| r.base = u64::MAX - 8),
        Err(PoolError::Region { .. })
    ));
    assert!(matches!(
        change(3, &|r| r.block_stride = 8192),
        Err(PoolError::OutsideMemory { .. })
    ));
    let fewer = good.regions()[..3].to_vec();
    assert!(matches!(
        KvPool::from_memory(layout, fewer, Arc::clone(good.memory())),
        Err(PoolError::RegionCount {
            expected: 4,
            found: 3
        })
    ));
}

#[test]
fn a_foreign_region_longer_than_its_mapping_is_refused() {
    let layout = layout(PoolOrder::BlockFirst);
    let mapping = Mapping::new(8192, MapFlags::empty()).unwrap();
    let base: NonNull<u8> = mapping.base();
    let region = |block_count, mem| RegionGeometry {
        base: base.addr().get() as u64,
        block_len: 2048,
        block_stride: 2048,
        block_count,
        mem,
        device: 0,
    };
    // SAFETY: the mapping moves into the owner, and nobody else accesses it.
    let memory = unsafe { ForeignMemory::new(vec![(base, 8192)], Box::new(mapping)) }.unwrap();
    let memory = Arc::new(memory);
    let make = |region| KvPool::foreign(layout.clone(), vec![region], Arc::clone(&memory));
    assert!(matches!(
        make(region(5, MemKind::Dram)),
        Err(PoolError::OutsideMemory { len: 10240, .. })
    ));
    assert!(matches!(
        make(region(4, MemKind::Vram)),
        Err(PoolError::WrongKind { .. })
    ));
    let pool = make(region(4, MemKind::Dram)).unwrap();
    pool.write_block(0, BlockId(3), 2047, &[9]).unwrap();
}

proptest! {
    #[test]
    fn claims_come_back_exactly_once(lists in prop::collection::vec(prop::collection::vec(0u32..20, 0..8), 0..20)) {
        let pool = pool(16);
        let mut held = Vec::new();
        for list in lists {
            match pool.claim(ids(&list)) {
                Ok(mut owned) => {
                    let tail = owned.split_off(list.len() / 2);
                    prop_assert_eq!(owned.len() + tail.len(), list.len());
                    held.push(owned);
                    held.push(tail);
                }
                Err(error) => {
                    prop_assert_eq!(error.ids, ids(&list));
                    held.truncate(held.len() / 2);
                }
            }
            prop_assert_eq!(pool.claimed_blocks(), held.iter().map(OwnedBlocks::len).sum::<usize>());
        }
        held.clear();
        prop_assert_eq!(pool.claimed_blocks(), 0);
    }
}

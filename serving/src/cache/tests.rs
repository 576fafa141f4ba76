use std::collections::HashMap as Map;

use proptest::prelude::*;

use super::*;

fn hash(n: u64) -> BlockHash {
    let mut bytes = [0; BlockHash::LEN];
    bytes[..8].copy_from_slice(&n.to_le_bytes());
    BlockHash(bytes)
}

fn hashes(range: std::ops::Range<u64>) -> Vec<BlockHash> {
    range.map(hash).collect()
}

fn filled(cache: &mut BlockCache, range: std::ops::Range<u64>) -> Vec<BlockId> {
    let hashes = hashes(range);
    let blocks = cache.allocate(hashes.len()).unwrap();
    for (block, hash) in blocks.iter().zip(hashes) {
        cache.register(*block, hash).unwrap();
    }
    blocks
}

#[test]
fn the_tail_of_the_least_recently_used_goes_first() {
    let mut cache = BlockCache::new(8, true);
    let old = filled(&mut cache, 0..4);
    let new = filled(&mut cache, 10..14);
    cache.release(&old).unwrap();
    cache.release(&new).unwrap();
    assert_eq!(cache.counts().cached, 8);
    let taken = cache.allocate(2).unwrap();
    assert_eq!(taken, [old[2], old[3]]);
    assert_eq!(cache.acquire_prefix(&hashes(0..4)), old[..2]);
    assert_eq!(cache.acquire_prefix(&hashes(10..14)), new);
}

#[test]
fn leased_blocks_are_prefix_hits_and_are_not_evicted() {
    let mut cache = BlockCache::new(4, true);
    let blocks = filled(&mut cache, 0..3);
    cache.lease(&blocks).unwrap();
    cache.release(&blocks).unwrap();
    assert_eq!(cache.counts().leased, 3);
    assert!(cache.allocate(2).is_none());
    assert_eq!(cache.acquire_prefix(&hashes(0..5)), blocks);
    assert_eq!(cache.counts().active, 3);
    cache.unlease(&blocks).unwrap();
    assert_eq!(cache.counts().active, 3);
    cache.release(&blocks).unwrap();
    assert_eq!(cache.counts().cached, 3);
    assert_eq!(cache.reset(), 3);
    assert_eq!(cache.counts().free, 4);
    assert!(cache.acquire_prefix(&hashes(0..1)).is_empty());
}

#[test]
fn a_block_in_two_leases_needs_both_to_end() {
    let mut cache = BlockCache::new(2, true);
    let blocks = filled(&mut cache, 0..2);
    cache.lease(&blocks).unwrap();
    cache.lease(&blocks[..1]).unwrap();
    cache.release(&blocks).unwrap();
    cache.unlease(&blocks).unwrap();
    assert_eq!((cache.counts().leased, cache.counts().cached), (1, 1));
    cache.unlease(&blocks[..1]).unwrap();
    assert_eq!(cache.counts().cached, 2);
    assert!(cache.unlease(&blocks[..1]).is_err());
}

#[test]
fn destinations_of_failed_reads_are_out_of_use_until_restored() {
    let mut cache = BlockCache::new(3, true);
    let blocks = cache.allocate(3).unwrap();
    cache.claim(&blocks).unwrap();
    assert!(cache.release(&blocks).is_err());
    cache.landed(&blocks[..1]).unwrap();
    cache.discard(&blocks[1..2]).unwrap();
    cache.quarantine(&blocks[2..]).unwrap();
    let counts = cache.counts();
    assert_eq!((counts.active, counts.free, counts.quarantined), (1, 1, 1));
    cache.restore(&blocks[2..]).unwrap();
    assert_eq!(cache.counts().free, 2);
}

#[test]
fn blocks_that_others_use_are_not_destinations() {
    let mut cache = BlockCache::new(2, true);
    let blocks = filled(&mut cache, 0..1);
    assert!(cache.claim(&blocks).is_err());
    assert!(cache.claim(&[BlockId(9)]).is_err());
    assert!(cache.register(BlockId(1), hash(7)).is_err());
}

#[test]
fn without_prefix_caching_nothing_is_found_again() {
    let mut cache = BlockCache::new(2, false);
    let blocks = filled(&mut cache, 0..2);
    assert!(cache.acquire_prefix(&hashes(0..2)).is_empty());
    cache.release(&blocks).unwrap();
    assert_eq!(cache.counts().free, 2);
}

#[derive(Debug, Clone)]
enum Op {
    Start {
        prefix: u64,
        shared: u64,
        total: u64,
    },
    Finish {
        which: usize,
        lease: bool,
    },
    Read {
        which: usize,
        end: u8,
    },
    Unlease {
        which: usize,
    },
    Restore {
        which: usize,
    },
    Reset,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..4_u64, 0..6_u64, 1..8_u64)
            .prop_map(|(prefix, shared, total)| Op::Start { prefix, shared, total }),
        3 => (any::<usize>(), any::<bool>()).prop_map(|(which, lease)| Op::Finish { which, lease }),
        2 => (any::<usize>(), 0..3_u8).prop_map(|(which, end)| Op::Read { which, end }),
        2 => any::<usize>().prop_map(|which| Op::Unlease { which }),
        2 => any::<usize>().prop_map(|which| Op::Restore { which }),
        1 => Just(Op::Reset),
    ]
}

/// Takes any element, if there is one.
fn take<T>(list: &mut Vec<T>, which: usize) -> Option<T> {
    let at = which.checked_rem(list.len())?;
    Some(list.swap_remove(at))
}

proptest! {
    /// No block is lost, none is in two places, none that is held is handed out, and a hash leads to
    /// the block that was filled for it.
    #[test]
    fn every_block_is_in_one_place(
        ops in prop::collection::vec(op(), 0..80),
        caching: bool,
    ) {
        const BLOCKS: u32 = 24;
        let mut cache = BlockCache::new(BLOCKS, caching);
        let (mut requests, mut leases, mut lost) = (Vec::new(), Vec::new(), Vec::new());
        let mut content: Map<BlockId, BlockHash> = Map::new();
        let mut fresh = 1_000_u64;
        for op in ops {
            match op {
                Op::Start { prefix, shared, total } => {
                    let mut wanted = hashes(prefix * 100..prefix * 100 + shared.min(total));
                    while (wanted.len() as u64) < total {
                        fresh += 1;
                        wanted.push(hash(fresh));
                    }
                    let mut blocks = cache.acquire_prefix(&wanted);
                    for (block, hash) in blocks.iter().zip(&wanted) {
                        prop_assert_eq!(content.get(block), Some(hash));
                    }
                    let hits = blocks.len();
                    match cache.allocate(wanted.len() - hits) {
                        None => cache.release(&blocks).unwrap(),
                        Some(more) => {
                            for block in &more {
                                let held = requests.iter().chain(&leases).chain(&lost)
                                    .any(|held: &Vec<BlockId>| held.contains(block));
                                prop_assert!(!held, "{block} was handed out while held");
                            }
                            for (block, hash) in more.iter().zip(&wanted[hits..]) {
                                cache.register(*block, *hash).unwrap();
                                content.insert(*block, *hash);
                            }
                            blocks.extend(more);
                            requests.push(blocks);
                        }
                    }
                }
                Op::Finish { which, lease } => {
                    if let Some(blocks) = take(&mut requests, which) {
                        if lease {
                            cache.lease(&blocks).unwrap();
                            leases.push(blocks.clone());
                        }
                        cache.release(&blocks).unwrap();
                    }
                }
                Op::Read { which, end } => {
                    if let Some(blocks) = cache.allocate(which % 5) {
                        cache.claim(&blocks).unwrap();
                        match end {
                            0 => {
                                cache.landed(&blocks).unwrap();
                                for block in &blocks {
                                    fresh += 1;
                                    cache.register(*block, hash(fresh)).unwrap();
                                    content.insert(*block, hash(fresh));
                                }
                                requests.push(blocks);
                            }
                            1 => cache.discard(&blocks).unwrap(),
                            _ => {
                                cache.quarantine(&blocks).unwrap();
                                lost.push(blocks);
                            }
                        }
                    }
                }
                Op::Unlease { which } => {
                    if let Some(blocks) = take(&mut leases, which) {
                        cache.unlease(&blocks).unwrap();
                    }
                }
                Op::Restore { which } => {
                    if let Some(blocks) = take(&mut lost, which) {
                        cache.restore(&blocks).unwrap();
                    }
                }
                Op::Reset => {
                    cache.reset();
                }
            }
            let counts = cache.counts();
            for state in State::ALL {
                let found = (0..BLOCKS).filter(|n| cache.state(BlockId(*n)) == Some(state)).count();
                prop_assert_eq!(counts.of(state), found, "{}", state);
            }
            prop_assert_eq!(State::ALL.map(|state| counts.of(state)).iter().sum::<usize>(), BLOCKS as usize);
            prop_assert_eq!(cache.available(), counts.free + counts.cached);
            let active: BTreeSet<_> = requests.iter().flatten().collect();
            prop_assert_eq!(counts.active, active.len());
            prop_assert_eq!(counts.quarantined, lost.iter().map(Vec::len).sum::<usize>());
        }
        for blocks in requests {
            cache.release(&blocks).unwrap();
        }
        for blocks in leases {
            cache.unlease(&blocks).unwrap();
        }
        for blocks in lost {
            cache.restore(&blocks).unwrap();
        }
        cache.reset();
        prop_assert_eq!(cache.counts().free, BLOCKS as usize);
    }
}

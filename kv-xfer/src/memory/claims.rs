//! Which blocks of a pool are destinations of a read: at most one owner for each block.

use parking_lot::{RwLock, RwLockReadGuard};
use thiserror::Error;

use crate::ids::BlockId;

/// Why blocks could not be claimed as destinations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ClaimRefusal {
    /// The block id is not below the number of blocks.
    #[error("the pool has {blocks} blocks; ids go from 0 to one less")]
    OutOfRange {
        /// Blocks in the pool.
        blocks: u32,
    },
    /// The list names the block twice.
    #[error("it is listed twice; give each destination once")]
    Duplicate,
    /// Another read owns the block.
    #[error(
        "it belongs to another read, or to one whose bytes may still arrive; wait for that read"
    )]
    Claimed,
}

/// A refused claim. Nothing was claimed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("block {block} cannot be a destination: {why}")]
pub struct ClaimError {
    /// The first block at fault.
    pub block: BlockId,
    /// What is wrong with it.
    pub why: ClaimRefusal,
    /// The list that was given, handed back.
    pub ids: Vec<BlockId>,
}

/// One bit per block.
#[derive(Debug)]
pub(super) struct Claims {
    blocks: u32,
    bits: RwLock<Bits>,
}

#[derive(Debug)]
pub(super) struct Bits {
    words: Vec<u64>,
    count: usize,
}

impl Bits {
    fn split(block: BlockId) -> (usize, u64) {
        ((block.0 / 64) as usize, 1 << (block.0 % 64))
    }

    /// Whether a block is claimed. A block outside the pool is not.
    pub(super) fn has(&self, block: BlockId) -> bool {
        let (index, bit) = Self::split(block);
        self.words.get(index).is_some_and(|word| word & bit != 0)
    }

    /// Sets a bit; false when it was set already.
    fn set(&mut self, block: BlockId) -> bool {
        let (index, bit) = Self::split(block);
        match self.words.get_mut(index) {
            Some(word) if *word & bit == 0 => {
                *word |= bit;
                self.count += 1;
                true
            }
            _ => false,
        }
    }

    fn clear(&mut self, block: BlockId) {
        let (index, bit) = Self::split(block);
        if let Some(word) = self.words.get_mut(index)
            && *word & bit != 0
        {
            *word &= !bit;
            self.count -= 1;
        }
    }
}

impl Claims {
    pub(super) fn new(blocks: u32) -> Self {
        Self {
            blocks,
            bits: RwLock::new(Bits {
                words: vec![0; blocks.div_ceil(64) as usize],
                count: 0,
            }),
        }
    }

    /// Claims all of `ids` or none.
    pub(super) fn claim(&self, ids: &[BlockId]) -> Result<(), (BlockId, ClaimRefusal)> {
        let mut bits = self.bits.write();
        for (done, block) in ids.iter().enumerate() {
            let why = if block.0 >= self.blocks {
                ClaimRefusal::OutOfRange {
                    blocks: self.blocks,
                }
            } else if bits.set(*block) {
                continue;
            } else if ids[..done].contains(block) {
                ClaimRefusal::Duplicate
            } else {
                ClaimRefusal::Claimed
            };
            ids[..done].iter().for_each(|block| bits.clear(*block));
            return Err((*block, why));
        }
        Ok(())
    }

    /// Gives claimed blocks back.
    pub(super) fn release(&self, ids: &[BlockId]) {
        let mut bits = self.bits.write();
        ids.iter().for_each(|block| bits.clear(*block));
    }

    /// The claims, which do not change while the guard lives.
    pub(super) fn hold(&self) -> RwLockReadGuard<'_, Bits> {
        self.bits.read()
    }

    /// How many blocks are claimed.
    pub(super) fn count(&self) -> usize {
        self.bits.read().count
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn ids(list: &[u32]) -> Vec<BlockId> {
        list.iter().copied().map(BlockId).collect()
    }

    #[test]
    fn refusals_claim_nothing() {
        let claims = Claims::new(65);
        claims.claim(&ids(&[64])).unwrap();
        for (list, why) in [
            (&[0, 1, 64][..], ClaimRefusal::Claimed),
            (&[0, 1, 65], ClaimRefusal::OutOfRange { blocks: 65 }),
            (&[u32::MAX], ClaimRefusal::OutOfRange { blocks: 65 }),
            (&[0, 1, 0], ClaimRefusal::Duplicate),
        ] {
            let at = BlockId(*list.last().unwrap());
            assert_eq!(claims.claim(&ids(list)), Err((at, why)));
            assert_eq!(claims.count(), 1);
        }
        claims.release(&ids(&[64]));
        assert_eq!(claims.count(), 0);
        claims.claim(&ids(&[0, 1, 64])).unwrap();
    }

    proptest! {
        #[test]
        fn no_block_has_two_owners(
            steps in prop::collection::vec((any::<bool>(), prop::collection::vec(0u32..140, 0..20)), 0..40),
        ) {
            let claims = Claims::new(130);
            let mut owned: Vec<Vec<BlockId>> = Vec::new();
            let mut model = BTreeSet::new();
            for (claim, list) in steps {
                let list = ids(&list);
                if claim {
                    let distinct: BTreeSet<_> = list.iter().copied().collect();
                    let fits = distinct.len() == list.len()
                        && distinct.is_disjoint(&model)
                        && list.iter().all(|block| block.0 < 130);
                    prop_assert_eq!(claims.claim(&list).is_ok(), fits);
                    if fits {
                        model.extend(distinct);
                        owned.push(list);
                    }
                } else if let Some(list) = owned.pop() {
                    claims.release(&list);
                    list.iter().for_each(|block| { model.remove(block); });
                }
                prop_assert_eq!(claims.count(), model.len());
                for block in (0..140).map(BlockId) {
                    prop_assert_eq!(claims.hold().has(block), model.contains(&block));
                }
            }
        }
    }
}

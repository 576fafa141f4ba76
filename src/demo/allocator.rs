//! Hands out blocks in the orders in which the allocators of serving engines do.

use std::collections::BTreeSet;

use kv_xfer::ids::BlockId;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// In which order free blocks are handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FreeOrder {
    /// Lowest first: a fresh pool.
    Contiguous,
    /// Highest first: a free list that is used as a stack.
    Descending,
    /// Lowest first, but other requests hold a block here and there.
    Holes,
    /// At random: a pool that has been busy for hours.
    Shuffled,
}

/// Of this many blocks, other requests hold one, under [`FreeOrder::Holes`].
const BLOCKS_PER_HOLE: u32 = 32;

/// More blocks were asked for than are free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{wanted} blocks are needed and {free} are free; use a larger pool")]
pub struct OutOfBlocks {
    /// Blocks asked for.
    pub wanted: usize,
    /// Blocks free.
    pub free: usize,
}

/// A block was given back that is not handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("block {block} was given back but is not handed out; report this as a bug")]
pub struct NotHandedOut {
    /// The block.
    pub block: BlockId,
}

/// Which blocks are free, and which are handed out.
#[derive(Debug)]
pub struct BlockAllocator {
    order: FreeOrder,
    free: BTreeSet<BlockId>,
    /// The same blocks as `free`, for drawing at random; kept under [`FreeOrder::Shuffled`] only.
    deck: Vec<BlockId>,
    used: BTreeSet<BlockId>,
    rng: ChaCha8Rng,
}

impl BlockAllocator {
    /// All of `blocks` blocks are free, except for the holes of [`FreeOrder::Holes`].
    #[must_use]
    pub fn new(blocks: u32, order: FreeOrder, seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let free: BTreeSet<_> = (0..blocks)
            .filter(|_| order != FreeOrder::Holes || !rng.random_ratio(1, BLOCKS_PER_HOLE))
            .map(BlockId)
            .collect();
        let deck = match order {
            FreeOrder::Shuffled => free.iter().copied().collect(),
            _ => Vec::new(),
        };
        Self {
            order,
            free,
            deck,
            used: BTreeSet::new(),
            rng,
        }
    }

    /// Hands out `count` blocks, or none.
    ///
    /// # Errors
    /// [`OutOfBlocks`].
    pub fn alloc(&mut self, count: usize) -> Result<Vec<BlockId>, OutOfBlocks> {
        if count > self.free.len() {
            return Err(OutOfBlocks {
                wanted: count,
                free: self.free.len(),
            });
        }
        let blocks: Vec<_> = (0..count).filter_map(|_| self.next()).collect();
        self.used.extend(&blocks);
        Ok(blocks)
    }

    fn next(&mut self) -> Option<BlockId> {
        match self.order {
            FreeOrder::Contiguous | FreeOrder::Holes => self.free.pop_first(),
            FreeOrder::Descending => self.free.pop_last(),
            FreeOrder::Shuffled => {
                let at = self.rng.random_range(0..self.deck.len().max(1));
                let block = (at < self.deck.len()).then(|| self.deck.swap_remove(at))?;
                self.free.remove(&block);
                Some(block)
            }
        }
    }

    /// Takes blocks back.
    ///
    /// # Errors
    /// [`NotHandedOut`]; the blocks before it in the list are free then.
    pub fn free(&mut self, blocks: &[BlockId]) -> Result<(), NotHandedOut> {
        for block in blocks {
            if !self.used.remove(block) {
                return Err(NotHandedOut { block: *block });
            }
            self.free.insert(*block);
            if self.order == FreeOrder::Shuffled {
                self.deck.push(*block);
            }
        }
        Ok(())
    }

    /// How many blocks are free.
    #[must_use]
    pub fn free_blocks(&self) -> usize {
        self.free.len()
    }

    /// How many blocks are handed out. Zero at the end when nothing leaked.
    #[must_use]
    pub fn used_blocks(&self) -> usize {
        self.used.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ORDERS: [FreeOrder; 4] = [
        FreeOrder::Contiguous,
        FreeOrder::Descending,
        FreeOrder::Holes,
        FreeOrder::Shuffled,
    ];

    fn runs(blocks: &[BlockId]) -> usize {
        1 + blocks.windows(2).filter(|w| w[1].0 != w[0].0 + 1).count()
    }

    #[test]
    fn orders_are_what_they_are_called() {
        let blocks = |order| BlockAllocator::new(4096, order, 7).alloc(1000).unwrap();
        assert_eq!(runs(&blocks(FreeOrder::Contiguous)), 1);
        let descending = blocks(FreeOrder::Descending);
        assert!(descending.is_sorted_by(|a, b| a.0 == b.0 + 1));
        assert!((10..100).contains(&runs(&blocks(FreeOrder::Holes))));
        assert!(runs(&blocks(FreeOrder::Shuffled)) > 950);
    }

    #[test]
    fn a_seed_gives_the_same_blocks_again() {
        for order in ORDERS {
            let blocks = || BlockAllocator::new(512, order, 9).alloc(100).unwrap();
            assert_eq!(blocks(), blocks());
        }
    }

    #[test]
    fn what_is_not_there_is_refused() {
        for order in ORDERS {
            let mut allocator = BlockAllocator::new(64, order, 1);
            let free = allocator.free_blocks();
            let wanted = free + 1;
            assert_eq!(allocator.alloc(wanted), Err(OutOfBlocks { wanted, free }));
            let blocks = allocator.alloc(free).unwrap();
            assert!(allocator.alloc(1).is_err());
            allocator.free(&blocks).unwrap();
            let block = blocks[0];
            assert_eq!(allocator.free(&[block]), Err(NotHandedOut { block }));
        }
    }

    proptest! {
        #[test]
        fn no_block_is_lost_or_handed_out_twice(
            seed in any::<u64>(),
            steps in prop::collection::vec((any::<bool>(), 0usize..40), 0..40),
        ) {
            for order in ORDERS {
                let mut allocator = BlockAllocator::new(128, order, seed);
                let all = allocator.free_blocks();
                let mut held: Vec<Vec<BlockId>> = Vec::new();
                for (alloc, count) in &steps {
                    if *alloc {
                        held.extend(allocator.alloc(*count));
                    } else if let Some(blocks) = held.pop() {
                        allocator.free(&blocks).unwrap();
                    }
                    let used: BTreeSet<_> = held.iter().flatten().collect();
                    prop_assert_eq!(used.len(), held.iter().map(Vec::len).sum::<usize>());
                    prop_assert_eq!(allocator.used_blocks(), used.len());
                    prop_assert_eq!(allocator.free_blocks(), all - used.len());
                }
            }
        }
    }
}

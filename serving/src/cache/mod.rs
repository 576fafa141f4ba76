//! Bookkeeping of the paged KV cache: which block is where, and which tokens' KV it holds.
//!
//! A block is in exactly one [`State`]. Requests hold blocks by reference, leases hold them for other
//! engines, and both may hold the same block: a full block's content never changes, so it serves as
//! a prefix hit while others read it. A full block that nobody holds any more stays findable by its
//! chained hash until its room is needed; the least recently used goes first, and of one request's
//! blocks the last first, because a prefix without its end is worth more than an end without its
//! prefix.
//!
//! Nothing here touches the memory itself.

mod counts;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use kv_xfer::identity::BlockHash;
use kv_xfer::ids::BlockId;
use thiserror::Error;

pub use counts::{Counts, State};

/// A call that does not fit a block's state. It is a fault of the caller; nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum CacheError {
    /// The pool has no such block.
    #[error("block {block} is outside the cache of {blocks} blocks")]
    NoSuchBlock {
        /// The block.
        block: BlockId,
        /// Blocks of the cache.
        blocks: u32,
    },
    /// The block is in another state.
    #[error("block {block} is {found}, not {wanted}")]
    WrongState {
        /// The block.
        block: BlockId,
        /// Its state.
        found: State,
        /// What the call needs.
        wanted: &'static str,
    },
}

/// Who has a block to themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Hold {
    #[default]
    None,
    Claimed,
    Quarantined,
}

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    /// Requests that hold the block.
    requests: u32,
    /// Leases that hold the block.
    leases: u32,
    hold: Hold,
    /// Set while the index leads here.
    hash: Option<BlockHash>,
    /// When the block became idle; its key in the order of eviction.
    idle_since: u64,
}

impl Slot {
    fn state(&self) -> State {
        match self.hold {
            Hold::Claimed => State::Claimed,
            Hold::Quarantined => State::Quarantined,
            Hold::None if self.requests > 0 => State::Active,
            Hold::None if self.leases > 0 => State::Leased,
            Hold::None if self.hash.is_some() => State::Cached,
            Hold::None => State::Free,
        }
    }
}

/// The states, references and hashes of all blocks of a pool.
#[derive(Debug)]
pub struct BlockCache {
    slots: Vec<Slot>,
    /// Lowest first, so that a request's blocks tend to be neighbours and move as one run.
    free: BTreeSet<BlockId>,
    /// Cached blocks, the one to be evicted first in front.
    idle: BTreeMap<u64, BlockId>,
    index: HashMap<BlockHash, BlockId>,
    counts: Counts,
    /// Counts the blocks that became idle.
    clock: u64,
    prefix_caching: bool,
}

impl BlockCache {
    /// A cache of free blocks. Without prefix caching no block is found again by its hash.
    #[must_use]
    pub fn new(blocks: u32, prefix_caching: bool) -> Self {
        let mut counts = Counts::default();
        for _ in 0..blocks {
            counts.add(State::Free);
        }
        Self {
            slots: (0..blocks).map(|_| Slot::default()).collect(),
            free: (0..blocks).map(BlockId).collect(),
            idle: BTreeMap::new(),
            index: HashMap::new(),
            counts,
            clock: 0,
            prefix_caching,
        }
    }

    /// Blocks of the pool.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.slots.len()
    }

    /// How many blocks are in which state.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Blocks that [`allocate`](Self::allocate) could hand out now.
    #[must_use]
    pub fn available(&self) -> usize {
        self.free.len().saturating_add(self.idle.len())
    }

    /// The state of a block, if there is such a block.
    #[must_use]
    pub fn state(&self, block: BlockId) -> Option<State> {
        self.slot(block).ok().map(Slot::state)
    }

    /// Takes a reference for a request on the blocks that hold the longest prefix of `hashes`.
    #[must_use]
    pub fn acquire_prefix(&mut self, hashes: &[BlockHash]) -> Vec<BlockId> {
        let found: Vec<BlockId> = hashes
            .iter()
            .map_while(|hash| self.index.get(hash).copied())
            .collect();
        for block in &found {
            self.change(*block, |slot| slot.requests += 1);
        }
        found
    }

    /// Hands out blocks for a request, evicting cached ones as needed: all of them, or none.
    #[must_use]
    pub fn allocate(&mut self, count: usize) -> Option<Vec<BlockId>> {
        if count > self.available() {
            return None;
        }
        while self.free.len() < count {
            let (_, block) = self.idle.first_key_value()?;
            self.forget(*block);
        }
        let mut blocks = Vec::with_capacity(count);
        while blocks.len() < count {
            let block = self.free.first().copied()?;
            self.change(block, |slot| slot.requests = 1);
            blocks.push(block);
        }
        Some(blocks)
    }

    /// Makes a request's full block findable. Nothing happens if another block is found by that hash
    /// already.
    ///
    /// # Errors
    /// [`CacheError`] unless a request holds the block.
    pub fn register(&mut self, block: BlockId, hash: BlockHash) -> Result<(), CacheError> {
        self.expect(block, State::Active, "held by a request")?;
        let known = self.slot(block)?.hash.is_some();
        if self.prefix_caching && !known && !self.index.contains_key(&hash) {
            self.index.insert(hash, block);
            self.change(block, |slot| slot.hash = Some(hash));
        }
        Ok(())
    }

    /// Gives up a request's references.
    ///
    /// # Errors
    /// [`CacheError`] unless a request holds every block.
    pub fn release(&mut self, blocks: &[BlockId]) -> Result<(), CacheError> {
        self.expect_all(blocks, State::Active, "held by a request")?;
        // The last block becomes idle first, and is evicted first.
        for block in blocks.iter().rev() {
            self.change(*block, |slot| {
                slot.requests = slot.requests.saturating_sub(1);
            });
        }
        Ok(())
    }

    /// A request's fresh blocks become the destination of a read.
    ///
    /// # Errors
    /// [`CacheError`] unless each is held by one request alone, and is not to be found by a hash.
    pub fn claim(&mut self, blocks: &[BlockId]) -> Result<(), CacheError> {
        for block in blocks {
            let slot = self.slot(*block)?;
            let fresh = slot.requests == 1 && slot.leases == 0 && slot.hash.is_none();
            if slot.state() != State::Active || !fresh {
                return Err(self.wrong(*block, "fresh and held by one request"));
            }
        }
        self.hold(blocks, Hold::Claimed);
        Ok(())
    }

    /// The read has landed: the blocks are the request's again.
    ///
    /// # Errors
    /// [`CacheError`] unless every block is claimed.
    pub fn landed(&mut self, blocks: &[BlockId]) -> Result<(), CacheError> {
        self.expect_all(blocks, State::Claimed, "claimed by a read")?;
        self.hold(blocks, Hold::None);
        Ok(())
    }

    /// The read has failed and nothing can write into its blocks any more: they are free.
    ///
    /// # Errors
    /// [`CacheError`] unless every block is claimed.
    pub fn discard(&mut self, blocks: &[BlockId]) -> Result<(), CacheError> {
        self.expect_all(blocks, State::Claimed, "claimed by a read")?;
        self.give_up(blocks, Hold::None);
        Ok(())
    }

    /// The read has failed and may still write into its blocks: nobody uses them until they are
    /// [restored](Self::restore).
    ///
    /// # Errors
    /// [`CacheError`] unless every block is claimed.
    pub fn quarantine(&mut self, blocks: &[BlockId]) -> Result<(), CacheError> {
        self.expect_all(blocks, State::Claimed, "claimed by a read")?;
        self.give_up(blocks, Hold::Quarantined);
        Ok(())
    }

    /// Nothing can write into quarantined blocks any more: they are free.
    ///
    /// # Errors
    /// [`CacheError`] unless every block is quarantined.
    pub fn restore(&mut self, blocks: &[BlockId]) -> Result<(), CacheError> {
        self.expect_all(blocks, State::Quarantined, "quarantined")?;
        self.hold(blocks, Hold::None);
        Ok(())
    }

    /// Holds a request's blocks for other engines, too.
    ///
    /// # Errors
    /// [`CacheError`] unless a request holds every block.
    pub fn lease(&mut self, blocks: &[BlockId]) -> Result<(), CacheError> {
        self.expect_all(blocks, State::Active, "held by a request")?;
        for block in blocks {
            self.change(*block, |slot| slot.leases += 1);
        }
        Ok(())
    }

    /// A lease on the blocks has ended.
    ///
    /// # Errors
    /// [`CacheError`] unless a lease holds every block.
    pub fn unlease(&mut self, blocks: &[BlockId]) -> Result<(), CacheError> {
        for block in blocks {
            if self.slot(*block)?.leases == 0 {
                return Err(self.wrong(*block, "leased"));
            }
        }
        for block in blocks.iter().rev() {
            self.change(*block, |slot| slot.leases = slot.leases.saturating_sub(1));
        }
        Ok(())
    }

    /// Frees every cached block; says how many.
    pub fn reset(&mut self) -> usize {
        let idle: Vec<BlockId> = self.idle.values().copied().collect();
        idle.iter().for_each(|block| self.forget(*block));
        idle.len()
    }

    /// Takes a block out of the index.
    fn forget(&mut self, block: BlockId) {
        if let Some(hash) = self.slot(block).ok().and_then(|slot| slot.hash) {
            self.index.remove(&hash);
        }
        self.change(block, |slot| slot.hash = None);
    }

    fn hold(&mut self, blocks: &[BlockId], hold: Hold) {
        for block in blocks {
            self.change(*block, |slot| slot.hold = hold);
        }
    }

    fn give_up(&mut self, blocks: &[BlockId], hold: Hold) {
        for block in blocks {
            self.change(*block, |slot| {
                slot.requests = 0;
                slot.hold = hold;
            });
        }
    }

    /// The one place where a block changes: what follows from its state follows here.
    fn change(&mut self, block: BlockId, change: impl FnOnce(&mut Slot)) {
        let Some(slot) = self.slots.get_mut(block.0 as usize) else {
            return;
        };
        let before = slot.state();
        change(slot);
        let after = slot.state();
        if before == after {
            return;
        }
        match before {
            State::Free => {
                self.free.remove(&block);
            }
            State::Cached => {
                self.idle.remove(&slot.idle_since);
            }
            _ => {}
        }
        match after {
            State::Free => {
                self.free.insert(block);
            }
            State::Cached => {
                self.clock = self.clock.saturating_add(1);
                slot.idle_since = self.clock;
                self.idle.insert(self.clock, block);
            }
            _ => {}
        }
        self.counts.moved(before, after);
    }

    fn slot(&self, block: BlockId) -> Result<&Slot, CacheError> {
        let found = self.slots.get(block.0 as usize);
        found.ok_or(CacheError::NoSuchBlock {
            block,
            blocks: u32::try_from(self.slots.len()).unwrap_or(u32::MAX),
        })
    }

    fn expect(&self, block: BlockId, state: State, wanted: &'static str) -> Result<(), CacheError> {
        match self.slot(block)?.state() {
            found if found == state => Ok(()),
            found => Err(CacheError::WrongState {
                block,
                found,
                wanted,
            }),
        }
    }

    fn expect_all(
        &self,
        blocks: &[BlockId],
        state: State,
        wanted: &'static str,
    ) -> Result<(), CacheError> {
        blocks
            .iter()
            .try_for_each(|block| self.expect(*block, state, wanted))
    }

    fn wrong(&self, block: BlockId, wanted: &'static str) -> CacheError {
        match self.slot(block) {
            Ok(slot) => CacheError::WrongState {
                block,
                found: slot.state(),
                wanted,
            },
            Err(error) => error,
        }
    }
}

#[cfg(test)]
mod tests;

//! The pool's blocks and what puts pressure on them.

use kv_xfer::engine::ReturnedBlocks;
use kv_xfer::ids::BlockId;
use kv_xfer::lease::FreedBlocks;

use super::connector::Connector;
use super::metrics::Metrics;
use crate::cache::{BlockCache, CacheError};

/// The books of the pool, beside the connector whose leases and reads hold blocks of it.
#[derive(Debug)]
pub struct Memory {
    /// The books.
    pub cache: BlockCache,
    /// Leases and reads.
    pub connector: Connector,
    metrics: Metrics,
    /// Blocks of failed reads that nothing can write into any more, to be restored.
    back: Vec<ReturnedBlocks>,
}

impl Memory {
    /// Joins books and connector.
    #[must_use]
    pub fn new(cache: BlockCache, connector: Connector, metrics: Metrics) -> Self {
        Self {
            cache,
            connector,
            metrics,
            back: Vec::new(),
        }
    }

    /// Takes the blocks of leases that have ended, and notes those of failed reads.
    pub fn collect(&mut self) {
        while let Ok(freed) = self.connector.freed().try_recv() {
            self.freed(&freed);
        }
        while let Ok(returned) = self.connector.returned().try_recv() {
            self.returned(returned);
        }
    }

    /// A lease has ended.
    pub fn freed(&mut self, freed: &FreedBlocks) {
        let done = self.cache.unlease(&freed.blocks);
        self.booked(done);
    }

    /// Nothing can write into the blocks of a failed read any more. They may come before the read's
    /// outcome was looked at, so they are only noted.
    pub fn returned(&mut self, returned: ReturnedBlocks) {
        self.back.push(returned);
    }

    /// Frees the blocks of failed reads. To be called when the outcome of every read was looked at
    /// since they came.
    pub fn restore(&mut self) {
        for returned in std::mem::take(&mut self.back) {
            let done = self.cache.restore(&returned.blocks.into_ids());
            self.booked(done);
        }
    }

    /// Blocks for a sequence: free ones, then those of cached prefixes, then those of the oldest
    /// leases. A lease is not ended in vain.
    pub fn allocate(&mut self, count: usize) -> Option<Vec<BlockId>> {
        self.collect();
        loop {
            if let Some(blocks) = self.cache.allocate(count) {
                return Some(blocks);
            }
            let missing = count.saturating_sub(self.cache.available());
            if self.cache.counts().leased < missing {
                return None;
            }
            let revoked = self.connector.revoke(missing);
            if revoked == 0 {
                return None;
            }
            self.metrics.revoked_blocks.inc_by(revoked);
            self.collect();
        }
    }

    /// Gives up a sequence's references.
    pub fn release(&mut self, blocks: &[BlockId]) {
        let done = self.cache.release(blocks);
        self.booked(done);
    }

    /// Notes a fault of the bookkeeping; true if there was none.
    pub fn booked(&self, result: Result<(), CacheError>) -> bool {
        if let Err(error) = &result {
            tracing::error!(%error, "a bug in the block bookkeeping; please report it");
            self.metrics.faults.inc();
        }
        result.is_ok()
    }
}

//! One holder in a process of its own and one reader here, over pools of one shape.

use std::sync::Arc;

use kv_xfer::engine::{Engine, Offer};
use kv_xfer::identity::BlockHash;
use kv_xfer::transport::nixl::NixlTransport;

use super::fixture::{self, BenchError, LIMIT, SEED};
use super::holders::Holders;
use super::probe::{self, Timing};
use super::proto::Shape;
use crate::proc::Interrupt;

/// The pair.
pub struct Pair {
    /// The holder's process.
    pub holders: Holders,
    /// The reader.
    pub engine: Engine,
    /// All blocks of the holder, in the order of `remote`.
    pub offer: Offer,
    /// The holder's blocks, in the order in which they are offered.
    pub remote: Vec<u32>,
    /// As many blocks of the reader, in another order.
    pub local: Vec<u32>,
    /// Hashes of the offered blocks.
    pub hashes: Vec<BlockHash>,
}

impl Pair {
    /// Starts both; they have not met yet.
    ///
    /// # Errors
    /// [`BenchError`].
    pub fn start(
        name: &str,
        shape: Shape,
        transport: &Arc<NixlTransport>,
        interrupt: &Interrupt,
    ) -> Result<Self, BenchError> {
        let mut holders = Holders::start(&format!("{name}-holder"), 0..1, shape, 64, interrupt)?;
        let pool = fixture::pool(&shape)?;
        let engine = fixture::start(&format!("{name}-reader"), &pool, transport, |_| {})?;
        // A text of more blocks cannot be described.
        let most = shape.blocks.min(1 << 18);
        let mut remote = fixture::shuffled(shape.blocks, 1);
        remote.truncate(most as usize);
        let mut local = fixture::shuffled(shape.blocks, 2);
        local.truncate(most as usize);
        let offer = fixture::accept(&engine, holders.offer(0, remote.clone())?)?;
        let hashes = fixture::hashes(remote.len());
        Ok(Self {
            holders,
            engine,
            offer,
            remote,
            local,
            hashes,
        })
    }

    /// Reads `count` blocks from the `first` offered one on. Destinations are the same numbers of
    /// `local`. Returns what it took and, if they are to be `checked`, the wrong bytes.
    ///
    /// # Errors
    /// [`BenchError`].
    pub fn read(
        &self,
        first: usize,
        count: usize,
        checked: bool,
    ) -> Result<(Timing, u64), BenchError> {
        let range = first..first.saturating_add(count);
        let (Some(local), Some(remote)) = (
            self.local.get(range.clone()),
            self.remote.get(range.clone()),
        ) else {
            return Err(BenchError::OutOfTurn("there are not so many blocks"));
        };
        let mut blocks = fixture::claim(&self.engine, local.iter().copied())?;
        if checked {
            fixture::scribble(&mut blocks)?;
        }
        let (blocks, timing) = probe::read(&self.engine, &self.offer, &self.hashes, first, blocks)?;
        let mut wrong = 0;
        if checked {
            for (at, block) in remote.iter().enumerate() {
                wrong += fixture::wrong_bytes(&blocks, at, SEED, *block)?;
            }
        }
        drop(blocks.into_ids());
        Ok((timing, wrong))
    }

    /// Ends both; every block must be back.
    ///
    /// # Errors
    /// [`BenchError`] when one is not, or an end does not come.
    pub fn end(self) -> Result<(), BenchError> {
        self.engine.release(&self.offer);
        let claimed = self.engine.pool().claimed_blocks();
        let report = self.engine.shutdown(LIMIT);
        self.holders.stop()?;
        if claimed != 0 || report.quarantined != 0 {
            return Err(BenchError::OutOfTurn(
                "blocks of the reader did not come back",
            ));
        }
        Ok(())
    }
}

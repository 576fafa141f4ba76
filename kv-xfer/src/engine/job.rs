//! A read as it was submitted, on its way to the driver.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::error::ReadError;
use super::handle::{FailedBlocks, HandleOwner, ReadFailure, ReadId, ReadShared};
use crate::clock::MonoTime;
use crate::descriptor::{LeaseRef, Ticket};
use crate::ids::{EngineId, Incarnation};
use crate::memory::{Gate, OwnedBlocks};
use crate::peer::PeerKey;

/// When the reader tells the holder that it needs a lease no longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ReleasePolicy {
    /// When the read ends, however it ends: a failed read is recomputed, so the blocks would only
    /// be pinned in vain.
    #[default]
    Always,
    /// Only when the blocks have landed; a failed read may be tried again.
    AfterLanded,
    /// Never: the caller releases.
    Never,
}

/// A read as it was submitted.
#[derive(Debug)]
pub(crate) struct ReadJob {
    pub id: ReadId,
    pub shared: Arc<ReadShared>,
    pub engine: EngineId,
    pub peer: PeerKey,
    pub incarnation: Incarnation,
    pub lease: LeaseRef,
    pub ticket: Arc<Ticket>,
    /// The offer's: what was found instead of its word.
    pub lost: Arc<OnceLock<u64>>,
    /// Which of the ticket's blocks.
    pub span: Range<usize>,
    pub blocks: OwnedBlocks,
    pub submitted: MonoTime,
    pub deadline: MonoTime,
    pub release: ReleasePolicy,
    /// What must have happened before anything is posted.
    pub after: Option<Box<dyn Gate>>,
}

impl ReadJob {
    pub(crate) fn limit(&self) -> Duration {
        self.deadline.saturating_since(self.submitted)
    }

    /// An earlier read of the same offer found that its lease was lost. It stays so, and nothing need be posted to see
    /// it again.
    pub(crate) fn known_lost(&self) -> Option<ReadError> {
        self.lost.get().map(|found| self.lease_lost(*found))
    }

    pub(super) fn lease_lost(&self, found: u64) -> ReadError {
        ReadError::LeaseLost {
            engine: self.engine.clone(),
            lease: self.lease.id,
            expected: self.lease.word.0,
            found,
        }
    }
}

/// A read on its way to the driver. Should it never get there, its handle hears of it all the same.
pub(crate) struct Submitted {
    job: Option<Box<ReadJob>>,
    owner: Arc<dyn HandleOwner>,
}

impl Submitted {
    pub(crate) fn new(job: ReadJob, owner: Arc<dyn HandleOwner>) -> Self {
        let job = Some(Box::new(job));
        Self { job, owner }
    }

    pub(crate) fn into_job(mut self) -> Option<Box<ReadJob>> {
        self.job.take()
    }
}

impl Drop for Submitted {
    fn drop(&mut self) {
        let Some(job) = self.job.take() else { return };
        let ReadJob {
            id, shared, blocks, ..
        } = *job;
        let untaken = shared.finish(Err(ReadFailure {
            error: ReadError::DriverGone,
            blocks: FailedBlocks::Returned(blocks),
        }));
        if let Some(Err(ReadFailure {
            blocks: FailedBlocks::Returned(blocks),
            ..
        })) = untaken
        {
            self.owner.unclaimed(id, blocks);
        }
    }
}

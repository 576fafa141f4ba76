//! What the world remembers, to compare with what the engines say.

use crate::clock::MonoTime;
use crate::descriptor::RemoteBlocks;
use crate::engine::{Offer, ReadHandle, ReadId, ReleasePolicy};
use crate::identity::BlockHash;
use crate::ids::LeaseId;

/// A lease that was granted.
#[derive(Debug)]
pub(super) struct LeaseRecord {
    pub life: usize,
    pub id: LeaseId,
    pub slot: u32,
    pub word: u64,
    pub blocks: Vec<u32>,
    /// What the blocks hold.
    pub tags: Vec<u64>,
    pub hashes: &'static [BlockHash],
    /// Until when it was promised, on the holder's clock.
    pub until: MonoTime,
    pub freed: bool,
    /// Somebody has said that it is needed no longer.
    pub may_release: bool,
    /// The holder has taken leases back.
    pub may_revoke: bool,
}

/// A descriptor that the router keeps.
#[derive(Debug, Clone)]
pub(super) struct Descriptor {
    pub remote: RemoteBlocks,
    pub lease: usize,
    pub place: usize,
    pub conversation: usize,
    pub history: usize,
}

/// How a read is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReadState {
    Running,
    /// It has failed; its blocks have not come home yet.
    Quarantined,
    /// It has ended, and its blocks are home.
    Home,
    /// Its engine is over.
    Gone,
}

/// A read that was submitted.
#[derive(Debug)]
pub(super) struct ReadRecord {
    pub life: usize,
    pub id: ReadId,
    /// `None` once it was dropped, or has given its outcome.
    pub handle: Option<ReadHandle>,
    /// Nobody waits for its outcome.
    pub dropped: bool,
    /// Nobody looks at its outcome yet.
    pub unattended: bool,
    pub lease: usize,
    /// The first of the lease's blocks.
    pub first: usize,
    pub dest: Vec<u32>,
    pub wanted: &'static [BlockHash],
    pub deadline: MonoTime,
    pub policy: ReleasePolicy,
    pub state: ReadState,
}

/// An offer that an engine holds.
#[derive(Debug, Clone)]
pub(super) struct Accepted {
    pub offer: Offer,
    pub lease: usize,
}

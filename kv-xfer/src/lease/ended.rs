//! Leases that have ended: blocks are freed only after the lease word has advanced.

use thiserror::Error;

use crate::ids::{BlockId, LeaseId, LeaseWord, RequestId, WordSlot};

/// What ended a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EndReason {
    /// Its readers released it.
    Released,
    /// Its deadline passed.
    Expired,
    /// The holder took it back.
    Revoked,
}

impl EndReason {
    /// A stable name for logs and metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Released => "released",
            Self::Expired => "expired",
            Self::Revoked => "revoked",
        }
    }
}

/// A lease that has ended and whose word still has to advance. Its blocks come out of
/// [`LeaseTable::retire`](super::LeaseTable::retire) and of nowhere else:
///
/// ```compile_fail,E0616
/// fn free_at_once(ended: kv_xfer::lease::EndedLease) -> Vec<kv_xfer::ids::BlockId> {
///     ended.blocks
/// }
/// ```
///
/// Dropping one loses its blocks and its slot for the life of the table. That is a leak, and never a
/// wrong free: readers still find the old word, and the blocks behind it stay as they are. The
/// table's [`unretired`](super::LeaseTable::unretired) count shows it.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "retire it, or its blocks are lost"]
pub struct EndedLease {
    pub(super) lease: LeaseId,
    pub(super) request: RequestId,
    pub(super) slot: WordSlot,
    pub(super) word: LeaseWord,
    pub(super) reason: EndReason,
    pub(super) blocks: Vec<BlockId>,
}

impl EndedLease {
    /// Which lease it was.
    #[must_use]
    pub const fn lease(&self) -> LeaseId {
        self.lease
    }

    /// Whose blocks they were.
    #[must_use]
    pub const fn request(&self) -> &RequestId {
        &self.request
    }

    /// What ended it.
    #[must_use]
    pub const fn reason(&self) -> EndReason {
        self.reason
    }

    /// How many blocks it held.
    #[must_use]
    pub fn block_count(&self) -> usize {
        self.blocks.len()
    }
}

/// Blocks that no reader can mistake for leased ones any more.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "these blocks belong back to their pool"]
pub struct FreedBlocks {
    /// Which lease it was.
    pub lease: LeaseId,
    /// Whose blocks they were.
    pub request: RequestId,
    /// The blocks, as they were given to the grant.
    pub blocks: Vec<BlockId>,
    /// What ended it.
    pub reason: EndReason,
}

/// Why a lease could not be retired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RetireError {
    /// The word table has no such slot, so the word could not advance.
    #[error("the word table has no slot {}; retire with the table that publish_words filled", slot.0)]
    NoSuchSlot {
        /// The slot of the lease.
        slot: WordSlot,
    },
    /// The lease is of another lease table.
    #[error("lease {lease} is not of this lease table; retire it with the table that ended it")]
    Foreign {
        /// The lease.
        lease: LeaseId,
    },
}

/// A failed retirement: the reason, and the lease, to be retired with the right tables.
#[derive(Debug, PartialEq, Eq, Error)]
#[error("lease not retired, its blocks stay out of use: {error}")]
#[must_use = "retire it, or its blocks are lost"]
pub struct RetireFailed {
    /// Why.
    #[source]
    pub error: RetireError,
    /// The lease.
    pub ended: EndedLease,
}

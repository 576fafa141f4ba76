//! Who may free which blocks, and when.
//!
//! The holder of KV blocks promises to keep them unchanged for a while: it *grants* a lease. A lease
//! has a *word*, a number in registered memory that readers fetch one-sidedly after the last byte of
//! a read. While the word is the one that the descriptor carries, the bytes were not touched; any
//! other value means that the lease has ended, and the read counts as failed.
//!
//! So the one rule that everything here serves: **the word advances before a block is freed.** The
//! types enforce it. Whatever ends a lease (a release, its deadline, a revocation) yields an
//! [`EndedLease`] whose blocks are out of reach; only [`LeaseTable::retire`], which stores the
//! advanced word first, turns it into [`FreedBlocks`].
//!
//! The table is pure: it reads no clock and draws no random number. It is not synchronised; its
//! owner puts it behind a lock or on one thread.
#![forbid(unsafe_code)]

mod deadlines;
mod ended;
mod slots;
mod table;
mod terms;

pub use ended::{EndReason, EndedLease, FreedBlocks, RetireError, RetireFailed};
pub use table::{LeaseCounters, LeaseTable, LeaseView};
pub use terms::{
    DEFAULT_TTL, Grant, GrantError, GrantRefused, LeaseConfig, LeaseConfigError, MAX_LEASES,
    MAX_TTL, NewLease, ReleaseIgnored, ReleaseOutcome, RenewOutcome, WordTableTooSmall,
};

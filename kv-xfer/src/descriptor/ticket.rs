//! What one engine promises another about its blocks, and the rules that a promise keeps.

use std::time::Duration;

use thiserror::Error;

use super::runs::BlockRuns;
use crate::clock::MonoTime;
use crate::identity::BlockHash;
use crate::ids::{EngineId, Incarnation, LeaseId, LeaseWord, RequestId, WordSlot};
use crate::layout::LayoutFingerprint;

/// The lease behind a ticket: what to renew or release, and the word to compare after the last byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LeaseRef {
    /// The lease.
    pub id: LeaseId,
    /// Where its word is in the holder's word table.
    pub slot: WordSlot,
    /// The word while the lease holds.
    pub word: LeaseWord,
}

/// What a ticket is bound to besides its own contents: where it was issued and for whom. Both sides
/// state it; nothing of it is carried in the ticket.
///
/// The holder's host and port are left out on purpose, as proxies rewrite them; an engine dials
/// only addresses of its own peer list or allow-list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Binding<'a> {
    /// The holder (`remote_engine_id`).
    pub engine: &'a EngineId,
    /// The holder's request (`remote_request_id`).
    pub request: &'a RequestId,
    /// The tenant, where requests carry one.
    pub tenant: Option<&'a str>,
    /// The conversation, where requests carry one.
    pub conversation: Option<&'a str>,
}

/// Blocks under lease: which, holding which tokens, for how long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ticket {
    /// The life of the holder that leases the blocks; never zero.
    pub incarnation: Incarnation,
    /// The lease.
    pub lease: LeaseRef,
    /// The blocks, in token order.
    pub runs: BlockRuns,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Tokens whose KV is in the blocks; the last block may be partly filled.
    pub tokens: u64,
    /// One chained hash per full block.
    pub hashes: Vec<BlockHash>,
    /// How long the lease still runs, counted from `stamp`. Kept to the nanosecond; up to 584 years.
    pub remaining: Duration,
    /// When `remaining` was true, on the holder's clock. Only the holder can compare it.
    pub stamp: MonoTime,
    /// What the bytes mean.
    pub fingerprint: LayoutFingerprint,
}

/// A rule that a ticket breaks.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TicketFault {
    /// Incarnation zero is no incarnation.
    #[error("the incarnation is zero; draw one at every start")]
    NoIncarnation,
    /// A ticket for nothing.
    #[error("the ticket names no blocks; leave it out when there is nothing to read")]
    NoBlocks,
    /// A block must hold tokens.
    #[error("the ticket's blocks hold zero tokens; give the pool's block size")]
    EmptyBlocks,
    /// Blocks and tokens do not belong together.
    #[error("{tokens} tokens do not fill {blocks} blocks of {block_tokens}; recompute")]
    TokenCount {
        /// Tokens stated.
        tokens: u64,
        /// Blocks stated.
        blocks: usize,
        /// Tokens in a block.
        block_tokens: u32,
    },
    /// Not one hash per full block.
    #[error("{found} block hashes for {expected} full blocks; give one each")]
    HashCount {
        /// Full blocks.
        expected: u64,
        /// Hashes.
        found: usize,
    },
    /// The remaining time does not fit 64 bits of nanoseconds.
    #[error("a lease of {remaining:?} is longer than 584 years; give a shorter one")]
    TooLong {
        /// The time stated.
        remaining: Duration,
    },
}

impl Ticket {
    /// Checks the rules: blocks, tokens and hashes belong together.
    ///
    /// # Errors
    /// The [`TicketFault`] found first.
    pub fn validate(&self) -> Result<(), TicketFault> {
        if self.incarnation.0 == 0 {
            return Err(TicketFault::NoIncarnation);
        }
        let full = full_blocks(self.tokens, self.runs.len(), self.block_tokens)?;
        if u64::try_from(self.hashes.len()) != Ok(full) {
            return Err(TicketFault::HashCount {
                expected: full,
                found: self.hashes.len(),
            });
        }
        self.remaining_nanos().map(|_| ())
    }

    /// When the lease ends on the reader's clock, for a ticket that arrived at `arrived`. Time spent
    /// on the way is not known here, so that this is the latest possible end: the reader's deadline,
    /// never a reason to believe the bytes.
    #[must_use]
    pub fn ends_at(&self, arrived: MonoTime) -> MonoTime {
        arrived.saturating_add(self.remaining)
    }

    pub(super) fn remaining_nanos(&self) -> Result<u64, TicketFault> {
        u64::try_from(self.remaining.as_nanos()).map_err(|_| TicketFault::TooLong {
            remaining: self.remaining,
        })
    }
}

/// Full blocks among `blocks`, when `tokens` fill all of them but for a part of the last.
pub(super) fn full_blocks(
    tokens: u64,
    blocks: usize,
    block_tokens: u32,
) -> Result<u64, TicketFault> {
    if blocks == 0 {
        return Err(TicketFault::NoBlocks);
    }
    let size = u64::from(block_tokens);
    let full = tokens.checked_div(size).ok_or(TicketFault::EmptyBlocks)?;
    if u64::try_from(blocks) != Ok(tokens.div_ceil(size)) {
        return Err(TicketFault::TokenCount {
            tokens,
            blocks,
            block_tokens,
        });
    }
    Ok(full)
}

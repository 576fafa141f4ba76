//! What is asked of the lease table and what it answers.

use std::time::Duration;

use thiserror::Error;

use super::ended::EndedLease;
use crate::clock::MonoTime;
use crate::ids::{BlockId, LeaseId, LeaseWord, RequestId, WordSlot};

/// How long a lease holds when the grant does not say: 480 s, the time to live that vLLM's
/// connector gives the blocks of a finished decode (`decoder_kv_blocks_ttl`).
pub const DEFAULT_TTL: Duration = Duration::from_secs(480);

/// The default of [`LeaseConfig::max_ttl`]: one hour. A peer's renewals cannot hold blocks beyond
/// this from the last of them.
pub const MAX_TTL: Duration = Duration::from_secs(3600);

/// Most leases that a table can be configured for: a lease id keeps its slot in 24 bits, which
/// leaves 40 bits (a million grants a second for twelve days, a thousand for 34 years) to number
/// the grants.
pub const MAX_LEASES: u32 = 1 << 24;

/// How a lease table is set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseConfig {
    /// How long a lease holds when the grant does not say.
    pub default_ttl: Duration,
    /// Longest time from a grant or a renewal to the deadline it sets; longer wishes are cut.
    pub max_ttl: Duration,
    /// Most leases at one time, those included that have ended and are not retired yet. The word
    /// table needs as many words.
    pub max_leases: u32,
    /// Where lease words start: drawn at random at every start of the engine, so that the words of
    /// one incarnation are not those of another.
    pub word_base: u64,
}

impl LeaseConfig {
    /// The usual times, for at most `max_leases` leases and words from `word_base` on.
    #[must_use]
    pub const fn new(max_leases: u32, word_base: u64) -> Self {
        Self {
            default_ttl: DEFAULT_TTL,
            max_ttl: MAX_TTL,
            max_leases,
            word_base,
        }
    }

    pub(super) fn validate(&self) -> Result<(), LeaseConfigError> {
        if self.max_leases == 0 || self.max_leases > MAX_LEASES {
            return Err(LeaseConfigError::MaxLeases {
                given: self.max_leases,
            });
        }
        if self.default_ttl.is_zero() {
            return Err(LeaseConfigError::ZeroTtl);
        }
        if self.max_ttl < self.default_ttl {
            return Err(LeaseConfigError::TtlOrder {
                default_ttl: self.default_ttl,
                max_ttl: self.max_ttl,
            });
        }
        Ok(())
    }
}

/// Why a lease table cannot be set up like this.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LeaseConfigError {
    /// No leases, or more than a lease id can number.
    #[error("max_leases is {given}; set it between 1 and {MAX_LEASES}")]
    MaxLeases {
        /// What was given.
        given: u32,
    },
    /// Leases would end as they are granted.
    #[error("default_ttl is zero; set it to how long blocks should be kept, such as 480 s")]
    ZeroTtl,
    /// The default is beyond the maximum.
    #[error(
        "default_ttl {default_ttl:?} exceeds max_ttl {max_ttl:?}; raise max_ttl to it at least"
    )]
    TtlOrder {
        /// The default given.
        default_ttl: Duration,
        /// The maximum given.
        max_ttl: Duration,
    },
}

/// The word table cannot hold a word for every lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the word table has no slot {slot}; give it {needed} words, or lower max_leases")]
pub struct WordTableTooSmall {
    /// First slot that could not be written.
    pub slot: u32,
    /// How many words the lease table needs.
    pub needed: u32,
}

/// What a lease is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewLease {
    /// The request whose blocks they are: the name under which vLLM peers renew and release.
    pub request: RequestId,
    /// The blocks, in token order. One block may be under several leases; each gives it back once.
    pub blocks: Vec<BlockId>,
    /// How long, if not [`LeaseConfig::default_ttl`].
    pub ttl: Option<Duration>,
}

/// A lease that holds, as it goes into the descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// Its id, never used again by this table.
    pub lease: LeaseId,
    /// Where its word lies in the word table.
    pub slot: WordSlot,
    /// The word's value for as long as the lease holds.
    pub word: LeaseWord,
    /// When it ends if nobody renews it, on this process's clock.
    pub deadline: MonoTime,
}

/// Why no lease was granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GrantError {
    /// There is nothing to lease.
    #[error("a lease needs at least one block; do not describe a request without blocks")]
    NoBlocks,
    /// The lease would end as it is granted.
    #[error("the time to live is zero; give a longer one, or none for the default")]
    ZeroTtl,
    /// The request has a lease already, and a release by request id could not tell them apart.
    #[error("the request already has lease {lease}; release or revoke that one first")]
    RequestLeased {
        /// The lease it has.
        lease: LeaseId,
    },
    /// Every slot is taken.
    #[error(
        "all {max} leases are taken, {unretired} of them ended but not retired; retire those, \
         revoke the oldest, or raise max_leases"
    )]
    Full {
        /// How many there can be.
        max: u32,
        /// How many of them have ended and wait to be retired.
        unretired: u64,
    },
    /// All 2^40 lease numbers have been used.
    #[error("all lease numbers are used up; restart the engine")]
    IdsExhausted,
}

impl GrantError {
    /// A short name, the same in logs, metrics and reports.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::NoBlocks => "no_blocks",
            Self::ZeroTtl => "zero_ttl",
            Self::RequestLeased { .. } => "request_leased",
            Self::Full { .. } => "leases_full",
            Self::IdsExhausted => "ids_exhausted",
        }
    }
}

/// A refused grant: the reason, and the blocks, unleased.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("no lease granted: {error}")]
pub struct GrantRefused {
    /// Why.
    #[source]
    pub error: GrantError,
    /// The blocks that were to be leased.
    pub blocks: Vec<BlockId>,
}

/// What became of a renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RenewOutcome {
    /// The lease now ends at this time.
    Extended(MonoTime),
    /// The lease holds anyway until this time, which is no earlier than what was asked.
    Unchanged(MonoTime),
    /// The deadline has passed. The lease is not brought back.
    TooLate,
    /// No such lease holds: it has ended, or never was. Ignored.
    Unknown,
}

impl RenewOutcome {
    /// The deadline of a lease that holds.
    #[must_use]
    pub const fn deadline(self) -> Option<MonoTime> {
        match self {
            Self::Extended(at) | Self::Unchanged(at) => Some(at),
            Self::TooLate | Self::Unknown => None,
        }
    }
}

/// What became of a release.
#[derive(Debug)]
#[must_use = "an ended lease must be retired, or its blocks are lost"]
pub enum ReleaseOutcome {
    /// The lease has ended: retire it.
    Ended(EndedLease),
    /// Counted; more ranks must say the same before the lease ends.
    Counted {
        /// How many have.
        seen: u32,
        /// How many must.
        of: u32,
    },
    /// Nothing was done.
    Ignored(ReleaseIgnored),
}

impl ReleaseOutcome {
    /// The ended lease, if this release ended one.
    #[must_use = "an ended lease must be retired, or its blocks are lost"]
    pub fn ended(self) -> Option<EndedLease> {
        match self {
            Self::Ended(ended) => Some(ended),
            Self::Counted { .. } | Self::Ignored(_) => None,
        }
    }
}

/// Why a release did nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseIgnored {
    /// No such lease holds: released before (a duplicate), expired, revoked, or never granted.
    NotLive,
    /// The lease holds, but the word is not its word: the sender speaks of another incarnation.
    WrongWord,
    /// The message says that zero ranks must release.
    ZeroRanks,
}

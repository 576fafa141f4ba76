//! The decision.

use std::num::NonZeroU32;
use std::time::Duration;

use serde::{Serialize, Serializer};

use super::cost::{CostModel, ReadShape};

/// Fewest tokens worth a read: 64, the default of vLLM's `kv_recompute_threshold`.
pub const DEFAULT_THRESHOLD: u64 = 64;

/// How much longer than now (or than the estimated end of the read) a lease must hold: 5 s, the
/// margin of vLLM's connector. It is an economy, not a safeguard: a read that outlives its lease is
/// found out by the lease word, it is merely wasted.
pub const DEFAULT_LEASE_MARGIN: Duration = Duration::from_secs(5);

/// What a decision is made from. All token counts are from the first token of the prompt on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct DecisionInput {
    /// Tokens whose KV the holder says it has.
    pub remote_tokens: u64,
    /// Tokens of the leading full blocks whose chained hash equals the reader's own. Whatever the
    /// other counts say, nothing beyond these is read; a partial last block has no hash.
    pub matched_tokens: u64,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens whose KV the reader has already; rounded down to whole blocks here.
    pub local_hit_tokens: u64,
    /// Tokens of a block.
    pub block_tokens: NonZeroU32,
    /// Fewest tokens worth a read; 0 reads however few there are.
    pub threshold: u64,
    /// How long the lease will hold, on the reader's clock; zero if it is over, `None` if the holder
    /// did not say.
    #[serde(rename = "lease_remaining_s", serialize_with = "optional_seconds")]
    pub lease_remaining: Option<Duration>,
    /// How much longer than now the lease must hold.
    #[serde(rename = "lease_margin_s", serialize_with = "seconds")]
    pub lease_margin: Duration,
    /// Whether what would carry the bytes is what the engine requires.
    pub fabric_ok: bool,
    /// Whether the holder can be reached, as far as is known: false while it is backed off from, or
    /// when its incarnation is over.
    pub peer_ok: bool,
}

impl DecisionInput {
    /// Nothing there, nothing here, usual limits, a good peer: to be filled in with `..`.
    #[must_use]
    pub const fn new(block_tokens: NonZeroU32) -> Self {
        Self {
            remote_tokens: 0,
            matched_tokens: 0,
            prompt_tokens: 0,
            local_hit_tokens: 0,
            block_tokens,
            threshold: DEFAULT_THRESHOLD,
            lease_remaining: None,
            lease_margin: DEFAULT_LEASE_MARGIN,
            fabric_ok: true,
            peer_ok: true,
        }
    }
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case", tag = "action")]
pub enum Action {
    /// Read these blocks, then compute what follows them.
    Read {
        /// The first block to read, counted in blocks from the start of the sequence: as many are
        /// here already.
        first_block: u32,
        /// How many blocks.
        blocks: u32,
        /// How many tokens that is.
        tokens: u64,
    },
    /// There is something to read, and computing it is better.
    Recompute,
    /// There is nothing to read.
    Nothing,
}

/// Why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reason {
    /// Read: at least the threshold.
    WorthReading,
    /// Nothing: the holder has no tokens.
    NoRemoteTokens,
    /// Nothing: no full block of the holder has the tokens of this prompt: another conversation, an
    /// edited history, another model, or less than one block.
    NoMatch,
    /// Nothing: what matches is here already.
    LocalHitCovers,
    /// Recompute: fewer tokens than the threshold.
    BelowThreshold,
    /// Recompute: the lease is over, or will be within the margin.
    LeaseExpired,
    /// Recompute: the lease holds, but by measured costs the read would outlast it. Only
    /// [`decide_with`] says so.
    LeaseTooShort,
    /// Recompute: what would carry the bytes is not what the engine requires, says the caller
    /// ([`DecisionInput::fabric_ok`]).
    FabricNotAllowed,
    /// Recompute: the holder cannot be reached, says the caller ([`DecisionInput::peer_ok`]).
    PeerUnavailable,
}

impl Reason {
    /// Every reason.
    pub const ALL: [Self; 9] = [
        Self::WorthReading,
        Self::NoRemoteTokens,
        Self::NoMatch,
        Self::LocalHitCovers,
        Self::BelowThreshold,
        Self::LeaseExpired,
        Self::LeaseTooShort,
        Self::FabricNotAllowed,
        Self::PeerUnavailable,
    ];

    /// A stable name for logs, metrics and JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::WorthReading => "worth_reading",
            Self::NoRemoteTokens => "no_remote_tokens",
            Self::NoMatch => "no_match",
            Self::LocalHitCovers => "local_hit_covers",
            Self::BelowThreshold => "below_threshold",
            Self::LeaseExpired => "lease_expired",
            Self::LeaseTooShort => "lease_too_short",
            Self::FabricNotAllowed => "fabric_not_allowed",
            Self::PeerUnavailable => "peer_unavailable",
        }
    }
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What becomes of the lease now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseAction {
    /// Keep it: the read needs it, and releases it at its end.
    Keep,
    /// Release it at once: nobody will read. Harmless when it is over already.
    Release,
}

/// A decision, with everything that it was made from.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Decision {
    /// What to do.
    #[serde(flatten)]
    pub action: Action,
    /// Why.
    pub reason: Reason,
    /// What becomes of the lease.
    pub lease: LeaseAction,
    /// Tokens that a read would add to what is here; 0 if none.
    pub count: u64,
    /// The threshold that applied: the given one, or the cost model's.
    pub effective_threshold: u64,
    /// How long the read was estimated to take, where there is a usable cost model.
    #[serde(rename = "estimate_s", serialize_with = "optional_seconds")]
    pub estimate: Option<Duration>,
    /// The input.
    pub input: DecisionInput,
}

/// Decides by counts alone.
#[must_use]
pub fn decide(input: &DecisionInput) -> Decision {
    judge(input, None)
}

/// Decides by counts and by what was measured. The threshold is the model's once the model is
/// [ready](CostModel::is_ready), except that a threshold of 0 stays off; and a read that would
/// outlast its lease by the model's estimate is refused. Before that, as [`decide`] does.
#[must_use]
pub fn decide_with(input: &DecisionInput, costs: &CostModel, shape: ReadShape) -> Decision {
    judge(input, Some((costs, shape)))
}

fn judge(input: &DecisionInput, costs: Option<(&CostModel, ReadShape)>) -> Decision {
    let block_tokens = u64::from(input.block_tokens.get());
    let usable_tokens = input
        .remote_tokens
        .min(input.matched_tokens)
        .min(input.prompt_tokens);
    let usable_blocks = blocks(usable_tokens, block_tokens);
    let local_blocks = blocks(input.local_hit_tokens, block_tokens);
    let wanted = usable_blocks.saturating_sub(local_blocks);
    // Below 2^64: both factors are below 2^32.
    let count = u64::from(wanted) * block_tokens;

    let threshold = match costs {
        Some((costs, shape)) if input.threshold > 0 => {
            costs.effective_threshold(shape, input.block_tokens)
        }
        _ => None,
    };
    let effective_threshold = threshold.unwrap_or(input.threshold);
    let estimate = costs.and_then(|(costs, shape)| costs.read_time(shape, wanted));

    let lasts = |longer_than: Duration| {
        input
            .lease_remaining
            .is_none_or(|remaining| remaining > longer_than)
    };
    let reason = if input.remote_tokens == 0 {
        Reason::NoRemoteTokens
    } else if usable_blocks == 0 {
        Reason::NoMatch
    } else if wanted == 0 {
        Reason::LocalHitCovers
    } else if count < effective_threshold {
        Reason::BelowThreshold
    } else if !lasts(input.lease_margin) {
        Reason::LeaseExpired
    } else if estimate.is_some_and(|time| !lasts(input.lease_margin.saturating_add(time))) {
        Reason::LeaseTooShort
    } else if !input.fabric_ok {
        Reason::FabricNotAllowed
    } else if !input.peer_ok {
        Reason::PeerUnavailable
    } else {
        Reason::WorthReading
    };
    let (action, lease) = match reason {
        Reason::WorthReading => (
            Action::Read {
                first_block: local_blocks,
                blocks: wanted,
                tokens: count,
            },
            LeaseAction::Keep,
        ),
        Reason::NoRemoteTokens | Reason::NoMatch | Reason::LocalHitCovers => {
            (Action::Nothing, LeaseAction::Release)
        }
        Reason::BelowThreshold
        | Reason::LeaseExpired
        | Reason::LeaseTooShort
        | Reason::FabricNotAllowed
        | Reason::PeerUnavailable => (Action::Recompute, LeaseAction::Release),
    };
    Decision {
        action,
        reason,
        lease,
        count,
        effective_threshold,
        estimate,
        input: *input,
    }
}

/// Whole blocks in `tokens`. More than 2^32 are as good as 2^32: no pool has them.
fn blocks(tokens: u64, block_tokens: u64) -> u32 {
    u32::try_from(tokens.checked_div(block_tokens).unwrap_or(0)).unwrap_or(u32::MAX)
}

fn seconds<S: Serializer>(duration: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(duration.as_secs_f64())
}

// The signature is serde's.
#[allow(clippy::ref_option)]
fn optional_seconds<S: Serializer>(duration: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
    duration.map(|d| d.as_secs_f64()).serialize(to)
}

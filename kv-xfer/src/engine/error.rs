//! What can go wrong with an engine and with one read, and what the caller should do about it.

use std::time::Duration;

use thiserror::Error;

use super::connect::ConnectError;
use crate::descriptor::TicketError;
use crate::fabric::{Requirement, Unmet};
use crate::ids::{BlockId, EngineId, Incarnation, LeaseId};
use crate::lease::GrantError;
use crate::memory::{MemoryError, OwnedBlocks};
use crate::peer::AddrError;
use crate::plan::PlanError;
use crate::side_channel::ServerError;
use crate::transport::TransportError;

/// What a caller does about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Advice {
    /// Compute the tokens instead; the same descriptor will not work again.
    Recompute,
    /// Compute now; a later read from this peer may work.
    RetryLater,
    /// Two engines are configured so that they cannot exchange blocks.
    FixConfiguration,
    /// This should not happen: please report it with the log.
    ReportBug,
}

/// Why a read ended without its blocks.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The peer could not be met.
    #[error("cannot read from engine {engine}: {cause}; recompute, a later turn may read again")]
    Connect {
        /// The peer.
        engine: EngineId,
        /// Why.
        #[source]
        cause: ConnectError,
    },
    /// The descriptor was made by an earlier life of the peer; its blocks are gone.
    #[error(
        "engine {engine} restarted: the blocks belong to incarnation {expected}, it is now {found}; recompute"
    )]
    PeerRestarted {
        /// The peer.
        engine: EngineId,
        /// The incarnation in the descriptor.
        expected: Incarnation,
        /// The incarnation that answers.
        found: Incarnation,
    },
    /// The descriptor does not fit the peer's card or this pool.
    #[error(
        "the remote blocks do not fit engine {engine}: {cause}; recompute and report the router"
    )]
    BadDescriptor {
        /// The peer.
        engine: EngineId,
        /// What does not fit.
        #[source]
        cause: PlanError,
    },
    /// The descriptor names a lease word that the peer does not have.
    #[error("lease word {slot} is outside the {slots} words of engine {engine}; recompute")]
    NoSuchWord {
        /// The peer.
        engine: EngineId,
        /// Slot in the descriptor.
        slot: u32,
        /// Slots on the peer's card.
        slots: u32,
    },
    /// The holder ended the lease before the last byte was known to be good. The bytes that
    /// arrived are not to be used.
    #[error(
        "lease {lease} of engine {engine} ended during the read (word {expected:#x} became {found:#x}); recompute"
    )]
    LeaseLost {
        /// The peer.
        engine: EngineId,
        /// The lease.
        lease: LeaseId,
        /// The word in the descriptor.
        expected: u64,
        /// The word that was read after the last byte.
        found: u64,
    },
    /// The transport failed.
    #[error("reading from engine {engine} failed: {cause}; recompute")]
    Transport {
        /// The peer.
        engine: EngineId,
        /// The failure with its raw status.
        #[source]
        cause: TransportError,
    },
    /// The read did not end in time.
    #[error("reading from engine {engine} did not end within {limit:?} ({phase}); recompute")]
    Deadline {
        /// The peer.
        engine: EngineId,
        /// The time the read was given.
        limit: Duration,
        /// What it was waiting for.
        phase: &'static str,
    },
    /// Nothing came from the peer for as long as the reader waits for a sign of life.
    #[error(
        "nothing came from engine {engine} for {after:?} while it was read from; recompute, a later turn may read again"
    )]
    PeerSilent {
        /// The peer.
        engine: EngineId,
        /// [`ReaderConfig::silent_after`](crate::engine::config::ReaderConfig::silent_after).
        after: Duration,
    },
    /// The caller cancelled the read or dropped its handle.
    #[error("the read was cancelled")]
    Cancelled,
    /// Another read from the same peer did not end, and the agent had to be destroyed.
    #[error("the agent for engine {engine} was torn down to end a stuck read; recompute")]
    Fenced {
        /// The peer.
        engine: EngineId,
    },
    /// The device that the pool is on has failed: what the read waits for, or what it has landed, is not known.
    #[error("the memory that blocks of engine {engine} are read into failed: {cause}; recompute")]
    Device {
        /// The peer.
        engine: EngineId,
        /// What the device said.
        #[source]
        cause: MemoryError,
    },
    /// The engine is shutting down.
    #[error("the engine is shutting down")]
    ShuttingDown,
    /// The driver thread is gone.
    #[error("the engine's driver thread ended unexpectedly; restart the engine and report it")]
    DriverGone,
}

impl ReadError {
    /// A short name, the same in logs, metrics and reports.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Connect { .. } => "peer_unreachable",
            Self::PeerRestarted { .. } => "peer_restarted",
            Self::BadDescriptor { .. } => "bad_descriptor",
            Self::NoSuchWord { .. } => "no_such_word",
            Self::LeaseLost { .. } => "lease_lost",
            Self::Transport { .. } => "transport_failed",
            Self::Deadline { .. } => "deadline_passed",
            Self::PeerSilent { .. } => "peer_silent",
            Self::Cancelled => "cancelled",
            Self::Fenced { .. } => "fenced",
            Self::Device { .. } => "device_failed",
            Self::ShuttingDown => "shutting_down",
            Self::DriverGone => "driver_gone",
        }
    }

    /// Whether the connection to the peer is not to be used again.
    pub(super) fn breaks_link(&self) -> bool {
        matches!(self, Self::Transport { cause, .. } if cause.breaks_link())
    }

    /// What the caller should do.
    #[must_use]
    pub fn advice(&self) -> Advice {
        match self {
            Self::Connect { cause, .. } => cause.advice(),
            Self::Deadline { .. }
            | Self::PeerSilent { .. }
            | Self::Transport { .. }
            | Self::Fenced { .. } => Advice::RetryLater,
            Self::DriverGone => Advice::ReportBug,
            Self::PeerRestarted { .. }
            | Self::BadDescriptor { .. }
            | Self::NoSuchWord { .. }
            | Self::LeaseLost { .. }
            | Self::Device { .. }
            | Self::Cancelled
            | Self::ShuttingDown => Advice::Recompute,
        }
    }
}

/// Why a read was not taken. The destination blocks come back: nothing was started.
#[derive(Debug, Error)]
#[error("{error}")]
pub struct SubmitRefused {
    /// Why.
    #[source]
    pub error: SubmitError,
    /// The destination blocks, untouched.
    pub blocks: OwnedBlocks,
}

/// Why a read was not taken.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// As many reads are queued as the engine is configured for.
    #[error("{queued} reads are already queued; recompute, or raise ReaderConfig::queue")]
    QueueFull {
        /// The configured bound.
        queued: usize,
    },
    /// The span lies outside the remote blocks.
    #[error("blocks {first}..{end} were asked for, the descriptor has {available}")]
    SpanOutOfRange {
        /// First block index asked for.
        first: usize,
        /// One past the last.
        end: usize,
        /// Blocks in the descriptor.
        available: usize,
    },
    /// The span reaches past the blocks that hold the prompt's tokens.
    #[error(
        "blocks up to {end} were asked for, but only the first {matched} hold the prompt's tokens; \
         read those, recompute the rest"
    )]
    OtherTokens {
        /// One past the last block asked for.
        end: usize,
        /// Leading blocks whose chained hashes match the prompt's.
        matched: usize,
    },
    /// Remote and destination blocks differ in number.
    #[error("{remote} remote blocks do not fit {local} destination blocks; claim exactly as many")]
    CountMismatch {
        /// Remote blocks asked for.
        remote: usize,
        /// Destination blocks given.
        local: usize,
    },
    /// No blocks at all.
    #[error("a read of zero blocks was asked for; release the lease instead")]
    Nothing,
    /// The destination blocks belong to another pool.
    #[error("the destination blocks belong to another pool")]
    ForeignBlocks,
    /// The engine is shutting down.
    #[error("the engine is shutting down")]
    ShuttingDown,
}

impl SubmitError {
    /// A short name, the same in logs, metrics and reports.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::QueueFull { .. } => "queue_full",
            Self::SpanOutOfRange { .. } => "span_out_of_range",
            Self::OtherTokens { .. } => "other_tokens",
            Self::CountMismatch { .. } => "count_mismatch",
            Self::Nothing => "nothing",
            Self::ForeignBlocks => "foreign_blocks",
            Self::ShuttingDown => "shutting_down",
        }
    }
}

/// Why a descriptor was not accepted. The tokens are to be computed instead.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum OfferError {
    /// The descriptor carries none of kv-xfer's extras, so nothing could prove that the bytes are
    /// current and of the right tokens.
    #[error(
        "the remote blocks of engine {engine} carry no lease word and no block hashes; \
         what cannot be verified is not read, recompute"
    )]
    Unverifiable {
        /// The holder.
        engine: EngineId,
    },
    /// The descriptor does not verify.
    #[error(
        "the descriptor of engine {engine} is not authentic: {cause}; recompute, and check the cluster keys"
    )]
    NotAuthentic {
        /// The holder it names.
        engine: EngineId,
        /// What did not verify.
        #[source]
        cause: TicketError,
    },
    /// The blocks mean something else than this pool's.
    #[error(
        "the blocks of engine {engine} have another layout than this pool; recompute, and align the engines' models, dtypes, block sizes and tensor-parallel sizes"
    )]
    Layout {
        /// The holder.
        engine: EngineId,
    },
    /// The holder's address cannot be one.
    #[error("the holder's address is malformed: {0}; recompute")]
    Address(#[from] AddrError),
}

impl OfferError {
    /// A short name, the same in logs, metrics and reports.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Unverifiable { .. } => "unverifiable",
            Self::NotAuthentic { .. } => "not_authentic",
            Self::Layout { .. } => "other_layout",
            Self::Address(_) => "bad_address",
        }
    }
}

/// Why no lease was granted. The blocks come back.
#[derive(Debug, Error)]
#[error("{error}")]
pub struct LeaseRefused {
    /// Why.
    #[source]
    pub error: LeaseError,
    /// The blocks that were to be leased.
    pub blocks: Vec<BlockId>,
}

/// Why no lease was granted.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// The engine serves nobody.
    #[error(
        "the engine has no side channel, so nobody could read the blocks; set HolderConfig::bind"
    )]
    NotServing,
    /// A block is not one of the pool's.
    #[error("block {block} is outside the pool of {blocks} blocks")]
    OutOfRange {
        /// The block.
        block: BlockId,
        /// Blocks in the pool.
        blocks: u32,
    },
    /// What writes the blocks has not ended in time.
    #[error("the blocks were still being written after {limit:?}; lease them later, or not at all")]
    StillWritten {
        /// The time that it was given.
        limit: Duration,
    },
    /// Whether what writes the blocks has ended cannot be known.
    #[error("whether the blocks are written cannot be known: {0}")]
    Device(#[from] MemoryError),
    /// The lease table refused.
    #[error(transparent)]
    Table(#[from] GrantError),
    /// The tokens, blocks and hashes do not belong together.
    #[error("the lease cannot be described: {0}")]
    Describe(#[source] TicketError),
}

impl LeaseError {
    /// A short name, the same in logs, metrics and reports.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::NotServing => "not_serving",
            Self::OutOfRange { .. } => "out_of_range",
            Self::StillWritten { .. } => "still_written",
            Self::Device(_) => "device_failed",
            Self::Table(refused) => refused.name(),
            Self::Describe(_) => "not_describable",
        }
    }
}

/// Why an engine did not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// The transport failed.
    #[error("the transport does not work: {0}")]
    Transport(#[from] TransportError),
    /// What must carry the bytes is not here.
    #[error(transparent)]
    Fabric(#[from] Unmet),
    /// The side channel could not be opened.
    #[error("the side channel cannot be opened: {0}")]
    SideChannel(#[from] ServerError),
    /// A name is malformed.
    #[error(transparent)]
    Name(#[from] crate::ids::NameError),
    /// A thread could not be started.
    #[error("a thread could not be started: {0}; raise the process's thread limit")]
    Thread(#[from] std::io::Error),
    /// The pool's device cannot be used.
    #[error("the pool's memory cannot be used: {0}")]
    Memory(#[from] MemoryError),
    /// The settings contradict each other.
    #[error("the engine's settings do not fit: {0}")]
    Config(&'static str),
    /// The card could not be written.
    #[error("the engine's card cannot be written: {0}")]
    Card(String),
}

impl StartError {
    /// Why there is no agent: under a requirement because the backend could use nothing else.
    pub(super) fn of_agent(require: Requirement, cause: TransportError) -> Self {
        if require == Requirement::Any {
            return Self::Transport(cause);
        }
        Self::Fabric(Unmet {
            wanted: require,
            found: format!("nothing of the kind that NIXL could use ({cause})"),
            fix: "run `kvx doctor`, which says what is missing; NIXL_LOG_LEVEL=INFO and \
                  UCX_LOG_LEVEL=info show the libraries' own reasons"
                .to_owned(),
        })
    }
}

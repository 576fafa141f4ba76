//! How a peer stands with us: the values that go into and come out of a
//! [`PeerTable`](super::PeerTable).

use std::time::Duration;

use thiserror::Error;

use super::addr::PeerAddr;
use crate::clock::MonoTime;
use crate::ids::{Incarnation, Rank};

/// One rank of a peer: what is met, loaded and read from as one.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerKey {
    /// Where its side channel listens.
    pub addr: PeerAddr,
    /// Which rank of it.
    pub rank: Rank,
}

impl std::fmt::Display for PeerKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.addr, self.rank)
    }
}

/// Times and sizes of a [`PeerTable`](super::PeerTable).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerConfig {
    /// How long one attempt may take. The default, 5 s, is vLLM's receive timeout.
    pub connect_timeout: Duration,
    /// First pause after a failure; doubles with each further one. Default 100 ms.
    pub backoff_min: Duration,
    /// Longest pause. Default 5 s: a restarted peer is met again within seconds.
    pub backoff_max: Duration,
    /// A peer met less than this ago is not met again because a descriptor names another
    /// incarnation, so that bad descriptors cannot keep the engine dialling. Default 100 ms.
    pub meet_again_min: Duration,
    /// Most peers remembered. Default 4,096.
    pub max_peers: usize,
}

impl Default for PeerConfig {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(5),
            backoff_min: Duration::from_millis(100),
            backoff_max: Duration::from_secs(5),
            meet_again_min: Duration::from_millis(100),
            max_peers: 4096,
        }
    }
}

/// How a peer stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerState {
    /// Its card is being fetched.
    Connecting {
        /// Number of the attempt.
        attempt: u64,
        /// When the attempt is given up.
        deadline: MonoTime,
    },
    /// Its card is loaded.
    Ready {
        /// Which life of it; `None` for a vLLM peer, which has no incarnations.
        incarnation: Option<Incarnation>,
        /// When the card was received.
        met: MonoTime,
    },
    /// Not loaded; the next use meets it (again) at once.
    Suspect,
    /// Left alone after a failure.
    Backoff {
        /// Until when.
        until: MonoTime,
    },
}

/// What to do with a peer that is wanted for a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Want {
    /// Read from it.
    Use {
        /// Which life of it.
        incarnation: Option<Incarnation>,
    },
    /// Fetch its card, then report [`on_card`](super::PeerTable::on_card) or [`on_failure`](super::PeerTable::on_failure).
    Connect {
        /// Number of the attempt, to report with.
        attempt: u64,
        /// When to give up.
        deadline: MonoTime,
    },
    /// Its card is being fetched; ask again when that has ended, at the latest then.
    Connecting {
        /// When the attempt is given up.
        deadline: MonoTime,
    },
    /// It failed lately: recompute, or ask again then.
    BackedOff {
        /// Until when it is left alone.
        until: MonoTime,
    },
}

/// What a card changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CardOutcome {
    /// The attempt had been given up: drop the card.
    Stale,
    /// First card of this peer: load it.
    First,
    /// Same engine and incarnation as before: what was loaded may be kept or renewed.
    Same,
    /// The peer is another engine or another life of it: forget what was loaded, fail its reads,
    /// drop its clock offset, load this card.
    Replaced {
        /// The life that is over.
        old: Option<Incarnation>,
    },
}

/// A deadline that has passed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Expired {
    /// An attempt was given up; fail or re-plan what waits for it.
    Attempt {
        /// Which peer.
        peer: PeerKey,
        /// Until when it is left alone.
        until: MonoTime,
    },
    /// A pause is over; the next want connects.
    Backoff {
        /// Which peer.
        peer: PeerKey,
    },
}

/// What a mismatch of incarnations calls for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MeetNext {
    /// The card may be the old one: [`want`](super::PeerTable::want) now connects; check again after that.
    MeetAgain,
    /// The card is newer than the descriptor: the described blocks died with the engine. Recompute.
    Recompute,
}

/// Why a peer cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PeerError {
    /// Descriptor and card are of different lives of the engine.
    #[error(
        "{peer} is incarnation {found}, the descriptor is of {expected}; {}",
        match next {
            MeetNext::MeetAgain => "fetch its card again",
            MeetNext::Recompute => "the blocks died with that engine, recompute",
        }
    )]
    PeerRestarted {
        /// Which peer.
        peer: PeerKey,
        /// The descriptor's incarnation.
        expected: Incarnation,
        /// The card's incarnation.
        found: Incarnation,
        /// What to do.
        next: MeetNext,
    },
    /// The peer is not loaded.
    #[error("{peer} is not loaded; want it first")]
    NotReady {
        /// Which peer.
        peer: PeerKey,
    },
    /// A vLLM peer's card where the descriptor is of a kv-xfer engine.
    #[error("{peer} answers as a vLLM engine, the descriptor is of a kv-xfer engine; recompute")]
    NoIncarnation {
        /// Which peer.
        peer: PeerKey,
    },
    /// Too many peers are in use.
    #[error("{limit} peers are in use, {peer} would be one more; raise max_peers or recompute")]
    TableFull {
        /// The peer that was wanted.
        peer: PeerKey,
        /// The limit.
        limit: usize,
    },
}

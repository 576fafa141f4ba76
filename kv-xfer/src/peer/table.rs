//! Who is known, being met, or left alone for a while.
//!
//! ```text
//!            want            card
//!  (unknown) ───► Connecting ────► Ready ──lost──► Suspect ──want──► Connecting
//!                     │ failure, deadline    └─lost again─┐
//!                     ▼                                   ▼
//!                  Backoff(until) ◄───────────────────────┘
//!                     └─until passes─► Suspect
//! ```
//!
//! The table does no I/O. `want` says what to do; what came of it is reported with the attempt's
//! number, so that a late answer to an abandoned attempt changes nothing.

use std::collections::HashMap;
use std::time::Duration;

use thiserror::Error;

use super::addr::PeerAddr;
use crate::clock::MonoTime;
use crate::ids::{EngineId, Incarnation, Rank};

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

/// Times and sizes of a [`PeerTable`].
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
    /// Fetch its card, then report [`PeerTable::on_card`] or [`PeerTable::on_failure`].
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
    /// The card may be the old one: [`PeerTable::want`] now connects; check again after that.
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

#[derive(Debug)]
struct Entry {
    state: PeerState,
    identity: Option<(EngineId, Option<Incarnation>)>,
    /// Attempts failed since the last card.
    connect_failures: u32,
    /// Losses since the last landed read.
    losses: u32,
    used: MonoTime,
}

/// All peers of an engine.
#[derive(Debug)]
pub struct PeerTable {
    config: PeerConfig,
    entries: HashMap<PeerKey, Entry>,
    attempts: u64,
}

impl PeerTable {
    /// An empty table.
    #[must_use]
    pub fn new(config: PeerConfig) -> Self {
        Self {
            config,
            entries: HashMap::new(),
            attempts: 0,
        }
    }

    /// How a peer stands; `None` when it is unknown.
    #[must_use]
    pub fn state(&self, peer: &PeerKey) -> Option<PeerState> {
        self.entries.get(peer).map(|entry| entry.state)
    }

    /// A read wants this peer.
    ///
    /// # Errors
    /// [`PeerError::TableFull`] when it is unknown and every remembered peer is in use.
    pub fn want(&mut self, peer: &PeerKey, now: MonoTime) -> Result<Want, PeerError> {
        if !self.entries.contains_key(peer) {
            self.make_room(peer)?;
        }
        let deadline = now.saturating_add(self.config.connect_timeout);
        let entry = self.entries.entry(peer.clone()).or_insert(Entry {
            state: PeerState::Suspect,
            identity: None,
            connect_failures: 0,
            losses: 0,
            used: now,
        });
        entry.used = now;
        match entry.state {
            PeerState::Ready { incarnation, .. } => return Ok(Want::Use { incarnation }),
            PeerState::Connecting { deadline, .. } if now < deadline => {
                return Ok(Want::Connecting { deadline });
            }
            PeerState::Connecting { .. } => {
                // Its deadline has passed, `expire` has not run yet.
                let until = entry.fail_connect(&self.config, now);
                return Ok(Want::BackedOff { until });
            }
            PeerState::Backoff { until } if now < until => return Ok(Want::BackedOff { until }),
            PeerState::Backoff { .. } | PeerState::Suspect => {}
        }
        self.attempts = self.attempts.saturating_add(1);
        entry.state = PeerState::Connecting {
            attempt: self.attempts,
            deadline,
        };
        Ok(Want::Connect {
            attempt: self.attempts,
            deadline,
        })
    }

    /// A (verified) card came in.
    pub fn on_card(
        &mut self,
        peer: &PeerKey,
        attempt: u64,
        engine: &EngineId,
        incarnation: Option<Incarnation>,
        now: MonoTime,
    ) -> CardOutcome {
        let Some(entry) = self.attempt(peer, attempt) else {
            return CardOutcome::Stale;
        };
        entry.state = PeerState::Ready {
            incarnation,
            met: now,
        };
        entry.connect_failures = 0;
        let new = (engine.clone(), incarnation);
        match entry.identity.replace(new.clone()) {
            None => CardOutcome::First,
            Some(old) if old == new => CardOutcome::Same,
            Some((_, old)) => {
                entry.losses = 0;
                CardOutcome::Replaced { old }
            }
        }
    }

    /// An attempt failed. Returns until when the peer is left alone; `None` when the attempt had
    /// been given up already.
    pub fn on_failure(&mut self, peer: &PeerKey, attempt: u64, now: MonoTime) -> Option<MonoTime> {
        let config = self.config;
        self.attempt(peer, attempt)
            .map(|entry| entry.fail_connect(&config, now))
    }

    /// A loaded peer was lost: forget what is loaded. The first loss after a landed read makes the
    /// next use meet it at once; repeated ones leave it alone for a while. Returns until when.
    /// Ignored when the peer is not loaded, or is another incarnation by now.
    pub fn on_lost(
        &mut self,
        peer: &PeerKey,
        lost: Option<Incarnation>,
        now: MonoTime,
    ) -> Option<MonoTime> {
        let entry = self.entries.get_mut(peer)?;
        match entry.state {
            PeerState::Ready { incarnation, .. } if incarnation == lost => {}
            _ => return None,
        }
        let until = now.saturating_add(pause(&self.config, entry.losses));
        entry.losses = entry.losses.saturating_add(1);
        entry.state = if entry.losses == 1 {
            PeerState::Suspect
        } else {
            PeerState::Backoff { until }
        };
        matches!(entry.state, PeerState::Backoff { .. }).then_some(until)
    }

    /// A read from this peer landed: its record is clean again.
    pub fn on_landed(&mut self, peer: &PeerKey) {
        if let Some(entry) = self.entries.get_mut(peer) {
            entry.losses = 0;
        }
    }

    /// Whether the loaded card is of the life that a descriptor, received at `received`, names.
    ///
    /// # Errors
    /// [`PeerError::PeerRestarted`] when it is not. With [`MeetNext::MeetAgain`] the peer has been
    /// made to be met again: forget what is loaded and want it.
    pub fn check_incarnation(
        &mut self,
        peer: &PeerKey,
        described: Incarnation,
        received: MonoTime,
        now: MonoTime,
    ) -> Result<(), PeerError> {
        let not_ready = || PeerError::NotReady { peer: peer.clone() };
        let entry = self.entries.get_mut(peer).ok_or_else(not_ready)?;
        let PeerState::Ready { incarnation, met } = entry.state else {
            return Err(not_ready());
        };
        let found = incarnation.ok_or_else(|| PeerError::NoIncarnation { peer: peer.clone() })?;
        if found == described {
            return Ok(());
        }
        let fresh = met >= received || now.saturating_since(met) < self.config.meet_again_min;
        let next = if fresh {
            MeetNext::Recompute
        } else {
            entry.state = PeerState::Suspect;
            MeetNext::MeetAgain
        };
        Err(PeerError::PeerRestarted {
            peer: peer.clone(),
            expected: described,
            found,
            next,
        })
    }

    /// Forgets a peer that nothing uses any more.
    pub fn forget(&mut self, peer: &PeerKey) {
        self.entries.remove(peer);
    }

    /// When [`expire`](Self::expire) has something to do next.
    #[must_use]
    pub fn next_timeout(&self) -> Option<MonoTime> {
        self.entries
            .values()
            .filter_map(|entry| match entry.state {
                PeerState::Connecting { deadline, .. } => Some(deadline),
                PeerState::Backoff { until } => Some(until),
                PeerState::Ready { .. } | PeerState::Suspect => None,
            })
            .min()
    }

    /// Acts on the deadlines that have passed.
    pub fn expire(&mut self, now: MonoTime) -> Vec<Expired> {
        let mut expired = Vec::new();
        for (peer, entry) in &mut self.entries {
            match entry.state {
                PeerState::Connecting { deadline, .. } if deadline <= now => {
                    let until = entry.fail_connect(&self.config, now);
                    let peer = peer.clone();
                    expired.push(Expired::Attempt { peer, until });
                }
                PeerState::Backoff { until } if until <= now => {
                    entry.state = PeerState::Suspect;
                    expired.push(Expired::Backoff { peer: peer.clone() });
                }
                _ => {}
            }
        }
        expired
    }

    /// The entry of an attempt that is still running.
    fn attempt(&mut self, peer: &PeerKey, number: u64) -> Option<&mut Entry> {
        self.entries.get_mut(peer).filter(|entry| {
            matches!(entry.state, PeerState::Connecting { attempt, .. } if attempt == number)
        })
    }

    /// Makes room for one more entry by forgetting the one that has not been used for longest.
    fn make_room(&mut self, wanted: &PeerKey) -> Result<(), PeerError> {
        if self.entries.len() < self.config.max_peers {
            return Ok(());
        }
        let idle = self
            .entries
            .iter()
            .filter(|(_, e)| matches!(e.state, PeerState::Suspect | PeerState::Backoff { .. }))
            .min_by_key(|(_, entry)| entry.used)
            .map(|(peer, _)| peer.clone());
        match idle {
            Some(peer) => {
                self.entries.remove(&peer);
                Ok(())
            }
            None => Err(PeerError::TableFull {
                peer: wanted.clone(),
                limit: self.config.max_peers,
            }),
        }
    }
}

impl Entry {
    fn fail_connect(&mut self, config: &PeerConfig, now: MonoTime) -> MonoTime {
        let until = now.saturating_add(pause(config, self.connect_failures));
        self.connect_failures = self.connect_failures.saturating_add(1);
        self.state = PeerState::Backoff { until };
        until
    }
}

/// The pause after a failure that `before` others preceded.
fn pause(config: &PeerConfig, before: u32) -> Duration {
    let factor = 1_u32.checked_shl(before).unwrap_or(u32::MAX);
    config
        .backoff_min
        .saturating_mul(factor)
        .min(config.backoff_max)
}

//! Meeting peers, off the driver's thread.
//!
//! Every meeting uses a fresh agent. That is the recipe that works on all supported NIXL versions
//! after a peer was lost: nothing that an old agent remembers of it can get in the way.
#![forbid(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam::channel::{Receiver, Sender};
use thiserror::Error;

use super::clocks::Clocks;
use super::driver::Event;
use super::error::Advice;
use super::link::{Link, Width};
use super::probing::Prober;
use crate::clock::{Clock, MonoTime};
use crate::descriptor::LeaseRef;
use crate::fabric::{PeerFabric, Unmet};
use crate::ids::{AgentName, BlockId, EngineId, Incarnation, NameError, Rank, WordSlot};
use crate::layout::{
    KvLayout, LayoutDecodeError, LayoutMismatch, PairingError, RegionGeometry, pair_regions,
};
use crate::memory::{ControlWords, KvPool};
use crate::peer::{Card, CardError, ClockOffset, PeerAddr, PeerKey};
use crate::side_channel::SideChannelError;
use crate::telemetry::Storm;
use crate::transport::{Agent, AgentRole, Descriptor, Transport, TransportError};

static UNWIDENED: Storm = Storm::new();
static MET: Storm = Storm::new();

/// Why a peer could not be met.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The side channel failed or the address may not be dialled.
    #[error("its side channel at {address}: {cause}")]
    SideChannel {
        /// What was dialled.
        address: String,
        /// Why it failed.
        #[source]
        cause: Arc<SideChannelError>,
    },
    /// Its card was refused.
    #[error("its card is not acceptable: {0}")]
    Card(#[source] Arc<CardError>),
    /// Another engine answers at the address.
    #[error("engine {found} answers at its address")]
    OtherEngine {
        /// Who answers.
        found: EngineId,
    },
    /// The layout on its card does not parse.
    #[error("the layout on its card is malformed: {0}")]
    BadLayout(#[source] LayoutDecodeError),
    /// Its blocks mean something else than ours.
    #[error("{0}")]
    Layout(#[source] LayoutMismatch),
    /// Its regions do not fit its layout.
    #[error("the regions on its card do not fit: {0}")]
    Regions(#[source] PairingError),
    /// The transport failed.
    #[error("{0}")]
    Transport(#[source] TransportError),
    /// Its bytes are not carried by what is required.
    #[error("{0}")]
    Fabric(#[source] Unmet),
    /// A name is malformed.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The meeting did not end in time.
    #[error("meeting it took longer than {limit:?}")]
    TookTooLong {
        /// The limit.
        limit: Duration,
    },
    /// It is not to be met now.
    #[error("{0}")]
    Refused(String),
    /// It failed a moment ago and is not dialled again yet.
    #[error("it failed a moment ago and is dialled again in {wait:?}; then: {last}")]
    BackingOff {
        /// Time until it is dialled again.
        wait: Duration,
        /// What happened.
        last: String,
    },
}

impl ConnectError {
    /// What the caller should do.
    #[must_use]
    pub fn advice(&self) -> Advice {
        match self {
            Self::Layout(_) | Self::OtherEngine { .. } | Self::Card(_) | Self::Fabric(_) => {
                Advice::FixConfiguration
            }
            Self::BadLayout(_) | Self::Regions(_) | Self::Name(_) => Advice::ReportBug,
            Self::SideChannel { .. }
            | Self::Transport(_)
            | Self::BackingOff { .. }
            | Self::TookTooLong { .. }
            | Self::Refused(_) => Advice::RetryLater,
        }
    }
}

/// A verified card, and how far its sender's clock is from ours.
#[derive(Debug, Clone)]
pub struct FetchedPeer {
    /// The card.
    pub card: Card,
    /// The clock offset, where it could be measured.
    pub offset: Option<ClockOffset>,
}

/// Where cards come from: the side channel, or a test's table.
pub trait CardSource: Send + Sync + fmt::Debug + 'static {
    /// Fetches and verifies a peer's card within `limit`.
    ///
    /// # Errors
    /// [`ConnectError`].
    fn fetch(
        &self,
        address: &PeerAddr,
        rank: Rank,
        limit: Duration,
    ) -> Result<FetchedPeer, ConnectError>;

    /// Tells the holder that a lease is needed no longer, for when no agent to it exists.
    ///
    /// # Errors
    /// [`ConnectError`]; the lease then ends by its time.
    fn release(
        &self,
        address: &PeerAddr,
        incarnation: Incarnation,
        lease: LeaseRef,
        limit: Duration,
    ) -> Result<(), ConnectError>;

    /// Asks the holder to keep a lease for `extension` from now. Returns the time that is left by the
    /// holder's answer, which may be longer or shorter; `None` when the lease is over.
    ///
    /// # Errors
    /// [`ConnectError`]; nothing is known of the lease then.
    fn renew(
        &self,
        address: &PeerAddr,
        incarnation: Incarnation,
        lease: LeaseRef,
        extension: Duration,
        limit: Duration,
    ) -> Result<Option<Duration>, ConnectError>;
}

/// What this engine brings to every meeting.
#[derive(Debug)]
pub(crate) struct LocalSide {
    pub engine: EngineId,
    pub incarnation: Incarnation,
    pub rank: Rank,
    pub pool: Arc<KvPool>,
    pub landing: Arc<dyn ControlWords>,
    pub prober: Prober,
    pub clocks: Arc<Clocks>,
}

impl LocalSide {
    /// A name that no other agent has.
    pub(super) fn agent_name(&self, what: &str) -> Result<AgentName, NameError> {
        AgentName::new(format!(
            "{}/{}/{}/{what}",
            self.engine, self.rank, self.incarnation
        ))
    }

    /// An agent that can read into the pool, from no one yet.
    pub(super) fn open_agent<T: Transport>(
        &self,
        transport: &T,
        name: &AgentName,
    ) -> Result<T::Agent, TransportError> {
        let mut agent = transport.open_agent(name, AgentRole::Read)?;
        let pool = Arc::clone(&self.pool);
        agent.register(
            pool.regions(),
            Arc::clone(&pool) as Arc<dyn Any + Send + Sync>,
        )?;
        let landing = Arc::clone(&self.landing);
        agent.register(&[landing.region()], Arc::new(landing))?;
        if let Some(scratch) = self.prober.scratch() {
            agent.register(&[scratch.region()], Arc::new(Arc::clone(scratch)))?;
        }
        Ok(agent)
    }
}

/// How a meeting ended.
#[derive(Debug)]
pub(crate) enum Met<A: Agent> {
    /// A new link.
    Link(Box<Link<A>>),
    /// The peer is still the life of itself that is already met.
    Unchanged {
        engine: EngineId,
        incarnation: Incarnation,
    },
}

/// What takes long.
#[derive(Debug)]
pub(crate) enum Errand {
    /// A peer to meet.
    Meet {
        peer: PeerKey,
        /// Number of the attempt, to report with.
        attempt: u64,
        /// The life of it that is met already.
        known: Option<Incarnation>,
        /// When the attempt is given up; an errand that nobody got to by then is dropped.
        until: MonoTime,
    },
    /// Further agents for a peer that is met, one for each helper lane.
    Widen(Widening),
}

/// Further agents that a link wants.
#[derive(Debug)]
pub(crate) struct Widening {
    pub link: u64,
    pub peer: AgentName,
    pub metadata: Arc<[u8]>,
    /// The peer's lease words.
    pub words: RegionGeometry,
    pub agents: usize,
    /// Time to reach the peer, from when it is got to: nobody waits for it.
    pub limit: Duration,
}

/// Meets peers, one after the other.
pub(super) struct Meeting<T: Transport> {
    pub transport: Arc<T>,
    pub cards: Arc<dyn CardSource>,
    pub local: Arc<LocalSide>,
    pub clock: Arc<dyn Clock>,
    /// Numbers links and helper lanes' agents.
    pub next_link: Arc<AtomicU64>,
    /// The word into which it reads to reach a peer.
    pub probe: WordSlot,
    /// Agents that have been opened ahead.
    pub spares: Receiver<T::Agent>,
}

impl<T: Transport> Meeting<T> {
    pub(super) fn run(&self, errands: &Receiver<Errand>, events: &Sender<Event<T::Agent>>) {
        for errand in errands {
            if let Some(event) = self.carry_out(errand)
                && events.send(event).is_err()
            {
                break;
            }
        }
    }

    /// Carries out an errand; `None` when nobody waits for it any more.
    pub(super) fn carry_out(&self, errand: Errand) -> Option<Event<T::Agent>> {
        match errand {
            Errand::Meet {
                peer,
                attempt,
                known,
                until,
            } => {
                if until <= self.clock.now() {
                    // The driver has given it up.
                    return None;
                }
                let result = self.meet(&peer, known, until);
                Some(Event::Met {
                    peer,
                    attempt,
                    result,
                })
            }
            Errand::Widen(widening) => Some(Event::Widened {
                link: widening.link,
                agents: self.widen(&widening),
            }),
        }
    }

    /// As many further agents as can be had.
    fn widen(&self, widening: &Widening) -> Vec<T::Agent> {
        let Widening {
            link,
            peer,
            metadata,
            words,
            agents: count,
            limit,
        } = widening;
        let until = self.clock.now() + *limit;
        let mut agents = Vec::with_capacity(*count);
        for _ in 0..*count {
            // A link may be widened again while its earlier agents are still being destroyed.
            let number = self.next_link.fetch_add(1, Ordering::Relaxed);
            let agent = self
                .local
                .agent_name(&format!("read-{link}-{number}"))
                .map_err(ConnectError::Name)
                .and_then(|name| {
                    self.open(&name, metadata, peer, words, until)
                        .map_err(ConnectError::Transport)
                });
            match agent {
                Ok(agent) => agents.push(agent),
                Err(error) => {
                    if let Some(times) = UNWIDENED.line() {
                        tracing::warn!(%peer, %error, times, "no agent for a helper lane");
                    }
                    break;
                }
            }
        }
        agents
    }

    fn meet(
        &self,
        peer: &PeerKey,
        known: Option<Incarnation>,
        until: MonoTime,
    ) -> Result<Met<T::Agent>, ConnectError> {
        let limit = until.saturating_since(self.clock.now());
        let FetchedPeer { card, offset } = self.cards.fetch(&peer.addr, peer.rank, limit)?;
        if let Some(offset) = offset {
            self.local.clocks.learn(peer, card.incarnation, offset);
        }
        if known == Some(card.incarnation) {
            let (engine, incarnation) = (card.engine_id, card.incarnation);
            return Ok(Met::Unchanged {
                engine,
                incarnation,
            });
        }
        let layout = KvLayout::from_bytes(&card.layout).map_err(ConnectError::BadLayout)?;
        let pool = &self.local.pool;
        pool.layout()
            .check_compatible(&layout)
            .map_err(ConnectError::Layout)?;
        let pairs = pair_regions(pool.layout(), pool.regions(), &layout, &card.regions)
            .map_err(ConnectError::Regions)?;
        let remote_blocks = card
            .regions
            .iter()
            .map(|region| region.block_count)
            .min()
            .unwrap_or(0);
        let id = self.next_link.fetch_add(1, Ordering::Relaxed);
        let name = self.local.agent_name(&format!("read-{id}"))?;
        let (agent, fabric) = self.open_proved(&name, &card, until)?;
        if let Some(meetings) = MET.line() {
            tracing::info!(
                engine = %card.engine_id, incarnation = %card.incarnation, %peer, meetings,
                carried_by = %fabric, "met a peer"
            );
        }
        Ok(Met::Link(Box::new(Link {
            id,
            engine: card.engine_id,
            incarnation: card.incarnation,
            peer: card.agent,
            agent,
            pairs: pairs.into(),
            remote_blocks,
            words: card.lease_words,
            used: self.clock.now(),
            heard: self.clock.now(),
            suspected: None,
            tended: MonoTime::ZERO,
            metadata: card.nixl_metadata.into(),
            fabric: Arc::new(fabric),
            width: Width::Narrow,
            copies: false,
        })))
    }

    /// An agent that reads from a peer, and what carries its bytes.
    fn open_proved(
        &self,
        name: &AgentName,
        card: &Card,
        until: MonoTime,
    ) -> Result<(T::Agent, PeerFabric), ConnectError> {
        let (metadata, peer, words) = (&card.nixl_metadata, &card.agent, &card.lease_words);
        let watch = self.local.prober.watch();
        let mut agent = self
            .open(name, metadata, peer, words, until)
            .map_err(ConnectError::Transport)?;
        let limit = until.saturating_since(self.clock.now());
        let prober = &self.local.prober;
        let fabric = prober.prove(watch, &mut agent, peer, words, limit)?;
        Ok((agent, fabric))
    }

    fn open(
        &self,
        name: &AgentName,
        metadata: &[u8],
        peer: &AgentName,
        words: &RegionGeometry,
        until: MonoTime,
    ) -> Result<T::Agent, TransportError> {
        let mut agent = match self.spares.try_recv() {
            Ok(agent) => agent,
            Err(_) => self.local.open_agent(self.transport.as_ref(), name)?,
        };
        agent.load_peer(metadata, peer)?;
        let remote = words.block_addr(BlockId(0));
        let local = self
            .local
            .landing
            .region()
            .block_addr(BlockId(self.probe.0));
        if let (Ok(remote), Ok(local)) = (remote, local) {
            let probe = Descriptor {
                remote,
                local,
                len: 8,
            };
            let limit = until.saturating_since(self.clock.now());
            agent.reach(peer, probe, limit)?;
        }
        Ok(agent)
    }
}

//! Meeting peers, and parting from them: everything that takes long, off the driver's thread.
//!
//! Every meeting uses a fresh agent. That is the recipe that works on all supported NIXL versions
//! after a peer was lost: nothing that an old agent remembers of it can get in the way.
#![forbid(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, bounded};
use thiserror::Error;

use super::clocks::Clocks;
use super::config::ReaderConfig;
use super::driver::{Event, LeaseJob};
use super::error::Advice;
use super::lease_care::LeaseCare;
use super::link::{Link, Width};
use super::threads::join_by;
use crate::clock::{Clock, MonoTime};
use crate::descriptor::LeaseRef;
use crate::ids::{AgentName, BlockId, EngineId, Incarnation, NameError, Rank, WordSlot};
use crate::layout::{
    KvLayout, LayoutDecodeError, LayoutMismatch, PairingError, RegionGeometry, pair_regions,
};
use crate::memory::{ControlWords, KvPool};
use crate::peer::{Card, CardError, ClockOffset, PeerAddr, PeerKey};
use crate::side_channel::SideChannelError;
use crate::telemetry::Storm;
use crate::transport::{Agent, AgentRole, Descriptor, Transport, TransportError};

/// How often, a millisecond apart, an agent is let make progress before it is destroyed, so that a
/// notice which was just given to it leaves.
const FLUSH_TRIES: u32 = 10;
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
            Self::Layout(_) | Self::OtherEngine { .. } | Self::Card(_) => Advice::FixConfiguration,
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
    pub clocks: Arc<Clocks>,
}

impl LocalSide {
    /// A name that no other agent has.
    fn agent_name(&self, what: &str) -> Result<AgentName, NameError> {
        AgentName::new(format!(
            "{}/{}/{}/{what}",
            self.engine, self.rank, self.incarnation
        ))
    }

    /// An agent that can read into the pool, from no one yet.
    fn open_agent<T: Transport>(
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

/// An agent to destroy, with what it still had in flight.
pub(crate) struct Teardown<A: Agent> {
    /// Under which number the driver waits for it.
    pub fence: u64,
    pub agent: A,
    pub requests: Vec<A::Request>,
    /// It may have a notice that has not left yet.
    pub flush: bool,
}

/// The threads that may block: those that meet peers, the one that cares for leases over the side channel,
/// and the one that destroys agents.
#[derive(Debug)]
pub(crate) struct Workers {
    threads: Vec<JoinHandle<()>>,
    stopping: Arc<AtomicBool>,
}

/// The ends of the channels that the threads serve.
pub(crate) struct WorkerEnds<A: Agent> {
    pub errands: Receiver<Errand>,
    /// To peers that could not be met last time. They have threads of their own: those that never
    /// answer would take up all threads and keep others from being met.
    pub retries: Receiver<Errand>,
    pub wishes: Receiver<LeaseJob>,
    pub teardowns: Receiver<Teardown<A>>,
    pub events: Sender<Event<A>>,
}

impl Workers {
    pub(crate) fn start<T: Transport>(
        transport: &Arc<T>,
        cards: &Arc<dyn CardSource>,
        local: &Arc<LocalSide>,
        clock: &Arc<dyn Clock>,
        config: &ReaderConfig,
        helpers: Vec<JoinHandle<()>>,
        ends: WorkerEnds<T::Agent>,
    ) -> std::io::Result<Self> {
        let WorkerEnds {
            errands,
            retries,
            wishes,
            teardowns,
            events,
        } = ends;
        let mut threads = helpers;
        let next_link = Arc::new(AtomicU64::new(1));
        let thread = |name: String| std::thread::Builder::new().name(name);
        let lanes = [("meet", errands), ("retry", retries)];
        // One more is held by the thread that opens them, until there is room for it.
        let (ahead, spares) = bounded(config.spare_agents.saturating_sub(1));
        if config.spare_agents > 0 {
            let (transport, local) = (Arc::clone(transport), Arc::clone(local));
            threads.push(thread("kvx-spare".into()).spawn(move || {
                open_ahead(transport.as_ref(), local.as_ref(), &ahead);
            })?);
        }
        // The words after those of reads.
        let mut probes = config.active..;
        let count = config.connect_threads;
        let each = (0..count.max(1)).flat_map(|n| lanes.iter().map(move |lane| (n, lane)));
        for (n, (lane, errands)) in each {
            let meeting = Meeting {
                transport: Arc::clone(transport),
                cards: Arc::clone(cards),
                local: Arc::clone(local),
                clock: Arc::clone(clock),
                next_link: Arc::clone(&next_link),
                probe: WordSlot(probes.next().unwrap_or(u32::MAX)),
                spares: spares.clone(),
            };
            let (errands, events) = (errands.clone(), events.clone());
            threads.push(
                thread(format!("kvx-{lane}-{n}")).spawn(move || meeting.run(&errands, &events))?,
            );
        }
        let stopping = Arc::new(AtomicBool::new(false));
        let care = LeaseCare::new(Arc::clone(cards), Arc::clone(clock), Arc::clone(&stopping));
        threads.push(thread("kvx-leases".into()).spawn(move || care.run(&wishes))?);
        threads.push(thread("kvx-fence".into()).spawn(move || {
            for Teardown {
                fence,
                mut agent,
                requests,
                flush,
            } in teardowns
            {
                if flush && requests.is_empty() {
                    let mut ignored = Vec::new();
                    for _ in 0..FLUSH_TRIES {
                        let _ = agent.notifications(&mut ignored);
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
                for request in requests {
                    agent.discard(request);
                }
                // The fence: after this, nothing is written on the agent's behalf.
                let fenced = agent.destroy();
                if events.send(Event::Fenced { fence, fenced }).is_err() {
                    break;
                }
            }
        })?);
        Ok(Self { threads, stopping })
    }

    /// Waits until `end` for the threads, which end once the channels that feed them are closed. One
    /// that is still waiting for a peer is left to end by its own deadline.
    pub(crate) fn join(self, end: Instant) {
        self.stopping.store(true, Ordering::Release);
        for thread in self.threads {
            join_by(thread, end);
        }
    }
}

/// Opens agents before they are needed, until nobody can need one any more.
fn open_ahead<T: Transport>(transport: &T, local: &LocalSide, ahead: &Sender<T::Agent>) {
    for n in 1_u64.. {
        let agent = local
            .agent_name(&format!("read-ahead-{n}"))
            .ok()
            .and_then(|name| local.open_agent(transport, &name).ok());
        // Whoever needs one opens it then, and hears why it fails.
        let Some(agent) = agent else { return };
        if ahead.send(agent).is_err() {
            return;
        }
    }
}

struct Meeting<T: Transport> {
    transport: Arc<T>,
    cards: Arc<dyn CardSource>,
    local: Arc<LocalSide>,
    clock: Arc<dyn Clock>,
    /// Numbers links and helper lanes' agents.
    next_link: Arc<AtomicU64>,
    /// The word into which it reads to reach a peer.
    probe: WordSlot,
    /// Agents that have been opened ahead.
    spares: Receiver<T::Agent>,
}

impl<T: Transport> Meeting<T> {
    fn run(&self, errands: &Receiver<Errand>, events: &Sender<Event<T::Agent>>) {
        for errand in errands {
            let event = match errand {
                Errand::Meet {
                    peer,
                    attempt,
                    known,
                    until,
                } => {
                    if until <= self.clock.now() {
                        // The driver has given it up.
                        continue;
                    }
                    let result = self.meet(&peer, known, until);
                    Event::Met {
                        peer,
                        attempt,
                        result,
                    }
                }
                Errand::Widen(widening) => Event::Widened {
                    link: widening.link,
                    agents: self.widen(&widening),
                },
            };
            if events.send(event).is_err() {
                break;
            }
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
        let agent = self
            .open(
                &name,
                &card.nixl_metadata,
                &card.agent,
                &card.lease_words,
                until,
            )
            .map_err(ConnectError::Transport)?;
        if let Some(meetings) = MET.line() {
            tracing::info!(
                engine = %card.engine_id, incarnation = %card.incarnation, %peer, meetings, "met a peer"
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
            tended: MonoTime::ZERO,
            metadata: card.nixl_metadata.into(),
            width: Width::Narrow,
            copies: false,
        })))
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

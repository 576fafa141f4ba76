//! The driver: one thread that owns the agents and moves every read along.
//!
//! Commands come from callers, events from the threads that may block; the driver itself never
//! waits on anything but its own channels. [`Driver::step`] does one round; the thread around it
//! spins while an end is near, backs off after that, and parks when nothing is in flight.
#![forbid(unsafe_code)]

mod ending;
mod gates;
mod meeting;
mod turns;
mod width;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam::channel::{Receiver, Sender, TryRecvError};
use parking_lot::Mutex;

use self::turns::{PeerTurns, Turn};
use super::config::ReaderConfig;
use super::connect::{ConnectError, Errand, Met};
use super::error::ReadError;
use super::handle::ReadId;
use super::job::{ReadJob, Submitted};
use super::lane::{Lane, LaneReport};
use super::link::Link;
use super::read::ActiveRead;
use super::workers::Teardown;
use crate::clock::{Clock, MonoTime};
use crate::descriptor::{ClusterKey, LeaseRef};
use crate::ids::{Incarnation, WordSlot};
use crate::memory::{ControlWords, KvPool, OwnedBlocks};
use crate::peer::{PeerConfig, PeerKey, PeerTable, Want};
use crate::telemetry::EngineStats;
use crate::transport::{Agent, Descriptor, Transport, TransportError};

/// Longest pause before a peer that could not be met is dialled again, so that a restarted peer is
/// met again within it.
const MAX_PAUSE: Duration = Duration::from_secs(2);
/// Most remembered reasons of peers that are left alone.
const MAX_TROUBLES: usize = 4096;
/// Longest sleep between polls while something is in flight.
const MAX_NAP: Duration = Duration::from_micros(500);
/// How often deadlines are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// How long a peer that seems silent is given, for this process may have been the one that did not run.
const BENEFIT: Duration = Duration::from_millis(20);
/// Commands that are taken at once: callers may send them as fast as they are carried out.
const COMMANDS_AT_ONCE: usize = 64;
/// Longest park while nothing is in flight.
const MAX_PARK: Duration = Duration::from_secs(1);

/// What a holder is asked about a lease.
#[derive(Debug)]
pub(crate) enum LeaseWish {
    /// It is needed no longer.
    Release,
    /// It is needed for this much longer, from now; the end by the holder's answer goes to `told_end`.
    Renew {
        extension: Duration,
        told_end: Arc<Mutex<Option<MonoTime>>>,
    },
}

/// A wish about a lease of another engine.
#[derive(Debug)]
pub(crate) struct LeaseJob {
    pub peer: PeerKey,
    pub incarnation: Incarnation,
    pub lease: LeaseRef,
    pub wish: LeaseWish,
}

impl LeaseJob {
    pub(super) fn release(job: &ReadJob) -> Self {
        Self {
            peer: job.peer.clone(),
            incarnation: job.incarnation,
            lease: job.lease,
            wish: LeaseWish::Release,
        }
    }
}

/// What callers ask for.
#[derive(Debug)]
pub(crate) enum Command {
    Lease(LeaseJob),
    Connect { peer: PeerKey },
    Shutdown { deadline: MonoTime },
}

/// What the threads that may block report.
#[derive(Debug)]
pub(crate) enum Event<A: Agent> {
    Met {
        peer: PeerKey,
        attempt: u64,
        result: Result<Met<A>, ConnectError>,
    },
    /// Further agents for a link's helper lanes, as many as could be had.
    Widened { link: u64, agents: Vec<A> },
    Fenced {
        fence: u64,
        /// Whether the agent is gone. If not, its reads may be written for ever.
        fenced: Result<(), TransportError>,
    },
}

/// Blocks whose read failed or was dropped, now that nothing can write into them.
#[derive(Debug)]
pub struct ReturnedBlocks {
    /// The read they were in.
    pub read: ReadId,
    /// The blocks; their content is not to be used.
    pub blocks: OwnedBlocks,
}

/// Agents that are being destroyed together, and what waits for it.
#[derive(Default)]
struct Fencing {
    /// How many of them are left.
    agents: usize,
    /// One of them could not be destroyed.
    failed: bool,
    /// Place, read and blocks of each read that is in doubt until the agent is gone.
    reads: Vec<(usize, ReadId, OwnedBlocks)>,
}

type Request<T> = <<T as Transport>::Agent as Agent>::Request;

pub(crate) struct Channels<A: Agent> {
    pub reads: Receiver<Submitted>,
    pub commands: Receiver<Command>,
    pub wake: Receiver<()>,
    pub events: Receiver<Event<A>>,
    pub errands: Sender<Errand>,
    /// Errands to peers that could not be met last time.
    pub retries: Sender<Errand>,
    /// Bounded: a release that finds it full is left to the lease's own end, a renewal to the next one.
    pub wishes: Sender<LeaseJob>,
    pub teardowns: Sender<Teardown<A>>,
    pub returned: Sender<ReturnedBlocks>,
    pub lanes: Vec<Lane<A>>,
    pub reports: Receiver<LaneReport>,
}

pub(crate) struct Driver<T: Transport> {
    // Dropped before the reads: destroying the agents is what makes giving up their blocks safe.
    // Sorted, so that the same events lead to the same steps in every run.
    links: BTreeMap<PeerKey, Link<T::Agent>>,
    peers: PeerTable,
    channels: Channels<T::Agent>,
    reads: Vec<Option<ActiveRead<Request<T>>>>,
    /// Places in use, in the order in which they are served.
    order: Vec<usize>,
    free: Vec<usize>,
    backlog: VecDeque<Box<ReadJob>>,
    /// The reads that wait for a peer to be met, with their places.
    waiting: HashMap<PeerKey, Vec<(usize, ReadId)>>,
    /// What went wrong with peers that could not be met last time.
    troubles: HashMap<PeerKey, String>,
    fencing: HashMap<u64, Fencing>,
    next_fence: u64,
    /// Reads that wait for something to happen before they begin.
    gated: Vec<Turn>,
    /// When that was last looked at.
    gates_looked: MonoTime,
    /// Reads with windows to be cut, peer by peer.
    turns: Vec<PeerTurns>,
    /// Reads that are so small that they need not wait for a turn.
    tiny: VecDeque<Turn>,
    /// The last window was of one of them.
    was_tiny: bool,
    /// The most that a peer had had when it was served.
    had: u64,
    /// What the window that was cut last costs, in bytes.
    cost: u64,
    /// Reads with windows of the driver's own to be polled.
    polled: Vec<usize>,
    /// When deadlines and cancellations were last looked at.
    looked: MonoTime,
    /// A handle was cancelled or dropped.
    woken: bool,
    /// When links are looked at next.
    tend_next: MonoTime,
    batch: Vec<Descriptor>,
    /// Emptied lists of lanes' windows.
    spare: Vec<Vec<Descriptor>>,
    config: ReaderConfig,
    /// Signs releases.
    key: Option<ClusterKey>,
    clock: Arc<dyn Clock>,
    pool: Arc<KvPool>,
    landing: Arc<dyn ControlWords>,
    stats: Arc<EngineStats>,
    stopping: Option<MonoTime>,
}

impl<T: Transport> Driver<T> {
    pub(crate) fn new(
        config: ReaderConfig,
        key: Option<ClusterKey>,
        clock: Arc<dyn Clock>,
        pool: Arc<KvPool>,
        landing: Arc<dyn ControlWords>,
        stats: Arc<EngineStats>,
        channels: Channels<T::Agent>,
    ) -> Self {
        let places = config.active.min(landing.region().block_count) as usize;
        Self {
            links: BTreeMap::new(),
            peers: PeerTable::new(PeerConfig {
                connect_timeout: config.connect_timeout,
                backoff_max: MAX_PAUSE,
                ..PeerConfig::default()
            }),
            channels,
            reads: (0..places).map(|_| None).collect(),
            order: Vec::new(),
            free: (0..places).rev().collect(),
            backlog: VecDeque::new(),
            waiting: HashMap::new(),
            troubles: HashMap::new(),
            fencing: HashMap::new(),
            next_fence: 1,
            gated: Vec::new(),
            gates_looked: MonoTime::ZERO,
            turns: Vec::new(),
            tiny: VecDeque::new(),
            was_tiny: false,
            had: 0,
            cost: 0,
            polled: Vec::new(),
            looked: MonoTime::ZERO,
            woken: false,
            tend_next: MonoTime::ZERO,
            spare: Vec::new(),
            batch: Vec::with_capacity(config.window_descriptors),
            config,
            key,
            clock,
            pool,
            landing,
            stats,
            stopping: None,
        }
    }

    /// Runs until shut down.
    pub(crate) fn run(mut self) {
        let mut moved = self.clock.now();
        loop {
            let now = self.clock.now();
            let worked = self.step(now);
            if worked {
                moved = now;
            }
            if self.is_over(now) {
                break;
            }
            // What was done may have made room for more: places freed, windows ended.
            if !worked {
                self.rest(now, now.saturating_since(moved));
            }
        }
    }

    /// It has been told to stop, and has nothing left to do or no time left to do it.
    pub(crate) fn is_over(&self, now: MonoTime) -> bool {
        self.stopping
            .is_some_and(|deadline| self.is_empty() || now >= deadline)
    }

    /// Nothing is active, queued or in doubt.
    fn is_empty(&self) -> bool {
        self.order.is_empty()
            && self.backlog.is_empty()
            && self.fencing.is_empty()
            && self.links.is_empty()
    }

    /// One round: take what has come in, ask about what is in flight, and post at most one window
    /// here, so that what comes in next need not wait for more.
    pub(crate) fn step(&mut self, now: MonoTime) -> bool {
        let mut worked = false;
        while let Ok(event) = self.channels.events.try_recv() {
            self.on_event(event, now);
            worked = true;
        }
        // Before anything can want a peer: an attempt that is over must end what waits for it.
        worked |= self.give_up_meetings(now);
        for _ in 0..COMMANDS_AT_ONCE {
            let command = match self.channels.commands.try_recv() {
                Ok(command) => command,
                // The engine is gone and could not say so.
                Err(TryRecvError::Disconnected) if self.stopping.is_none() => {
                    Command::Shutdown { deadline: now }
                }
                Err(_) => break,
            };
            self.on_command(command, now);
            worked = true;
        }
        // Before the reads: whoever cancels has submitted before, so the read is seen along with it.
        while self.channels.wake.try_recv().is_ok() {
            self.woken = true;
        }
        while let Ok(submitted) = self.channels.reads.try_recv() {
            worked = true;
            let Some(job) = submitted.into_job() else {
                continue;
            };
            if self.stopping.is_some() {
                // Submitted before the shutdown, seen after it.
                self.end_unstarted(*job, ReadError::ShuttingDown, now);
            } else if let Some(lost) = job.known_lost() {
                self.end_unstarted(*job, lost, now);
            } else {
                self.backlog.push_back(job);
            }
        }
        if self.woken || now.saturating_since(self.looked) >= LOOK_EVERY {
            self.woken = false;
            self.looked = now;
            worked |= self.look_at_limits(now);
        }
        worked |= self.admit(now);
        worked |= self.look_at_gates(now);
        worked |= self.take_reports(now);
        worked |= self.poll_posted(now);
        worked |= self.serve_turn(now);
        self.tend_links(now);
        worked
    }

    /// Sleeps as long as nothing can happen, at most until the next timer.
    fn rest(&mut self, now: MonoTime, quiet: Duration) {
        let in_flight = self.order.iter().any(|place| self.in_flight(*place));
        let spin = if in_flight {
            self.config.spin
        } else {
            self.config.linger
        };
        if quiet < spin {
            std::hint::spin_loop();
            return;
        }
        if in_flight && quiet < spin.saturating_mul(4) {
            std::thread::yield_now();
            return;
        }
        let limit = if in_flight {
            (quiet / 8).min(MAX_NAP)
        } else {
            self.next_timer().saturating_since(now).min(MAX_PARK)
        };
        let mut select = crossbeam::channel::Select::new();
        select.recv(&self.channels.reads);
        select.recv(&self.channels.commands);
        select.recv(&self.channels.events);
        select.recv(&self.channels.wake);
        if !self.channels.lanes.is_empty() {
            select.recv(&self.channels.reports);
        }
        // What is ready stays in its channel; the next step takes it.
        if select
            .ready_timeout(limit.max(Duration::from_micros(20)))
            .is_ok()
        {
            // Whoever woke this thread may have lost its processor to it: it goes first.
            std::thread::yield_now();
        }
    }

    fn in_flight(&self, place: usize) -> bool {
        self.read(place)
            .is_some_and(|read| read.in_flight() || read.link.is_some())
    }

    pub(super) fn read(&self, place: usize) -> Option<&ActiveRead<Request<T>>> {
        self.reads.get(place).and_then(Option::as_ref)
    }

    fn next_timer(&self) -> MonoTime {
        let tending = self.links.values().map(Link::tend_at).min();
        self.next_deadline()
            .min(tending.unwrap_or(MonoTime::FAR_FUTURE))
    }

    /// When something ends although nothing comes in.
    pub(crate) fn next_deadline(&self) -> MonoTime {
        let deadlines = self
            .order
            .iter()
            .filter_map(|place| self.read(*place))
            .map(|read| match read.told {
                Some(told) => told + self.config.abandon_after,
                None => read.job.deadline,
            })
            .chain(self.backlog.iter().map(|job| job.deadline))
            .chain(
                self.links
                    .values()
                    .map(|link| link.used + self.config.idle_peer),
            )
            .chain(self.silences())
            .chain(self.peers.next_timeout())
            .chain(self.stopping);
        deadlines.min().unwrap_or(MonoTime::FAR_FUTURE)
    }

    fn on_command(&mut self, command: Command, now: MonoTime) {
        match command {
            Command::Lease(job) => match job.wish {
                LeaseWish::Release => self.release(job, now),
                // By the side channel, which answers whether the lease still holds.
                LeaseWish::Renew { .. } => {
                    self.stats.renewals.fetch_add(1, Ordering::Relaxed);
                    let _ = self.channels.wishes.try_send(job);
                }
            },
            Command::Connect { peer } => {
                if !self.links.contains_key(&peer)
                    && let Ok(Want::Connect { attempt, deadline }) = self.peers.want(&peer, now)
                {
                    self.meet(&peer, attempt, deadline);
                }
            }
            Command::Shutdown { deadline } => {
                self.stopping = Some(deadline);
                for job in std::mem::take(&mut self.backlog) {
                    self.end_unstarted(*job, ReadError::ShuttingDown, now);
                }
                self.waiting.clear();
                for place in self.order.clone() {
                    if self.read(place).is_some_and(|read| read.link.is_none()) {
                        self.end(place, Err(ReadError::ShuttingDown), now);
                    }
                }
                let peers: Vec<PeerKey> = self.links.keys().cloned().collect();
                for peer in peers {
                    self.part(&peer, None, &ReadError::ShuttingDown, now);
                }
            }
        }
    }

    fn on_event(&mut self, event: Event<T::Agent>, now: MonoTime) {
        match event {
            Event::Fenced { fence, fenced } => self.on_fenced(fence, fenced),
            Event::Widened { link, agents } => self.on_widened(link, agents),
            Event::Met {
                peer,
                attempt,
                result,
            } => self.on_met(&peer, attempt, result, now),
        }
    }

    /// Gives queued reads their places.
    fn admit(&mut self, now: MonoTime) -> bool {
        let mut worked = false;
        while !self.backlog.is_empty() {
            let Some(place) = self.free.pop() else { break };
            let Some(job) = self.backlog.pop_front() else {
                break;
            };
            self.stats.queued.fetch_sub(1, Ordering::Relaxed);
            self.stats.active.fetch_add(1, Ordering::Relaxed);
            let slot = WordSlot(u32::try_from(place).unwrap_or(u32::MAX));
            if let Some(empty) = self.reads.get_mut(place) {
                *empty = Some(ActiveRead::new(*job, slot));
            }
            self.order.push(place);
            self.start(place, now);
            worked = true;
        }
        worked
    }
}

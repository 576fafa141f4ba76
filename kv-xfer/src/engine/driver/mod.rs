//! The driver: one thread that owns the agents and moves every read along.
//!
//! Commands come from callers, events from the threads that may block; the driver itself never
//! waits on anything but its own channels. [`Driver::step`] does one round; the thread around it
//! spins while an end is near, backs off after that, and parks when nothing is in flight.
#![forbid(unsafe_code)]

mod ending;
mod meeting;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam::channel::{Receiver, Sender, TryRecvError};

use super::config::ReaderConfig;
use super::connect::{ConnectError, Errand, Met, Teardown};
use super::error::ReadError;
use super::handle::ReadId;
use super::link::Link;
use super::read::{ActiveRead, Advance, Env, ReadJob, Submitted};
use crate::clock::{Clock, MonoTime};
use crate::descriptor::LeaseRef;
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
/// Longest park while nothing is in flight.
const MAX_PARK: Duration = Duration::from_secs(1);

/// A release that is not tied to a read.
#[derive(Debug)]
pub(crate) struct ReleaseJob {
    pub peer: PeerKey,
    pub incarnation: Incarnation,
    pub lease: LeaseRef,
}

impl ReleaseJob {
    pub(super) fn of(job: &ReadJob) -> Self {
        Self {
            peer: job.peer.clone(),
            incarnation: job.incarnation,
            lease: job.lease,
        }
    }
}

/// What callers ask for.
#[derive(Debug)]
pub(crate) enum Command {
    Release(ReleaseJob),
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
    Fenced {
        link: u64,
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

#[derive(Default)]
struct Fencing {
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
    /// Bounded: a release that finds it full is left to the lease's own end.
    pub releases: Sender<ReleaseJob>,
    pub teardowns: Sender<Teardown<A>>,
    pub returned: Sender<ReturnedBlocks>,
}

pub(crate) struct Driver<T: Transport> {
    // Dropped before the reads: destroying the agents is what makes giving up their blocks safe.
    links: HashMap<PeerKey, Link<T::Agent>>,
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
    batch: Vec<Descriptor>,
    config: ReaderConfig,
    clock: Arc<dyn Clock>,
    pool: Arc<KvPool>,
    landing: Arc<dyn ControlWords>,
    stats: Arc<EngineStats>,
    stopping: Option<MonoTime>,
}

impl<T: Transport> Driver<T> {
    pub(crate) fn new(
        config: ReaderConfig,
        clock: Arc<dyn Clock>,
        pool: Arc<KvPool>,
        landing: Arc<dyn ControlWords>,
        stats: Arc<EngineStats>,
        channels: Channels<T::Agent>,
    ) -> Self {
        let places = config.active.min(landing.region().block_count) as usize;
        Self {
            links: HashMap::new(),
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
            batch: Vec::with_capacity(config.window_descriptors),
            config,
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
            if let Some(deadline) = self.stopping
                && (self.is_empty() || now >= deadline)
            {
                break;
            }
            // What was done may have made room for more: places freed, windows ended.
            if !worked {
                self.rest(now, now.saturating_since(moved));
            }
        }
    }

    /// Nothing is active, queued or in doubt.
    fn is_empty(&self) -> bool {
        self.order.is_empty()
            && self.backlog.is_empty()
            && self.fencing.is_empty()
            && self.links.is_empty()
    }

    /// One round: take what has come in, then move every read along by at most one window.
    pub(crate) fn step(&mut self, now: MonoTime) -> bool {
        let mut worked = false;
        while let Ok(event) = self.channels.events.try_recv() {
            self.on_event(event, now);
            worked = true;
        }
        // Before anything can want a peer: an attempt that is over must end what waits for it.
        worked |= self.give_up_meetings(now);
        loop {
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
        while let Ok(submitted) = self.channels.reads.try_recv() {
            worked = true;
            let Some(job) = submitted.into_job() else {
                continue;
            };
            if self.stopping.is_some() {
                // Submitted before the shutdown, seen after it.
                self.end_unstarted(*job, ReadError::ShuttingDown, now);
            } else {
                self.backlog.push_back(job);
            }
        }
        while self.channels.wake.try_recv().is_ok() {}
        worked |= self.admit(now);
        let mut next = 0;
        while let Some(place) = self.order.get(next).copied() {
            worked |= self.advance(place, now);
            // A read that has ended has left the order; its successor now stands in its place.
            if self.order.get(next) == Some(&place) {
                next = next.saturating_add(1);
            }
        }
        self.tend_links(now);
        worked
    }

    /// Sleeps as long as nothing can happen, at most until the next timer.
    fn rest(&mut self, now: MonoTime, quiet: Duration) {
        let in_flight = self.order.iter().any(|place| self.in_flight(*place));
        if in_flight && quiet < self.config.spin {
            std::hint::spin_loop();
            return;
        }
        if in_flight && quiet < self.config.spin.saturating_mul(4) {
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
                    .map(|link| link.tend_at().min(link.used + self.config.idle_peer)),
            )
            .chain(self.peers.next_timeout())
            .chain(self.stopping);
        deadlines.min().unwrap_or(MonoTime::FAR_FUTURE)
    }

    fn on_command(&mut self, command: Command, now: MonoTime) {
        match command {
            Command::Release(job) => {
                self.release(job, now);
            }
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
            Event::Fenced { link, fenced } => self.on_fenced(link, fenced),
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
        // Those that ended while queued leave without a place.
        if self
            .backlog
            .iter()
            .any(|job| job.deadline <= now || job.shared.is_cancelled())
        {
            for job in std::mem::take(&mut self.backlog) {
                if job.shared.is_cancelled() {
                    self.end_unstarted(*job, ReadError::Cancelled, now);
                } else if job.deadline <= now {
                    let error = ReadError::Deadline {
                        engine: job.engine.clone(),
                        limit: job.limit(),
                        phase: "queued",
                    };
                    self.end_unstarted(*job, error, now);
                } else {
                    self.backlog.push_back(job);
                }
            }
        }
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

    fn advance(&mut self, place: usize, now: MonoTime) -> bool {
        let Some(read) = self.reads.get_mut(place).and_then(Option::as_mut) else {
            return false;
        };
        let mut worked = false;
        if read.told.is_none() {
            let verdict = if read.job.shared.is_cancelled() {
                Some(ReadError::Cancelled)
            } else if read.job.deadline <= now {
                Some(ReadError::Deadline {
                    engine: read.job.engine.clone(),
                    limit: read.job.limit(),
                    phase: read.phase_name(),
                })
            } else {
                None
            };
            if let Some(error) = verdict {
                worked = true;
                if !read.in_flight() {
                    self.end(place, Err(error), now);
                    return true;
                }
                self.tell(place, error, now);
            }
        }
        let Some(read) = self.reads.get_mut(place).and_then(Option::as_mut) else {
            return worked;
        };
        if read.link.is_none() {
            return worked;
        }
        let Some(link) = self.links.get_mut(&read.job.peer) else {
            return worked;
        };
        let mut env = Env {
            config: &self.config,
            clock: self.clock.as_ref(),
            landing: self.landing.as_ref(),
            local_blocks: self.pool.block_count(),
            batch: &mut self.batch,
        };
        match read.advance(link, &mut env) {
            Advance::Idle => {}
            Advance::Worked => {
                link.used = now;
                worked = true;
            }
            Advance::Ended(verdict) => {
                let peer = read.job.peer.clone();
                // What broke may not heal by itself: the peer is met afresh, by another agent.
                let broken = verdict.as_ref().err().filter(|error| error.breaks_link());
                let broken = broken.cloned();
                self.end(place, verdict, now);
                if let Some(error) = broken {
                    self.part(&peer, None, &error, now);
                }
                return true;
            }
            Advance::InDoubt(error) => {
                let peer = read.job.peer.clone();
                self.part(&peer, Some(place), &error, now);
                return true;
            }
        }
        let overdue = self
            .read(place)
            .filter(|read| {
                read.told
                    .is_some_and(|told| told + self.config.abandon_after <= now)
            })
            .map(|read| (read.job.peer.clone(), read.job.engine.clone()));
        if let Some((peer, engine)) = overdue {
            tracing::warn!(%engine, "a failed read's bytes are still in flight: destroying its agent");
            self.part(&peer, Some(place), &ReadError::Fenced { engine }, now);
            return true;
        }
        worked
    }
}

//! The driver: one thread that owns the agents and moves every read along.
//!
//! Commands come from callers, events from the threads that may block; the driver itself never
//! waits on anything but its own channels. [`Driver::step`] does one round; the thread around it
//! spins while an end is near, backs off after that, and parks when nothing is in flight.
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam::channel::{Receiver, Sender};

use super::config::ReaderConfig;
use super::connect::{ConnectError, Errand, Met, Teardown};
use super::error::ReadError;
use super::handle::{FailedBlocks, Landed, ReadFailure, ReadId, ReadOutcome, ReadShared};
use super::link::Link;
use super::notice::Notice;
use super::read::{ActiveRead, Advance, Env, ReadJob, ReleasePolicy};
use crate::clock::{Clock, MonoTime};
use crate::descriptor::LeaseRef;
use crate::ids::{Incarnation, WordSlot};
use crate::memory::{ControlWords, KvPool, OwnedBlocks};
use crate::peer::{
    CardOutcome, Expired, MeetNext, PeerConfig, PeerError, PeerKey, PeerTable, Want,
};
use crate::telemetry::EngineStats;
use crate::transport::{Agent, Descriptor, Transport};

/// How long an agent is polled without a pause after a notice was given to it, so that the notice
/// leaves at once.
const FLUSH: Duration = Duration::from_millis(20);
/// How long it is polled every [`TEND`] after that: over shared memory, reads can end before the
/// connection that notices take is up, and nothing tells when a notice has left.
const LINGER: Duration = Duration::from_secs(2);
/// How often an agent is polled in its [`LINGER`]. Later, it is polled whenever the driver wakes up.
const TEND: Duration = Duration::from_millis(10);
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
    fn of(job: &ReadJob) -> Self {
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
    pub reads: Receiver<Box<ReadJob>>,
    pub commands: Receiver<Command>,
    pub wake: Receiver<()>,
    pub events: Receiver<Event<A>>,
    pub errands: Sender<Errand>,
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
    /// What went wrong last with peers that are left alone for a while.
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
            if self.step(now) {
                moved = now;
            }
            if let Some(deadline) = self.stopping
                && (self.is_empty() || now >= deadline)
            {
                break;
            }
            self.rest(now, now.saturating_since(moved));
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
        while let Ok(command) = self.channels.commands.try_recv() {
            self.on_command(command, now);
            worked = true;
        }
        while let Ok(job) = self.channels.reads.try_recv() {
            worked = true;
            if self.stopping.is_some() {
                // Submitted before the shutdown, seen after it.
                self.end_unstarted(*job, ReadError::ShuttingDown, now);
            } else {
                self.backlog.push_back(job);
            }
        }
        while self.channels.wake.try_recv().is_ok() {}
        worked |= self.give_up_meetings(now);
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

    /// Ends the reads that wait for a meeting which took too long.
    fn give_up_meetings(&mut self, now: MonoTime) -> bool {
        if self.peers.next_timeout().is_none_or(|at| at > now) {
            return false;
        }
        for expired in self.peers.expire(now) {
            let Expired::Attempt { peer, .. } = expired else {
                continue;
            };
            for place in self.take_waiting(&peer) {
                let Some(engine) = self.read(place).map(|r| r.job.engine.clone()) else {
                    continue;
                };
                let cause = ConnectError::TookTooLong {
                    limit: self.config.connect_timeout,
                };
                self.end(place, Err(ReadError::Connect { engine, cause }), now);
            }
        }
        true
    }

    /// Sleeps as long as nothing can happen, at most until the next timer.
    fn rest(&mut self, now: MonoTime, quiet: Duration) {
        if !self.backlog.is_empty() && !self.free.is_empty() {
            // Places have become free in this step: the next one fills them.
            return;
        }
        let in_flight = self.order.iter().any(|place| self.in_flight(*place));
        if in_flight && quiet < self.config.spin {
            std::hint::spin_loop();
            return;
        }
        if in_flight && quiet < self.config.spin.saturating_mul(4) {
            std::thread::yield_now();
            return;
        }
        let flushing = self.links.values().any(|link| link.flush_until > now);
        let limit = if in_flight {
            (quiet / 8).min(MAX_NAP)
        } else if flushing {
            MAX_NAP
        } else {
            let lingers = |link: &Link<T::Agent>| link.flush_until + LINGER > now;
            let longest = if self.links.values().any(lingers) {
                TEND
            } else {
                MAX_PARK
            };
            self.next_timer().saturating_since(now).min(longest)
        };
        let mut select = crossbeam::channel::Select::new();
        select.recv(&self.channels.reads);
        select.recv(&self.channels.commands);
        select.recv(&self.channels.events);
        select.recv(&self.channels.wake);
        // What is ready stays in its channel; the next step takes it.
        let _ = select.ready_timeout(limit.max(Duration::from_micros(20)));
    }

    fn in_flight(&self, place: usize) -> bool {
        self.read(place)
            .is_some_and(|read| read.in_flight() || read.link.is_some())
    }

    fn read(&self, place: usize) -> Option<&ActiveRead<Request<T>>> {
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
                    .map(|link| link.used + self.config.idle_peer),
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
                    && let Ok(Want::Connect { attempt, .. }) = self.peers.want(&peer, now)
                {
                    self.meet(&peer, attempt);
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
            Event::Fenced { link } => {
                for (place, read, blocks) in self
                    .fencing
                    .remove(&link)
                    .map(|fencing| fencing.reads)
                    .unwrap_or_default()
                {
                    self.stats
                        .quarantined
                        .fetch_sub(blocks.len() as u64, Ordering::Relaxed);
                    let _ = self.channels.returned.send(ReturnedBlocks { read, blocks });
                    self.free.push(place);
                }
            }
            Event::Met {
                peer,
                attempt,
                result,
            } => self.on_met(&peer, attempt, result, now),
        }
    }

    fn on_met(
        &mut self,
        peer: &PeerKey,
        attempt: u64,
        result: Result<Met<T::Agent>, ConnectError>,
        now: MonoTime,
    ) {
        match result {
            Ok(Met::Link(link)) => {
                let life = Some(link.incarnation);
                let outcome = self.peers.on_card(peer, attempt, &link.engine, life, now);
                if self.stopping.is_some() || outcome == CardOutcome::Stale {
                    let (link, agent) = (link.id, link.agent);
                    let _ = self.channels.teardowns.send(Teardown {
                        link,
                        agent,
                        requests: Vec::new(),
                    });
                    self.fencing.entry(link).or_default();
                    return;
                }
                self.troubles.remove(peer);
                if let Some(old) = self.links.get(peer) {
                    let error = ReadError::PeerRestarted {
                        engine: old.engine.clone(),
                        expected: old.incarnation,
                        found: link.incarnation,
                    };
                    self.part(peer, None, &error, now);
                }
                self.make_room(now);
                self.stats.meetings.fetch_add(1, Ordering::Relaxed);
                self.links.insert(peer.clone(), *link);
            }
            Ok(Met::Unchanged {
                engine,
                incarnation,
            }) => {
                self.peers
                    .on_card(peer, attempt, &engine, Some(incarnation), now);
            }
            Err(cause) => {
                self.stats.meetings_failed.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(%peer, error = %cause, "a peer could not be met");
                self.peers.on_failure(peer, attempt, now);
                if self.troubles.len() > MAX_TROUBLES {
                    self.troubles.clear();
                }
                self.troubles.insert(peer.clone(), cause.to_string());
                for place in self.take_waiting(peer) {
                    let Some(engine) = self.read(place).map(|r| r.job.engine.clone()) else {
                        continue;
                    };
                    let cause = cause.clone();
                    self.end(place, Err(ReadError::Connect { engine, cause }), now);
                }
                return;
            }
        }
        for place in self.take_waiting(peer) {
            self.start(place, now);
        }
    }

    /// The places of the reads that still wait for a peer.
    fn take_waiting(&mut self, peer: &PeerKey) -> Vec<usize> {
        let mut waiting = self.waiting.remove(peer).unwrap_or_default();
        // A read that ended meanwhile has left its place to another.
        waiting.retain(|(place, id)| self.read(*place).is_some_and(|read| read.job.id == *id));
        waiting.into_iter().map(|(place, _)| place).collect()
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

    /// Starts a read over the peer's link, or has the peer met first.
    fn start(&mut self, place: usize, now: MonoTime) {
        let Some(read) = self.reads.get_mut(place).and_then(Option::as_mut) else {
            return;
        };
        let job = &read.job;
        let (peer, engine, id) = (job.peer.clone(), job.engine.clone(), job.id);
        if let Some(link) = self.links.get_mut(&peer) {
            let life = self
                .peers
                .check_incarnation(&peer, job.incarnation, job.submitted, now);
            match life {
                Ok(()) => {
                    link.used = now;
                    let env = Env {
                        config: &self.config,
                        clock: self.clock.as_ref(),
                        landing: self.landing.as_ref(),
                        local_blocks: self.pool.block_count(),
                        batch: &mut self.batch,
                    };
                    if let Err(error) = read.start(link, &env) {
                        self.end(place, Err(error), now);
                    }
                    return;
                }
                Err(PeerError::PeerRestarted {
                    next: MeetNext::Recompute,
                    ..
                }) => {
                    let error = if link.engine == engine {
                        let (expected, found) = (job.incarnation, link.incarnation);
                        ReadError::PeerRestarted {
                            engine,
                            expected,
                            found,
                        }
                    } else {
                        let found = link.engine.clone();
                        let cause = ConnectError::OtherEngine { found };
                        ReadError::Connect { engine, cause }
                    };
                    self.end(place, Err(error), now);
                    return;
                }
                // The card may be the old one: the peer is asked again, below.
                Err(_) => {}
            }
        }
        let cause = match self.peers.want(&peer, now) {
            Ok(Want::Connect { attempt, .. }) => {
                self.waiting
                    .entry(peer.clone())
                    .or_default()
                    .push((place, id));
                self.meet(&peer, attempt);
                return;
            }
            Ok(Want::Connecting { .. }) => {
                self.waiting.entry(peer).or_default().push((place, id));
                return;
            }
            Ok(Want::BackedOff { until }) => ConnectError::BackingOff {
                wait: until.saturating_since(now),
                last: self.troubles.get(&peer).cloned().unwrap_or_default(),
            },
            Ok(Want::Use { .. }) => {
                // The table has the card but the link is gone: it is met afresh.
                self.peers.forget(&peer);
                if let Ok(Want::Connect { attempt, .. }) = self.peers.want(&peer, now) {
                    self.waiting
                        .entry(peer.clone())
                        .or_default()
                        .push((place, id));
                    self.meet(&peer, attempt);
                    return;
                }
                ConnectError::Refused("the peer table is inconsistent".into())
            }
            Err(error) => ConnectError::Refused(error.to_string()),
        };
        self.end(place, Err(ReadError::Connect { engine, cause }), now);
    }

    /// Sends for a peer's card.
    fn meet(&mut self, peer: &PeerKey, attempt: u64) {
        let _ = self.channels.errands.send(Errand {
            peer: peer.clone(),
            attempt,
            known: self.links.get(peer).map(|link| link.incarnation),
            limit: self.config.connect_timeout,
        });
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
                self.end(place, verdict, now);
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

    /// Tells a read's handle of a failure while bytes may still land. The blocks stay.
    fn tell(&mut self, place: usize, error: ReadError, now: MonoTime) {
        let Some(read) = self.reads.get_mut(place).and_then(Option::as_mut) else {
            return;
        };
        if read.told.is_some() {
            return;
        }
        read.told = Some(now);
        let blocks = read.job.blocks.len();
        self.stats.count_failure(&error);
        self.stats
            .quarantined
            .fetch_add(blocks as u64, Ordering::Relaxed);
        tracing::debug!(read = read.job.id.0, %error, blocks, "read failed, blocks quarantined");
        let outcome = Err(ReadFailure {
            error,
            blocks: FailedBlocks::Quarantined { blocks },
        });
        let _ = read.job.shared.finish(outcome);
        if read.job.release == ReleasePolicy::Always {
            let release = ReleaseJob::of(&read.job);
            self.release(release, now);
        }
    }

    /// Ends a read of which nothing is in flight, and frees its place.
    fn end(&mut self, place: usize, verdict: Result<(), ReadError>, now: MonoTime) {
        let Some(read) = self.reads.get_mut(place).and_then(Option::take) else {
            return;
        };
        self.order.retain(|p| *p != place);
        self.free.push(place);
        self.stats.active.fetch_sub(1, Ordering::Relaxed);
        let ActiveRead {
            job,
            mut report,
            told,
            ..
        } = read;
        let release = ReleaseJob::of(&job);
        let ReadJob {
            id,
            shared,
            blocks,
            submitted,
            release: policy,
            ..
        } = job;
        if told.is_some() {
            self.stats
                .quarantined
                .fetch_sub(blocks.len() as u64, Ordering::Relaxed);
            let _ = self
                .channels
                .returned
                .send(ReturnedBlocks { read: id, blocks });
            return;
        }
        report.total = self.clock.now().saturating_since(submitted);
        let wanted = match policy {
            ReleasePolicy::Always => !matches!(verdict, Err(ReadError::LeaseLost { .. })),
            ReleasePolicy::AfterLanded => verdict.is_ok(),
            ReleasePolicy::Never => false,
        };
        let outcome = match verdict {
            Ok(()) => {
                self.peers.on_landed(&release.peer);
                self.stats.landed.fetch_add(1, Ordering::Relaxed);
                self.stats.bytes.fetch_add(report.bytes, Ordering::Relaxed);
                self.stats
                    .descriptors
                    .fetch_add(report.descriptors, Ordering::Relaxed);
                Ok(Landed { blocks, report })
            }
            Err(error) => {
                self.stats.count_failure(&error);
                Err(ReadFailure {
                    error,
                    blocks: FailedBlocks::Returned(blocks),
                })
            }
        };
        self.deliver(id, &shared, outcome);
        if wanted {
            self.release(release, now);
        }
    }

    /// Ends a read that never got a place.
    fn end_unstarted(&mut self, job: ReadJob, error: ReadError, now: MonoTime) {
        self.stats.queued.fetch_sub(1, Ordering::Relaxed);
        self.stats.count_failure(&error);
        let release = ReleaseJob::of(&job);
        let ReadJob {
            id,
            shared,
            blocks,
            release: policy,
            ..
        } = job;
        let blocks = FailedBlocks::Returned(blocks);
        self.deliver(id, &shared, Err(ReadFailure { error, blocks }));
        if policy == ReleasePolicy::Always {
            self.release(release, now);
        }
    }

    /// Hands the outcome over; blocks that nobody waits for go to the returned channel.
    fn deliver(&self, read: ReadId, shared: &ReadShared, outcome: ReadOutcome) {
        let blocks = match shared.finish(outcome) {
            Some(Ok(landed)) => landed.blocks,
            Some(Err(ReadFailure {
                blocks: FailedBlocks::Returned(blocks),
                ..
            })) => blocks,
            Some(Err(_)) | None => return,
        };
        let _ = self.channels.returned.send(ReturnedBlocks { read, blocks });
    }

    /// Parts from a peer: fails its reads and sends the agent to be destroyed. What may still be
    /// written stays in quarantine until that is done. `culprit` is in doubt even if it has nothing
    /// posted.
    fn part(&mut self, peer: &PeerKey, culprit: Option<usize>, why: &ReadError, now: MonoTime) {
        let Some(link) = self.links.remove(peer) else {
            return;
        };
        self.peers.on_lost(peer, Some(link.incarnation), now);
        let places: Vec<usize> = self
            .order
            .iter()
            .copied()
            .filter(|place| {
                self.read(*place)
                    .is_some_and(|read| read.link == Some(link.id))
            })
            .collect();
        let mut requests = Vec::new();
        let mut fenced = Vec::new();
        for place in places {
            let in_doubt =
                culprit == Some(place) || self.read(place).is_some_and(ActiveRead::in_flight);
            let error = match (culprit, why) {
                (Some(at), _) if at == place => why.clone(),
                (None, _) | (_, ReadError::Transport { .. }) => why.clone(),
                _ => ReadError::Fenced {
                    engine: link.engine.clone(),
                },
            };
            if !in_doubt {
                self.end(place, Err(error), now);
                continue;
            }
            self.tell(place, error, now);
            let Some(mut read) = self.reads.get_mut(place).and_then(Option::take) else {
                continue;
            };
            self.order.retain(|p| *p != place);
            self.stats.active.fetch_sub(1, Ordering::Relaxed);
            requests.extend(read.take_requests());
            fenced.push((place, read.job.id, read.job.blocks));
        }
        self.stats.partings.fetch_add(1, Ordering::Relaxed);
        self.fencing.insert(link.id, Fencing { reads: fenced });
        let teardown = Teardown {
            link: link.id,
            agent: link.agent,
            requests,
        };
        if let Err(refused) = self.channels.teardowns.send(teardown) {
            // The fencing thread is gone: destroy the agent here, late rather than never.
            let Teardown { link, agent, .. } = refused.into_inner();
            drop(agent);
            self.on_event(Event::Fenced { link }, now);
        }
    }

    /// Tells a holder that a lease is needed no longer.
    fn release(&mut self, job: ReleaseJob, now: MonoTime) {
        self.stats.releases.fetch_add(1, Ordering::Relaxed);
        if let Some(link) = self.links.get_mut(&job.peer)
            && link.incarnation == job.incarnation
        {
            let ReleaseJob {
                incarnation, lease, ..
            } = job;
            let notice = Notice::Release {
                incarnation,
                lease: lease.id,
                word: lease.word,
            };
            match link.agent.notify(&link.peer, &notice.encode()) {
                Ok(()) => {
                    link.used = now;
                    link.flush_until = now + FLUSH;
                    return;
                }
                Err(error) => {
                    let peer = &job.peer;
                    tracing::debug!(%peer, %error, "release by notice failed, using the side channel");
                }
            }
        }
        if self.stopping.is_none() {
            let _ = self.channels.releases.try_send(job);
        }
    }

    /// Lets sent notices leave, and parts from peers that have been idle for long.
    fn tend_links(&mut self, now: MonoTime) {
        let mut ignored = Vec::new();
        let mut idle = None;
        for link in self.links.values_mut() {
            let pause = if link.flush_until + LINGER > now {
                TEND
            } else {
                MAX_PARK / 2
            };
            if link.flush_until > now || link.tended + pause <= now {
                // A reader is sent no messages; taking them is what lets the agent progress.
                let _ = link.agent.notifications(&mut ignored);
                link.tended = now;
            }
            if link.flush_until <= now && link.used + self.config.idle_peer <= now {
                idle = Some(link.id);
            }
        }
        if let Some(id) = idle
            && !self.uses_link(id)
        {
            self.part_idle(id, now);
        }
    }

    fn uses_link(&self, id: u64) -> bool {
        self.order
            .iter()
            .any(|place| self.read(*place).is_some_and(|r| r.link == Some(id)))
    }

    /// Makes room for one more link: the longest idle one goes.
    fn make_room(&mut self, now: MonoTime) {
        if self.links.len() < self.config.max_peers {
            return;
        }
        let oldest = self
            .links
            .values()
            .filter(|link| !self.uses_link(link.id))
            .min_by_key(|link| link.used)
            .map(|link| link.id);
        if let Some(id) = oldest {
            self.part_idle(id, now);
        }
    }

    /// Parts from a peer that no read uses; it is met again when one wants it.
    fn part_idle(&mut self, id: u64, now: MonoTime) {
        let found = self.links.iter().find(|(_, link)| link.id == id);
        if let Some((peer, engine)) = found.map(|(peer, link)| (peer.clone(), link.engine.clone()))
        {
            self.part(&peer, None, &ReadError::Fenced { engine }, now);
            self.peers.forget(&peer);
        }
    }
}

impl<T: Transport> Drop for Driver<T> {
    fn drop(&mut self) {
        // Whoever still waits is told, also when this thread unwinds.
        let jobs: Vec<ReadJob> = self.backlog.drain(..).map(|job| *job).collect();
        let active: Vec<ReadJob> = self
            .reads
            .iter_mut()
            .filter_map(Option::take)
            .map(|read| read.job)
            .collect();
        let error = if self.stopping.is_some() {
            ReadError::ShuttingDown
        } else {
            ReadError::DriverGone
        };
        // The agents go first: only then are the blocks nobody's.
        self.links.clear();
        // Blocks whose agent is still being destroyed elsewhere stay claimed for ever.
        for (_, fencing) in self.fencing.drain() {
            for (_, _, blocks) in fencing.reads {
                std::mem::forget(blocks);
            }
        }
        let unseen = self
            .channels
            .reads
            .try_iter()
            .map(|job| *job)
            .collect::<Vec<_>>();
        for job in jobs.into_iter().chain(active).chain(unseen) {
            let ReadJob {
                id, shared, blocks, ..
            } = job;
            let blocks = FailedBlocks::Returned(blocks);
            let outcome = Err(ReadFailure {
                error: error.clone(),
                blocks,
            });
            if let Some(Err(ReadFailure {
                blocks: FailedBlocks::Returned(blocks),
                ..
            })) = shared.finish(outcome)
            {
                let _ = self
                    .channels
                    .returned
                    .send(ReturnedBlocks { read: id, blocks });
            }
        }
    }
}

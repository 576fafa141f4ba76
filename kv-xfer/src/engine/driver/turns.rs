//! Whose window is next, and what comes of windows that are over.
//!
//! Posting may copy inside the call, so one window is posted at a time and what has come in is
//! looked at in between. Among the peers, the one that has had the least goes first (start-time fair
//! queueing, by bytes): busy peers share evenly, and a peer that has had little waits for one window
//! at most. Tiny reads go before, but for every other window. Among a peer's reads, those that fit into one window and the others alternate.
#![forbid(unsafe_code)]

use std::collections::{BTreeSet, VecDeque};

use super::{BENEFIT, Driver};
use crate::clock::MonoTime;
use crate::engine::error::ReadError;
use crate::engine::handle::ReadId;
use crate::engine::lane::LaneReport;
use crate::engine::link::Width;
use crate::engine::read::{Advance, Env};
use crate::telemetry::Storm;
use crate::transport::Transport;

static FENCED: Storm = Storm::new();
static SILENT: Storm = Storm::new();

/// Lane reports that are taken at once.
const REPORTS_AT_ONCE: usize = 64;
/// How many windows' worth a peer that has had less than others is owed at most.
const OWED_WINDOWS: u64 = 2;

/// A place, and the read that has it: one that ended while it waited has left its place to another.
pub(super) type Turn = (usize, ReadId);

/// The reads of one link that have windows to be cut.
#[derive(Debug)]
pub(super) struct PeerTurns {
    link: u64,
    /// What it has had, as a time that passes with the bytes of whoever is served.
    had: u64,
    /// Reads that fit into one window.
    short: VecDeque<Turn>,
    long: VecDeque<Turn>,
    /// Whether the last one served was a short one.
    was_short: bool,
    /// How many of its reads may still have a window to give before every one has been asked.
    untried: usize,
}

impl PeerTurns {
    fn len(&self) -> usize {
        self.short.len().saturating_add(self.long.len())
    }

    /// The read whose turn it is, and whether it is a short one.
    fn take(&mut self) -> Option<(Turn, bool)> {
        let short_first = !self.was_short || self.long.is_empty();
        let (turn, short) = if short_first && let Some(turn) = self.short.pop_front() {
            (turn, true)
        } else {
            (self.long.pop_front()?, false)
        };
        self.was_short = short;
        Some((turn, short))
    }

    fn give_back(&mut self, turn: Turn, short: bool) {
        if short {
            self.short.push_back(turn);
        } else {
            self.long.push_back(turn);
        }
    }
}

impl<T: Transport> Driver<T> {
    /// A planned read waits for its turn.
    pub(super) fn enqueue(&mut self, place: usize) {
        let Some(read) = self.read(place) else { return };
        let turn = (place, read.job.id);
        if read.is_tiny(&self.config) {
            self.tiny.push_back(turn);
        } else {
            self.take_turns(turn);
        }
    }

    fn take_turns(&mut self, turn: Turn) {
        let Some(read) = self.read(turn.0) else {
            return;
        };
        let Some(link) = read.link else { return };
        let short = read.is_short(&self.config);
        let floor = self.floor();
        match self.turns.iter_mut().find(|turns| turns.link == link) {
            Some(turns) => turns.give_back(turn, short),
            None => {
                let mut turns = PeerTurns {
                    link,
                    had: floor,
                    short: VecDeque::new(),
                    long: VecDeque::new(),
                    was_short: false,
                    untried: 0,
                };
                turns.give_back(turn, short);
                self.turns.push(turns);
            }
        }
    }

    /// Whoever has had less counts as having had this much.
    fn floor(&self) -> u64 {
        let owed = self.config.window_bytes.saturating_mul(OWED_WINDOWS);
        self.had.saturating_sub(owed)
    }

    /// A link is gone.
    pub(super) fn forget_turns(&mut self, link: u64) {
        self.turns.retain(|turns| turns.link != link);
    }

    /// Ends what is over its deadline or was cancelled.
    pub(super) fn look_at_limits(&mut self, now: MonoTime) -> bool {
        let mut worked = false;
        // Those that ended while queued leave without a place.
        if self
            .backlog
            .iter()
            .any(|job| job.deadline <= now || job.shared.is_cancelled())
        {
            worked = true;
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
        let mut next = 0;
        while let Some(place) = self.order.get(next).copied() {
            let before = self.order.len();
            worked |= self.look_at(place, now);
            // A read that has ended has left the order, and a fence takes others of its peer along,
            // some of them from before it. Rather one twice than one never.
            let gone = before.saturating_sub(self.order.len());
            next = if self.order.get(next) == Some(&place) {
                next.saturating_add(1)
            } else {
                next.saturating_sub(gone.saturating_sub(1))
            };
        }
        worked | self.look_for_silence(now)
    }

    /// The peers from which something is in flight, each with when it is looked at next.
    pub(super) fn silences(&self) -> impl Iterator<Item = MonoTime> {
        let awaited = self.awaited();
        let expected = self.links.values();
        let expected = expected.filter(move |link| awaited.contains(&link.id));
        expected.map(|link| match link.suspected {
            Some(since) => since + BENEFIT,
            None => link.heard + self.config.silent_after,
        })
    }

    /// The links from which something is in flight.
    fn awaited(&self) -> BTreeSet<u64> {
        let reads = self.order.iter().filter_map(|place| self.read(*place));
        reads
            .filter(|read| read.in_flight())
            .filter_map(|read| read.link)
            .collect()
    }

    /// Gives up peers of whose reads nothing has come for too long.
    fn look_for_silence(&mut self, now: MonoTime) -> bool {
        let limit = self.config.silent_after;
        let awaited = self.awaited();
        let mut silent = Vec::new();
        for (peer, link) in &mut self.links {
            if !awaited.contains(&link.id) {
                link.hears(now);
            } else if link.heard + limit <= now
                && *link.suspected.get_or_insert(now) + BENEFIT <= now
            {
                silent.push((peer.clone(), link.engine.clone()));
            }
        }
        let worked = !silent.is_empty();
        for (peer, engine) in silent {
            if let Some(times) = SILENT.line() {
                tracing::warn!(%peer, %engine, times, "nothing comes from a peer: giving it up");
            }
            let error = ReadError::PeerSilent {
                engine,
                after: limit,
            };
            self.part(&peer, None, &error, now);
        }
        worked
    }

    fn look_at(&mut self, place: usize, now: MonoTime) -> bool {
        let Some(read) = self.read(place) else {
            return false;
        };
        let Some(told) = read.told else {
            let error = if read.job.shared.is_cancelled() {
                ReadError::Cancelled
            } else if read.job.deadline <= now {
                ReadError::Deadline {
                    engine: read.job.engine.clone(),
                    limit: read.job.limit(),
                    phase: read.phase_name(),
                }
            } else {
                return false;
            };
            if read.in_flight() {
                self.tell(place, error, now);
            } else {
                self.end(place, Err(error), now);
            }
            return true;
        };
        if told + self.config.abandon_after > now {
            return false;
        }
        let (peer, engine) = (read.job.peer.clone(), read.job.engine.clone());
        if let Some(times) = FENCED.line() {
            tracing::warn!(%engine, times, "a failed read's bytes are still in flight: destroying its agent");
        }
        self.part(&peer, Some(place), &ReadError::Fenced { engine }, now);
        true
    }

    /// Takes what lanes say of their windows.
    pub(super) fn take_reports(&mut self, now: MonoTime) -> bool {
        let mut worked = false;
        for _ in 0..REPORTS_AT_ONCE {
            let Ok(report) = self.channels.reports.try_recv() else {
                break;
            };
            worked = true;
            self.on_report(report, now);
        }
        worked
    }

    fn on_report(&mut self, mut report: LaneReport, now: MonoTime) {
        if self.spare.len() < self.config.lanes.saturating_mul(4) {
            self.spare.push(std::mem::take(&mut report.batch));
        }
        let place = report.of.place;
        let read = self.reads.get_mut(place).and_then(Option::as_mut);
        let Some(read) = read.filter(|r| r.job.id == report.of.read && r.link == Some(report.link))
        else {
            return;
        };
        match read.on_report(&report) {
            Ok(()) => {
                self.settle(place, now);
            }
            Err(error) => {
                let peer = read.job.peer.clone();
                self.part(&peer, Some(place), &error, now);
            }
        }
    }

    /// Asks the transport about the windows that this thread has posted.
    pub(super) fn poll_posted(&mut self, now: MonoTime) -> bool {
        let mut worked = false;
        let mut at = 0;
        while let Some(place) = self.polled.get(at).copied() {
            let read = self.reads.get_mut(place).and_then(Option::as_mut);
            let Some(read) = read.filter(|read| read.polled) else {
                self.polled.swap_remove(at);
                continue;
            };
            if let Some(link) = self.links.get_mut(&read.job.peer) {
                match read.poll(link) {
                    Ok(false) => {
                        at = at.saturating_add(1);
                        continue;
                    }
                    Ok(true) => {}
                    Err(error) => {
                        let peer = read.job.peer.clone();
                        self.part(&peer, Some(place), &error, now);
                        worked = true;
                        continue;
                    }
                }
            }
            worked = true;
            self.settle(place, now);
            // Another read may have the place now, with a list entry of its own.
            match self.reads.get_mut(place).and_then(Option::as_mut) {
                Some(read) if read.polled && !read.has_posted() => {
                    read.polled = false;
                    self.polled.swap_remove(at);
                }
                Some(read) if read.polled => at = at.saturating_add(1),
                _ => {
                    self.polled.swap_remove(at);
                }
            }
        }
        worked
    }

    /// Serves whose turn it is: helper lanes are filled on the way, and one window is posted here.
    pub(super) fn serve_turn(&mut self, now: MonoTime) -> bool {
        if self.was_tiny {
            self.was_tiny = false;
            self.serve_fairly(now) || self.serve_tiny(now)
        } else {
            self.serve_tiny(now) || self.serve_fairly(now)
        }
    }

    /// Serves a tiny read, at most every other time: what tiny reads take from the others is little.
    fn serve_tiny(&mut self, now: MonoTime) -> bool {
        let Some(turn) = self.tiny.pop_front() else {
            return false;
        };
        if !self.has_more(turn) {
            return true;
        }
        self.was_tiny = true;
        self.post_window(turn.0, now);
        // Blocks in several kinds of memory take a window for each, which wait like any other.
        if self.has_more(turn) {
            self.take_turns(turn);
        }
        true
    }

    /// Whether the read still has its place, and windows to be cut.
    fn has_more(&self, (place, id): Turn) -> bool {
        self.read(place)
            .is_some_and(|read| read.job.id == id && read.link.is_some() && read.has_more())
    }

    fn serve_fairly(&mut self, now: MonoTime) -> bool {
        let floor = self.floor();
        for turns in &mut self.turns {
            turns.untried = turns.len();
            // Also one that could not use its turns for a while is owed no more than that.
            turns.had = turns.had.max(floor);
        }
        let mut worked = false;
        loop {
            let waiting = self.turns.iter_mut().filter(|t| t.untried > 0);
            let Some(turns) = waiting.min_by_key(|turns| turns.had) else {
                return worked;
            };
            let (link, had) = (turns.link, turns.had);
            turns.untried = turns.untried.saturating_sub(1);
            let Some((turn, short)) = turns.take() else {
                continue;
            };
            let place = turn.0;
            if !self.has_more(turn) {
                continue;
            }
            let given = !short && self.give_to_lane(place);
            let posted = !given && self.post_window(place, now);
            // It may have ended or lost its link meanwhile.
            let more = self.has_more(turn);
            let Some(turns) = self.turns.iter_mut().find(|turns| turns.link == link) else {
                return true;
            };
            if more {
                turns.give_back(turn, short);
            }
            if !given && !posted {
                // Enough of this one is in flight, but perhaps not of its neighbours.
                continue;
            }
            worked = true;
            turns.untried = turns.len();
            // Never back: each peer that comes would be owed more than the one before it.
            self.had = self.had.max(had);
            turns.had = had.saturating_add(self.cost);
            if posted {
                return true;
            }
        }
    }

    /// Posts the next window of a read, and draws the consequences.
    fn post_window(&mut self, place: usize, now: MonoTime) -> bool {
        let Some(read) = self.reads.get_mut(place).and_then(Option::as_mut) else {
            return false;
        };
        let Some(link) = self.links.get_mut(&read.job.peer) else {
            return false;
        };
        if read.link != Some(link.id) {
            return false;
        }
        let mut env = Env {
            config: &self.config,
            clock: self.clock.as_ref(),
            landing: self.landing.as_ref(),
            memory: self.pool.memory().as_ref(),
            local_blocks: self.pool.block_count(),
            batch: &mut self.batch,
        };
        match read.post_next(link, &mut env) {
            Ok(None) => return false,
            Ok(Some(cost)) => {
                self.cost = cost;
                link.used = now;
                if link.copies && link.width == Width::Narrow {
                    self.widen_for(place);
                }
            }
            Err(error) => {
                let peer = read.job.peer.clone();
                self.part(&peer, Some(place), &error, now);
                return true;
            }
        }
        self.settle(place, now);
        true
    }

    /// Draws the consequences of a read's windows that are over.
    pub(super) fn settle(&mut self, place: usize, now: MonoTime) {
        let Some(read) = self.reads.get_mut(place).and_then(Option::as_mut) else {
            return;
        };
        let Some(link) = self.links.get_mut(&read.job.peer) else {
            return;
        };
        let mut env = Env {
            config: &self.config,
            clock: self.clock.as_ref(),
            landing: self.landing.as_ref(),
            memory: self.pool.memory().as_ref(),
            local_blocks: self.pool.block_count(),
            batch: &mut self.batch,
        };
        let advance = read.settle(link, &mut env);
        if !matches!(advance, Advance::Idle) {
            link.hears(now);
        }
        if read.has_posted() && !read.polled {
            read.polled = true;
            self.polled.push(place);
        }
        let peer = match &advance {
            Advance::Idle => return,
            Advance::Worked => {
                link.used = now;
                return;
            }
            Advance::Ended(_) | Advance::InDoubt(_) => read.job.peer.clone(),
        };
        match advance {
            Advance::Ended(verdict) => {
                // What broke may not heal by itself: the peer is met afresh, by another agent.
                let broken = verdict.as_ref().err().filter(|error| error.breaks_link());
                let broken = broken.cloned();
                self.end(place, verdict, now);
                if let Some(error) = broken {
                    self.part(&peer, None, &error, now);
                }
            }
            Advance::InDoubt(error) => self.part(&peer, Some(place), &error, now),
            Advance::Idle | Advance::Worked => {}
        }
    }
}

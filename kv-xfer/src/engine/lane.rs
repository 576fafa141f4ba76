//! Helper lanes: threads that post windows beside the driver, each through agents of its own.
//!
//! Posting over shared memory or TCP copies inside the transport's calls, so one thread moves no
//! more than one processor can. A lane has a second agent for a peer and posts whole windows that
//! the driver has cut; the driver stays the only one that decides, and hears of every window's end.
//! An agent in a lane is part of its link: parting from the peer destroys it like the link's own.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, unbounded};

use super::handle::ReadId;
use super::link::{SETTLES, TEND_SELDOM, TEND_SOON};
use super::workers::Teardown;
use crate::clock::{Clock, MonoTime};
use crate::ids::AgentName;
use crate::transport::{AfterError, Agent, Descriptor, Ends, Progress, ReadFault};

/// Windows that a lane is given ahead: one that it posts and one that waits, so that it does not
/// run dry while the driver posts a window itself.
const AHEAD: usize = 2;
/// How long a lane that has nothing to do looks for more before it sleeps.
const LINGER: Duration = Duration::from_micros(50);
/// Longest sleep between polls while something is in flight.
const MAX_NAP: Duration = Duration::from_micros(200);

/// Which window of which read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WindowRef {
    pub place: usize,
    pub read: ReadId,
    pub seq: u64,
}

/// A window to post.
#[derive(Debug)]
pub(crate) struct LaneWindow {
    pub of: WindowRef,
    pub ends: Ends,
    pub batch: Vec<Descriptor>,
}

/// What the driver asks of a lane.
pub(crate) enum LaneCommand<A: Agent> {
    /// An agent that reads from a link's peer is the lane's from now on.
    Attach {
        link: u64,
        peer: AgentName,
        agent: Box<A>,
    },
    Post {
        link: u64,
        window: LaneWindow,
    },
    /// The link's agent is to be destroyed, with whatever it has in flight.
    Detach {
        link: u64,
        fence: u64,
    },
}

/// A window of a lane is over, or never began.
#[derive(Debug)]
pub(crate) struct LaneReport {
    pub link: u64,
    pub of: WindowRef,
    pub result: Result<(), ReadFault>,
    /// Time inside the transport's post call.
    pub posting: Duration,
    /// The emptied list, to be filled again.
    pub batch: Vec<Descriptor>,
}

/// The driver's end of one lane.
pub(crate) struct Lane<A: Agent> {
    commands: Sender<LaneCommand<A>>,
    unposted: Arc<AtomicUsize>,
}

impl<A: Agent> Lane<A> {
    /// Makes both ends of a lane.
    pub(crate) fn new(
        reports: Sender<LaneReport>,
        teardowns: Sender<Teardown<A>>,
        clock: Arc<dyn Clock>,
        spin: Duration,
    ) -> (Self, LaneWorker<A>) {
        let (commands, inbox) = unbounded();
        let unposted = Arc::new(AtomicUsize::new(0));
        let worker = LaneWorker {
            commands: inbox,
            unposted: Arc::clone(&unposted),
            reports,
            teardowns,
            clock,
            spin,
            seats: HashMap::new(),
            posted: Vec::new(),
        };
        (Self { commands, unposted }, worker)
    }

    /// Whether it wants another window.
    pub(crate) fn has_room(&self) -> bool {
        self.unposted.load(Ordering::Relaxed) < AHEAD
    }

    /// Gives it a window; hands it back when the lane is gone.
    pub(crate) fn post(&self, link: u64, window: LaneWindow) -> Result<(), LaneWindow> {
        self.unposted.fetch_add(1, Ordering::Relaxed);
        match self.commands.send(LaneCommand::Post { link, window }) {
            Ok(()) => Ok(()),
            Err(refused) => match refused.into_inner() {
                LaneCommand::Post { window, .. } => Err(window),
                LaneCommand::Attach { .. } | LaneCommand::Detach { .. } => Ok(()),
            },
        }
    }

    /// Anything else; false when the lane is gone.
    pub(crate) fn tell(&self, command: LaneCommand<A>) -> bool {
        self.commands.send(command).is_ok()
    }
}

struct Seat<A> {
    peer: AgentName,
    agent: Box<A>,
    /// When it last posted.
    used: MonoTime,
    /// When it was last let make progress.
    tended: MonoTime,
}

struct Posted<R> {
    link: u64,
    of: WindowRef,
    request: R,
    posting: Duration,
    batch: Vec<Descriptor>,
    /// It has failed while bytes may still land: kept for its agent to be destroyed.
    doubtful: bool,
}

/// The lane's end, run by its thread.
pub(crate) struct LaneWorker<A: Agent> {
    commands: Receiver<LaneCommand<A>>,
    unposted: Arc<AtomicUsize>,
    reports: Sender<LaneReport>,
    teardowns: Sender<Teardown<A>>,
    clock: Arc<dyn Clock>,
    spin: Duration,
    seats: HashMap<u64, Seat<A>>,
    posted: Vec<Posted<A::Request>>,
}

impl<A: Agent> LaneWorker<A> {
    /// Runs until the driver is gone. What is still attached then is destroyed.
    pub(crate) fn run(mut self) {
        let mut moved = self.clock.now();
        loop {
            let Some(worked) = self.round() else { return };
            let now = self.clock.now();
            if worked {
                moved = now;
                continue;
            }
            if !self.rest(now, now.saturating_since(moved)) {
                return;
            }
        }
    }

    /// One round: at most one command, and what is in flight. Whether anything happened; `None` when
    /// the driver is gone.
    pub(crate) fn round(&mut self) -> Option<bool> {
        let commanded = match self.commands.try_recv() {
            Ok(command) => {
                self.on_command(command);
                true
            }
            Err(TryRecvError::Disconnected) => return None,
            Err(TryRecvError::Empty) => false,
        };
        Some(self.poll() || commanded)
    }

    /// Sleeps as long as nothing can happen; false when the driver is gone.
    fn rest(&mut self, now: MonoTime, quiet: Duration) -> bool {
        let spin = if self.posted.is_empty() {
            LINGER
        } else {
            self.spin
        };
        if quiet < spin {
            std::hint::spin_loop();
            return true;
        }
        if !self.posted.is_empty() && quiet < spin.saturating_mul(4) {
            std::thread::yield_now();
            return true;
        }
        let limit = if self.posted.is_empty() {
            self.tend(now)
        } else {
            (quiet / 8).min(MAX_NAP)
        };
        match self.commands.recv_timeout(limit) {
            Ok(command) => self.on_command(command),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return false,
        }
        true
    }

    fn on_command(&mut self, command: LaneCommand<A>) {
        match command {
            LaneCommand::Attach { link, peer, agent } => {
                let now = self.clock.now();
                let seat = Seat {
                    peer,
                    agent,
                    used: now,
                    tended: now,
                };
                self.seats.insert(link, seat);
            }
            LaneCommand::Post { link, window } => self.post(link, window),
            LaneCommand::Detach { link, fence } => self.detach(link, fence),
        }
    }

    fn post(&mut self, link: u64, window: LaneWindow) {
        let LaneWindow { of, ends, batch } = window;
        // A window of a link that is not attached any more: nobody waits for it.
        let Some(seat) = self.seats.get_mut(&link) else {
            self.unposted.fetch_sub(1, Ordering::Relaxed);
            return;
        };
        let before = self.clock.now();
        let posted = seat.agent.post_read(&seat.peer, ends, &batch);
        let after = self.clock.now();
        self.unposted.fetch_sub(1, Ordering::Relaxed);
        seat.used = after;
        let posting = after.saturating_since(before);
        let result = match posted {
            Ok((request, Progress::Pending)) => {
                self.posted.push(Posted {
                    link,
                    of,
                    request,
                    posting,
                    batch,
                    doubtful: false,
                });
                return;
            }
            Ok((request, Progress::Done)) => {
                seat.agent.discard(request);
                Ok(())
            }
            Err(fault) => Err(fault),
        };
        self.report(link, of, result, posting, batch);
    }

    fn report(
        &self,
        link: u64,
        of: WindowRef,
        result: Result<(), ReadFault>,
        posting: Duration,
        mut batch: Vec<Descriptor>,
    ) {
        batch.clear();
        // Without a driver nobody waits for it; the next round ends this thread.
        let _ = self.reports.send(LaneReport {
            link,
            of,
            result,
            posting,
            batch,
        });
    }

    /// Polls what is in flight.
    fn poll(&mut self) -> bool {
        let mut worked = false;
        let mut at = 0;
        while let Some(posted) = self.posted.get_mut(at) {
            let seat = self.seats.get_mut(&posted.link);
            let Some(seat) = seat.filter(|_| !posted.doubtful) else {
                at = at.saturating_add(1);
                continue;
            };
            let result = match seat.agent.poll(&mut posted.request) {
                Ok(Progress::Pending) => {
                    at = at.saturating_add(1);
                    continue;
                }
                Ok(Progress::Done) => Ok(()),
                Err(fault) => Err(fault),
            };
            worked = true;
            seat.used = self.clock.now();
            if matches!(&result, Err(fault) if fault.after == AfterError::InDoubt) {
                posted.doubtful = true;
                let (link, of, posting) = (posted.link, posted.of, posted.posting);
                self.report(link, of, result, posting, Vec::new());
                continue;
            }
            let posted = self.posted.swap_remove(at);
            if let Some(seat) = self.seats.get_mut(&posted.link) {
                seat.agent.discard(posted.request);
            }
            self.report(posted.link, posted.of, result, posted.posting, posted.batch);
        }
        worked
    }

    /// Hands a link's agent over to be destroyed.
    fn detach(&mut self, link: u64, fence: u64) {
        let Some(seat) = self.seats.remove(&link) else {
            return;
        };
        let mut requests = Vec::new();
        let mut kept = Vec::with_capacity(self.posted.len());
        for posted in self.posted.drain(..) {
            if posted.link == link {
                requests.push(posted.request);
            } else {
                kept.push(posted);
            }
        }
        self.posted = kept;
        let teardown = Teardown {
            fence,
            agent: *seat.agent,
            requests,
            flush: false,
        };
        // Without the thread that fences, the agent is destroyed here; the driver never hears of it
        // and keeps what is in doubt.
        drop(self.teardowns.send(teardown));
    }

    /// Lets idle agents make progress now and then; returns how long to sleep.
    fn tend(&mut self, now: MonoTime) -> Duration {
        let mut next = Duration::from_secs(1);
        let mut ignored = Vec::new();
        for seat in self.seats.values_mut() {
            let settling = now.saturating_since(seat.used) < SETTLES;
            let pause = if settling { TEND_SOON } else { TEND_SELDOM };
            let since = now.saturating_since(seat.tended);
            if since >= pause {
                let _ = seat.agent.notifications(&mut ignored);
                seat.tended = now;
                next = next.min(pause);
            } else {
                next = next.min(pause.saturating_sub(since));
            }
        }
        next.max(Duration::from_micros(100))
    }
}

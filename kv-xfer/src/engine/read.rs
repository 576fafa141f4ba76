//! One read: from its block pairs to a verdict.
//!
//! Windows are cut in order, a few in flight, posted by the driver or by a lane. When the last byte
//! is in, the holder's lease word
//! is read; only if it still has the descriptor's value are the bytes good. A read whose handle has
//! been told of a failure stays here until nothing can write into its blocks any more.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;

use super::config::ReaderConfig;
use super::error::ReadError;
use super::handle::ReadReport;
use super::job::ReadJob;
use super::lane::{LaneReport, LaneWindow, WindowRef};
use super::link::Link;
use crate::clock::{Clock, MonoTime};
use crate::ids::{BlockId, WordSlot};
use crate::memory::{ControlWords, Memory, MemoryError};
use crate::plan::{Cursor, Plan, PlanLimits, RunsInput};
use crate::transport::{AfterError, Agent, Descriptor, Ends, Progress, ReadFault};

/// What reads need from the driver.
pub(crate) struct Env<'a> {
    pub config: &'a ReaderConfig,
    pub clock: &'a dyn Clock,
    pub landing: &'a dyn ControlWords,
    /// What the blocks land in.
    pub memory: &'a dyn Memory,
    pub local_blocks: u32,
    pub batch: &'a mut Vec<Descriptor>,
}

/// Where a window is.
#[derive(Debug)]
enum At<R> {
    /// Posted by the driver.
    Here(R),
    /// With a lane, which reports its end.
    Lane(usize),
    /// Over.
    Over,
}

#[derive(Debug)]
struct Window<R> {
    at: At<R>,
    /// Layers that are complete when this and all earlier windows are.
    layers: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Waiting for a place, or for the peer to be met.
    Waiting,
    Posting,
    Checking {
        since: MonoTime,
    },
}

/// A window that has been cut.
struct Cut {
    ends: Ends,
    layers: u32,
    /// Bytes, and what the descriptors cost.
    cost: u64,
}

/// What a descriptor costs beside its bytes, in bytes: some half a microsecond over shared memory.
const DESCRIPTOR_COST: u64 = 2048;

/// What one step of a read led to.
#[derive(Debug)]
pub(crate) enum Advance {
    /// Nothing moved.
    Idle,
    /// Something moved.
    Worked,
    /// Nothing of it is in flight, and this is the verdict.
    Ended(Result<(), ReadError>),
    /// Bytes may still land although the transport gave up: the agent must be destroyed.
    InDoubt(ReadError),
}

/// A read that has a place in the driver.
#[derive(Debug)]
pub(crate) struct ActiveRead<R> {
    pub job: ReadJob,
    /// Which link it uses, once it does.
    pub link: Option<u64>,
    pub report: ReadReport,
    /// Since when the handle has been told of a failure, while bytes may still land.
    pub told: Option<MonoTime>,
    /// Whether the driver has it on its list of reads to poll.
    pub polled: bool,
    slot: WordSlot,
    phase: Phase,
    plan: Option<(Plan, Cursor)>,
    /// Every window of blocks has been cut.
    cut: bool,
    windows: VecDeque<Window<R>>,
    /// Number of the first of `windows`.
    first: u64,
    failure: Option<ReadError>,
}

impl<R> ActiveRead<R> {
    pub(crate) fn new(job: ReadJob, slot: WordSlot) -> Self {
        Self {
            job,
            link: None,
            report: ReadReport::default(),
            told: None,
            polled: false,
            slot,
            phase: Phase::Waiting,
            plan: None,
            cut: false,
            windows: VecDeque::new(),
            first: 0,
            failure: None,
        }
    }

    pub(crate) fn in_flight(&self) -> bool {
        !self.windows.is_empty()
    }

    /// Whether a window of it that the driver has posted is not over.
    pub(crate) fn has_posted(&self) -> bool {
        self.windows
            .iter()
            .any(|window| matches!(window.at, At::Here(_)))
    }

    /// Whether it has windows to be cut and nothing speaks against it.
    pub(crate) fn has_more(&self) -> bool {
        self.phase == Phase::Posting
            && self.job.after.is_none()
            && !self.cut
            && self.told.is_none()
            && self.failure.is_none()
    }

    /// Whether it fits into one window, so that it need not take turns with others.
    pub(crate) fn is_short(&self, config: &ReaderConfig) -> bool {
        self.report.bytes <= config.window_bytes
            && self.plan.as_ref().is_some_and(|(plan, _)| {
                plan.descriptors() <= u64::try_from(config.window_descriptors).unwrap_or(u64::MAX)
            })
    }

    /// Whether it takes a quarter of a window at most.
    pub(crate) fn is_tiny(&self, config: &ReaderConfig) -> bool {
        let descriptors = self.plan.as_ref().map_or(0, |(plan, _)| plan.descriptors());
        let cost = descriptors
            .saturating_mul(DESCRIPTOR_COST)
            .saturating_add(self.report.bytes);
        cost <= config.window_bytes / 4 && self.is_short(config)
    }

    /// What it is waiting for, in words.
    pub(crate) fn phase_name(&self) -> &'static str {
        match self.phase {
            Phase::Waiting => "meeting the peer",
            Phase::Posting if self.job.after.is_some() => "waiting for its stream",
            Phase::Posting => "moving blocks",
            Phase::Checking { .. } => "checking the lease word",
        }
    }

    /// Gives up the windows that the driver has posted, for their agent to be destroyed. Those of
    /// lanes go with the lanes' agents.
    pub(crate) fn take_requests(&mut self) -> impl Iterator<Item = R> + '_ {
        self.windows.drain(..).filter_map(|window| match window.at {
            At::Here(request) => Some(request),
            At::Lane(_) | At::Over => None,
        })
    }

    /// Plans the read over a link. Nothing is posted yet.
    pub(crate) fn start<A: Agent<Request = R>>(
        &mut self,
        link: &Link<A>,
        env: &Env<'_>,
    ) -> Result<(), ReadError> {
        let engine = || self.job.engine.clone();
        if self.job.incarnation != link.incarnation {
            return Err(ReadError::PeerRestarted {
                engine: engine(),
                expected: self.job.incarnation,
                found: link.incarnation,
            });
        }
        if self.job.lease.slot.0 >= link.words.block_count {
            return Err(ReadError::NoSuchWord {
                engine: engine(),
                slot: self.job.lease.slot.0,
                slots: link.words.block_count,
            });
        }
        let begin = env.clock.now();
        let ticket = &self.job.ticket;
        // Checked when it was submitted.
        let remote = ticket.runs.slice(self.job.span.clone()).unwrap_or_default();
        let plan = Plan::from_runs(RunsInput {
            remote_blocks: &remote,
            local_blocks: self.job.blocks.runs(),
            pairs: &link.pairs,
            remote_block_count: link.remote_blocks,
            local_block_count: env.local_blocks,
            limits: PlanLimits {
                max_descriptor_bytes: env.config.max_descriptor_bytes,
            },
        })
        .map_err(|cause| ReadError::BadDescriptor {
            engine: engine(),
            cause,
        })?;
        self.report.bytes = plan.bytes();
        self.report.descriptors_unmerged = plan.descriptors_unmerged();
        self.report.runs = plan.runs().len() as u64;
        self.report.queued = begin.saturating_since(self.job.submitted);
        self.report.planning = env.clock.now().saturating_since(begin);
        self.plan = Some((plan, Cursor::default()));
        self.link = Some(link.id);
        self.report.fabric = Some(Arc::clone(&link.fabric));
        self.phase = Phase::Posting;
        Ok(())
    }

    /// Whether what it waits for has happened. It is asked no more once it has.
    pub(crate) fn may_begin(&mut self) -> Result<bool, ReadError> {
        let Some(gate) = &self.job.after else {
            return Ok(true);
        };
        match gate.is_open() {
            Ok(open) => {
                if open {
                    self.job.after = None;
                }
                Ok(open)
            }
            Err(cause) => Err(self.device_failed(cause)),
        }
    }

    fn device_failed(&self, cause: MemoryError) -> ReadError {
        ReadError::Device {
            engine: self.job.engine.clone(),
            cause,
        }
    }

    /// Cuts the next window of blocks into `batch`; where its descriptors lie and how many layers
    /// it completes.
    fn cut(&mut self, config: &ReaderConfig, batch: &mut Vec<Descriptor>) -> Option<Cut> {
        batch.clear();
        let (plan, cursor) = self.plan.as_mut()?;
        let window = plan.next_window(
            cursor,
            config.window_descriptors,
            config.window_bytes,
            batch,
        );
        self.cut = window.is_none_or(|window| window.last);
        let window = window?;
        self.report.descriptors = self.report.descriptors.saturating_add(batch.len() as u64);
        self.report.windows = self.report.windows.saturating_add(1);
        let overhead = (batch.len() as u64).saturating_mul(DESCRIPTOR_COST);
        Some(Cut {
            ends: window.ends,
            layers: window.layers,
            cost: window.bytes.saturating_add(overhead),
        })
    }

    /// Cuts a window for a lane, unless it has enough of this read.
    pub(crate) fn cut_for(
        &mut self,
        lane: usize,
        place: usize,
        config: &ReaderConfig,
        mut batch: Vec<Descriptor>,
    ) -> Result<(LaneWindow, u64), Vec<Descriptor>> {
        if !self.has_more() || self.count(|at| matches!(at, At::Lane(l) if *l == lane), config) {
            return Err(batch);
        }
        let Some(Cut { ends, layers, cost }) = self.cut(config, &mut batch) else {
            return Err(batch);
        };
        let seq = self
            .first
            .saturating_add(u64::try_from(self.windows.len()).unwrap_or(u64::MAX));
        self.windows.push_back(Window {
            at: At::Lane(lane),
            layers,
        });
        let of = WindowRef {
            place,
            read: self.job.id,
            seq,
        };
        Ok((LaneWindow { of, ends, batch }, cost))
    }

    /// Whether as many windows as may be in flight at once are at the wanted place.
    fn count(&self, wanted: impl Fn(&At<R>) -> bool, config: &ReaderConfig) -> bool {
        self.windows
            .iter()
            .filter(|window| wanted(&window.at))
            .count()
            >= config.windows_in_flight
    }

    /// Cuts the next window and posts it; its cost. `None` when there is none to cut, or enough are
    /// in flight.
    pub(crate) fn post_next<A: Agent<Request = R>>(
        &mut self,
        link: &mut Link<A>,
        env: &mut Env<'_>,
    ) -> Result<Option<u64>, ReadError> {
        if !self.has_more() || self.count(|at| matches!(at, At::Here(_)), env.config) {
            return Ok(None);
        }
        match self.cut(env.config, env.batch) {
            Some(cut) => {
                self.post(link, env, cut.ends, cut.layers)?;
                let last = self.windows.back();
                link.copies = last.is_some_and(|window| matches!(window.at, At::Over));
                Ok(Some(cut.cost))
            }
            None => Ok(None),
        }
    }

    /// Takes a lane's word for the end of a window.
    pub(crate) fn on_report(&mut self, report: &LaneReport) -> Result<(), ReadError> {
        let at = report.of.seq.checked_sub(self.first);
        let window = at
            .and_then(|at| usize::try_from(at).ok())
            .and_then(|at| self.windows.get_mut(at));
        if let Some(window) = window
            && matches!(window.at, At::Lane(_))
        {
            window.at = At::Over;
        }
        self.report.posting = self.report.posting.saturating_add(report.posting);
        match &report.result {
            Ok(()) => Ok(()),
            Err(fault) => self.fail(fault.clone()),
        }
    }

    /// A window has failed: only what is in doubt is an error at once.
    fn fail(&mut self, fault: ReadFault) -> Result<(), ReadError> {
        let error = ReadError::Transport {
            engine: self.job.engine.clone(),
            cause: fault.error,
        };
        if fault.after == AfterError::InDoubt {
            return Err(error);
        }
        self.failure.get_or_insert(error);
        Ok(())
    }

    /// Asks the transport about the windows that the driver has posted.
    pub(crate) fn poll<A: Agent<Request = R>>(
        &mut self,
        link: &mut Link<A>,
    ) -> Result<bool, ReadError> {
        let mut worked = false;
        let mut failed = None;
        for window in &mut self.windows {
            let At::Here(request) = &mut window.at else {
                continue;
            };
            match link.agent.poll(request) {
                Ok(Progress::Pending) => {}
                Ok(Progress::Done) => {
                    discard(window, link);
                    worked = true;
                }
                // Kept, for its agent to be destroyed.
                Err(fault) if fault.after == AfterError::InDoubt => {
                    failed = Some(fault);
                    break;
                }
                Err(fault) => {
                    discard(window, link);
                    failed.get_or_insert(fault);
                    worked = true;
                }
            }
        }
        match failed {
            Some(fault) => self.fail(fault).map(|()| worked),
            None => Ok(worked),
        }
    }

    /// Draws the consequences of windows that are over: tells of complete layers, has the lease word
    /// read once every block is in, and comes to the verdict.
    pub(crate) fn settle<A: Agent<Request = R>>(
        &mut self,
        link: &mut Link<A>,
        env: &mut Env<'_>,
    ) -> Advance {
        let mut worked = self.drop_over(env);
        loop {
            if self.in_flight() {
                return if worked {
                    Advance::Worked
                } else {
                    Advance::Idle
                };
            }
            if self.told.is_some() || self.failure.is_some() {
                let failure = self.failure.take().unwrap_or(ReadError::Cancelled);
                return Advance::Ended(Err(failure));
            }
            match self.phase {
                Phase::Posting if self.cut => {
                    if let Err(error) = self.check_word(link, env) {
                        return Advance::InDoubt(error);
                    }
                }
                Phase::Checking { since } => {
                    self.report.checking = env.clock.now().saturating_since(since);
                    return Advance::Ended(self.verdict(env.landing).and_then(|()| {
                        // Before anybody is told that they are there.
                        env.memory
                            .settle()
                            .map_err(|cause| self.device_failed(cause))
                    }));
                }
                Phase::Waiting | Phase::Posting => {
                    return if worked {
                        Advance::Worked
                    } else {
                        Advance::Idle
                    };
                }
            }
            worked = true;
            self.drop_over(env);
        }
    }

    /// Drops the windows at the front that are over, and tells of the layers that they complete.
    fn drop_over(&mut self, env: &Env<'_>) -> bool {
        let mut worked = false;
        let over = |window: &Window<R>| matches!(window.at, At::Over);
        while self.windows.front().is_some_and(over) {
            let Some(window) = self.windows.pop_front() else {
                break;
            };
            self.first = self.first.saturating_add(1);
            worked = true;
            if self.failure.is_none() && self.told.is_none() && window.layers > 0 {
                if let Err(cause) = env.memory.settle() {
                    self.failure = Some(self.device_failed(cause));
                    continue;
                }
                if self.report.first_layer.is_zero() {
                    self.report.first_layer = env.clock.now().saturating_since(self.job.submitted);
                }
                self.job.shared.set_layers_ready(window.layers);
            }
        }
        worked
    }

    /// Has the lease word read: every block is in.
    fn check_word<A: Agent<Request = R>>(
        &mut self,
        link: &mut Link<A>,
        env: &mut Env<'_>,
    ) -> Result<(), ReadError> {
        let since = env.clock.now();
        self.phase = Phase::Checking { since };
        let word = self.job.lease.word.0;
        // Anything but the expected value, so that a read that brought nothing is noticed.
        env.landing.store(self.slot, !word);
        let remote = link.words.block_addr(BlockId(self.job.lease.slot.0));
        let local = env.landing.region().block_addr(BlockId(self.slot.0));
        if let (Ok(remote), Ok(local)) = (remote, local) {
            env.batch.clear();
            env.batch.push(Descriptor {
                remote,
                local,
                len: 8,
            });
            self.post(link, env, Ends::HOST, 0)?;
        }
        Ok(())
    }

    fn post<A: Agent<Request = R>>(
        &mut self,
        link: &mut Link<A>,
        env: &mut Env<'_>,
        ends: Ends,
        layers: u32,
    ) -> Result<(), ReadError> {
        let before = env.clock.now();
        let posted = link.agent.post_read(&link.peer, ends, env.batch);
        self.report.posting = self
            .report
            .posting
            .saturating_add(env.clock.now().saturating_since(before));
        match posted {
            Ok((request, progress)) => {
                let mut window = Window {
                    at: At::Here(request),
                    layers,
                };
                if progress == Progress::Done {
                    discard(&mut window, link);
                }
                self.windows.push_back(window);
                Ok(())
            }
            Err(fault) => self.fail(fault),
        }
    }

    /// Every byte is in and the word's copy has landed after it: was the lease still held?
    fn verdict(&self, landing: &dyn ControlWords) -> Result<(), ReadError> {
        let expected = self.job.lease.word.0;
        let found = landing.load(self.slot).unwrap_or(!expected);
        if found == expected {
            return Ok(());
        }
        Err(self.job.lease_lost(*self.job.lost.get_or_init(|| found)))
    }
}

/// A window that the driver has posted is over: its request goes back.
fn discard<A: Agent>(window: &mut Window<A::Request>, link: &mut Link<A>) {
    if let At::Here(request) = std::mem::replace(&mut window.at, At::Over) {
        link.agent.discard(request);
    }
}

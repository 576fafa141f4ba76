//! One read: from its block pairs to a verdict.
//!
//! Windows are posted in order, a few in flight. When the last byte is in, the holder's lease word
//! is read; only if it still has the descriptor's value are the bytes good. A read whose handle has
//! been told of a failure stays here until nothing can write into its blocks any more.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::config::ReaderConfig;
use super::error::ReadError;
use super::handle::{FailedBlocks, HandleOwner, ReadFailure, ReadId, ReadReport, ReadShared};
use super::link::Link;
use crate::clock::{Clock, MonoTime};
use crate::descriptor::{BlockRuns, LeaseRef};
use crate::ids::{BlockId, EngineId, Incarnation, WordSlot};
use crate::memory::{ControlWords, OwnedBlocks};
use crate::peer::PeerKey;
use crate::plan::{Cursor, Plan, PlanInput, PlanLimits};
use crate::transport::{AfterError, Agent, Descriptor, Ends, Progress, ReadFault};

/// When the reader tells the holder that it needs a lease no longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ReleasePolicy {
    /// When the read ends, however it ends: a failed read is recomputed, so the blocks would only
    /// be pinned in vain.
    #[default]
    Always,
    /// Only when the blocks have landed; a failed read may be tried again.
    AfterLanded,
    /// Never: the caller releases.
    Never,
}

/// A read as it was submitted.
#[derive(Debug)]
pub(crate) struct ReadJob {
    pub id: ReadId,
    pub shared: Arc<ReadShared>,
    pub engine: EngineId,
    pub peer: PeerKey,
    pub incarnation: Incarnation,
    pub lease: LeaseRef,
    pub remote: BlockRuns,
    pub blocks: OwnedBlocks,
    pub submitted: MonoTime,
    pub deadline: MonoTime,
    pub release: ReleasePolicy,
}

impl ReadJob {
    pub(crate) fn limit(&self) -> Duration {
        self.deadline.saturating_since(self.submitted)
    }
}

/// A read on its way to the driver. Should it never get there, its handle hears of it all the same.
pub(crate) struct Submitted {
    job: Option<Box<ReadJob>>,
    owner: Arc<dyn HandleOwner>,
}

impl Submitted {
    pub(crate) fn new(job: ReadJob, owner: Arc<dyn HandleOwner>) -> Self {
        let job = Some(Box::new(job));
        Self { job, owner }
    }

    pub(crate) fn into_job(mut self) -> Option<Box<ReadJob>> {
        self.job.take()
    }
}

impl Drop for Submitted {
    fn drop(&mut self) {
        let Some(job) = self.job.take() else { return };
        let ReadJob {
            id, shared, blocks, ..
        } = *job;
        let untaken = shared.finish(Err(ReadFailure {
            error: ReadError::DriverGone,
            blocks: FailedBlocks::Returned(blocks),
        }));
        if let Some(Err(ReadFailure {
            blocks: FailedBlocks::Returned(blocks),
            ..
        })) = untaken
        {
            self.owner.unclaimed(id, blocks);
        }
    }
}

/// What reads need from the driver.
pub(crate) struct Env<'a> {
    pub config: &'a ReaderConfig,
    pub clock: &'a dyn Clock,
    pub landing: &'a dyn ControlWords,
    pub local_blocks: u32,
    pub batch: &'a mut Vec<Descriptor>,
}

#[derive(Debug)]
struct Window<R> {
    request: R,
    /// Layers that are complete when this and all earlier windows are.
    layers: u32,
    over: bool,
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
    slot: WordSlot,
    phase: Phase,
    plan: Option<(Plan, Cursor)>,
    windows: VecDeque<Window<R>>,
    failure: Option<ReadError>,
}

impl<R> ActiveRead<R> {
    pub(crate) fn new(job: ReadJob, slot: WordSlot) -> Self {
        Self {
            job,
            link: None,
            report: ReadReport::default(),
            told: None,
            slot,
            phase: Phase::Waiting,
            plan: None,
            windows: VecDeque::new(),
            failure: None,
        }
    }

    pub(crate) fn in_flight(&self) -> bool {
        !self.windows.is_empty()
    }

    /// What it is waiting for, in words.
    pub(crate) fn phase_name(&self) -> &'static str {
        match self.phase {
            Phase::Waiting => "meeting the peer",
            Phase::Posting => "moving blocks",
            Phase::Checking { .. } => "checking the lease word",
        }
    }

    /// Gives up the posted windows, for their agent to be destroyed.
    pub(crate) fn take_requests(&mut self) -> impl Iterator<Item = R> + '_ {
        self.windows.drain(..).map(|window| window.request)
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
        let local = self.job.blocks.ids();
        let mut remote = Vec::with_capacity(self.job.remote.len());
        remote.extend(self.job.remote.iter());
        let plan = Plan::new(PlanInput {
            remote_blocks: &remote,
            local_blocks: local,
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
        self.report.queued = env.clock.now().saturating_since(self.job.submitted);
        self.plan = Some((plan, Cursor::default()));
        self.link = Some(link.id);
        self.phase = Phase::Posting;
        Ok(())
    }

    /// Polls what is in flight and posts at most one more window.
    pub(crate) fn advance<A: Agent<Request = R>>(
        &mut self,
        link: &mut Link<A>,
        env: &mut Env<'_>,
    ) -> Advance {
        let mut worked = match self.poll_windows(link, env.clock) {
            Ok(worked) => worked,
            Err(error) => return Advance::InDoubt(error),
        };
        if self.told.is_some() || self.failure.is_some() {
            if self.windows.is_empty() {
                let failure = self.failure.take().unwrap_or(ReadError::Cancelled);
                return Advance::Ended(Err(failure));
            }
            return if worked {
                Advance::Worked
            } else {
                Advance::Idle
            };
        }
        match self.phase {
            Phase::Waiting => {}
            Phase::Posting => {
                if self.windows.len() < env.config.windows_in_flight {
                    match self.post_next(link, env) {
                        Ok(posted) => worked |= posted,
                        Err(error) => return Advance::InDoubt(error),
                    }
                }
            }
            Phase::Checking { since } => {
                if self.windows.is_empty() {
                    self.report.checking = env.clock.now().saturating_since(since);
                    return Advance::Ended(self.verdict(env.landing));
                }
            }
        }
        if worked {
            Advance::Worked
        } else {
            Advance::Idle
        }
    }

    fn poll_windows<A: Agent<Request = R>>(
        &mut self,
        link: &mut Link<A>,
        clock: &dyn Clock,
    ) -> Result<bool, ReadError> {
        let mut worked = false;
        for window in self.windows.iter_mut().filter(|window| !window.over) {
            match link.agent.poll(&mut window.request) {
                Ok(Progress::Pending) => {}
                Ok(Progress::Done) => {
                    window.over = true;
                    worked = true;
                }
                Err(ReadFault { error, after }) => {
                    let error = ReadError::Transport {
                        engine: self.job.engine.clone(),
                        cause: error,
                    };
                    if after == AfterError::InDoubt {
                        return Err(error);
                    }
                    window.over = true;
                    worked = true;
                    self.failure.get_or_insert(error);
                }
            }
        }
        while self.windows.front().is_some_and(|window| window.over) {
            if let Some(window) = self.windows.pop_front() {
                link.agent.discard(window.request);
                if self.failure.is_none() && self.told.is_none() && window.layers > 0 {
                    if self.report.first_layer.is_zero() {
                        self.report.first_layer = clock.now().saturating_since(self.job.submitted);
                    }
                    self.job.shared.set_layers_ready(window.layers);
                }
            }
        }
        Ok(worked)
    }

    /// Posts the next window of blocks, or the word's read once every block is in.
    fn post_next<A: Agent<Request = R>>(
        &mut self,
        link: &mut Link<A>,
        env: &mut Env<'_>,
    ) -> Result<bool, ReadError> {
        env.batch.clear();
        let next = self.plan.as_mut().and_then(|(plan, cursor)| {
            plan.next_window(
                cursor,
                env.config.window_descriptors,
                env.config.window_bytes,
                env.batch,
            )
        });
        match next {
            Some(window) => {
                self.report.descriptors = self
                    .report
                    .descriptors
                    .saturating_add(env.batch.len() as u64);
                self.report.windows = self.report.windows.saturating_add(1);
                self.post(link, env, window.ends, window.layers)?;
                Ok(true)
            }
            None if self.windows.is_empty() => {
                let since = env.clock.now();
                self.phase = Phase::Checking { since };
                let word = self.job.lease.word.0;
                // Anything but the expected value, so that a read that brought nothing is noticed.
                env.landing.store(self.slot, !word);
                let remote = link.words.block_addr(BlockId(self.job.lease.slot.0));
                let local = env.landing.region().block_addr(BlockId(self.slot.0));
                if let (Ok(remote), Ok(local)) = (remote, local) {
                    env.batch.push(Descriptor {
                        remote,
                        local,
                        len: 8,
                    });
                    self.post(link, env, Ends::HOST, 0)?;
                }
                Ok(true)
            }
            None => Ok(false),
        }
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
                let over = progress == Progress::Done;
                self.windows.push_back(Window {
                    request,
                    layers,
                    over,
                });
                Ok(())
            }
            Err(ReadFault { error, after }) => {
                let error = ReadError::Transport {
                    engine: self.job.engine.clone(),
                    cause: error,
                };
                if after == AfterError::InDoubt {
                    return Err(error);
                }
                self.failure.get_or_insert(error);
                Ok(())
            }
        }
    }

    /// Every byte is in and the word's copy has landed after it: was the lease still held?
    fn verdict(&self, landing: &dyn ControlWords) -> Result<(), ReadError> {
        let expected = self.job.lease.word.0;
        let found = landing.load(self.slot).unwrap_or(!expected);
        if found == expected {
            return Ok(());
        }
        Err(ReadError::LeaseLost {
            engine: self.job.engine.clone(),
            lease: self.job.lease.id,
            expected,
            found,
        })
    }
}

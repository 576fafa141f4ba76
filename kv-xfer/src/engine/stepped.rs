//! An engine without threads: whoever has it carries out every round of what its threads would do,
//! in the order of their choice. It is the same code, between the same channels.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crossbeam::channel::{Receiver, bounded};

use super::Engine;
use super::cards::{Answers, Door};
use super::config::EngineConfig;
use super::connect::{CardSource, Errand, Meeting};
use super::driver::{Command, Driver, Event};
use super::error::StartError;
use super::lane::LaneWorker;
use super::lease_care::LeaseCare;
use super::start::{Birth, Parts};
use super::workers::{Teardown, WorkerEnds};
use crate::clock::{Clock, MonoTime};
use crate::ids::{AgentName, WordSlot};
use crate::memory::KvPool;
use crate::transport::Transport;

/// Which of the threads that meet peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Errands {
    /// Those for peers that could be met last time, or were never tried.
    First,
    /// Those for the others.
    Retries,
}

/// An engine whose threads' work is done by calls.
pub(crate) struct Stepped<T: Transport> {
    // Before the engine, as a driver's thread has ended when an engine is gone.
    driver: Option<Driver<T>>,
    lanes: Vec<LaneWorker<T::Agent>>,
    ends: WorkerEnds<T::Agent>,
    meeting: Meeting<T>,
    care: LeaseCare,
    agent: Option<T::Agent>,
    inbox: Vec<(AgentName, Vec<u8>)>,
    nudged: Receiver<()>,
    /// Answers what readers ask over the side channel.
    pub answers: Option<Arc<Answers>>,
    pub engine: Engine,
}

impl<T: Transport> Stepped<T> {
    pub(crate) fn start(
        config: EngineConfig,
        pool: Arc<KvPool>,
        transport: Arc<T>,
        clock: Arc<dyn Clock>,
        cards: Arc<dyn CardSource>,
        birth: Birth,
    ) -> Result<Self, StartError> {
        let probe = WordSlot(config.reader.active);
        let Parts {
            engine,
            answers,
            agent,
            nudged,
            lanes,
            works,
            driver,
        } = Parts::build(config, pool, transport, clock, cards, birth, Door::Direct)?;
        let (_, spares) = bounded(0);
        let meeting = works.meeting(probe, &spares);
        let care = works.care(Arc::new(AtomicBool::new(false)));
        Ok(Self {
            driver: Some(driver),
            lanes,
            ends: works.ends,
            meeting,
            care,
            agent: Some(agent),
            inbox: Vec::new(),
            nudged,
            answers,
            engine,
        })
    }

    /// One round of the driver: whether it did anything, and when something ends although nothing
    /// comes in. `None` when it has ended, before or with this round.
    pub(crate) fn drive(&mut self) -> Option<(bool, MonoTime)> {
        let driver = self.driver.as_mut()?;
        let now = self.engine.now();
        let worked = driver.step(now);
        if driver.is_over(now) {
            self.driver = None;
            return None;
        }
        Some((worked, driver.next_deadline()))
    }

    /// Whether the driver runs.
    pub(crate) fn is_driven(&self) -> bool {
        self.driver.is_some()
    }

    /// The driver's thread unwinds.
    pub(crate) fn lose_driver(&mut self) {
        self.driver = None;
    }

    /// How many helper lanes there are.
    pub(crate) fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// One round of a helper lane, which ends with the driver.
    pub(crate) fn lane(&mut self, lane: usize) -> bool {
        let round = self.lanes.get_mut(lane).map(LaneWorker::round);
        if round == Some(None) {
            self.lanes.swap_remove(lane);
        }
        round.flatten().unwrap_or(false)
    }

    /// The next peer to be met, or to have more agents made for.
    pub(crate) fn errand(&self, of: Errands) -> Option<Errand> {
        match of {
            Errands::First => self.ends.errands.try_recv().ok(),
            Errands::Retries => self.ends.retries.try_recv().ok(),
        }
    }

    /// Meets a peer; the driver is to be [told](Self::tell).
    pub(crate) fn carry_out(&self, errand: Errand) -> Option<Event<T::Agent>> {
        self.meeting.carry_out(errand)
    }

    /// What has been done off the driver's thread.
    pub(crate) fn tell(&self, event: Event<T::Agent>) {
        // Without a driver its agents are destroyed as they are dropped, as in its channel.
        drop(self.ends.events.send(event));
    }

    /// One wish about a lease, or one that was put off. False when there is none.
    pub(crate) fn care(&mut self) -> bool {
        match self.ends.wishes.try_recv() {
            Ok(job) => {
                self.care.care_for(job);
                true
            }
            Err(_) => self.care.care_for_late(),
        }
    }

    /// The next agent to be destroyed.
    pub(crate) fn teardown(&self) -> Option<Teardown<T::Agent>> {
        self.ends.teardowns.try_recv().ok()
    }

    /// Destroys an agent; the driver is to be [told](Self::tell).
    pub(crate) fn tear_down(teardown: Teardown<T::Agent>) -> Event<T::Agent> {
        teardown.carry_out(|_| ())
    }

    /// One round of the holder's thread: whether it did anything, and when the next lease is over.
    pub(crate) fn hold(&mut self) -> (bool, Option<MonoTime>) {
        let Some(agent) = self.agent.as_mut() else {
            return (false, None);
        };
        let nudged = self.nudged.try_recv().is_ok();
        let now = self.engine.now();
        let (taken, next) = self.engine.holder.round(agent, &mut self.inbox, now);
        (nudged || taken > 0, next)
    }

    /// The holder's thread ends, and with it all leases and the serving agent.
    pub(crate) fn end_holding(&mut self) {
        self.answers = None;
        self.engine.holder.revoke_all();
        self.agent = None;
    }

    /// The engine is to shut down by `deadline`.
    pub(crate) fn shut_down(&self, deadline: MonoTime) {
        let _ = self
            .engine
            .commands
            .try_send(Command::Shutdown { deadline });
    }
}

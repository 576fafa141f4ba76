//! The threads beside the driver: those that meet peers, the one that cares for leases over the side
//! channel, and the one that destroys agents.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, bounded};

use super::config::ReaderConfig;
use super::connect::{CardSource, Errand, LocalSide, Meeting};
use super::driver::{Event, LeaseJob};
use super::lease_care::LeaseCare;
use super::threads::{bound, join_by};
use crate::clock::Clock;
use crate::ids::WordSlot;
use crate::transport::{Agent, Transport};

/// How often, a millisecond apart, an agent is let make progress before it is destroyed, so that a
/// notice which was just given to it leaves.
const FLUSH_TRIES: u32 = 10;

/// An agent to destroy, with what it still had in flight.
pub(crate) struct Teardown<A: Agent> {
    /// Under which number the driver waits for it.
    pub fence: u64,
    pub agent: A,
    pub requests: Vec<A::Request>,
    /// It may have a notice that has not left yet.
    pub flush: bool,
}

impl<A: Agent> Teardown<A> {
    /// Destroys the agent; what the driver is to be told.
    pub(super) fn carry_out(self, nap: impl Fn(Duration)) -> Event<A> {
        let Self {
            fence,
            mut agent,
            requests,
            flush,
        } = self;
        if flush && requests.is_empty() {
            let mut ignored = Vec::new();
            for _ in 0..FLUSH_TRIES {
                let _ = agent.notifications(&mut ignored);
                nap(Duration::from_millis(1));
            }
        }
        for request in requests {
            agent.discard(request);
        }
        // The fence: after this, nothing is written on the agent's behalf.
        let fenced = agent.destroy_patiently();
        Event::Fenced { fence, fenced }
    }
}

/// What the threads do, before there are threads to do it.
pub(super) struct Works<T: Transport> {
    pub transport: Arc<T>,
    pub cards: Arc<dyn CardSource>,
    pub local: Arc<LocalSide>,
    pub clock: Arc<dyn Clock>,
    /// Numbers links and helper lanes' agents.
    pub next_link: Arc<AtomicU64>,
    pub ends: WorkerEnds<T::Agent>,
}

impl<T: Transport> Works<T> {
    /// One that meets peers.
    pub(super) fn meeting(&self, probe: WordSlot, spares: &Receiver<T::Agent>) -> Meeting<T> {
        Meeting {
            transport: Arc::clone(&self.transport),
            cards: Arc::clone(&self.cards),
            local: Arc::clone(&self.local),
            clock: Arc::clone(&self.clock),
            next_link: Arc::clone(&self.next_link),
            probe,
            spares: spares.clone(),
        }
    }

    /// The one that cares for leases.
    pub(super) fn care(&self, stopping: Arc<AtomicBool>) -> LeaseCare {
        LeaseCare::new(Arc::clone(&self.cards), Arc::clone(&self.clock), stopping)
    }
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
        works: Works<T>,
        config: &ReaderConfig,
        helpers: Vec<JoinHandle<()>>,
    ) -> std::io::Result<Self> {
        let mut threads = helpers;
        let pool = &Arc::clone(&works.local.pool);
        let thread = |name: String| std::thread::Builder::new().name(name);
        // One more is held by the thread that opens them, until there is room for it.
        let (ahead, spares) = bounded(config.spare_agents.saturating_sub(1));
        if config.spare_agents > 0 {
            let (transport, local) = (Arc::clone(&works.transport), Arc::clone(&works.local));
            let open = move || open_ahead(transport.as_ref(), local.as_ref(), &ahead);
            threads.push(thread("kvx-spare".into()).spawn(bound(pool, open))?);
        }
        // The words after those of reads.
        let mut probes = config.active..;
        let lanes = [
            ("meet", &works.ends.errands),
            ("retry", &works.ends.retries),
        ];
        let count = config.connect_threads;
        let each = (0..count.max(1)).flat_map(|n| lanes.iter().map(move |lane| (n, lane)));
        for (n, (lane, errands)) in each {
            let probe = WordSlot(probes.next().unwrap_or(u32::MAX));
            let meeting = works.meeting(probe, &spares);
            let (errands, events) = (Receiver::clone(errands), works.ends.events.clone());
            let meet = move || meeting.run(&errands, &events);
            threads.push(thread(format!("kvx-{lane}-{n}")).spawn(bound(pool, meet))?);
        }
        let stopping = Arc::new(AtomicBool::new(false));
        let care = works.care(Arc::clone(&stopping));
        let WorkerEnds {
            wishes,
            teardowns,
            events,
            ..
        } = works.ends;
        threads.push(thread("kvx-leases".into()).spawn(move || care.run(&wishes))?);
        let fence = move || {
            for teardown in teardowns {
                if !fence(teardown, &events) {
                    break;
                }
            }
        };
        threads.push(thread("kvx-fence".into()).spawn(bound(pool, fence))?);
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

/// Destroys an agent and tells the driver. One whose calls may hang is waited for by a thread of its own, which ends with
/// them: nobody else waits for it. False when the driver is gone.
fn fence<A: Agent>(teardown: Teardown<A>, events: &Sender<Event<A>>) -> bool {
    if !teardown.agent.may_hang() {
        return events.send(teardown.carry_out(std::thread::sleep)).is_ok();
    }
    let events = events.clone();
    let number = teardown.fence;
    let wait = move || {
        // Without a driver nobody needs to know.
        let _ = events.send(teardown.carry_out(std::thread::sleep));
    };
    let thread = std::thread::Builder::new().name(format!("kvx-fence-{number}"));
    if let Err(error) = thread.spawn(wait) {
        // The agent is destroyed by its own thread; what was in doubt stays in quarantine.
        tracing::error!(%error, "no thread waits for an agent's end, its reads' blocks are lost");
    }
    true
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

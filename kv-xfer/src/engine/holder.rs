//! The holder's side: the serving agent, the leases, and the thread that ends them.
//!
//! The thread takes readers' notices, ends leases that are over, and sleeps until the next one is.
//! It needs no other traffic. Whatever ends a lease, its word is advanced before its blocks go back
//! to the engine.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender};
use parking_lot::{Mutex, MutexGuard};

use super::config::HolderConfig;
use super::notice::Notice;
use super::threads::{bound, join_by, until};
use crate::clock::{Clock, MonoTime};
use crate::descriptor::ClusterKey;
use crate::ids::{AgentName, Incarnation, LeaseId, LeaseWord};
use crate::lease::{
    EndedLease, FreedBlocks, Grant, GrantRefused, LeaseTable, NewLease, RenewOutcome,
};
use crate::memory::{ControlWords, KvPool};
use crate::telemetry::{EngineStats, Storm};
use crate::transport::Agent;

/// How far a vLLM heartbeat extends a lease: two thirds of its 30 s lease.
const HEARTBEAT_EXTENSION: Duration = Duration::from_secs(20);
/// How often a holder without leases looks for notices.
const IDLE_POLL: Duration = Duration::from_millis(50);
/// For how long after a notice or a first grant notices are expected soon. After that a holder whose
/// leases just wait for the next turn looks ten times less often.
const BUSY_FOR: Duration = Duration::from_millis(100);
/// How long the agent is kept after leases that may be being read were ended: readers see that when the bytes under way
/// have landed, and post no more. Over TCP the holder's own threads send the bytes, and UCX 1.21 has been seen to crash
/// when its worker is destroyed with some of them waiting.
const LINGER: Duration = Duration::from_millis(200);

/// Leases that are ended under one hold of the table's lock, some 0.5 ms: a grant waits no longer,
/// however many end at once.
const AT_ONCE: usize = 256;

/// Time that the thread is given to end: destroying an agent takes some 0.2 s at most.
pub(super) const STOP_LIMIT: Duration = Duration::from_secs(2);

static UNTAKEN: Storm = Storm::new();
static UNRETIRED: Storm = Storm::new();

/// Leases and their words, shared by the engine's callers, its side channel and its thread.
pub(crate) struct Holder {
    table: Mutex<LeaseTable>,
    words: Arc<dyn ControlWords>,
    clock: Arc<dyn Clock>,
    incarnation: Incarnation,
    key: Option<ClusterKey>,
    freed: Sender<FreedBlocks>,
    /// Wakes the thread, which sleeps for long while nothing is leased.
    nudge: Sender<()>,
    stopping: AtomicBool,
    stats: Arc<EngineStats>,
}

impl std::fmt::Debug for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Holder")
            .field("incarnation", &self.incarnation)
            .finish_non_exhaustive()
    }
}

impl Holder {
    pub(crate) fn new(
        table: LeaseTable,
        words: Arc<dyn ControlWords>,
        clock: Arc<dyn Clock>,
        incarnation: Incarnation,
        freed: Sender<FreedBlocks>,
        nudge: Sender<()>,
        stats: Arc<EngineStats>,
    ) -> Self {
        Self {
            table: Mutex::new(table),
            words,
            clock,
            incarnation,
            key: None,
            freed,
            nudge,
            stopping: AtomicBool::new(false),
            stats,
        }
    }

    /// Takes only notices that were signed with the key, if there is one.
    pub(crate) fn keyed(mut self, key: Option<ClusterKey>) -> Self {
        self.key = key;
        self
    }

    pub(crate) fn grant(&self, new: NewLease) -> Result<Grant, GrantRefused> {
        let now = self.clock.now();
        let mut table = self.table.lock();
        // Whatever is over makes room first.
        let over = table.expire_some(now, AT_ONCE);
        self.retire(&mut table, over);
        let idle = table.is_empty();
        let grant = table.grant(now, new);
        self.gauge(&table);
        drop(table);
        if idle {
            let _ = self.nudge.try_send(());
        }
        grant
    }

    pub(crate) fn renew(&self, lease: LeaseId, extension: Duration) -> RenewOutcome {
        self.table.lock().renew(self.clock.now(), lease, extension)
    }

    /// Ends a lease by its reader's word. True if it held.
    pub(crate) fn release(&self, lease: LeaseId, word: LeaseWord) -> bool {
        let mut table = self.table.lock();
        let ended = table.release(lease, word).ended();
        let held = ended.is_some();
        self.retire(&mut table, ended);
        held
    }

    /// Ends a lease by its id alone, for a reader on the side channel. True if it held.
    pub(crate) fn release_by_id(&self, lease: LeaseId) -> bool {
        let mut table = self.table.lock();
        let word = table.get(lease).map(|view| view.grant.word);
        let ended = word.and_then(|word| table.release(lease, word).ended());
        let held = ended.is_some();
        self.retire(&mut table, ended);
        held
    }

    /// Undoes a grant that nobody was told of: the caller keeps the blocks. False when the lease is
    /// over already and its blocks have been sent.
    pub(crate) fn take_back(&self, lease: LeaseId) -> bool {
        let mut table = self.table.lock();
        let ended = table.revoke(lease);
        let held = ended.is_some();
        if let Some(ended) = ended {
            // The word is advanced all the same; the blocks are not sent.
            let _ = table.retire(ended, self.words.as_ref());
        }
        self.gauge(&table);
        held
    }

    pub(crate) fn revoke(&self, lease: LeaseId) -> bool {
        let mut table = self.table.lock();
        let ended = table.revoke(lease);
        let held = ended.is_some();
        self.retire(&mut table, ended);
        held
    }

    /// Ends the oldest leases until at least `blocks` blocks are given back; returns how many.
    pub(crate) fn revoke_until(&self, blocks: u64) -> u64 {
        let mut given = 0_u64;
        while given < blocks {
            let mut table = self.table.lock();
            // A few leases at a time: each holds one block at least.
            let want = blocks.saturating_sub(given).min(AT_ONCE as u64);
            let ended = table.revoke_until(want);
            if ended.is_empty() {
                break;
            }
            let count: u64 = ended.iter().map(|lease| lease.block_count() as u64).sum();
            given = given.saturating_add(count);
            self.retire(&mut table, ended);
            MutexGuard::unlock_fair(table);
        }
        given
    }

    /// Ends all leases. How many there were.
    pub(crate) fn revoke_all(&self) -> usize {
        let mut table = self.table.lock();
        let ended = table.revoke_all();
        let count = ended.len();
        self.retire(&mut table, ended);
        count
    }

    /// One round of the thread: takes what readers have said, and ends what is over. How much was
    /// said, and when the next lease is over.
    pub(crate) fn round(
        &self,
        agent: &mut impl Agent,
        inbox: &mut Vec<(AgentName, Vec<u8>)>,
        now: MonoTime,
    ) -> (usize, Option<MonoTime>) {
        let taken = self.take_notices(agent, inbox);
        (taken, self.expire(now))
    }

    fn expire(&self, now: MonoTime) -> Option<MonoTime> {
        loop {
            let mut table = self.table.lock();
            let ended = table.expire_some(now, AT_ONCE);
            let all = ended.len() < AT_ONCE;
            self.retire(&mut table, ended);
            if all {
                return table.next_deadline();
            }
            MutexGuard::unlock_fair(table);
        }
    }

    /// Advances each ended lease's word, then gives its blocks back.
    fn retire(&self, table: &mut LeaseTable, ended: impl IntoIterator<Item = EndedLease>) {
        for lease in ended {
            match table.retire(lease, self.words.as_ref()) {
                Ok(freed) => {
                    tracing::debug!(
                        lease = %freed.lease, request = %freed.request, reason = freed.reason.as_str(),
                        blocks = freed.blocks.len(), "lease ended"
                    );
                    let _ = self.freed.send(freed);
                }
                Err(failed) => {
                    // Its word could not be advanced, so its blocks are never given back.
                    if let Some(failures) = UNRETIRED.line() {
                        tracing::error!(error = %failed.error, failures, "a lease could not be retired, its blocks are lost");
                    }
                }
            }
        }
        self.gauge(table);
    }

    fn gauge(&self, table: &LeaseTable) {
        self.stats
            .leases
            .store(table.len() as u64, Ordering::Relaxed);
        self.stats
            .leased_blocks
            .store(table.blocks(), Ordering::Relaxed);
    }

    fn on_notice(&self, notice: Notice) {
        match notice {
            Notice::Release {
                incarnation,
                lease,
                word,
            } => {
                if incarnation == self.incarnation {
                    self.release(lease, word);
                } else {
                    tracing::debug!(%incarnation, "a release for an earlier life was ignored");
                }
            }
            Notice::RequestDone { request, ranks } => {
                let mut table = self.table.lock();
                let ended = table.release_request(&request, ranks).ended();
                self.retire(&mut table, ended);
            }
            Notice::Heartbeat { requests } => {
                let now = self.clock.now();
                let mut table = self.table.lock();
                for request in requests {
                    table.renew_request(now, &request, HEARTBEAT_EXTENSION);
                }
            }
        }
    }

    /// Takes what readers have said; returns how much it was.
    fn take_notices(&self, agent: &mut impl Agent, inbox: &mut Vec<(AgentName, Vec<u8>)>) -> usize {
        inbox.clear();
        if let Err(error) = agent.notifications(inbox)
            && let Some(failures) = UNTAKEN.line()
        {
            tracing::warn!(%error, failures, "notices could not be taken");
        }
        let count = inbox.len();
        for (sender, message) in inbox.drain(..) {
            self.stats.notices.fetch_add(1, Ordering::Relaxed);
            match Notice::decode(&message, self.key.as_ref()) {
                Ok(notice) => self.on_notice(notice),
                Err(error) => {
                    self.stats.notices_malformed.fetch_add(1, Ordering::Relaxed);
                    tracing::debug!(%sender, %error, "a notice was not understood");
                }
            }
        }
        count
    }
}

/// The thread that serves. Ends when its handle is dropped or stopped.
#[derive(Debug)]
pub(crate) struct HolderThread {
    holder: Arc<Holder>,
    thread: Option<JoinHandle<()>>,
}

impl HolderThread {
    /// None yet.
    pub(crate) fn none(holder: Arc<Holder>) -> Self {
        let thread = None;
        Self { holder, thread }
    }

    /// Starts the thread, which owns the serving agent from now on.
    pub(crate) fn start<A: Agent>(
        &mut self,
        agent: A,
        config: &HolderConfig,
        nudged: Receiver<()>,
        pool: &Arc<KvPool>,
    ) -> std::io::Result<()> {
        let poll = config.poll_interval;
        let serving = Arc::clone(&self.holder);
        let thread = std::thread::Builder::new().name("kvx-holder".into());
        let run = move || serve(&serving, agent, poll, &nudged);
        self.thread = Some(thread.spawn(bound(pool, run))?);
        Ok(())
    }

    /// Ends the thread and, with it, the serving agent: nobody can read from here any more. Should
    /// the thread hang until `end`, its leases are ended at least.
    pub(crate) fn stop(&mut self, end: Instant) {
        self.holder.stopping.store(true, Ordering::Release);
        let _ = self.holder.nudge.try_send(());
        if let Some(thread) = self.thread.take() {
            join_by(thread, end);
            self.holder.revoke_all();
        }
    }
}

impl Drop for HolderThread {
    fn drop(&mut self) {
        self.stop(until(STOP_LIMIT));
    }
}

fn serve<A: Agent>(holder: &Holder, mut agent: A, poll: Duration, nudged: &Receiver<()>) {
    let mut inbox = Vec::new();
    let mut busy = holder.clock.now();
    while !holder.stopping.load(Ordering::Acquire) {
        let now = holder.clock.now();
        let (taken, next) = holder.round(&mut agent, &mut inbox, now);
        if taken > 0 {
            busy = now;
        }
        let poll = if now.saturating_since(busy) < BUSY_FOR {
            poll
        } else {
            poll.saturating_mul(10)
        };
        let nap = match next {
            Some(deadline) => poll.min(deadline.saturating_since(now)),
            None => IDLE_POLL,
        };
        if nudged
            .recv_timeout(nap.max(Duration::from_micros(50)))
            .is_ok()
        {
            busy = holder.clock.now();
        }
    }
    if holder.revoke_all() > 0 {
        std::thread::sleep(LINGER);
    }
    drop(agent);
}

#[cfg(test)]
mod tests {
    use crossbeam::channel::{bounded, unbounded};

    use super::*;
    use crate::clock::ManualClock;
    use crate::ids::{BlockId, RequestId};
    use crate::lease::LeaseConfig;
    use crate::memory::HostWords;

    #[test]
    fn a_release_for_an_earlier_life_is_ignored() {
        // The predecessor had drawn the same words: its first lease has the name and the word of ours.
        let table = LeaseTable::new(LeaseConfig::new(4, 7)).unwrap();
        let words = Arc::new(HostWords::new(4).unwrap());
        table.publish_words(words.as_ref()).unwrap();
        let (freed, blocks) = unbounded();
        let holder = Holder::new(
            table,
            words,
            Arc::new(ManualClock::default()),
            Incarnation(2),
            freed,
            bounded(1).0,
            Arc::default(),
        );
        let new = NewLease {
            request: RequestId::new("r").unwrap(),
            blocks: vec![BlockId(0)],
            ttl: None,
        };
        let grant = holder.grant(new).unwrap();
        let release = |life| Notice::Release {
            incarnation: Incarnation(life),
            lease: grant.lease,
            word: grant.word,
        };
        holder.on_notice(release(1));
        assert!(blocks.try_recv().is_err());
        holder.on_notice(release(2));
        assert_eq!(blocks.try_recv().unwrap().lease, grant.lease);
    }
}

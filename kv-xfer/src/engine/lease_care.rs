//! What readers ask of holders about leases, over the side channel.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossbeam::channel::{Receiver, RecvTimeoutError};

use super::connect::{CardSource, ConnectError};
use super::driver::{LeaseJob, LeaseWish};
use crate::clock::{Clock, MonoTime};
use crate::peer::PeerKey;

/// Time for one release over the side channel.
const RELEASE_LIMIT: Duration = Duration::from_secs(1);
/// For how long a holder that did not answer is not asked again, so that it does not hold up others.
const SILENT_FOR: Duration = Duration::from_secs(5);
/// Releases that are kept for holders that did not answer.
const MOST_LATE: usize = 1024;

/// A release that waits until its holder is asked again.
struct Late {
    due: MonoTime,
    job: LeaseJob,
}

/// Releases and renews leases over the side channel, one after the other. A holder that did not answer a release is asked
/// once more when it may be back: it would keep the blocks for minutes otherwise. If it does not answer then either, it is
/// left to end the lease by its time.
pub(super) struct LeaseCare {
    cards: Arc<dyn CardSource>,
    clock: Arc<dyn Clock>,
    stopping: Arc<AtomicBool>,
    /// Peers that did not answer lately, and until when they are not asked.
    silent: HashMap<PeerKey, MonoTime>,
    late: Vec<Late>,
}

impl LeaseCare {
    pub(super) fn new(
        cards: Arc<dyn CardSource>,
        clock: Arc<dyn Clock>,
        stopping: Arc<AtomicBool>,
    ) -> Self {
        Self {
            cards,
            clock,
            stopping,
            silent: HashMap::new(),
            late: Vec::new(),
        }
    }

    /// Until nobody can have a wish any more, or the engine stops.
    pub(super) fn run(mut self, jobs: &Receiver<LeaseJob>) {
        loop {
            let due = self.late.iter().map(|late| late.due).min();
            let job = match due {
                None => jobs.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(due) => jobs.recv_timeout(due.saturating_since(self.clock.now())),
            };
            if self.stopping.load(Ordering::Acquire) {
                break;
            }
            match job {
                Ok(job) => self.care_for(job),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            self.care_for_late();
        }
    }

    /// Asks a holder, or puts it off if it has not answered lately.
    pub(super) fn care_for(&mut self, job: LeaseJob) {
        match self.silent_until(&job.peer) {
            Some(until) => self.put_off(job, until),
            None => {
                if let Err((job, until)) = self.try_asking(job) {
                    self.put_off(job, until);
                }
            }
        }
    }

    /// Asks again about one lease whose holder did not answer in time; false if it is not time for any.
    pub(super) fn care_for_late(&mut self) -> bool {
        let now = self.clock.now();
        let Some(at) = self.late.iter().position(|late| late.due <= now) else {
            return false;
        };
        let Late { job, .. } = self.late.remove(at);
        if self.silent_until(&job.peer).is_none() {
            let _ = self.try_asking(job);
        }
        true
    }

    /// Until when a holder is not asked.
    fn silent_until(&mut self, peer: &PeerKey) -> Option<MonoTime> {
        let now = self.clock.now();
        self.silent.retain(|_, until| *until > now);
        self.silent.get(peer).copied()
    }

    fn put_off(&mut self, job: LeaseJob, due: MonoTime) {
        // Who wants a lease renewed asks again.
        if matches!(job.wish, LeaseWish::Release) && self.late.len() < MOST_LATE {
            self.late.push(Late { due, job });
        }
    }

    /// Gives the job back, with the time until which its holder is not asked, if that did not answer.
    fn try_asking(&mut self, job: LeaseJob) -> Result<(), (LeaseJob, MonoTime)> {
        self.ask(&job, self.clock.now()).map_err(|error| {
            tracing::debug!(%error, lease = %job.lease.id, wish = ?job.wish, "a holder was not reached");
            let until = self.clock.now() + SILENT_FOR;
            self.silent.insert(job.peer.clone(), until);
            (job, until)
        })
    }

    fn ask(&self, job: &LeaseJob, now: MonoTime) -> Result<(), ConnectError> {
        let (addr, life, lease) = (&job.peer.addr, job.incarnation, job.lease);
        match &job.wish {
            LeaseWish::Release => self.cards.release(addr, life, lease, RELEASE_LIMIT),
            LeaseWish::Renew {
                extension,
                told_end,
            } => {
                let left = self
                    .cards
                    .renew(addr, life, lease, *extension, RELEASE_LIMIT)?;
                // Counted from when it was asked: rather too early than too late.
                *told_end.lock() = Some(left.map_or(MonoTime::ZERO, |left| now + left));
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests;

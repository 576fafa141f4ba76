//! What readers ask of holders about leases, over the side channel.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossbeam::channel::Receiver;

use super::connect::{CardSource, ConnectError};
use super::driver::{LeaseJob, LeaseWish};
use crate::clock::{Clock, MonoTime};
use crate::peer::PeerKey;

/// Time for one release over the side channel. A holder that does not answer by then is left to end
/// the lease by its time.
const RELEASE_LIMIT: Duration = Duration::from_secs(1);
/// For how long a holder that did not answer is not asked again, so that it does not hold up others.
const SILENT_FOR: Duration = Duration::from_secs(5);

/// Releases and renews leases over the side channel, one after the other.
pub(super) struct LeaseCare {
    cards: Arc<dyn CardSource>,
    clock: Arc<dyn Clock>,
    stopping: Arc<AtomicBool>,
    /// Peers that did not answer lately, and until when they are not asked.
    silent: HashMap<PeerKey, MonoTime>,
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
        }
    }

    /// Until nobody can have a wish any more, or the engine stops.
    pub(super) fn run(mut self, jobs: &Receiver<LeaseJob>) {
        for job in jobs {
            if self.stopping.load(Ordering::Acquire) {
                break;
            }
            self.care_for(job);
        }
    }

    /// Asks a holder, unless it has not answered lately.
    pub(super) fn care_for(&mut self, job: LeaseJob) {
        let now = self.clock.now();
        self.silent.retain(|_, until| *until > now);
        if self.silent.contains_key(&job.peer) {
            return;
        }
        if let Err(error) = self.ask(&job, now) {
            tracing::debug!(%error, lease = %job.lease.id, wish = ?job.wish, "a holder was not reached");
            self.silent.insert(job.peer, self.clock.now() + SILENT_FOR);
        }
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

//! How reads end, how peers are parted from, and how holders hear of it.
#![forbid(unsafe_code)]

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Driver, Fencing, LeaseJob, ReturnedBlocks};
use crate::clock::MonoTime;
use crate::engine::error::ReadError;
use crate::engine::handle::{FailedBlocks, Landed, ReadFailure, ReadId, ReadOutcome, ReadShared};
use crate::engine::job::{ReadJob, ReleasePolicy};
use crate::engine::link::Width;
use crate::engine::notice::Notice;
use crate::engine::read::ActiveRead;
use crate::engine::workers::Teardown;
use crate::peer::PeerKey;
use crate::transport::{Agent, Transport, TransportError};

/// A link that was used within this may have a notice that has not left yet.
const RECENTLY: Duration = Duration::from_secs(1);

impl<T: Transport> Driver<T> {
    /// Tells a read's handle of a failure while bytes may still land. The blocks stay.
    pub(super) fn tell(&mut self, place: usize, error: ReadError, now: MonoTime) {
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
            let release = LeaseJob::release(&read.job);
            self.release(release, now);
        }
    }

    /// Ends a read of which nothing is in flight, and frees its place.
    pub(super) fn end(&mut self, place: usize, verdict: Result<(), ReadError>, now: MonoTime) {
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
        let release = LeaseJob::release(&job);
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
                let carrier = report.fabric.as_ref().and_then(|fabric| fabric.carrier);
                self.stats.count_bytes(report.bytes, carrier);
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
    pub(super) fn end_unstarted(&mut self, job: ReadJob, error: ReadError, now: MonoTime) {
        self.stats.queued.fetch_sub(1, Ordering::Relaxed);
        self.stats.count_failure(&error);
        let release = LeaseJob::release(&job);
        let ReadJob {
            id,
            shared,
            blocks,
            release: policy,
            ..
        } = job;
        let wanted =
            policy == ReleasePolicy::Always && !matches!(error, ReadError::LeaseLost { .. });
        let blocks = FailedBlocks::Returned(blocks);
        self.deliver(id, &shared, Err(ReadFailure { error, blocks }));
        if wanted {
            self.release(release, now);
        }
    }

    /// Hands the outcome over; blocks that nobody waits for go to the returned channel.
    pub(super) fn deliver(&self, read: ReadId, shared: &ReadShared, outcome: ReadOutcome) {
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
    pub(super) fn part(
        &mut self,
        peer: &PeerKey,
        culprit: Option<usize>,
        why: &ReadError,
        now: MonoTime,
    ) {
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
        self.forget_turns(link.id);
        let helpers = match link.width {
            Width::Wide(agents) => agents,
            // Agents that are being made are destroyed when they come.
            Width::Narrow | Width::Widening => 0,
        };
        let fence = self.new_fence(fenced, helpers.saturating_add(1));
        self.detach(link.id, helpers, fence);
        let flush = now.saturating_since(link.used) < RECENTLY;
        self.tear_down(Teardown {
            flush,
            fence,
            agent: link.agent,
            requests,
        });
    }

    /// Has an agent destroyed, off this thread.
    pub(super) fn tear_down(&mut self, teardown: Teardown<T::Agent>) {
        if let Err(refused) = self.channels.teardowns.send(teardown) {
            // The fencing thread is gone: destroy the agent here, late rather than never.
            let Teardown { fence, agent, .. } = refused.into_inner();
            let fenced = agent.destroy();
            self.on_fenced(fence, fenced);
        }
    }

    /// An agent of a parted link has been destroyed. With the last of them, what was in doubt is
    /// nobody's. If one could not be destroyed, the blocks and places, whose words are destinations
    /// too, are never used again.
    pub(super) fn on_fenced(&mut self, fence: u64, fenced: Result<(), TransportError>) {
        let Some(fencing) = self.fencing.get_mut(&fence) else {
            return;
        };
        fencing.agents = fencing.agents.saturating_sub(1);
        if let Err(error) = &fenced {
            fencing.failed = true;
            let reads = fencing.reads.len();
            tracing::error!(%error, reads, "an agent could not be destroyed, its reads' blocks are lost");
        }
        if fencing.agents > 0 {
            return;
        }
        let Fencing { reads, failed, .. } = self.fencing.remove(&fence).unwrap_or_default();
        for (place, read, blocks) in reads {
            if failed {
                std::mem::forget(blocks);
                continue;
            }
            self.stats
                .quarantined
                .fetch_sub(blocks.len() as u64, Ordering::Relaxed);
            let _ = self.channels.returned.send(ReturnedBlocks { read, blocks });
            self.free.push(place);
        }
    }

    /// Tells a holder that a lease is needed no longer.
    pub(super) fn release(&mut self, job: LeaseJob, now: MonoTime) {
        self.stats.releases.fetch_add(1, Ordering::Relaxed);
        if let Some(link) = self.links.get_mut(&job.peer)
            && link.incarnation == job.incarnation
        {
            let LeaseJob {
                incarnation, lease, ..
            } = job;
            let notice = Notice::Release {
                incarnation,
                lease: lease.id,
                word: lease.word,
            };
            let notice = notice.encode(self.key.as_ref());
            match link.agent.notify(&link.peer, &notice) {
                Ok(()) => {
                    link.used = now;
                    link.tended = now;
                    return;
                }
                Err(error) => {
                    let (peer, id, engine) = (&job.peer, link.id, link.engine.clone());
                    tracing::debug!(%peer, %error, "release by notice failed, using the side channel");
                    // The next read would find the connection broken: it is made anew for it.
                    if error.breaks_link() && !self.uses_link(id) {
                        self.part(peer, None, &ReadError::Fenced { engine }, now);
                    }
                }
            }
        }
        if self.stopping.is_none() {
            let _ = self.channels.wishes.try_send(job);
        }
    }
}

impl<T: Transport> Drop for Driver<T> {
    fn drop(&mut self) {
        // Whoever still waits is told, also when this thread unwinds.
        let jobs: Vec<ReadJob> = self.backlog.drain(..).map(|job| *job).collect();
        let active: Vec<(Option<u64>, bool, ReadJob)> = self
            .reads
            .iter_mut()
            .filter_map(Option::take)
            .map(|read| (read.link, read.told.is_some(), read.job))
            .collect();
        let error = if self.stopping.is_some() {
            ReadError::ShuttingDown
        } else {
            ReadError::DriverGone
        };
        // The agents go first: only then are the blocks nobody's. Those in lanes are destroyed when
        // the lanes end, for which nobody waits here.
        let undead: Vec<u64> = std::mem::take(&mut self.links)
            .into_values()
            .filter_map(|link| {
                let alone = matches!(link.width, Width::Narrow | Width::Widening | Width::Wide(0));
                let destroyed = link.agent.destroy().is_ok();
                (!alone || !destroyed).then_some(link.id)
            })
            .collect();
        let mut safe = Vec::with_capacity(active.len());
        for (link, told, job) in active {
            if link.is_some_and(|link| undead.contains(&link)) {
                let blocks = job.blocks.len();
                if !told {
                    self.stats
                        .quarantined
                        .fetch_add(blocks as u64, Ordering::Relaxed);
                }
                let _ = job.shared.finish(Err(ReadFailure {
                    error: error.clone(),
                    blocks: FailedBlocks::Quarantined { blocks },
                }));
                std::mem::forget(job.blocks);
            } else {
                safe.push(job);
            }
        }
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
            .filter_map(|submitted| submitted.into_job().map(|job| *job))
            .collect::<Vec<_>>();
        for job in jobs.into_iter().chain(safe).chain(unseen) {
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

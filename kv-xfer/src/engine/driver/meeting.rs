//! Meeting the peers that reads want, and keeping the links to them.
#![forbid(unsafe_code)]

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Driver, MAX_TROUBLES};
use crate::clock::MonoTime;
use crate::engine::connect::{ConnectError, Errand, Met};
use crate::engine::error::ReadError;
use crate::engine::link::Link;
use crate::engine::read::Env;
use crate::engine::workers::Teardown;
use crate::peer::{CardOutcome, Expired, MeetNext, PeerError, PeerKey, PeerState, Want};
use crate::telemetry::Storm;
use crate::transport::{Agent, Transport};

/// How often links are looked at for one that is to be tended.
const TEND_PAUSE: Duration = Duration::from_micros(200);

static UNMET: Storm = Storm::new();

impl<T: Transport> Driver<T> {
    pub(super) fn on_met(
        &mut self,
        peer: &PeerKey,
        attempt: u64,
        result: Result<Met<T::Agent>, ConnectError>,
        now: MonoTime,
    ) {
        match result {
            Ok(Met::Link(link)) => {
                let life = Some(link.incarnation);
                let outcome = self.peers.on_card(peer, attempt, &link.engine, life, now);
                if self.stopping.is_some() || outcome == CardOutcome::Stale {
                    let fence = self.new_fence(Vec::new(), 1);
                    self.tear_down(Teardown {
                        fence,
                        agent: link.agent,
                        requests: Vec::new(),
                        flush: false,
                    });
                    self.start_waiting(peer, now);
                    return;
                }
                self.troubles.remove(peer);
                if let Some(old) = self.links.get(peer) {
                    let error = ReadError::PeerRestarted {
                        engine: old.engine.clone(),
                        expected: old.incarnation,
                        found: link.incarnation,
                    };
                    self.part(peer, None, &error, now);
                }
                self.make_room(now);
                self.stats.meetings.fetch_add(1, Ordering::Relaxed);
                self.links.insert(peer.clone(), *link);
            }
            Ok(Met::Unchanged {
                engine,
                incarnation,
            }) => {
                self.peers
                    .on_card(peer, attempt, &engine, Some(incarnation), now);
                self.troubles.remove(peer);
            }
            Err(cause) => {
                self.stats.meetings_failed.fetch_add(1, Ordering::Relaxed);
                let text = cause.to_string();
                // The same of the same peer is no news.
                let known = self.troubles.get(peer).is_some_and(|last| *last == text);
                match UNMET.line().filter(|_| !known) {
                    Some(failures) => {
                        tracing::warn!(%peer, error = %cause, failures, "a peer could not be met");
                    }
                    None => tracing::debug!(%peer, error = %cause, "a peer could not be met"),
                }
                let current = self.peers.on_failure(peer, attempt, now).is_some();
                if self.troubles.len() > MAX_TROUBLES {
                    self.troubles.clear();
                }
                self.troubles.insert(peer.clone(), text);
                if !current {
                    // Who waits now waits for a later attempt.
                    return;
                }
                for place in self.take_waiting(peer) {
                    let Some(engine) = self.read(place).map(|r| r.job.engine.clone()) else {
                        continue;
                    };
                    let cause = cause.clone();
                    self.end(place, Err(ReadError::Connect { engine, cause }), now);
                }
                return;
            }
        }
        self.start_waiting(peer, now);
    }

    /// Lets the reads that wait for a peer use it, or wait for it anew.
    fn start_waiting(&mut self, peer: &PeerKey, now: MonoTime) {
        for place in self.take_waiting(peer) {
            self.start(place, now);
        }
    }

    /// The places of the reads that still wait for a peer.
    pub(super) fn take_waiting(&mut self, peer: &PeerKey) -> Vec<usize> {
        let mut waiting = self.waiting.remove(peer).unwrap_or_default();
        // A read that ended meanwhile has left its place to another.
        waiting.retain(|(place, id)| self.read(*place).is_some_and(|read| read.job.id == *id));
        waiting.into_iter().map(|(place, _)| place).collect()
    }

    /// Starts a read over the peer's link, or has the peer met first.
    pub(super) fn start(&mut self, place: usize, now: MonoTime) {
        let Some(read) = self.reads.get_mut(place).and_then(Option::as_mut) else {
            return;
        };
        let job = &read.job;
        let (peer, engine, id) = (job.peer.clone(), job.engine.clone(), job.id);
        if let Some(link) = self.links.get_mut(&peer) {
            // A link of the wanted life is right whatever else is being found out about the peer.
            let life = if link.incarnation == job.incarnation {
                Ok(())
            } else {
                self.peers
                    .check_incarnation(&peer, job.incarnation, job.submitted, now)
            };
            match life {
                Ok(()) => {
                    link.used = now;
                    let env = Env {
                        config: &self.config,
                        clock: self.clock.as_ref(),
                        landing: self.landing.as_ref(),
                        memory: self.pool.memory().as_ref(),
                        local_blocks: self.pool.block_count(),
                        batch: &mut self.batch,
                    };
                    match read.start(link, &env) {
                        Ok(()) => self.begin(place),
                        Err(error) => self.end(place, Err(error), now),
                    }
                    return;
                }
                Err(PeerError::PeerRestarted {
                    next: MeetNext::Recompute,
                    ..
                }) => {
                    let error = if link.engine == engine {
                        let (expected, found) = (job.incarnation, link.incarnation);
                        ReadError::PeerRestarted {
                            engine,
                            expected,
                            found,
                        }
                    } else {
                        let found = link.engine.clone();
                        let cause = ConnectError::OtherEngine { found };
                        ReadError::Connect { engine, cause }
                    };
                    self.end(place, Err(error), now);
                    return;
                }
                // The card may be the old one: the peer is asked again, below.
                Err(_) => {}
            }
        }
        let cause = match self.peers.want(&peer, now) {
            Ok(Want::Connect { attempt, deadline }) => {
                self.waiting
                    .entry(peer.clone())
                    .or_default()
                    .push((place, id));
                self.meet(&peer, attempt, deadline);
                return;
            }
            Ok(Want::Connecting { .. }) => {
                self.waiting.entry(peer).or_default().push((place, id));
                return;
            }
            Ok(Want::BackedOff { until }) => ConnectError::BackingOff {
                wait: until.saturating_since(now),
                last: self.troubles.get(&peer).cloned().unwrap_or_default(),
            },
            Ok(Want::Use { .. }) => {
                // The table has the card but the link is gone: it is met afresh.
                self.peers.forget(&peer);
                if let Ok(Want::Connect { attempt, deadline }) = self.peers.want(&peer, now) {
                    self.waiting
                        .entry(peer.clone())
                        .or_default()
                        .push((place, id));
                    self.meet(&peer, attempt, deadline);
                    return;
                }
                ConnectError::Refused("the peer table is inconsistent".into())
            }
            Err(error) => ConnectError::Refused(error.to_string()),
        };
        self.end(place, Err(ReadError::Connect { engine, cause }), now);
    }

    /// Sends for a peer's card.
    pub(super) fn meet(&mut self, peer: &PeerKey, attempt: u64, until: MonoTime) {
        let lane = if self.troubles.contains_key(peer) {
            &self.channels.retries
        } else {
            &self.channels.errands
        };
        let _ = lane.send(Errand::Meet {
            peer: peer.clone(),
            attempt,
            known: self.links.get(peer).map(|link| link.incarnation),
            until,
        });
    }

    /// Ends the reads that wait for a meeting which took too long.
    pub(super) fn give_up_meetings(&mut self, now: MonoTime) -> bool {
        if self.peers.next_timeout().is_none_or(|at| at > now) {
            return false;
        }
        for expired in self.peers.expire(now) {
            let Expired::Attempt { peer, .. } = expired else {
                continue;
            };
            for place in self.take_waiting(&peer) {
                let Some(engine) = self.read(place).map(|r| r.job.engine.clone()) else {
                    continue;
                };
                let cause = ConnectError::TookTooLong {
                    limit: self.config.connect_timeout,
                };
                self.end(place, Err(ReadError::Connect { engine, cause }), now);
            }
        }
        true
    }

    /// Makes room for one more link: the longest idle one goes.
    pub(super) fn make_room(&mut self, now: MonoTime) {
        if self.links.len() < self.config.max_peers {
            return;
        }
        let oldest = self
            .links
            .values()
            .filter(|link| !self.uses_link(link.id))
            .min_by_key(|link| link.used)
            .map(|link| link.id);
        if let Some(id) = oldest {
            self.part_idle(id, now);
        }
    }

    /// Parts from a peer that no read uses; it is met again when one wants it.
    pub(super) fn part_idle(&mut self, id: u64, now: MonoTime) {
        let found = self.links.iter().find(|(_, link)| link.id == id);
        if let Some((peer, engine)) = found.map(|(peer, link)| (peer.clone(), link.engine.clone()))
        {
            self.part(&peer, None, &ReadError::Fenced { engine }, now);
            // Reads may wait for another life of it, which is being met.
            if !matches!(self.peers.state(&peer), Some(PeerState::Connecting { .. })) {
                self.peers.forget(&peer);
            }
        }
    }

    pub(super) fn uses_link(&self, id: u64) -> bool {
        self.order
            .iter()
            .any(|place| self.read(*place).is_some_and(|r| r.link == Some(id)))
    }

    /// Lets sent notices leave, and parts from peers that have been idle for long: one link at a time,
    /// so that no read waits for all of them.
    pub(super) fn tend_links(&mut self, now: MonoTime) {
        if self.tend_next > now {
            return;
        }
        let mut idle = None;
        let mut due: Option<&mut Link<T::Agent>> = None;
        let mut next = now + TEND_PAUSE;
        for link in self.links.values_mut() {
            if link.used + self.config.idle_peer <= now {
                idle = Some(link.id);
            }
            let at = link.tend_at();
            if at > now {
                continue;
            }
            if due.is_some() {
                next = now;
            }
            if due.as_ref().is_none_or(|other| at < other.tend_at()) {
                due = Some(link);
            }
        }
        if let Some(link) = due {
            // A reader is sent no messages; taking them is what lets the agent progress.
            let _ = link.agent.notifications(&mut Vec::new());
            link.tended = now;
        }
        self.tend_next = next;
        if let Some(id) = idle
            && !self.uses_link(id)
        {
            self.part_idle(id, now);
        }
    }
}

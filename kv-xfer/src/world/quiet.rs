//! How a history ends: no more trouble, and everything must come to its end.

use std::time::Duration;

use super::content;
use super::fabric::{End, FabricFaults};
use super::life::Owner;
use super::net::NetFaults;
use super::record::{Accepted, ReadState};
use super::{Rule, Troubles, World};
use crate::engine::{Errands, ReleasePolicy};

/// By then every read has ended and every quarantine is over: the longest read, a fence, a meeting.
const SETTLED: Duration = Duration::from_secs(6);
/// By then a peer that is alive has been read from: pauses between meetings are two seconds at most.
const REACHED: Duration = Duration::from_secs(8);
/// Readers that try whether others can be read from.
const PROBES: usize = 2;
const SHUTDOWN: Duration = Duration::from_secs(5);
/// Rounds without end are a hang of their own kind.
const ROUNDS: u32 = 4000;

impl World {
    pub(super) fn end_well(&mut self) {
        self.calm_down();
        if !self.settle(SETTLED, Self::is_settled) {
            self.name_unsettled();
        }
        self.probe_all();
        self.end_all();
        self.nothing_believed();
    }

    pub(super) fn calm_down(&mut self) {
        self.calm = true;
        self.troubles = Troubles::default();
        self.net.set_faults(NetFaults::default());
        self.fabric.state().faults = FabricFaults::default();
        self.note(40, 0, 0, || "no more trouble".into());
        // Outcomes that nobody has looked at are looked at now.
        for no in self.living() {
            self.look_after(no);
        }
    }

    fn living(&self) -> impl Iterator<Item = usize> + use<> {
        let living: Vec<usize> = self.lives.iter().flatten().map(|life| life.no).collect();
        living.into_iter()
    }

    /// Lets everybody work until `done`; false when that takes longer than `limit`.
    pub(super) fn settle(&mut self, limit: Duration, done: fn(&Self) -> bool) -> bool {
        let until = self.time.now().saturating_add(super::dice::nanos(limit));
        for _ in 0..ROUNDS {
            let worked = self.round();
            if !self.violations.is_empty() || done(self) {
                return true;
            }
            if !worked {
                if self.time.now() > until {
                    return false;
                }
                let by = self.time_to_next();
                self.time.pass(by);
            }
        }
        false
    }

    /// One round of everybody; whether anything happened.
    pub(super) fn round(&mut self) -> bool {
        let mut worked = self.fly_all();
        for no in self.living() {
            worked |= self.drive(no);
            worked |= self.lane(no);
            worked |= self.meet(no, Errands::First);
            worked |= self.meet(no, Errands::Retries);
            worked |= self.tear_down(no);
            worked |= self.care(no);
            worked |= self.hold(no);
            worked |= self.tell(no, false);
        }
        while !self.fabric.state().letters.is_empty() {
            self.deliver(0, false, false, false);
            worked = true;
        }
        worked
    }

    /// Lands all that can land.
    pub(super) fn fly_all(&mut self) -> bool {
        let mut worked = false;
        let mut state = self.fabric.state();
        for at in 0..state.flights.len() {
            let Some(flight) = state.flights.get(at) else {
                break;
            };
            let quiet = matches!(flight.end, End::Failed(..) | End::Done);
            if flight.hangs || quiet {
                continue;
            }
            for piece in 0..flight.descriptors.len() {
                worked |= state.fetch(at, piece);
                worked |= state.arrive(at, piece);
            }
        }
        drop(state);
        if worked {
            self.note(41, 0, 0, || "all windows land".into());
            self.look_at_fabric();
        }
        worked
    }

    fn is_settled(&self) -> bool {
        self.lives.iter().flatten().all(|life| {
            let reads = life.open.iter().filter_map(|read| self.reads.get(*read));
            let ended = reads
                .filter(|read| !(life.may_lose && read.state == ReadState::Quarantined))
                .filter(|read| !(life.may_lose && read.dropped))
                .count()
                == 0;
            let stopped = !life.stopping || !life.stepped.is_driven();
            ended && stopped && life.pending.is_empty()
        })
    }

    fn name_unsettled(&mut self) {
        let mut what = String::new();
        for life in self.lives.iter().flatten() {
            let reads = life.open.iter().filter_map(|read| self.reads.get(*read));
            let reads: Vec<_> = reads.map(|read| (read.id, read.state)).collect();
            what += &format!(
                "life {}: reads {reads:?}, {} results awaited, driven {}; ",
                life.no,
                life.pending.len(),
                life.stepped.is_driven()
            );
        }
        self.blame(Rule::NoEnd, || {
            format!("after trouble has ended, something has not: {what}")
        });
    }

    /// Everybody can be read from, whoever is dead.
    fn probe_all(&mut self) {
        for life in self.lives.iter_mut().flatten() {
            for owner in &mut life.owners {
                if *owner == Owner::Model {
                    *owner = Owner::Free;
                }
            }
        }
        for lease in 0..self.leases.len() {
            if self.leases.get(lease).is_some_and(|lease| !lease.freed) {
                self.revoke(lease);
            }
        }
        let readers: Vec<usize> = self.living().collect();
        let skip = self.dice.below(readers.len());
        for reader in readers.into_iter().cycle().skip(skip).take(PROBES) {
            let holders: Vec<usize> = self
                .living()
                .filter(|holder| *holder != reader && self.can_serve(*holder))
                .filter(|holder| self.fabric.state().connected(reader, *holder))
                .collect();
            let Some(holder) = self.dice.pick(&holders).copied() else {
                continue;
            };
            // Who has lost places for reads for ever may have none left.
            if self.can_serve(reader) && !self.has_lost(reader) && self.violations.is_empty() {
                self.probe(reader, holder);
            }
        }
    }

    fn has_lost(&self, no: usize) -> bool {
        let life = self.lives.get(no).and_then(Option::as_ref);
        life.is_some_and(|life| life.may_lose)
    }

    fn can_serve(&self, no: usize) -> bool {
        let life = self.lives.get(no).and_then(Option::as_ref);
        life.is_some_and(|life| {
            !life.stopping && life.stepped.is_driven() && life.owners.contains(&Owner::Free)
        })
    }

    /// Reads one block until it lands.
    fn probe(&mut self, reader: usize, holder: usize) {
        let until = self.time.now().saturating_add(super::dice::nanos(REACHED));
        let hashes = content::prompt(0, 0);
        loop {
            let Some(lease) = self.lease(holder, 0, 0, 1, Vec::new(), None) else {
                return self.blame(Rule::HeldUp, || format!("life {holder} cannot lease"));
            };
            let Some(remote) = self.descriptors.last().map(|last| last.remote.clone()) else {
                return;
            };
            let Some(life) = self.life(reader) else {
                return;
            };
            let tenant = Some("tenant");
            let offer =
                life.stepped
                    .engine
                    .accept(&remote, tenant, content::NAMES.first().copied());
            let Ok(offer) = offer else {
                return self.blame(Rule::OtherTokens, || "a good descriptor was refused".into());
            };
            let accepted = Accepted { offer, lease };
            let limit = super::app::LONGEST_READ;
            let landed = self.tally.landed;
            let policy = ReleasePolicy::Always;
            if self
                .read(reader, &accepted, hashes, 0..1, limit, policy)
                .is_none()
            {
                return self.blame(Rule::HeldUp, || format!("life {reader} cannot read"));
            }
            if !self.settle(SETTLED, Self::is_settled) {
                return self.name_unsettled();
            }
            if !self.violations.is_empty() || self.tally.landed > landed {
                return;
            }
            if self.time.now() > until {
                return self.blame(Rule::HeldUp, || {
                    format!("life {reader} cannot read from life {holder}, and both are alive")
                });
            }
            self.revoke(lease);
            self.time.pass(Duration::from_millis(300));
        }
    }

    /// Everybody shuts down, and everything comes home.
    fn end_all(&mut self) {
        if !self.violations.is_empty() {
            return;
        }
        for no in self.living() {
            self.shut_down(no, SHUTDOWN);
        }
        let stopped = |world: &Self| {
            world.lives.iter().flatten().all(|life| {
                !life.stepped.is_driven() && life.pending.is_empty() && life.stepped.lanes() == 0
            })
        };
        // Well before they run out of time: nothing may be lost by that.
        if !self.settle(SHUTDOWN / 2, stopped) {
            self.blame(Rule::NoEnd, || "an engine does not shut down".into());
        }
        for no in self.living() {
            self.look_at_end(no);
            if !self.violations.is_empty() {
                return;
            }
            self.exit(no);
        }
    }

    /// What an engine leaves behind when it has shut down in peace.
    fn look_at_end(&mut self, no: usize) {
        let Some(life) = self.lives.get(no).and_then(Option::as_ref) else {
            return;
        };
        let stats = life.stepped.engine.stats();
        let claimed = life.pool().claimed_blocks();
        let (lost, open) = (life.may_lose, life.open.len());
        let failed = [
            stats.failed_lease,
            stats.failed_peer,
            stats.failed_transport,
            stats.failed_deadline,
            stats.failed_cancelled,
            stats.failed_other,
        ];
        let ended: u64 = failed.iter().sum::<u64>().saturating_add(stats.landed);
        if lost {
            return;
        }
        let state = self.fabric.state();
        // What an agent that cannot be destroyed has posted is there for ever.
        let mortal = |at: usize| state.agents.get(at).is_none_or(|agent| !agent.immortal);
        let flights = state.flights.iter();
        let flights = flights.filter(|f| f.life == no && mortal(f.agent)).count();
        drop(state);
        if claimed > 0 || open > 0 || flights > 0 {
            self.blame(Rule::LostOrDoubled, || {
                format!("life {no} ended with {claimed} blocks claimed, {open} reads open, {flights} windows in flight")
            });
        }
        if stats.submitted != ended {
            self.blame(Rule::TwoEnds, || {
                format!("life {no} took {} reads and ended {ended}", stats.submitted)
            });
        }
        if stats.queued + stats.active + stats.quarantined > 0 {
            self.blame(Rule::LostOrDoubled, || {
                format!("life {no} ended with {stats:?}")
            });
        }
    }
}

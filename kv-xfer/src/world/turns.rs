//! Whose round is next.

use std::time::Duration;

use super::agent::LifeTransport;
use super::dice::nanos;
use super::life::{CONNECT, MEETINGS, Pending};
use super::{Rule, World};
use crate::clock::MonoTime;
use crate::engine::{Errands, Event, Stepped};
use crate::transport::{AfterError, FailureKind};

/// What a step may do, and how often of all steps together.
#[derive(Debug, Clone, Copy)]
enum Step {
    Drive,
    Lane,
    Meet,
    Tell,
    Care,
    TearDown,
    Hold,
    Fly,
    Letter,
    Pass,
    Lease,
    Read,
    Cancel,
    Keep,
    Free,
    Revoke,
    Trouble,
}

const STEPS: [(Step, u32); 17] = [
    (Step::Drive, 260),
    (Step::Lane, 50),
    (Step::Meet, 70),
    (Step::Tell, 70),
    (Step::Care, 30),
    (Step::TearDown, 40),
    (Step::Hold, 50),
    (Step::Fly, 200),
    (Step::Letter, 50),
    (Step::Pass, 60),
    (Step::Lease, 50),
    (Step::Read, 90),
    (Step::Cancel, 25),
    (Step::Keep, 20),
    (Step::Free, 20),
    (Step::Revoke, 15),
    (Step::Trouble, 30),
];
const TOTAL: u32 = {
    let (mut sum, mut at) = (0, 0);
    while at < STEPS.len() {
        sum += STEPS[at].1;
        at += 1;
    }
    sum
};

impl World {
    /// One step of the scheduler: a few tries at one that does anything.
    pub(super) fn try_step(&mut self) {
        let before = self.events;
        for _ in 0..4 {
            self.step();
            if self.events > before {
                return;
            }
        }
    }

    fn step(&mut self) {
        let mut draw = u32::try_from(self.dice.below(TOTAL as usize)).unwrap_or(0);
        let mut step = Step::Drive;
        for (candidate, weight) in STEPS {
            if draw < weight {
                step = candidate;
                break;
            }
            draw = draw.saturating_sub(weight);
        }
        match step {
            Step::Fly => return self.fly(),
            Step::Letter => return self.carry_letter(),
            Step::Pass => return self.pass_some(),
            Step::Trouble => return self.make_trouble(),
            _ => {}
        }
        let Some(no) = self.any_life() else {
            return self.make_trouble();
        };
        match step {
            Step::Lane => {
                self.lane(no);
            }
            Step::Meet => {
                let of = if self.dice.chance(700) {
                    Errands::First
                } else {
                    Errands::Retries
                };
                self.meet(no, of);
            }
            Step::Tell => {
                self.tell(no, false);
            }
            Step::Care => {
                self.care(no);
            }
            Step::TearDown => {
                self.tear_down(no);
            }
            Step::Hold => {
                self.hold(no);
            }
            Step::Lease => self.lease_some(no),
            Step::Read => self.read_some(no),
            Step::Cancel => self.cancel_some(no),
            Step::Keep => self.keep_some(no),
            Step::Free => self.free_some(no),
            Step::Revoke => self.revoke_some(no),
            _ => {
                self.drive(no);
            }
        }
    }

    /// One round of a driver; whether it did anything.
    pub(super) fn drive(&mut self, no: usize) -> bool {
        let Some(life) = self.life(no) else {
            return false;
        };
        if !life.stepped.is_driven() {
            return false;
        }
        let now = life.now();
        let round = life.stepped.drive();
        life.wake = round.map_or(MonoTime::FAR_FUTURE, |(_, wake)| wake);
        let worked = round.is_none_or(|(worked, _)| worked);
        if round.is_none() {
            // Out of time, with agents that were still being destroyed.
            life.may_lose |= now >= life.stop_by;
        }
        if worked {
            self.note(5, no, 0, || format!("life {no}: its driver works"));
        }
        self.look_after(no);
        self.look_at_deadlines(no, now, round.is_some());
        worked
    }

    /// One round of a helper lane.
    pub(super) fn lane(&mut self, no: usize) -> bool {
        let Some(life) = self.life(no) else {
            return false;
        };
        let lanes = life.stepped.lanes();
        let mut worked = false;
        for lane in (0..lanes).rev() {
            worked |= life.stepped.lane(lane);
        }
        if worked {
            self.note(6, no, 0, || format!("life {no}: a lane works"));
        }
        self.look_after(no);
        worked
    }

    /// Meets a peer, or hangs in meeting it; the driver hears of it later.
    pub(super) fn meet(&mut self, no: usize, of: Errands) -> bool {
        let (hang, soon) = if self.calm {
            (false, Duration::ZERO)
        } else {
            let hang = self.dice.chance(self.troubles.hang_meeting);
            let (from, to) = (Duration::from_micros(10), Duration::from_millis(60));
            (hang, self.dice.time(from, to))
        };
        let now = self.time.now();
        let Some(life) = self.life(no) else {
            return false;
        };
        if life.busy(of) >= MEETINGS {
            return false;
        }
        let Some(errand) = life.stepped.errand(of) else {
            return false;
        };
        let event = life.stepped.carry_out(errand);
        let took = if hang { CONNECT } else { soon };
        if let Some(event) = event {
            life.pending.push(Pending {
                event,
                at: now.saturating_add(nanos(took)),
                thread: Some(of),
            });
        }
        self.note(7, no, nanos(took), || {
            format!("life {no}: meets a peer, for {took:?}")
        });
        self.look_after(no);
        true
    }

    /// Tells a driver what was done for it.
    pub(super) fn tell(&mut self, no: usize, all: bool) -> bool {
        let now = self.time.now();
        let Some(life) = self.life(no) else {
            return false;
        };
        let due = life.pending.iter().position(|p| p.at <= now || all);
        let Some(at) = due else { return false };
        let Pending { event, .. } = life.pending.remove(at);
        life.stepped.tell(event);
        self.note(8, no, 0, || format!("life {no}: its driver is told"));
        true
    }

    pub(super) fn care(&mut self, no: usize) -> bool {
        let cared = self.life(no).is_some_and(|life| life.stepped.care());
        if cared {
            self.note(9, no, 0, || {
                format!("life {no}: asks a holder about a lease")
            });
            self.look_after_all();
        }
        cared
    }

    /// What one life does may free another's blocks.
    fn look_after_all(&mut self) {
        for promise in self.net.take_promised() {
            let (life, id, until) = promise;
            let of = |lease: &&mut super::record::LeaseRecord| lease.life == life && lease.id == id;
            if let Some(lease) = self.leases.iter_mut().find(of) {
                lease.until = lease.until.max(until);
            }
        }
        for no in 0..self.lives.len() {
            self.take_freed(no);
        }
    }

    /// Destroys an agent; the driver hears of it later.
    pub(super) fn tear_down(&mut self, no: usize) -> bool {
        let soon = if self.calm {
            Duration::ZERO
        } else {
            let (from, to) = (Duration::from_micros(10), Duration::from_millis(200));
            self.dice.time(from, to)
        };
        let now = self.time.now();
        let Some(life) = self.life(no) else {
            return false;
        };
        let Some(teardown) = life.stepped.teardown() else {
            return false;
        };
        let event = Stepped::<LifeTransport>::tear_down(teardown);
        if let Event::Fenced { fenced, .. } = &event {
            life.may_lose |= fenced.is_err();
        }
        life.pending.push(Pending {
            event,
            at: now.saturating_add(nanos(soon)),
            thread: None,
        });
        self.note(10, no, 0, || format!("life {no}: destroys an agent"));
        self.look_after(no);
        true
    }

    pub(super) fn hold(&mut self, no: usize) -> bool {
        let Some(life) = self.life(no) else {
            return false;
        };
        let (worked, next) = life.stepped.hold();
        life.lease_end = next;
        if worked {
            self.note(11, no, 0, || format!("life {no}: takes notices"));
        }
        self.take_freed(no);
        worked
    }

    /// Moves something that is in flight.
    fn fly(&mut self) {
        let count = self.fabric.state().flights.len();
        let at = self.dice.below(count);
        let (choice, more) = (self.dice.below(1000), self.dice.word());
        self.move_flight(at, choice, more);
    }

    fn move_flight(&mut self, at: usize, choice: usize, more: u64) {
        let troubles = self.troubles;
        let mut state = self.fabric.state();
        let Some(flight) = state.flights.get_mut(at) else {
            return;
        };
        let (id, count) = (flight.id, flight.descriptors.len());
        let quiet = troubles.fail_quiet as usize;
        let doubt = quiet.saturating_add(troubles.fail_doubt as usize);
        let hang = doubt.saturating_add(troubles.hang as usize);
        let running = flight.end == super::fabric::End::Running;
        let kinds = [FailureKind::PeerLost, FailureKind::Backend];
        let kind = kinds
            .get((more % 2) as usize)
            .copied()
            .unwrap_or(FailureKind::Backend);
        let did = if running && choice < quiet {
            flight.end = super::fabric::End::Failed(kind, AfterError::Quiet);
            "fails"
        } else if running && choice < doubt {
            flight.end = super::fabric::End::Failed(kind, AfterError::InDoubt);
            "fails, in doubt"
        } else if running && choice < hang {
            flight.hangs = true;
            "hangs"
        } else if flight.hangs && !choice.is_multiple_of(8) {
            return;
        } else {
            let quiet_end = matches!(flight.end, super::fabric::End::Failed(_, AfterError::Quiet));
            if quiet_end {
                return;
            }
            let from = usize::try_from(more >> 8).unwrap_or(0) % count.max(1);
            let pieces = if choice.is_multiple_of(3) { count } else { 1 };
            let wire_only = choice.is_multiple_of(5);
            let mut moved = false;
            for piece in (0..pieces).map(|n| (from + n) % count.max(1)) {
                moved |= state.fetch(at, piece);
                if !wire_only {
                    moved |= state.arrive(at, piece);
                }
            }
            if !moved {
                return;
            }
            if wire_only {
                "is on the wire"
            } else {
                "lands some"
            }
        };
        drop(state);
        self.note(12, at, id, || format!("window {id} {did}"));
        self.look_at_fabric();
    }

    /// Takes a notice to its agent, or loses it, or doubles it, or takes it astray.
    fn carry_letter(&mut self) {
        let troubles = self.troubles;
        let count = self.fabric.state().letters.len();
        if count == 0 {
            return;
        }
        let at = self.dice.below(count);
        let lost = self.dice.chance(troubles.lose_letter);
        let doubled = self.dice.chance(troubles.double_letter);
        let astray = self.dice.chance(troubles.stray_letter);
        self.deliver(at, lost, doubled, astray);
    }

    pub(super) fn deliver(&mut self, at: usize, lost: bool, doubled: bool, astray: bool) {
        let mut guard = self.fabric.state();
        let state = &mut *guard;
        let Some(letter) = state.letters.get(at).cloned() else {
            return;
        };
        if !doubled {
            state.letters.swap_remove(at);
        }
        let owner = state.agents.get(letter.to).map(|agent| agent.life);
        let reachable = owner.is_some_and(|owner| state.connected(letter.from, owner));
        let mut to = letter.to;
        if astray && owner.is_some_and(|owner| state.is_dead(owner)) {
            // The successor at the same place gets it.
            let place = owner.and_then(|owner| state.places.get(owner)).copied();
            let heir = state.agents.iter().position(|agent| {
                !agent.gone
                    && state.places.get(agent.life).copied() == place
                    && agent.name.as_str().ends_with("serve")
            });
            to = heir.unwrap_or(to);
        } else if lost || !reachable {
            drop(guard);
            self.note(13, at, 0, || "a notice is lost".into());
            return;
        }
        if let Some(agent) = state.agents.get_mut(to).filter(|agent| !agent.gone) {
            agent.inbox.push((letter.sender, letter.bytes));
        }
        drop(guard);
        self.note(14, at, to as u64, || "a notice arrives".into());
    }

    /// Time passes: a little, or until something is due.
    fn pass_some(&mut self) {
        let by = if self.dice.chance(120) {
            self.time_to_next().min(Duration::from_secs(2))
        } else {
            let longest = if self.dice.chance(200) { 400 } else { 5 };
            self.dice
                .time(Duration::from_micros(1), Duration::from_millis(longest))
        };
        self.time.pass(by);
        self.note(15, 0, nanos(by), || format!("{by:?} pass"));
    }

    /// How long until something is due.
    pub(super) fn time_to_next(&self) -> Duration {
        let now = self.time.now();
        let mut next = Duration::from_secs(3600);
        for life in self.lives.iter().flatten() {
            let here = life.now();
            next = next.min(life.wake.saturating_since(here));
            if let Some(end) = life.lease_end {
                next = next.min(end.saturating_since(here));
            }
            for pending in &life.pending {
                next = next.min(Duration::from_nanos(pending.at.saturating_sub(now)));
            }
        }
        // What is due is seen within a millisecond.
        next.max(Duration::from_millis(1))
    }

    /// No damaged card was taken for a good one.
    pub(super) fn nothing_believed(&mut self) {
        if self.net.believed_damage() {
            self.blame(Rule::Believed, || "a damaged card was believed".into());
        }
    }
}

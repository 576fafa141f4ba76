//! Short histories of two reads, act by act, for exploring every order of them.

use std::time::Duration;

use super::content::{self, NAMES};
use super::dice::Dice;
use super::fabric::{End, Use};
use super::life::Owner;
use super::record::Accepted;
use super::{Outcome, Troubles, World};
use crate::engine::{Errands, ReleasePolicy};
use crate::transport::{AfterError, FailureKind};

/// Which of the two reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Which {
    /// The first.
    A,
    /// The second.
    B,
}

/// What happens to a read. After each act everybody does what there is to do, but nothing that is in
/// flight moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Act {
    /// It is submitted.
    Start(Which),
    /// It is cancelled.
    Cancel(Which),
    /// Its handle is dropped.
    Drop(Which),
    /// All its windows land, the lease word included.
    Complete(Which),
    /// Its holder gets a release, whether or not there was one before.
    Release(Which),
    /// One of its windows fails: nothing more of it lands.
    Fail(Which),
    /// One of its windows fails, and may still land.
    FailInDoubt(Which),
    /// Its lease's time passes.
    Expire(Which),
    /// Its holder takes the lease back.
    Revoke(Which),
    /// Its holder crashes.
    Lose(Which),
}

/// What the two reads have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Play {
    /// Both are of blocks of one holder.
    pub one_holder: bool,
    /// Chooses pool sizes, window sizes and the like.
    pub seed: u64,
    /// Keep what happened as text.
    pub trace: bool,
}

/// Longer than all leases, so that a read's deadline comes last.
const READ: Duration = Duration::from_secs(4);
const LEASE_A: Duration = Duration::from_secs(2);
const LEASE_B: Duration = Duration::from_secs(3);
/// Rounds in which everything that is to be done is done.
const ROUNDS: u32 = 64;

struct Cast {
    accepted: Accepted,
    read: Option<usize>,
}

impl Play {
    /// Plays these acts in this order, then lets everything come to its end.
    #[must_use]
    pub fn run(&self, acts: &[Act]) -> Outcome {
        let mut dice = Dice::new(self.seed, 3);
        let offset = dice.word();
        let mut world = World::new(offset, dice, Troubles::default(), self.trace);
        world.calm = true;
        for _ in 0..3 {
            world.add_place();
        }
        let second = if self.one_holder { 1 } else { 2 };
        let cast = [(1, 0, LEASE_A), (second, 1, LEASE_B)]
            .map(|(holder, conversation, ttl)| world.offer(holder, conversation, ttl));
        let [Some(mut a), Some(mut b)] = cast else {
            return world.finish();
        };
        for act in acts {
            world.act(*act, &mut a, &mut b);
            world.breathe();
            if !world.violations.is_empty() {
                return world.finish();
            }
        }
        world.end_well();
        world.finish()
    }
}

impl World {
    /// Two blocks of a holder, offered to the reader at place 0.
    fn offer(&mut self, holder: usize, conversation: usize, ttl: Duration) -> Option<Cast> {
        let holder = self.at(holder)?;
        let lease = self.lease(holder, conversation, 0, 2, Vec::new(), Some(ttl))?;
        let remote = self.descriptors.last()?.remote.clone();
        let reader = self.at(0)?;
        let name = NAMES.get(conversation).copied();
        let engine = &self.life(reader)?.stepped.engine;
        let offer = engine.accept(&remote, Some("tenant"), name).ok()?;
        let accepted = Accepted { offer, lease };
        let read = None;
        Some(Cast { accepted, read })
    }

    fn act(&mut self, act: Act, a: &mut Cast, b: &mut Cast) {
        let which = match act {
            Act::Start(which)
            | Act::Cancel(which)
            | Act::Drop(which)
            | Act::Complete(which)
            | Act::Release(which)
            | Act::Fail(which)
            | Act::FailInDoubt(which)
            | Act::Expire(which)
            | Act::Revoke(which)
            | Act::Lose(which) => which,
        };
        let (cast, conversation) = match which {
            Which::A => (a, 0),
            Which::B => (b, 1),
        };
        let lease = cast.accepted.lease;
        let holder = self.leases.get(lease).map_or(0, |lease| lease.life);
        let Some(reader) = self.at(0) else { return };
        self.note(50, which as usize, 0, || format!("{act:?}"));
        match act {
            Act::Start(_) if cast.read.is_none() => {
                let wanted = content::prompt(conversation, 0);
                let count = cast.accepted.offer.ticket().hashes.len();
                let policy = ReleasePolicy::Always;
                let accepted = cast.accepted.clone();
                cast.read = self.read(reader, &accepted, wanted, 0..count, READ, policy);
            }
            Act::Start(_) => {}
            Act::Cancel(_) | Act::Drop(_) => {
                if let Some(read) = cast.read {
                    self.cancel(read, matches!(act, Act::Drop(_)));
                }
            }
            Act::Complete(_) => {
                for _ in 0..ROUNDS {
                    if !self.land_of(lease, cast.read) {
                        break;
                    }
                    self.breathe();
                }
            }
            Act::Release(_) => {
                let accepted = cast.accepted.clone();
                self.release(reader, &accepted);
            }
            Act::Fail(_) => self.fail_of(lease, cast.read, AfterError::Quiet),
            Act::FailInDoubt(_) => self.fail_of(lease, cast.read, AfterError::InDoubt),
            Act::Expire(_) => {
                let until = self.leases.get(lease).map(|lease| lease.until);
                let now = self.life(holder).map(|life| life.now());
                if let (Some(until), Some(now)) = (until, now) {
                    self.time.pass(until.saturating_since(now));
                }
            }
            Act::Revoke(_) => self.revoke(lease),
            Act::Lose(_) => self.crash(holder),
        }
    }

    /// Everybody does what there is to do; nothing in flight moves.
    fn breathe(&mut self) {
        for _ in 0..ROUNDS {
            let mut worked = false;
            for no in 0..self.lives.len() {
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
            if !worked || !self.violations.is_empty() {
                return;
            }
        }
    }

    /// The windows of a read: those into its blocks, and that of its lease's word.
    fn flights_of(&self, lease: usize, read: Option<usize>) -> Vec<usize> {
        let (Some(record), Some(read)) = (self.leases.get(lease), read) else {
            return Vec::new();
        };
        let state = self.fabric.state();
        let of = |d: &crate::transport::Descriptor| {
            let (Some(from), Some(to)) = (state.span(d.remote), state.span(d.local)) else {
                return false;
            };
            match to.of {
                Use::Pool => {
                    let life = self.lives.get(to.life).and_then(Option::as_ref);
                    let block = self.blocks_at(to.life, d.local, d.len);
                    let owner = life.zip(block).and_then(|(life, at)| life.owner(at.0));
                    owner == Some(Owner::Read(read))
                }
                Use::Landing | Use::LeaseWords => {
                    let slot = d.remote.saturating_sub(from.base) / 8;
                    from.life == record.life && slot == u64::from(record.slot)
                }
            }
        };
        let flights = state.flights.iter().enumerate();
        flights
            .filter(|(_, flight)| flight.descriptors.iter().any(of))
            .map(|(at, _)| at)
            .collect()
    }

    fn land_of(&mut self, lease: usize, read: Option<usize>) -> bool {
        let mut landed = false;
        for at in self.flights_of(lease, read) {
            let mut state = self.fabric.state();
            let count = state
                .flights
                .get(at)
                .map_or(0, |flight| flight.descriptors.len());
            for piece in 0..count {
                landed |= state.fetch(at, piece);
                landed |= state.arrive(at, piece);
            }
        }
        self.look_at_fabric();
        landed
    }

    fn fail_of(&mut self, lease: usize, read: Option<usize>, after: AfterError) {
        let flights = self.flights_of(lease, read);
        let mut state = self.fabric.state();
        let flight = flights.first().and_then(|at| state.flights.get_mut(*at));
        if let Some(flight) = flight.filter(|flight| flight.end == End::Running) {
            flight.end = End::Failed(FailureKind::Backend, after);
        }
    }
}

//! What goes wrong with whole engines and with the network between them.

use std::time::Duration;

use super::World;
use super::record::ReadState;

/// The largest jump of a clock.
const MAX_JUMP: Duration = Duration::from_secs(3600);

impl World {
    /// Something goes wrong, or is put right.
    pub(super) fn make_trouble(&mut self) {
        let troubles = self.troubles;
        let place = self.dice.below(self.places.len());
        let other = self.dice.below(self.places.len());
        let choice = self.dice.below(7);
        let Some(no) = self.at(place) else {
            if choice < 5 {
                self.start_life(place);
                // A successor leases what its predecessor leased first, perhaps under the same words.
                if let Some(no) = self.at(place).filter(|_| choice < 4) {
                    self.lease_some(no);
                }
            }
            return;
        };
        let stopped = self.life(no).is_some_and(|life| !life.stepped.is_driven());
        match choice {
            _ if stopped => self.exit(no),
            0 | 1 if self.dice.chance(troubles.crash) => self.crash(no),
            2 if place != other && self.dice.chance(troubles.cut) => {
                let pair = (place.min(other), place.max(other));
                let mut state = self.fabric.state();
                let healed = state.cut.contains(&pair);
                state.cut.retain(|cut| *cut != pair);
                if !healed {
                    state.cut.push(pair);
                }
                drop(state);
                self.note(30, place, other as u64, || {
                    let what = if healed {
                        "find each other again"
                    } else {
                        "lose each other"
                    };
                    format!("engines {place} and {other} {what}")
                });
            }
            3 if self.dice.chance(troubles.jump) => {
                let by = self.dice.time(Duration::from_millis(1), MAX_JUMP);
                self.jumped = true;
                if let Some(place) = self.places.get(place) {
                    place.clock.advance(by);
                }
                self.note(31, place, 0, || {
                    format!("engine {place}'s clock jumps by {by:?}")
                });
            }
            4 if self.dice.chance(troubles.lose_driver) => self.lose_driver(no),
            5 if self.dice.chance(troubles.shut_down) => {
                let limit = self
                    .dice
                    .time(Duration::from_millis(1), Duration::from_secs(1));
                self.shut_down(no, limit);
            }
            _ => {
                let mut state = self.fabric.state();
                if state.cut.is_empty() {
                    return;
                }
                state.cut.clear();
                drop(state);
                self.note(32, 0, 0, || "all engines find each other again".into());
            }
        }
    }

    /// A process ends without a word.
    pub(super) fn crash(&mut self, no: usize) {
        if !self.calm {
            self.tally.ended = self.tally.ended.saturating_add(1);
        }
        self.fabric.state().end_life(no);
        let Some(life) = self.lives.get_mut(no).and_then(Option::take) else {
            return;
        };
        if let Some(place) = self.places.get_mut(life.place) {
            place.life = None;
            self.net.close(&place.addr);
        }
        let place = life.place;
        let mut handles = Vec::new();
        for read in self.reads.iter_mut().filter(|read| read.life == no) {
            read.state = ReadState::Gone;
            handles.extend(read.handle.take());
        }
        drop(life);
        drop(handles);
        // What its end did to the fabric is nobody's concern.
        let mut state = self.fabric.state();
        state.writes.clear();
        state.words.clear();
        state.misuse = None;
        drop(state);
        self.note(33, no, 0, || format!("engine {place}, life {no}, ends"));
    }

    /// A driver's thread unwinds.
    fn lose_driver(&mut self, no: usize) {
        let Some(life) = self.life(no) else { return };
        life.may_lose = true;
        let now = life.now();
        life.stepped.lose_driver();
        self.note(34, no, 0, || format!("life {no}: its driver dies"));
        self.look_after(no);
        self.look_at_deadlines(no, now, false);
    }

    pub(super) fn shut_down(&mut self, no: usize, limit: Duration) {
        let Some(life) = self.life(no) else { return };
        if std::mem::replace(&mut life.stopping, true) {
            return;
        }
        life.stop_by = life.now() + limit;
        life.stepped.shut_down(life.stop_by);
        self.note(35, no, 0, || {
            format!("life {no}: shuts down within {limit:?}")
        });
    }

    /// An engine without a driver ends: its leases first.
    pub(super) fn exit(&mut self, no: usize) {
        for lease in self.leases.iter_mut().filter(|lease| lease.life == no) {
            lease.may_revoke = true;
        }
        let Some(life) = self.life(no) else { return };
        let addr = life.place;
        life.stepped.end_holding();
        if let Some(place) = self.places.get(addr) {
            self.net.close(&place.addr);
        }
        self.look_after(no);
        let left = self
            .leases
            .iter()
            .find(|lease| lease.life == no && !lease.freed);
        if let Some(id) = left.map(|lease| lease.id) {
            self.blame(super::Rule::LostOrDoubled, || {
                format!("lease {id} never gave its blocks back")
            });
        }
        self.crash(no);
    }
}

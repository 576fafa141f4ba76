//! Reads that wait for something to happen, on a GPU's stream say, before anything of them is posted.
#![forbid(unsafe_code)]

use std::time::Duration;

use super::Driver;
use crate::clock::MonoTime;
use crate::transport::Transport;

/// Pause between looks: each costs a call of the device's driver for every read that waits.
const LOOK_PAUSE: Duration = Duration::from_micros(10);

impl<T: Transport> Driver<T> {
    /// A planned read takes its turns, once what it waits for has happened.
    pub(super) fn begin(&mut self, place: usize) {
        match self.read(place) {
            Some(read) if read.job.after.is_some() => self.gated.push((place, read.job.id)),
            Some(_) => self.enqueue(place),
            None => {}
        }
    }

    /// Lets those begin that need wait no longer. Their deadlines are looked at with all others'.
    pub(super) fn look_at_gates(&mut self, now: MonoTime) -> bool {
        if self.gated.is_empty() || now.saturating_since(self.gates_looked) < LOOK_PAUSE {
            return false;
        }
        self.gates_looked = now;
        let mut worked = false;
        for (place, id) in std::mem::take(&mut self.gated) {
            // One that has ended has left its place to another.
            let read = self.reads.get_mut(place).and_then(Option::as_mut);
            let Some(read) = read.filter(|read| read.job.id == id) else {
                continue;
            };
            match read.may_begin() {
                Ok(false) => self.gated.push((place, id)),
                Ok(true) => {
                    worked = true;
                    self.enqueue(place);
                }
                Err(error) => {
                    worked = true;
                    self.end(place, Err(error), now);
                }
            }
        }
        worked
    }
}

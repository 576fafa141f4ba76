//! The cell through which one outcome goes from the driver to whoever waits for it: filled once,
//! emptied once, given back when nobody will ever take it.
//!
//! Nothing here knows what the outcome is, and all that it shares goes through `crate::sync`, so that
//! the model checker runs this very file.

use std::task::{Poll, Waker};
use std::time::Instant;

use crate::sync::{AtomicBool, Condvar, Mutex, Ordering};

#[derive(Debug)]
enum Cell<T> {
    Running(Option<Waker>),
    Finished(Box<T>),
    Taken,
}

/// What was in the cell when it was abandoned.
#[derive(Debug)]
pub(crate) enum Abandoned<T> {
    /// Nothing yet: whoever fills it gets the outcome back.
    Running,
    /// An outcome that nobody has taken.
    Finished(Box<T>),
    /// An outcome that was taken before.
    Taken,
}

/// Shared by the side that fills it and the side that waits.
#[derive(Debug)]
pub(crate) struct Completion<T> {
    cell: Mutex<Cell<T>>,
    ended: Condvar,
    cancelled: AtomicBool,
}

impl<T> Completion<T> {
    pub(crate) fn new() -> Self {
        Self {
            cell: Mutex::new(Cell::Running(None)),
            ended: Condvar::new(),
            cancelled: AtomicBool::new(false),
        }
    }

    /// Fills the cell, and gives the waker to be woken, without any lock held. Gives the outcome
    /// back when nobody will ever take it, or when there already is one.
    pub(crate) fn finish(&self, outcome: T) -> Result<Option<Waker>, T> {
        let mut cell = self.cell.lock();
        match &mut *cell {
            Cell::Running(waker) => {
                let waker = waker.take();
                *cell = Cell::Finished(Box::new(outcome));
                drop(cell);
                self.ended.notify_all();
                Ok(waker)
            }
            Cell::Finished(_) | Cell::Taken => Err(outcome),
        }
    }

    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// Takes the outcome, if it is there and was not taken.
    pub(crate) fn take(&self) -> Option<T> {
        let mut cell = self.cell.lock();
        match std::mem::replace(&mut *cell, Cell::Taken) {
            Cell::Finished(outcome) => Some(*outcome),
            running @ Cell::Running(_) => {
                *cell = running;
                None
            }
            Cell::Taken => None,
        }
    }

    /// Blocks until the cell is filled, at most until then.
    pub(crate) fn wait(&self, until: Option<Instant>) {
        let mut cell = self.cell.lock();
        while matches!(&*cell, Cell::Running(_)) {
            match until {
                Some(until) => {
                    if self.ended.wait_until(&mut cell, until).timed_out() {
                        break;
                    }
                }
                None => self.ended.wait(&mut cell),
            }
        }
    }

    /// Ready once it is filled; until then the waker is kept. `Ready(None)` when the outcome was
    /// taken before.
    pub(crate) fn poll(&self, fresh: Waker) -> Poll<Option<T>> {
        let mut cell = self.cell.lock();
        match &mut *cell {
            Cell::Running(waker) => {
                let known = waker.replace(fresh);
                // The caller's code (dropping wakers) runs without the lock.
                drop(cell);
                drop(known);
                Poll::Pending
            }
            Cell::Finished(_) | Cell::Taken => {
                drop(cell);
                Poll::Ready(self.take())
            }
        }
    }

    /// Nobody waits any more: from here on `finish` gives outcomes back.
    pub(crate) fn abandon(&self) -> Abandoned<T> {
        self.cancel();
        match std::mem::replace(&mut *self.cell.lock(), Cell::Taken) {
            Cell::Running(_) => Abandoned::Running,
            Cell::Finished(outcome) => Abandoned::Finished(outcome),
            Cell::Taken => Abandoned::Taken,
        }
    }
}

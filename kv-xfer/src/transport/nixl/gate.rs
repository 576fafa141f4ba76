//! Keeps calls into NIXL out of the process's end.
//!
//! When a process exits, the destructors of NIXL and UCX run while the threads of engines that nobody
//! dropped are still in the middle of calls, which ends in a crash instead of the exit status. So
//! every call passes this gate. It closes as exit begins: that waits for the calls under way, and
//! later ones are refused.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Set once exit has begun.
const CLOSED: u64 = 1 << 63;
/// Longest wait for calls under way; they take milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);

/// Calls under way, and whether the gate is closed.
static GATE: Gate = Gate(AtomicU64::new(0));

struct Gate(AtomicU64);

/// A call under way.
#[derive(Debug)]
pub(super) struct Pass<'a>(&'a AtomicU64);

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

impl Gate {
    fn enter(&self) -> Option<Pass<'_>> {
        let before = self.0.fetch_add(1, Ordering::Acquire);
        let pass = Pass(&self.0);
        (before & CLOSED == 0).then_some(pass)
    }

    /// Refuses calls from now on; waits for those under way. False if they took too long.
    fn close(&self, patience: Duration) -> bool {
        self.0.fetch_or(CLOSED, Ordering::AcqRel);
        let until = Instant::now() + patience;
        while self.0.load(Ordering::Acquire) != CLOSED {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        true
    }
}

/// Lets a call in, unless the process is ending.
pub(super) fn enter() -> Option<Pass<'static>> {
    GATE.enter()
}

/// Has the gate closed at exit. To be called once NIXL is at work: what is registered last runs
/// first, so the gate closes before any of NIXL's destructors run.
pub(super) fn close_at_exit() {
    extern "C" fn close() {
        GATE.close(PATIENCE);
    }
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        // SAFETY: `close` touches nothing but an atomic of this program and the clock, and unwinds
        // from nowhere. On failure exits are as they were without the gate.
        let _ = unsafe { libc::atexit(close) };
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_gate_lets_nobody_in() {
        let gate = Gate(AtomicU64::new(0));
        drop(gate.enter().unwrap());
        assert!(gate.close(Duration::ZERO));
        assert!(gate.enter().is_none());
        assert!(gate.close(Duration::ZERO), "those refused do not count");
    }

    #[test]
    fn closing_waits_for_the_calls_under_way() {
        let gate = Gate(AtomicU64::new(0));
        let pass = gate.enter().unwrap();
        assert!(!gate.close(Duration::from_millis(1)));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                drop(pass);
            });
            assert!(gate.close(Duration::from_secs(20)));
        });
    }
}

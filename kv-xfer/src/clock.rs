//! Time as a value. Pure modules take it as an argument; only [`SystemClock`] reads a clock.

use std::fmt;
use std::ops::Add;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A point on one process's monotonic clock, in nanoseconds. Two processes' points never compare:
/// durations travel on the wire, and each process rebases them onto its own clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct MonoTime(u64);

impl MonoTime {
    /// The origin of the clock.
    pub const ZERO: Self = Self(0);
    /// Later than every time a clock will show.
    pub const FAR_FUTURE: Self = Self(u64::MAX);

    /// The point `nanos` after the clock's origin.
    #[must_use]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the clock's origin.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Seconds since the clock's origin, as vLLM's `perf_counter` stamps write them.
    #[must_use]
    pub fn as_secs_f64(self) -> f64 {
        Duration::from_nanos(self.0).as_secs_f64()
    }

    /// The point `duration` later; saturates at [`MonoTime::FAR_FUTURE`].
    #[must_use]
    pub fn saturating_add(self, duration: Duration) -> Self {
        Self(
            self.0
                .saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)),
        )
    }

    /// How long after `earlier` this is; zero when it is not later.
    #[must_use]
    pub fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for MonoTime {
    type Output = Self;
    fn add(self, duration: Duration) -> Self {
        self.saturating_add(duration)
    }
}

impl fmt::Display for MonoTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", Duration::from_nanos(self.0))
    }
}

/// Where the time comes from.
pub trait Clock: Send + Sync + fmt::Debug {
    /// The present point.
    fn now(&self) -> MonoTime;
}

/// `CLOCK_MONOTONIC`: the clock behind Python's `perf_counter`, which vLLM stamps its leases with.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> MonoTime {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let secs = u64::try_from(t.tv_sec).unwrap_or(0);
        let nanos = u64::try_from(t.tv_nsec).unwrap_or(0);
        MonoTime(secs.saturating_mul(1_000_000_000).saturating_add(nanos))
    }
}

/// A clock that moves only when told to, for tests and simulation.
#[derive(Debug, Default)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// A clock that shows `start`.
    #[must_use]
    pub fn new(start: MonoTime) -> Self {
        Self(AtomicU64::new(start.0))
    }

    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        let now = MonoTime(self.0.load(Ordering::SeqCst));
        self.0.store(now.saturating_add(by).0, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> MonoTime {
        MonoTime(self.0.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_clock_moves_forward() {
        let a = SystemClock.now();
        let b = SystemClock.now();
        assert!(b >= a);
        assert!(a > MonoTime::ZERO);
    }

    #[test]
    fn arithmetic_saturates() {
        assert_eq!(
            MonoTime::FAR_FUTURE + Duration::from_secs(1),
            MonoTime::FAR_FUTURE
        );
        assert_eq!(
            MonoTime::ZERO.saturating_since(MonoTime::FAR_FUTURE),
            Duration::ZERO
        );
        assert_eq!(MonoTime::ZERO + Duration::MAX, MonoTime::FAR_FUTURE);
    }

    #[test]
    fn manual_clock_moves_when_told() {
        let clock = ManualClock::new(MonoTime::from_nanos(5));
        clock.advance(Duration::from_nanos(7));
        assert_eq!(clock.now(), MonoTime::from_nanos(12));
    }
}

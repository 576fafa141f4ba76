//! The world's time, and every engine's clock.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::dice::nanos;
use crate::clock::{ManualClock, MonoTime};

#[derive(Debug, Default)]
struct Inner {
    now: u64,
    /// Each place's clock, and how much faster than the world it goes, in millionths.
    clocks: Vec<(Arc<ManualClock>, u32)>,
}

/// Time. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct Time(Arc<Mutex<Inner>>);

impl Time {
    /// A clock that shows `start` now.
    pub(super) fn clock(&self, start: MonoTime, faster: u32) -> Arc<ManualClock> {
        let clock = Arc::new(ManualClock::new(start));
        self.0.lock().clocks.push((Arc::clone(&clock), faster));
        clock
    }

    pub(super) fn now(&self) -> u64 {
        self.0.lock().now
    }

    /// Time passes, everywhere.
    pub(super) fn pass(&self, by: Duration) {
        let mut inner = self.0.lock();
        inner.now = inner.now.saturating_add(nanos(by));
        for (clock, faster) in &inner.clocks {
            let more = nanos(by).saturating_mul(u64::from(*faster)) / 1_000_000;
            clock.advance(by.saturating_add(Duration::from_nanos(more)));
        }
    }
}

//! What keeps an error that happens again and again from filling the log.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// So many lines are written whatever comes.
const FIRST: u64 = 8;
/// After so long without one it counts anew.
const QUIET: Duration = Duration::from_secs(60);

/// Counts one kind of event. Of those that follow each other closely the first eight are worth a
/// line, then the sixteenth, the 32nd, and so on: a million make 25 lines.
#[derive(Debug)]
pub(crate) struct Storm(Mutex<Option<(Instant, u64)>>);

impl Storm {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// Counts an event. Its number in this storm when it is worth a line.
    pub(crate) fn line(&self) -> Option<u64> {
        self.line_at(Instant::now())
    }

    fn line_at(&self, now: Instant) -> Option<u64> {
        let mut last = self.0.lock();
        let count = match *last {
            Some((at, count)) if now.saturating_duration_since(at) < QUIET => {
                count.saturating_add(1)
            }
            _ => 1,
        };
        *last = Some((now, count));
        (count <= FIRST || count.is_power_of_two()).then_some(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_million_events_make_some_lines_and_a_later_one_another() {
        let (storm, now) = (Storm::new(), Instant::now());
        let lines: Vec<u64> = (0..1_000_000).filter_map(|_| storm.line_at(now)).collect();
        assert_eq!(lines[..10], [1, 2, 3, 4, 5, 6, 7, 8, 16, 32]);
        assert!(lines.len() <= 25, "{}", lines.len());
        assert_eq!(storm.line_at(now + 2 * QUIET), Some(1));
    }
}

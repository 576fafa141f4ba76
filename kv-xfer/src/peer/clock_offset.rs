//! How far a peer's monotonic clock is from ours.

use std::time::Duration;

use crate::clock::MonoTime;

/// Largest clock value believed, in seconds: a machine that has been up for 300 years.
const MAX_CLOCK_SECS: f64 = 9.0e9;

/// Peer clock minus own clock, measured by one request: the peer's stamp is taken to be of the
/// midpoint, so the error is at most half the round trip. Holds for one incarnation of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockOffset {
    nanos: i128,
    rtt: Duration,
}

impl ClockOffset {
    /// From one exchange: when the request was sent and the reply received (own clock), and the
    /// peer's clock in seconds. `None` when the peer's clock is not a plausible number.
    #[must_use]
    pub fn sample(sent: MonoTime, received: MonoTime, peer_secs: f64) -> Option<Self> {
        let peer = secs_to_nanos(peer_secs)?;
        let rtt = received.saturating_since(sent);
        let midpoint = sent.saturating_add(rtt.checked_div(2).unwrap_or_default());
        Some(Self {
            nanos: i128::from(peer).saturating_sub(i128::from(midpoint.as_nanos())),
            rtt,
        })
    }

    /// The one of two samples of the same incarnation that was measured over the shorter round trip.
    #[must_use]
    pub fn better(self, other: Self) -> Self {
        if other.rtt < self.rtt { other } else { self }
    }

    /// Round trip of the sample. The offset is right to within half of it.
    #[must_use]
    pub fn rtt(&self) -> Duration {
        self.rtt
    }

    /// Peer clock minus own clock, in seconds.
    #[must_use]
    pub fn as_secs_f64(&self) -> f64 {
        self.nanos as f64 / 1e9
    }

    /// A point on the peer's clock, in seconds, as a point on ours; saturates at the ends of our
    /// clock. `None` when it is not a plausible number.
    #[must_use]
    pub fn to_local(&self, peer_secs: f64) -> Option<MonoTime> {
        let local = i128::from(secs_to_nanos(peer_secs)?).saturating_sub(self.nanos);
        let clamped = local.clamp(0, i128::from(u64::MAX));
        u64::try_from(clamped).ok().map(MonoTime::from_nanos)
    }

    /// A point on our clock as seconds on the peer's; negative before the peer's clock began.
    #[must_use]
    pub fn to_peer_secs(&self, local: MonoTime) -> f64 {
        i128::from(local.as_nanos()).saturating_add(self.nanos) as f64 / 1e9
    }
}

fn secs_to_nanos(secs: f64) -> Option<u64> {
    // In range after the check: 9e9 s is 9e18 ns, below u64::MAX.
    (secs.is_finite() && (0.0..MAX_CLOCK_SECS).contains(&secs)).then_some((secs * 1e9) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: u64) -> MonoTime {
        MonoTime::ZERO + Duration::from_secs(secs)
    }

    #[test]
    fn the_midpoint_is_assumed() {
        let o = ClockOffset::sample(at(100), at(102), 1101.0).unwrap();
        assert_eq!(o.as_secs_f64(), 1000.0);
        assert_eq!(o.rtt(), Duration::from_secs(2));
        assert_eq!(o.to_local(1480.0), Some(at(480)));
        assert_eq!(o.to_peer_secs(at(480)), 1480.0);
        let behind = ClockOffset::sample(at(1000), at(1000), 1.0).unwrap();
        assert_eq!(behind.as_secs_f64(), -999.0);
        assert_eq!(behind.to_local(2.0), Some(at(1001)));
        assert_eq!(o.to_local(5.0), Some(MonoTime::ZERO));
    }

    #[test]
    fn the_shorter_round_trip_is_kept() {
        let slow = ClockOffset::sample(at(0), at(10), 50.0).unwrap();
        let fast = ClockOffset::sample(at(20), at(21), 70.0).unwrap();
        assert_eq!(slow.better(fast), fast);
        assert_eq!(fast.better(slow), fast);
    }

    #[test]
    fn odd_clocks_are_refused() {
        for secs in [
            f64::NAN,
            f64::INFINITY,
            f64::NEG_INFINITY,
            -1.0,
            1e10,
            1e300,
        ] {
            assert_eq!(ClockOffset::sample(at(1), at(2), secs), None, "{secs}");
        }
        let o = ClockOffset::sample(at(1), at(2), 3.0).unwrap();
        assert_eq!(o.to_local(f64::NAN), None);
        // The clock ran backwards between the two readings: a zero round trip, no panic.
        assert!(ClockOffset::sample(at(2), at(1), 3.0).is_some());
    }
}

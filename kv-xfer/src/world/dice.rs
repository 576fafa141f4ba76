//! Every choice of a history: a stream of numbers that its seed fixes.

use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// A seeded source of choices.
#[derive(Debug, Clone)]
pub(super) struct Dice(ChaCha8Rng);

impl Dice {
    pub(super) fn new(seed: u64, stream: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(stream);
        Self(rng)
    }

    pub(super) fn word(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number below `end`; 0 when that is 0.
    pub(super) fn below(&mut self, end: usize) -> usize {
        let wide = u128::from(self.0.next_u32()).saturating_mul(end as u128) >> 32;
        usize::try_from(wide).unwrap_or(0)
    }

    /// A number from `first` to `last`.
    pub(super) fn within(&mut self, first: usize, last: usize) -> usize {
        first.saturating_add(self.below(last.saturating_sub(first).saturating_add(1)))
    }

    /// True so many times in a thousand.
    pub(super) fn chance(&mut self, per_mille: u32) -> bool {
        self.below(1000) < per_mille as usize
    }

    pub(super) fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        let at = self.below(from.len());
        from.get(at)
    }

    /// A time of any order of magnitude between two.
    pub(super) fn time(&mut self, shortest: Duration, longest: Duration) -> Duration {
        let (low, high) = (nanos(shortest).max(1), nanos(longest).max(1));
        let (low_bits, high_bits) = (low.ilog2(), high.ilog2());
        let bits =
            low_bits as usize + self.below((high_bits.saturating_sub(low_bits) + 1) as usize);
        let base = 1_u64
            .checked_shl(u32::try_from(bits).unwrap_or(0))
            .unwrap_or(1);
        let more = self.word() % base.max(1);
        Duration::from_nanos(base.saturating_add(more).clamp(low, high))
    }
}

pub(super) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Mixes numbers into one that looks like none of them: the finaliser of SplitMix64.
pub(super) fn mix(a: u64, b: u64) -> u64 {
    let mut x = a ^ b
        .wrapping_add(0x9e37_79b9_7f4a_7c15)
        .wrapping_mul(0xd6e8_feb8_6659_fd93);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

//! What reads and prefill have cost, and from how many tokens on a read pays.

use std::num::NonZeroU32;
use std::time::Duration;

/// Reads that must have been measured before the model says anything.
pub const COST_SAMPLES_NEEDED: u32 = 16;

/// Highest threshold that the model will ask for, in tokens: a bad measurement must not turn reads
/// off altogether, since only reads can correct it.
pub const MAX_EFFECTIVE_THRESHOLD: u64 = 4096;

/// Weight of a new measurement in the averages, once there are as many: old ones fade by a factor of
/// e every 16 reads, which follows a link that changes within seconds at one read a second.
const WEIGHT: f64 = 1.0 / 16.0;

/// Added to the diagonal of the fit, relative to it. Reads whose bytes and descriptors always have
/// the same ratio do not tell the two costs apart; this splits the cost between them, and is too
/// small to show otherwise.
const RIDGE: f64 = 1e-6;

/// What one block costs a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadShape {
    /// Bytes of a block over all regions.
    pub bytes_per_block: u64,
    /// Descriptors of a block over all regions, if nothing merges.
    pub descriptors_per_block: u32,
}

/// A model of read time, `fixed + bytes × a + descriptors × b`, fitted to measured reads, beside the
/// engine's own prefill speed. Pure: durations are given to it.
///
/// The fit is weighted least squares over exponentially fading measurements, in relative error, so
/// that short reads teach the fixed cost and long ones the slopes. No cost is ever negative.
#[derive(Debug, Clone, Default)]
pub struct CostModel {
    samples: u32,
    /// Faded means of `x xᵀ` and of `x`, where `x` is (1, bytes, descriptors) ÷ seconds taken.
    normal: Matrix,
    target: Vector,
    /// Seconds: fixed, per byte, per descriptor.
    cost: Vector,
    prefills: u32,
    /// Seconds.
    prefill_per_token: f64,
}

type Vector = [f64; 3];
type Matrix = [Vector; 3];

impl CostModel {
    /// A model that knows nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Learns from a read that landed: its bytes, its descriptors after merging, and the time from
    /// submission to the last byte.
    pub fn observe_read(&mut self, bytes: u64, descriptors: u64, took: Duration) {
        let took = took.as_secs_f64();
        if took <= 0.0 || bytes == 0 {
            return;
        }
        self.samples = self.samples.saturating_add(1);
        let weight = weight(self.samples);
        let x = [1.0 / took, float(bytes) / took, float(descriptors) / took];
        for (row, &xi) in self.normal.iter_mut().zip(&x) {
            for (cell, &xj) in row.iter_mut().zip(&x) {
                *cell += weight * (xi * xj - *cell);
            }
        }
        for (cell, &xi) in self.target.iter_mut().zip(&x) {
            *cell += weight * (xi - *cell);
        }
        self.cost = fit(&self.normal, &self.target);
    }

    /// Learns from a prefill of `tokens` tokens.
    pub fn observe_prefill(&mut self, tokens: u64, took: Duration) {
        if tokens == 0 {
            return;
        }
        self.prefills = self.prefills.saturating_add(1);
        let per_token = took.as_secs_f64() / float(tokens);
        self.prefill_per_token += weight(self.prefills) * (per_token - self.prefill_per_token);
    }

    /// Whether enough was measured, of reads and of prefill, to move the threshold.
    #[must_use]
    pub const fn is_ready(&self) -> bool {
        self.knows_reads() && self.prefills > 0
    }

    const fn knows_reads(&self) -> bool {
        self.samples >= COST_SAMPLES_NEEDED
    }

    /// How long a read of `blocks` blocks should take, if its blocks do not merge; `None` before
    /// [`COST_SAMPLES_NEEDED`] reads.
    #[must_use]
    pub fn read_time(&self, shape: ReadShape, blocks: u32) -> Option<Duration> {
        let [fixed, ..] = self.cost;
        let seconds = self.per_block(shape).mul_add(f64::from(blocks), fixed);
        self.knows_reads()
            .then(|| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
    }

    /// From how many tokens on a read is faster than computing them: between one block and
    /// [`MAX_EFFECTIVE_THRESHOLD`]. `None` while the model is not [ready](Self::is_ready).
    #[must_use]
    pub fn effective_threshold(&self, shape: ReadShape, block_tokens: NonZeroU32) -> Option<u64> {
        if !self.is_ready() {
            return None;
        }
        let least = u64::from(block_tokens.get());
        let [fixed, ..] = self.cost;
        let read_per_token = self.per_block(shape) / f64::from(block_tokens.get());
        let gain_per_token = self.prefill_per_token - read_per_token;
        let tokens = if gain_per_token > 0.0 {
            ceil_to_u64(fixed / gain_per_token)
        } else {
            MAX_EFFECTIVE_THRESHOLD
        };
        Some(tokens.min(MAX_EFFECTIVE_THRESHOLD).max(least))
    }

    /// Seconds that one more block takes.
    fn per_block(&self, shape: ReadShape) -> f64 {
        let [_, per_byte, per_descriptor] = self.cost;
        float(shape.bytes_per_block) * per_byte
            + f64::from(shape.descriptors_per_block) * per_descriptor
    }
}

/// The plain mean at first, a fading one from then on.
fn weight(samples: u32) -> f64 {
    (1.0 / f64::from(samples)).max(WEIGHT)
}

/// Solves for the costs; costs that come out negative are left out, the most negative first.
fn fit(normal: &Matrix, target: &Vector) -> Vector {
    let mut used = [true; 3];
    loop {
        let cost = solve(normal, target, used);
        let worst = (0..3)
            .filter(|&i| cost[i] < 0.0)
            .min_by(|&a, &b| cost[a].total_cmp(&cost[b]));
        match worst {
            Some(i) => used[i] = false,
            None => return cost,
        }
    }
}

/// Gaussian elimination on the normal equations of the used costs, scaled to a unit diagonal: costs
/// differ by ten orders of magnitude. The matrix is positive definite by the ridge, so no pivoting.
fn solve(normal: &Matrix, target: &Vector, used: [bool; 3]) -> Vector {
    let scale: Vector = std::array::from_fn(|i| {
        if used[i] && normal[i][i] > 0.0 {
            1.0 / normal[i][i].sqrt()
        } else {
            0.0
        }
    });
    let mut a: Matrix = std::array::from_fn(|i| {
        std::array::from_fn(|j| {
            let unit = if i == j { RIDGE } else { 0.0 };
            let identity = if i == j && scale[i] == 0.0 { 1.0 } else { 0.0 };
            normal[i][j] * scale[i] * scale[j] + unit + identity
        })
    });
    let mut b: Vector = std::array::from_fn(|i| target[i] * scale[i]);
    for i in 0..3 {
        for j in i + 1..3 {
            let factor = a[j][i] / a[i][i];
            let pivot = a[i];
            for (cell, above) in a[j].iter_mut().zip(pivot).skip(i) {
                *cell -= factor * above;
            }
            b[j] -= factor * b[i];
        }
    }
    for i in (0..3).rev() {
        for j in i + 1..3 {
            b[i] -= a[i][j] * b[j];
        }
        b[i] /= a[i][i];
    }
    std::array::from_fn(|i| b[i] * scale[i])
}

/// Precise to 2^53, which is more than a measurement is.
#[allow(clippy::cast_precision_loss)]
fn float(x: u64) -> f64 {
    x as f64
}

/// Rounds up; saturates, and takes what is not a number for zero, as `as` is defined to.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn ceil_to_u64(x: f64) -> u64 {
    x.ceil() as u64
}

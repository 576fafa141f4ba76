//! What reads and prefill have cost, and from how many tokens on a read pays.

use std::num::NonZeroU32;
use std::time::Duration;

/// Reads that must have been measured before the model says anything.
pub const COST_SAMPLES_NEEDED: u32 = 16;

/// Highest threshold that the model will ask for, in tokens: a bad measurement must not turn reads
/// off altogether, since only reads can correct it.
pub const MAX_EFFECTIVE_THRESHOLD: u64 = 4096;

/// Share of a new measurement in the averages: the last thirty or so count.
const WEIGHT: f64 = 1.0 / 16.0;

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
#[derive(Debug, Clone, Default)]
pub struct CostModel {
    samples: u32,
    /// Seconds: fixed, per byte, per descriptor.
    cost: [f64; 3],
    prefill_per_token: Option<f64>,
}

impl CostModel {
    /// A model that knows nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Learns from a read that landed.
    pub fn observe_read(&mut self, bytes: u64, descriptors: u64, took: Duration) {
        let _ = (bytes, descriptors, took);
    }

    /// Learns from a prefill of `tokens` tokens.
    pub fn observe_prefill(&mut self, tokens: u64, took: Duration) {
        let _ = (tokens, took);
    }

    /// Whether enough was measured, of reads and of prefill.
    #[must_use]
    pub const fn is_ready(&self) -> bool {
        self.samples >= COST_SAMPLES_NEEDED && self.prefill_per_token.is_some()
    }

    /// How long a read of `blocks` blocks should take.
    #[must_use]
    pub fn read_time(&self, shape: ReadShape, blocks: u32) -> Duration {
        let _ = (shape, blocks, self.cost, WEIGHT);
        Duration::ZERO
    }

    /// From how many tokens on a read is faster than computing them: between one block and
    /// [`MAX_EFFECTIVE_THRESHOLD`]. `None` while the model is not ready.
    #[must_use]
    pub fn effective_threshold(&self, shape: ReadShape, block_tokens: NonZeroU32) -> Option<u64> {
        let _ = shape;
        self.is_ready().then(|| u64::from(block_tokens.get()))
    }
}

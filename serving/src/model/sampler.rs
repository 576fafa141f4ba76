//! Choosing the next token.

use std::cmp::Ordering;
use std::collections::HashMap;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// How tokens are chosen. The default is OpenAI's: from the whole distribution as it is.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits. Zero: always the likeliest token.
    pub temperature: f32,
    /// Only the likeliest tokens that together reach this probability.
    pub top_p: f32,
    /// Only this many of the likeliest tokens; zero for all.
    pub top_k: usize,
    /// Makes the choices repeatable.
    pub seed: Option<u64>,
    /// Taken from the logit of every token that was generated already.
    pub presence_penalty: f32,
    /// Taken once for every time that it was generated.
    pub frequency_penalty: f32,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            seed: None,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
        }
    }
}

impl SamplingParams {
    /// Always the likeliest token.
    #[must_use]
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            ..Self::default()
        }
    }
}

/// Chooses the tokens of one sequence.
pub struct Sampler {
    params: SamplingParams,
    rng: ChaCha8Rng,
    counts: HashMap<u32, u32>,
}

impl Sampler {
    /// A sampler at the beginning of its sequence.
    #[must_use]
    pub fn new(params: &SamplingParams) -> Self {
        let rng = match params.seed {
            Some(seed) => ChaCha8Rng::seed_from_u64(seed),
            None => ChaCha8Rng::from_rng(&mut rand::rng()),
        };
        Self {
            params: params.clone(),
            rng,
            counts: HashMap::new(),
        }
    }

    /// Chooses a token by its logits and remembers it for the penalties. Ties go to the lowest id;
    /// a logit that is no number is never chosen. Without logits the token is 0.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        let token = self.choose(logits);
        *self.counts.entry(token).or_insert(0) += 1;
        token
    }

    fn choose(&mut self, logits: &[f32]) -> u32 {
        let adjusted = |(id, logit): (u32, &f32)| Candidate {
            id,
            logit: logit - self.penalty(id),
        };
        let candidates = (0..).zip(logits).map(adjusted);
        let candidates = candidates.filter(|candidate| candidate.logit > f32::NEG_INFINITY);
        // Also for a temperature that is no number.
        if self.params.temperature.is_nan() || self.params.temperature <= 0.0 {
            // The first of those that are equal comes first in order.
            return candidates.min_by(likeliest_first).map_or(0, |best| best.id);
        }
        let mut candidates: Vec<Candidate> = candidates.collect();
        let kept = match self.params.top_k {
            0 => candidates.len(),
            top_k => top_k.min(candidates.len()),
        };
        if kept == 0 {
            return 0;
        }
        if kept < candidates.len() {
            candidates.select_nth_unstable_by(kept - 1, likeliest_first);
            candidates.truncate(kept);
        }
        candidates.sort_unstable_by(likeliest_first);
        self.draw(&candidates)
    }

    /// Draws from candidates, likeliest first.
    fn draw(&mut self, candidates: &[Candidate]) -> u32 {
        let Some(best) = candidates.first() else {
            return 0;
        };
        let temperature = f64::from(self.params.temperature);
        let weight = |candidate: &Candidate| {
            let below = f64::from(candidate.logit) - f64::from(best.logit);
            // The best one may be infinite.
            if below.is_nan() {
                1.0
            } else {
                (below / temperature).exp()
            }
        };
        let weights: Vec<f64> = candidates.iter().map(weight).collect();
        let total: f64 = weights.iter().sum();
        let mass = total * f64::from(self.params.top_p).clamp(0.0, 1.0);
        let mut nucleus = 0.0;
        let mut len = 0;
        for weight in &weights {
            nucleus += weight;
            len += 1;
            if nucleus >= mass {
                break;
            }
        }
        let mut left = self.rng.random::<f64>() * nucleus;
        for (candidate, weight) in candidates.iter().zip(&weights).take(len) {
            left -= weight;
            if left < 0.0 {
                return candidate.id;
            }
        }
        // Rounding left nothing.
        candidates.get(len - 1).map_or(best.id, |last| last.id)
    }

    fn penalty(&self, id: u32) -> f32 {
        match self.counts.get(&id) {
            Some(count) => {
                self.params.presence_penalty + self.params.frequency_penalty * *count as f32
            }
            None => 0.0,
        }
    }
}

struct Candidate {
    id: u32,
    logit: f32,
}

fn likeliest_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

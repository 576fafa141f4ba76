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
    // None is NaN: those were left out.
    let by_logit = b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal);
    by_logit.then(a.id.cmp(&b.id))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(params: &SamplingParams, logits: &[f32], count: usize) -> Vec<u32> {
        let mut sampler = Sampler::new(params);
        (0..count).map(|_| sampler.sample(logits)).collect()
    }

    fn seeded(seed: u64) -> SamplingParams {
        SamplingParams {
            seed: Some(seed),
            ..SamplingParams::default()
        }
    }

    #[test]
    fn greedy_takes_the_first_of_the_likeliest() {
        let logits = [0.0, 3.0, f32::NAN, 3.0, f32::NEG_INFINITY];
        assert_eq!(draws(&SamplingParams::greedy(), &logits, 2), [1, 1]);
        assert_eq!(draws(&SamplingParams::greedy(), &[], 1), [0]);
        assert_eq!(draws(&SamplingParams::greedy(), &[-0.0, 0.0], 1), [0]);
        assert_eq!(draws(&seeded(1), &[f32::NAN, f32::NEG_INFINITY], 1), [0]);
    }

    #[test]
    fn a_seed_repeats_the_choices() {
        let logits: Vec<f32> = (0..100).map(|i| (i % 7) as f32).collect();
        let first = draws(&seeded(5), &logits, 50);
        assert_eq!(first, draws(&seeded(5), &logits, 50));
        assert_ne!(first, draws(&seeded(6), &logits, 50));
    }

    #[test]
    fn choices_follow_the_distribution() {
        let logits = [0.7_f32.ln(), 0.2_f32.ln(), 0.1_f32.ln()];
        let share = |params: &SamplingParams, id| {
            let drawn = draws(params, &logits, 4000);
            drawn.iter().filter(|drawn| **drawn == id).count() as f32 / 4000.0
        };
        assert!((share(&seeded(1), 0) - 0.7).abs() < 0.03);
        let top_k = SamplingParams {
            top_k: 2,
            ..seeded(1)
        };
        assert!((share(&top_k, 1) - 0.2 / 0.9).abs() < 0.03);
        assert_eq!(share(&top_k, 2), 0.0);
        let top_p = SamplingParams {
            top_p: 0.65,
            ..seeded(1)
        };
        assert_eq!(share(&top_p, 0), 1.0);
        let top_p = SamplingParams {
            top_p: 0.0,
            ..seeded(1)
        };
        assert_eq!(share(&top_p, 0), 1.0);
        let cold = SamplingParams {
            temperature: 0.5,
            ..seeded(1)
        };
        assert!((share(&cold, 0) - 0.49 / 0.54).abs() < 0.03);
    }

    #[test]
    fn penalties_make_way_for_other_tokens() {
        let params = SamplingParams {
            frequency_penalty: 0.4,
            ..SamplingParams::greedy()
        };
        assert_eq!(draws(&params, &[1.0, 0.5], 5), [0, 0, 1, 0, 1]);
        let params = SamplingParams {
            presence_penalty: 2.0,
            ..SamplingParams::greedy()
        };
        assert_eq!(draws(&params, &[1.0, 0.5, 0.2], 4), [0, 1, 2, 0]);
    }
}

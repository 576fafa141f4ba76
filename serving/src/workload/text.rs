//! Text of a given number of tokens.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::model::Tokenizer;

/// Everyday words, each one token when a blank goes before it.
const WORDS: &[&str] = &[
    "the",
    "water",
    "house",
    "light",
    "under",
    "morning",
    "paper",
    "between",
    "small",
    "garden",
    "music",
    "river",
    "winter",
    "street",
    "window",
    "story",
    "yellow",
    "table",
    "village",
    "answer",
    "letter",
    "mountain",
    "simple",
    "market",
    "circle",
    "summer",
    "number",
    "island",
    "yesterday",
    "teacher",
    "machine",
    "and",
    "of",
    "with",
    "never",
    "always",
    "before",
    "after",
    "green",
    "old",
];
/// Words of a sentence.
const SENTENCE: usize = 12;

/// Makes text, the same for the same seed.
pub struct Filler<'a> {
    tokenizer: &'a Tokenizer,
}

impl<'a> Filler<'a> {
    /// Counts tokens as this tokenizer does.
    #[must_use]
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer }
    }

    /// Text of about `tokens` tokens: at least so many words, at most so many tokens and a few.
    #[must_use]
    pub fn text(&self, seed: u64, tokens: usize) -> String {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut text = String::new();
        let mut count = 0;
        // Whole sentences are counted together: words may be less than a token each, never far more.
        while count < tokens {
            let mut words = Vec::with_capacity(SENTENCE);
            for _ in 0..SENTENCE.min(tokens - count) {
                let at = rng.random_range(0..WORDS.len());
                words.push(WORDS.get(at).copied().unwrap_or_default());
            }
            let sentence = format!("{}.\n", words.join(" "));
            count += self
                .tokenizer
                .encode_plain(&sentence)
                .map_or(SENTENCE, |ids| ids.len())
                .max(1);
            text.push_str(&sentence);
        }
        text
    }
}

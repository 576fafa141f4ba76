//! The tokens of a demo conversation, known to both processes without sending them: a token id is a
//! function of the conversation, the position, and how often the text there has been rewritten.

use serde::{Deserialize, Serialize};

/// Token ids are below this, as in a model with so large a vocabulary.
pub const VOCABULARY: u32 = 151_936;

/// The text of a conversation so far.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct History {
    conversation: u64,
    tokens: u32,
    /// Positions from which on the text was rewritten, in the order in which that happened.
    edits: Vec<u32>,
}

impl History {
    /// A conversation without tokens.
    #[must_use]
    pub fn new(conversation: u64) -> Self {
        Self {
            conversation,
            tokens: 0,
            edits: Vec::new(),
        }
    }

    /// Makes the text `tokens` tokens long.
    pub fn set_len(&mut self, tokens: u32) {
        self.tokens = tokens;
    }

    /// Rewrites the text from position `from` on; its length stays.
    pub fn edit(&mut self, from: u32) {
        self.edits.push(from);
    }

    /// Tokens in the text.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.tokens
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    /// The token ids.
    #[must_use]
    pub fn tokens(&self) -> Vec<u32> {
        (0..self.tokens).map(|at| self.token(at)).collect()
    }

    fn token(&self, at: u32) -> u32 {
        let version = self.edits.iter().filter(|from| **from <= at).count() as u64;
        let mut x = self.conversation ^ (u64::from(at) << 20) ^ (version << 52);
        x = (x ^ (x >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        // Below the vocabulary, so it fits.
        ((x >> 32) % u64::from(VOCABULARY)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_grows_at_its_end_and_changes_from_an_edit_on() {
        let mut history = History::new(7);
        history.set_len(1000);
        let before = history.tokens();
        history.set_len(1500);
        assert_eq!(history.tokens()[..1000], before);
        history.edit(600);
        let after = history.tokens();
        assert_eq!(after[..600], before[..600]);
        assert_ne!(after[600], before[600]);
        let same = after[600..1000]
            .iter()
            .zip(&before[600..])
            .filter(|(a, b)| a == b);
        assert!(same.count() < 5);
        assert!(after.iter().all(|token| *token < VOCABULARY));
    }

    #[test]
    fn conversations_differ() {
        let tokens = |conversation| {
            let mut history = History::new(conversation);
            history.set_len(64);
            history.tokens()
        };
        assert_ne!(tokens(1), tokens(2));
    }
}

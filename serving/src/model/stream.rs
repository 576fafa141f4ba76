//! Tokens to text while they come.

use super::Tokenizer;

/// Turns tokens into text one by one, and never shows a part of a character.
pub struct TokenStream {
    tokenizer: Tokenizer,
    /// The beginning of a character whose end has not come.
    pending: Vec<u8>,
}

impl TokenStream {
    pub(super) fn new(tokenizer: Tokenizer) -> Self {
        Self {
            tokenizer,
            pending: Vec::new(),
        }
    }

    /// Takes a token; returns the text that is complete with it. Special tokens have no text.
    pub fn push(&mut self, token: u32) -> Option<String> {
        self.pending
            .extend_from_slice(self.tokenizer.bytes(token).unwrap_or_default());
        let kept = unfinished(&self.pending);
        let whole = self.pending.len().saturating_sub(kept);
        let text: Vec<u8> = self.pending.drain(..whole).collect();
        show(&text)
    }

    /// Ends the text: what is left of a character becomes `U+FFFD`.
    pub fn finish(&mut self) -> Option<String> {
        show(&std::mem::take(&mut self.pending))
    }
}

fn show(bytes: &[u8]) -> Option<String> {
    (!bytes.is_empty()).then(|| String::from_utf8_lossy(bytes).into_owned())
}

/// How many bytes at the end may be the beginning of a character.
fn unfinished(bytes: &[u8]) -> usize {
    let last = bytes.utf8_chunks().last();
    let invalid = last.map_or(&[][..], |chunk| chunk.invalid());
    // A beginning that nothing can complete is as long as a chunk's invalid part, too; the two
    // differ in whether more bytes could help.
    let could_go_on = match std::str::from_utf8(invalid) {
        Err(error) => error.error_len().is_none(),
        Ok(_) => false,
    };
    if could_go_on { invalid.len() } else { 0 }
}

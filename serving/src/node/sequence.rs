//! One answer in the making: its tokens, its blocks, its text.

use std::sync::Arc;
use std::time::Instant;

use kv_xfer::engine::Offer;
use kv_xfer::identity::{BlockHash, HashChain};
use kv_xfer::ids::BlockId;

use super::request::{Event, FinishReason, Finished, Report, Request};
use super::stop::StopScanner;
use crate::model::{Sampler, TokenStream, Tokenizer};

/// An answer in the making.
pub struct Sequence {
    /// What was asked.
    pub request: Arc<Request>,
    /// Which of the request's answers.
    pub choice: u32,
    /// Its place in the order of arrival.
    pub number: u64,
    /// The sequence that computes the same prompt before this one does.
    pub leader: Option<u64>,
    /// Prompt and answer so far.
    pub tokens: Vec<u32>,
    /// Hashes of the full blocks of `tokens`.
    pub hashes: Vec<BlockHash>,
    chain: HashChain,
    /// Its blocks, in the order of its tokens.
    pub blocks: Vec<BlockId>,
    /// Tokens whose KV is in `blocks`.
    pub computed: usize,
    /// Blocks that were made findable, or were found.
    pub registered: usize,
    /// Blocks on another node, not yet decided about.
    pub offer: Option<Offer>,
    /// Where time and tokens went.
    pub report: Report,
    /// When it was first worked on.
    pub started: Option<Instant>,
    /// When its prompt's computation began.
    pub computing: Option<Instant>,
    sampler: Sampler,
    text: TokenStream,
    stops: StopScanner,
}

impl std::fmt::Debug for Sequence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sequence")
            .field("request", &self.request.id)
            .field("choice", &self.choice)
            .field("tokens", &self.tokens.len())
            .field("computed", &self.computed)
            .finish_non_exhaustive()
    }
}

impl Sequence {
    /// The `choice`-th answer of a request.
    #[must_use]
    pub fn new(request: Arc<Request>, choice: u32, number: u64, tokenizer: &Tokenizer) -> Self {
        let mut sampling = request.sampling.clone();
        sampling.seed = sampling
            .seed
            .map(|seed| seed.wrapping_add(u64::from(choice)));
        Self {
            choice,
            number,
            leader: None,
            tokens: request.tokens.clone(),
            hashes: request.hashes.clone(),
            chain: request.chain.clone(),
            blocks: Vec::new(),
            computed: 0,
            registered: 0,
            offer: None,
            report: Report {
                prompt_tokens: request.tokens.len(),
                ..Report::default()
            },
            started: None,
            computing: None,
            sampler: Sampler::new(&sampling),
            text: tokenizer.stream(),
            stops: StopScanner::new(&request.limits.stop),
            request,
        }
    }

    /// Tokens of a block.
    #[must_use]
    pub fn block_tokens(&self) -> usize {
        (self.chain.block_tokens() as usize).max(1)
    }

    /// Tokens that are not computed yet.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.tokens.len().saturating_sub(self.computed)
    }

    /// Tokens of the answer so far.
    #[must_use]
    pub fn generated(&self) -> usize {
        self.tokens.len().saturating_sub(self.request.tokens.len())
    }

    /// Whether nothing but its newest token is left to compute.
    #[must_use]
    pub fn decoding(&self) -> bool {
        self.generated() > 0 && self.pending() == 1
    }

    /// Hashes of the blocks that may be found or read: never that of the last token, which is computed
    /// so that there are logits.
    #[must_use]
    pub fn reusable_hashes(&self) -> &[BlockHash] {
        let blocks = self.tokens.len().saturating_sub(1) / self.block_tokens();
        self.hashes.get(..blocks).unwrap_or(&self.hashes)
    }

    /// Blocks missing for its tokens.
    #[must_use]
    pub fn missing_blocks(&self) -> usize {
        let needed = self.tokens.len().div_ceil(self.block_tokens());
        needed.saturating_sub(self.blocks.len())
    }

    /// Blocks that became full since the last call, with their hashes.
    pub fn newly_full(&mut self) -> Vec<(BlockId, BlockHash)> {
        let full = self.computed / self.block_tokens();
        let blocks = self.blocks.iter().copied().zip(self.hashes.iter().copied());
        let new = blocks.take(full).skip(self.registered).collect();
        self.registered = self.registered.max(full);
        new
    }

    /// Forgets its blocks; its tokens are computed again. The text that was sent stays sent.
    pub fn rewind(&mut self) -> Vec<BlockId> {
        self.computed = 0;
        self.registered = 0;
        std::mem::take(&mut self.blocks)
    }

    /// The blocks that hold its computed tokens, their hashes, and how many tokens that is.
    #[must_use]
    pub fn described(&self) -> (&[BlockId], &[BlockHash], usize) {
        let used = self.computed.div_ceil(self.block_tokens());
        let full = self.computed / self.block_tokens();
        (
            self.blocks.get(..used).unwrap_or(&self.blocks),
            self.hashes.get(..full).unwrap_or(&self.hashes),
            self.computed,
        )
    }

    /// Chooses the next token, sends its text, and says whether the answer has ended.
    pub fn sample(&mut self, mut logits: Vec<f32>, eos: &[u32]) -> Option<FinishReason> {
        let limits = &self.request.limits;
        let may_end = self.generated() + 1 > limits.min_tokens;
        if !may_end {
            for token in eos {
                if let Some(logit) = logits.get_mut(*token as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        let token = self.sampler.sample(&logits);
        self.tokens.push(token);
        let new = self.chain.extend(&[token]);
        self.hashes.extend(new);
        let full = self.generated() >= limits.max_tokens;
        if eos.contains(&token) && !limits.ignore_eos {
            self.flush();
            return Some(FinishReason::Stop);
        }
        let piece = self.text.push(token).unwrap_or_default();
        let ended = self.scan(&piece, may_end);
        match (ended, full) {
            (true, _) => Some(FinishReason::Stop),
            (false, true) => {
                self.flush();
                Some(FinishReason::Length)
            }
            (false, false) => None,
        }
    }

    /// Sends text up to a stop string; true if there is one.
    fn scan(&mut self, piece: &str, may_end: bool) -> bool {
        if !may_end {
            self.send(piece.to_owned());
            return false;
        }
        let scanned = self.stops.push(piece);
        self.send(scanned.text);
        scanned.stopped
    }

    /// Sends what was held back.
    fn flush(&mut self) {
        let rest = self.text.finish().unwrap_or_default();
        let scanned = self.stops.push(&rest);
        self.send(scanned.text);
        if !scanned.stopped {
            let rest = self.stops.finish();
            self.send(rest);
        }
    }

    fn send(&self, text: String) {
        if !text.is_empty() {
            // Whether anybody still listens is looked at once a step.
            let _ = self.request.output.send(Event::Text {
                choice: self.choice,
                text,
            });
        }
    }

    /// Sends the end.
    pub fn end(&mut self, reason: FinishReason, params: Option<serde_json::Value>) {
        let end = Finished {
            reason,
            completion_tokens: self.generated(),
            kv_transfer_params: params,
            report: std::mem::take(&mut self.report),
        };
        let _ = self.request.output.send(Event::Finished {
            choice: self.choice,
            end: Box::new(end),
        });
    }
}

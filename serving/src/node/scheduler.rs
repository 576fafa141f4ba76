//! Which sequence is worked on when: continuous batching with chunked prefill over one pool.
//!
//! Sequences wait in the order of arrival. An admitted one gets the blocks for all its tokens: those
//! found in the cache and fresh ones, some of which may be filled by a read from another node, while
//! the others go on. A step computes one token for each answer under way, then as much of the
//! prompts as its budget allows. When blocks run out, the youngest sequence gives up its own.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_xfer::engine::{FailedBlocks, ReadOutcome};
use kv_xfer::policy::Action;
use serde_json::Value;

use super::connector::{NotRead, Reading};
use super::memory::Memory;
use super::metrics::Metrics;
use super::request::{Decided, Event, Failure, FinishReason, PREFILL_CACHED, Request};
use super::sequence::Sequence;
use super::settings::NodeSettings;
use crate::model::Tokenizer;

/// A part of a sequence that the next step computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Which sequence.
    pub number: u64,
    /// How many of its pending tokens.
    pub tokens: usize,
}

/// What became of a sequence that was to be admitted.
enum Admission {
    Running,
    Reading,
    /// There are no blocks for it now.
    NoRoom(Box<Sequence>),
}

/// All sequences of a node, by their number: older ones come first.
#[derive(Debug)]
pub struct Scheduler {
    /// The blocks.
    pub memory: Memory,
    waiting: BTreeMap<u64, Sequence>,
    reading: BTreeMap<u64, (Sequence, Reading)>,
    running: BTreeMap<u64, Sequence>,
    max_seqs: usize,
    budget: usize,
    queue_timeout: Duration,
    next: u64,
    beat: Instant,
    metrics: Metrics,
}

impl Scheduler {
    /// An empty one.
    #[must_use]
    pub fn new(memory: Memory, settings: &NodeSettings, metrics: Metrics) -> Self {
        Self {
            memory,
            waiting: BTreeMap::new(),
            reading: BTreeMap::new(),
            running: BTreeMap::new(),
            max_seqs: settings.max_num_seqs.max(1),
            budget: settings.max_num_batched_tokens.max(1),
            queue_timeout: settings.queue_timeout,
            next: 0,
            beat: Instant::now(),
            metrics,
        }
    }

    /// How many sequences wait, are read, and run.
    #[must_use]
    pub fn lengths(&self) -> (usize, usize, usize) {
        (self.waiting.len(), self.reading.len(), self.running.len())
    }

    /// A running sequence.
    #[must_use]
    pub fn running(&self, number: u64) -> Option<&Sequence> {
        self.running.get(&number)
    }

    /// Takes a request.
    pub fn submit(&mut self, request: Request, tokenizer: &Tokenizer) {
        let mut offer = None;
        let mut not_read = None;
        match self
            .memory
            .connector
            .accept(&request.transfer, &request.owner)
        {
            Ok(accepted) => offer = accepted,
            Err(error) => not_read = Some(error),
        }
        let request = Arc::new(request);
        let leader = self.next;
        for choice in 0..request.choices.max(1) {
            let number = self.next;
            self.next = self.next.saturating_add(1);
            let mut sequence = Sequence::new(Arc::clone(&request), choice, number, tokenizer);
            if choice == 0 {
                sequence.offer = offer.take();
                if let Some(not_read) = not_read.take() {
                    self.recompute(&mut sequence, &not_read);
                }
            } else {
                sequence.leader = Some(leader);
            }
            self.waiting.insert(number, sequence);
        }
    }

    /// Drops what nobody listens to any more.
    pub fn drop_abandoned(&mut self) {
        let closed = |sequence: &Sequence| sequence.request.output.is_closed();
        let numbers: Vec<u64> = self
            .waiting
            .values()
            .chain(self.running.values())
            .chain(self.reading.values().map(|(sequence, _)| sequence))
            .filter(|sequence| closed(sequence))
            .map(|sequence| sequence.number)
            .collect();
        for number in numbers {
            if self.abort(number) {
                self.metrics.request("aborted");
            }
        }
    }

    /// Refuses requests that have waited too long. One of which something was worked on is served:
    /// its client may have text already.
    pub fn refuse_overdue(&mut self, now: Instant) {
        let waited = |sequence: &Sequence| now.saturating_duration_since(sequence.request.arrived);
        let overdue: Vec<(Arc<Request>, Duration)> = self
            .waiting
            .values()
            .filter(|sequence| sequence.leader.is_none() && sequence.started.is_none())
            .map(|sequence| (sequence, waited(sequence)))
            .filter(|(_, waited)| *waited > self.queue_timeout)
            .map(|(sequence, waited)| (Arc::clone(&sequence.request), waited))
            .collect();
        for (request, waited) in overdue {
            tracing::warn!(request = request.id, ?waited, "refused, it waited too long");
            let choices: Vec<u64> = self
                .waiting
                .values()
                .filter(|sequence| Arc::ptr_eq(&sequence.request, &request))
                .map(|sequence| sequence.number)
                .collect();
            for number in choices {
                self.end_failed(number, &Failure::Overdue { waited }, "overdue");
            }
        }
    }

    /// Ends every sequence.
    pub fn fail_all(&mut self, failure: &Failure) {
        let numbers: Vec<u64> = self
            .waiting
            .keys()
            .chain(self.running.keys())
            .chain(self.reading.keys())
            .copied()
            .collect();
        for number in numbers {
            self.fail(number, failure);
        }
    }

    /// Ends a sequence that cannot be served.
    pub fn fail(&mut self, number: u64, failure: &Failure) {
        self.end_failed(number, failure, "failed");
    }

    fn end_failed(&mut self, number: u64, failure: &Failure, outcome: &str) {
        let found = self
            .running
            .get(&number)
            .or_else(|| self.waiting.get(&number))
            .or_else(|| self.reading.get(&number).map(|(sequence, _)| sequence));
        if let Some(sequence) = found {
            let _ = sequence.request.output.send(Event::Failed(failure.clone()));
            self.metrics.request(outcome);
        }
        self.abort(number);
    }

    /// Takes a sequence out wherever it is, and its blocks and its claim on other nodes' with it.
    fn abort(&mut self, number: u64) -> bool {
        if let Some(sequence) = self.waiting.remove(&number) {
            if let Some(offer) = &sequence.offer {
                self.memory.connector.release(offer);
            }
            return true;
        }
        if let Some(sequence) = self.running.remove(&number) {
            self.memory.release(&sequence.blocks);
            return true;
        }
        let Some((mut sequence, reading)) = self.reading.remove(&number) else {
            return false;
        };
        self.abandon(&mut sequence, &reading);
        // Dropping the read cancels it; its blocks come back once nothing can write into them.
        drop(reading);
        true
    }

    /// Puts the blocks of a read that was not waited for under quarantine, and releases the others.
    fn abandon(&mut self, sequence: &mut Sequence, reading: &Reading) {
        let done = self.memory.cache.quarantine(&reading.blocks);
        self.memory.booked(done);
        self.rewind_beside(sequence, reading);
    }

    /// Releases a sequence's blocks except those of its read.
    fn rewind_beside(&mut self, sequence: &mut Sequence, reading: &Reading) {
        let mut blocks = sequence.rewind();
        blocks.retain(|block| !reading.blocks.contains(block));
        self.memory.release(&blocks);
    }

    /// Looks at every read; a sequence whose read has ended runs, or waits to be computed.
    pub fn poll_reads(&mut self, now: Instant) {
        let numbers: Vec<u64> = self.reading.keys().copied().collect();
        for number in numbers {
            let Some((_, reading)) = self.reading.get_mut(&number) else {
                continue;
            };
            let outcome = self.memory.connector.poll(reading);
            let overdue = outcome.is_none() && now >= reading.give_up;
            if outcome.is_none() && !overdue {
                continue;
            }
            let Some((sequence, reading)) = self.reading.remove(&number) else {
                continue;
            };
            self.read_ended(sequence, reading, outcome, now);
        }
    }

    fn read_ended(
        &mut self,
        mut sequence: Sequence,
        reading: Reading,
        outcome: Option<ReadOutcome>,
        now: Instant,
    ) {
        let failure = match outcome {
            Some(Ok(landed)) => {
                sequence.report.transfer = landed.report.total;
                let blocks = landed.blocks.into_ids();
                let done = self.memory.cache.landed(&blocks);
                self.memory.booked(done);
                let tokens = blocks.len().saturating_mul(sequence.block_tokens());
                sequence.computed = sequence.computed.saturating_add(tokens);
                sequence.report.read_tokens = tokens;
                sequence.report.decision = Decided::Read;
                self.metrics.read_tokens.inc_by(tokens as u64);
                self.run(sequence, now);
                return;
            }
            Some(Err(failure)) => {
                let done = match failure.blocks {
                    FailedBlocks::Returned(blocks) => self.memory.cache.discard(&blocks.into_ids()),
                    FailedBlocks::Quarantined { .. } => {
                        self.memory.cache.quarantine(&reading.blocks)
                    }
                };
                self.memory.booked(done);
                self.rewind_beside(&mut sequence, &reading);
                NotRead {
                    name: failure.error.name(),
                    why: failure.error.to_string(),
                }
            }
            None => {
                self.abandon(&mut sequence, &reading);
                NotRead {
                    name: "given_up",
                    why: "the read did not end by its deadline".to_owned(),
                }
            }
        };
        sequence.report.transfer = sequence.started.map_or(Duration::ZERO, |at| now - at);
        self.recompute(&mut sequence, &failure);
        self.waiting.insert(sequence.number, sequence);
    }

    /// Notes that offered blocks are computed instead.
    fn recompute(&self, sequence: &mut Sequence, not_read: &NotRead) {
        tracing::info!(
            request = sequence.request.id,
            reason = not_read.name,
            why = not_read.why,
            "offered blocks are computed instead"
        );
        self.metrics.fallback(not_read.name);
        sequence.report.decision = Decided::Recompute;
        not_read.name.clone_into(&mut sequence.report.reason);
        sequence.report.fallback = Some(not_read.name.to_owned());
    }

    fn run(&mut self, mut sequence: Sequence, now: Instant) {
        self.register(&mut sequence);
        sequence.computing.get_or_insert(now);
        self.running.insert(sequence.number, sequence);
    }

    /// Makes full blocks findable.
    fn register(&mut self, sequence: &mut Sequence) {
        for (block, hash) in sequence.newly_full() {
            let done = self.memory.cache.register(block, hash);
            self.memory.booked(done);
        }
    }

    /// Chooses what the next step computes.
    pub fn plan(&mut self, now: Instant) -> Vec<Piece> {
        let mut budget = self.budget;
        let mut pieces = Vec::new();
        let running: Vec<u64> = self.running.keys().copied().collect();
        for number in &running {
            let decoding = self.running.get(number).is_some_and(Sequence::decoding);
            if decoding && budget > 0 && self.make_room(*number) {
                pieces.push(Piece {
                    number: *number,
                    tokens: 1,
                });
                budget = budget.saturating_sub(1);
            }
        }
        // A sequence that made room has no piece in this step.
        pieces.retain(|piece| self.running.contains_key(&piece.number));
        for (number, sequence) in &self.running {
            if !sequence.decoding() {
                take(&mut pieces, &mut budget, *number, sequence.pending());
            }
        }
        self.admit_waiting(&mut pieces, &mut budget, now);
        pieces
    }

    /// Blocks for a sequence's newest token; the youngest give up theirs if need be. False when it was
    /// the youngest itself.
    fn make_room(&mut self, number: u64) -> bool {
        loop {
            let Some(sequence) = self.running.get_mut(&number) else {
                return false;
            };
            let missing = sequence.missing_blocks();
            if missing == 0 {
                return true;
            }
            if let Some(blocks) = self.memory.allocate(missing) {
                sequence.blocks.extend(blocks);
                return true;
            }
            let Some((_, mut youngest)) = self.running.pop_last() else {
                return false;
            };
            tracing::debug!(
                request = youngest.request.id,
                "gives its blocks to older ones"
            );
            self.metrics.preemptions.inc();
            let blocks = youngest.rewind();
            self.memory.release(&blocks);
            self.waiting.insert(youngest.number, youngest);
        }
    }

    fn admit_waiting(&mut self, pieces: &mut Vec<Piece>, budget: &mut usize, now: Instant) {
        let numbers: Vec<u64> = self.waiting.keys().copied().collect();
        for number in numbers {
            if self.running.len().saturating_add(self.reading.len()) >= self.max_seqs {
                return;
            }
            let Some(sequence) = self.waiting.get(&number) else {
                continue;
            };
            if sequence
                .leader
                .is_some_and(|leader| self.has_prompt_ahead(leader))
            {
                continue;
            }
            // A read needs none of this step's budget.
            if *budget == 0 && sequence.offer.is_none() {
                return;
            }
            let Some(sequence) = self.waiting.remove(&number) else {
                continue;
            };
            match self.admit(sequence, now) {
                Admission::Reading => {}
                Admission::Running => {
                    if let Some(sequence) = self.running.get(&number) {
                        take(pieces, budget, number, sequence.pending());
                    }
                }
                Admission::NoRoom(sequence) => {
                    self.waiting.insert(number, *sequence);
                    return;
                }
            }
        }
    }

    /// Whether a sequence has still to compute its prompt.
    fn has_prompt_ahead(&self, number: u64) -> bool {
        self.waiting.contains_key(&number)
            || self.reading.contains_key(&number)
            || self
                .running
                .get(&number)
                .is_some_and(|sequence| sequence.generated() == 0)
    }

    /// Gives a waiting sequence its blocks, and starts its read if there is something worth reading.
    fn admit(&mut self, mut sequence: Sequence, now: Instant) -> Admission {
        let block_tokens = sequence.block_tokens();
        let hits = self.memory.cache.acquire_prefix(sequence.reusable_hashes());
        let local = hits.len();
        sequence.blocks = hits;
        let Some(fresh) = self.memory.allocate(sequence.missing_blocks()) else {
            let blocks = sequence.rewind();
            self.memory.release(&blocks);
            return Admission::NoRoom(Box::new(sequence));
        };
        sequence.blocks.extend(fresh);
        sequence.registered = local;
        sequence.computed = local.saturating_mul(block_tokens);
        if sequence.started.is_none() {
            sequence.started = Some(now);
            sequence.report.queue = now.saturating_duration_since(sequence.request.arrived);
            sequence.report.local_hit_tokens = sequence.computed;
            self.metrics
                .local_hit_tokens
                .inc_by(sequence.computed as u64);
        }
        let Some(offer) = sequence.offer.take() else {
            self.run(sequence, now);
            return Admission::Running;
        };
        let hashes = sequence.reusable_hashes();
        let decision =
            self.memory
                .connector
                .decide(&offer, &sequence.request, hashes, sequence.computed);
        tracing::debug!(request = sequence.request.id, ?decision, "decided");
        self.metrics.decision(decision.reason.as_str());
        decision
            .reason
            .as_str()
            .clone_into(&mut sequence.report.reason);
        let (first, end) = match decision.action {
            Action::Read {
                first_block,
                blocks,
                ..
            } => {
                let first = first_block as usize;
                (first, first.saturating_add(blocks as usize))
            }
            action => {
                sequence.report.decision = match action {
                    Action::Nothing => Decided::Nothing,
                    _ => Decided::Recompute,
                };
                self.run(sequence, now);
                return Admission::Running;
            }
        };
        let destination = sequence.blocks.get(first..end).unwrap_or_default().to_vec();
        let claimed = self.memory.cache.claim(&destination);
        if !self.memory.booked(claimed) {
            self.memory.connector.release(&offer);
            self.run(sequence, now);
            return Admission::Running;
        }
        let hashes = sequence.reusable_hashes();
        match self
            .memory
            .connector
            .read(offer, hashes, first, destination.clone())
        {
            Ok(reading) => {
                self.reading.insert(sequence.number, (sequence, reading));
                Admission::Reading
            }
            Err(not_read) => {
                let done = self.memory.cache.landed(&destination);
                self.memory.booked(done);
                self.recompute(&mut sequence, &not_read);
                self.run(sequence, now);
                Admission::Running
            }
        }
    }

    /// Notes that a piece was computed.
    pub fn computed(&mut self, piece: Piece) {
        let Some(mut sequence) = self.running.remove(&piece.number) else {
            return;
        };
        let prompt = sequence.generated() == 0;
        sequence.computed = sequence.computed.saturating_add(piece.tokens);
        if prompt {
            sequence.report.computed_tokens =
                sequence.report.computed_tokens.saturating_add(piece.tokens);
        }
        self.metrics.computed_tokens.inc_by(piece.tokens as u64);
        self.register(&mut sequence);
        self.running.insert(piece.number, sequence);
    }

    /// Chooses a sequence's next token; ends it if that was its last.
    pub fn sample(&mut self, number: u64, logits: Vec<f32>, eos: &[u32]) {
        let Some(sequence) = self.running.get_mut(&number) else {
            return;
        };
        if sequence.generated() == 0 {
            let now = Instant::now();
            let arrived = sequence.request.arrived;
            let ttft = now.saturating_duration_since(arrived);
            self.metrics.first_token(ttft.as_secs_f64());
            let began = sequence.computing.unwrap_or(arrived);
            sequence.report.prefill = now.saturating_duration_since(began);
        }
        self.metrics.generated_tokens.inc();
        if let Some(reason) = sequence.sample(logits, eos) {
            self.finish(number, reason);
        }
    }

    /// Ends an answer: its blocks are leased if somebody may read them, and given up.
    fn finish(&mut self, number: u64, reason: FinishReason) {
        let Some(mut sequence) = self.running.remove(&number) else {
            return;
        };
        let listened = !sequence.request.output.is_closed();
        let report = &mut sequence.report;
        let here = report.local_hit_tokens.saturating_add(report.read_tokens);
        // What was read from the prefill node was computed there, unless it says otherwise.
        report.cached_tokens = match sequence.request.transfer.prefill_cached {
            Some(there) => there.min(report.prompt_tokens),
            None => here,
        };
        let mut params = None;
        if listened {
            let (blocks, hashes, tokens) = sequence.described();
            params = self
                .memory
                .connector
                .lease(&sequence.request, blocks, hashes, tokens);
            if sequence.request.transfer.to_decode
                && let Some(params) = params.as_mut().and_then(Value::as_object_mut)
            {
                let cached = sequence.report.cached_tokens;
                params.insert(PREFILL_CACHED.to_owned(), cached.into());
            }
            if params.is_some() {
                let done = self.memory.cache.lease(blocks);
                self.memory.booked(done);
            }
        }
        self.memory.release(&sequence.blocks);
        self.metrics.request(match reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        });
        sequence.end(reason, params);
    }

    /// Keeps the leases alive that waiting sequences count on.
    pub fn heartbeat(&mut self, now: Instant) {
        if now.saturating_duration_since(self.beat) < self.memory.connector.heartbeat() {
            return;
        }
        self.beat = now;
        for sequence in self.waiting.values() {
            if let Some(offer) = &sequence.offer {
                self.memory.connector.keep_alive(offer);
            }
        }
        for (_, reading) in self.reading.values() {
            self.memory.connector.keep_alive(&reading.offer);
        }
    }
}

/// Gives a sequence part of the step's budget.
fn take(pieces: &mut Vec<Piece>, budget: &mut usize, number: u64, pending: usize) {
    let tokens = pending.min(*budget);
    if tokens > 0 {
        pieces.push(Piece { number, tokens });
        *budget = budget.saturating_sub(tokens);
    }
}

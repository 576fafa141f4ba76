//! The engine thread: takes requests, plans steps, runs the model.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, TryRecvError, select};

use super::metrics::{Metrics, Published};
use super::request::{Failure, Request};
use super::scheduler::{Piece, Scheduler};
use crate::model::{Chunk, Loaded};

/// How often an idle node looks whether a request was abandoned or a deadline has passed.
const TICK: Duration = Duration::from_millis(50);
/// Time that ending reads and leases may take.
const SHUTDOWN: Duration = Duration::from_secs(2);

/// What the engine thread is told.
#[derive(Debug)]
pub enum Command {
    /// Serve a request.
    Submit(Box<Request>),
    /// Free every block that nobody holds; answers how many.
    Reset(tokio::sync::oneshot::Sender<usize>),
    /// End.
    Shutdown,
}

/// What the engine thread owns.
pub struct Worker {
    loaded: Arc<Loaded>,
    scheduler: Scheduler,
    commands: Receiver<Command>,
    /// Rung by reads that have ended.
    bell: Receiver<()>,
    /// Keeps the bell from being disconnected.
    _ring: Sender<()>,
    metrics: Metrics,
    stopping: bool,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").finish_non_exhaustive()
    }
}

impl Worker {
    /// Gathers what the thread needs.
    #[must_use]
    pub fn new(
        loaded: Arc<Loaded>,
        scheduler: Scheduler,
        commands: Receiver<Command>,
        (ring, bell): (Sender<()>, Receiver<()>),
        metrics: Metrics,
    ) -> Self {
        Self {
            loaded,
            scheduler,
            commands,
            bell,
            _ring: ring,
            metrics,
            stopping: false,
        }
    }

    /// Works until it is told to end, or nobody can tell it anything any more.
    pub fn run(mut self) {
        loop {
            self.take_commands();
            if self.stopping {
                break;
            }
            let now = Instant::now();
            self.scheduler.memory.collect();
            self.scheduler.drop_abandoned();
            self.scheduler.refuse_overdue(now);
            self.scheduler.poll_reads(now);
            self.scheduler.memory.restore();
            self.scheduler.heartbeat(now);
            let pieces = self.scheduler.plan(now);
            self.publish();
            if pieces.is_empty() {
                self.wait();
            } else {
                self.step(&pieces);
            }
        }
        self.shutdown();
    }

    fn take_commands(&mut self) {
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.take(command),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.stopping = true;
                    return;
                }
            }
        }
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Submit(request) => self.scheduler.submit(*request, &self.loaded.tokenizer),
            Command::Reset(answer) => {
                self.scheduler.memory.collect();
                let freed = self.scheduler.memory.cache.reset();
                self.publish();
                let _ = answer.send(freed);
            }
            Command::Shutdown => self.stopping = true,
        }
    }

    /// Sleeps until there is something to do.
    fn wait(&mut self) {
        enum Woken {
            By(Option<Command>),
            Freed(kv_xfer::lease::FreedBlocks),
            Returned(kv_xfer::engine::ReturnedBlocks),
            Nothing,
        }
        let connector = &self.scheduler.memory.connector;
        let woken = select! {
            recv(self.commands) -> command => Woken::By(command.ok()),
            recv(connector.freed()) -> freed => freed.map_or(Woken::Nothing, Woken::Freed),
            recv(connector.returned()) -> back => back.map_or(Woken::Nothing, Woken::Returned),
            recv(self.bell) -> _ => Woken::Nothing,
            default(TICK) => Woken::Nothing,
        };
        match woken {
            Woken::By(Some(command)) => self.take(command),
            Woken::By(None) => self.stopping = true,
            Woken::Freed(freed) => self.scheduler.memory.freed(&freed),
            Woken::Returned(returned) => self.scheduler.memory.returned(returned),
            Woken::Nothing => {}
        }
    }

    /// Computes the pieces as one batch and chooses the next tokens.
    fn step(&mut self, pieces: &[Piece]) {
        let mut chunks = Vec::with_capacity(pieces.len());
        let mut planned = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let Some(sequence) = self.scheduler.running(piece.number) else {
                continue;
            };
            let start = sequence.computed;
            let end = start.saturating_add(piece.tokens);
            let Some(tokens) = sequence.tokens.get(start..end) else {
                continue;
            };
            planned.push(*piece);
            chunks.push(Chunk {
                tokens,
                start,
                blocks: &sequence.blocks,
                logits: end == sequence.tokens.len(),
            });
        }
        let pool = self.scheduler.memory.connector.pool();
        let result = self.loaded.model.forward(pool, &chunks);
        drop(chunks);
        let logits = match result {
            Ok(logits) if logits.len() == planned.len() => logits,
            Ok(_) => {
                let failure = Failure::Internal("the model answered for other chunks".to_owned());
                return self.fail(&planned, &failure);
            }
            Err(error) => {
                tracing::error!(%error, "the model failed");
                return self.fail(&planned, &Failure::Model(error.to_string()));
            }
        };
        let eos = self.loaded.tokenizer.eos();
        for (piece, logits) in planned.into_iter().zip(logits) {
            self.scheduler.computed(piece);
            if let Some(logits) = logits {
                self.scheduler.sample(piece.number, logits, eos);
            }
        }
    }

    fn fail(&mut self, pieces: &[Piece], failure: &Failure) {
        for piece in pieces {
            self.scheduler.fail(piece.number, failure);
        }
    }

    fn publish(&self) {
        let (waiting, reading, running) = self.scheduler.lengths();
        self.metrics.publish(Published {
            blocks: self.scheduler.memory.cache.counts(),
            engine: self.scheduler.memory.connector.stats(),
            waiting,
            reading,
            running,
        });
    }

    fn shutdown(mut self) {
        self.scheduler.fail_all(&Failure::ShuttingDown);
        // Requests that came since.
        while let Ok(command) = self.commands.try_recv() {
            if let Command::Submit(request) = command {
                let _ = request
                    .output
                    .send(super::request::Event::Failed(Failure::ShuttingDown));
            }
        }
        let report = self.scheduler.memory.connector.shutdown(SHUTDOWN);
        tracing::info!(quarantined = report.quarantined, "the node has ended");
    }
}

//! Many reads in flight at once, from one thread: each is submitted again as soon as it has ended.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, unbounded};
use kv_xfer::engine::{
    Engine, FailedBlocks, Offer, ReadHandle, ReadRequest, ReleasePolicy, SubmitError,
};
use kv_xfer::identity::BlockHash;
use kv_xfer::memory::OwnedBlocks;

use super::fixture::{self, BenchError, LIMIT, SEED};

/// How long a lane whose read failed waits before its next: an engine would compute meanwhile.
const AFTER_FAILURE: Duration = Duration::from_millis(10);

/// A read that is done over and over.
#[derive(Debug)]
pub struct Lane {
    /// Which offer of the load it reads, for the books.
    pub peer: usize,
    /// First of the offered blocks.
    pub first: usize,
    /// The destination, while no read has it.
    blocks: Option<OwnedBlocks>,
    handle: Option<ReadHandle>,
}

impl Lane {
    /// Reads as many blocks as there are destinations, from the `first` offered one on.
    #[must_use]
    pub fn new(peer: usize, first: usize, blocks: OwnedBlocks) -> Self {
        Self {
            peer,
            first,
            blocks: Some(blocks),
            handle: None,
        }
    }

    /// The destination, when no read has it.
    #[must_use]
    pub fn blocks(&self) -> Option<&OwnedBlocks> {
        self.blocks.as_ref()
    }
}

/// Says which lane's read has ended.
struct Ended {
    lane: usize,
    tell: Sender<usize>,
}

impl Wake for Ended {
    fn wake(self: Arc<Self>) {
        // Nobody listens any more: then nobody waits either.
        let _ = self.tell.send(self.lane);
    }
}

/// What a load did.
#[derive(Debug, Clone, Default)]
pub struct Done {
    /// Reads that landed.
    pub reads: u64,
    /// Bytes by peer.
    pub bytes: Vec<u64>,
    /// How long it was on.
    pub took: Duration,
    /// Submissions that found the queue full. Their blocks came back at once.
    pub refused: u64,
    /// Reads that failed, with the last reason.
    pub failed: u64,
    /// Why the last of them failed.
    pub why: Option<String>,
    /// When that was.
    pub last_failure: Option<Instant>,
}

/// Lanes over one engine.
pub struct Load<'a> {
    engine: &'a Engine,
    offers: &'a [Offer],
    hashes: &'a [BlockHash],
    lanes: Vec<Lane>,
    tell: Sender<usize>,
    ended: Receiver<usize>,
    done: Done,
}

impl<'a> Load<'a> {
    /// Nothing is submitted yet.
    #[must_use]
    pub fn new(
        engine: &'a Engine,
        offers: &'a [Offer],
        hashes: &'a [BlockHash],
        lanes: Vec<Lane>,
    ) -> Self {
        let (tell, ended) = unbounded();
        Self {
            engine,
            offers,
            hashes,
            lanes,
            tell,
            ended,
            done: Done {
                bytes: vec![0; offers.len()],
                ..Done::default()
            },
        }
    }

    /// The lanes.
    #[must_use]
    pub fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    /// Overwrites every destination.
    ///
    /// # Errors
    /// [`BenchError::Access`].
    pub fn scribble(&mut self) -> Result<(), BenchError> {
        for blocks in self
            .lanes
            .iter_mut()
            .filter_map(|lane| lane.blocks.as_mut())
        {
            super::fixture::scribble(blocks)?;
        }
        Ok(())
    }

    /// Overwrites every destination, reads once more, and counts the bytes that are wrong. `order` are the
    /// blocks of every offer.
    ///
    /// # Errors
    /// [`BenchError`] when a read does not end.
    pub fn check(&mut self, order: &[u32]) -> Result<u64, BenchError> {
        self.scribble()?;
        self.run(Instant::now())?;
        let mut wrong = 0;
        for lane in &self.lanes {
            let Some(blocks) = lane.blocks() else {
                continue;
            };
            let seed = SEED.wrapping_add(lane.peer as u64);
            for at in 0..blocks.len() {
                let remote = order.get(lane.first + at).copied().unwrap_or(u32::MAX);
                wrong += fixture::wrong_bytes(blocks, at, seed, remote)?;
            }
        }
        Ok(wrong)
    }

    /// Drops the lanes of a peer.
    pub fn leave(&mut self, peer: usize) {
        self.lanes.retain(|lane| lane.peer != peer);
    }

    /// Keeps every lane busy until `until` has passed, then waits for what is in flight.
    ///
    /// # Errors
    /// [`BenchError`] when a read does not end.
    pub fn run(&mut self, until: Instant) -> Result<Done, BenchError> {
        let start = Instant::now();
        let mut running = 0_usize;
        for lane in 0..self.lanes.len() {
            running += usize::from(self.submit(lane)?);
        }
        let mut took = None;
        let mut paused: VecDeque<(Instant, usize)> = VecDeque::new();
        let mut heard = Instant::now();
        while running > 0 || !paused.is_empty() {
            while let Some((_, lane)) = paused.pop_front_if(|(over, _)| *over <= Instant::now()) {
                if Instant::now() < until {
                    running += usize::from(self.submit(lane)?);
                }
            }
            if running == 0 && paused.is_empty() {
                break;
            }
            let wait = if paused.is_empty() {
                LIMIT
            } else {
                AFTER_FAILURE
            };
            let Ok(lane) = self.ended.recv_timeout(wait) else {
                if running > 0 && heard.elapsed() >= LIMIT {
                    return Err(BenchError::TookTooLong {
                        what: "the end of a read",
                        waited: LIMIT,
                    });
                }
                continue;
            };
            let Some(landed) = self.finish(lane) else {
                continue;
            };
            heard = Instant::now();
            running -= 1;
            if !landed {
                paused.push_back((heard + AFTER_FAILURE, lane));
            } else if heard < until {
                running += usize::from(self.submit(lane)?);
            } else {
                took.get_or_insert_with(|| start.elapsed());
            }
        }
        self.done.took += took.unwrap_or_else(|| start.elapsed());
        let fresh = Done {
            bytes: vec![0; self.offers.len()],
            ..Done::default()
        };
        Ok(std::mem::replace(&mut self.done, fresh))
    }

    /// Submits a lane's read; false when the queue is full.
    fn submit(&mut self, at: usize) -> Result<bool, BenchError> {
        let Some(lane) = self.lanes.get_mut(at) else {
            return Ok(false);
        };
        let (Some(blocks), Some(offer)) = (lane.blocks.take(), self.offers.get(lane.peer)) else {
            return Ok(false);
        };
        let span = lane.first..lane.first.saturating_add(blocks.len());
        let submitted = self.engine.read(ReadRequest {
            offer,
            hashes: self.hashes,
            span,
            blocks,
            timeout: LIMIT,
            release: ReleasePolicy::Never,
        });
        match submitted {
            Ok(handle) => {
                lane.handle = Some(handle);
                // It may have ended already.
                let _ = self.tell.send(at);
                Ok(true)
            }
            Err(refused) => {
                let full = matches!(refused.error, SubmitError::QueueFull { .. });
                let why = refused.error.to_string();
                lane.blocks = Some(refused.blocks);
                if full {
                    self.done.refused += 1;
                    Ok(false)
                } else {
                    Err(BenchError::Submit(why))
                }
            }
        }
    }

    /// Takes the outcome of a lane's read, if there is one: whether it landed.
    fn finish(&mut self, at: usize) -> Option<bool> {
        let lane = self.lanes.get_mut(at)?;
        let handle = lane.handle.as_mut()?;
        let waker = Waker::from(Arc::new(Ended {
            lane: at,
            tell: self.tell.clone(),
        }));
        let outcome = match std::pin::Pin::new(handle).poll(&mut Context::from_waker(&waker)) {
            Poll::Pending => return None,
            Poll::Ready(outcome) => outcome,
        };
        lane.handle = None;
        let landed = outcome.is_ok();
        match outcome {
            Ok(landed) => {
                self.done.reads += 1;
                if let Some(bytes) = self.done.bytes.get_mut(lane.peer) {
                    *bytes += landed.report.bytes;
                }
                lane.blocks = Some(landed.blocks);
            }
            Err(failure) => {
                self.done.failed += 1;
                self.done.last_failure = Some(Instant::now());
                self.done.why = Some(failure.error.to_string());
                if let FailedBlocks::Returned(blocks) = failure.blocks {
                    lane.blocks = Some(blocks);
                }
            }
        }
        Some(landed)
    }
}

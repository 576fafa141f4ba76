//! The caller's end of a read: a future that also waits.
//!
//! Destination blocks are inside the read while it runs. They come back in its outcome, or, when
//! they may still be written, later through the engine's returned-blocks channel. Dropping a handle
//! neither frees nor blocks.
#![forbid(unsafe_code)]

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::completion::{Abandoned, Completion};
use super::error::ReadError;
use crate::fabric::PeerFabric;
use crate::memory::{OwnedBlocks, Signal};
use crate::telemetry::Storm;

/// Names a read within its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReadId(pub u64);

/// What a read did and what it took.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ReadReport {
    /// Bytes of blocks that were moved.
    pub bytes: u64,
    /// Descriptors that the naive plan would have: blocks times regions.
    pub descriptors_unmerged: u64,
    /// Descriptors that were posted.
    pub descriptors: u64,
    /// Runs of blocks that were consecutive on both sides.
    pub runs: u64,
    /// Windows that were posted.
    pub windows: u64,
    /// From submission until the plan was begun: queueing, and meeting the peer if needed.
    pub queued: Duration,
    /// Time that working out the runs took.
    pub planning: Duration,
    /// Time inside the transport's post calls, of all lanes together.
    pub posting: Duration,
    /// From submission until layer 0 had landed.
    pub first_layer: Duration,
    /// Time of the lease-word check after the last byte.
    pub checking: Duration,
    /// From submission until the outcome was known.
    pub total: Duration,
    /// What carried the bytes, as far as it is known; `None` until the peer was met.
    pub fabric: Option<Arc<PeerFabric>>,
}

/// Blocks that have landed: every byte is there, and the lease still held after the last one.
#[derive(Debug)]
pub struct Landed {
    /// The destination blocks, in the order in which they were given.
    pub blocks: OwnedBlocks,
    /// What it took.
    pub report: ReadReport,
}

/// Where the destination blocks of a failed read are.
#[derive(Debug)]
pub enum FailedBlocks {
    /// Nothing can write into them any more; their content is not to be used.
    Returned(OwnedBlocks),
    /// They may still be written. They come back through
    /// [`Engine::returned`](super::Engine::returned) once that is impossible.
    Quarantined {
        /// How many blocks.
        blocks: usize,
    },
}

/// A read that ended without its blocks.
#[derive(Debug)]
pub struct ReadFailure {
    /// Why.
    pub error: ReadError,
    /// Where the destination blocks are.
    pub blocks: FailedBlocks,
}

impl std::fmt::Display for ReadFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for ReadFailure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

/// How a read ended.
pub type ReadOutcome = Result<Landed, ReadFailure>;

static PANICS: Storm = Storm::new();

/// What handle and driver share. Written once by the driver, taken once by the handle.
#[derive(Debug)]
pub(crate) struct ReadShared {
    completion: Completion<ReadOutcome>,
    layers_ready: AtomicU32,
    /// What waits for the read, until it has been told.
    signal: Mutex<Option<Box<dyn Signal>>>,
}

impl ReadShared {
    pub(crate) fn new(signal: Option<Box<dyn Signal>>) -> Arc<Self> {
        Arc::new(Self {
            completion: Completion::new(),
            layers_ready: AtomicU32::new(0),
            signal: Mutex::new(signal),
        })
    }

    /// Tells what waits for the read, the first time.
    fn tell_signal(&self, landed: bool) {
        let signal = self.signal.lock().take();
        if let Some(signal) = signal {
            signal.ended(landed);
        }
    }

    /// Delivers the outcome. Gives it back when nobody will ever take it, or when there already is
    /// one: a read has exactly one terminal event.
    pub(crate) fn finish(&self, outcome: ReadOutcome) -> Option<ReadOutcome> {
        let landed = outcome.is_ok();
        match self.completion.finish(outcome) {
            Ok(waker) => {
                self.tell_signal(landed);
                if let Some(waker) = waker {
                    // The caller's code, on the driver's thread: its panic must not end the driver.
                    let woken = catch_unwind(AssertUnwindSafe(|| waker.wake()));
                    if woken.is_err()
                        && let Some(panics) = PANICS.line()
                    {
                        tracing::error!(panics, "the waker of a read panicked");
                    }
                }
                None
            }
            Err(outcome) => {
                // Blocks that nobody took go back: whatever waits for them must not use them.
                self.tell_signal(false);
                Some(outcome)
            }
        }
    }

    pub(crate) fn set_layers_ready(&self, layers: u32) {
        self.layers_ready.store(layers, Ordering::Release);
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.completion.is_cancelled()
    }
}

/// Tells the driver that a handle was cancelled or dropped; takes blocks that nobody took. Must not
/// block.
pub(crate) trait HandleOwner: Send + Sync {
    fn cancelled(&self, id: ReadId);
    fn unclaimed(&self, id: ReadId, blocks: OwnedBlocks);
}

/// A read in progress. A [`Future`] of its [`ReadOutcome`], and blocking [`wait`](Self::wait).
///
/// Every read ends by its own deadline at the latest, unless a call of the transport never returns;
/// [`wait_timeout`](Self::wait_timeout) bounds that, too.
#[must_use = "dropping the handle cancels the read"]
pub struct ReadHandle {
    id: ReadId,
    shared: Arc<ReadShared>,
    owner: Arc<dyn HandleOwner>,
}

impl std::fmt::Debug for ReadHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReadHandle")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

impl ReadHandle {
    pub(crate) fn new(id: ReadId, shared: Arc<ReadShared>, owner: Arc<dyn HandleOwner>) -> Self {
        Self { id, shared, owner }
    }

    /// Its name in logs.
    #[must_use]
    pub fn id(&self) -> ReadId {
        self.id
    }

    /// How many layers, from layer 0 on, have every byte in. An engine may compute with them while
    /// later layers are in flight, but must discard the result if the read then fails: only the
    /// outcome says that the bytes were current.
    #[must_use]
    pub fn layers_ready(&self) -> u32 {
        self.shared.layers_ready.load(Ordering::Acquire)
    }

    /// Asks for the read to end early. It still has one outcome: [`ReadError::Cancelled`], or
    /// whatever came first.
    pub fn cancel(&self) {
        self.shared.completion.cancel();
        self.owner.cancelled(self.id);
    }

    /// Blocks until the read has ended.
    pub fn wait(self) -> ReadOutcome {
        self.shared.completion.wait(None);
        self.shared.completion.take().unwrap_or_else(Self::taken)
    }

    /// Blocks until the read has ended or `limit` has passed; the outcome is given once.
    pub fn wait_timeout(&mut self, limit: Duration) -> Option<ReadOutcome> {
        self.shared
            .completion
            .wait(Instant::now().checked_add(limit));
        self.shared.completion.take()
    }

    /// An outcome is given once; whoever asks again gets an error instead of a hang.
    fn taken() -> ReadOutcome {
        Err(ReadFailure {
            error: ReadError::Cancelled,
            blocks: FailedBlocks::Quarantined { blocks: 0 },
        })
    }
}

impl Future for ReadHandle {
    type Output = ReadOutcome;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<ReadOutcome> {
        // The caller's code (cloning wakers) runs without the lock.
        let fresh = context.waker().clone();
        self.shared
            .completion
            .poll(fresh)
            .map(|outcome| outcome.unwrap_or_else(Self::taken))
    }
}

impl Drop for ReadHandle {
    fn drop(&mut self) {
        match self.shared.completion.abandon() {
            Abandoned::Running => self.owner.cancelled(self.id),
            Abandoned::Finished(outcome) => match *outcome {
                Ok(Landed { blocks, .. })
                | Err(ReadFailure {
                    blocks: FailedBlocks::Returned(blocks),
                    ..
                }) => {
                    self.owner.unclaimed(self.id, blocks);
                }
                Err(_) => {}
            },
            Abandoned::Taken => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::task::Waker;

    #[derive(Default)]
    struct Owner(AtomicUsize);
    impl HandleOwner for Owner {
        fn cancelled(&self, _: ReadId) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
        fn unclaimed(&self, _: ReadId, _: OwnedBlocks) {}
    }

    fn failed() -> ReadOutcome {
        Err(ReadFailure {
            error: ReadError::ShuttingDown,
            blocks: FailedBlocks::Quarantined { blocks: 1 },
        })
    }

    fn handle() -> (ReadHandle, Arc<ReadShared>, Arc<Owner>) {
        let shared = ReadShared::new(None);
        let owner = Arc::new(Owner::default());
        (
            ReadHandle::new(ReadId(1), Arc::clone(&shared), owner.clone()),
            shared,
            owner,
        )
    }

    #[test]
    fn an_outcome_is_delivered_once() {
        let (handle, shared, owner) = handle();
        assert!(shared.finish(failed()).is_none());
        assert!(
            shared.finish(failed()).is_some(),
            "a second terminal event is refused"
        );
        assert!(matches!(
            handle.wait(),
            Err(ReadFailure {
                error: ReadError::ShuttingDown,
                ..
            })
        ));
        assert_eq!(
            owner.0.load(Ordering::SeqCst),
            0,
            "an ended read is not cancelled"
        );
    }

    #[test]
    fn waiting_wakes_on_another_threads_finish() {
        let (handle, shared, _) = handle();
        let waiter = std::thread::spawn(move || handle.wait());
        std::thread::sleep(Duration::from_millis(20));
        assert!(shared.finish(failed()).is_none());
        assert!(waiter.join().unwrap().is_err());
    }

    #[test]
    fn a_timeout_leaves_the_read_running() {
        let (mut handle, shared, _) = handle();
        assert!(handle.wait_timeout(Duration::from_millis(5)).is_none());
        assert!(shared.finish(failed()).is_none());
        assert!(handle.wait_timeout(Duration::from_secs(5)).is_some());
    }

    #[test]
    fn a_dropped_handle_cancels_and_gets_no_outcome() {
        let (handle, shared, owner) = handle();
        drop(handle);
        assert!(shared.is_cancelled());
        assert_eq!(owner.0.load(Ordering::SeqCst), 1);
        assert!(
            shared.finish(failed()).is_some(),
            "the outcome goes back to the driver"
        );
    }

    #[test]
    fn polling_registers_a_waker_that_is_woken() {
        struct Count(AtomicUsize);
        impl std::task::Wake for Count {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }
        let (mut handle, shared, _) = handle();
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(Arc::clone(&count));
        let mut context = Context::from_waker(&waker);
        assert!(Pin::new(&mut handle).poll(&mut context).is_pending());
        assert!(Pin::new(&mut handle).poll(&mut context).is_pending());
        assert!(shared.finish(failed()).is_none());
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        assert!(Pin::new(&mut handle).poll(&mut context).is_ready());
    }
}

//! Ending the engine's threads without waiting for ever.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::memory::{KvPool, ThreadBinding};

/// How often a thread is looked at while it is waited for.
const LOOK: Duration = Duration::from_millis(1);

/// What a thread runs that calls the transport about a pool: on a GPU, its context is current there.
pub(super) fn bound(
    pool: &Arc<KvPool>,
    run: impl FnOnce() + Send + 'static,
) -> impl FnOnce() + Send + 'static {
    let memory = Arc::clone(pool.memory());
    move || {
        // Without it the transport's calls fail, each with its own error.
        let _bound = memory.bind_thread().unwrap_or_else(|error| {
            tracing::error!(%error, "a thread of the engine cannot use the pool's device");
            ThreadBinding::none()
        });
        run();
    }
}

/// Waits until `end` for a thread. False when it is left behind: it hangs in somebody else's code (a
/// transport's call, a handler), or it is the very thread that waits.
pub(super) fn join_by(thread: JoinHandle<()>, end: Instant) -> bool {
    let name = thread.thread().name().unwrap_or_default().to_owned();
    if thread.thread().id() == std::thread::current().id() {
        return false;
    }
    while !thread.is_finished() {
        if Instant::now() >= end {
            tracing::error!(thread = %name, "a thread of the engine hangs and is left behind");
            return false;
        }
        std::thread::sleep(LOOK);
    }
    if thread.join().is_err() {
        tracing::error!(thread = %name, "a thread of the engine panicked");
    }
    true
}

/// The moment `limit` from now; a far one when that is beyond the clock.
pub(super) fn until(limit: Duration) -> Instant {
    let now = Instant::now();
    let far = Duration::from_secs(365 * 24 * 3600);
    now.checked_add(limit.min(far)).unwrap_or(now)
}

//! How a lease word is changed so that nobody can take the next content of its blocks for the last.

use crate::sync::{AtomicU64, Ordering, fence};

/// Stores a word so that no later store, of a block's next content say, can be seen before it.
pub(crate) fn publish(word: &AtomicU64, value: u64) {
    word.store(value, Ordering::Release);
    // A release store orders what comes before it. This orders what comes after.
    fence(Ordering::SeqCst);
}

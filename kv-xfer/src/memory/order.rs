//! What orders a read and work on a device's streams: a read may wait for something, and something may wait for a read.

use std::fmt;

use super::MemoryError;

/// Something that must have happened before bytes are moved, such as a CUDA event: a kernel that writes blocks must have
/// ended before they are read, and one that uses blocks before a read lands in them.
pub trait Gate: Send + Sync + fmt::Debug {
    /// Whether it has happened. Asked again and again on the engine's own thread, so it must not block.
    ///
    /// # Errors
    /// [`MemoryError`] when that will never be known.
    fn is_open(&self) -> Result<bool, MemoryError>;
}

/// Something that waits for a read to end, such as a stream.
pub trait Signal: Send + fmt::Debug {
    /// The read has ended: every byte has landed and the lease held, or not. Called once, on the engine's own thread, so it
    /// must not block. Dropping the signal instead means that the read has not landed.
    fn ended(self: Box<Self>, landed: bool);
}

/// How a read is ordered with work on a device's streams. Without anything it is not.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct StreamOrder {
    /// Nothing is posted before this has happened. The read's deadline bounds it.
    pub after: Option<Box<dyn Gate>>,
    /// Told how the read has ended, exactly once, however it ends.
    pub then: Option<Box<dyn Signal>>,
}

impl StreamOrder {
    /// The read waits for a gate.
    #[must_use]
    pub fn after(mut self, gate: impl Gate + 'static) -> Self {
        self.after = Some(Box::new(gate));
        self
    }

    /// A signal hears of the read's end.
    #[must_use]
    pub fn then(mut self, signal: impl Signal + 'static) -> Self {
        self.then = Some(Box::new(signal));
        self
    }
}

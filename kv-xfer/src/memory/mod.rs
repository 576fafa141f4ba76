//! Memory that blocks live in: on the host, on a GPU, foreign and simulated; the words that leases need; and what orders
//! reads with work on a GPU.
#![allow(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;

use thiserror::Error;

use crate::ids::WordSlot;
use crate::layout::{MemKind, RegionGeometry};

mod claims;
pub mod cuda;
mod foreign;
mod host;
mod mapping;
mod maps;
mod order;
mod pool;
mod publish;
mod words;

pub use claims::{ClaimError, ClaimRefusal};
pub use foreign::{ForeignError, ForeignMemory};
pub use host::{HostMemory, HostMemoryError, HostOptions, HostReport, Wish};
pub use maps::MapsError;
pub use order::{Gate, Signal, StreamOrder};
pub use pool::{AccessError, KvPool, OwnedBlocks, PoolError};
pub use words::HostWords;

/// Why an access to a pool's bytes was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The range is not inside one mapping of the memory.
    #[error("{len} bytes at {addr:#x} are not inside this memory")]
    OutOfRange {
        /// First address.
        addr: u64,
        /// Length, bytes.
        len: u64,
    },
    /// The device that the memory is on refused.
    #[error(
        "{operation} failed on the memory's device with code {code}; see its log, and restart the process"
    )]
    Device {
        /// What was asked of it.
        operation: &'static str,
        /// Its code.
        code: u32,
    },
}

/// Bytes that a pool's regions point into. Every access is bounds-checked; an implementation keeps
/// its memory mapped for as long as it lives.
pub trait Memory: Send + Sync + fmt::Debug {
    /// Copies `out.len()` bytes from `addr`.
    ///
    /// # Errors
    /// [`MemoryError`] when the range is not inside this memory; nothing is copied then.
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), MemoryError>;

    /// Copies `data` to `addr`.
    ///
    /// # Errors
    /// [`MemoryError`] when the range is not inside this memory; nothing is copied then.
    fn write(&self, addr: u64, data: &[u8]) -> Result<(), MemoryError>;

    /// Prepares the calling thread for calling a transport about this memory: a device's context becomes the thread's
    /// current one, until the result is dropped. Nothing by default.
    ///
    /// # Errors
    /// [`MemoryError`] when the device refuses.
    fn bind_thread(&self) -> Result<ThreadBinding, MemoryError> {
        Ok(ThreadBinding::none())
    }

    /// This memory as memory on a GPU, if it is.
    fn as_cuda(&self) -> Option<&cuda::CudaMemory> {
        None
    }

    /// Makes what a transport has landed here visible to whoever computes with it. Called before a read is reported as
    /// landed, and before its layers are. Nothing by default.
    ///
    /// # Errors
    /// [`MemoryError`] when the device refuses; the read has failed then.
    fn settle(&self) -> Result<(), MemoryError> {
        Ok(())
    }
}

/// What a thread that calls a transport keeps for as long as it does so: see [`Memory::bind_thread`].
#[must_use = "the thread is prepared for as long as this lives"]
pub struct ThreadBinding {
    _bound: Option<cuda::Bound>,
    /// Must be dropped on its own thread.
    here: PhantomData<*const ()>,
}

impl ThreadBinding {
    /// Nothing was to be prepared.
    pub fn none() -> Self {
        Self {
            _bound: None,
            here: PhantomData,
        }
    }

    fn of(bound: cuda::Bound) -> Self {
        Self {
            _bound: Some(bound),
            here: PhantomData,
        }
    }
}

/// Prepares the calling thread for calling a transport about regions: the context of the GPU that they are on becomes the
/// thread's current one, until the result is dropped. `None` where they are in host memory.
///
/// # Errors
/// [`MemoryError`] when the device refuses.
pub(crate) fn bind_thread_to(
    regions: &[RegionGeometry],
) -> Result<Option<ThreadBinding>, MemoryError> {
    let on_gpu = regions.iter().find(|region| region.mem == MemKind::Vram);
    on_gpu
        .map(|region| {
            let device = cuda::CudaDevice::open(region.device)?;
            Ok(ThreadBinding::of(device.bind()?))
        })
        .transpose()
}

impl fmt::Debug for ThreadBinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ThreadBinding")
    }
}

/// A table of 64-bit words in host memory that a transport can register: lease words at the holder,
/// landing places for their copies at the reader.
pub trait ControlWords: Send + Sync + fmt::Debug {
    /// The table as a region of one block per word, to be registered and put on the card.
    fn region(&self) -> RegionGeometry;

    /// The word in `slot`, with acquire ordering; `None` past the end of the table.
    fn load(&self, slot: WordSlot) -> Option<u64>;

    /// Stores a word with release ordering, followed by a full fence, so that no later store (of a
    /// block's next content) can be seen before it. False past the end of the table.
    fn store(&self, slot: WordSlot, value: u64) -> bool;
}

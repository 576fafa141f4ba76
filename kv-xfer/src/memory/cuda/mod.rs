//! Device memory and stream order, over the CUDA driver, which is loaded when it is first needed: nothing of CUDA is
//! needed to build, and a machine without it gets a typed error.
//!
//! Every call makes the device's primary context current on its thread for as long as it takes, and leaves what was
//! current before.

mod api;
mod compare;
mod device;
mod foreign;
mod mapped;
mod memory;
mod order;

use thiserror::Error;

pub use compare::CudaCompare;
pub(super) use device::Bound;
pub use device::{CudaDevice, CudaDeviceInfo};
pub(super) use memory::GPU_PAGE;
pub use memory::{CudaKind, CudaMemory, CudaOptions, CudaReport};
pub use order::{CudaEvent, CudaStream, FlagState, StreamFlag, StreamFlags};

use super::MemoryError;

/// Why something with CUDA did not work.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no driver.
    #[error(
        "there is no CUDA driver (libcuda.so.1) on this machine; install NVIDIA's driver, in a container pass the GPUs on \
         (--gpus all), or use host memory"
    )]
    NoDriver,
    /// The driver is too old.
    #[error(
        "the CUDA driver lacks {name}; install the driver of CUDA 12 or newer, or use host memory"
    )]
    LacksFunction {
        /// The function.
        name: &'static str,
    },
    /// The driver is there, and no GPU.
    #[error(
        "the CUDA driver finds no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES, or use host memory"
    )]
    NoDevice,
    /// There is no such GPU.
    #[error("there is no GPU {wanted}: {found} can be seen; check CUDA_VISIBLE_DEVICES")]
    NoSuchDevice {
        /// Ordinal asked for.
        wanted: u32,
        /// How many there are.
        found: u32,
    },
    /// The GPU cannot do it.
    #[error("GPU {device} has no {what}; {instead}")]
    Lacks {
        /// Its ordinal.
        device: u32,
        /// What it lacks.
        what: &'static str,
        /// What can be done instead.
        instead: &'static str,
    },
    /// A call failed.
    #[error(
        "{operation} failed: {name} ({code}); compute-sanitizer and the driver's log (dmesg) say more"
    )]
    Call {
        /// The driver's function.
        operation: &'static str,
        /// Its result.
        code: u32,
        /// The result's name.
        name: String,
    },
    /// Zero bytes, or more than an address can count.
    #[error(
        "{bytes} bytes of device memory cannot be had; ask for 1 to {}",
        isize::MAX
    )]
    BadSize {
        /// Bytes asked for.
        bytes: u64,
    },
    /// No range was given.
    #[error("no range of device memory was given; give at least one")]
    NoRanges,
    /// A range is empty or wraps the address space.
    #[error("range {index} ({len} bytes at {addr:#x}) is empty or wraps the address space")]
    BadRange {
        /// Position in the list.
        index: usize,
        /// First address.
        addr: u64,
        /// Length, bytes.
        len: u64,
    },
    /// An address is not one of device memory.
    #[error(
        "range {index} at {addr:#x} is not device memory: {found}; give the pointer of an allocation on the GPU"
    )]
    NotDeviceMemory {
        /// Position in the list.
        index: usize,
        /// First address.
        addr: u64,
        /// What it is.
        found: &'static str,
    },
    /// A range is on another GPU.
    #[error(
        "range {index} at {addr:#x} is on GPU {found}, not on GPU {expected}; make one pool for each GPU"
    )]
    OtherDevice {
        /// Position in the list.
        index: usize,
        /// First address.
        addr: u64,
        /// Ordinal of the GPU that it is on.
        found: i32,
        /// Ordinal of the GPU asked for.
        expected: u32,
    },
    /// A range reaches beyond its allocation.
    #[error(
        "range {index} ({len} bytes at {addr:#x}) is longer than its allocation: only {allocated} bytes are left there; \
         check pointer and length"
    )]
    LongerThanAllocation {
        /// Position in the list.
        index: usize,
        /// First address.
        addr: u64,
        /// Length given, bytes.
        len: u64,
        /// Bytes from the first address to the end of the allocation.
        allocated: u64,
    },
}

impl From<CudaError> for MemoryError {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::Call {
                operation, code, ..
            } => Self::Device { operation, code },
            // Nothing else comes of a device that is in use.
            _ => Self::Device {
                operation: "CUDA",
                code: 0,
            },
        }
    }
}

//! Comparing bytes on a GPU, by the GPU: they need not come to the processor to be checked.

use std::ffi::{CString, c_void};
use std::fmt;

use cudarc::driver::sys::{CUfunction, CUmodule};

use super::CudaError;
use super::device::CudaDevice;
use super::memory::{CudaMemory, CudaOptions};
use super::order::CudaStream;
use crate::memory::host::out_of_range;
use crate::memory::{Memory, MemoryError};

/// The kernel, in the assembly that every driver compiles for its own GPU.
const KERNEL: &str = include_str!("differs.ptx");
const ENTRY: &std::ffi::CStr = c"kvx_count_differing";
/// Threads of a block, and most blocks: enough to keep any GPU busy.
const THREADS: u32 = 256;
const MOST_BLOCKS: u32 = 2048;

/// Counts words that differ, with a kernel of its own.
pub struct CudaCompare {
    device: CudaDevice,
    module: CUmodule,
    kernel: CUfunction,
    count: CudaMemory,
    stream: CudaStream,
}

// SAFETY: module and function are handles that any thread may use.
unsafe impl Send for CudaCompare {}

impl fmt::Debug for CudaCompare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaCompare({:?})", self.device)
    }
}

impl CudaCompare {
    /// Has the driver compile the kernel for a GPU.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn new(device: &CudaDevice) -> Result<Self, CudaError> {
        let (count, _) = CudaMemory::new(8, &CudaOptions::on(device.ordinal()))?;
        let stream = CudaStream::new(device)?;
        let _bound = device.bind()?;
        let api = device.api();
        let text = CString::new(KERNEL).unwrap_or_default();
        let mut module = std::ptr::null_mut();
        // SAFETY: reads a C string and writes one handle.
        device.result("cuModuleLoadData", unsafe {
            (api.module_load)(&raw mut module, text.as_ptr().cast::<c_void>())
        })?;
        let mut this = Self {
            device: device.clone(),
            module,
            kernel: std::ptr::null_mut(),
            count,
            stream,
        };
        // SAFETY: the module is live; reads a C string and writes one handle.
        device.result("cuModuleGetFunction", unsafe {
            (api.module_function)(&raw mut this.kernel, module, ENTRY.as_ptr())
        })?;
        Ok(this)
    }

    /// How many of `words` 64-bit words at `found` differ from those at `expected`. Blocks until it is known.
    ///
    /// # Errors
    /// [`MemoryError`] when an address is not a multiple of 8 or a range not inside its memory, or the device refuses.
    pub fn differing(
        &mut self,
        found: (&CudaMemory, u64),
        expected: (&CudaMemory, u64),
        words: u64,
    ) -> Result<u64, MemoryError> {
        let len = words.saturating_mul(8);
        for (memory, addr) in [found, expected] {
            if !memory.holds(addr, len) || addr % 8 != 0 {
                return Err(out_of_range(
                    addr,
                    usize::try_from(len).unwrap_or(usize::MAX),
                ));
            }
        }
        let counter = self.count.base();
        self.count.write(counter, &[0; 8])?;
        let blocks = u32::try_from(words.div_ceil(THREADS.into()))
            .unwrap_or(u32::MAX)
            .clamp(1, MOST_BLOCKS);
        let (mut a, mut b, mut n, mut c) = (found.1, expected.1, words, counter);
        let mut arguments: [*mut c_void; 4] = [
            (&raw mut a).cast(),
            (&raw mut b).cast(),
            (&raw mut n).cast(),
            (&raw mut c).cast(),
        ];
        let bound = self.device.bind()?;
        // SAFETY: the kernel takes four 64-bit arguments; it reads the two ranges, which are live and large enough, and
        // writes the counter.
        let code = unsafe {
            (self.device.api().launch)(
                self.kernel,
                blocks,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                self.stream.raw(),
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.device.result("cuLaunchKernel", code)?;
        drop(bound);
        self.stream.synchronize()?;
        let mut count = [0; 8];
        self.count.read(counter, &mut count)?;
        Ok(u64::from_le_bytes(count))
    }
}

impl Drop for CudaCompare {
    fn drop(&mut self) {
        let unloaded = self.device.bind().and_then(|_bound| {
            // SAFETY: the module is live and not used again; what was launched has ended.
            let code = unsafe { (self.device.api().module_unload)(self.module) };
            self.device.result("cuModuleUnload", code)
        });
        if let Err(error) = unloaded {
            tracing::debug!(%error, "a kernel was not unloaded");
        }
    }
}

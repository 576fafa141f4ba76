//! Memory on a GPU: allocated here, or an engine's own.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;

use cudarc::driver::sys::{CUdevice_attribute, CUdeviceptr, CUpointer_attribute};

use super::CudaError;
use super::device::{Bound, CudaDevice};
use super::foreign::check_foreign;
use super::mapped::Mapped;
use super::order::CudaStream;
use crate::memory::host::out_of_range;
use crate::memory::{Memory, MemoryError, ThreadBinding};

/// Alignment of the regions of a pool on a GPU, bytes: the size of a page as NICs map it.
pub(in crate::memory) const GPU_PAGE: u64 = 64 << 10;
/// What a device reports of the order of writes by RDMA when they are visible to its own kernels without a flush.
const ORDERED_FOR_OWNER: i32 = 100;
/// Bit of the flush options: the processor can ask for a flush.
const FLUSH_BY_HOST: i32 = 1;

/// How memory is allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum CudaKind {
    /// One plain allocation (`cuMemAlloc`). Other processes of the node can read it over NVLink or within the GPU
    /// (`cuda_ipc`); NICs can where the GPU supports it at all.
    #[default]
    Plain,
    /// Mapped by hand (`cuMemCreate`, with `gpuDirectRDMACapable`): what NICs need on some platforms. `cuda_ipc` can read it
    /// only where the driver grants handles for the NVLink fabric.
    Rdma,
}

/// What is asked of a pool on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub struct CudaOptions {
    /// Ordinal of the GPU, as this process sees it.
    pub device: u32,
    /// How its memory is allocated.
    pub kind: CudaKind,
}

impl CudaOptions {
    /// Plain memory on a GPU.
    #[must_use]
    pub fn on(device: u32) -> Self {
        Self {
            device,
            kind: CudaKind::Plain,
        }
    }

    /// With another kind of allocation.
    #[must_use]
    pub fn kind(mut self, kind: CudaKind) -> Self {
        self.kind = kind;
        self
    }
}

/// What the GPU gave.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaReport {
    /// Which GPU.
    pub device: super::CudaDeviceInfo,
    /// Bytes allocated, rounding included.
    pub bytes: u64,
    /// How.
    pub kind: CudaKind,
    /// Whether NICs can read and write GPU memory on this platform, by the driver's word.
    pub rdma: bool,
    /// Whether memory of kind [`CudaKind::Rdma`] came with a handle for the NVLink fabric, so that `cuda_ipc` can read it.
    pub fabric_handle: bool,
    /// Whether what NICs write must be flushed before kernels see it; done before a read is reported as landed.
    pub flushes: bool,
}

#[derive(Debug, Clone, Copy)]
struct Range {
    addr: u64,
    len: u64,
}

/// Who gives the memory back.
enum Held {
    Plain(CUdeviceptr),
    Mapped(#[expect(dead_code)] Mapped),
    Foreign(#[expect(dead_code)] Box<dyn Any + Send + Sync>),
}

/// Memory on one GPU. The processor reaches it by copies, each of which has ended when its call returns.
pub struct CudaMemory {
    device: CudaDevice,
    /// Sorted by address.
    ranges: Vec<Range>,
    held: Held,
    /// For copies by the processor; waits for no other stream, and no other waits for it.
    copies: CudaStream,
    flushes: bool,
}

impl fmt::Debug for CudaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaMemory")
            .field("device", &self.device)
            .field("ranges", &self.ranges)
            .finish_non_exhaustive()
    }
}

impl CudaMemory {
    /// Allocates at least `bytes` zeroed bytes.
    ///
    /// # Errors
    /// [`CudaError`] when the GPU, the driver or the memory is not there.
    pub fn new(bytes: u64, options: &CudaOptions) -> Result<(Self, CudaReport), CudaError> {
        let device = CudaDevice::open(options.device)?;
        let bad = CudaError::BadSize { bytes };
        let len = usize::try_from(bytes)
            .ok()
            .filter(|len| *len > 0 && isize::try_from(*len).is_ok())
            .ok_or(bad)?;
        let bound = device.bind()?;
        let (addr, len, held, fabric_handle) = match options.kind {
            CudaKind::Plain => {
                let mut addr = 0;
                // SAFETY: writes one address; the context is this device's.
                device.result("cuMemAlloc", unsafe {
                    (device.api().alloc)(&raw mut addr, len)
                })?;
                (addr, len, Held::Plain(addr), false)
            }
            CudaKind::Rdma => {
                let mapped = Mapped::new(&device, len)?;
                let (addr, len, fabric) = (mapped.addr, mapped.len, mapped.fabric);
                (addr, len, Held::Mapped(mapped), fabric)
            }
        };
        let range = Range {
            addr,
            len: len as u64,
        };
        let memory = Self::on(device, vec![range], held, &bound)?;
        memory.synchronize_copies(addr);
        memory.zero(addr, len)?;
        let rdma = memory
            .device
            .has(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)?;
        let report = CudaReport {
            device: memory.device.info().clone(),
            bytes: len as u64,
            kind: options.kind,
            rdma,
            fabric_handle,
            flushes: memory.flushes,
        };
        drop(bound);
        Ok((memory, report))
    }

    /// Takes ranges that an engine allocated on a GPU, each an address and a length in bytes. They are checked against what
    /// the driver knows of them: that they are memory of this very GPU, and inside their allocation.
    ///
    /// # Safety
    /// For as long as `owner` lives, every range must stay allocated, and the engine must leave blocks alone while reads
    /// land in them.
    ///
    /// # Errors
    /// [`CudaError`] naming the range at fault.
    pub unsafe fn foreign(
        device: u32,
        ranges: Vec<(u64, u64)>,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Self, CudaError> {
        let device = CudaDevice::open(device)?;
        if ranges.is_empty() {
            return Err(CudaError::NoRanges);
        }
        let bound = device.bind()?;
        let mut checked = Vec::with_capacity(ranges.len());
        for (index, (addr, len)) in ranges.into_iter().enumerate() {
            check_foreign(&device, index, addr, len)?;
            checked.push(Range { addr, len });
        }
        checked.sort_unstable_by_key(|range| range.addr);
        let memory = Self::on(device, checked, Held::Foreign(owner), &bound)?;
        for range in &memory.ranges {
            memory.synchronize_copies(range.addr);
        }
        drop(bound);
        Ok(memory)
    }

    fn on(
        device: CudaDevice,
        ranges: Vec<Range>,
        held: Held,
        _bound: &Bound,
    ) -> Result<Self, CudaError> {
        let mut memory = Self {
            copies: CudaStream::unmade(&device),
            device,
            ranges,
            held,
            flushes: false,
        };
        // What was allocated goes with `memory` should one of these fail.
        memory.copies = CudaStream::new(&memory.device)?;
        memory.flushes = needs_flush(&memory.device)?;
        Ok(memory)
    }

    /// The GPU.
    #[must_use]
    pub fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// Address of the first byte.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.ranges.first().map_or(0, |range| range.addr)
    }

    /// Whether one range holds `len` bytes at `addr`.
    #[must_use]
    pub fn holds(&self, addr: u64, len: u64) -> bool {
        let after = self.ranges.partition_point(|range| range.addr <= addr);
        after
            .checked_sub(1)
            .and_then(|at| self.ranges.get(at))
            .is_some_and(|range| {
                let offset = addr.saturating_sub(range.addr);
                offset.checked_add(len).is_some_and(|end| end <= range.len)
            })
    }

    /// Copies `len` bytes within the GPU, on a stream: it has happened when the stream gets there.
    ///
    /// # Errors
    /// [`MemoryError`] when a range is not inside this memory, or the driver refuses.
    pub fn copy_within(
        &self,
        from: u64,
        to: u64,
        len: usize,
        stream: &CudaStream,
    ) -> Result<(), MemoryError> {
        for addr in [from, to] {
            if !self.holds(addr, len as u64) {
                return Err(out_of_range(addr, len));
            }
        }
        let _bound = self.device.bind()?;
        // SAFETY: both ranges are inside this memory, which is live.
        let code = unsafe { (self.device.api().copy_on_device)(to, from, len, stream.raw()) };
        Ok(self.device.result("cuMemcpyDtoDAsync", code)?)
    }

    /// Sets `len` bytes to a value, on a stream: it has happened when the stream gets there.
    ///
    /// # Errors
    /// As for [`copy_within`](Self::copy_within).
    pub fn set(
        &self,
        addr: u64,
        value: u8,
        len: usize,
        stream: &CudaStream,
    ) -> Result<(), MemoryError> {
        if !self.holds(addr, len as u64) {
            return Err(out_of_range(addr, len));
        }
        let _bound = self.device.bind()?;
        // SAFETY: the range is inside this memory, which is live.
        let code = unsafe { (self.device.api().set_bytes)(addr, value, len, stream.raw()) };
        Ok(self.device.result("cuMemsetD8Async", code)?)
    }

    fn zero(&self, addr: u64, len: usize) -> Result<(), CudaError> {
        // SAFETY: the range is inside this memory, which is live; a context is bound.
        let code = unsafe { (self.device.api().set_bytes)(addr, 0, len, self.copies.raw()) };
        self.device.result("cuMemsetD8Async", code)?;
        self.copies.synchronize()
    }

    /// Has the driver end others' synchronous copies before their calls return, so that a NIC never reads what is still on
    /// its way. Memory that is mapped by hand does not have this; copies through this type end in any case.
    fn synchronize_copies(&self, addr: u64) {
        let on: u32 = 1;
        // SAFETY: reads one integer of that size; the address is one of this memory.
        let code = unsafe {
            (self.device.api().set_pointer_attribute)(
                (&raw const on).cast(),
                CUpointer_attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
                addr,
            )
        };
        if let Err(error) = self
            .device
            .result("cuPointerSetAttribute(SYNC_MEMOPS)", code)
        {
            tracing::debug!(%error, "copies into GPU memory by others may end after their calls");
        }
    }
}

impl Memory for CudaMemory {
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), MemoryError> {
        if !self.holds(addr, out.len() as u64) {
            return Err(out_of_range(addr, out.len()));
        }
        if out.is_empty() {
            return Ok(());
        }
        let _bound = self.device.bind()?;
        // SAFETY: the source is inside this memory; the destination is borrowed until the stream has been waited for. Should
        // that fail, the context is lost and moves nothing any more.
        let code = unsafe {
            (self.device.api().copy_to_host)(
                out.as_mut_ptr().cast::<c_void>(),
                addr,
                out.len(),
                self.copies.raw(),
            )
        };
        self.device.result("cuMemcpyDtoHAsync", code)?;
        Ok(self.copies.synchronize()?)
    }

    fn write(&self, addr: u64, data: &[u8]) -> Result<(), MemoryError> {
        if !self.holds(addr, data.len() as u64) {
            return Err(out_of_range(addr, data.len()));
        }
        if data.is_empty() {
            return Ok(());
        }
        let _bound = self.device.bind()?;
        // SAFETY: the destination is inside this memory; the source is borrowed until the stream has been waited for.
        let code = unsafe {
            (self.device.api().copy_to_device)(
                addr,
                data.as_ptr().cast::<c_void>(),
                data.len(),
                self.copies.raw(),
            )
        };
        self.device.result("cuMemcpyHtoDAsync", code)?;
        // A plain copy may return while bytes are on their way: whoever is told of them next may be a NIC.
        Ok(self.copies.synchronize()?)
    }

    fn bind_thread(&self) -> Result<ThreadBinding, MemoryError> {
        Ok(ThreadBinding::of(self.device.bind()?))
    }

    fn as_cuda(&self) -> Option<&CudaMemory> {
        Some(self)
    }

    fn settle(&self) -> Result<(), MemoryError> {
        if self.flushes {
            self.device.flush_writes()?;
        }
        Ok(())
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        let freed = match &self.held {
            Held::Plain(addr) => self.device.bind().and_then(|_bound| {
                // SAFETY: allocated by this value and not used again; agents that had it registered are gone, since they
                // keep it alive.
                let code = unsafe { (self.device.api().free)(*addr) };
                self.device.result("cuMemFree", code)
            }),
            // These give back what they hold by themselves.
            Held::Mapped(_) | Held::Foreign(_) => Ok(()),
        };
        if let Err(error) = freed {
            tracing::error!(%error, "could not free GPU memory");
        }
    }
}

/// Whether NICs write to this GPU in an order that its kernels may not see.
fn needs_flush(device: &CudaDevice) -> Result<bool, CudaError> {
    type A = CUdevice_attribute;
    if !device.has(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)? {
        return Ok(false);
    }
    let order = device.attribute(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)?;
    if order >= ORDERED_FOR_OWNER {
        return Ok(false);
    }
    let options = device.attribute(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)?;
    if options & FLUSH_BY_HOST == 0 {
        return Err(CudaError::Lacks {
            device: device.ordinal(),
            what: "way to order what NICs write before its kernels",
            instead: "keep the pool in host memory",
        });
    }
    Ok(true)
}

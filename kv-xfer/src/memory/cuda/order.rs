//! Streams, events that reads wait for, and flags that streams wait for until a read has ended.

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys::{CUdevice_attribute, CUdeviceptr, CUevent, CUstream};
use parking_lot::Mutex;

use super::CudaError;
use super::api::{NOT_READY, SUCCESS};
use super::device::CudaDevice;
use crate::memory::{Gate, MemoryError, Signal};

/// A stream that waits for no other one (`CU_STREAM_NON_BLOCKING`).
const NON_BLOCKING: u32 = 1;
/// An event that only says whether it has happened.
const NO_TIMING: u32 = 2;
/// Pinned memory that every context of the process, and the GPU, can reach.
const PORTABLE_AND_MAPPED: u32 = 1 | 2;
/// Waits until the word is at least the value, in the sense of `(int32_t)(word - value) >= 0`.
const WAIT_AT_LEAST: u32 = 0;
/// Makes what was written to the GPU from outside before the word visible to what comes after the wait.
const WAIT_AND_FLUSH: u32 = 1 << 30;
/// Bytes of a flag's word.
const WORD: usize = size_of::<AtomicU32>();

/// A stream of a GPU: ours, or one of a framework.
pub struct CudaStream {
    device: CudaDevice,
    raw: CUstream,
    ours: bool,
}

// SAFETY: a stream is a handle that any thread may use.
unsafe impl Send for CudaStream {}
// SAFETY: as above; the driver's functions are safe to call from several threads at once.
unsafe impl Sync for CudaStream {}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaStream({:?} on {:?})", self.raw, self.device)
    }
}

impl CudaStream {
    /// A new stream that waits for no other one, the default stream included.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn new(device: &CudaDevice) -> Result<Self, CudaError> {
        let _bound = device.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        device.result("cuStreamCreate", unsafe {
            (device.api().stream_create)(&raw mut raw, NON_BLOCKING)
        })?;
        Ok(Self {
            device: device.clone(),
            raw,
            ours: true,
        })
    }

    /// A framework's stream: a `CUstream` or `cudaStream_t` as a number, 0 for the default stream.
    ///
    /// # Safety
    /// It must be a stream of this GPU's primary context, and must not be destroyed while this value lives.
    #[must_use]
    pub unsafe fn from_raw(device: &CudaDevice, stream: usize) -> Self {
        Self {
            device: device.clone(),
            raw: std::ptr::with_exposed_provenance_mut(stream),
            ours: false,
        }
    }

    /// A place for a stream that is not made yet.
    pub(super) fn unmade(device: &CudaDevice) -> Self {
        Self {
            device: device.clone(),
            raw: std::ptr::null_mut(),
            ours: false,
        }
    }

    pub(super) fn raw(&self) -> CUstream {
        self.raw
    }

    /// Blocks until everything on the stream has happened. Never returns while a flag that the stream waits for is not set.
    ///
    /// # Errors
    /// [`CudaError`], also of what was put on the stream before.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _bound = self.device.bind()?;
        // SAFETY: the stream is live.
        self.device.result("cuStreamSynchronize", unsafe {
            (self.device.api().stream_synchronize)(self.raw)
        })
    }

    /// An event that has happened once everything that is on the stream now has.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn record(&self) -> Result<CudaEvent, CudaError> {
        let _bound = self.device.bind()?;
        let api = self.device.api();
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        self.device.result("cuEventCreate", unsafe {
            (api.event_create)(&raw mut raw, NO_TIMING)
        })?;
        let event = CudaEvent {
            device: self.device.clone(),
            raw,
            ours: true,
        };
        // SAFETY: event and stream are live and of one context.
        self.device.result("cuEventRecord", unsafe {
            (api.event_record)(raw, self.raw)
        })?;
        Ok(event)
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if !self.ours {
            return;
        }
        let destroyed = self.device.bind().and_then(|_bound| {
            // SAFETY: made by this value and not used again; the driver lets what is on it end.
            let code = unsafe { (self.device.api().stream_destroy)(self.raw) };
            self.device.result("cuStreamDestroy", code)
        });
        if let Err(error) = destroyed {
            tracing::debug!(%error, "a stream was not destroyed");
        }
    }
}

/// An event of a GPU, which a read or a lease may wait for.
pub struct CudaEvent {
    device: CudaDevice,
    raw: CUevent,
    ours: bool,
}

// SAFETY: an event is a handle that any thread may use.
unsafe impl Send for CudaEvent {}
// SAFETY: as above; the driver's functions are safe to call from several threads at once.
unsafe impl Sync for CudaEvent {}

impl fmt::Debug for CudaEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaEvent({:?} on {:?})", self.raw, self.device)
    }
}

impl CudaEvent {
    /// A framework's event: a `CUevent` or `cudaEvent_t` as a number. It must have been recorded: one that has not
    /// counts as having happened.
    ///
    /// # Safety
    /// It must be an event of this GPU's primary context, and must not be destroyed while this value lives.
    #[must_use]
    pub unsafe fn from_raw(device: &CudaDevice, event: usize) -> Self {
        Self {
            device: device.clone(),
            raw: std::ptr::with_exposed_provenance_mut(event),
            ours: false,
        }
    }
}

impl Gate for CudaEvent {
    fn is_open(&self) -> Result<bool, MemoryError> {
        let _bound = self.device.bind()?;
        // SAFETY: the event is live.
        match unsafe { (self.device.api().event_query)(self.raw) } {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            code => Err(MemoryError::Device {
                operation: "cuEventQuery",
                code,
            }),
        }
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if !self.ours {
            return;
        }
        let destroyed = self.device.bind().and_then(|_bound| {
            // SAFETY: made by this value and not used again.
            let code = unsafe { (self.device.api().event_destroy)(self.raw) };
            self.device.result("cuEventDestroy", code)
        });
        if let Err(error) = destroyed {
            tracing::debug!(%error, "an event was not destroyed");
        }
    }
}

/// How far the read behind a flag is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FlagState {
    /// It has not ended.
    Waiting,
    /// Every byte has landed, and the lease held.
    Landed,
    /// It has failed: the blocks are not to be used.
    Failed,
}

/// Words in pinned host memory that streams wait for. It is never freed: a stream may get to its wait at any later time.
struct Words {
    device: CudaDevice,
    host: NonNull<AtomicU32>,
    on_device: CUdeviceptr,
    count: u32,
    /// Words that nobody has, each with the turn that it is in.
    free: Mutex<Vec<(u32, u32)>>,
    wait: u32,
}

// SAFETY: the words are atomic, and never freed.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    fn word(&self, slot: u32) -> &AtomicU32 {
        let slot = slot.min(self.count.saturating_sub(1)) as usize;
        // SAFETY: `count` words were allocated and zeroed, and are never freed; the GPU only reads them.
        unsafe { self.host.add(slot).as_ref() }
    }
}

/// Flags for streams to wait for. Made once and lent: allocating pinned
/// memory stops the GPU for a moment, and it is kept for as long as the process lives.
#[derive(Clone)]
pub struct StreamFlags {
    words: Arc<Words>,
}

impl fmt::Debug for StreamFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "StreamFlags({} on {:?})",
            self.words.count, self.words.device
        )
    }
}

impl StreamFlags {
    /// Makes `count` flags.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn new(device: &CudaDevice, count: u32) -> Result<Self, CudaError> {
        let bytes = count as usize * WORD;
        if bytes == 0 {
            return Err(CudaError::BadSize { bytes: 0 });
        }
        let _bound = device.bind()?;
        let api = device.api();
        let mut host = std::ptr::null_mut();
        // SAFETY: writes one address.
        device.result("cuMemHostAlloc", unsafe {
            (api.host_alloc)(&raw mut host, bytes, PORTABLE_AND_MAPPED)
        })?;
        let Some(words) = NonNull::new(host.cast::<AtomicU32>()) else {
            return Err(CudaError::BadSize {
                bytes: bytes as u64,
            });
        };
        // SAFETY: as many bytes were allocated, and nobody else knows them.
        unsafe { host.write_bytes(0, bytes) };
        let mut words = Words {
            device: device.clone(),
            host: words,
            on_device: 0,
            count,
            free: Mutex::new((0..count).rev().map(|slot| (slot, 0)).collect()),
            wait: WAIT_AT_LEAST,
        };
        // SAFETY: writes one address; the memory was allocated as mapped.
        device.result("cuMemHostGetDevicePointer", unsafe {
            (api.host_device_pointer)(&raw mut words.on_device, host.cast::<c_void>(), 0)
        })?;
        if device.has(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES)? {
            words.wait |= WAIT_AND_FLUSH;
        }
        Ok(Self {
            words: Arc::new(words),
        })
    }

    /// Takes a flag; `None` while all are lent.
    #[must_use]
    pub fn take(&self) -> Option<StreamFlag> {
        let (slot, turn) = self.words.free.lock().pop()?;
        Some(StreamFlag {
            flag: Arc::new(Flag {
                words: Arc::clone(&self.words),
                slot,
                turn,
            }),
        })
    }
}

/// A word, and the turn that it is in. In each turn it goes from below `2 * turn + 2` to that (landed) or one more (failed),
/// once. The next turn's values are above both, so that whoever waits for this turn still finds it over.
struct Flag {
    words: Arc<Words>,
    slot: u32,
    turn: u32,
}

impl Flag {
    fn landed(&self) -> u32 {
        self.turn.wrapping_mul(2).wrapping_add(2)
    }

    fn failed(&self) -> u32 {
        self.landed().wrapping_add(1)
    }

    fn state(&self) -> FlagState {
        match self.words.word(self.slot).load(Ordering::Acquire) {
            word if word == self.landed() => FlagState::Landed,
            word if word == self.failed() => FlagState::Failed,
            _ => FlagState::Waiting,
        }
    }

    /// Sets it, unless it is set.
    fn set(&self, landed: bool) {
        let value = if landed { self.landed() } else { self.failed() };
        // Whatever the read has brought is there before the word is.
        let _ =
            self.words
                .word(self.slot)
                .try_update(Ordering::Release, Ordering::Relaxed, |word| {
                    (word != self.landed() && word != self.failed()).then_some(value)
                });
    }
}

impl Drop for Flag {
    fn drop(&mut self) {
        // A stream may still wait for it.
        self.set(false);
        let next = (self.slot, self.turn.wrapping_add(1));
        self.words.free.lock().push(next);
    }
}

/// A flag that streams wait for until a read has ended, landed or failed. A stream goes on in both cases: what it does with
/// the blocks must depend on the flag, which kernels find at [`device_address`](Self::device_address).
pub struct StreamFlag {
    flag: Arc<Flag>,
}

impl fmt::Debug for StreamFlag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamFlag({}, {:?})", self.flag.slot, self.state())
    }
}

impl StreamFlag {
    /// Has a stream wait: what is put on it from here on begins once the read has ended.
    ///
    /// The flag must live until the stream has got there; dropping it earlier lets the stream go on as after a failed read.
    ///
    /// # Errors
    /// [`CudaError`]; the stream does not wait then.
    pub fn hold(&self, stream: &CudaStream) -> Result<(), CudaError> {
        let device = &stream.device;
        let _bound = device.bind()?;
        // SAFETY: the stream is live, and the word is never freed.
        device.result("cuStreamWaitValue32", unsafe {
            (device.api().stream_wait_value)(
                stream.raw,
                self.device_address(),
                self.flag.landed(),
                self.flag.words.wait,
            )
        })
    }

    /// Where kernels find the word. Its lowest bit tells a failed read (1) from one that has landed (0), once the stream
    /// has got beyond its wait.
    #[must_use]
    pub fn device_address(&self) -> u64 {
        let offset = u64::from(self.flag.slot) * WORD as u64;
        self.flag.words.on_device.saturating_add(offset)
    }

    /// How far the read is.
    #[must_use]
    pub fn state(&self) -> FlagState {
        self.flag.state()
    }

    /// Lets streams go on as after a failed read, should it not have ended: for a caller that has waited long enough.
    pub fn give_up(&self) {
        self.flag.set(false);
    }

    /// What a read is given, to set the flag when it has ended.
    #[must_use]
    pub fn signal(&self) -> impl Signal + use<> {
        Setter(Some(Arc::clone(&self.flag)))
    }
}

/// Sets a flag, once.
struct Setter(Option<Arc<Flag>>);

impl fmt::Debug for Setter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Setter")
    }
}

impl Signal for Setter {
    fn ended(mut self: Box<Self>, landed: bool) {
        if let Some(flag) = self.0.take() {
            flag.set(landed);
        }
    }
}

impl Drop for Setter {
    fn drop(&mut self) {
        if let Some(flag) = self.0.take() {
            flag.set(false);
        }
    }
}

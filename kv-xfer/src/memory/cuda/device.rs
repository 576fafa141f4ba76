//! GPUs and their primary contexts.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_int};
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{CUcontext, CUdevice, CUdevice_attribute};
use parking_lot::Mutex;

use super::CudaError;
use super::api::{Api, INVALID_VALUE};

type Attribute = CUdevice_attribute;

/// Longest name of a device and of its bus address.
const NAME_LEN: usize = 256;

/// What a GPU is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaDeviceInfo {
    /// Its ordinal in this process: `CUDA_VISIBLE_DEVICES` renumbers.
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Its PCI address, such as `0000:53:00.0`, which nothing renumbers.
    pub bus_id: String,
    /// Its memory, bytes.
    pub bytes: u64,
}

struct Inner {
    api: &'static Api,
    info: CudaDeviceInfo,
    device: CUdevice,
    context: CUcontext,
}

// SAFETY: a context is a handle that any thread may make its current one; the other fields are plain.
unsafe impl Send for Inner {}
// SAFETY: as above; the driver's functions are safe to call from several threads at once.
unsafe impl Sync for Inner {}

/// A GPU, with its primary context: the one that frameworks and UCX use, too. It is kept for as long as the process lives,
/// since UCX keeps streams and mappings in it beyond the life of any pool.
#[derive(Clone)]
pub struct CudaDevice {
    inner: Arc<Inner>,
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaDevice({})", self.inner.info.ordinal)
    }
}

/// A device's context is the current one of this thread, until this is dropped.
pub(in crate::memory) struct Bound {
    api: &'static Api,
    /// Must be dropped on its own thread.
    here: PhantomData<*const ()>,
}

impl Drop for Bound {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: takes this thread's top context off its stack; it was pushed by `bind`.
        let code = unsafe { (self.api.context_pop)(&raw mut popped) };
        if let Err(error) = self.api.check("cuCtxPopCurrent", code) {
            tracing::debug!(%error, "a CUDA context stays current");
        }
    }
}

impl CudaDevice {
    /// How many GPUs this process can see.
    ///
    /// # Errors
    /// [`CudaError`] when there is no usable driver, or no GPU.
    pub fn count() -> Result<u32, CudaError> {
        let api = Api::get()?;
        let mut count: c_int = 0;
        // SAFETY: writes one integer.
        api.check("cuDeviceGetCount", unsafe {
            (api.device_count)(&raw mut count)
        })?;
        match u32::try_from(count) {
            Ok(count) if count > 0 => Ok(count),
            _ => Err(CudaError::NoDevice),
        }
    }

    /// The version of CUDA that the driver supports, such as (12, 8).
    ///
    /// # Errors
    /// [`CudaError`] when there is no usable driver.
    pub fn driver_version() -> Result<(u32, u32), CudaError> {
        let api = Api::get()?;
        let mut version: c_int = 0;
        // SAFETY: writes one integer.
        api.check("cuDriverGetVersion", unsafe {
            (api.driver_version)(&raw mut version)
        })?;
        let version = u32::try_from(version).unwrap_or(0);
        Ok((version / 1000, version % 1000 / 10))
    }

    /// Whether this process can see the GPU of an ordinal. Nothing is taken of the GPU for it.
    ///
    /// # Errors
    /// [`CudaError`] that says what is missing.
    pub fn check(ordinal: u32) -> Result<(), CudaError> {
        let found = Self::count()?;
        if ordinal < found {
            return Ok(());
        }
        let wanted = ordinal;
        Err(CudaError::NoSuchDevice { wanted, found })
    }

    /// Opens the GPU of an ordinal; the second time, the same one.
    ///
    /// # Errors
    /// [`CudaError`] when there is no such GPU, or it does not work.
    pub fn open(ordinal: u32) -> Result<Self, CudaError> {
        static OPEN: OnceLock<Mutex<BTreeMap<u32, CudaDevice>>> = OnceLock::new();
        Self::check(ordinal)?;
        let mut open = OPEN.get_or_init(Mutex::default).lock();
        if let Some(device) = open.get(&ordinal) {
            return Ok(device.clone());
        }
        let device = Self::open_new(Api::get()?, ordinal)?;
        open.insert(ordinal, device.clone());
        Ok(device)
    }

    fn open_new(api: &'static Api, ordinal: u32) -> Result<Self, CudaError> {
        let mut device: CUdevice = 0;
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: writes one handle.
        api.check("cuDeviceGet", unsafe {
            (api.device_get)(&raw mut device, number)
        })?;
        let mut text = [0; NAME_LEN];
        // SAFETY: writes a C string of at most this length.
        api.check("cuDeviceGetName", unsafe {
            (api.device_name)(text.as_mut_ptr(), NAME_LEN as c_int, device)
        })?;
        let name = string(&text);
        // SAFETY: as above.
        api.check("cuDeviceGetPCIBusId", unsafe {
            (api.device_bus_id)(text.as_mut_ptr(), NAME_LEN as c_int, device)
        })?;
        let bus_id = string(&text).to_ascii_lowercase();
        let mut bytes = 0;
        // SAFETY: writes one number.
        api.check("cuDeviceTotalMem", unsafe {
            (api.device_memory)(&raw mut bytes, device)
        })?;
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle, which stays valid until it is released: never.
        api.check("cuDevicePrimaryCtxRetain", unsafe {
            (api.context_retain)(&raw mut context, device)
        })?;
        let info = CudaDeviceInfo {
            ordinal,
            name,
            bus_id,
            bytes: bytes as u64,
        };
        Ok(Self {
            inner: Arc::new(Inner {
                api,
                info,
                device,
                context,
            }),
        })
    }

    /// What it is.
    #[must_use]
    pub fn info(&self) -> &CudaDeviceInfo {
        &self.inner.info
    }

    /// Its ordinal.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.inner.info.ordinal
    }

    /// Waits until the GPU has made visible to itself what RDMA devices have written, where that is not so by itself.
    ///
    /// # Errors
    /// [`CudaError`].
    pub(super) fn flush_writes(&self) -> Result<(), CudaError> {
        /// The current context, and visible to its own device.
        const TARGET_CURRENT: u32 = 0;
        const SCOPE_OWNER: u32 = 100;
        let _bound = self.bind()?;
        // SAFETY: acts on the current context, which is this device's.
        self.result("cuFlushGPUDirectRDMAWrites", unsafe {
            (self.api().flush_writes)(TARGET_CURRENT, SCOPE_OWNER)
        })
    }

    pub(super) fn api(&self) -> &'static Api {
        self.inner.api
    }

    pub(super) fn result(&self, operation: &'static str, code: u32) -> Result<(), CudaError> {
        self.inner.api.check(operation, code)
    }

    /// Makes its context the current one of this thread.
    pub(in crate::memory) fn bind(&self) -> Result<Bound, CudaError> {
        let api = self.inner.api;
        // SAFETY: the context is never released, so it is live.
        api.check("cuCtxPushCurrent", unsafe {
            (api.context_push)(self.inner.context)
        })?;
        Ok(Bound {
            api,
            here: PhantomData,
        })
    }

    /// An attribute; 0 where the driver does not know it.
    pub(super) fn attribute(&self, attribute: Attribute) -> Result<i32, CudaError> {
        let mut value: c_int = 0;
        // SAFETY: writes one integer.
        let code = unsafe {
            (self.inner.api.device_attribute)(&raw mut value, attribute as u32, self.inner.device)
        };
        if code == INVALID_VALUE {
            return Ok(0);
        }
        self.result("cuDeviceGetAttribute", code)?;
        Ok(value)
    }

    /// Whether it has something.
    pub(super) fn has(&self, attribute: Attribute) -> Result<bool, CudaError> {
        Ok(self.attribute(attribute)? != 0)
    }
}

fn string(text: &[std::ffi::c_char; NAME_LEN]) -> String {
    // SAFETY: `c_char` and `u8` have one layout; the array is read within its bounds.
    let bytes = unsafe { std::slice::from_raw_parts(text.as_ptr().cast::<u8>(), NAME_LEN) };
    CStr::from_bytes_until_nul(bytes)
        .map(|text| text.to_string_lossy().into_owned())
        .unwrap_or_default()
}

//! The functions of the CUDA driver that are used, found when they are first needed.
//!
//! cudarc finds and opens the library and has the types. Its own wrappers are not called: they panic where a driver lacks
//! a function, and their result type has no room for the codes of drivers newer than it is.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmemAccessDesc,
    CUmemAllocationProp, CUmemGenericAllocationHandle, CUmodule, CUpointer_attribute, CUstream,
};

use super::CudaError;

/// The code of success.
pub(super) const SUCCESS: u32 = 0;
/// The code of `cuEventQuery` for what has not happened yet.
pub(super) const NOT_READY: u32 = 600;
/// The code of a call with an argument that does not fit, such as a pointer that CUDA does not know.
pub(super) const INVALID_VALUE: u32 = 1;
/// The code of `cuInit` and others on a machine without a GPU.
const NO_DEVICE: u32 = 100;

macro_rules! functions {
    ($($field:ident = $symbol:literal: ($($argument:ty),*);)*) => {
        /// Pointers to the driver's functions, each with the number of its result.
        #[derive(Debug)]
        pub(super) struct Api {
            $(pub $field: unsafe extern "C" fn($($argument),*) -> u32,)*
        }

        impl Api {
            fn find(library: &libloading::Library) -> Result<Self, CudaError> {
                Ok(Self {
                    $($field: {
                        // SAFETY: a function of this name in the driver has this signature by
                        // cuda.h; its result, an enumeration there, is passed as a number.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> u32>($symbol.as_bytes())
                        };
                        *found.map_err(|_| CudaError::LacksFunction { name: $symbol })?
                    },)*
                })
            }
        }
    };
}

functions! {
    init = "cuInit": (c_uint);
    driver_version = "cuDriverGetVersion": (*mut c_int);
    error_name = "cuGetErrorName": (u32, *mut *const c_char);
    device_count = "cuDeviceGetCount": (*mut c_int);
    device_get = "cuDeviceGet": (*mut CUdevice, c_int);
    device_name = "cuDeviceGetName": (*mut c_char, c_int, CUdevice);
    device_attribute = "cuDeviceGetAttribute": (*mut c_int, u32, CUdevice);
    device_bus_id = "cuDeviceGetPCIBusId": (*mut c_char, c_int, CUdevice);
    device_memory = "cuDeviceTotalMem_v2": (*mut usize, CUdevice);
    context_retain = "cuDevicePrimaryCtxRetain": (*mut CUcontext, CUdevice);
    context_push = "cuCtxPushCurrent_v2": (CUcontext);
    context_pop = "cuCtxPopCurrent_v2": (*mut CUcontext);
    alloc = "cuMemAlloc_v2": (*mut CUdeviceptr, usize);
    free = "cuMemFree_v2": (CUdeviceptr);
    host_alloc = "cuMemHostAlloc": (*mut *mut c_void, usize, c_uint);
    host_device_pointer = "cuMemHostGetDevicePointer_v2": (*mut CUdeviceptr, *mut c_void, c_uint);
    granularity = "cuMemGetAllocationGranularity": (*mut usize, *const CUmemAllocationProp, u32);
    create = "cuMemCreate": (*mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, c_ulonglong);
    release = "cuMemRelease": (CUmemGenericAllocationHandle);
    reserve = "cuMemAddressReserve": (*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
    unreserve = "cuMemAddressFree": (CUdeviceptr, usize);
    map = "cuMemMap": (CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
    unmap = "cuMemUnmap": (CUdeviceptr, usize);
    set_access = "cuMemSetAccess": (CUdeviceptr, usize, *const CUmemAccessDesc, usize);
    pointer_attributes = "cuPointerGetAttributes": (c_uint, *mut CUpointer_attribute, *mut *mut c_void, CUdeviceptr);
    set_pointer_attribute = "cuPointerSetAttribute": (*const c_void, CUpointer_attribute, CUdeviceptr);
    address_range = "cuMemGetAddressRange_v2": (*mut CUdeviceptr, *mut usize, CUdeviceptr);
    copy_to_device = "cuMemcpyHtoDAsync_v2": (CUdeviceptr, *const c_void, usize, CUstream);
    copy_to_host = "cuMemcpyDtoHAsync_v2": (*mut c_void, CUdeviceptr, usize, CUstream);
    copy_on_device = "cuMemcpyDtoDAsync_v2": (CUdeviceptr, CUdeviceptr, usize, CUstream);
    set_bytes = "cuMemsetD8Async": (CUdeviceptr, u8, usize, CUstream);
    stream_create = "cuStreamCreate": (*mut CUstream, c_uint);
    stream_destroy = "cuStreamDestroy_v2": (CUstream);
    stream_synchronize = "cuStreamSynchronize": (CUstream);
    stream_wait_value = "cuStreamWaitValue32_v2": (CUstream, CUdeviceptr, u32, c_uint);
    event_create = "cuEventCreate": (*mut CUevent, c_uint);
    event_record = "cuEventRecord": (CUevent, CUstream);
    event_query = "cuEventQuery": (CUevent);
    event_destroy = "cuEventDestroy_v2": (CUevent);
    module_load = "cuModuleLoadData": (*mut CUmodule, *const c_void);
    module_function = "cuModuleGetFunction": (*mut CUfunction, CUmodule, *const c_char);
    module_unload = "cuModuleUnload": (CUmodule);
    launch = "cuLaunchKernel": (
        CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void
    );
    flush_writes = "cuFlushGPUDirectRDMAWrites": (u32, u32);
}

impl Api {
    /// The driver, loaded and initialised once in a process.
    pub(super) fn get() -> Result<&'static Self, CudaError> {
        static API: OnceLock<Result<Api, CudaError>> = OnceLock::new();
        API.get_or_init(|| {
            // SAFETY: opening the CUDA driver runs its initialisers, which are made for any process.
            if !unsafe { sys::is_culib_present() } {
                return Err(CudaError::NoDriver);
            }
            // SAFETY: as above; it is there, so this does not panic. It is never closed.
            let api = Self::find(unsafe { sys::culib() })?;
            // SAFETY: may be called at any time, from any thread.
            match unsafe { (api.init)(0) } {
                SUCCESS => Ok(api),
                NO_DEVICE => Err(CudaError::NoDevice),
                code => Err(api.error("cuInit", code)),
            }
        })
        .as_ref()
        .map_err(Clone::clone)
    }

    /// Makes a typed result of a call's code.
    pub(super) fn check(&self, operation: &'static str, code: u32) -> Result<(), CudaError> {
        match code {
            SUCCESS => Ok(()),
            code => Err(self.error(operation, code)),
        }
    }

    fn error(&self, operation: &'static str, code: u32) -> CudaError {
        let mut name = std::ptr::null();
        // SAFETY: writes a pointer to a string of its own, which is never freed; or leaves it null.
        let named = unsafe { (self.error_name)(code, &raw mut name) };
        let name = if named == SUCCESS && !name.is_null() {
            // SAFETY: a C string that lives as long as the driver.
            unsafe { CStr::from_ptr(name) }
                .to_string_lossy()
                .into_owned()
        } else {
            "unknown to this driver".to_owned()
        };
        CudaError::Call {
            operation,
            code,
            name,
        }
    }
}

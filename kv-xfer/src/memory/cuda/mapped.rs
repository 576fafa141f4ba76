//! Device memory that is mapped by hand, so that NICs can reach it.

use cudarc::driver::sys::{
    CUdevice_attribute, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType, CUmemLocation,
    CUmemLocationType,
};

use super::CudaError;
use super::api::SUCCESS;
use super::device::CudaDevice;

/// Memory that was mapped by hand.
pub(super) struct Mapped {
    device: CudaDevice,
    pub addr: CUdeviceptr,
    /// Bytes, rounded up.
    pub len: usize,
    /// Whether memory is mapped there, besides the addresses being reserved.
    mapped: bool,
    /// Whether it came with a handle for the NVLink fabric.
    pub fabric: bool,
}

impl Mapped {
    /// A context must be bound.
    pub(super) fn new(device: &CudaDevice, bytes: usize) -> Result<Self, CudaError> {
        type A = CUdevice_attribute;
        let lacks = |what| CudaError::Lacks {
            device: device.ordinal(),
            what,
            instead: "allocate plain memory (CudaKind::Plain)",
        };
        if !device.has(A::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED)? {
            return Err(lacks("memory that is mapped by hand"));
        }
        if !device.has(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)? {
            return Err(lacks("RDMA to memory that is mapped by hand"));
        }
        let fabric = device.has(A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)?;
        let api = device.api();
        let mut granularity = 0;
        // SAFETY: reads one description and writes one number.
        device.result("cuMemGetAllocationGranularity", unsafe {
            (api.granularity)(
                &raw mut granularity,
                &raw const *properties(device, false),
                1,
            )
        })?;
        let len = bytes
            .checked_next_multiple_of(granularity.max(1))
            .ok_or(CudaError::BadSize {
                bytes: bytes as u64,
            })?;
        let mut handle = 0;
        let mut create = |fabric| {
            // SAFETY: reads one description and writes one handle.
            unsafe {
                (api.create)(
                    &raw mut handle,
                    len,
                    &raw const *properties(device, fabric),
                    0,
                )
            }
        };
        // The attribute does not say that this process may have such handles: that takes a service and a device file.
        let fabric = fabric && create(true) == SUCCESS;
        if !fabric {
            device.result("cuMemCreate", create(false))?;
        }
        let placed = Self::place(device, handle, len, fabric);
        // A mapping keeps the memory; without one it is given back here.
        // SAFETY: the handle is live and not used again.
        let released = unsafe { (api.release)(handle) };
        let placed = placed?;
        device.result("cuMemRelease", released)?;
        Ok(placed)
    }

    fn place(
        device: &CudaDevice,
        handle: u64,
        len: usize,
        fabric: bool,
    ) -> Result<Self, CudaError> {
        let api = device.api();
        let mut addr = 0;
        // SAFETY: writes one address.
        device.result("cuMemAddressReserve", unsafe {
            (api.reserve)(&raw mut addr, len, 0, 0, 0)
        })?;
        let mut placed = Self {
            device: device.clone(),
            addr,
            len,
            mapped: false,
            fabric,
        };
        // SAFETY: the range was reserved just now, and the memory is as long.
        device.result("cuMemMap", unsafe { (api.map)(addr, len, 0, handle, 0) })?;
        placed.mapped = true;
        let access = CUmemAccessDesc {
            location: location(device),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: reads one description; the range is mapped.
        device.result("cuMemSetAccess", unsafe {
            (api.set_access)(addr, len, &raw const access, 1)
        })?;
        Ok(placed)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let api = self.device.api();
        let given_back = self.device.bind().and_then(|_bound| {
            if self.mapped {
                // SAFETY: mapped by this value and not used again.
                let code = unsafe { (api.unmap)(self.addr, self.len) };
                self.device.result("cuMemUnmap", code)?;
            }
            // SAFETY: reserved by this value, and nothing is mapped there.
            self.device.result("cuMemAddressFree", unsafe {
                (api.unreserve)(self.addr, self.len)
            })
        });
        if let Err(error) = given_back {
            tracing::error!(%error, "could not give GPU memory back");
        }
    }
}

fn location(device: &CudaDevice) -> CUmemLocation {
    CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: i32::try_from(device.ordinal()).unwrap_or(i32::MAX),
    }
}

fn properties(device: &CudaDevice, fabric: bool) -> Box<CUmemAllocationProp> {
    Box::new(CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: if fabric {
            CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC
        } else {
            CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE
        },
        location: location(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 1,
            usage: 0,
            reserved: [0; 4],
        },
    })
}

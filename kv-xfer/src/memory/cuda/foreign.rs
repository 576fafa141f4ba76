//! What the driver knows of pointers that an engine gives.

use std::ffi::c_void;

use cudarc::driver::sys::CUpointer_attribute;

use super::CudaError;
use super::api::INVALID_VALUE;
use super::device::CudaDevice;

/// Checks that a range is memory of this GPU, and inside its allocation. A context must be bound.
pub(super) fn check_foreign(
    device: &CudaDevice,
    index: usize,
    addr: u64,
    len: u64,
) -> Result<(), CudaError> {
    type A = CUpointer_attribute;
    /// The driver's number for memory on a GPU, and for memory on the host.
    const ON_DEVICE: u32 = 2;
    const ON_HOST: u32 = 1;
    let fits = |len: &u64| *len > 0 && isize::try_from(*len).is_ok();
    addr.checked_add(len)
        .filter(|_| fits(&len))
        .ok_or(CudaError::BadRange { index, addr, len })?;
    let (mut kind, mut ordinal, mut managed) = (0_u32, -1_i32, 0_u32);
    let mut wanted = [
        A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        A::CU_POINTER_ATTRIBUTE_IS_MANAGED,
    ];
    let mut places: [*mut c_void; 3] = [
        (&raw mut kind).cast(),
        (&raw mut ordinal).cast(),
        (&raw mut managed).cast(),
    ];
    let api = device.api();
    // SAFETY: as many attributes as places, each place as large as its attribute: 4 bytes.
    device.result("cuPointerGetAttributes", unsafe {
        (api.pointer_attributes)(3, wanted.as_mut_ptr(), places.as_mut_ptr(), addr)
    })?;
    let found = match (kind, managed) {
        (ON_DEVICE, 0) => None,
        (ON_DEVICE, _) => Some("managed memory, which moves between GPU and host"),
        (ON_HOST, _) => Some("host memory that was registered with CUDA"),
        _ => Some("an address that CUDA does not know"),
    };
    if let Some(found) = found {
        return Err(CudaError::NotDeviceMemory { index, addr, found });
    }
    if u32::try_from(ordinal) != Ok(device.ordinal()) {
        return Err(CudaError::OtherDevice {
            index,
            addr,
            found: ordinal,
            expected: device.ordinal(),
        });
    }
    let (mut base, mut size) = (0, 0);
    // SAFETY: writes an address and a length.
    let code = unsafe { (api.address_range)(&raw mut base, &raw mut size, addr) };
    if code == INVALID_VALUE {
        let found = "an address that CUDA does not know";
        return Err(CudaError::NotDeviceMemory { index, addr, found });
    }
    device.result("cuMemGetAddressRange", code)?;
    let end = base.saturating_add(size as u64);
    let allocated = end.saturating_sub(addr);
    if len > allocated {
        return Err(CudaError::LongerThanAllocation {
            index,
            addr,
            len,
            allocated,
        });
    }
    Ok(())
}

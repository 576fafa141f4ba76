//! Lists of descriptors: to transfer, to register, and of several peers.

use std::ffi::{CStr, c_void};

use super::{api, done};
use crate::error::CallError;
use crate::library::Library;
use crate::symbols::found;
use crate::types::{MemoryType, RegDlistHandle, RemoteDlistHandle, XferDlistHandle};

api! {
    /// Makes an empty list of descriptors to transfer.
    create_xfer_dlist = nixl_capi_create_xfer_dlist(mem_type: MemoryType) -> out XferDlistHandle;

    /// Destroys the list.
    destroy_xfer_dlist = nixl_capi_destroy_xfer_dlist(dlist: XferDlistHandle) -> done;

    /// Kind of the memory in the list.
    xfer_dlist_get_type = nixl_capi_xfer_dlist_get_type(dlist: XferDlistHandle) -> out MemoryType;

    /// Adds a descriptor. NIXL checks nothing here, and later misses ranges that wrap around.
    xfer_dlist_add_desc = nixl_capi_xfer_dlist_add_desc(
        dlist: XferDlistHandle, addr: usize, len: usize, dev_id: u64
    ) -> done;

    /// Number of descriptors.
    xfer_dlist_desc_count = nixl_capi_xfer_dlist_desc_count(dlist: XferDlistHandle) -> out usize;

    /// Number of descriptors, by the function's older name.
    xfer_dlist_len = nixl_capi_xfer_dlist_len(dlist: XferDlistHandle) -> out usize;

    /// Whether there are none.
    xfer_dlist_is_empty = nixl_capi_xfer_dlist_is_empty(dlist: XferDlistHandle) -> out bool;

    /// Gives back memory the list does not need.
    xfer_dlist_trim = nixl_capi_xfer_dlist_trim(dlist: XferDlistHandle) -> done;

    /// Removes a descriptor.
    xfer_dlist_rem_desc = nixl_capi_xfer_dlist_rem_desc(dlist: XferDlistHandle, index: i32) -> done;

    /// Removes all descriptors.
    xfer_dlist_clear = nixl_capi_xfer_dlist_clear(dlist: XferDlistHandle) -> done;

    /// Cuts the list, or grows it by empty descriptors.
    xfer_dlist_resize = nixl_capi_xfer_dlist_resize(dlist: XferDlistHandle, new_size: usize) -> done;

    /// Prints the list to the process's standard output.
    xfer_dlist_print = nixl_capi_xfer_dlist_print(dlist: XferDlistHandle) -> done;

    /// Makes an empty list of memory to register.
    create_reg_dlist = nixl_capi_create_reg_dlist(mem_type: MemoryType) -> out RegDlistHandle;

    /// Destroys the list.
    destroy_reg_dlist = nixl_capi_destroy_reg_dlist(dlist: RegDlistHandle) -> done;

    /// Kind of the memory in the list.
    reg_dlist_get_type = nixl_capi_reg_dlist_get_type(dlist: RegDlistHandle) -> out MemoryType;

    /// Number of descriptors.
    reg_dlist_desc_count = nixl_capi_reg_dlist_desc_count(dlist: RegDlistHandle) -> out usize;

    /// Whether there are none.
    reg_dlist_is_empty = nixl_capi_reg_dlist_is_empty(dlist: RegDlistHandle) -> out bool;

    /// Gives back memory the list does not need.
    reg_dlist_trim = nixl_capi_reg_dlist_trim(dlist: RegDlistHandle) -> done;

    /// Removes a descriptor.
    reg_dlist_rem_desc = nixl_capi_reg_dlist_rem_desc(dlist: RegDlistHandle, index: i32) -> done;

    /// Removes all descriptors.
    reg_dlist_clear = nixl_capi_reg_dlist_clear(dlist: RegDlistHandle) -> done;

    /// Cuts the list, or grows it by empty descriptors.
    reg_dlist_resize = nixl_capi_reg_dlist_resize(dlist: RegDlistHandle, new_size: usize) -> done;

    /// Prints the list to the process's standard output.
    reg_dlist_print = nixl_capi_reg_dlist_print(dlist: RegDlistHandle) -> done;

    /// Makes an empty list of descriptors of several peers. Since NIXL 1.5.
    create_remote_dlist = nixl_capi_create_remote_dlist(mem_type: MemoryType) -> out RemoteDlistHandle;

    /// Destroys the list. Since NIXL 1.5.
    destroy_remote_dlist = nixl_capi_destroy_remote_dlist(dlist: RemoteDlistHandle) -> done;

    /// Adds a descriptor; no peer is a placeholder that keeps indices aligned. Since NIXL 1.5.
    remote_dlist_add_desc = nixl_capi_remote_dlist_add_desc(
        dlist: RemoteDlistHandle, addr: usize, len: usize, dev_id: u64, remote_agent: Option<&CStr>
    ) -> done;
}

impl Library {
    /// Adds memory to register; `metadata` is the backend's and mostly empty.
    ///
    /// # Safety
    ///
    /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold.
    pub unsafe fn reg_dlist_add_desc(
        &self,
        dlist: RegDlistHandle,
        addr: usize,
        len: usize,
        dev_id: u64,
        metadata: &[u8],
    ) -> Result<(), CallError> {
        const FUNCTION: &str = "nixl_capi_reg_dlist_add_desc";
        let function = found(&self.symbols().nixl_capi_reg_dlist_add_desc, FUNCTION)?;
        // SAFETY: the list is live by contract; C copies the bytes during the call and only stores the address.
        let raw = unsafe {
            function(
                dlist.raw(),
                addr,
                len,
                dev_id,
                metadata.as_ptr().cast::<c_void>(),
                metadata.len(),
            )
        };
        done(FUNCTION, raw)
    }
}

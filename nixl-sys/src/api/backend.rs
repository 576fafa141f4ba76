//! Plugins and backends.

use std::ffi::{CStr, CString};
use std::ptr;

use super::{Output, api, done};
use crate::error::CallError;
use crate::library::Library;
use crate::symbols::found;
use crate::types::{
    AgentHandle, BackendHandle, MemListHandle, MemoryType, ParamsHandle, StringListHandle,
};

api! {
    /// The plugins that the agent found.
    get_available_plugins = nixl_capi_get_available_plugins(agent: AgentHandle) -> out StringListHandle;

    /// Creates a backend. Almost everything that can go wrong comes back as `Backend`; the reason is on stderr.
    create_backend = nixl_capi_create_backend(
        agent: AgentHandle, plugin_name: &CStr, params: ParamsHandle
    ) -> out BackendHandle;

    /// Frees the handle. The backend itself lives as long as its agent.
    destroy_backend = nixl_capi_destroy_backend(backend: BackendHandle) -> done;

    /// Length of a list of strings.
    string_list_size = nixl_capi_string_list_size(list: StringListHandle) -> out usize;

    /// A string of a list.
    string_list_get = nixl_capi_string_list_get(list: StringListHandle, index: usize) -> out CString;

    /// Destroys a list of strings.
    destroy_string_list = nixl_capi_destroy_string_list(list: StringListHandle) -> done;

    /// Whether a list of memory types is empty.
    mem_list_is_empty = nixl_capi_mem_list_is_empty(list: MemListHandle) -> out bool;

    /// Length of a list of memory types.
    mem_list_size = nixl_capi_mem_list_size(list: MemListHandle) -> out usize;

    /// A memory type of a list.
    mem_list_get = nixl_capi_mem_list_get(list: MemListHandle, index: usize) -> out MemoryType;

    /// NIXL's name of a memory type.
    mem_type_to_string = nixl_capi_mem_type_to_string(mem_type: MemoryType) -> out CString;

    /// Destroys a list of memory types.
    destroy_mem_list = nixl_capi_destroy_mem_list(list: MemListHandle) -> done;
}

impl Library {
    /// The memory types a plugin can serve and its parameters with their defaults. Both are to be destroyed.
    ///
    /// # Safety
    ///
    /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold.
    pub unsafe fn get_plugin_params(
        &self,
        agent: AgentHandle,
        plugin_name: &CStr,
    ) -> Result<(MemListHandle, ParamsHandle), CallError> {
        const FUNCTION: &str = "nixl_capi_get_plugin_params";
        let function = found(&self.symbols().nixl_capi_get_plugin_params, FUNCTION)?;
        let (mut mems, mut params) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the agent is live by contract, the name ends with NUL, both pointers are to live places.
        let raw = unsafe { function(agent.raw(), plugin_name.as_ptr(), &mut mems, &mut params) };
        done(FUNCTION, raw)?;
        // SAFETY: C reported success.
        unsafe {
            Ok((
                MemListHandle::from_c(FUNCTION, mems)?,
                ParamsHandle::from_c(FUNCTION, params)?,
            ))
        }
    }

    /// The memory types a backend serves and the parameters it was created with. Both are to be destroyed.
    ///
    /// # Safety
    ///
    /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold.
    pub unsafe fn get_backend_params(
        &self,
        agent: AgentHandle,
        backend: BackendHandle,
    ) -> Result<(MemListHandle, ParamsHandle), CallError> {
        const FUNCTION: &str = "nixl_capi_get_backend_params";
        let function = found(&self.symbols().nixl_capi_get_backend_params, FUNCTION)?;
        let (mut mems, mut params) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the handles are live by contract, and both pointers are to live places.
        let raw = unsafe { function(agent.raw(), backend.raw(), &mut mems, &mut params) };
        done(FUNCTION, raw)?;
        // SAFETY: C reported success.
        unsafe {
            Ok((
                MemListHandle::from_c(FUNCTION, mems)?,
                ParamsHandle::from_c(FUNCTION, params)?,
            ))
        }
    }
}

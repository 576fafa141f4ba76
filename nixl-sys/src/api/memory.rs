//! Registered memory, queries about it, and views of it.

use std::ptr;

use super::{Input, Output, api, done};
use crate::error::CallError;
use crate::library::Library;
use crate::symbols::found;
use crate::types::{
    AgentHandle, MemViewHandle, OptArgsHandle, ParamsHandle, QueryRespListHandle, RegDlistHandle,
    RemoteDlistHandle, XferDlistHandle,
};

api! {
    /// Registers memory. It must stay mapped until it is deregistered, and on shared memory and TCP until no peer can
    /// read it any more: there, registration protects nothing.
    register_mem = nixl_capi_register_mem(
        agent: AgentHandle, dlist: RegDlistHandle, opt_args: Option<OptArgsHandle>
    ) -> done;

    /// Takes back a registration.
    deregister_mem = nixl_capi_deregister_mem(
        agent: AgentHandle, dlist: RegDlistHandle, opt_args: Option<OptArgsHandle>
    ) -> done;

    /// Asks a storage backend about memory; the answers are added to `resp`.
    query_mem = nixl_capi_query_mem(
        agent: AgentHandle, descs: RegDlistHandle, resp: QueryRespListHandle, opt_args: Option<OptArgsHandle>
    ) -> done;

    /// Makes an empty list of answers.
    create_query_resp_list = nixl_capi_create_query_resp_list() -> out QueryRespListHandle;

    /// Destroys a list of answers.
    destroy_query_resp_list = nixl_capi_destroy_query_resp_list(list: QueryRespListHandle) -> done;

    /// Number of answers.
    query_resp_list_size = nixl_capi_query_resp_list_size(list: QueryRespListHandle) -> out usize;

    /// Whether an answer says anything.
    query_resp_list_has_value = nixl_capi_query_resp_list_has_value(
        list: QueryRespListHandle, index: usize
    ) -> out bool;

    /// What an answer says, as new parameters that are to be destroyed.
    query_resp_list_get_params = nixl_capi_query_resp_list_get_params(
        list: QueryRespListHandle, index: usize
    ) -> out ParamsHandle;

    /// Releases a view, before its agent is destroyed. Since NIXL 1.5.
    release_mem_view = nixl_capi_release_mem_view(agent: AgentHandle, view: MemViewHandle) -> done;
}

impl Library {
    /// Prepares a view of local memory. Since NIXL 1.5.
    ///
    /// # Safety
    ///
    /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold.
    pub unsafe fn prep_mem_view_local(
        &self,
        agent: AgentHandle,
        descs: XferDlistHandle,
        opt_args: Option<OptArgsHandle>,
    ) -> Result<MemViewHandle, CallError> {
        const FUNCTION: &str = "nixl_capi_prep_mem_view_local";
        let function = found(&self.symbols().nixl_capi_prep_mem_view_local, FUNCTION)?;
        let mut view = ptr::null_mut();
        // SAFETY: the handles are live by contract, and `view` is a live place.
        let raw = unsafe { function(agent.raw(), descs.raw(), &mut view, opt_args.into_c()) };
        done(FUNCTION, raw)?;
        // SAFETY: C reported success.
        unsafe { MemViewHandle::from_c(FUNCTION, view) }
    }

    /// Prepares a view of peers' memory. Since NIXL 1.5.
    ///
    /// # Safety
    ///
    /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold.
    pub unsafe fn prep_mem_view_remote(
        &self,
        agent: AgentHandle,
        descs: RemoteDlistHandle,
        opt_args: Option<OptArgsHandle>,
    ) -> Result<MemViewHandle, CallError> {
        const FUNCTION: &str = "nixl_capi_prep_mem_view_remote";
        let function = found(&self.symbols().nixl_capi_prep_mem_view_remote, FUNCTION)?;
        let mut view = ptr::null_mut();
        // SAFETY: the handles are live by contract, and `view` is a live place.
        let raw = unsafe { function(agent.raw(), descs.raw(), &mut view, opt_args.into_c()) };
        done(FUNCTION, raw)?;
        // SAFETY: C reported success.
        unsafe { MemViewHandle::from_c(FUNCTION, view) }
    }
}

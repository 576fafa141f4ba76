//! Transfers.

use std::ffi::CStr;
use std::ptr;

use super::{Input, Output, api, done};
use crate::bindings as c;
use crate::error::CallError;
use crate::library::Library;
use crate::symbols::found;
use crate::types::{
    AgentHandle, BackendHandle, CostEstimate, OptArgsHandle, PreparedDlistHandle, XferDlistHandle,
    XferOp, XferReqHandle, XferTelemetry,
};

api! {
    /// Releases a prepared list. The handle is gone whatever the result.
    release_xfer_dlist_handle = nixl_capi_release_xfer_dlist_handle(
        agent: AgentHandle, handle: PreparedDlistHandle
    ) -> done;

    /// Starts a transfer. Over shared memory it copies everything before it returns.
    ///
    /// From here on the memory on both sides belongs to the transfer until it has ended or the agent is destroyed.
    post_xfer_req = nixl_capi_post_xfer_req(
        agent: AgentHandle, req: XferReqHandle, opt_args: Option<OptArgsHandle>
    ) -> progress;

    /// Whether a transfer has ended. There is no time-out: a hung peer is "in progress" for ever.
    get_xfer_status = nixl_capi_get_xfer_status(agent: AgentHandle, req: XferReqHandle) -> progress;

    /// The backend a request runs on, as a new handle that is to be destroyed.
    query_xfer_backend = nixl_capi_query_xfer_backend(
        agent: AgentHandle, req: XferReqHandle
    ) -> out BackendHandle;

    /// Lets go of a request. It stops nothing: a running transfer goes on writing afterwards.
    release_xfer_req = nixl_capi_release_xfer_req(agent: AgentHandle, req: XferReqHandle) -> done;

    /// Frees a released request; one that was not released is refused with `InvalidState`.
    destroy_xfer_req = nixl_capi_destroy_xfer_req(req: XferReqHandle) -> done;
}

impl Library {
    /// Prepares descriptors, so that requests can pick from them by index.
    ///
    /// `agent_name` is the peer's name, or empty for local memory.
    ///
    /// # Safety
    ///
    /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold.
    pub unsafe fn prep_xfer_dlist(
        &self,
        agent: AgentHandle,
        agent_name: &CStr,
        descs: XferDlistHandle,
        opt_args: Option<OptArgsHandle>,
    ) -> Result<PreparedDlistHandle, CallError> {
        const FUNCTION: &str = "nixl_capi_prep_xfer_dlist";
        let function = found(&self.symbols().nixl_capi_prep_xfer_dlist, FUNCTION)?;
        let mut handle = ptr::null_mut();
        // SAFETY: the handles are live by contract, the name ends with NUL, `handle` is a live place.
        let raw = unsafe {
            function(
                agent.raw(),
                agent_name.as_ptr(),
                descs.raw(),
                &mut handle,
                opt_args.into_c(),
            )
        };
        done(FUNCTION, raw)?;
        // SAFETY: C reported success.
        unsafe { PreparedDlistHandle::from_c(FUNCTION, handle) }
    }

    /// Makes a request from prepared descriptors: `local_indices[i]` goes with `remote_indices[i]`.
    ///
    /// # Safety
    ///
    /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold.
    #[expect(
        clippy::too_many_arguments,
        reason = "one for one what the C function takes"
    )]
    pub unsafe fn make_xfer_req(
        &self,
        agent: AgentHandle,
        operation: XferOp,
        local_descs: PreparedDlistHandle,
        local_indices: &[i32],
        remote_descs: PreparedDlistHandle,
        remote_indices: &[i32],
        opt_args: Option<OptArgsHandle>,
    ) -> Result<XferReqHandle, CallError> {
        const FUNCTION: &str = "nixl_capi_make_xfer_req";
        let function = found(&self.symbols().nixl_capi_make_xfer_req, FUNCTION)?;
        let mut req = ptr::null_mut();
        // SAFETY: the handles are live by contract; the indices are only read during the call; `req` is a live place.
        let raw = unsafe {
            function(
                agent.raw(),
                operation.to_raw(),
                local_descs.raw(),
                local_indices.as_ptr(),
                local_indices.len(),
                remote_descs.raw(),
                remote_indices.as_ptr(),
                remote_indices.len(),
                &mut req,
                opt_args.into_c(),
            )
        };
        done(FUNCTION, raw)?;
        // SAFETY: C reported success.
        unsafe { XferReqHandle::from_c(FUNCTION, req) }
    }

    /// Makes a request from two lists of the same length, pair by pair.
    ///
    /// # Safety
    ///
    /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold.
    pub unsafe fn create_xfer_req(
        &self,
        agent: AgentHandle,
        operation: XferOp,
        local_descs: XferDlistHandle,
        remote_descs: XferDlistHandle,
        remote_agent: &CStr,
        opt_args: Option<OptArgsHandle>,
    ) -> Result<XferReqHandle, CallError> {
        const FUNCTION: &str = "nixl_capi_create_xfer_req";
        let function = found(&self.symbols().nixl_capi_create_xfer_req, FUNCTION)?;
        let mut req = ptr::null_mut();
        // SAFETY: the handles are live by contract, the name ends with NUL, `req` is a live place.
        let raw = unsafe {
            function(
                agent.raw(),
                operation.to_raw(),
                local_descs.raw(),
                remote_descs.raw(),
                remote_agent.as_ptr(),
                &mut req,
                opt_args.into_c(),
            )
        };
        done(FUNCTION, raw)?;
        // SAFETY: C reported success.
        unsafe { XferReqHandle::from_c(FUNCTION, req) }
    }

    /// What the backend expects a request to cost.
    ///
    /// # Safety
    ///
    /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold.
    pub unsafe fn estimate_xfer_cost(
        &self,
        agent: AgentHandle,
        req: XferReqHandle,
        opt_args: Option<OptArgsHandle>,
    ) -> Result<CostEstimate, CallError> {
        const FUNCTION: &str = "nixl_capi_estimate_xfer_cost";
        let function = found(&self.symbols().nixl_capi_estimate_xfer_cost, FUNCTION)?;
        let (mut duration_us, mut error_margin_us, mut method) = (0, 0, 0);
        // SAFETY: the handles are live by contract, and the three pointers are to live places.
        let raw = unsafe {
            function(
                agent.raw(),
                req.raw(),
                opt_args.into_c(),
                &mut duration_us,
                &mut error_margin_us,
                &mut method,
            )
        };
        done(FUNCTION, raw)?;
        Ok(CostEstimate {
            duration_us,
            error_margin_us,
            method,
        })
    }

    /// What NIXL measured of a request; `NoTelemetry` unless the agent was made to capture it.
    ///
    /// # Safety
    ///
    /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold.
    pub unsafe fn get_xfer_telemetry(
        &self,
        agent: AgentHandle,
        req: XferReqHandle,
    ) -> Result<XferTelemetry, CallError> {
        const FUNCTION: &str = "nixl_capi_get_xfer_telemetry";
        let function = found(&self.symbols().nixl_capi_get_xfer_telemetry, FUNCTION)?;
        let mut telemetry = c::nixl_capi_xfer_telemetry_s {
            start_time_us: 0,
            post_duration_us: 0,
            xfer_duration_us: 0,
            total_bytes: 0,
            desc_count: 0,
        };
        // SAFETY: the handles are live by contract, and `telemetry` is a live place.
        let raw = unsafe { function(agent.raw(), req.raw(), &mut telemetry) };
        done(FUNCTION, raw)?;
        Ok(XferTelemetry {
            started_us: telemetry.start_time_us,
            post_us: telemetry.post_duration_us,
            transfer_us: telemetry.xfer_duration_us,
            bytes: telemetry.total_bytes,
            descriptors: telemetry.desc_count,
        })
    }
}

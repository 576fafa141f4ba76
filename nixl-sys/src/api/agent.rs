//! Agents and their metadata.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr;

use super::{Input, Output, api, done};
use crate::error::CallError;
use crate::library::Library;
use crate::symbols::found;
use crate::types::{
    AgentConfig, AgentHandle, Buffer, OptArgsHandle, RegDlistHandle, XferDlistHandle,
};

api! {
    /// Makes an agent with a progress thread and NIXL's defaults.
    create_agent = nixl_capi_create_agent(name: &CStr) -> out AgentHandle;

    /// Destroys an agent with its backends. Nothing else stops the writes of its running transfers.
    destroy_agent = nixl_capi_destroy_agent(agent: AgentHandle) -> done;

    /// Forgets a peer.
    invalidate_remote_md = nixl_capi_invalidate_remote_md(agent: AgentHandle, remote_agent: &CStr) -> done;

    /// Whether a peer is known and, if `descs` is given, whether it has that memory.
    check_remote_md = nixl_capi_check_remote_md(
        agent: AgentHandle, remote_agent: &CStr, descs: Option<XferDlistHandle>
    ) -> done;

    /// Publishes the agent's metadata, to the peer or the store that `opt_args` names.
    send_local_md = nixl_capi_send_local_md(agent: AgentHandle, opt_args: Option<OptArgsHandle>) -> done;

    /// Publishes the metadata of some memory only.
    send_local_partial_md = nixl_capi_send_local_partial_md(
        agent: AgentHandle, descs: RegDlistHandle, opt_args: Option<OptArgsHandle>
    ) -> done;

    /// Starts to fetch a peer's metadata; [`check_remote_md`](Self::check_remote_md) tells when it is there.
    fetch_remote_md = nixl_capi_fetch_remote_md(
        agent: AgentHandle, remote_agent: &CStr, opt_args: Option<OptArgsHandle>
    ) -> progress;

    /// Takes back what was published.
    invalidate_local_md = nixl_capi_invalidate_local_md(
        agent: AgentHandle, opt_args: Option<OptArgsHandle>
    ) -> done;

    /// Connects to a known peer now instead of at the first transfer.
    agent_make_connection = nixl_capi_agent_make_connection(
        agent: AgentHandle, remote_agent: &CStr, opt_args: Option<OptArgsHandle>
    ) -> progress;
}

impl Library {
    /// Whether the library is a stub with no NIXL behind it; a stub is refused when it is opened.
    pub fn is_stub(&self) -> Result<bool, CallError> {
        let function = found(&self.symbols().nixl_capi_is_stub, "nixl_capi_is_stub")?;
        // SAFETY: the function takes nothing and touches nothing.
        Ok(unsafe { function() })
    }

    /// Makes an agent.
    ///
    /// Fails with `Backend` and no reason when NIXL cannot look at its configuration file or not parse it.
    ///
    /// # Safety
    ///
    /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold.
    pub unsafe fn create_configured_agent(
        &self,
        name: &CStr,
        config: &AgentConfig,
    ) -> Result<AgentHandle, CallError> {
        const FUNCTION: &str = "nixl_capi_create_configured_agent";
        let function = found(&self.symbols().nixl_capi_create_configured_agent, FUNCTION)?;
        let config = config.to_raw();
        let mut agent = ptr::null_mut();
        // SAFETY: the name ends with NUL, and both pointers are to live places; C keeps none of them.
        let raw = unsafe { function(name.as_ptr(), &config, &mut agent) };
        done(FUNCTION, raw)?;
        // SAFETY: C reported success.
        unsafe { AgentHandle::from_c(FUNCTION, agent) }
    }

    /// The metadata by which a peer reaches this agent.
    ///
    /// # Safety
    ///
    /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold.
    pub unsafe fn get_local_md(&self, agent: AgentHandle) -> Result<Buffer, CallError> {
        const FUNCTION: &str = "nixl_capi_get_local_md";
        let function = found(&self.symbols().nixl_capi_get_local_md, FUNCTION)?;
        let (mut data, mut len) = (ptr::null_mut(), 0);
        // SAFETY: the agent is live by contract, and both pointers are to live places.
        let raw = unsafe { function(agent.raw(), &mut data, &mut len) };
        done(FUNCTION, raw)?;
        // SAFETY: on success C leaves a buffer from malloc and its length, and keeps neither.
        unsafe { Buffer::from_malloc(data, len) }.ok_or(CallError::NoResult { function: FUNCTION })
    }

    /// The metadata of some memory only.
    ///
    /// # Safety
    ///
    /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold.
    pub unsafe fn get_local_partial_md(
        &self,
        agent: AgentHandle,
        descs: RegDlistHandle,
        opt_args: Option<OptArgsHandle>,
    ) -> Result<Buffer, CallError> {
        const FUNCTION: &str = "nixl_capi_get_local_partial_md";
        let function = found(&self.symbols().nixl_capi_get_local_partial_md, FUNCTION)?;
        let (mut data, mut len) = (ptr::null_mut(), 0);
        // SAFETY: the handles are live by contract, and both pointers are to live places.
        let raw = unsafe {
            function(
                agent.raw(),
                descs.raw(),
                &mut data,
                &mut len,
                opt_args.into_c(),
            )
        };
        done(FUNCTION, raw)?;
        // SAFETY: on success C leaves a buffer from malloc and its length, and keeps neither.
        unsafe { Buffer::from_malloc(data, len) }.ok_or(CallError::NoResult { function: FUNCTION })
    }

    /// Loads a peer's metadata and returns the peer's name.
    ///
    /// # Safety
    ///
    /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold. `metadata` must be bytes that a
    /// [`get_local_md`](Self::get_local_md) of a compatible NIXL gave, unchanged: NIXL trusts them, and changed ones
    /// crash the process.
    pub unsafe fn load_remote_md(
        &self,
        agent: AgentHandle,
        metadata: &[u8],
    ) -> Result<CString, CallError> {
        const FUNCTION: &str = "nixl_capi_load_remote_md";
        let function = found(&self.symbols().nixl_capi_load_remote_md, FUNCTION)?;
        let mut name: *mut c_char = ptr::null_mut();
        // SAFETY: the agent is live by contract; the bytes are only read during the call; `name` is a live place.
        let raw = unsafe {
            function(
                agent.raw(),
                metadata.as_ptr().cast::<c_void>(),
                metadata.len(),
                &mut name,
            )
        };
        done(FUNCTION, raw)?;
        // SAFETY: C reported success, so `name` is null or a string.
        let copy = unsafe { CString::from_c(FUNCTION, name.cast_const()) };
        // SAFETY: the string is from malloc and ours; it was copied above; free takes null too.
        unsafe { libc::free(name.cast()) };
        copy
    }
}

//! Notifications between agents.

use std::ffi::{CStr, CString, c_void};
use std::ptr;

use super::{Input, Output, api, done, progress};
use crate::error::CallError;
use crate::library::Library;
use crate::status::Progress;
use crate::symbols::found;
use crate::types::{AgentHandle, NotifMapHandle, OptArgsHandle};

api! {
    /// Adds what has arrived since the last call to `map`.
    get_notifs = nixl_capi_get_notifs(
        agent: AgentHandle, map: NotifMapHandle, opt_args: Option<OptArgsHandle>
    ) -> done;

    /// Makes an empty map.
    create_notif_map = nixl_capi_create_notif_map() -> out NotifMapHandle;

    /// Destroys a map.
    destroy_notif_map = nixl_capi_destroy_notif_map(map: NotifMapHandle) -> done;

    /// Number of senders in a map.
    notif_map_size = nixl_capi_notif_map_size(map: NotifMapHandle) -> out usize;

    /// Number of notifications from a sender.
    notif_map_get_notifs_size = nixl_capi_notif_map_get_notifs_size(
        map: NotifMapHandle, agent_name: &CStr
    ) -> out usize;

    /// Removes everything from a map.
    notif_map_clear = nixl_capi_notif_map_clear(map: NotifMapHandle) -> done;
}

impl Library {
    /// Sends a notification to a known peer. On LIBFABRIC it blocks for a dead peer.
    ///
    /// # Safety
    ///
    /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold.
    pub unsafe fn gen_notif(
        &self,
        agent: AgentHandle,
        remote_agent: &CStr,
        message: &[u8],
        opt_args: Option<OptArgsHandle>,
    ) -> Result<Progress, CallError> {
        const FUNCTION: &str = "nixl_capi_gen_notif";
        let function = found(&self.symbols().nixl_capi_gen_notif, FUNCTION)?;
        // SAFETY: the handles are live by contract; the name ends with NUL; C copies the bytes during the call.
        let raw = unsafe {
            function(
                agent.raw(),
                remote_agent.as_ptr(),
                message.as_ptr().cast::<c_void>(),
                message.len(),
                opt_args.into_c(),
            )
        };
        progress(FUNCTION, raw)
    }

    /// Name of a sender.
    ///
    /// # Safety
    ///
    /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold.
    pub unsafe fn notif_map_get_agent_at(
        &self,
        map: NotifMapHandle,
        index: usize,
    ) -> Result<CString, CallError> {
        const FUNCTION: &str = "nixl_capi_notif_map_get_agent_at";
        let function = found(&self.symbols().nixl_capi_notif_map_get_agent_at, FUNCTION)?;
        // SAFETY: the caller's promise about `map`.
        let size = unsafe { self.notif_map_size(map) }?;
        // C walks to the index before it looks whether it is there.
        if index >= size {
            return Err(CallError::BadArgument {
                argument: "index",
                reason: format!("{index} in a map of {size} senders"),
            });
        }
        let mut name = ptr::null();
        // SAFETY: the map is live by contract and has that index; `name` is a live place.
        let raw = unsafe { function(map.raw(), index, &mut name) };
        done(FUNCTION, raw)?;
        // SAFETY: C reported success.
        unsafe { CString::from_c(FUNCTION, name) }
    }

    /// A copy of a notification.
    ///
    /// # Safety
    ///
    /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold.
    pub unsafe fn notif_map_get_notif(
        &self,
        map: NotifMapHandle,
        agent_name: &CStr,
        index: usize,
    ) -> Result<Vec<u8>, CallError> {
        const FUNCTION: &str = "nixl_capi_notif_map_get_notif";
        let function = found(&self.symbols().nixl_capi_notif_map_get_notif, FUNCTION)?;
        let (mut data, mut len) = (ptr::null(), 0);
        // SAFETY: the map is live by contract, the name ends with NUL, both pointers are to live places.
        let raw = unsafe { function(map.raw(), agent_name.as_ptr(), index, &mut data, &mut len) };
        done(FUNCTION, raw)?;
        if data.is_null() || len == 0 {
            return Ok(Vec::new());
        }
        // SAFETY: C reported success: `len` bytes at `data` that the map keeps until it changes, which only a later
        // call can do.
        Ok(unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len) }.to_vec())
    }
}

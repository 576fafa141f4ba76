//! Optional arguments of other calls.

use std::ffi::{CStr, c_void};
use std::ptr;

use super::{api, done};
use crate::error::CallError;
use crate::library::Library;
use crate::symbols::found;
use crate::types::{BackendHandle, Buffer, OptArgsHandle};

api! {
    /// Makes optional arguments with nothing set.
    create_opt_args = nixl_capi_create_opt_args() -> out OptArgsHandle;

    /// Destroys optional arguments.
    destroy_opt_args = nixl_capi_destroy_opt_args(args: OptArgsHandle) -> done;

    /// Restricts the call to this backend, and the others added.
    opt_args_add_backend = nixl_capi_opt_args_add_backend(args: OptArgsHandle, backend: BackendHandle) -> done;

    /// Whether the peer is notified when the transfer ends.
    opt_args_set_has_notif = nixl_capi_opt_args_set_has_notif(args: OptArgsHandle, has_notif: bool) -> done;

    /// Whether a notification is asked for.
    opt_args_get_has_notif = nixl_capi_opt_args_get_has_notif(args: OptArgsHandle) -> out bool;

    /// Whether neighbouring descriptors stay apart.
    opt_args_set_skip_desc_merge = nixl_capi_opt_args_set_skip_desc_merge(
        args: OptArgsHandle, skip_merge: bool
    ) -> done;

    /// Whether neighbouring descriptors are asked to stay apart.
    opt_args_get_skip_desc_merge = nixl_capi_opt_args_get_skip_desc_merge(args: OptArgsHandle) -> out bool;

    /// The peer's address for metadata over a socket.
    opt_args_set_ip_addr = nixl_capi_opt_args_set_ip_addr(args: OptArgsHandle, ip_addr: &CStr) -> done;

    /// The peer's port for metadata over a socket.
    opt_args_set_port = nixl_capi_opt_args_set_port(args: OptArgsHandle, port: u16) -> done;
}

impl Library {
    /// Sets the notification's bytes; [`opt_args_set_has_notif`](Self::opt_args_set_has_notif) asks for it to be sent.
    ///
    /// # Safety
    ///
    /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold.
    pub unsafe fn opt_args_set_notif_msg(
        &self,
        args: OptArgsHandle,
        message: &[u8],
    ) -> Result<(), CallError> {
        const FUNCTION: &str = "nixl_capi_opt_args_set_notif_msg";
        let function = found(&self.symbols().nixl_capi_opt_args_set_notif_msg, FUNCTION)?;
        // SAFETY: the handle is live by contract; C copies the bytes during the call.
        let raw = unsafe { function(args.raw(), message.as_ptr().cast::<c_void>(), message.len()) };
        done(FUNCTION, raw)
    }

    /// The notification's bytes, or `None` when there are none.
    ///
    /// # Safety
    ///
    /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold.
    pub unsafe fn opt_args_get_notif_msg(
        &self,
        args: OptArgsHandle,
    ) -> Result<Option<Buffer>, CallError> {
        const FUNCTION: &str = "nixl_capi_opt_args_get_notif_msg";
        let function = found(&self.symbols().nixl_capi_opt_args_get_notif_msg, FUNCTION)?;
        let (mut data, mut len) = (ptr::null_mut(), 0);
        // SAFETY: the handle is live by contract, and both pointers are to live places.
        let raw = unsafe { function(args.raw(), &mut data, &mut len) };
        done(FUNCTION, raw)?;
        // SAFETY: on success C leaves null or a buffer from malloc, and keeps neither.
        Ok(unsafe { Buffer::from_malloc(data, len) })
    }

    /// Sets bytes whose meaning is the backend's. Since NIXL 1.5.
    ///
    /// # Safety
    ///
    /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold.
    pub unsafe fn opt_args_set_custom_param(
        &self,
        args: OptArgsHandle,
        param: &[u8],
    ) -> Result<(), CallError> {
        const FUNCTION: &str = "nixl_capi_opt_args_set_custom_param";
        let function = found(
            &self.symbols().nixl_capi_opt_args_set_custom_param,
            FUNCTION,
        )?;
        // SAFETY: the handle is live by contract; C copies the bytes during the call.
        let raw = unsafe { function(args.raw(), param.as_ptr().cast::<c_void>(), param.len()) };
        done(FUNCTION, raw)
    }

    /// The backend's own bytes, or `None` when there are none. Since NIXL 1.5.
    ///
    /// # Safety
    ///
    /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold.
    pub unsafe fn opt_args_get_custom_param(
        &self,
        args: OptArgsHandle,
    ) -> Result<Option<Buffer>, CallError> {
        const FUNCTION: &str = "nixl_capi_opt_args_get_custom_param";
        let function = found(
            &self.symbols().nixl_capi_opt_args_get_custom_param,
            FUNCTION,
        )?;
        let (mut data, mut len) = (ptr::null_mut(), 0);
        // SAFETY: the handle is live by contract, and both pointers are to live places.
        let raw = unsafe { function(args.raw(), &mut data, &mut len) };
        done(FUNCTION, raw)?;
        // SAFETY: on success C leaves null or a buffer from malloc, and keeps neither.
        Ok(unsafe { Buffer::from_malloc(data, len) })
    }
}

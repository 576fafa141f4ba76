//! One method of [`Library`](crate::Library) for every function of the interface.
//!
//! They are named like the C functions, without `nixl_capi_`. They add no policy: they turn arguments and results into
//! Rust types, and statuses into [`CallError`]. A function that the loaded NIXL lacks gives [`CallError::Unsupported`].

mod agent;
mod backend;
mod descriptors;
mod memory;
mod notification;
mod opt_args;
mod params;
mod transfer;

use std::ffi::{CStr, CString, c_char};

use crate::error::CallError;
use crate::status::{Progress, Status};
use crate::types::*;

/// Defines methods whose arguments go to C one for one. What follows `->` says what comes back:
/// `done` nothing, `progress` whether it has ended, `out T` a value that C writes behind its last argument.
macro_rules! api {
    ($($(#[$doc:meta])* $name:ident = $symbol:ident($($arg:ident: $ty:ty),*) -> $shape:ident $($out:ty)?;)*) => {
        impl $crate::Library {$(
            $(#[$doc])*
            ///
            /// # Safety
            ///
            /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold.
            pub unsafe fn $name(
                &self, $($arg: $ty),*
            ) -> Result<$crate::api::api!(@returns $shape $($out)?), $crate::CallError> {
                const FUNCTION: &str = stringify!($symbol);
                let function = $crate::symbols::found(&self.symbols().$symbol, FUNCTION)?;
                $crate::api::api!(@call $shape ($($out)?) FUNCTION, function, ($($arg),*))
            }
        )*}
    };

    (@returns done) => { () };
    (@returns progress) => { $crate::Progress };
    (@returns out $out:ty) => { $out };

    (@call done () $name:ident, $function:ident, ($($arg:ident),*)) => {{
        // SAFETY: the address is the function of that name, whose C signature `bindings` declares; the caller keeps
        // the rules of `Library`.
        let raw = unsafe { $function($($crate::api::Input::into_c($arg)),*) };
        $crate::api::done($name, raw)
    }};
    (@call progress () $name:ident, $function:ident, ($($arg:ident),*)) => {{
        // SAFETY: as for `done`.
        let raw = unsafe { $function($($crate::api::Input::into_c($arg)),*) };
        $crate::api::progress($name, raw)
    }};
    (@call out ($out:ty) $name:ident, $function:ident, ($($arg:ident),*)) => {{
        let mut out = <$out as $crate::api::Output>::EMPTY;
        // SAFETY: as for `done`; `out` is a live place of the type that the signature names.
        let raw = unsafe { $function($($crate::api::Input::into_c($arg),)* &mut out) };
        $crate::api::done($name, raw)?;
        // SAFETY: C reported success, so `out` holds what the function promises.
        unsafe { <$out as $crate::api::Output>::from_c($name, out) }
    }};
}
use api;

/// Success is nothing, everything else an error, "still running" too.
fn done(function: &'static str, raw: i32) -> Result<(), CallError> {
    match Status::from_capi(raw) {
        Status::Success => Ok(()),
        status => Err(CallError::Failed {
            function,
            status,
            raw,
        }),
    }
}

/// Success and "still running" are results, everything else is an error.
pub(crate) fn progress(function: &'static str, raw: i32) -> Result<Progress, CallError> {
    match Status::from_capi(raw) {
        Status::Success => Ok(Progress::Done),
        Status::InProgress => Ok(Progress::InProgress),
        status => Err(CallError::Failed {
            function,
            status,
            raw,
        }),
    }
}

/// What can be handed to a C function.
trait Input {
    type C;
    fn into_c(self) -> Self::C;
}

/// What a C function can leave behind its last argument.
trait Output: Sized {
    type C;
    const EMPTY: Self::C;

    /// # Safety
    ///
    /// `value` is what `function` left there when it reported success.
    unsafe fn from_c(function: &'static str, value: Self::C) -> Result<Self, CallError>;
}

macro_rules! plain {
    ($($ty:ty = $empty:expr;)*) => {$(
        impl Input for $ty {
            type C = $ty;
            fn into_c(self) -> $ty { self }
        }

        impl Output for $ty {
            type C = $ty;
            const EMPTY: $ty = $empty;
            unsafe fn from_c(_: &'static str, value: $ty) -> Result<Self, CallError> { Ok(value) }
        }
    )*};
}

plain! {
    bool = false;
    i32 = 0;
    u16 = 0;
    u64 = 0;
    usize = 0;
}

macro_rules! handle {
    ($($handle:ident = $raw:ident;)*) => {$(
        impl Input for $handle {
            type C = *mut $crate::bindings::$raw;
            fn into_c(self) -> Self::C { self.raw() }
        }

        impl Input for Option<$handle> {
            type C = *mut $crate::bindings::$raw;
            fn into_c(self) -> Self::C { self.map_or(std::ptr::null_mut(), $handle::raw) }
        }

        impl Output for $handle {
            type C = *mut $crate::bindings::$raw;
            const EMPTY: Self::C = std::ptr::null_mut();
            unsafe fn from_c(function: &'static str, value: Self::C) -> Result<Self, CallError> {
                $handle::new(value).ok_or(CallError::NoResult { function })
            }
        }
    )*};
}

handle! {
    AgentHandle = nixl_capi_agent_s;
    BackendHandle = nixl_capi_backend_s;
    MemListHandle = nixl_capi_mem_list_s;
    MemViewHandle = nixl_capi_mem_view_s;
    NotifMapHandle = nixl_capi_notif_map_s;
    OptArgsHandle = nixl_capi_opt_args_s;
    ParamIterHandle = nixl_capi_param_iter_s;
    ParamsHandle = nixl_capi_params_s;
    PreparedDlistHandle = nixl_capi_xfer_dlist_handle_s;
    QueryRespListHandle = nixl_capi_query_resp_list_s;
    RegDlistHandle = nixl_capi_reg_dlist_s;
    RemoteDlistHandle = nixl_capi_remote_dlist_s;
    StringListHandle = nixl_capi_string_list_s;
    XferDlistHandle = nixl_capi_xfer_dlist_s;
    XferReqHandle = nixl_capi_xfer_req_s;
}

impl Input for &CStr {
    type C = *const c_char;

    fn into_c(self) -> *const c_char {
        self.as_ptr()
    }
}

impl Input for Option<&CStr> {
    type C = *const c_char;

    fn into_c(self) -> *const c_char {
        self.map_or(std::ptr::null(), CStr::as_ptr)
    }
}

impl Input for MemoryType {
    type C = u32;

    fn into_c(self) -> u32 {
        self.to_raw()
    }
}

impl Output for MemoryType {
    type C = u32;
    const EMPTY: u32 = u32::MAX;

    unsafe fn from_c(_: &'static str, value: u32) -> Result<Self, CallError> {
        Ok(Self::from_raw(value))
    }
}

/// A copy of a string that C lends.
impl Output for CString {
    type C = *const c_char;
    const EMPTY: *const c_char = std::ptr::null();

    unsafe fn from_c(function: &'static str, value: *const c_char) -> Result<Self, CallError> {
        if value.is_null() {
            return Err(CallError::NoResult { function });
        }
        // SAFETY: not null, and by contract a string that C keeps until the next call on its owner.
        Ok(unsafe { CStr::from_ptr(value) }.to_owned())
    }
}

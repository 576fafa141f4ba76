//! Parameters: strings by name.

use std::ffi::{CStr, CString};
use std::ptr;

use super::{Output, api, done};
use crate::error::CallError;
use crate::library::Library;
use crate::symbols::found;
use crate::types::{ParamIterHandle, ParamsHandle};

api! {
    /// Makes empty parameters.
    create_params = nixl_capi_create_params() -> out ParamsHandle;

    /// Sets a parameter.
    params_add = nixl_capi_params_add(params: ParamsHandle, key: &CStr, value: &CStr) -> done;

    /// Whether there are none.
    params_is_empty = nixl_capi_params_is_empty(params: ParamsHandle) -> out bool;

    /// Starts a walk over them. They must not change or go before it ends.
    params_create_iterator = nixl_capi_params_create_iterator(params: ParamsHandle) -> out ParamIterHandle;

    /// Ends a walk.
    params_destroy_iterator = nixl_capi_params_destroy_iterator(iter: ParamIterHandle) -> done;

    /// Destroys parameters.
    destroy_params = nixl_capi_destroy_params(params: ParamsHandle) -> done;
}

impl Library {
    /// The next name and value of a walk, or `None` at its end.
    ///
    /// # Safety
    ///
    /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold.
    pub unsafe fn params_iterator_next(
        &self,
        iter: ParamIterHandle,
    ) -> Result<Option<(CString, CString)>, CallError> {
        const FUNCTION: &str = "nixl_capi_params_iterator_next";
        let function = found(&self.symbols().nixl_capi_params_iterator_next, FUNCTION)?;
        let (mut key, mut value, mut more) = (ptr::null(), ptr::null(), false);
        // SAFETY: the walk is live by contract, and the three pointers are to live places.
        let raw = unsafe { function(iter.raw(), &mut key, &mut value, &mut more) };
        done(FUNCTION, raw)?;
        // `more` speaks of the pair after this one. The end shows in pointers that stay null.
        if key.is_null() || value.is_null() {
            return Ok(None);
        }
        // SAFETY: C reported success and set both; the walk keeps the strings until its next step.
        unsafe {
            Ok(Some((
                CString::from_c(FUNCTION, key)?,
                CString::from_c(FUNCTION, value)?,
            )))
        }
    }
}

//! Telling a lost peer from other failures.
//!
//! The C interface folds "remote disconnected" into "backend failure". The C++ agent behind it still tells, and its
//! method is exported under a name that both supported versions share. A handle of the C interface is a struct whose
//! only member is the pointer to the C++ object, so the method can be called without a line of C++.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use libloading::os::unix::Library as DynamicLibrary;

use crate::error::CallError;
use crate::library::Library;
use crate::status::{Progress, Status};
use crate::types::{AgentHandle, XferReqHandle};

/// `nixl_status_t nixlAgent::getXferStatus(nixlXferReqH *) const`
const SYMBOL: &[u8] = b"_ZNK9nixlAgent13getXferStatusEP12nixlXferReqH\0";
const FUNCTION: &str = "nixlAgent::getXferStatus";

type GetXferStatus = unsafe extern "C" fn(agent: *const c_void, req: *mut c_void) -> c_int;

/// The C++ method, until it is caught contradicting the C interface.
#[derive(Debug)]
pub(crate) struct DetailedStatus {
    method: Option<GetXferStatus>,
    confirmed: AtomicBool,
    refuted: AtomicBool,
}

impl DetailedStatus {
    pub(crate) fn look_up(library: &DynamicLibrary, wanted: bool) -> Self {
        let method = wanted.then(|| {
            // SAFETY: the mangled name fixes the class, the arguments and their types; on this ABI `this` is the first
            // argument. The result is an enum without a fixed type, which is passed as an int.
            unsafe { library.get::<GetXferStatus>(SYMBOL) }
                .ok()
                .map(|symbol| *symbol)
        });
        Self {
            method: method.flatten(),
            confirmed: AtomicBool::new(false),
            refuted: AtomicBool::new(false),
        }
    }

    /// Whether the method is there and has not contradicted the C interface so far.
    pub(crate) fn is_available(&self) -> bool {
        self.method.is_some() && !self.refuted.load(Ordering::Relaxed)
    }
}

impl Library {
    /// Whether a transfer has ended, and why it failed in the agent's own words.
    ///
    /// The C interface is asked first, and while it reports success or progress that is the answer, at no further cost.
    /// When it reports failure, the agent is asked for the reason: [`Status::RemoteDisconnect`] is only visible here.
    /// Without the agent's method, or once the two have contradicted each other, the C interface's status is the answer.
    ///
    /// # Safety
    ///
    /// The rules of [`Library`](crate::Library#safety-of-the-calls) hold.
    pub unsafe fn xfer_status_detailed(
        &self,
        agent: AgentHandle,
        req: XferReqHandle,
    ) -> Result<Progress, CallError> {
        // SAFETY: the caller's promise.
        let plain = unsafe { self.get_xfer_status(agent, req) };
        match &plain {
            Ok(Progress::InProgress) => return plain,
            Ok(Progress::Done) if self.detailed.confirmed.load(Ordering::Relaxed) => return plain,
            Ok(Progress::Done) | Err(CallError::Failed { .. }) => {}
            Err(_) => return plain,
        }
        // SAFETY: the caller's promise.
        let Some(raw) = (unsafe { self.ask_agent(agent, req) }) else {
            return plain;
        };
        let status = Status::from_agent(raw);
        match (plain, status) {
            (Ok(done), Status::Success) => {
                self.detailed.confirmed.store(true, Ordering::Relaxed);
                Ok(done)
            }
            (Err(_), status) if status.is_failure() => Err(CallError::Failed {
                function: FUNCTION,
                status,
                raw,
            }),
            (plain, _) => {
                self.detailed.refuted.store(true, Ordering::Relaxed);
                plain
            }
        }
    }

    /// Whether [`xfer_status_detailed`](Self::xfer_status_detailed) still tells more than the C interface.
    pub fn has_detailed_status(&self) -> bool {
        self.detailed.is_available()
    }

    /// # Safety
    ///
    /// As for `xfer_status_detailed`.
    unsafe fn ask_agent(&self, agent: AgentHandle, req: XferReqHandle) -> Option<i32> {
        if !self.detailed.is_available() {
            return None;
        }
        let method = self.detailed.method?;
        // SAFETY: both handles are live by contract and point to a struct whose first member is a pointer.
        let (agent, req) = unsafe {
            (
                agent.as_ptr().cast::<*const c_void>().read(),
                req.as_ptr().cast::<*mut c_void>().read(),
            )
        };
        // A released request has none.
        if agent.is_null() || req.is_null() {
            return None;
        }
        // SAFETY: the objects behind live handles are live, and the C interface has just made the same call with them.
        // A C++ exception would end the process here. That failures come as results is seen in the tests with real
        // libraries; NIXL promises nothing. `OpenOptions::detailed_status(false)` avoids the call.
        Some(unsafe { method(agent, req) })
    }
}

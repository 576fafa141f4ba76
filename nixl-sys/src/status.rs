//! What a NIXL call says about its outcome.

use std::fmt;

use crate::bindings as c;

/// The status of a NIXL call.
///
/// The C interface and the C++ agent behind it number their statuses differently; both are mapped to this one enum, and
/// [`CallError::Failed`](crate::CallError::Failed) keeps the number beside it.
///
/// The C interface folds most of the agent's statuses into [`Backend`](Self::Backend). In particular
/// [`RemoteDisconnect`](Self::RemoteDisconnect) is only ever seen through
/// [`Library::xfer_status_detailed`](crate::Library::xfer_status_detailed). NIXL 1.4 folds more than 1.5: there a failed
/// call is almost always `Backend`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use]
#[non_exhaustive]
pub enum Status {
    /// The call, or the transfer it asked about, is done.
    Success,
    /// The transfer is still running.
    InProgress,
    /// An argument was refused.
    InvalidParam,
    /// The backend, or anything else the C interface does not tell apart, failed.
    Backend,
    /// The object is not in a state that allows the call.
    InvalidState,
    /// A C++ exception was caught.
    Exception,
    /// Telemetry is not captured for this request.
    NoTelemetry,
    /// The peer's metadata is not loaded, or no backend serves the memory.
    NotFound,
    /// The request was never posted.
    NotPosted,
    /// The descriptor lists do not fit each other.
    Mismatch,
    /// The agent does not allow the operation.
    NotAllowed,
    /// The request is still running and cannot be posted again.
    RepostActive,
    /// NIXL does not know what went wrong.
    Unknown,
    /// The backend cannot do this.
    NotSupported,
    /// The connection to the peer is gone.
    RemoteDisconnect,
    /// The transfer was cancelled.
    Canceled,
    /// A number this crate has no name for: a newer NIXL.
    Other(i32),
}

/// What a call that did not fail says about a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Progress {
    /// Every byte has arrived.
    Done,
    /// Still running: ask again.
    InProgress,
}

impl Status {
    /// The status that the C interface means by `raw`.
    pub fn from_capi(raw: i32) -> Self {
        match raw {
            c::NIXL_CAPI_IN_PROG => Self::InProgress,
            c::NIXL_CAPI_SUCCESS => Self::Success,
            c::NIXL_CAPI_ERROR_INVALID_PARAM => Self::InvalidParam,
            c::NIXL_CAPI_ERROR_BACKEND => Self::Backend,
            c::NIXL_CAPI_ERROR_INVALID_STATE => Self::InvalidState,
            c::NIXL_CAPI_ERROR_EXCEPTION => Self::Exception,
            c::NIXL_CAPI_ERROR_NO_TELEMETRY => Self::NoTelemetry,
            c::NIXL_CAPI_ERROR_NOT_FOUND => Self::NotFound,
            other => Self::Other(other),
        }
    }

    /// The status that the C++ agent means by `raw`.
    pub fn from_agent(raw: i32) -> Self {
        match raw {
            1 => Self::InProgress,
            0 => Self::Success,
            -1 => Self::NotPosted,
            -2 => Self::InvalidParam,
            -3 => Self::Backend,
            -4 => Self::NotFound,
            -5 => Self::Mismatch,
            -6 => Self::NotAllowed,
            -7 => Self::RepostActive,
            -8 => Self::Unknown,
            -9 => Self::NotSupported,
            -10 => Self::RemoteDisconnect,
            -11 => Self::Canceled,
            -12 => Self::NoTelemetry,
            other => Self::Other(other),
        }
    }

    /// Whether this is neither success nor "still running".
    pub fn is_failure(self) -> bool {
        !matches!(self, Self::Success | Self::InProgress)
    }

    /// A short name, the same in logs, metrics and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::InProgress => "in progress",
            Self::InvalidParam => "invalid parameter",
            Self::Backend => "backend failure",
            Self::InvalidState => "invalid state",
            Self::Exception => "exception",
            Self::NoTelemetry => "no telemetry",
            Self::NotFound => "not found",
            Self::NotPosted => "not posted",
            Self::Mismatch => "mismatch",
            Self::NotAllowed => "not allowed",
            Self::RepostActive => "repost while active",
            Self::Unknown => "unknown to NIXL",
            Self::NotSupported => "not supported",
            Self::RemoteDisconnect => "remote disconnected",
            Self::Canceled => "canceled",
            Self::Other(_) => "unlisted status",
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Other(raw) => write!(f, "{} {raw}", self.name()),
            _ => f.write_str(self.name()),
        }
    }
}

//! NIXL's failures in the engine's words, with the raw status kept.

use nixl_sys::{CallError, Status};

use crate::transport::{FailureKind, TransportError};

/// What a status means for the peer.
fn kind(status: Option<Status>) -> FailureKind {
    match status {
        Some(Status::RemoteDisconnect | Status::Canceled) => FailureKind::PeerLost,
        Some(
            Status::InvalidParam
            | Status::Mismatch
            | Status::NotFound
            | Status::NotAllowed
            | Status::RepostActive
            | Status::NotPosted,
        ) => FailureKind::Rejected,
        Some(Status::NotSupported) => FailureKind::Unsupported,
        _ => FailureKind::Backend,
    }
}

/// A call's error as a transport error.
pub(super) fn error(operation: &'static str, cause: &CallError) -> TransportError {
    let kind = match cause {
        CallError::Unsupported { .. } => FailureKind::Unsupported,
        CallError::BadArgument { .. } => FailureKind::Rejected,
        other => kind(other.status()),
    };
    TransportError {
        operation,
        kind,
        cause: cause.to_string(),
        raw: cause.raw(),
    }
}

/// An error of our own making.
pub(super) fn refused(operation: &'static str, cause: impl Into<String>) -> TransportError {
    TransportError {
        operation,
        kind: FailureKind::Rejected,
        cause: cause.into(),
        raw: None,
    }
}

/// A call that came after exit had begun.
pub(super) fn exiting(operation: &'static str) -> TransportError {
    TransportError {
        operation,
        kind: FailureKind::Unsupported,
        cause: "the process is exiting".into(),
        raw: None,
    }
}

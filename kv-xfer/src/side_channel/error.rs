//! How a request on the side channel fails.

use std::fmt;
use std::io;
use std::time::Duration;

use thiserror::Error;

use super::dial::DialRefused;
use super::wire::WireError;
use super::zmtp::ZmtpError;
use crate::peer::{Feature, PeerAddr};

/// The steps of a request; each ends by the request's deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Step {
    /// Looking up the peer's name.
    Resolve,
    /// Opening the connection.
    Connect,
    /// Exchanging ZMTP greetings.
    Greeting,
    /// Exchanging ZMTP READY commands.
    Ready,
    /// Sending the request.
    Send,
    /// Waiting for the reply.
    Reply,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Resolve => "looking up the name",
            Self::Connect => "connecting",
            Self::Greeting => "waiting for the greeting",
            Self::Ready => "waiting for READY",
            Self::Send => "sending the request",
            Self::Reply => "waiting for the reply",
        })
    }
}

/// Why a request on the side channel failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SideChannelError {
    /// The address may not be dialled.
    #[error("{0}")]
    Refused(#[from] DialRefused),
    /// The peer's name is not known.
    #[error("{peer}: the name cannot be looked up ({source}); check the peer's configured name")]
    Resolve {
        /// The peer.
        peer: PeerAddr,
        /// Why.
        source: io::Error,
    },
    /// Nothing listens at the address.
    #[error("{peer}: nothing listens there; the engine is down or starting, retry later")]
    ConnectionRefused {
        /// The peer.
        peer: PeerAddr,
    },
    /// A step did not end in time.
    #[error("{peer}: no end to {step} within {after:?}; the peer hangs or is cut off, retry later")]
    Timeout {
        /// The peer.
        peer: PeerAddr,
        /// Which step.
        step: Step,
        /// The whole request's deadline.
        after: Duration,
    },
    /// What listens there speaks another protocol.
    #[error("{peer}: no side channel listens there ({why}); check the address and the port")]
    ProtocolMismatch {
        /// The peer.
        peer: PeerAddr,
        /// How that was noticed.
        why: ZmtpError,
    },
    /// The peer closed the connection before the end.
    #[error(
        "{peer}: closed the connection while {step}; it is stopping or overloaded, retry later"
    )]
    Closed {
        /// The peer.
        peer: PeerAddr,
        /// During which step.
        step: Step,
    },
    /// The reply is longer than allowed.
    #[error(
        "{peer}: the reply has {len} bytes or more, the limit is {limit}; raise the limit if the peer is right"
    )]
    TooLarge {
        /// The peer.
        peer: PeerAddr,
        /// How many bytes were announced, at least.
        len: u64,
        /// The limit, bytes.
        limit: u64,
    },
    /// The reply is not one to this request.
    #[error("{peer}: the reply makes no sense ({why}); check the peer's version")]
    BadReply {
        /// The peer.
        peer: PeerAddr,
        /// What is wrong with it.
        why: WireError,
    },
    /// The peer refused the request and said why.
    #[error("{peer}: refused the request: {reason}: {detail}")]
    PeerRefused {
        /// The peer.
        peer: PeerAddr,
        /// The reason, one word of the protocol.
        reason: String,
        /// The peer's explanation.
        detail: String,
    },
    /// The peer's card does not advertise this request, so it was not sent.
    #[error(
        "{peer}: does not serve {feature}, nothing was sent; use a notification or let the lease run"
    )]
    NotAdvertised {
        /// The peer.
        peer: PeerAddr,
        /// Which request.
        feature: Feature,
    },
    /// The system failed.
    #[error("{peer}: {step} failed: {source}; retry, or check the network")]
    Io {
        /// The peer.
        peer: PeerAddr,
        /// During which step.
        step: Step,
        /// Why.
        source: io::Error,
    },
}

impl SideChannelError {
    /// Whether the same request may succeed later without anything being changed.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::Resolve { .. }
                | Self::ConnectionRefused { .. }
                | Self::Timeout { .. }
                | Self::Closed { .. }
                | Self::Io { .. }
        )
    }
}

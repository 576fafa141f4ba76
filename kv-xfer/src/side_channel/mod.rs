//! The sockets of the handshake and of lease renewal.
//!
//! The protocol is that of vLLM's NIXL connector: ZeroMQ REQ against ROUTER over TCP, MessagePack
//! inside. A reader asks `get_meta_msg` for one rank and gets that rank's card and the server's
//! clock; requests of our own (`kvx_ping`, `kvx_renew`, `kvx_release`) go only to peers whose card
//! advertises them. Where a cluster key is set, cards are given and leases changed only for requests
//! that are signed for this one connection; see [`seal`].
//!
//! - [`Server`] answers from a thread of its own; the engine gives it a [`Handler`].
//! - [`Client`] makes one request on one connection, from any thread, and always ends by its
//!   deadline.
//! - [`DialPolicy`] decides which addresses may be dialled at all. The client takes nothing but a
//!   [`Dialable`], which only a policy makes.
//!
//! # Why not the `zeromq` crate
//!
//! Its decoder (0.7.0) reserves memory for a frame as soon as it has read the frame's length, which
//! the other side chooses freely up to `isize::MAX`; there is no option that limits it. Nine bytes
//! after the handshake abort the process with an allocation failure (measured on a ROUTER socket with
//! a length of 2^40). The accepting side also waits without limit for greetings, keeps every
//! connection, spins when `accept` fails for want of file descriptors, and takes a peer's word for
//! its identity; the connecting side retries a refused connection until its timeout instead of saying
//! so. A guard in front that could prevent this would have to parse the same
//! frames, so the small part of ZMTP 3 that is needed (NULL mechanism, REQ and ROUTER) is in
//! [`zmtp`], without I/O, under limits, used by both sides. Interoperation is tested against libzmq
//! and against the crate.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod client;
mod connection;
mod dial;
mod error;
pub mod seal;
mod server;
pub mod wire;
pub mod zmtp;

pub use client::{Client, ClientConfig, FetchedCard, Pong};
pub use dial::{DialPolicy, DialRefused, Dialable, Network};
pub use error::{SideChannelError, Step};
pub use server::{
    Handler, Listeners, PingInfo, Server, ServerConfig, ServerError, ServerLimits, ServerStats,
};
pub use wire::{ReleaseOutcome, ReleaseRequest, RenewOutcome, RenewRequest};

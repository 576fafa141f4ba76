//! What carries the bytes.
//!
//! NIXL does not say which of UCX's transports moves a peer's bytes, but UCX does when it is asked to
//! log at level `info`: [`UcxLanes::parse`] reads that.
#![forbid(unsafe_code)]

mod ucx_log;

pub use ucx_log::{Lane, UcxLanes};

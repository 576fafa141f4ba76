//! A small serving engine with a real model. It links `kv-xfer` as any engine would.
#![forbid(unsafe_code)]

pub mod model;
pub mod provision;

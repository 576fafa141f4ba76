//! A small serving engine with a real model. It links `kv-xfer` as any engine would.
#![forbid(unsafe_code)]

pub mod chart;
pub mod client;
pub mod cluster;
pub mod demo;
pub mod model;
pub mod provision;
pub mod workload;

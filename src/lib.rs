//! The parts of `kvx`, the command-line tool of kv-xfer, as its tests and benches use them.
#![forbid(unsafe_code)]

pub mod bench;
pub mod cli;
pub mod demo;
pub mod doctor;
pub mod gpu;
pub mod libfabric;
pub mod memory;
pub mod proc;
pub mod require;
pub mod router;
pub mod runtime;
pub mod sim;

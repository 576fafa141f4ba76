//! A small serving engine with a real model. It links `kv-xfer` as any engine would.
//!
//! [`model`] computes, over the blocks that [`cache`] keeps the books of; [`node`] schedules requests
//! and moves blocks between nodes; [`http`] is how clients come to it. [`demo`] and [`workload`] start
//! whole clusters and show what moving blocks is worth.
#![forbid(unsafe_code)]

pub mod cache;
pub mod chart;
pub mod cli;
pub mod client;
pub mod cluster;
pub mod demo;
pub mod http;
pub mod model;
pub mod node;
pub mod provision;
pub mod run;
pub mod workload;

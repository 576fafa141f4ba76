//! KV-block transfer engine for disaggregated LLM serving.
//!
//! A prefill engine reads the KV blocks of an earlier turn straight out of a decode engine's memory,
//! one-sidedly, and computes only what is new.
#![deny(unsafe_code)]

pub mod clock;
pub mod descriptor;
pub mod engine;
pub mod fabric;
pub mod identity;
pub mod ids;
pub mod layout;
pub mod lease;
pub mod memory;
pub mod peer;
pub mod plan;
pub mod policy;
pub mod side_channel;
pub mod telemetry;
pub mod transport;

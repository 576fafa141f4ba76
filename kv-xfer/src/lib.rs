//! KV-block transfer engine for disaggregated LLM serving.
//!
//! A prefill engine reads the KV blocks of an earlier turn straight out of a decode engine's memory,
//! one-sidedly, and computes only what is new.
//!
//! [`engine::Engine`] is where to start. Everything below it is usable by itself: [`layout`] says
//! what the bytes mean, [`identity`] which tokens they hold, [`descriptor`] how they are described,
//! [`lease`] who may free them when, [`policy`] whether to read them, [`plan`] how, and [`transport`]
//! over what. The pure modules do no I/O and read no clock.
#![deny(unsafe_code)]

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

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
mod sync;
pub mod telemetry;
pub mod transport;
pub mod world;

//! Real node processes, and a client and a tiny router for them.
#![allow(
    dead_code,
    unused_imports,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs
)]

mod client;
mod process;

pub use client::{Client, conversation, extended};
pub use process::NodeProcess;

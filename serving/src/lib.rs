//! A small serving engine with a real model that links `kv-xfer` as any engine would.
//!
//! [`cache`] keeps the books of the paged KV cache.
#![forbid(unsafe_code)]

pub mod cache;

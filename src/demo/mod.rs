//! The demo: a decode and a prefill process, real reads between them, every byte checked.

pub mod allocator;
pub mod content;
pub mod history;
pub mod trace;

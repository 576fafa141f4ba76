//! Counters and tracing.
#![forbid(unsafe_code)]

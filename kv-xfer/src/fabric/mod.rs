//! What carries the bytes.
#![forbid(unsafe_code)]

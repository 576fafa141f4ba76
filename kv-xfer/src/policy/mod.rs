//! Read or recompute.
#![forbid(unsafe_code)]

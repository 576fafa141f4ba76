//! Who may free which blocks, and when.
#![forbid(unsafe_code)]

//! What is fuzzed: one function for each decoder of bytes from outside. They panic when a decoder
//! breaks its word; a decoder that panics itself is a finding all the same.

pub mod library;
pub mod tool;

//! From block pairs to runs to descriptors.
#![forbid(unsafe_code)]

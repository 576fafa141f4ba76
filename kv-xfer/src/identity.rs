//! Which tokens a block holds: chained block hashes.
#![forbid(unsafe_code)]

//! `kvx`, the command-line tool of kv-xfer.
fn main() {}

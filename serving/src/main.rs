//! A serving engine.
fn main() {}

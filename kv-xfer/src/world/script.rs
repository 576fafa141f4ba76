//! Short histories of two reads, act by act.

/// Which of the two reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    A,
    B,
}
/// x
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    Start(Which),
}
/// x
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Play;

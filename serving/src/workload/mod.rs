//! Conversations of given lengths, held by several clients at once, with the transfer off and on: what
//! `serving bench` and `serving replay` measure.

mod bench;
mod hold;
mod replay;
mod report;
mod text;

pub use bench::{BENCH_HELP, BenchArgs, run as run_bench};
pub use hold::{HoldError, Load, Sample, Talk, TalkTurn};
pub use replay::{REPLAY_HELP, ReplayArgs, run as run_replay};
pub use report::{Group, LoadReport, Mode, Pinned};
pub use text::Filler;

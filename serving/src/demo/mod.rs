//! The main job with a real model: one conversation, with and without reading the decode node's blocks.

mod chart;
mod chat;
mod play;
mod report;
pub mod script;

use std::path::PathBuf;

use clap::Args;
use kvx::cli::Exit;

pub(crate) use play::{leftover, progress};
pub use report::{DemoReport, PassReport, TurnReport};

/// Arguments of `serving demo`.
#[derive(Debug, Clone, Args)]
pub struct DemoArgs {
    /// Print one JSON object to stdout, and nothing else
    #[arg(long)]
    pub json: bool,

    /// Turns of the conversation
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub turns: u32,

    /// Rows of the tool's result in each turn, some 20 tokens each
    #[arg(long, value_name = "N", default_value_t = 28, value_parser = clap::value_parser!(u32).range(1..=200))]
    pub rows: u32,

    /// Tokens of an answer, at most
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub max_tokens: u64,

    /// Seed of the tool's results
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,

    /// Leave out the passes in which the prefill node keeps its own prefix cache
    #[arg(long)]
    pub cleared_only: bool,

    /// Write the plot and the JSON object into this folder
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,

    /// Chat with the model yourself, and see what is read and what is computed
    #[arg(long, conflicts_with_all = ["json", "turns", "rows", "out", "cleared_only"])]
    pub chat: bool,

    /// Memory of each node's KV pool, MiB
    #[arg(long, value_name = "MIB", default_value_t = 512, value_parser = clap::value_parser!(u64).range(32..=65536))]
    pub kv_cache_mib: u64,
}

/// Help after the arguments.
pub const DEMO_HELP: &str = "\
Examples:
  serving demo                        turns up to more than 4k tokens, transfer off and on
  serving demo --json | jq .turns     one JSON object instead of tables
  serving demo --out results          also results/ttft.svg and results/demo.json
  serving demo --chat                 talk to the model; /quit ends

Exit status: 0 all is well; 1 texts differ, a turn was no hit, or blocks leaked; 2 usage;
3 something is missing on this machine; 130 interrupted";

/// Runs the demo.
#[must_use]
pub fn run(args: &DemoArgs) -> Exit {
    if args.chat {
        chat::run(args)
    } else {
        play::run(args)
    }
}

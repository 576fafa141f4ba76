//! `serving`, a small serving engine on kv-xfer.
#![forbid(unsafe_code)]

use std::io::{IsTerminal, stderr};
use std::process::ExitCode;

use clap::Parser;
use serving::cli::{Cli, Command};
use serving::node::Role;
use serving::{cluster, demo, run, workload};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    // Before any thread: UCX's time-outs, its log, a clean exit.
    let environment = nixl_sys::Environment::recommended().apply_single_threaded();
    if !cluster::end_with_parent() {
        return ExitCode::FAILURE;
    }
    let cli = Cli::parse();
    let filter = EnvFilter::try_from_env("KVX_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(stderr)
        .with_ansi(stderr().is_terminal())
        .init();
    tracing::debug!("{environment}");
    let exit = match cli.command {
        Command::Prefill(args) => run::node(Role::Prefill, &args),
        Command::Decode(args) => run::node(Role::Decode, &args),
        Command::Router(args) => kvx::router::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Bench(args) => workload::run_bench(&args),
        Command::Replay(args) => workload::run_replay(&args),
        Command::ModelPath => run::model_path(),
    };
    exit.into()
}

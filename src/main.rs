//! `kvx`, the command-line tool of kv-xfer.
#![forbid(unsafe_code)]

use std::io::{IsTerminal, stderr};
use std::process::ExitCode;

use clap::Parser;
use kvx::cli::{Cli, Command, Exit};
use kvx::{bench, demo, doctor, gpu, router, runtime, sim};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let cli = Cli::parse();
    // A simulated engine warns of everything that goes wrong, which is all that a simulation does.
    let level = if matches!(cli.command, Command::Sim(_)) {
        "off"
    } else {
        "warn"
    };
    let filter = EnvFilter::try_from_env("KVX_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(stderr)
        .with_ansi(stderr().is_terminal())
        .init();
    let exit = match cli.command {
        Command::Demo(args) => demo::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Target(args) => bench::run_target(&args),
        Command::Router(args) => router::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::GpuCheck(args) => gpu::run(&args),
        Command::GpuCheckHolder => gpu::run_holder(),
        Command::FabricProbe(args) => doctor::run_probe(args.probe),
        Command::Sim(args) => sim::run(&args),
        Command::NixlPath => nixl_path(),
        Command::DemoDecode => demo::run_decode(),
        Command::DemoPrefill => demo::run_prefill(),
        Command::BenchWorker => bench::run_worker(),
    };
    exit.into()
}

fn nixl_path() -> Exit {
    match runtime::resolve() {
        Ok(runtime) => {
            println!("{}", runtime.library.display());
            Exit::Ok
        }
        Err(error) => {
            eprintln!("{error}");
            Exit::Environment
        }
    }
}

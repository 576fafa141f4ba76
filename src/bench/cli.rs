//! The command line of `kvx bench`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use nixl_sys::Environment;

use super::fixture::BenchError;
use super::holders;
use super::latency::{self, LatencySize};
use super::report;
use super::row::BenchReport;
use super::scale::{self, ScaleSize};
use crate::cli::Exit;
use crate::proc::{Interrupt, ProcError};

/// The benches.
#[derive(Debug, Clone, Subcommand)]
pub enum BenchCommand {
    /// What a read costs beyond its bytes, beside NIXL alone
    Latency(LatencyArgs),
    /// One reader and very many holders, reads and leases
    Scale(ScaleArgs),
    /// The processes of the holders
    #[command(name = holders::COMMAND, hide = true)]
    Holders,
}

/// What all benches are told.
#[derive(Debug, Clone, Args)]
pub struct OutputArgs {
    /// Print one JSON object to stdout, and nothing else
    #[arg(long)]
    pub json: bool,

    /// Write a report and plots into this folder, too
    #[arg(long, value_name = "FOLDER")]
    pub report: Option<PathBuf>,
}

/// Arguments of `kvx bench latency`.
#[derive(Debug, Clone, Args)]
pub struct LatencyArgs {
    /// Where the results go
    #[command(flatten)]
    pub output: OutputArgs,

    /// Reads of one block of each shape
    #[arg(long, value_name = "N", default_value_t = 2000,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub samples: u32,

    /// How long nothing is done before the first read after idling [default: 60, with --quick 2]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(0..=3600))]
    pub idle: Option<u64>,

    /// Smaller pools and a shorter pause
    #[arg(long)]
    pub quick: bool,
}

impl LatencyArgs {
    fn size(&self) -> LatencySize {
        let (idle, large_blocks, contact_blocks, random_blocks) = if self.quick {
            (2, 160, 2000, 2048)
        } else {
            (60, 1600, 100_000, 16_384)
        };
        LatencySize {
            samples: self.samples,
            idle: Duration::from_secs(self.idle.unwrap_or(idle)),
            large_blocks,
            contact_blocks,
            random_blocks,
        }
    }
}

/// Arguments of `kvx bench scale`.
#[derive(Debug, Clone, Args)]
pub struct ScaleArgs {
    /// Where the results go
    #[command(flatten)]
    pub output: OutputArgs,

    /// Holder engines that are read from at once
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub peers: u32,

    /// Reads in flight
    #[arg(long, value_name = "N", default_value_t = 1000,
          value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub reads: u32,

    /// Leases of one holder
    #[arg(long, value_name = "N", default_value_t = 100_000,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub leases: u32,

    /// For how long the reads are kept up
    #[arg(long, value_name = "N", default_value_t = 5,
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub seconds: u64,
}

/// `kvx bench`.
#[must_use]
pub fn run(command: &BenchCommand) -> Exit {
    match command {
        BenchCommand::Latency(args) => {
            let size = args.size();
            measured(&args.output, |interrupt| latency::measure(&size, interrupt))
        }
        BenchCommand::Scale(args) => {
            let size = ScaleSize {
                peers: args.peers,
                reads: args.reads,
                leases: args.leases,
                busy: Duration::from_secs(args.seconds),
            };
            measured(&args.output, |interrupt| scale::measure(&size, interrupt))
        }
        BenchCommand::Holders => holders::serve(),
    }
}

/// Prepares the process, measures, prints.
fn measured(
    output: &OutputArgs,
    measure: impl FnOnce(&Interrupt) -> Result<BenchReport, BenchError>,
) -> Exit {
    // NIXL and UCX read it, and there are no threads yet.
    tracing::debug!("{}", Environment::recommended().apply_single_threaded());
    let report = match Interrupt::install().map(|interrupt| measure(&interrupt)) {
        Ok(Ok(report)) => report,
        Ok(Err(BenchError::Proc(ProcError::Interrupted))) => {
            eprintln!("interrupted");
            return Exit::Interrupted;
        }
        Ok(Err(error @ BenchError::Nixl(_))) => {
            eprintln!("{error}");
            return Exit::Environment;
        }
        Ok(Err(error)) => {
            eprintln!("{error}");
            return Exit::CheckFailed;
        }
        Err(error) => {
            eprintln!("Ctrl-C cannot be handled: {error}");
            return Exit::Environment;
        }
    };
    if let Some(folder) = &output.report
        && let Err(error) = report::write_report(folder, &report)
    {
        eprintln!("{error}");
        return Exit::CheckFailed;
    }
    if output.json {
        match serde_json::to_string_pretty(&report) {
            Ok(json) => println!("{json}"),
            Err(error) => {
                eprintln!("the report cannot be written: {error}");
                return Exit::CheckFailed;
            }
        }
    } else {
        print!("{}", report::to_markdown(&report));
    }
    if report.ok {
        Exit::Ok
    } else {
        Exit::CheckFailed
    }
}

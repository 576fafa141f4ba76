//! The command line of `kvx`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use kv_xfer::layout::Preset;
use kvx_router::{ROUTER_HELP, RouterArgs};

use crate::bench::args::{BenchArgs, TARGET_HELP, TargetArgs};
use crate::doctor::{DOCTOR_HELP, DoctorArgs, Probe};
use crate::gpu::{GPU_CHECK_HELP, GpuCheckArgs};
use crate::memory::MemoryChoice;
use crate::require::FabricArgs;
use crate::sim::{HELP as SIM_HELP, SimArgs};

/// How `kvx` ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// All is well.
    Ok = 0,
    /// Something was checked and is not as it must be.
    CheckFailed = 1,
    /// The command line is wrong.
    Usage = 2,
    /// Something is missing on this machine, such as NIXL.
    Environment = 3,
    /// Ctrl-C.
    Interrupted = 130,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Reads KV blocks of earlier turns out of a decode engine's memory, over NVIDIA NIXL.
#[derive(Debug, Parser)]
#[command(name = "kvx", version, arg_required_else_help = true, after_help = EXIT_HELP)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXIT_HELP: &str = "\
Exit status:
  0    all is well
  1    something was checked and is not as it must be
  2    the command line is wrong
  3    something is missing on this machine, such as NIXL
  130  interrupted

Logs go to stderr; KVX_LOG=debug shows more of them.
Engines have the cluster key of KVX_CLUSTER_KEY, or of the file that KVX_CLUSTER_KEY_FILE names.";

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Replay conversations between a decode and a prefill process, and check every byte read
    #[command(after_help = DEMO_HELP)]
    Demo(DemoArgs),
    /// Measure what reads cost, beside what the machine can do and what others make of them
    Bench(BenchArgs),
    /// Hold blocks for benches that run on another node
    #[command(after_help = TARGET_HELP)]
    Target(TargetArgs),
    /// Route requests to prefill and decode nodes, and take each conversation's blocks along
    #[command(after_help = ROUTER_HELP)]
    Router(RouterArgs),
    /// Say what this machine has to carry bytes with, whether it works, and what would help
    #[command(after_help = DOCTOR_HELP)]
    Doctor(DoctorArgs),
    /// Check reads between the pools of two processes, on a GPU or in host memory, and measure them
    #[command(after_help = GPU_CHECK_HELP)]
    GpuCheck(GpuCheckArgs),
    /// The other process of the check
    #[command(hide = true)]
    GpuCheckHolder,
    /// Ask a library, for the doctor
    #[command(hide = true)]
    FabricProbe(FabricProbeArgs),
    /// Simulate clusters in which everything goes wrong, and check what must never be
    #[command(after_help = SIM_HELP)]
    Sim(SimArgs),
    /// Print the path of the NIXL library that is loaded
    #[command(hide = true)]
    NixlPath,
    /// The demo's decode process
    #[command(hide = true)]
    DemoDecode,
    /// The demo's prefill process
    #[command(hide = true)]
    DemoPrefill,
    /// One end of a bench's reads
    #[command(hide = true)]
    BenchWorker,
}

/// Arguments of `kvx fabric-probe`.
#[derive(Debug, Clone, Args)]
pub struct FabricProbeArgs {
    /// Which.
    pub probe: Probe,
}

const DEMO_HELP: &str = "\
Examples:
  kvx demo                            four conversations of six turns, from 2k to 24k tokens, and
                                      five special turns
  kvx demo --json | jq .ok            one JSON object instead of a table
  kvx demo --model GLM-5              another model's KV geometry
  kvx demo --trace conversation_trace.jsonl --max-turns 50
                                      lengths and gaps of real conversations; the file comes with
                                      Mooncake (github.com/kvcache-ai/Mooncake, FAST25-release/traces)";

/// Arguments of `kvx demo`.
#[derive(Debug, Clone, Args)]
pub struct DemoArgs {
    /// Print one JSON object to stdout, and nothing else
    #[arg(long)]
    pub json: bool,

    /// Turns of each of the four built-in conversations, besides the five special ones
    #[arg(long, value_name = "N", default_value_t = 6,
          value_parser = clap::value_parser!(u32).range(1..=64), conflicts_with = "trace")]
    pub turns: u32,

    /// Replay conversations of a trace in Mooncake's format, sped up
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,

    /// Turns of the trace to replay at most
    #[arg(long, value_name = "N", default_value_t = 40,
          value_parser = clap::value_parser!(u32).range(2..=100_000), requires = "trace")]
    pub max_turns: u32,

    /// Model whose KV geometry is used (one rank of eight)
    #[arg(long, value_name = "NAME", default_value = "Qwen3-32B", value_parser = model)]
    pub model: Preset,

    /// Tokens in a block
    #[arg(long, value_name = "N", default_value_t = 16,
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub block_tokens: u32,

    /// Seed of token ids, block content and allocation
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,

    /// What carries the bytes.
    #[command(flatten)]
    pub fabric: FabricArgs,

    /// Where the blocks are: host, cuda:N, or auto: on the first GPU if there is one
    #[arg(long, value_name = "MEMORY", default_value_t)]
    pub memory: MemoryChoice,

    /// Give up after so many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout: u64,
}

fn model(name: &str) -> Result<Preset, String> {
    Preset::by_name(name).ok_or_else(|| {
        let names: Vec<_> = Preset::ALL.iter().map(|preset| preset.name()).collect();
        format!("choose one of {}", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split(' '))
    }

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_plain_demo_has_defaults() {
        let Command::Demo(args) = parse("kvx demo").unwrap().command else {
            panic!("not the demo");
        };
        assert_eq!(args.model, Preset::Qwen3_32B);
        assert_eq!((args.turns, args.block_tokens, args.json), (6, 16, false));
    }

    #[test]
    fn bad_arguments_are_usage_errors() {
        for line in [
            "kvx",
            "kvx nonsense",
            "kvx demo --turns 0",
            "kvx demo --turns x",
            "kvx demo --turns 4 --trace f",
            "kvx demo --max-turns 4",
            "kvx demo --model nonsense",
            "kvx demo --block-tokens 0",
            "kvx demo --timeout 0",
            "kvx demo --memory gpu",
            "kvx router",
            "kvx router --prefill a:1",
            "kvx router --prefill a:1 --decode ::1:2",
            "kvx router --prefill a:1 --decode b:2 --port 65536",
            "kvx sim --count 0",
            "kvx sim --steps 0",
            "kvx sim --json --trace",
        ] {
            assert_eq!(
                parse(line).unwrap_err().exit_code(),
                Exit::Usage as i32,
                "{line}"
            );
        }
        let text = parse("kvx demo --model x").unwrap_err().to_string();
        assert!(text.contains("Qwen3-32B"), "{text}");
    }
}

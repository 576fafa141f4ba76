//! Arguments of `kvx bench` and `kvx target`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::holders;
use super::latency::LatencySize;
use super::row::Who;
use super::scale::ScaleSize;
use crate::memory::MemoryChoice;
use crate::require::FabricArgs;

/// Arguments of `kvx bench`.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// What carries the bytes.
    #[command(flatten)]
    pub fabric: FabricArgs,

    /// Which bench.
    #[command(subcommand)]
    pub bench: BenchKind,
}

/// The benches.
#[derive(Debug, Clone, Subcommand)]
pub enum BenchKind {
    /// Reads of many sizes and orders of blocks, beside what the machine can do at best
    #[command(after_help = READ_HELP)]
    Read(ReadArgs),
    /// The same reads by others: NIXL's Python package, its authors' Rust crate, Mooncake
    #[command(after_help = COMPARE_HELP)]
    Compare(CompareArgs),
    /// What a read costs beyond its bytes, beside NIXL alone
    #[command(after_help = LATENCY_HELP)]
    Latency(LatencyArgs),
    /// One reader and very many holders, reads and leases
    #[command(after_help = SCALE_HELP)]
    Scale(ScaleArgs),
    /// The processes of the holders
    #[command(name = holders::COMMAND, hide = true)]
    Holders,
}

const LATENCY_HELP: &str = "\
Examples:
  kvx bench latency                   some two minutes, one of them idle
  kvx bench latency --quick --json    smaller pools, as one JSON object
  kvx bench latency --out report      a page and plots, too";

const SCALE_HELP: &str = "\
Examples:
  kvx bench scale                     64 peers, 1,000 reads in flight, 100,000 leases
  kvx bench scale --peers 4 --reads 64 --seconds 10
  kvx bench scale --json - | jq '.rows[] | [.case, .more]'";

const READ_HELP: &str = "\
Examples:
  kvx bench read                      a sweep of some minutes: 4 KiB to 2 MiB, 128 MiB at a time
  kvx bench read --quick --json       a look, as one JSON object
  kvx bench read --full --json grid.json
                                      the whole grid, up to 100,000 blocks
  kvx bench read --cases random-16384x8KiB --who kv-xfer,process_vm_readv
  kvx bench read --peer node-b:7400   from another node, where `kvx target` runs: the KV of known
                                      models, 8k to 128k tokens, 1 to 64 reads together
  KVX_BENCH_PEER=node-b:7400 kvx bench read
                                      the same";

const COMPARE_HELP: &str = "\
Examples:
  kvx bench compare                   every case, over what UCX chooses and over TCP
  kvx bench compare --cases tcp       only those over TCP
  kvx bench compare --json - | jq '.rows[] | [.case, .who, .setting, .median_ms]'
Participants that cannot run here are listed with their own error; that is no failure.";

/// Where the results go.
#[derive(Debug, Clone, Args)]
pub struct OutputArgs {
    /// Write one JSON object to a file, or to stdout (and nothing else there)
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub json: Option<PathBuf>,

    /// Also write the object, the text, a page and plots into this folder
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// What benches of cases know.
#[derive(Debug, Clone, Args)]
pub struct CommonArgs {
    /// Where the results go.
    #[command(flatten)]
    pub output: OutputArgs,

    /// Rounds that count
    #[arg(long, value_name = "N", default_value_t = 9,
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,

    /// Few and small cases, 3 rounds at most
    #[arg(long)]
    pub quick: bool,

    /// Only cases whose name contains one of these texts
    #[arg(long, value_name = "TEXT", value_delimiter = ',')]
    pub cases: Vec<String>,

    /// Only these participants
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = who)]
    pub who: Vec<Who>,

    /// Seed of block lists and contents
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,

    /// Largest memory of one end, such as 128MiB or 4GiB
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub max_bytes: Option<u64>,
}

/// Arguments of `kvx bench read`.
#[derive(Debug, Clone, Args)]
pub struct ReadArgs {
    /// What all benches know.
    #[command(flatten)]
    pub common: CommonArgs,

    /// The whole grid: ten block sizes, 1 to 100,000 blocks
    #[arg(long, conflicts_with = "quick")]
    pub full: bool,

    /// Read from `kvx target` at this address [default: $KVX_BENCH_PEER]
    #[arg(long, value_name = "HOST:PORT")]
    pub peer: Option<String>,

    /// Memory to read into, and without --peer from: host, cuda:N, or auto: on the first GPU if there is one
    #[arg(long, value_name = "MEMORY", default_value_t)]
    pub memory: MemoryChoice,
}

/// Arguments of `kvx bench compare`.
#[derive(Debug, Clone, Args)]
pub struct CompareArgs {
    /// What all benches know.
    #[command(flatten)]
    pub common: CommonArgs,
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
    /// How large the bench is.
    #[must_use]
    pub fn size(&self) -> LatencySize {
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

impl ScaleArgs {
    /// How large the bench is.
    #[must_use]
    pub fn size(&self) -> ScaleSize {
        ScaleSize {
            peers: self.peers,
            reads: self.reads,
            leases: self.leases,
            busy: Duration::from_secs(self.seconds),
        }
    }
}

/// Arguments of `kvx target`.
#[derive(Debug, Clone, Args)]
pub struct TargetArgs {
    /// Address where benches announce themselves. Whoever can reach it can have this node make
    /// memory and fill it with a pattern, and read that: use a trusted network
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:7400")]
    pub bind: SocketAddr,

    /// Port where readers fetch cards; any free one by default
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    pub side_channel_port: u16,

    /// Host name or address that readers are given; where the bench found this node by default
    #[arg(long, value_name = "HOST")]
    pub advertise: Option<String>,

    /// Memory to be read: host, cuda:N, or auto: on the first GPU if there is one
    #[arg(long, value_name = "MEMORY", default_value_t)]
    pub memory: MemoryChoice,

    /// What carries the bytes.
    #[command(flatten)]
    pub fabric: FabricArgs,

    /// Most memory that a bench may have here
    #[arg(long, value_name = "BYTES", default_value = "8GiB", value_parser = bytes)]
    pub max_bytes: u64,

    /// Seconds without a word from a bench after which its memory is given up
    #[arg(long, value_name = "SECONDS", default_value_t = 300,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub idle: u64,
}

/// Help of `kvx target`.
pub const TARGET_HELP: &str = "\
Examples:
  kvx target                          on one node ...
  KVX_BENCH_PEER=node-a:7400 kvx bench read
                                      ... and this on another
  UCX_TLS=tcp UCX_NET_DEVICES=eth1 kvx target --bind 10.0.0.1:7400
                                      over one network only";

fn who(name: &str) -> Result<Who, String> {
    serde_json::from_value(name.into()).map_err(|error| error.to_string())
}

/// A number of bytes, with a unit or without.
fn bytes(text: &str) -> Result<u64, String> {
    let bad = || format!("{text} is no number of bytes; write 4096, 64KiB, 128MiB or 4GiB");
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit: u64 = match text.get(digits.len()..).unwrap_or_default() {
        "" | "B" => 1,
        "K" | "KiB" => 1 << 10,
        "M" | "MiB" => 1 << 20,
        "G" | "GiB" => 1 << 30,
        "T" | "TiB" => 1 << 40,
        _ => return Err(bad()),
    };
    let number: u64 = digits.parse().map_err(|_| bad())?;
    number.checked_mul(unit).filter(|n| *n > 0).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_units() {
        assert_eq!(bytes("4096"), Ok(4096));
        assert_eq!(bytes("128MiB"), Ok(128 << 20));
        assert_eq!(bytes("4G"), Ok(4 << 30));
        for bad in ["", "MiB", "4 MiB", "-1", "0", "4MB", "99999999999TiB"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn participants_are_named_as_in_rows() {
        assert_eq!(who("process_vm_readv"), Ok(Who::ProcessVmReadv));
        let error = who("nobody").unwrap_err();
        assert!(error.contains("kv-xfer"), "{error}");
    }
}

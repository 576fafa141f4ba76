//! The command line of `serving`.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args, Parser, Subcommand};
use kv_xfer::descriptor::{ClusterKey, KeyError};
use kv_xfer::ids::{EngineId, NameError};
use kv_xfer::memory::cuda::{CudaDevice, CudaError};
use kv_xfer::peer::PeerAddr;
use kv_xfer::side_channel::{DialPolicy, Network};
use kvx::memory::MemoryChoice;
use kvx_router::http::Patience;
use kvx_router::{ROUTER_HELP, RouterArgs};
use thiserror::Error;

use crate::demo::{DEMO_HELP, DemoArgs};
use crate::node::{NodeSettings, Role};
use crate::workload::{BENCH_HELP, BenchArgs, REPLAY_HELP, ReplayArgs};

/// The name that a node serves its model under, unless told otherwise.
pub const MODEL_NAME: &str = "SmolLM2-135M-Instruct";

/// A small serving engine with a real model, whose nodes read KV blocks out of each other's memory.
#[derive(Debug, Parser)]
#[command(name = "serving", version, arg_required_else_help = true, after_help = EXIT_HELP)]
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
  3    something is missing on this machine, such as NIXL or the model
  130  interrupted

Logs go to stderr; KVX_LOG=debug shows more of them.";

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve as a prefill node: turn prompts into KV blocks, reading what decode nodes have
    #[command(after_help = PREFILL_HELP)]
    Prefill(NodeArgs),
    /// Serve as a decode node: read a prompt's KV blocks, generate, keep the blocks for the next turn
    #[command(after_help = DECODE_HELP)]
    Decode(NodeArgs),
    /// Route requests to prefill and decode nodes, and remember where conversations' blocks are
    #[command(after_help = ROUTER_HELP)]
    Router(RouterArgs),
    /// Hold a conversation with and without the transfer, and compare
    #[command(after_help = DEMO_HELP)]
    Demo(DemoArgs),
    /// Measure time to first token by context length, with and without the transfer
    #[command(after_help = BENCH_HELP)]
    Bench(BenchArgs),
    /// Replay the conversations of a production trace, shortened and sped up
    #[command(after_help = REPLAY_HELP)]
    Replay(ReplayArgs),
    /// Print the path of the model's file, which is fetched first if it is not there
    ModelPath,
}

const PREFILL_HELP: &str = "\
Examples:
  serving prefill                            on 127.0.0.1:8100, with a cache of 1 GiB
  serving prefill --port 0                   on any free port; the line on stdout says which
  serving prefill --host 0.0.0.0 --side-channel-host 10.0.0.5 \\
      --dial 10.0.0.0/8 --cluster-key-file key
                                             on a network: decode nodes of 10.0.0.0/8 are read from

A node of either kind answers requests without kv_transfer_params by itself:
  curl http://127.0.0.1:8100/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}],\"max_tokens\":32}'";

const DECODE_HELP: &str = "\
Examples:
  serving decode                             on 127.0.0.1:8200, with a cache of 1 GiB
  serving decode --decoder-kv-blocks-ttl 60  keep a finished answer's blocks for a minute
  serving decode --bidirectional-kv-xfer false
                                             offer nothing to the next turn's prefill";

/// Settings of a node, under vLLM's names where it has them.
#[derive(Debug, Clone, Args)]
pub struct NodeArgs {
    /// Address to serve HTTP at
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: IpAddr,

    /// Port to serve HTTP at, 0 for any free one [default: 8100 for prefill, 8200 for decode]
    #[arg(long, value_name = "PORT")]
    pub port: Option<u16>,

    /// Host name or address that other nodes reach the side channel at
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    pub side_channel_host: String,

    /// Port of the side channel, 0 for any free one [default: 5600 for prefill, 5601 for decode]
    #[arg(long, value_name = "PORT")]
    pub side_channel_port: Option<u16>,

    /// Name of this engine, unique in the cluster [default: made up]
    #[arg(long, value_name = "NAME", value_parser = engine_id)]
    pub engine_id: Option<EngineId>,

    /// Side channels that may be dialled besides those of this machine: networks (10.0.0.0/8) and
    /// peers (node-1:5600); may be repeated
    #[arg(long, value_name = "NETWORK|PEER", value_parser = dial, value_delimiter = ',')]
    pub dial: Vec<Dial>,

    /// File with the secret that the cluster's engines share; make one with `openssl rand -hex 32`
    #[arg(long, value_name = "FILE")]
    pub cluster_key_file: Option<PathBuf>,

    /// Where the KV cache is: host, or auto, which is the same: this engine computes on the processor. cuda:N is refused
    #[arg(long, value_name = "MEMORY", default_value_t)]
    pub memory: MemoryChoice,

    /// A GGUF file [default: SmolLM2-135M-Instruct, fetched once]
    #[arg(long, value_name = "FILE")]
    pub model: Option<PathBuf>,

    /// Name of the model in the API
    #[arg(long, value_name = "NAME", default_value = MODEL_NAME)]
    pub served_model_name: String,

    /// Tokens in a block
    #[arg(long, value_name = "N", default_value_t = 16,
          value_parser = clap::value_parser!(u32).range(1..=256))]
    pub block_size: u32,

    /// Memory for the KV cache, MiB
    #[arg(long, value_name = "MIB", default_value_t = 1024,
          value_parser = clap::value_parser!(u64).range(1..=1_048_576))]
    pub kv_cache_mib: u64,

    /// Longest sequence, prompt and answer together [default: the model's context]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_model_len: Option<u32>,

    /// Sequences that are worked on at once
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub max_num_seqs: u32,

    /// Tokens that are computed in one step
    #[arg(long, value_name = "TOKENS", default_value_t = 256,
          value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub max_num_batched_tokens: u32,

    /// Keep no blocks for later prompts that start alike
    #[arg(long)]
    pub no_enable_prefix_caching: bool,

    /// Fewest tokens worth reading from a decode node; 0 reads however few there are
    #[arg(long, value_name = "TOKENS", default_value_t = 64)]
    pub kv_recompute_threshold: u64,

    /// Whether decode nodes offer their blocks to the next turn's prefill, and prefill nodes read them
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    pub bidirectional_kv_xfer: bool,

    /// How long the blocks of a finished answer are kept, seconds
    #[arg(long, value_name = "SECONDS", default_value = "480", value_parser = seconds)]
    pub decoder_kv_blocks_ttl: Duration,

    /// How long the blocks of a prompt are kept for the decode node, seconds. Heartbeats of a request that
    /// waits make it two thirds of that, and five seconds must be left: with less than 10 it is computed
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub kv_lease_duration: Duration,

    /// How long a read may take before its tokens are computed instead, seconds
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    pub kv_read_timeout: Duration,

    /// How long a request may wait before it is worked on, seconds; then it is refused
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = seconds)]
    pub queue_timeout: Duration,

    /// How long a client may take to send a request's headers, and then its body, seconds. A connection that is
    /// kept open ends after as long without a request
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub request_timeout: Duration,

    /// How long a client may read nothing of an answer that waits for it, seconds. Longer than the router's,
    /// which waits for a client of its own
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = seconds)]
    pub stall_timeout: Duration,
}

/// What may be dialled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Dial {
    /// Every address of a network.
    Network(Network),
    /// One side channel.
    Peer(PeerAddr),
}

fn dial(text: &str) -> Result<Dial, String> {
    if text.contains('/') {
        return text
            .parse()
            .map(Dial::Network)
            .map_err(|error: <Network as std::str::FromStr>::Err| error.to_string());
    }
    text.parse()
        .map(Dial::Peer)
        .map_err(|error: <PeerAddr as std::str::FromStr>::Err| error.to_string())
}

fn engine_id(text: &str) -> Result<EngineId, NameError> {
    EngineId::new(text)
}

/// A duration in seconds, fractions included.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text
        .parse()
        .map_err(|_| "give a number of seconds".to_owned())?;
    if !(0.001..=31_536_000.0).contains(&seconds) {
        return Err("give a number of seconds from 0.001 to a year".to_owned());
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Settings that do not fit this machine.
#[derive(Debug, Error)]
pub enum SettingsError {
    /// The cluster key cannot be read.
    #[error("cannot read the cluster key {}: {source}", path.display())]
    KeyFile {
        /// Its file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The cluster key is none.
    #[error("the cluster key {}: {source}", path.display())]
    Key {
        /// Its file.
        path: PathBuf,
        /// Why.
        #[source]
        source: KeyError,
    },
    /// The side channel's host has no address.
    #[error("--side-channel-host {host}: {why}; give a name or address of this machine")]
    Host {
        /// The host.
        host: String,
        /// What is wrong with it.
        why: String,
    },
    /// A GPU was asked for that is not there.
    #[error("--memory {memory}: {source}")]
    NoGpu {
        /// What was asked for.
        memory: MemoryChoice,
        /// Why it is not there.
        #[source]
        source: CudaError,
    },
    /// A GPU was asked for.
    #[error(
        "--memory {memory}: this engine computes on the processor, which cannot reach a cache there; say host or auto"
    )]
    OnGpu {
        /// What was asked for.
        memory: MemoryChoice,
    },
    /// The made-up name is not acceptable, which cannot be.
    #[error(transparent)]
    Name(#[from] NameError),
}

impl NodeArgs {
    /// Where HTTP is served.
    #[must_use]
    pub fn http(&self, role: Role) -> SocketAddr {
        let port = self.port.unwrap_or(match role {
            Role::Prefill => 8100,
            Role::Decode => 8200,
        });
        SocketAddr::new(self.host, port)
    }

    /// How long clients are waited for.
    #[must_use]
    pub const fn patience(&self) -> Patience {
        Patience {
            request: self.request_timeout,
            stall: self.stall_timeout,
        }
    }

    /// The settings.
    ///
    /// # Errors
    /// [`SettingsError`].
    pub fn settings(&self, role: Role) -> Result<NodeSettings, SettingsError> {
        self.check_memory()?;
        let name = match &self.engine_id {
            Some(name) => name.clone(),
            None => EngineId::new(format!("{}-{:08x}", role.as_str(), rand::random::<u32>()))?,
        };
        let side_channel = self.side_channel(role)?;
        let advertise_host = (self.side_channel_host.parse::<IpAddr>().is_err())
            .then(|| self.side_channel_host.clone());
        let dial = self
            .dial
            .iter()
            .fold(DialPolicy::default(), |policy, dial| match dial {
                Dial::Network(network) => policy.with_network(*network),
                Dial::Peer(peer) => policy.with_peer(peer.clone()),
            });
        let size = |value: u32| usize::try_from(value).unwrap_or(usize::MAX);
        Ok(NodeSettings {
            side_channel,
            advertise_host,
            dial,
            cluster_key: self.cluster_key()?,
            block_tokens: self.block_size,
            kv_cache_bytes: self.kv_cache_mib.saturating_mul(1 << 20),
            max_model_len: self.max_model_len.map(size),
            max_num_seqs: size(self.max_num_seqs),
            max_num_batched_tokens: size(self.max_num_batched_tokens),
            prefix_caching: !self.no_enable_prefix_caching,
            kv_recompute_threshold: self.kv_recompute_threshold,
            bidirectional_kv_xfer: self.bidirectional_kv_xfer,
            decoder_kv_blocks_ttl: self.decoder_kv_blocks_ttl,
            kv_lease_duration: self.kv_lease_duration,
            kv_read_timeout: self.kv_read_timeout,
            queue_timeout: self.queue_timeout,
            ..NodeSettings::new(role, name)
        })
    }

    /// The processor computes with the cache, so it must be able to reach it.
    fn check_memory(&self) -> Result<(), SettingsError> {
        let memory = self.memory;
        match memory {
            MemoryChoice::Host => Ok(()),
            MemoryChoice::Auto => {
                tracing::info!(
                    "the KV cache is in host memory: this engine computes on the processor"
                );
                Ok(())
            }
            MemoryChoice::Cuda(ordinal) => Err(match CudaDevice::check(ordinal) {
                Ok(()) => SettingsError::OnGpu { memory },
                Err(source) => SettingsError::NoGpu { memory, source },
            }),
        }
    }

    fn side_channel(&self, role: Role) -> Result<SocketAddr, SettingsError> {
        let port = self.side_channel_port.unwrap_or(match role {
            Role::Prefill => 5600,
            Role::Decode => 5601,
        });
        let wrong = |why: String| SettingsError::Host {
            host: self.side_channel_host.clone(),
            why,
        };
        let host = self.side_channel_host.trim_matches(['[', ']']);
        let mut found = (host, port)
            .to_socket_addrs()
            .map_err(|error| wrong(error.to_string()))?;
        let found = found
            .next()
            .ok_or_else(|| wrong("it has no address".to_owned()))?;
        if found.ip().is_unspecified() {
            return Err(wrong("nobody can reach an unspecified address".to_owned()));
        }
        Ok(found)
    }

    fn cluster_key(&self) -> Result<Option<ClusterKey>, SettingsError> {
        let Some(path) = &self.cluster_key_file else {
            return Ok(None);
        };
        let secret = std::fs::read(path).map_err(|source| SettingsError::KeyFile {
            path: path.clone(),
            source,
        })?;
        let key = ClusterKey::from_secret(&secret);
        key.map(Some).map_err(|source| SettingsError::Key {
            path: path.clone(),
            source,
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn node(line: &str) -> Result<NodeArgs, clap::Error> {
        match Cli::try_parse_from(line.split(' '))?.command {
            Command::Prefill(args) | Command::Decode(args) => Ok(args),
            other => panic!("{other:?} is no node"),
        }
    }

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn defaults_are_vllms_but_for_the_transfer_that_is_on() {
        let settings = node("serving decode")
            .unwrap()
            .settings(Role::Decode)
            .unwrap();
        assert_eq!(settings.kv_recompute_threshold, 64);
        assert_eq!(settings.decoder_kv_blocks_ttl, Duration::from_secs(480));
        assert_eq!(settings.kv_lease_duration, Duration::from_secs(30));
        assert_eq!(settings.queue_timeout, Duration::from_secs(120));
        assert_eq!(settings.block_tokens, 16);
        assert!(settings.bidirectional_kv_xfer && settings.prefix_caching);
        assert!(settings.engine_id.as_str().starts_with("decode-"));
        assert_eq!(settings.advertise_host, None);
    }

    #[test]
    fn settings_are_taken_over() {
        let args = node(
            "serving prefill --bidirectional-kv-xfer false --decoder-kv-blocks-ttl 0.5 \
             --side-channel-host localhost --side-channel-port 0 --dial 10.0.0.0/8,node-1:5600 \
             --no-enable-prefix-caching --port 0",
        );
        let args = args.unwrap();
        assert_eq!(args.dial.len(), 2);
        assert_eq!(args.http(Role::Prefill).port(), 0);
        let settings = args.settings(Role::Prefill).unwrap();
        assert!(!settings.bidirectional_kv_xfer && !settings.prefix_caching);
        assert_eq!(settings.decoder_kv_blocks_ttl, Duration::from_millis(500));
        assert_eq!(settings.advertise_host.as_deref(), Some("localhost"));
        assert!(settings.side_channel.ip().is_loopback());
    }

    #[test]
    fn bad_arguments_are_refused() {
        for line in [
            "serving",
            "serving prefill --block-size 0",
            "serving prefill --port 70000",
            "serving prefill --dial nonsense",
            "serving prefill --dial 10.0.0.0/99",
            "serving decode --decoder-kv-blocks-ttl -1",
            "serving decode --decoder-kv-blocks-ttl never",
            "serving decode --bidirectional-kv-xfer maybe",
        ] {
            assert!(Cli::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
        let unspecified = node("serving decode --side-channel-host 0.0.0.0").unwrap();
        assert!(unspecified.settings(Role::Decode).is_err());
    }
}

//! Settings of a router: as a program sets them, and as a command line does.

use std::collections::HashSet;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use crate::address::NodeUrl;

/// Everything that can be set. [`new`](Self::new) gives the defaults, which are those of
/// [`RouterArgs`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RouterConfig {
    /// Where to listen: a name or an address, IPv6 with or without brackets, scope ids included.
    pub host: String,
    /// The port to listen on; 0 takes any that is free.
    pub port: u16,
    /// The nodes that compute prompts.
    pub prefill: Vec<NodeUrl>,
    /// The nodes that generate.
    pub decode: Vec<NodeUrl>,
    /// Whether decode nodes' blocks are read back in the next turn.
    pub bidirectional: bool,
    /// How long a handle is of use. Below the time for which decode nodes keep blocks, so that a handle
    /// that is sent along can still be used when it arrives.
    pub ttl: Duration,
    /// Conversations of which a handle is kept, at most.
    pub max_conversations: u64,
    /// Bytes of all handles together.
    pub max_handle_bytes: u64,
    /// Bytes of one handle.
    pub max_one_handle_bytes: usize,
    /// Whether clients get to see `kv_transfer_params`.
    pub return_kv_params: bool,
    /// Whether clients may send `kv_transfer_params`. Engines connect to where these say, so clients
    /// have to be trusted.
    pub accept_kv_params: bool,
    /// Who may ask; everybody, where it is `None`.
    pub api_keys: Option<ApiKeys>,
    /// How often nodes are asked whether they can serve.
    pub health_interval: Duration,
    /// How long they may take to say so.
    pub health_timeout: Duration,
    /// Further attempts of each leg after one that failed.
    pub retries: u32,
    /// Legs that a conversation's own node may be ahead of the least loaded one before the turn goes
    /// there.
    pub affinity_slack: u32,
    /// How long connecting to a node may take.
    pub connect_timeout: Duration,
    /// How long an attempt at a prefill leg may take.
    pub prefill_timeout: Duration,
    /// How long a decode leg may take until its first byte.
    pub first_byte_timeout: Duration,
    /// How long a stream may be silent.
    pub idle_timeout: Duration,
    /// How long an answer that is not streamed may take.
    pub answer_timeout: Duration,
    /// How long a client may take to send its request: the headers, and then the body. A connection that is kept open
    /// ends after as long without a request.
    pub request_timeout: Duration,
    /// How long a client may read nothing of an answer that waits for it.
    pub stall_timeout: Duration,
    /// How long answers under way may go on after the router was asked to end.
    pub grace: Duration,
    /// Bytes of a request's body.
    pub max_request_bytes: usize,
    /// Bytes of an answer that is not streamed.
    pub max_answer_bytes: usize,
    /// Bytes of a stream's event that are held back until it has ended. Longer events are relayed without a
    /// look into them.
    pub max_event_bytes: usize,
}

/// Why settings cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Each role needs a node. One node may have both.
    #[error("there is no {0} node; give one with --{0} URL")]
    NoNode(&'static str),
    /// A time or a size that must not be zero is.
    #[error("{0} must be more than 0")]
    Zero(&'static str),
    /// A time that is no number of seconds.
    #[error("{0} must be a number of seconds, at most a year")]
    Seconds(&'static str),
    /// The file of API keys cannot be read.
    #[error("API keys cannot be read from {path}: {source}")]
    ApiKeys {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        source: io::Error,
    },
    /// A file of API keys without keys would lock everybody out.
    #[error("{0} has no API key in it; write one on each line")]
    NoApiKey(PathBuf),
    /// The scope id of a node's address names no interface of this machine.
    #[error("{node}: its scope id cannot be resolved: {source}")]
    Scope {
        /// The node.
        node: NodeUrl,
        /// What went wrong.
        source: io::Error,
    },
    /// The HTTP client does not start.
    #[error("the HTTP client does not start: {0}")]
    Client(String),
}

impl RouterConfig {
    /// The defaults, listening on any free port of `127.0.0.1`.
    #[must_use]
    pub fn new(prefill: Vec<NodeUrl>, decode: Vec<NodeUrl>) -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            port: 0,
            prefill,
            decode,
            bidirectional: true,
            ttl: Duration::from_secs(450),
            max_conversations: 100_000,
            max_handle_bytes: 256 << 20,
            max_one_handle_bytes: 4 << 20,
            return_kv_params: false,
            accept_kv_params: false,
            api_keys: None,
            health_interval: Duration::from_secs(5),
            health_timeout: Duration::from_secs(2),
            retries: 2,
            affinity_slack: 4,
            connect_timeout: Duration::from_secs(3),
            prefill_timeout: Duration::from_secs(300),
            first_byte_timeout: Duration::from_secs(300),
            idle_timeout: Duration::from_secs(120),
            answer_timeout: Duration::from_secs(1800),
            request_timeout: Duration::from_secs(60),
            stall_timeout: Duration::from_secs(60),
            grace: Duration::from_secs(30),
            max_request_bytes: 32 << 20,
            max_answer_bytes: 64 << 20,
            max_event_bytes: 8 << 20,
        }
    }

    /// Says what is wrong with it, if anything.
    pub fn validate(&self) -> Result<(), ConfigError> {
        for (nodes, role) in [(&self.prefill, "prefill"), (&self.decode, "decode")] {
            if nodes.is_empty() {
                return Err(ConfigError::NoNode(role));
            }
        }
        for (zero, name) in [
            (self.ttl.is_zero(), "ttl"),
            (self.max_conversations == 0, "max-conversations"),
            (self.max_handle_bytes == 0, "max-handle-bytes"),
            (self.health_interval.is_zero(), "health-interval"),
            (self.health_timeout.is_zero(), "health-timeout"),
            (self.connect_timeout.is_zero(), "connect-timeout"),
            (self.prefill_timeout.is_zero(), "prefill-timeout"),
            (self.first_byte_timeout.is_zero(), "first-byte-timeout"),
            (self.idle_timeout.is_zero(), "idle-timeout"),
            (self.answer_timeout.is_zero(), "answer-timeout"),
            (self.request_timeout.is_zero(), "request-timeout"),
            (self.stall_timeout.is_zero(), "stall-timeout"),
            (self.max_request_bytes == 0, "max-request-bytes"),
            (self.max_event_bytes == 0, "max-event-bytes"),
        ] {
            if zero {
                return Err(ConfigError::Zero(name));
            }
        }
        Ok(())
    }
}

/// The keys with which clients may ask. Only their hashes are kept.
#[derive(Clone)]
pub struct ApiKeys(HashSet<blake3::Hash>);

impl ApiKeys {
    /// These keys.
    pub fn new<'a>(keys: impl IntoIterator<Item = &'a str>) -> Self {
        Self(
            keys.into_iter()
                .map(|key| blake3::hash(key.as_bytes()))
                .collect(),
        )
    }

    /// The keys in a file: one on each line; blank lines and lines that begin with `#` are left out.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = fs::read_to_string(path).map_err(|source| ConfigError::ApiKeys {
            path: path.to_owned(),
            source,
        })?;
        let keys = text
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty() && !line.starts_with('#'));
        let keys = Self::new(keys);
        if keys.0.is_empty() {
            return Err(ConfigError::NoApiKey(path.to_owned()));
        }
        Ok(keys)
    }

    pub(crate) fn allow(&self, key: Option<&[u8]>) -> bool {
        key.is_some_and(|key| self.0.contains(&blake3::hash(key)))
    }
}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKeys({})", self.0.len())
    }
}

/// What a command line can set.
#[derive(Debug, Clone, Args)]
pub struct RouterArgs {
    /// A node that computes prompts; may be given several times
    #[arg(long, value_name = "URL", required = true, num_args = 1..)]
    pub prefill: Vec<NodeUrl>,

    /// A node that generates; may be given several times
    #[arg(long, value_name = "URL", required = true, num_args = 1..)]
    pub decode: Vec<NodeUrl>,

    /// Address to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: String,

    /// Port to listen on; 0 takes any that is free
    #[arg(long, value_name = "N", default_value_t = 8000)]
    pub port: u16,

    /// Do not keep where a conversation's blocks are: every turn computes its whole prompt
    #[arg(long)]
    pub no_bidirectional: bool,

    /// Seconds for which a handle is of use; keep it below the nodes' --decoder-kv-blocks-ttl
    #[arg(long, value_name = "SECONDS", default_value_t = 450.0)]
    pub ttl: f64,

    /// Conversations of which a handle is kept, at most
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    pub max_conversations: u64,

    /// Bytes of all handles together, at most
    #[arg(long, value_name = "BYTES", default_value_t = 256 << 20)]
    pub max_handle_bytes: u64,

    /// Give kv_transfer_params to clients, too
    #[arg(long)]
    pub return_kv_params: bool,

    /// Take kv_transfer_params from clients. Nodes connect to where these say: only for clients that
    /// are trusted
    #[arg(long)]
    pub accept_kv_params: bool,

    /// File with the API keys of those who may ask, one on each line
    #[arg(long, value_name = "FILE")]
    pub api_keys_file: Option<PathBuf>,

    /// Seconds between two questions whether a node can serve
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    pub health_interval: f64,

    /// Seconds that a node may take to say so
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    pub health_timeout: f64,

    /// Further attempts of each leg, on other nodes
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub retries: u32,

    /// Legs that a conversation's own node may be ahead of the least loaded one
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub affinity_slack: u32,

    /// Seconds that connecting to a node may take
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0)]
    pub connect_timeout: f64,

    /// Seconds that a prefill leg may take
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0)]
    pub prefill_timeout: f64,

    /// Seconds that a decode leg may take until its first byte
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0)]
    pub first_byte_timeout: f64,

    /// Seconds that a stream may be silent
    #[arg(long, value_name = "SECONDS", default_value_t = 120.0)]
    pub idle_timeout: f64,

    /// Seconds that an answer that is not streamed may take
    #[arg(long, value_name = "SECONDS", default_value_t = 1800.0)]
    pub answer_timeout: f64,

    /// Seconds that a client may take to send a request's headers, and then its body
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    pub request_timeout: f64,

    /// Seconds that a client may read nothing of an answer that waits for it
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    pub stall_timeout: f64,

    /// Seconds that answers under way may go on after SIGTERM or Ctrl-C
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0)]
    pub grace: f64,

    /// Bytes of a request, at most
    #[arg(long, value_name = "BYTES", default_value_t = 32 << 20)]
    pub max_request_bytes: usize,

    /// Bytes of an answer that is not streamed, at most
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20)]
    pub max_answer_bytes: usize,

    /// Bytes of a stream's event, at most; longer ones are relayed without a look into them
    #[arg(long, value_name = "BYTES", default_value_t = 8 << 20)]
    pub max_event_bytes: usize,
}

/// Examples for `--help`, for a command line whose subcommand is `router`.
pub const ROUTER_HELP: &str = "\
Examples:
  kvx router --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200
                                      one node of each kind; clients use http://127.0.0.1:8000/v1
  kvx router --prefill [fd00::1]:8100 [fd00::2]:8100 --decode [fd00::3]:8200 --host ::
                                      several nodes, IPv6, open to the network
  kvx router --prefill localhost:8100 --decode localhost:8200 --no-bidirectional
                                      nothing is read back from decode nodes, to compare

A conversation is named by the body's conversation_id or the header X-Conversation-ID; without either
it is recognised by its messages. Prometheus metrics are at /metrics.";

impl RouterArgs {
    /// The settings, checked.
    pub fn config(&self) -> Result<RouterConfig, ConfigError> {
        let seconds = |value: f64, name| {
            Duration::try_from_secs_f64(value)
                .ok()
                .filter(|time| *time <= Duration::from_secs(365 * 24 * 3600))
                .ok_or(ConfigError::Seconds(name))
        };
        let config = RouterConfig {
            host: self.host.clone(),
            port: self.port,
            bidirectional: !self.no_bidirectional,
            ttl: seconds(self.ttl, "ttl")?,
            max_conversations: self.max_conversations,
            max_handle_bytes: self.max_handle_bytes,
            return_kv_params: self.return_kv_params,
            accept_kv_params: self.accept_kv_params,
            api_keys: self
                .api_keys_file
                .as_deref()
                .map(ApiKeys::read)
                .transpose()?,
            health_interval: seconds(self.health_interval, "health-interval")?,
            health_timeout: seconds(self.health_timeout, "health-timeout")?,
            retries: self.retries,
            affinity_slack: self.affinity_slack,
            connect_timeout: seconds(self.connect_timeout, "connect-timeout")?,
            prefill_timeout: seconds(self.prefill_timeout, "prefill-timeout")?,
            first_byte_timeout: seconds(self.first_byte_timeout, "first-byte-timeout")?,
            idle_timeout: seconds(self.idle_timeout, "idle-timeout")?,
            answer_timeout: seconds(self.answer_timeout, "answer-timeout")?,
            request_timeout: seconds(self.request_timeout, "request-timeout")?,
            stall_timeout: seconds(self.stall_timeout, "stall-timeout")?,
            grace: seconds(self.grace, "grace")?,
            max_request_bytes: self.max_request_bytes,
            max_answer_bytes: self.max_answer_bytes,
            max_event_bytes: self.max_event_bytes,
            ..RouterConfig::new(self.prefill.clone(), self.decode.clone())
        };
        config.validate()?;
        Ok(config)
    }
}

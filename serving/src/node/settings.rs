//! What a node is told when it starts, with vLLM's names and defaults where vLLM has them; but the transfer back
//! from decode to prefill, which this engine is there to show, is on unless switched off.

use std::net::SocketAddr;
use std::time::Duration;

use kv_xfer::descriptor::ClusterKey;
use kv_xfer::ids::EngineId;
use kv_xfer::policy::DEFAULT_THRESHOLD;
use kv_xfer::side_channel::DialPolicy;

/// Which part of the work a node is meant for. Any node can do any part; the role only sets defaults
/// and names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Turns prompts into KV blocks.
    Prefill,
    /// Reads the blocks and generates.
    Decode,
}

impl Role {
    /// A stable name for logs and engine ids.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// Settings of one node.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    /// What it is meant for.
    pub role: Role,
    /// Its name in descriptors.
    pub engine_id: EngineId,
    /// Where its side channel listens; port 0 takes any.
    pub side_channel: SocketAddr,
    /// Host that goes into descriptors, when it is not the address listened at.
    pub advertise_host: Option<String>,
    /// Which side channels it may dial.
    pub dial: DialPolicy,
    /// Key that authenticates descriptors and cards.
    pub cluster_key: Option<ClusterKey>,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Memory for the KV cache, bytes.
    pub kv_cache_bytes: u64,
    /// Longest sequence, prompt and answer together; the model's context when absent.
    pub max_model_len: Option<usize>,
    /// Sequences that are worked on at once.
    pub max_num_seqs: usize,
    /// Tokens computed in one step.
    pub max_num_batched_tokens: usize,
    /// Whether full blocks are kept for later prompts that start alike.
    pub prefix_caching: bool,
    /// Fewest tokens that a prefill node reads from a decode node; 0 reads however few there are.
    pub kv_recompute_threshold: u64,
    /// Whether decode nodes offer their blocks to the next turn's prefill, and prefill nodes read them.
    pub bidirectional_kv_xfer: bool,
    /// How long a decode node keeps the blocks of a finished answer.
    pub decoder_kv_blocks_ttl: Duration,
    /// How long a prefill node keeps the blocks of a prompt.
    pub kv_lease_duration: Duration,
    /// How long a read may take before its tokens are computed instead.
    pub kv_read_timeout: Duration,
    /// How long a request may wait before it is worked on; one that waited longer is refused.
    pub queue_timeout: Duration,
}

impl NodeSettings {
    /// The defaults, listening on a free port of the loopback.
    #[must_use]
    pub fn new(role: Role, engine_id: EngineId) -> Self {
        Self {
            role,
            engine_id,
            side_channel: ([127, 0, 0, 1], 0).into(),
            advertise_host: None,
            dial: DialPolicy::default(),
            cluster_key: None,
            block_tokens: 16,
            kv_cache_bytes: 1 << 30,
            max_model_len: None,
            max_num_seqs: 64,
            max_num_batched_tokens: 256,
            prefix_caching: true,
            kv_recompute_threshold: DEFAULT_THRESHOLD,
            bidirectional_kv_xfer: true,
            decoder_kv_blocks_ttl: Duration::from_secs(480),
            kv_lease_duration: Duration::from_secs(30),
            kv_read_timeout: Duration::from_secs(10),
            queue_timeout: Duration::from_secs(120),
        }
    }
}

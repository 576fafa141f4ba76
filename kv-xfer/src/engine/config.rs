//! Settings of an engine, with the reason for each default.

use std::net::SocketAddr;
use std::time::Duration;

use crate::descriptor::ClusterKey;
use crate::fabric::{FabricConfig, Requirement};
use crate::ids::{EngineId, Rank};
use crate::plan::DEFAULT_MAX_DESCRIPTOR_BYTES;
use crate::side_channel::DialPolicy;

/// How an engine reads.
#[derive(Debug, Clone)]
pub struct ReaderConfig {
    /// Reads that may be queued before `read` is refused. Bounds memory; a serving engine that has
    /// this many reads waiting is better off recomputing.
    pub queue: usize,
    /// Reads that are worked on at once; each holds one landing place for its lease word.
    pub active: u32,
    /// Most descriptors in one posted window. A post over shared memory copies inside the call:
    /// 64 descriptors bound it to about a millisecond and cost nothing in throughput.
    pub window_descriptors: usize,
    /// Most bytes in one posted window, for the same reason when descriptors are large.
    pub window_bytes: u64,
    /// Windows of one read in flight at once in each lane, so that asynchronous transports stay busy:
    /// eight of 64 descriptors are the 256 for each of the two EFA devices beside a GPU.
    pub windows_in_flight: usize,
    /// Threads that post: the driver and one less of helper lanes. A large read is spread over them,
    /// through an agent of its own in each, where posting moves the bytes within the call, as it does
    /// over shared memory. Where the transport moves them by itself, the driver alone posts.
    pub lanes: usize,
    /// Peers that have agents in the helper lanes at once. Past it the longest idle one loses them.
    pub wide_peers: usize,
    /// Longest single descriptor. Longer runs are split, so that no window takes longer than moving
    /// this much (some 0.3 ms over shared memory).
    pub max_descriptor_bytes: u64,
    /// How long a destination may stay in doubt before the agent that reads from its peer is
    /// destroyed to end the doubt. Other reads from that peer fail then.
    pub abandon_after: Duration,
    /// A peer of whose reads in flight nothing comes for this long is given up: they end, its agent is
    /// destroyed, and whoever wants it next meets it afresh. Longer than it takes to move what is in flight at
    /// once (`windows_in_flight` times `window_bytes`, 8 MiB) over the slowest link that is worth reading over.
    pub silent_after: Duration,
    /// Time to meet a peer: dial, fetch its card, create and load an agent.
    pub connect_timeout: Duration,
    /// Agents kept, one per peer. Past it the longest idle one goes. An agent costs about 18 ms,
    /// 5 MB and 15 file descriptors.
    pub max_peers: usize,
    /// Threads that meet peers in parallel, and as many again for peers that could not be met last
    /// time.
    pub connect_threads: usize,
    /// Agents that are opened ahead, so that meeting a peer takes some 20 ms less. Each costs as much
    /// as one that is in use.
    pub spare_agents: usize,
    /// An agent that has been idle for this long is destroyed.
    pub idle_peer: Duration,
    /// How long the driver spins for a completion before it yields.
    pub spin: Duration,
    /// How long the driver looks for a next read before it sleeps, once the last one has ended.
    /// Waking it takes some 50 microseconds.
    pub linger: Duration,
}

impl Default for ReaderConfig {
    fn default() -> Self {
        Self {
            queue: 1024,
            active: 1024,
            window_descriptors: 64,
            window_bytes: 1 << 20,
            windows_in_flight: 8,
            lanes: 2,
            wide_peers: 16,
            max_descriptor_bytes: DEFAULT_MAX_DESCRIPTOR_BYTES,
            abandon_after: Duration::from_secs(5),
            silent_after: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(5),
            max_peers: 64,
            connect_threads: 4,
            spare_agents: 1,
            idle_peer: Duration::from_secs(300),
            spin: Duration::from_micros(200),
            linger: Duration::from_micros(50),
        }
    }
}

/// How an engine holds blocks for others.
#[derive(Debug, Clone)]
pub struct HolderConfig {
    /// Address of the side channel; port 0 takes any. `None`: this engine serves nobody.
    pub bind: Option<SocketAddr>,
    /// Host name or address that goes into descriptors; the bound address when absent.
    pub advertise_host: Option<String>,
    /// Time to live of a lease when the caller names none: vLLM's `decoder_kv_blocks_ttl`.
    pub default_ttl: Duration,
    /// Longest time from a grant or a renewal to the end of a lease. Renewals can go on for ever: a
    /// holder that wants its blocks back revokes.
    pub max_ttl: Duration,
    /// Leases at once; each has one word in registered memory.
    pub max_leases: u32,
    /// How often notifications are taken while leases are out.
    pub poll_interval: Duration,
}

impl Default for HolderConfig {
    fn default() -> Self {
        Self {
            bind: None,
            advertise_host: None,
            default_ttl: Duration::from_secs(480),
            max_ttl: Duration::from_secs(3600),
            max_leases: 131_072,
            poll_interval: Duration::from_millis(1),
        }
    }
}

/// Settings of one engine rank.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Its name in descriptors and logs.
    pub engine_id: EngineId,
    /// Its place in the engine's parallel group.
    pub rank: Rank,
    /// Ranks in the tensor-parallel group: what the pool's layout is cut for.
    pub tp_size: u32,
    /// Model name, as it goes on the card and into the compatibility check.
    pub model: String,
    /// How it reads.
    pub reader: ReaderConfig,
    /// How it serves.
    pub holder: HolderConfig,
    /// Which addresses it may dial. A descriptor never widens this.
    pub dial: DialPolicy,
    /// What must carry the bytes of every peer. An engine on a machine that has nothing of the kind does not start, and
    /// a peer whose bytes go another way is not read from. Both ends of a connection should require the same: with
    /// `shm` and `nvlink` nothing is left that notices dead peers, on which UCX wants them to agree. With UCX, what takes more than
    /// one of its transports takes a variable too: apply [`UcxSettings::environment`](crate::fabric::UcxSettings::environment).
    pub require: Requirement,
    /// How it makes sure of that.
    pub fabric: FabricConfig,
    /// Key that authenticates descriptors and cards; shared by the cluster.
    pub cluster_key: Option<ClusterKey>,
}

impl EngineConfig {
    /// The defaults under a name: no side channel, dials loopback only, requires no carrier, no key.
    #[must_use]
    pub fn new(engine_id: EngineId, model: impl Into<String>) -> Self {
        Self {
            engine_id,
            rank: Rank::default(),
            tp_size: 1,
            model: model.into(),
            reader: ReaderConfig::default(),
            holder: HolderConfig::default(),
            dial: DialPolicy::default(),
            require: Requirement::Any,
            fabric: FabricConfig::default(),
            cluster_key: None,
        }
    }
}

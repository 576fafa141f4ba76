//! What one rank of an engine tells its peers.

use std::fmt;

use super::compat::CompatFactors;
use crate::ids::{AgentName, EngineId, Incarnation, Rank};
use crate::layout::RegionGeometry;

/// Version of the card and of the side channel's own requests. Raised when an older reader would
/// misunderstand a newer card; additions that may be ignored do not raise it.
pub const PROTOCOL_VERSION: u32 = 1;

/// A side-channel request of our own that a peer may serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Feature {
    /// Answers `kvx_ping`.
    Ping,
    /// Answers `kvx_renew`.
    Renew,
    /// Answers `kvx_release`.
    Release,
}

impl Feature {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Ping, Self::Renew, Self::Release];

    /// Its name on the wire.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ping => "ping",
            Self::Renew => "renew",
            Self::Release => "release",
        }
    }

    const fn bit(self) -> u32 {
        match self {
            Self::Ping => 1,
            Self::Renew => 2,
            Self::Release => 4,
        }
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The requests of our own that a peer advertises. None of them is sent to a peer that does not:
/// vLLM's listener does not survive a message it does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Features(u32);

impl Features {
    /// No own requests: what a vLLM peer serves.
    pub const NONE: Self = Self(0);

    /// Everything that this version serves.
    #[must_use]
    pub fn all() -> Self {
        Feature::ALL.into_iter().collect()
    }

    /// Whether `feature` is advertised.
    #[must_use]
    pub const fn has(self, feature: Feature) -> bool {
        self.0 & feature.bit() != 0
    }

    /// The advertised features.
    pub fn iter(self) -> impl Iterator<Item = Feature> {
        Feature::ALL.into_iter().filter(move |f| self.has(*f))
    }

    /// From names on the wire; those of a later version are skipped.
    pub(crate) fn from_names<'a>(names: impl Iterator<Item = &'a str>) -> Self {
        names
            .filter_map(|name| Feature::ALL.into_iter().find(|f| f.name() == name))
            .collect()
    }
}

impl FromIterator<Feature> for Features {
    fn from_iter<I: IntoIterator<Item = Feature>>(features: I) -> Self {
        Self(features.into_iter().fold(0, |bits, f| bits | f.bit()))
    }
}

/// Fields that only vLLM reads. The defaults describe a pool of one head-major region per layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VllmFields {
    /// Order of a block's dimensions in vLLM's letters; `LBHNC` is what its `HND` means.
    pub kv_cache_layout: String,
    /// Attention backend, such as `FLASH_ATTN`.
    pub attn_backend_name: String,
    /// Bytes of the convolution and of the state-space state; zero for attention-only models.
    pub ssm_sizes: [u64; 2],
    /// Kernel blocks per logical block. Our block ids are kernel block ids: 1.
    pub physical_blocks_per_logical: u32,
    /// Decode-context-parallel size.
    pub dcp_size: u32,
    /// Prefill-context-parallel size.
    pub pcp_size: u32,
}

impl Default for VllmFields {
    fn default() -> Self {
        Self {
            kv_cache_layout: "LBHNC".to_owned(),
            attn_backend_name: "FLASH_ATTN".to_owned(),
            ssm_sizes: [0, 0],
            physical_blocks_per_logical: 1,
            dcp_size: 1,
            pcp_size: 1,
        }
    }
}

/// The card of a kv-xfer engine's rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Card {
    /// The engine.
    pub engine_id: EngineId,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// Which rank of it.
    pub rank: Rank,
    /// The NIXL agent that serves this rank's memory; `nixl_metadata` must name the same.
    pub agent: AgentName,
    /// The agent's metadata blob. A flipped bit in it can crash the process that loads it.
    pub nixl_metadata: Vec<u8>,
    /// Where the blocks lie. May be empty when nothing is registered yet.
    pub regions: Vec<RegionGeometry>,
    /// Encoded layout of the pool; opaque here.
    pub layout: Vec<u8>,
    /// The table of lease words, one block of 8 bytes per word.
    pub lease_words: RegionGeometry,
    /// What must be equal on both sides: protocol version, model, dtype, block tokens, layout.
    pub compat: CompatFactors,
    /// The hash to serve as `compatibility_hash`, to match a vLLM peer's; the hash of `compat` when
    /// `None`.
    pub compat_hash: Option<String>,
    /// Own requests served.
    pub features: Features,
    /// What vLLM readers need besides.
    pub vllm: VllmFields,
}

/// The metadata of a vLLM engine's rank. Nothing protects it against damage on the way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VllmCard {
    /// The engine.
    pub engine_id: EngineId,
    /// The agent's metadata blob. **Unchecked**: a flipped bit in it can crash the process that
    /// loads it.
    pub nixl_metadata: Vec<u8>,
    /// Where the blocks lie.
    pub regions: Vec<RegionGeometry>,
    /// Whether the peer said what kind of memory its regions are (0.33); device memory is assumed
    /// where it did not.
    pub mem_known: bool,
    /// First layer of each region (0.33).
    pub region_names: Option<Vec<String>>,
    /// Tokens per kernel block.
    pub block_tokens: u32,
    /// The hash that the peer serves.
    pub compat_hash: String,
    /// The rest.
    pub vllm: VllmFields,
}

/// What was learnt from a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerCard {
    /// A kv-xfer engine. Checksum, MAC (when a key is set) and factors have been verified.
    KvXfer(Box<Card>),
    /// A vLLM engine. **Unchecked**; decoded only when the policy allows that.
    Vllm(Box<VllmCard>),
}

impl PeerCard {
    /// The engine.
    #[must_use]
    pub fn engine_id(&self) -> &EngineId {
        match self {
            Self::KvXfer(card) => &card.engine_id,
            Self::Vllm(card) => &card.engine_id,
        }
    }

    /// Where the blocks lie.
    #[must_use]
    pub fn regions(&self) -> &[RegionGeometry] {
        match self {
            Self::KvXfer(card) => &card.regions,
            Self::Vllm(card) => &card.regions,
        }
    }

    /// Own requests that the peer serves.
    #[must_use]
    pub fn features(&self) -> Features {
        match self {
            Self::KvXfer(card) => card.features,
            Self::Vllm(_) => Features::NONE,
        }
    }

    /// The peer's incarnation; vLLM has none.
    #[must_use]
    pub fn incarnation(&self) -> Option<Incarnation> {
        match self {
            Self::KvXfer(card) => Some(card.incarnation),
            Self::Vllm(_) => None,
        }
    }
}

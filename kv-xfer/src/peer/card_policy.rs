//! What is required of a card, and what can be wrong with one.

use thiserror::Error;

use super::addr::PeerAddr;
use super::card::VllmFields;
use super::compat::{CompatError, CompatFactors};
use super::msgpack::Malformed;
use crate::descriptor::ClusterKey;
use crate::ids::{EngineId, Incarnation, NameError, Rank};
use crate::layout::{MemKind, RegionError, RegionGeometry};

/// Most factors on a card, and longest name or value of one in bytes: far above what is used.
pub(super) const MAX_FACTORS: usize = 64;
pub(super) const MAX_FACTOR_BYTES: usize = 4096;

/// How much a card may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CardLimits {
    /// Longest reply, in bytes. The default is the budget of first contact with a peer, 1 MiB.
    pub max_bytes: usize,
    /// Most regions. The default, 65,536, is a hundred times what a large model has.
    pub max_regions: usize,
}

impl Default for CardLimits {
    fn default() -> Self {
        Self {
            max_bytes: 1 << 20,
            max_regions: 65_536,
        }
    }
}

/// What is required of a card before it is accepted.
#[derive(Debug, Clone, Default)]
pub struct CardPolicy {
    /// Accept cards without a checksum, which is what vLLM engines send. Off by default: a bit
    /// flipped on the way can then crash this process.
    pub allow_unchecked: bool,
    /// When set, kv-xfer cards must carry a MAC made with it.
    pub key: Option<ClusterKey>,
    /// Own factors; kv-xfer cards must have the same. `None` skips the comparison.
    pub factors: Option<CompatFactors>,
    /// The hash that vLLM cards must carry. `None` accepts any, for learning it.
    pub vllm_hash: Option<String>,
    /// The engine that is expected to answer, where it is known.
    pub expect_engine: Option<EngineId>,
    /// The rank that was asked for, where it must match.
    pub expect_rank: Option<Rank>,
    /// How much a card may hold.
    pub limits: CardLimits,
}

/// Why a peer's card was refused. Nothing of it was handed on.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("card of {peer} refused: {fault}")]
pub struct CardError {
    /// Who sent it.
    pub peer: PeerAddr,
    /// What is wrong with it.
    #[source]
    pub fault: CardFault,
}

/// What is wrong with a card.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CardFault {
    /// It is longer than allowed.
    #[error("it has {len} bytes, the limit is {limit}; raise the limit if the peer is right")]
    TooLarge {
        /// Its length, bytes.
        len: usize,
        /// The limit, bytes.
        limit: usize,
    },
    /// It is not a reply of this protocol.
    #[error("the {part} is malformed: {why}; check what listens at that address")]
    Malformed {
        /// Which of the nested maps.
        part: &'static str,
        /// What is wrong with it.
        why: Malformed,
    },
    /// It carries no checksum.
    #[error(
        "it carries no checksum (a vLLM engine?); set allow_unchecked to accept that a bit flipped \
         on the way may crash this process"
    )]
    Unchecked,
    /// The checksum does not match.
    #[error("its checksum does not match; fetch it again, and suspect the network if that repeats")]
    Checksum,
    /// A kv-xfer card lacks the checksum that it must have.
    #[error("it is a kv-xfer card whose checksum was stripped; something on the way altered it")]
    ChecksumStripped,
    /// It carries no MAC although a cluster key is set here.
    #[error("it carries no MAC; set the same cluster key on the peer")]
    MacMissing,
    /// The MAC does not match.
    #[error("its MAC does not match; set the same cluster key on both engines")]
    Mac,
    /// The outer hash or factors are not those that the peer put on the card.
    #[error("its outer fields were altered on the way; fetch it again")]
    OuterAltered,
    /// The engines do not fit together.
    #[error("the engines do not fit together: {0}")]
    Incompatible(#[source] CompatError),
    /// Another engine answered.
    #[error("engine {found} answered where {expected} was expected; check the peer's address")]
    WrongEngine {
        /// The engine expected.
        expected: EngineId,
        /// The engine that answered.
        found: EngineId,
    },
    /// Another rank's card came back.
    #[error("the card is of rank {found}, rank {expected} was asked for; report a bug of the peer")]
    WrongRank {
        /// The rank asked for.
        expected: Rank,
        /// The rank on the card.
        found: Rank,
    },
    /// It has more regions than allowed.
    #[error("it has {count} regions, the limit is {limit}; raise the limit if the peer is right")]
    TooManyRegions {
        /// Their number.
        count: usize,
        /// The limit.
        limit: usize,
    },
    /// Two lists that belong together differ in length.
    #[error("it has {regions} regions but {count} entries of {list}; report a bug of the peer")]
    Uneven {
        /// Number of base addresses.
        regions: usize,
        /// Which list differs.
        list: &'static str,
        /// Its length.
        count: usize,
    },
    /// A region is impossible.
    #[error("region {index} is impossible: {why}; report a bug of the peer")]
    Region {
        /// Its index; `None` is the table of lease words.
        index: RegionIndex,
        /// What is wrong.
        #[source]
        why: RegionError,
    },
    /// A name is not acceptable.
    #[error("{0}; report a bug of the peer")]
    Name(#[source] NameError),
    /// A factor cannot be put on a card.
    #[error("the factor {name:?} is {why}; rename or shorten it")]
    Factor {
        /// Its name.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A value is out of its range.
    #[error("{field} is {value}, which is {why}; report a bug of the peer")]
    Value {
        /// Which field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What is wrong with it.
        why: &'static str,
    },
}

/// Which region of a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegionIndex {
    /// A region of blocks.
    Blocks(usize),
    /// The table of lease words.
    LeaseWords,
}

impl std::fmt::Display for RegionIndex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Blocks(index) => write!(f, "{index}"),
            Self::LeaseWords => f.write_str("of lease words"),
        }
    }
}

pub(super) fn check_size(len: usize, limits: &CardLimits) -> Result<(), CardFault> {
    if len > limits.max_bytes {
        return Err(CardFault::TooLarge {
            len,
            limit: limits.max_bytes,
        });
    }
    Ok(())
}

pub(super) fn check_even(
    regions: usize,
    list: &'static str,
    count: usize,
) -> Result<(), CardFault> {
    if regions == count {
        Ok(())
    } else {
        Err(CardFault::Uneven {
            regions,
            list,
            count,
        })
    }
}

pub(super) fn validate_regions(
    regions: &[RegionGeometry],
    limits: &CardLimits,
) -> Result<(), CardFault> {
    if regions.len() > limits.max_regions {
        return Err(CardFault::TooManyRegions {
            count: regions.len(),
            limit: limits.max_regions,
        });
    }
    for (index, region) in regions.iter().enumerate() {
        region.validate().map_err(|why| CardFault::Region {
            index: RegionIndex::Blocks(index),
            why,
        })?;
    }
    Ok(())
}

pub(super) fn validate_lease_words(words: &RegionGeometry) -> Result<(), CardFault> {
    words.validate().map_err(|why| CardFault::Region {
        index: RegionIndex::LeaseWords,
        why,
    })?;
    if words.block_len != 8 {
        return Err(CardFault::Value {
            field: "lease word length",
            value: words.block_len,
            why: "not 8 bytes",
        });
    }
    // They are read as host memory, whatever the card says.
    if words.mem != MemKind::Dram || words.device != 0 {
        return Err(CardFault::Value {
            field: "lease word device",
            value: words.device.into(),
            why: "not host memory",
        });
    }
    Ok(())
}

pub(super) fn validate_numbers(block_tokens: u32, vllm: &VllmFields) -> Result<(), CardFault> {
    for (field, value) in [
        ("block_size", block_tokens),
        (
            "physical_blocks_per_logical_kv_block",
            vllm.physical_blocks_per_logical,
        ),
        ("dcp_size", vllm.dcp_size),
        ("pcp_size", vllm.pcp_size),
    ] {
        if value == 0 {
            return Err(CardFault::Value {
                field,
                value: 0,
                why: "never zero",
            });
        }
    }
    Ok(())
}

pub(super) fn validate_incarnation(incarnation: Incarnation) -> Result<(), CardFault> {
    if incarnation.0 == 0 {
        return Err(CardFault::Value {
            field: "incarnation",
            value: 0,
            why: "never zero",
        });
    }
    Ok(())
}

pub(super) fn validate_factors(factors: &CompatFactors) -> Result<(), CardFault> {
    let pairs = factors.pairs();
    for (name, value) in &pairs {
        let twice = pairs.iter().filter(|(other, _)| other == name).count() > 1;
        let why = if twice {
            "there twice"
        } else if name.len() > MAX_FACTOR_BYTES || value.len() > MAX_FACTOR_BYTES {
            "too long"
        } else if pairs.len() > MAX_FACTORS {
            "one of too many"
        } else {
            continue;
        };
        return Err(CardFault::Factor {
            name: name.chars().take(64).collect(),
            why,
        });
    }
    Ok(())
}

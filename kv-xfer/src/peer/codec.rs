//! The handshake reply that carries a card: vLLM's two nested MessagePack maps, plus our own keys.
//!
//! ```text
//! {compatibility_hash: str, agent_metadata_bytes: bin,              as vLLM
//!  kv_xfer_checksum: bin 32, kv_xfer_compat: {factor: str, ..}, [kv_xfer_mac: bin 32]}
//! agent_metadata_bytes = {engine_id: .., agent_metadata: .., ..,    as vLLM
//!                         kv_xfer: {incarnation: .., agent: .., ..}}
//! ```
//!
//! The checksum is BLAKE3 of `agent_metadata_bytes`; the MAC covers the same bytes. Inside them a
//! digest covers the outer hash and factors, so that no byte of the reply can change unnoticed.

use rmpv::{Value, ValueRef};
use thiserror::Error;

use super::addr::PeerAddr;
use super::card::{Card, Features, PeerCard, VllmCard, VllmFields};
use super::compat::{CompatError, CompatFactors, check_compatible};
use super::msgpack::{self, Fields, Malformed, as_bin, as_text, as_u32, as_u64, map};
use crate::descriptor::ClusterKey;
use crate::ids::{AgentName, EngineId, Incarnation, NameError, Rank};
use crate::layout::{MemKind, RegionError, RegionGeometry};

const MAC_PURPOSE: &str = "kv-xfer 2026 card v1";
/// Most factors on a card, and longest name or value of one in bytes: far above what is used.
const MAX_FACTORS: usize = 64;
const MAX_FACTOR_BYTES: usize = 4096;

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

/// Encodes the reply to a request for `card`, with a MAC when there is a key.
///
/// # Errors
/// [`CardFault`] when a peer would refuse the card: an impossible region, or more than the limits
/// allow.
pub fn encode_reply(
    card: &Card,
    key: Option<&ClusterKey>,
    limits: &CardLimits,
) -> Result<Vec<u8>, CardFault> {
    validate_regions(&card.regions, limits)?;
    validate_lease_words(&card.lease_words)?;
    validate_numbers(card.compat.block_tokens, &card.vllm)?;
    let hash = card
        .compat_hash
        .clone()
        .unwrap_or_else(|| card.compat.hash());
    let factors = card.compat.pairs();
    let inner = msgpack::write(&encode_inner(card, &outer_digest(&hash, &factors)));
    let mut entries = vec![
        (Value::from("compatibility_hash"), Value::from(hash)),
        (
            Value::from("kv_xfer_checksum"),
            bin(blake3::hash(&inner).as_bytes()),
        ),
        (
            Value::from("kv_xfer_compat"),
            Value::Map(
                factors
                    .into_iter()
                    .map(|(k, v)| (k.into(), v.into()))
                    .collect(),
            ),
        ),
    ];
    if let Some(key) = key {
        entries.push((
            Value::from("kv_xfer_mac"),
            bin(&key.tag(MAC_PURPOSE, &[&inner])),
        ));
    }
    entries.push((Value::from("agent_metadata_bytes"), Value::Binary(inner)));
    let reply = msgpack::write(&Value::Map(entries));
    check_size(reply.len(), limits)?;
    Ok(reply)
}

/// Decodes and checks a reply, in the order: size, outer map, checksum, MAC, compatibility, inner
/// map, every field.
///
/// # Errors
/// [`CardError`] naming the peer and the first fault.
pub fn decode_reply(
    peer: &PeerAddr,
    reply: &[u8],
    policy: &CardPolicy,
) -> Result<PeerCard, CardError> {
    decode(reply, policy).map_err(|fault| CardError {
        peer: peer.clone(),
        fault,
    })
}

fn decode(reply: &[u8], policy: &CardPolicy) -> Result<PeerCard, CardFault> {
    check_size(reply.len(), &policy.limits)?;
    let outer = |why| CardFault::Malformed { part: "reply", why };
    let value = msgpack::parse(reply).map_err(outer)?;
    let fields = Fields::of(&value).map_err(outer)?;
    let hash = fields.text("compatibility_hash").map_err(outer)?;
    let inner = fields.bin("agent_metadata_bytes").map_err(outer)?;

    if fields.opt("kv_xfer_checksum").is_none() {
        if !policy.allow_unchecked {
            return Err(CardFault::Unchecked);
        }
        return decode_vllm(hash, inner, policy).map(|card| PeerCard::Vllm(Box::new(card)));
    }
    let checksum = fields.bin32("kv_xfer_checksum").map_err(outer)?;
    if blake3::hash(inner) != checksum {
        return Err(CardFault::Checksum);
    }
    if let Some(key) = &policy.key {
        let mac = fields.opt("kv_xfer_mac").ok_or(CardFault::MacMissing)?;
        if !as_bin(mac).is_some_and(|mac| key.verify_bytes(MAC_PURPOSE, &[inner], mac)) {
            return Err(CardFault::Mac);
        }
    }
    let factors = decode_factors(fields.get("kv_xfer_compat").map_err(outer)?)?;
    if let Some(own) = &policy.factors {
        check_compatible(own, &factors).map_err(CardFault::Incompatible)?;
    }
    decode_card(hash, factors, inner, policy).map(|card| PeerCard::KvXfer(Box::new(card)))
}

fn check_size(len: usize, limits: &CardLimits) -> Result<(), CardFault> {
    if len > limits.max_bytes {
        return Err(CardFault::TooLarge {
            len,
            limit: limits.max_bytes,
        });
    }
    Ok(())
}

fn bin(bytes: &[u8]) -> Value {
    Value::Binary(bytes.to_vec())
}

/// Digest of what lies outside the checksummed bytes.
fn outer_digest(hash: &str, factors: &[(&str, String)]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    let parts = factors
        .iter()
        .flat_map(|(name, value)| [*name, value.as_str()]);
    for part in std::iter::once(hash).chain(parts) {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    hasher.finalize().into()
}

fn encode_inner(card: &Card, outer_digest: &[u8; 32]) -> Value {
    let numbers = |read: fn(&RegionGeometry) -> u64| -> Value {
        Value::Array(card.regions.iter().map(|r| read(r).into()).collect())
    };
    let blocks = card
        .regions
        .iter()
        .map(|r| r.block_count)
        .max()
        .unwrap_or(0);
    let region_blocks = if card.regions.iter().all(|r| r.block_count == blocks) {
        Value::Nil
    } else {
        numbers(|r| r.block_count.into())
    };
    let mem_types = card
        .regions
        .iter()
        .map(|r| Value::from(r.mem.to_string()))
        .collect();
    let device = card.regions.first().map_or(0, |r| r.device);
    let region_devices = if card.regions.iter().all(|r| r.device == device) {
        Value::Nil
    } else {
        numbers(|r| r.device.into())
    };
    let words = &card.lease_words;
    let ours = map([
        ("protocol", card.compat.protocol.into()),
        ("incarnation", card.incarnation.0.into()),
        ("pp", card.rank.pp.into()),
        ("tp", card.rank.tp.into()),
        ("agent", card.agent.as_str().into()),
        ("layout", bin(&card.layout)),
        (
            "lease_words",
            Value::Array(vec![
                words.base.into(),
                words.block_len.into(),
                words.block_stride.into(),
                words.block_count.into(),
                words.mem.to_string().into(),
                words.device.into(),
            ]),
        ),
        ("region_devices", region_devices),
        (
            "features",
            Value::Array(card.features.iter().map(|f| f.name().into()).collect()),
        ),
        ("outer_digest", bin(outer_digest)),
    ]);
    let vllm = &card.vllm;
    map([
        ("engine_id", card.engine_id.as_str().into()),
        ("agent_metadata", bin(&card.nixl_metadata)),
        ("kv_caches_base_addr", numbers(|r| r.base)),
        ("device_id", device.into()),
        ("num_blocks", blocks.into()),
        ("block_lens", numbers(|r| r.block_len)),
        ("block_strides", numbers(|r| r.block_stride)),
        ("kv_cache_layout", vllm.kv_cache_layout.as_str().into()),
        ("block_size", card.compat.block_tokens.into()),
        (
            "ssm_sizes",
            Value::Array(vllm.ssm_sizes.iter().map(|s| (*s).into()).collect()),
        ),
        ("attn_backend_name", vllm.attn_backend_name.as_str().into()),
        (
            "physical_blocks_per_logical_kv_block",
            vllm.physical_blocks_per_logical.into(),
        ),
        ("region_num_blocks", region_blocks),
        ("region_mem_types", Value::Array(mem_types)),
        ("dcp_size", vllm.dcp_size.into()),
        ("pcp_size", vllm.pcp_size.into()),
        ("kv_xfer", ours),
    ])
}

fn decode_factors(value: &ValueRef<'_>) -> Result<CompatFactors, CardFault> {
    let bad = |why| CardFault::Malformed {
        part: "kv_xfer_compat map",
        why,
    };
    let fields = Fields::of(value).map_err(bad)?;
    let mut extra = std::collections::BTreeMap::new();
    for (name, value) in fields.iter() {
        let short = |text: &&str| text.len() <= MAX_FACTOR_BYTES;
        let value = as_text(value).filter(short).ok_or(bad(msgpack::wrong(
            "kv_xfer_compat",
            "a map of short texts",
        )))?;
        if extra.len() >= MAX_FACTORS || !short(&name) {
            return Err(bad(msgpack::wrong("kv_xfer_compat", "a small map")));
        }
        extra.insert(name.to_owned(), value.to_owned());
    }
    let mut take = |name: &'static str| extra.remove(name).ok_or(bad(Malformed::Missing(name)));
    let number = |name: &'static str, text: String| {
        text.parse::<u32>()
            .map_err(|_| bad(msgpack::wrong(name, "a decimal number")))
    };
    let fingerprint = take("layout_fingerprint")?;
    Ok(CompatFactors {
        protocol: number("protocol", take("protocol")?)?,
        block_tokens: number("block_tokens", take("block_tokens")?)?,
        model: take("model")?,
        dtype: take("dtype")?,
        layout_fingerprint: unhex(&fingerprint)
            .ok_or(bad(msgpack::wrong("layout_fingerprint", "64 hex digits")))?,
        extra,
    })
}

fn unhex(text: &str) -> Option<[u8; 32]> {
    blake3::Hash::from_hex(text)
        .ok()
        .map(|hash| *hash.as_bytes())
}

fn inner_fault(why: Malformed) -> CardFault {
    CardFault::Malformed {
        part: "metadata map",
        why,
    }
}

fn decode_card(
    hash: &str,
    compat: CompatFactors,
    inner: &[u8],
    policy: &CardPolicy,
) -> Result<Card, CardFault> {
    let value = msgpack::parse(inner).map_err(inner_fault)?;
    let fields = Fields::of(&value).map_err(inner_fault)?;
    let base = decode_base(hash, &fields, policy)?;
    let ours_fault = |why| CardFault::Malformed {
        part: "kv_xfer map",
        why,
    };
    let ours = Fields::of(fields.get("kv_xfer").map_err(inner_fault)?).map_err(ours_fault)?;
    let digest = ours.bin32("outer_digest").map_err(ours_fault)?;
    // Constant time is not needed: the digest is no secret.
    if digest != outer_digest(hash, &compat.pairs()) {
        return Err(CardFault::OuterAltered);
    }
    let inner_tokens = base.block_tokens;
    if inner_tokens != compat.block_tokens {
        return Err(CardFault::Value {
            field: "block_size",
            value: inner_tokens.into(),
            why: "not the block_tokens of the factors",
        });
    }
    let incarnation = ours.u64("incarnation").map_err(ours_fault)?;
    if incarnation == 0 {
        return Err(CardFault::Value {
            field: "incarnation",
            value: 0,
            why: "never zero",
        });
    }
    let rank = Rank {
        pp: ours.u32("pp").map_err(ours_fault)?,
        tp: ours.u32("tp").map_err(ours_fault)?,
    };
    if let Some(expected) = policy.expect_rank.filter(|expected| *expected != rank) {
        return Err(CardFault::WrongRank {
            expected,
            found: rank,
        });
    }
    let mut regions = base.regions;
    let devices = ours
        .list("region_devices", "an array of device indices", as_u32)
        .map_err(ours_fault)?;
    if let Some(devices) = devices {
        check_even(regions.len(), "region_devices", devices.len())?;
        for (region, device) in regions.iter_mut().zip(devices) {
            region.device = device;
        }
    }
    let words = ours.array("lease_words").map_err(ours_fault)?;
    let lease_words = decode_region(words).ok_or(ours_fault(msgpack::wrong(
        "lease_words",
        "a region of six fields",
    )))?;
    validate_lease_words(&lease_words)?;
    let features = ours
        .list("features", "an array of texts", as_text)
        .map_err(ours_fault)?
        .unwrap_or_default();
    Ok(Card {
        engine_id: base.engine_id,
        incarnation: Incarnation(incarnation),
        rank,
        agent: AgentName::new(ours.text("agent").map_err(ours_fault)?).map_err(CardFault::Name)?,
        nixl_metadata: base.nixl_metadata,
        regions,
        layout: ours.bin("layout").map_err(ours_fault)?.to_vec(),
        lease_words,
        compat_hash: (hash != compat.hash()).then(|| hash.to_owned()),
        compat,
        features: Features::from_names(features.into_iter()),
        vllm: base.vllm,
    })
}

fn decode_vllm(hash: &str, inner: &[u8], policy: &CardPolicy) -> Result<VllmCard, CardFault> {
    if let Some(own) = policy.vllm_hash.as_ref().filter(|own| *own != hash) {
        return Err(CardFault::Incompatible(CompatError::Hash {
            own: own.clone(),
            theirs: hash.chars().take(64).collect(),
        }));
    }
    let value = msgpack::parse(inner).map_err(inner_fault)?;
    let fields = Fields::of(&value).map_err(inner_fault)?;
    if fields.opt("kv_xfer").is_some() {
        return Err(CardFault::ChecksumStripped);
    }
    decode_base(hash, &fields, policy)
}

/// Decodes the part that vLLM's map and ours share.
fn decode_base(
    hash: &str,
    fields: &Fields<'_, '_>,
    policy: &CardPolicy,
) -> Result<VllmCard, CardFault> {
    let engine_id =
        EngineId::new(fields.text("engine_id").map_err(inner_fault)?).map_err(CardFault::Name)?;
    if let Some(expected) = policy.expect_engine.as_ref().filter(|e| **e != engine_id) {
        return Err(CardFault::WrongEngine {
            expected: expected.clone(),
            found: engine_id,
        });
    }
    let (regions, mem_known) = decode_regions(fields, &policy.limits)?;
    let ssm = fields
        .list("ssm_sizes", "two numbers", as_u64)
        .map_err(inner_fault)?
        .ok_or(inner_fault(Malformed::Missing("ssm_sizes")))?;
    let vllm = VllmFields {
        kv_cache_layout: fields
            .text("kv_cache_layout")
            .map_err(inner_fault)?
            .to_owned(),
        attn_backend_name: fields
            .text("attn_backend_name")
            .map_err(inner_fault)?
            .to_owned(),
        ssm_sizes: ssm
            .try_into()
            .map_err(|_| inner_fault(msgpack::wrong("ssm_sizes", "two numbers")))?,
        physical_blocks_per_logical: fields
            .u32("physical_blocks_per_logical_kv_block")
            .map_err(inner_fault)?,
        dcp_size: fields.u32_or("dcp_size", 1).map_err(inner_fault)?,
        pcp_size: fields.u32_or("pcp_size", 1).map_err(inner_fault)?,
    };
    let block_tokens = fields.u32("block_size").map_err(inner_fault)?;
    validate_numbers(block_tokens, &vllm)?;
    let region_names = fields
        .list("region_names", "an array of texts", |v| {
            as_text(v).map(str::to_owned)
        })
        .map_err(inner_fault)?;
    if let Some(names) = &region_names {
        check_even(regions.len(), "region_names", names.len())?;
    }
    Ok(VllmCard {
        engine_id,
        nixl_metadata: fields.bin("agent_metadata").map_err(inner_fault)?.to_vec(),
        regions,
        mem_known,
        region_names,
        block_tokens,
        compat_hash: hash.to_owned(),
        vllm,
    })
}

fn decode_regions(
    fields: &Fields<'_, '_>,
    limits: &CardLimits,
) -> Result<(Vec<RegionGeometry>, bool), CardFault> {
    let bases = fields.array("kv_caches_base_addr").map_err(inner_fault)?;
    let count = bases.len();
    if count > limits.max_regions {
        return Err(CardFault::TooManyRegions {
            count,
            limit: limits.max_regions,
        });
    }
    let numbers = |key| -> Result<Vec<u64>, CardFault> {
        let list = fields
            .list(key, "an array of unsigned numbers", as_u64)
            .map_err(inner_fault)?
            .ok_or(inner_fault(Malformed::Missing(key)))?;
        check_even(count, key, list.len())?;
        Ok(list)
    };
    let bases = numbers("kv_caches_base_addr")?;
    let lens = numbers("block_lens")?;
    let strides = numbers("block_strides")?;
    let num_blocks = fields.u32("num_blocks").map_err(inner_fault)?;
    let device = fields.u32("device_id").map_err(inner_fault)?;
    let blocks = fields
        .list("region_num_blocks", "an array of block counts", as_u32)
        .map_err(inner_fault)?;
    let mems = fields
        .list("region_mem_types", "an array of VRAM or DRAM", as_mem)
        .map_err(inner_fault)?;
    for (list, len) in [
        ("region_num_blocks", blocks.as_ref().map(Vec::len)),
        ("region_mem_types", mems.as_ref().map(Vec::len)),
    ] {
        check_even(count, list, len.unwrap_or(count))?;
    }
    let mem_known = mems.is_some();
    let mut blocks = blocks
        .unwrap_or_else(|| vec![num_blocks; count])
        .into_iter();
    let mut mems = mems
        .unwrap_or_else(|| vec![MemKind::Vram; count])
        .into_iter();
    let regions: Vec<_> = bases
        .into_iter()
        .zip(lens)
        .zip(strides)
        .map_while(|((base, block_len), block_stride)| {
            Some(RegionGeometry {
                base,
                block_len,
                block_stride,
                block_count: blocks.next()?,
                mem: mems.next()?,
                device,
            })
        })
        .collect();
    validate_regions(&regions, limits)?;
    Ok((regions, mem_known))
}

fn as_mem(value: &ValueRef<'_>) -> Option<MemKind> {
    match as_text(value)? {
        "DRAM" => Some(MemKind::Dram),
        "VRAM" => Some(MemKind::Vram),
        _ => None,
    }
}

fn decode_region(fields: &[ValueRef<'_>]) -> Option<RegionGeometry> {
    let [base, block_len, block_stride, block_count, mem, device] = fields else {
        return None;
    };
    Some(RegionGeometry {
        base: as_u64(base)?,
        block_len: as_u64(block_len)?,
        block_stride: as_u64(block_stride)?,
        block_count: as_u32(block_count)?,
        mem: as_mem(mem)?,
        device: as_u32(device)?,
    })
}

fn check_even(regions: usize, list: &'static str, count: usize) -> Result<(), CardFault> {
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

fn validate_regions(regions: &[RegionGeometry], limits: &CardLimits) -> Result<(), CardFault> {
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

fn validate_lease_words(words: &RegionGeometry) -> Result<(), CardFault> {
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
    Ok(())
}

fn validate_numbers(block_tokens: u32, vllm: &VllmFields) -> Result<(), CardFault> {
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

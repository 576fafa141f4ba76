//! Decoding of the handshake reply that carries a card: vLLM's two nested MessagePack maps, plus our own keys.
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

use std::collections::BTreeMap;

use rmpv::ValueRef;

use super::addr::PeerAddr;
use super::card::{Card, Features, PROTOCOL_VERSION, PeerCard, VllmCard, VllmFields};
use super::card_policy::{
    CardError, CardFault, CardLimits, CardPolicy, MAX_FACTOR_BYTES, MAX_FACTORS, check_even,
    check_size, validate_incarnation, validate_lease_words, validate_numbers, validate_regions,
};
use super::compat::{CompatError, CompatFactors, check_compatible};
use super::encode::{MAC_PURPOSE, outer_digest};
use super::msgpack::{self, Fields, Malformed, as_bin, as_text, as_u32, as_u64};
use crate::ids::{AgentName, EngineId, Incarnation, Rank};
use crate::layout::{MemKind, RegionGeometry};

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
    if factors.protocol != PROTOCOL_VERSION {
        return Err(CardFault::Incompatible(CompatError::Factor {
            factor: "protocol".to_owned(),
            own: PROTOCOL_VERSION.to_string(),
            theirs: factors.protocol.to_string(),
        }));
    }
    if let Some(own) = &policy.factors {
        check_compatible(own, &factors).map_err(CardFault::Incompatible)?;
    }
    decode_card(hash, factors, inner, policy).map(|card| PeerCard::KvXfer(Box::new(card)))
}

fn decode_factors(value: &ValueRef<'_>) -> Result<CompatFactors, CardFault> {
    let bad = |why| CardFault::Malformed {
        part: "kv_xfer_compat map",
        why,
    };
    let fields = Fields::of(value).map_err(bad)?;
    let mut extra = BTreeMap::new();
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
    let factors = CompatFactors {
        protocol: number("protocol", take("protocol")?)?,
        block_tokens: number("block_tokens", take("block_tokens")?)?,
        model: take("model")?,
        dtype: take("dtype")?,
        layout_fingerprint: unhex(&fingerprint)
            .ok_or(bad(msgpack::wrong("layout_fingerprint", "64 hex digits")))?,
        extra,
    };
    // Only the form that the peer's digest covers: no capital hex digits, no leading zeros.
    let as_sent = |(name, value): (&str, String)| {
        fields
            .iter()
            .any(|(n, v)| n == name && as_text(v) == Some(value.as_str()))
    };
    if factors.pairs().into_iter().all(as_sent) {
        Ok(factors)
    } else {
        Err(CardFault::OuterAltered)
    }
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
    let incarnation = Incarnation(ours.u64("incarnation").map_err(ours_fault)?);
    validate_incarnation(incarnation)?;
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
        incarnation,
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
            let mem = mems.next()?;
            Some(RegionGeometry {
                base,
                block_len,
                block_stride,
                block_count: blocks.next()?,
                mem,
                // vLLM writes its GPU's index here also where a region lies in host memory.
                device: if mem == MemKind::Dram { 0 } else { device },
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

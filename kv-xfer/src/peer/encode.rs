//! Encoding of the handshake reply.

use rmpv::Value;

use super::card::Card;
use super::card_policy::{
    CardFault, CardLimits, check_size, validate_factors, validate_incarnation,
    validate_lease_words, validate_numbers, validate_regions,
};
use super::msgpack::{self, map};
use crate::descriptor::ClusterKey;
use crate::layout::{MemKind, RegionGeometry};

pub(super) const MAC_PURPOSE: &str = "kv-xfer 2026 card v1";

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
    validate_incarnation(card.incarnation)?;
    validate_factors(&card.compat)?;
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

fn bin(bytes: &[u8]) -> Value {
    Value::Binary(bytes.to_vec())
}

/// Digest of what lies outside the checksummed bytes.
pub(super) fn outer_digest(hash: &str, factors: &[(&str, String)]) -> [u8; 32] {
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
    let vram = card.regions.iter().find(|r| r.mem == MemKind::Vram);
    let device = vram.map_or(0, |r| r.device);
    let usual = |r: &RegionGeometry| match r.mem {
        MemKind::Vram => r.device == device,
        _ => r.device == 0,
    };
    let region_devices = if card.regions.iter().all(usual) {
        Value::Nil
    } else {
        numbers(|r| r.device.into())
    };
    let words = &card.lease_words;
    let ours = map([
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

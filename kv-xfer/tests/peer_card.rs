//! Cards over their codec: everything comes back, nothing damaged is accepted.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use kv_xfer::descriptor::ClusterKey;
use kv_xfer::ids::{AgentName, EngineId, Incarnation, Rank};
use kv_xfer::layout::{MemKind, RegionGeometry};
use kv_xfer::peer::{
    Card, CardFault, CardLimits, CardPolicy, CompatError, CompatFactors, Features,
    PROTOCOL_VERSION, PeerAddr, PeerCard, VllmFields, decode_reply, encode_reply,
};
use proptest::prelude::*;
use rmpv::Value;

fn region(i: u64) -> RegionGeometry {
    RegionGeometry {
        base: 0x7f00_0000_0000 + i * 0x1000_0000,
        block_len: 32_768,
        block_stride: 65_536,
        block_count: 1000,
        mem: MemKind::Vram,
        device: 3,
    }
}

fn factors() -> CompatFactors {
    CompatFactors {
        protocol: PROTOCOL_VERSION,
        model: "org/model".into(),
        dtype: "bfloat16".into(),
        block_tokens: 16,
        layout_fingerprint: [0xa5; 32],
        extra: [("heads", "8"), ("mode", "pull")]
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .into(),
    }
}

fn card() -> Card {
    Card {
        engine_id: EngineId::new("decode-0").unwrap(),
        incarnation: Incarnation(0xdead_beef_0000_0001),
        rank: Rank { pp: 0, tp: 3 },
        agent: AgentName::new("decode-0/serve/3").unwrap(),
        nixl_metadata: (0..200).collect(),
        regions: (0..4).map(region).collect(),
        layout: vec![1, 2, 3],
        lease_words: RegionGeometry {
            base: 0x5000,
            block_len: 8,
            block_stride: 8,
            block_count: 4096,
            mem: MemKind::Dram,
            device: 0,
        },
        compat: factors(),
        compat_hash: None,
        features: Features::all(),
        vllm: VllmFields::default(),
    }
}

fn peer() -> PeerAddr {
    "[::1]:5600".parse().unwrap()
}

fn encode(card: &Card, key: Option<&ClusterKey>) -> Vec<u8> {
    encode_reply(card, key, &CardLimits::default()).unwrap()
}

fn decode(reply: &[u8], policy: &CardPolicy) -> Result<Card, CardFault> {
    match decode_reply(&peer(), reply, policy) {
        Ok(PeerCard::KvXfer(card)) => Ok(*card),
        Ok(other) => panic!("{other:?}"),
        Err(error) => {
            assert!(error.to_string().contains("[::1]:5600"), "{error}");
            Err(error.fault)
        }
    }
}

fn strict() -> CardPolicy {
    CardPolicy {
        factors: Some(factors()),
        expect_engine: Some(EngineId::new("decode-0").unwrap()),
        expect_rank: Some(Rank { pp: 0, tp: 3 }),
        ..CardPolicy::default()
    }
}

/// What vLLM 0.29.0 sends: two maps without any key of ours.
fn vllm_reply(change: impl FnOnce(&mut Vec<(Value, Value)>)) -> Vec<u8> {
    let arr = |v: &[u64]| Value::Array(v.iter().map(|x| (*x).into()).collect());
    let mut inner: Vec<(Value, Value)> = vec![
        ("engine_id".into(), "vllm-1".into()),
        ("agent_metadata".into(), Value::Binary(vec![9; 50])),
        ("kv_caches_base_addr".into(), arr(&[4096, 1 << 40])),
        ("device_id".into(), 2.into()),
        ("num_blocks".into(), 100.into()),
        ("block_lens".into(), arr(&[512, 512])),
        ("block_strides".into(), arr(&[512, 1024])),
        ("kv_cache_layout".into(), "LBHNC".into()),
        ("block_size".into(), 16.into()),
        ("ssm_sizes".into(), arr(&[0, 0])),
        ("attn_backend_name".into(), "FLASH_ATTN".into()),
        ("physical_blocks_per_logical_kv_block".into(), 1.into()),
        ("dcp_size".into(), 1.into()),
        ("pcp_size".into(), 1.into()),
    ];
    change(&mut inner);
    let bytes = pack(&Value::Map(inner));
    pack(&Value::Map(vec![
        ("compatibility_hash".into(), "ab".repeat(32).into()),
        ("agent_metadata_bytes".into(), Value::Binary(bytes)),
    ]))
}

fn pack(value: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    rmpv::encode::write_value(&mut out, value).unwrap();
    out
}

fn set(entries: &mut Vec<(Value, Value)>, key: &str, value: Value) {
    entries.retain(|(k, _)| k.as_str() != Some(key));
    entries.push((key.into(), value));
}

/// Changes the outer map of a reply.
fn reseal(reply: &[u8], change: impl FnOnce(&mut Vec<(Value, Value)>)) -> Vec<u8> {
    let Value::Map(mut outer) = rmpv::decode::read_value(&mut &reply[..]).unwrap() else {
        panic!("no map");
    };
    change(&mut outer);
    pack(&Value::Map(outer))
}

/// Changes the inner map of a reply and makes its checksum right again, as a faulty peer would.
fn reseal_inner(card: &Card, change: impl FnOnce(&mut Vec<(Value, Value)>)) -> Vec<u8> {
    reseal(&encode(card, None), |outer| {
        let old = outer
            .iter()
            .find(|(k, _)| k.as_str() == Some("agent_metadata_bytes"))
            .unwrap();
        let bytes = old.1.as_slice().unwrap().to_vec();
        let inner = reseal(&bytes, change);
        let sum = blake3::hash(&inner).as_bytes().to_vec();
        set(outer, "kv_xfer_checksum", Value::Binary(sum));
        set(outer, "agent_metadata_bytes", Value::Binary(inner));
    })
}

#[test]
fn a_card_comes_back() {
    let card = card();
    assert_eq!(decode(&encode(&card, None), &strict()), Ok(card.clone()));
    // Another hash to match a vLLM peer, uneven regions, host memory, several devices, no regions.
    let mut odd = card.clone();
    odd.compat_hash = Some("cd".repeat(32));
    odd.regions[1].block_count = 7;
    odd.regions[2].mem = MemKind::Dram;
    odd.regions[2].device = 0;
    odd.features = Features::NONE;
    assert_eq!(decode(&encode(&odd, None), &strict()), Ok(odd.clone()));
    odd.regions[3].device = 5;
    assert_eq!(decode(&encode(&odd, None), &strict()), Ok(odd.clone()));
    odd.regions.clear();
    assert_eq!(decode(&encode(&odd, None), &strict()), Ok(odd));
}

#[test]
fn first_contact_stays_small_and_fast() {
    let mut card = card();
    card.regions = (0..64)
        .map(|i| RegionGeometry {
            block_count: 100_000,
            ..region(i * 100)
        })
        .collect();
    let reply = encode(&card, None);
    assert!(reply.len() < 8192, "{} bytes", reply.len());
    let start = std::time::Instant::now();
    assert_eq!(decode(&reply, &strict()), Ok(card));
    assert!(start.elapsed().as_millis() < 50);
}

#[test]
fn vllm_finds_its_fields() {
    let reply = encode(&card(), None);
    let Value::Map(outer) = rmpv::decode::read_value(&mut &reply[..]).unwrap() else {
        panic!()
    };
    let hash = outer
        .iter()
        .find(|(k, _)| k.as_str() == Some("compatibility_hash"))
        .unwrap();
    assert_eq!(hash.1.as_str(), Some(factors().hash().as_str()));
    // As a vLLM reader would, skipping what it does not know: strip our keys and decode.
    let stripped = reseal(&reply, |outer| {
        outer.retain(|(k, _)| !k.as_str().unwrap().starts_with("kv_xfer"));
        let (_, bytes) = outer
            .iter()
            .find(|(k, _)| k.as_str() == Some("agent_metadata_bytes"))
            .unwrap();
        let inner = reseal(bytes.as_slice().unwrap(), |inner| {
            inner.retain(|(k, _)| k.as_str() != Some("kv_xfer"));
        });
        set(outer, "agent_metadata_bytes", Value::Binary(inner));
    });
    let open = CardPolicy {
        allow_unchecked: true,
        ..CardPolicy::default()
    };
    let Ok(PeerCard::Vllm(seen)) = decode_reply(&peer(), &stripped, &open) else {
        panic!()
    };
    assert_eq!(seen.regions, card().regions);
    assert_eq!(seen.block_tokens, 16);
    assert_eq!(seen.nixl_metadata, card().nixl_metadata);
}

#[test]
fn vllm_cards_need_to_be_allowed() {
    let reply = vllm_reply(|_| {});
    assert_eq!(
        decode_reply(&peer(), &reply, &CardPolicy::default())
            .unwrap_err()
            .fault,
        CardFault::Unchecked
    );
    let mut policy = CardPolicy {
        allow_unchecked: true,
        ..CardPolicy::default()
    };
    let Ok(PeerCard::Vllm(card)) = decode_reply(&peer(), &reply, &policy) else {
        panic!()
    };
    assert_eq!(card.engine_id.as_str(), "vllm-1");
    assert_eq!(card.regions.len(), 2);
    assert_eq!(card.regions[1].block_stride, 1024);
    assert_eq!(card.regions[1].device, 2);
    assert_eq!(card.regions[1].block_count, 100);
    assert!(!card.mem_known);
    assert_eq!(PeerCard::Vllm(card).features(), Features::NONE);
    // 0.33.0: nil where it has nothing to say, and keys of a later version.
    let reply = vllm_reply(|inner| {
        let mems = vec!["DRAM".into(), "VRAM".into()];
        set(inner, "region_mem_types", Value::Array(mems));
        set(
            inner,
            "region_num_blocks",
            Value::Array(vec![5.into(), 6.into()]),
        );
        set(inner, "region_names", Value::Nil);
        set(inner, "packed_member_layouts", Value::Map(vec![]));
        set(
            inner,
            "of_a_later_version",
            Value::Array(vec![Value::F64(0.5)]),
        );
    });
    let Ok(PeerCard::Vllm(card)) = decode_reply(&peer(), &reply, &policy) else {
        panic!()
    };
    assert!(card.mem_known);
    assert_eq!(
        (card.regions[0].mem, card.regions[0].device),
        (MemKind::Dram, 0)
    );
    assert_eq!(card.regions[1].block_count, 6);
    // Its hash is compared before its metadata is looked at.
    policy.vllm_hash = Some("cd".repeat(32));
    let fuzz = reseal(&vllm_reply(|_| {}), |outer| {
        set(outer, "agent_metadata_bytes", Value::Binary(vec![0xc1; 99]));
    });
    assert!(matches!(
        decode_reply(&peer(), &fuzz, &policy).unwrap_err().fault,
        CardFault::Incompatible(CompatError::Hash { .. })
    ));
}

#[test]
fn every_flipped_bit_and_every_cut_is_refused() {
    let key = cluster_key(b"k-0123456789abcdef");
    for key in [None, Some(key)] {
        let reply = encode(&card(), key.as_ref());
        // Also where unchecked cards are allowed: damage does not turn a card into a vLLM one.
        for allow_unchecked in [false, true] {
            let policy = CardPolicy {
                key: key.clone(),
                allow_unchecked,
                ..CardPolicy::default()
            };
            assert!(decode(&reply, &policy).is_ok());
            for cut in 0..reply.len() {
                assert!(decode(&reply[..cut], &policy).is_err(), "cut at {cut}");
            }
            for at in 0..reply.len() {
                for bit in 0..8 {
                    let mut bad = reply.clone();
                    bad[at] ^= 1 << bit;
                    let got = decode_reply(&peer(), &bad, &policy);
                    assert!(got.is_err(), "bit {bit} of byte {at}: {got:?}");
                }
            }
            let longer = [reply.as_slice(), &[0]].concat();
            assert!(decode(&longer, &policy).is_err());
        }
    }
}

#[test]
fn macs_are_required_where_a_key_is_set() {
    let key = cluster_key(b"cluster-0123456789abcdef");
    let with = |key: &ClusterKey| CardPolicy {
        key: Some(key.clone()),
        ..strict()
    };
    let plain = encode(&card(), None);
    let signed = encode(&card(), Some(&key));
    assert!(decode(&signed, &with(&key)).is_ok());
    assert!(decode(&signed, &strict()).is_ok());
    assert_eq!(decode(&plain, &with(&key)), Err(CardFault::MacMissing));
    let other = cluster_key(b"other-0123456789abcdef");
    assert_eq!(decode(&signed, &with(&other)), Err(CardFault::Mac));
    // A checksum made right by who has no key does not help.
    let forged = reseal(&signed, |outer| {
        let inner = vec![0x80];
        let sum = blake3::hash(&inner).as_bytes().to_vec();
        set(outer, "kv_xfer_checksum", Value::Binary(sum));
        set(outer, "agent_metadata_bytes", Value::Binary(inner));
    });
    assert_eq!(decode(&forged, &with(&key)), Err(CardFault::Mac));
}

#[test]
fn incompatible_cards_are_refused_before_they_are_parsed() {
    let mut other = card();
    other.compat.dtype = "float8".into();
    // The payload is noise with a right checksum: parsing it would be another error.
    let noise = reseal(&encode(&other, None), |outer| {
        let inner = vec![0xc1; 500];
        let sum = blake3::hash(&inner).as_bytes().to_vec();
        set(outer, "kv_xfer_checksum", Value::Binary(sum));
        set(outer, "agent_metadata_bytes", Value::Binary(inner));
    });
    assert_eq!(
        decode(&noise, &strict()),
        Err(CardFault::Incompatible(CompatError::Factor {
            factor: "dtype".into(),
            own: "bfloat16".into(),
            theirs: "float8".into(),
        }))
    );
    let mut newer = card();
    newer.compat.protocol = PROTOCOL_VERSION + 1;
    let anything = CardPolicy::default();
    assert!(matches!(
        decode(&encode(&newer, None), &anything),
        Err(CardFault::Incompatible(CompatError::Factor { factor, .. })) if factor == "protocol"
    ));
    // Parallel size and block count are no reason to refuse.
    let mut sizes = card();
    sizes.rank = Rank { pp: 1, tp: 7 };
    sizes.regions.truncate(2);
    let any_rank = CardPolicy {
        expect_rank: None,
        ..strict()
    };
    assert!(decode(&encode(&sizes, None), &any_rank).is_ok());
}

#[test]
fn outer_fields_cannot_be_exchanged() {
    let altered = reseal(&encode(&card(), None), |outer| {
        set(outer, "compatibility_hash", "00".repeat(32).into());
    });
    assert_eq!(decode(&altered, &strict()), Err(CardFault::OuterAltered));
    let stripped = reseal(&encode(&card(), None), |outer| {
        outer.retain(|(k, _)| k.as_str() != Some("kv_xfer_checksum"));
    });
    let open = CardPolicy {
        allow_unchecked: true,
        ..strict()
    };
    assert!(matches!(
        decode_reply(&peer(), &stripped, &open).unwrap_err().fault,
        CardFault::ChecksumStripped
    ));
    // Keys that nobody knows change nothing.
    let more = reseal(&encode(&card(), None), |outer| {
        set(outer, "of_a_later_version", Value::Nil);
    });
    assert_eq!(decode(&more, &strict()), Ok(card()));
}

#[test]
fn every_field_of_a_well_sealed_card_is_checked() {
    type Change = fn(&mut Vec<(Value, Value)>);
    fn kv_xfer(inner: &mut [(Value, Value)], key: &str, value: Value) {
        let (_, ours) = inner
            .iter_mut()
            .find(|(k, _)| k.as_str() == Some("kv_xfer"))
            .unwrap();
        let Value::Map(ours) = ours else { panic!() };
        set(ours, key, value);
    }
    let changes: [(&str, Change); 26] = [
        ("no engine id", |m| {
            m.retain(|(k, _)| k.as_str() != Some("engine_id"))
        }),
        ("empty engine id", |m| set(m, "engine_id", "".into())),
        ("NUL in engine id", |m| set(m, "engine_id", "a\0b".into())),
        ("long engine id", |m| {
            set(m, "engine_id", "a".repeat(4096).into())
        }),
        ("other engine", |m| set(m, "engine_id", "decode-1".into())),
        ("engine id as bytes", |m| {
            set(m, "engine_id", Value::Binary(b"decode-0".to_vec()))
        }),
        ("metadata as text", |m| {
            set(m, "agent_metadata", "abc".into())
        }),
        ("a base too few", |m| {
            set(m, "kv_caches_base_addr", Value::Array(vec![0.into(); 3]));
        }),
        ("a length too many", |m| {
            set(m, "block_lens", Value::Array(vec![1.into(); 5]))
        }),
        ("a negative length", |m| {
            set(m, "block_lens", Value::Array(vec![(-1).into(); 4]))
        }),
        ("a zero length", |m| {
            set(m, "block_lens", Value::Array(vec![0.into(); 4]))
        }),
        ("a float stride", |m| {
            set(m, "block_strides", Value::Array(vec![Value::F64(1.0); 4]));
        }),
        ("stride below length", |m| {
            set(m, "block_strides", Value::Array(vec![1.into(); 4]))
        }),
        ("a region that wraps", |m| {
            set(
                m,
                "kv_caches_base_addr",
                Value::Array(vec![u64::MAX.into(); 4]),
            );
        }),
        ("no blocks", |m| set(m, "num_blocks", 0.into())),
        ("too many blocks", |m| {
            set(m, "num_blocks", (1_u64 << 32).into())
        }),
        ("no block tokens", |m| set(m, "block_size", 0.into())),
        ("other block tokens", |m| set(m, "block_size", 32.into())),
        ("unknown memory", |m| {
            set(m, "region_mem_types", Value::Array(vec!["FILE".into(); 4]));
        }),
        ("uneven names", |m| {
            set(m, "region_names", Value::Array(vec!["x".into()]))
        }),
        ("three ssm sizes", |m| {
            set(m, "ssm_sizes", Value::Array(vec![0.into(); 3]))
        }),
        ("no incarnation", |m| kv_xfer(m, "incarnation", 0.into())),
        ("other rank", |m| kv_xfer(m, "tp", 2.into())),
        ("empty agent", |m| kv_xfer(m, "agent", "".into())),
        ("uneven devices", |m| {
            kv_xfer(m, "region_devices", Value::Array(vec![1.into()]))
        }),
        ("lease words short", |m| {
            kv_xfer(m, "lease_words", Value::Array(vec![0.into(); 5]))
        }),
    ];
    for (what, change) in changes {
        let reply = reseal_inner(&card(), change);
        let got = decode(&reply, &strict());
        assert!(got.is_err(), "{what}: {got:?}");
    }
    let mut words = card();
    words.lease_words.block_len = 4;
    assert!(encode_reply(&words, None, &CardLimits::default()).is_err());
    // They are read as host memory.
    let mut words = card();
    words.lease_words.mem = MemKind::Vram;
    assert!(encode_reply(&words, None, &CardLimits::default()).is_err());
    // Features of a later version are skipped.
    let reply = reseal_inner(&card(), |m| {
        let names = vec!["ping".into(), "teleport".into()];
        kv_xfer(m, "features", Value::Array(names));
    });
    let got = decode(&reply, &strict()).unwrap();
    assert_eq!(got.features.iter().count(), 1);
}

#[test]
fn limits_hold() {
    let limits = CardLimits {
        max_bytes: 1 << 20,
        max_regions: 3,
    };
    let policy = CardPolicy { limits, ..strict() };
    let reply = encode(&card(), None);
    assert!(matches!(
        decode(&reply, &policy),
        Err(CardFault::TooManyRegions { count: 4, limit: 3 })
    ));
    assert!(encode_reply(&card(), None, &limits).is_err());
    let mut big = card();
    big.nixl_metadata = vec![0; 1 << 20];
    assert!(matches!(
        encode_reply(&big, None, &CardLimits::default()),
        Err(CardFault::TooLarge { .. })
    ));
    let huge = vec![0x90; (1 << 20) + 1];
    assert!(matches!(
        decode(&huge, &strict()),
        Err(CardFault::TooLarge { .. })
    ));
    // A factor named like one that is always there would be there twice.
    let mut twice = card();
    twice.compat.extra.insert("model".into(), "x".into());
    assert!(matches!(
        encode_reply(&twice, None, &CardLimits::default()),
        Err(CardFault::Factor { .. })
    ));
}

proptest! {
    #[test]
    fn any_bytes_are_refused_or_decoded(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let open = CardPolicy { allow_unchecked: true, ..CardPolicy::default() };
        prop_assert!(decode_reply(&peer(), &bytes, &open).is_err());
    }

    #[test]
    fn noise_in_a_sealed_metadata_map_never_panics(
        at in 0_usize..600, with in proptest::collection::vec(any::<u8>(), 1..40)
    ) {
        let reply = reseal(&encode(&card(), None), |outer| {
            let (_, old) = outer
                .iter()
                .find(|(k, _)| k.as_str() == Some("agent_metadata_bytes"))
                .unwrap();
            let mut inner = old.as_slice().unwrap().to_vec();
            let at = at % inner.len();
            let end = (at + with.len()).min(inner.len());
            inner.splice(at..end, with);
            let sum = blake3::hash(&inner).as_bytes().to_vec();
            set(outer, "kv_xfer_checksum", Value::Binary(sum));
            set(outer, "agent_metadata_bytes", Value::Binary(inner));
        });
        let _ = decode_reply(&peer(), &reply, &strict());
    }
}

fn cluster_key(secret: &[u8]) -> ClusterKey {
    ClusterKey::from_secret(secret).unwrap()
}

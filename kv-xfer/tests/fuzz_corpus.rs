//! The fuzz targets of the library's decoders as ordinary tests.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod fuzz_common;
#[path = "../../fuzz/src/library.rs"]
mod library;

use std::num::{NonZeroU16, NonZeroU32};
use std::path::Path;
use std::time::Duration;

use kv_xfer::clock::MonoTime;
use kv_xfer::descriptor::{
    Binding, BlockIdsJson, BlockRuns, ClusterKey, Host, LeaseRef, RemoteBlocks, Ticket,
    TransferMode,
};
use kv_xfer::engine::Notice;
use kv_xfer::identity::BlockHash;
use kv_xfer::ids::{
    AgentName, BlockId, EngineId, Incarnation, LeaseId, LeaseWord, Rank, RequestId, WordSlot,
};
use kv_xfer::layout::{
    Attention, Dtype, KvLayout, KvSplit, LayoutFingerprint, MemKind, ModelGeometry, PoolOrder,
    RegionGeometry,
};
use kv_xfer::peer::{
    Card, CardLimits, CompatFactors, Features, PROTOCOL_VERSION, VllmFields, encode_reply,
};
use kv_xfer::side_channel::seal::{Challenge, Seal};
use kv_xfer::side_channel::wire::{self, Request};
use kv_xfer::side_channel::{ReleaseOutcome, ReleaseRequest, RenewOutcome, RenewRequest, zmtp};

const FUZZ: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz");

#[test]
fn decoders_keep_their_word_over_corpus_and_mutations() {
    for target in library::TARGETS {
        fuzz_common::run(Path::new(FUZZ), *target);
    }
}

#[test]
fn every_target_is_one_of_cargo_fuzz() {
    let manifest = std::fs::read_to_string(Path::new(FUZZ).join("Cargo.toml")).unwrap();
    for (name, _) in library::TARGETS {
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name}");
        assert!(Path::new(FUZZ).join(format!("targets/{name}.rs")).exists());
    }
}

/// What the encoders write, and what vLLM does; small, and of every kind.
fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let engine = EngineId::new("decode-0").unwrap();
    let request = RequestId::new("chatcmpl-1").unwrap();
    let binding = Binding {
        engine: &engine,
        request: &request,
        tenant: None,
        conversation: None,
    };
    let blocks = [4, 5, 6, 9, 8, 7, 100, 3].map(BlockId);
    let ticket = Ticket {
        incarnation: Incarnation(7),
        lease: LeaseRef {
            id: LeaseId(1),
            slot: WordSlot(0),
            word: LeaseWord(3),
        },
        runs: BlockRuns::from_ids(&blocks),
        block_tokens: 16,
        tokens: 120,
        hashes: vec![BlockHash([9; 16]); 7],
        remaining: Duration::from_secs(480),
        stamp: MonoTime::from_nanos(1),
        fingerprint: LayoutFingerprint([0; 32]),
    };
    let sealed = ticket.clone().seal(None, &binding).unwrap();
    let remote = RemoteBlocks {
        do_remote_prefill: false,
        do_remote_decode: true,
        remote_block_ids: vec![ticket.runs.clone()],
        remote_engine_id: engine.clone(),
        remote_request_id: request.clone(),
        remote_host: Host::new("127.0.0.1").unwrap(),
        remote_port: NonZeroU16::new(5600).unwrap(),
        tp_size: NonZeroU32::MIN,
        dcp_size: NonZeroU32::MIN,
        pp_size: NonZeroU32::MIN,
        remote_num_tokens: 120,
        remote_blocks_expiry_time: Some(12.5),
        transfer_mode: Some(TransferMode::Pull),
        ticket: Some(sealed.clone()),
        extra: serde_json::Map::new(),
    };
    let heads = Attention::Gqa {
        kv_heads: 2,
        head_dim_k: 8,
        head_dim_v: 8,
    };
    let model = ModelGeometry::new("tiny", 4, heads, Dtype::Bf16, None).unwrap();
    let layout = |order| KvLayout::new(&model, 1, 16, order, KvSplit::Separate).unwrap();
    let region = |i: u64| RegionGeometry {
        base: 0x7f00_0000_0000 + (i << 30),
        block_len: 512,
        block_stride: 512,
        block_count: 100,
        mem: MemKind::Dram,
        device: 0,
    };
    let card = Card {
        engine_id: engine.clone(),
        incarnation: Incarnation(7),
        rank: Rank::default(),
        agent: AgentName::new("decode-0/serve").unwrap(),
        nixl_metadata: vec![0xfe; 40],
        regions: (0..2).map(region).collect(),
        layout: layout(PoolOrder::LayerFirst).to_bytes(),
        lease_words: RegionGeometry {
            block_len: 8,
            block_stride: 8,
            ..region(9)
        },
        compat: CompatFactors {
            protocol: PROTOCOL_VERSION,
            model: "tiny".into(),
            dtype: "bfloat16".into(),
            block_tokens: 16,
            layout_fingerprint: [1; 32],
            extra: std::collections::BTreeMap::new(),
        },
        compat_hash: None,
        features: Features::all(),
        vllm: VllmFields::default(),
    };
    let reply = encode_reply(&card, None, &CardLimits::default()).unwrap();
    let mut runs = Vec::new();
    ticket.runs.encode_into(&mut runs);
    let (incarnation, lease) = (Incarnation(7), LeaseId(1));
    let release = Request::Release(ReleaseRequest { incarnation, lease });
    let renew = Request::Renew(RenewRequest {
        incarnation,
        lease,
        extension: Duration::from_secs(20),
    });
    let secret = ClusterKey::from_secret(b"of-the-fuzzed-cluster-too").unwrap();
    let seal = Seal {
        key: &secret,
        challenge: Challenge([7; 16]),
    };
    let notice = |notice: Notice, key| notice.encode(key);
    let done = Notice::Release {
        incarnation,
        lease,
        word: LeaseWord(3),
    };
    let remaining = Duration::from_secs(1);
    let miss = br#"{"do_remote_prefill":false,"do_remote_decode":true,"remote_engine_id":null}"#;
    let vllm = br#"{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3],[7]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"h","remote_port":5600,"tp_size":2,"remote_num_tokens":40,"x":{"y":[1.5e3,"\u00e9"]}}"#;
    vec![
        (
            "descriptor_json",
            "ours",
            remote.to_json_string(BlockIdsJson::Expanded).into(),
        ),
        (
            "descriptor_json",
            "short",
            remote.to_json_string(BlockIdsJson::Omitted).into(),
        ),
        ("descriptor_json", "miss", miss.to_vec()),
        ("descriptor_json", "vllm", vllm.to_vec()),
        ("ticket", "text", sealed.to_text().into()),
        ("runs", "mixed", runs),
        ("card", "ours", reply),
        (
            "request",
            "card",
            Request::Card(Rank::default()).encode(None),
        ),
        (
            "request",
            "card-signed",
            Request::Card(Rank::default()).encode(Some(&seal)),
        ),
        ("request", "hello", Request::Hello.encode(None)),
        ("request", "ping", Request::Ping.encode(None)),
        ("request", "renew", renew.encode(Some(&seal))),
        ("request", "release", release.encode(None)),
        ("reply", "challenge", Challenge([7; 16]).encode()),
        ("reply", "clock", wire::encode_clock(1.5)),
        (
            "reply",
            "pong",
            wire::encode_pong(&engine, incarnation, 1.5),
        ),
        (
            "reply",
            "refusal",
            wire::encode_refusal("mac", "set the same key"),
        ),
        (
            "reply",
            "renewed",
            wire::encode_renewed(&RenewOutcome::Renewed { remaining }),
        ),
        (
            "reply",
            "restarted",
            wire::encode_released(&ReleaseOutcome::Restarted { incarnation }),
        ),
        (
            "zmtp",
            "req",
            [&zmtp::ready("REQ")[..], &zmtp::message(&[b"", b"x"])].concat(),
        ),
        (
            "zmtp",
            "long",
            [
                &zmtp::ready("DEALER")[..],
                &zmtp::message(&[b"a", b"", &[5; 300]]),
            ]
            .concat(),
        ),
        (
            "zmtp",
            "error",
            [&zmtp::error("no")[..], &zmtp::pong(b"context")].concat(),
        ),
        ("notice", "release", notice(done.clone(), None)),
        ("notice", "release-signed", notice(done, Some(&secret))),
        ("notice", "done", b"chatcmpl-a:b:2".to_vec()),
        ("notice", "heartbeat", b"HB:chatcmpl-a,chatcmpl-b".to_vec()),
        (
            "layout",
            "layer-first",
            layout(PoolOrder::LayerFirst).to_bytes(),
        ),
        (
            "layout",
            "block-first",
            layout(PoolOrder::BlockFirst).to_bytes(),
        ),
        ("address", "name", b"decode-0.cluster.local".to_vec()),
        ("address", "v4", b"127.0.0.1".to_vec()),
        ("address", "v6", b"fe80::1%eth0".to_vec()),
        ("address", "mapped", b"::ffff:127.0.0.1".to_vec()),
        ("address", "network", b"10.0.0.0/8".to_vec()),
    ]
}

#[test]
#[ignore = "writes the corpus anew: for when a format has changed"]
fn writes_the_corpus() {
    for (target, name, bytes) in seeds() {
        let folder = Path::new(FUZZ).join("corpus").join(target);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join(name), bytes).unwrap();
    }
}

#[test]
fn the_corpus_is_of_todays_formats() {
    for (target, name, bytes) in seeds() {
        let file = Path::new(FUZZ).join("corpus").join(target).join(name);
        let kept = std::fs::read(&file).unwrap_or_default();
        assert!(kept == bytes, "{target}/{name}: run writes_the_corpus");
    }
}

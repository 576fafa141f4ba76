//! `kv_transfer_params` as vLLM engines, routers and we write it.
#![allow(clippy::unwrap_used, clippy::panic)]

mod descriptor_common;

use descriptor_common::{key, names, remote, ticket};
use kv_xfer::descriptor::{
    BlockIdsJson, BlockRuns, DescriptorError, DescriptorLimits, Miss, Params, RemoteBlocks,
    RunsError, SealedTicket, TicketError, TransferMode,
};
use kv_xfer::ids::BlockId;
use proptest::prelude::*;
use serde_json::{Value, json};

const IDS: [u32; 6] = [5, 6, 7, 3, 2, 9];

fn read(value: Value) -> Result<Params, DescriptorError> {
    // Text and value take the same way.
    let limits = DescriptorLimits::default();
    let from_text = Params::from_json_str(&value.to_string(), &limits);
    assert_eq!(from_text, Params::from_json_value(value, &limits));
    from_text
}

fn read_blocks(value: Value) -> RemoteBlocks {
    match read(value).unwrap() {
        Params::Remote(blocks) => *blocks,
        miss => panic!("{miss:?}"),
    }
}

fn sealed(keyed: bool) -> SealedTicket {
    let key = keyed.then(|| key("a secret of the cluster"));
    ticket(&IDS, 7)
        .seal(key.as_ref(), &names().binding())
        .unwrap()
}

/// Ours, as JSON.
fn ours() -> Value {
    remote(Some(sealed(true)), &IDS, 87).to_json_value(BlockIdsJson::Expanded)
}

/// What a vLLM decode engine answers.
fn from_vllm_decode() -> Value {
    json!({
        "do_remote_prefill": false, "do_remote_decode": true,
        "remote_block_ids": [[120, 119, 118, 7]],
        "remote_engine_id": "6b1b2d34-0f6a-4b0f-9c3e-2b8f0a6f9f10",
        "remote_request_id": "chatcmpl-3f0c-1a2b3c4d",
        "remote_host": "10.0.3.7", "remote_port": 5600,
        "tp_size": 8, "dcp_size": 1, "pp_size": 1,
        "remote_num_tokens": 55, "remote_blocks_expiry_time": 81234.625,
        "remote_registration_generation": 8, "transfer_mode": "pull",
    })
}

/// What a vLLM prefill engine answers.
fn from_vllm_prefill() -> Value {
    json!({
        "do_remote_prefill": true, "do_remote_decode": false,
        "remote_block_ids": [[0, 1, 2], [9]],
        "remote_engine_id": "prefill-0", "remote_request_id": "cmpl-1-0-aaaabbbb",
        "remote_host": "fd00::12", "remote_port": 65535,
        "tp_size": 2, "remote_num_tokens": 33, "remote_blocks_expiry_time": null,
        "transfer_mode": "pull", "remote_prefill_cached_tokens": 16,
    })
}

/// What a router sends when it has nothing to read.
fn miss() -> Value {
    json!({
        "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
        "remote_block_ids": null, "remote_host": null, "remote_port": null,
        "remote_request_id": null,
    })
}

#[test]
fn a_vllm_decode_engines_answer_is_read() {
    let blocks = read_blocks(from_vllm_decode());
    assert!(blocks.do_remote_decode && !blocks.do_remote_prefill);
    let ids = [120, 119, 118, 7].map(BlockId);
    assert_eq!(blocks.remote_block_ids, [BlockRuns::from_ids(&ids)]);
    assert_eq!(blocks.remote_num_tokens, 55);
    assert_eq!(blocks.remote_blocks_expiry_time, Some(81234.625));
    assert_eq!(blocks.remote_port.get(), 5600);
    assert_eq!(blocks.tp_size.get(), 8);
    assert_eq!(blocks.transfer_mode, Some(TransferMode::Pull));
    assert_eq!(blocks.ticket, None);
    assert_eq!(blocks.extra["remote_registration_generation"], 8);
    assert!(blocks.check_token_count(16).is_ok());
    assert!(blocks.check_token_count(32).is_err());
    assert_eq!(blocks.verify_ticket(None, None, None), Ok(None));
}

#[test]
fn a_vllm_prefill_engines_answer_is_read() {
    let blocks = read_blocks(from_vllm_prefill());
    assert!(blocks.do_remote_prefill && !blocks.do_remote_decode);
    assert_eq!(blocks.block_count(), 4);
    assert_eq!(blocks.remote_blocks_expiry_time, None);
    assert_eq!(blocks.remote_host.as_str(), "fd00::12");
    // Absent sizes are one.
    assert_eq!((blocks.dcp_size.get(), blocks.pp_size.get()), (1, 1));
}

#[test]
fn vllm_objects_go_through_unchanged() {
    for value in [from_vllm_decode(), miss()] {
        let params = read(value.clone()).unwrap();
        assert_eq!(params.to_json_value(BlockIdsJson::Expanded), value);
        // Nothing to omit the ids for: they are all there is.
        assert_eq!(params.to_json_value(BlockIdsJson::Omitted), value);
    }
}

#[test]
fn misses_are_told_from_descriptors() {
    assert_eq!(read(miss()), Ok(Params::Miss(Miss::to_prefill())));
    assert_eq!(Miss::to_prefill().to_json_value(), miss());
    for value in [Value::Null, json!({}), json!({"remote_host": null})] {
        assert_eq!(read(value), Ok(Params::Miss(Miss::default())));
    }
    let Params::Miss(found) = read(json!({"do_remote_decode": true, "x": [1]})).unwrap() else {
        panic!()
    };
    assert_eq!(found.extra["x"], json!([1]));
    assert_eq!(found.to_json_value()["x"], json!([1]));
}

#[test]
fn half_a_descriptor_is_an_error() {
    for field in [
        "remote_block_ids",
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "remote_port",
    ] {
        let mut value = from_vllm_decode();
        value[field] = Value::Null;
        assert_eq!(read(value.clone()), Err(DescriptorError::Missing { field }));
        value.as_object_mut().unwrap().remove(field);
        assert_eq!(read(value), Err(DescriptorError::Missing { field }));
    }
    let ticket = json!({"kv_xfer": sealed(false).to_text()});
    assert!(matches!(read(ticket), Err(DescriptorError::Missing { .. })));
}

#[test]
fn ours_round_trips_and_verifies() {
    let secret = key("a secret of the cluster");
    for keyed in [false, true] {
        let key = keyed.then_some(&secret);
        for ids in [BlockIdsJson::Expanded, BlockIdsJson::Omitted] {
            let mut blocks = remote(Some(sealed(keyed)), &IDS, 87);
            blocks
                .extra
                .insert("router_note".into(), json!({"a": [1, null]}));
            let value = blocks.to_json_value(ids);
            assert_eq!(
                value.get("remote_block_ids").is_some(),
                ids == BlockIdsJson::Expanded
            );
            assert_eq!(
                serde_json::from_str::<Value>(&blocks.to_json_string(ids)).unwrap(),
                value
            );
            let found = read_blocks(value);
            assert_eq!(found, blocks);
            let names = names();
            let (tenant, conversation) = (names.tenant.as_deref(), names.conversation.as_deref());
            assert_eq!(
                found.verify_ticket(key, tenant, conversation),
                Ok(Some(&ticket(&IDS, 7)))
            );
            assert_eq!(
                found.verify_ticket(key, Some("globex"), conversation),
                Err(TicketError::BadTag)
            );
            assert_eq!(
                found.verify_ticket(key, tenant, Some("conv-2")),
                Err(TicketError::BadTag)
            );
        }
    }
}

#[test]
fn a_proxy_may_change_host_and_flags_but_not_names() {
    let secret = key("a secret of the cluster");
    let mut value = ours();
    value["remote_host"] = json!("decode-7.example");
    value["do_remote_prefill"] = json!(true);
    let check = |value: Value| {
        read_blocks(value)
            .verify_ticket(Some(&secret), Some("acme"), Some("conv-1"))
            .map(|_| ())
    };
    assert_eq!(check(value), Ok(()));
    for field in ["remote_engine_id", "remote_request_id"] {
        let mut value = ours();
        value[field] = json!("another");
        assert_eq!(check(value), Err(TicketError::BadTag));
    }
}

#[test]
fn ids_and_tokens_beside_a_ticket_must_be_its_own() {
    for ids in [
        json!([]),
        json!([[]]),
        json!([[5, 6, 7, 3, 2]]),
        json!([[5, 6, 7, 2, 3, 9]]),
        json!([[5, 6, 7, 3, 2, 9], []]),
        json!([[5, 6, 7], [3, 2, 9]]),
    ] {
        let mut value = ours();
        value["remote_block_ids"] = ids.clone();
        assert!(
            matches!(read(value), Err(DescriptorError::BlocksDisagree { .. })),
            "{ids}"
        );
    }
    let mut value = ours();
    value["remote_num_tokens"] = json!(88);
    assert_eq!(
        read(value),
        Err(DescriptorError::TokensDisagree {
            found: 88,
            ticket: 87
        })
    );
    let mut value = ours();
    value["remote_num_tokens"] = Value::Null;
    assert_eq!(read_blocks(value).remote_num_tokens, 87);
}

#[test]
fn every_field_is_checked() {
    for (field, bad) in [
        ("do_remote_prefill", json!(1)),
        ("do_remote_decode", json!("true")),
        ("remote_block_ids", json!("x")),
        ("remote_block_ids", json!([1, 2])),
        ("remote_block_ids", json!([[1.0]])),
        ("remote_block_ids", json!([[-1]])),
        ("remote_block_ids", json!([["1"]])),
        ("remote_block_ids", json!([[4_294_967_296_u64]])),
        ("remote_block_ids", json!([[2_147_483_648_u64]])),
        ("remote_block_ids", json!([[null]])),
        ("remote_block_ids", json!([null])),
        ("remote_block_ids", json!({"0": [1]})),
        ("remote_engine_id", json!("")),
        ("remote_engine_id", json!("a\u{0}b")),
        ("remote_engine_id", json!(7)),
        ("remote_request_id", json!("x".repeat(257))),
        ("remote_host", json!("http://x")),
        ("remote_host", json!("")),
        ("remote_host", json!(["x"])),
        ("remote_port", json!(0)),
        ("remote_port", json!(65_536)),
        ("remote_port", json!(5600.0)),
        ("remote_port", json!("5600")),
        ("tp_size", json!(0)),
        ("dcp_size", json!(-1)),
        ("pp_size", json!(u64::MAX)),
        ("remote_num_tokens", json!(-1)),
        ("remote_num_tokens", json!(1.5)),
        ("remote_blocks_expiry_time", json!("soon")),
        ("transfer_mode", json!(1)),
        ("transfer_mode", json!("x".repeat(300))),
        ("kv_xfer", json!(1)),
        ("kv_xfer", json!("")),
        ("kv_xfer", json!("not base64!")),
    ] {
        let mut value = ours();
        value[field] = bad.clone();
        assert!(read(value).is_err(), "{field}: {bad}");
    }
}

#[test]
fn limits_are_kept() {
    let limits = DescriptorLimits {
        max_blocks: 4,
        max_groups: 1,
        max_block_id: 120,
        ..DescriptorLimits::default()
    };
    let with = |ids| {
        let mut value = from_vllm_decode();
        value["remote_block_ids"] = ids;
        let text = value.to_string();
        let found = Params::from_json_str(&text, &limits);
        assert_eq!(found, Params::from_json_value(value, &limits));
        found.map(|_| ())
    };
    assert_eq!(with(json!([[120, 1, 2, 3]])), Ok(()));
    assert_eq!(
        with(json!([[0, 1, 2, 3, 4]])),
        Err(DescriptorError::Blocks(RunsError::TooManyBlocks {
            max_blocks: 4
        }))
    );
    assert_eq!(
        with(json!([[0], [1]])),
        Err(DescriptorError::TooManyGroups { max_groups: 1 })
    );
    assert!(matches!(
        with(json!([[121]])),
        Err(DescriptorError::OutOfRange { .. })
    ));
    let short = DescriptorLimits {
        max_bytes: 100,
        ..limits
    };
    assert!(matches!(
        Params::from_json_str(&ours().to_string(), &short),
        Err(DescriptorError::TooLong { max_bytes: 100, .. })
    ));
}

#[test]
fn what_is_not_an_object_is_named() {
    assert_eq!(
        read(json!([1])),
        Err(DescriptorError::NotAnObject { found: "an array" })
    );
    assert!(matches!(
        Params::from_json_str("{", &DescriptorLimits::default()),
        Err(DescriptorError::NotJson { .. })
    ));
}

#[test]
fn an_unknown_field_never_hides_a_known_one() {
    let mut blocks = remote(None, &[1], 3);
    blocks.extra.insert("remote_port".into(), json!(1));
    let value = blocks.to_json_value(BlockIdsJson::Expanded);
    assert_eq!(value["remote_port"], 5600);
    let text: Value = serde_json::from_str(&blocks.to_json_string(BlockIdsJson::Expanded)).unwrap();
    assert_eq!(text, value);
    let text = blocks.to_json_string(BlockIdsJson::Expanded);
    assert_eq!(text.matches("remote_port").count(), 1);
}

#[test]
fn no_blocks_are_no_error() {
    let mut value = from_vllm_decode();
    for ids in [json!([]), json!([[]])] {
        value["remote_block_ids"] = ids;
        assert_eq!(read_blocks(value.clone()).block_count(), 0);
    }
}

/// Any JSON, with the names of our fields among its keys.
fn json_values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u32>().prop_map(Value::from),
        // Few digits: serde_json may read the last of seventeen otherwise than it was written.
        any::<i32>().prop_map(|eighths| Value::from(f64::from(eighths) / 8.0)),
        ".{0,12}".prop_map(Value::from),
        Just(Value::from("pull")),
    ];
    let keys = prop_oneof![
        prop::sample::select(vec![
            "do_remote_prefill",
            "do_remote_decode",
            "remote_block_ids",
            "remote_engine_id",
            "remote_request_id",
            "remote_host",
            "remote_port",
            "tp_size",
            "remote_num_tokens",
            "remote_blocks_expiry_time",
            "transfer_mode",
            "kv_xfer",
        ])
        .prop_map(str::to_owned),
        "[a-z]{1,4}",
    ];
    leaf.prop_recursive(3, 48, 8, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((keys.clone(), inner), 0..12)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn arbitrary_json_never_panics(value in json_values()) {
        let limits = DescriptorLimits::default();
        if let Ok(params) = Params::from_json_value(value.clone(), &limits) {
            let again = params.to_json_value(BlockIdsJson::Expanded);
            prop_assert_eq!(Params::from_json_value(again, &limits), Ok(params));
        }
        let _ = Params::from_json_str(&value.to_string(), &limits);
    }

    #[test]
    fn arbitrary_text_never_panics(text in ".{0,300}") {
        let _ = Params::from_json_str(&text, &DescriptorLimits::default());
    }

    #[test]
    fn one_changed_field_never_panics_and_never_changes_the_rest(
        field in prop::sample::select(vec![
            "do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id",
            "remote_request_id", "remote_host", "remote_port", "tp_size", "dcp_size", "pp_size",
            "remote_num_tokens", "remote_blocks_expiry_time", "transfer_mode", "kv_xfer",
        ]),
        bad in json_values(),
    ) {
        let mut value = ours();
        value[field] = bad;
        if let Ok(Params::Remote(found)) = read(value) {
            if let Some(sealed) = &found.ticket {
                prop_assert_eq!(sealed.unverified(), &ticket(&IDS, 7));
            }
            prop_assert_eq!(
                found.remote_block_ids,
                [BlockRuns::from_ids(&IDS.map(BlockId))]
            );
        }
    }

    #[test]
    fn descriptors_round_trip(
        ids in prop::collection::vec(0_u32..1 << 20, 1..80),
        in_last in 1_u64..=16,
        omit: bool,
    ) {
        let tokens = (ids.len() as u64 - 1) * 16 + in_last;
        let sealed = ticket(&ids, in_last).seal(None, &names().binding()).unwrap();
        let blocks = remote(Some(sealed), &ids, tokens);
        let form = if omit { BlockIdsJson::Omitted } else { BlockIdsJson::Expanded };
        let text = blocks.to_json_string(form);
        let found = Params::from_json_str(&text, &DescriptorLimits::default());
        prop_assert_eq!(found, Ok(Params::Remote(Box::new(blocks))));
    }
}

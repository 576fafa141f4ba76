//! Bad input and faults over real processes: the user gets text or a clear refusal, and no block is
//! lost.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use common::{Client, NodeProcess, conversation, extended};
use reqwest::StatusCode;
use serde_json::{Value, json};

#[tokio::test(flavor = "multi_thread")]
async fn bad_input_and_clients_that_leave() {
    let mut node = NodeProcess::start("decode", &["--kv-cache-mib", "48"]);
    what_is_no_request_is_refused(&node).await;
    malformed_parameters_are_computed_around(&node).await;
    stop_strings_end_the_text_before_them(&node).await;
    a_client_may_leave(&node).await;
    many_at_once(&node).await;
    let client = Client::new();
    let pool = client.settled(&node).await;
    assert_eq!(
        pool["free"] + pool["cached"] + pool["leased"],
        pool.values().sum::<u64>()
    );
    let status = node.terminate(Duration::from_secs(20));
    assert!(status.success(), "{status}");
}

/// Sends the beginning of a request, and then nothing. Gives what is answered until the connection is closed.
fn begins(node: &NodeProcess, request: &str) -> String {
    let mut socket = TcpStream::connect(node.ready["http"].as_str().unwrap()).unwrap();
    let limit = Some(Duration::from_secs(60));
    socket.set_read_timeout(limit).unwrap();
    socket.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).expect("it is closed");
    answer
}

#[test]
fn a_client_that_does_not_send_its_request_is_left() {
    let args = ["--kv-cache-mib", "16", "--request-timeout", "0.3"];
    let node = NodeProcess::start("decode", &args);
    let post = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n";
    for begun in ["", post] {
        assert_eq!(begins(&node, begun), "", "{begun}");
    }
    let late = begins(&node, &format!("{post}content-length: 9\r\n\r\n{{"));
    assert!(late.starts_with("HTTP/1.1 408 "), "{late}");
    // What is too large is not waited for, and the limit is named.
    let large = format!("{post}content-length: 99999999\r\nconnection: close\r\n\r\n");
    let large = begins(&node, &large);
    assert!(large.starts_with("HTTP/1.1 413 "), "{large}");
    assert!(large.contains("larger than 16777216 bytes"), "{large}");
}

async fn what_is_no_request_is_refused(node: &NodeProcess) {
    let client = Client::new();
    let hello = json!([{"role": "user", "content": "Hello"}]);
    let long = json!([{"role": "user", "content": "word ".repeat(9000)}]);
    for (messages, extra, code) in [
        (&json!("Hello"), json!({}), Value::Null),
        (&json!([{"content": "no role"}]), json!({}), Value::Null),
        (&hello, json!({"temperature": "hot"}), Value::Null),
        (&hello, json!({"kv_transfer_params": "x"}), Value::Null),
        (&hello, json!({"kv_transfer_params": [1]}), Value::Null),
        (&hello, json!({"logprobs": true}), Value::Null),
        (&long, json!({}), json!("context_length_exceeded")),
    ] {
        let answer = client.chat(node, messages, extra.clone()).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{extra} {answer:?}");
        assert_eq!(answer.body["error"]["type"], "invalid_request_error");
        assert_eq!(answer.body["error"]["code"], code, "{answer:?}");
    }
    // It fits the model, not the pool.
    let tokens: Vec<u32> = (0..3000).map(|n| 100 + n % 50).collect();
    let answer = client
        .post(node, "/v1/completions", json!({"prompt": tokens}))
        .await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{answer:?}");
    let answer = client
        .post(node, "/v1/completions", json!({"prompt": [9_999_999]}))
        .await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{answer:?}");
    let answer = client.chat(node, &hello, json!({"model": "other"})).await;
    assert_eq!(answer.status, StatusCode::NOT_FOUND, "{answer:?}");
    let answer = client.post(node, "/v1/nonsense", json!({})).await;
    assert_eq!(answer.status, StatusCode::NOT_FOUND, "{answer:?}");
}

async fn malformed_parameters_are_computed_around(node: &NodeProcess) {
    let client = Client::new().with(json!({"max_tokens": 4}));
    let messages = conversation("salt", 1);
    let text = client.computed(node, &messages).await;
    let good = client
        .chat(node, &messages, json!({"kv_transfer_params": {}}))
        .await
        .ok();
    assert_eq!(good.text(), text);
    let good = good.params();
    let with = |field: &str, value: Value| {
        let mut params = good.clone();
        params["do_remote_prefill"] = true.into();
        params[field] = value;
        params
    };
    let nested = (0..64).fold(json!([1]), |inner, _| json!([inner]));
    for (params, counted) in [
        (
            json!({"do_remote_prefill": true, "remote_block_ids": "x"}),
            true,
        ),
        (json!({"do_remote_prefill": "yes"}), true),
        (with("remote_block_ids", json!([[-1, 2]])), true),
        (with("remote_block_ids", json!([[4_000_000_000_u64]])), true),
        (with("remote_block_ids", json!([vec![7; 300_000]])), true),
        (with("remote_block_ids", nested), true),
        (with("remote_port", json!(1e300)), true),
        (with("remote_port", json!(70_000)), true),
        (with("remote_host", json!(7)), true),
        (with("remote_engine_id", json!("x".repeat(5_000))), true),
        (with("remote_num_tokens", json!(-5)), true),
        (with("remote_blocks_expiry_time", json!("soon")), true),
        // Understood, and not believed.
        (with("remote_engine_id", json!("another")), true),
        (with("kvx", json!("AAAA")), false),
        (with("unheard_of", json!({"a": [1]})), false),
        // Nothing offered at all.
        (json!({"unheard_of": 1}), false),
        (json!({}), false),
    ] {
        let before = client.metrics(node).await;
        let answer = client
            .chat(node, &messages, json!({"kv_transfer_params": params}))
            .await
            .ok();
        assert_eq!(answer.text(), text);
        if counted {
            let what: String = params.to_string().chars().take(120).collect();
            assert!(
                answer.report()["fallback"].is_string(),
                "{what}: {answer:?}"
            );
            assert_ne!(before, client.metrics(node).await);
        }
    }
    client.settled(node).await;
}

async fn stop_strings_end_the_text_before_them(node: &NodeProcess) {
    let client = Client::new();
    let messages = conversation("pepper", 1);
    let whole = client
        .chat(node, &messages, json!({}))
        .await
        .ok()
        .text()
        .to_owned();
    let (from, to) = (whole.len() / 3, whole.len() * 2 / 3);
    let stop = whole.get(from..to).expect("plain text");
    let expected = whole.split(stop).next().unwrap();
    for stops in [json!(stop), json!(["never said", stop])] {
        let extra = json!({"stop": stops, "kv_transfer_params": {}});
        let answer = client.chat(node, &messages, extra.clone()).await.ok();
        assert_eq!(answer.text(), expected);
        assert_eq!(answer.body["choices"][0]["finish_reason"], "stop");
        // An answer that a stop string ended is a turn like any other.
        assert!(answer.params().is_object());
        let mut extra = extra;
        extra["messages"] = messages.clone();
        let pieces = client.pieces(node, "/v1/chat/completions", extra).await;
        let text: String = pieces
            .iter()
            .filter_map(|piece| piece["choices"][0]["delta"]["content"].as_str())
            .collect();
        assert_eq!(text, expected);
        assert!(pieces.last().unwrap()["kv_transfer_params"].is_object());
    }
}

async fn a_client_may_leave(node: &NodeProcess) {
    let client = Client::new().with(json!({"max_tokens": 1000, "ignore_eos": true}));
    // Blocks that a request before this one still has do not count as leased yet.
    let leased = client.settled(node).await["leased"];
    let extra = json!({"messages": conversation("oil", 2), "kv_transfer_params": {}});
    client.leave(node, extra, Duration::from_secs(60)).await;
    // Nobody is told of its blocks, so they are not leased.
    assert!(client.settled(node).await["leased"] <= leased);
    assert!(
        client
            .metric(node, "kvx_requests_total{outcome=\"aborted\"}")
            .await
            > 0
    );
}

async fn many_at_once(node: &NodeProcess) {
    let client = Client::new().with(json!({"max_tokens": 3, "ignore_eos": true}));
    let ask = |n: u32| {
        let client = client.clone();
        let prompt: Vec<u32> = (0..6).map(|at| 200 + n * 7 + at).collect();
        async move {
            let answer = client
                .post(node, "/v1/completions", json!({"prompt": prompt}))
                .await;
            answer.ok().body["usage"]["completion_tokens"].as_u64()
        }
    };
    let asked: Vec<_> = (0..200).map(ask).collect();
    let answers = futures_util::future::join_all(asked).await;
    assert!(answers.iter().all(|tokens| *tokens == Some(3)));
    client.settled(node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_that_end() {
    let prefill = NodeProcess::start("prefill", &["--kv-cache-mib", "64"]);
    expired_leases_are_not_read(&prefill).await;
    a_pool_full_of_leases_serves_all_the_same(&prefill).await;
    switched_off_means_off(&prefill).await;
    Client::new().settled(&prefill).await;
}

async fn expired_leases_are_not_read(prefill: &NodeProcess) {
    let decode = NodeProcess::start(
        "decode",
        &["--kv-cache-mib", "48", "--decoder-kv-blocks-ttl", "1"],
    );
    let client = Client::new();
    let first = conversation("sand", 5);
    let turn = client.turn((prefill, &decode), &first, None).await;
    client.reset(prefill).await;
    let second = extended(&first, &turn.text, "Why?");
    let next = client
        .turn((prefill, &decode), &second, Some(&turn.handle))
        .await;
    assert_eq!(next.prefill["reason"], "lease_expired", "{}", next.prefill);
    assert_eq!(next.text, client.computed(&decode, &second).await);
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let pool = client.settled(&decode).await;
    assert_eq!(pool["leased"], 0);
}

async fn a_pool_full_of_leases_serves_all_the_same(prefill: &NodeProcess) {
    // 45 blocks, 720 tokens.
    let decode = NodeProcess::start("decode", &["--kv-cache-mib", "16"]);
    let client = Client::new().with(json!({"max_tokens": 2}));
    let mut handles = Vec::new();
    for n in 0..6 {
        let first = conversation(&format!("stones of kind {n}"), 8);
        let turn = client.turn((prefill, &decode), &first, None).await;
        handles.push((first, turn));
        client.reset(prefill).await;
    }
    assert!(client.metric(&decode, "kvx_revoked_blocks_total").await > 0);
    // The newest lease holds, the oldest one does not.
    let (first, turn) = handles.pop().unwrap();
    let second = extended(&first, &turn.text, "Why?");
    let next = client
        .turn((prefill, &decode), &second, Some(&turn.handle))
        .await;
    assert_eq!(next.prefill["decision"], "read", "{}", next.prefill);
    let (first, turn) = handles.swap_remove(0);
    client.reset(prefill).await;
    let second = extended(&first, &turn.text, "Why?");
    let next = client
        .turn((prefill, &decode), &second, Some(&turn.handle))
        .await;
    assert_eq!(next.prefill["fallback"], "lease_lost", "{}", next.prefill);
    assert_eq!(next.text, client.computed(prefill, &second).await);
    let pool = client.settled(&decode).await;
    assert_eq!(pool.values().sum::<u64>(), 45, "{pool:?}");
    sequences_that_give_way_lose_nothing(&decode).await;
}

async fn sequences_that_give_way_lose_nothing(small: &NodeProcess) {
    let client = Client::new().with(json!({"max_tokens": 90, "ignore_eos": true}));
    let prompt = |n: u32| -> Vec<u32> { (0..20).map(|at| 300 + n * 31 + at).collect() };
    let ask = |n: u32| {
        let (client, body) = (&client, json!({"prompt": prompt(n)}));
        async move {
            let answer = client.post(small, "/v1/completions", body).await.ok();
            answer.text().to_owned()
        }
    };
    let texts = futures_util::future::join_all((0..10).map(ask)).await;
    assert!(client.metric(small, "kvx_preemptions_total").await > 0);
    for n in [0, 9] {
        let body = json!({"prompt": prompt(n)});
        let alone = client
            .apart()
            .post(small, "/v1/completions", body)
            .await
            .ok();
        assert_eq!(alone.text(), texts[n as usize]);
    }
    client.settled(small).await;
}

async fn switched_off_means_off(prefill: &NodeProcess) {
    let off = ["--kv-cache-mib", "48", "--bidirectional-kv-xfer", "false"];
    let silent = NodeProcess::start("decode", &off);
    let client = Client::new().with(json!({"max_tokens": 4}));
    let first = conversation("paper", 5);
    let turn = client.turn((prefill, &silent), &first, None).await;
    assert!(turn.handle.is_null());
    // As a prefill node it reads nothing from a decode node that does offer, and tells it so.
    let turn = client.turn((&silent, prefill), &first, None).await;
    assert!(turn.handle.is_object());
    assert!(client.pool(prefill).await["leased"] > 0);
    client.reset(&silent).await;
    let second = extended(&first, &turn.text, "Why?");
    let answer = client
        .prefill(&silent, &second, Some(&turn.handle))
        .await
        .ok();
    assert_eq!(
        answer.report()["fallback"],
        "bidirectional_off",
        "{answer:?}"
    );
}

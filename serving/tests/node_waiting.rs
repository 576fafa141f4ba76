//! Requests that wait because a node is busy with others: their blocks are kept for them elsewhere,
//! and nobody waits for ever.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::time::{Duration, Instant};

use common::{Client, NodeProcess, conversation};
use reqwest::{Response, StatusCode};
use serde_json::{Value, json};

/// How long a prefill node keeps a prompt's blocks unless it hears from who will read them. A heartbeat
/// makes it two thirds of that, which is to be well above the five seconds that a lease must have left
/// to be read.
const LEASE: Duration = Duration::from_secs(15);
/// Settings of a decode node that serves one request at a time.
const ONE: [&str; 4] = ["--max-num-seqs", "1", "--kv-cache-mib", "256"];

/// Keeps a node busy until it is dropped: an answer as long as the context.
async fn busy(client: &Client, node: &NodeProcess) -> Response {
    let extra = json!({
        "messages": conversation("time", 1), "max_tokens": 8000, "ignore_eos": true,
    });
    client.begin(node, extra).await
}

async fn waiting(client: &Client, node: &NodeProcess) -> u64 {
    client
        .metric(node, "kvx_sequences{state=\"waiting\"}")
        .await
}

async fn until_waiting(client: &Client, node: &NodeProcess) {
    let begin = Instant::now();
    while waiting(client, node).await == 0 {
        assert!(begin.elapsed() < Duration::from_secs(60), "nothing waits");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Prefill answers, decode has no time for its part until the first lease is long over. Gives the
/// decode node's report, and whether prefill still kept the blocks.
async fn decode_late(prefill: &NodeProcess, decode: &NodeProcess, topic: &str) -> (Value, bool) {
    let client = Client::new();
    let messages = conversation(topic, 6);
    let expected = client.computed(decode, &messages).await;
    let before = client.pool(prefill).await["leased"];
    let other = busy(&client, decode).await;
    let params = client.prefill(prefill, &messages, None).await.ok().params();
    assert!(params.is_object());
    let late = async {
        until_waiting(&client, decode).await;
        tokio::time::sleep(LEASE * 3 / 2).await;
        assert_eq!(waiting(&client, decode).await, 1, "it was not busy enough");
        let kept = client.pool(prefill).await["leased"] > before;
        drop(other);
        kept
    };
    let extra = json!({"kv_transfer_params": params});
    let (answer, kept) = tokio::join!(client.chat(decode, &messages, extra), late);
    let answer = answer.ok();
    assert_eq!(answer.text(), expected);
    client.settled(decode).await;
    (answer.report().clone(), kept)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_is_kept_alive_for_a_request_that_waits() {
    let lease = LEASE.as_secs().to_string();
    let short = ["--kv-lease-duration", &lease];
    let prefill = NodeProcess::start("prefill", &[&short[..], &["--kv-cache-mib", "64"]].concat());
    let client = Client::new();

    let decode = NodeProcess::start("decode", &[&ONE[..], &short].concat());
    let (report, kept) = decode_late(&prefill, &decode, "wool").await;
    assert!(kept, "{report}");
    assert_eq!(report["decision"], "read", "{report}");
    assert!(client.metric(&decode, "kvx_engine_renewals_total").await > 0);

    // One that takes leases for far longer than they are does not say in time that it still waits.
    let long = ["--kv-lease-duration", "86400"];
    let silent = NodeProcess::start("decode", &[&ONE[..], &long].concat());
    let (report, kept) = decode_late(&prefill, &silent, "silk").await;
    assert!(!kept, "{report}");
    assert_eq!(report["decision"], "recompute", "{report}");
    assert_eq!(report["read_tokens"], 0, "{report}");
    assert_eq!(client.metric(&silent, "kvx_engine_renewals_total").await, 0);
    client.settled(&prefill).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_waited_too_long_is_refused() {
    let decode = NodeProcess::start("decode", &[&ONE[..], &["--queue-timeout", "2"]].concat());
    let client = Client::new();
    let messages = conversation("tea", 1);
    let other = busy(&client, &decode).await;
    for extra in [json!({}), json!({"stream": true}), json!({"n": 3})] {
        let mut extra = extra;
        extra["messages"] = messages.clone();
        let response = client.open(&decode, extra).await;
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        let after = response.headers()["retry-after"].to_str().unwrap();
        assert!(after.parse::<u64>().unwrap() > 0);
        let body: Value = response.json().await.unwrap();
        assert_eq!(body["error"]["code"], "node_busy", "{body}");
    }
    assert_eq!(waiting(&client, &decode).await, 0);
    let overdue = "kvx_requests_total{outcome=\"overdue\"}";
    assert_eq!(client.metric(&decode, overdue).await, 5);
    drop(other);
    client.settled(&decode).await;
    // With nothing before it the same request is served, if not at once on a slow machine.
    let begin = Instant::now();
    while client.chat(&decode, &messages, json!({})).await.status != StatusCode::OK {
        assert!(begin.elapsed() < Duration::from_secs(120), "never served");
    }
}

//! Peers that die between turns and in the middle of a read, over real processes.
//!
//! Reads within a machine are over before anything can happen to them, so these nodes read over TCP,
//! and the holder is stopped before it is killed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::time::{Duration, Instant};

use common::{Client, NodeProcess, conversation, extended};
use serde_json::Value;

const TCP: [(&str, &str); 1] = [("UCX_TLS", "tcp,self")];

fn start(role: &str) -> NodeProcess {
    NodeProcess::start_with(role, &["--kv-cache-mib", "64"], &TCP)
}

/// A first turn, so that the nodes have met, and the messages of the second.
async fn begun(
    client: &Client,
    (prefill, decode): (&NodeProcess, &NodeProcess),
    topic: &str,
) -> (Value, Value) {
    let first = conversation(topic, 6);
    let turn = client.turn((prefill, decode), &first, None).await;
    client.reset(prefill).await;
    let second = extended(&first, &turn.text, "Which item is the cheapest?");
    let next = client
        .turn((prefill, decode), &second, Some(&turn.handle))
        .await;
    assert_eq!(next.prefill["decision"], "read", "{}", next.prefill);
    client.reset(prefill).await;
    (extended(&second, &next.text, "Why?"), next.handle)
}

async fn reading(client: &Client, node: &NodeProcess) {
    let begin = Instant::now();
    while client
        .metric(node, "kvx_sequences{state=\"reading\"}")
        .await
        == 0
    {
        assert!(
            begin.elapsed() < Duration::from_secs(30),
            "no read has begun"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn peers_that_die() {
    let prefill = start("prefill");
    killed_between_turns(&prefill).await;
    killed_during_a_read(&prefill).await;
    a_client_leaves_during_a_read(&prefill).await;
    Client::new().settled(&prefill).await;
}

async fn killed_between_turns(prefill: &NodeProcess) {
    let client = Client::new();
    let mut decode = start("decode");
    let (messages, handle) = begun(&client, (prefill, &decode), "glass").await;
    decode.kill();
    let answer = client.prefill(prefill, &messages, Some(&handle)).await.ok();
    let fallback = answer.report()["fallback"].as_str();
    assert!(fallback.is_some(), "{answer:?}");
    // Another decode node goes on; it knows nothing of the conversation.
    let other = start("decode");
    let turn = client.turn((prefill, &other), &messages, None).await;
    assert_eq!(turn.text, client.computed(prefill, &messages).await);
    assert_eq!(turn.decode["decision"], "read", "{}", turn.decode);
}

async fn killed_during_a_read(prefill: &NodeProcess) {
    let client = Client::new();
    let mut decode = start("decode");
    let (messages, handle) = begun(&client, (prefill, &decode), "copper").await;
    decode.pause();
    let (answer, ()) = tokio::join!(client.prefill(prefill, &messages, Some(&handle)), async {
        reading(&client, prefill).await;
        // Others are served meanwhile.
        client.computed(prefill, &conversation("tin", 1)).await;
        decode.kill();
    });
    let answer = answer.ok();
    assert!(answer.report()["fallback"].is_string(), "{answer:?}");
    let text = client
        .chat(prefill, &messages, serde_json::json!({}))
        .await
        .ok();
    assert_eq!(text.text(), client.computed(prefill, &messages).await);
    client.settled(prefill).await;
}

async fn a_client_leaves_during_a_read(prefill: &NodeProcess) {
    let client = Client::new();
    let mut decode = start("decode");
    let (messages, handle) = begun(&client, (prefill, &decode), "silver").await;
    decode.pause();
    let mut params = handle;
    params["do_remote_decode"] = true.into();
    let extra = serde_json::json!({"messages": messages, "kv_transfer_params": params});
    let patience = Duration::from_secs(1);
    tokio::join!(
        client.leave(prefill, extra, patience),
        reading(&client, prefill)
    );
    client.settled(prefill).await;
    decode.kill();
}

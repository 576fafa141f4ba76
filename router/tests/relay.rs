//! Streams pass byte for byte, as they come, and end in a way that says so.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Value, json};
use support::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;

const HANDLE: &str = r#"{"remote_engine_id":"d","remote_block_ids":[[1,2],[ 3 ]],"x":1.50}"#;

/// Streams with a place for a handle, marked `,@`.
const STREAMS: [&str; 9] = [
    // Reasoning, tool calls, usage with empty choices, text beyond ASCII.
    concat!(
        "data: {\"id\":\"a\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"reasoning_content\":\"größer 日本 🦀\"}}]}\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":0,\"id\":\"t\",\"function\":{\"name\":\"f\",\"arguments\":\"{\\\"a\\\": 1.0}\"}}]}}]}\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"tool_calls\"}],\"n\":1e3,@}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":12345678901234567890123}}\n\n",
        "data: [DONE]\n\n"
    ),
    // CRLF, comments, other fields.
    ": hello\r\n\r\nevent: message\r\nid: 7\r\ndata: {\"choices\":[{\"text\":\"x\"}],@}\r\nretry: 10\r\n\r\n: bye\r\n\r\ndata: [DONE]\r\n\r\n",
    // CR alone.
    "data: {\"choices\":[],@}\r\rdata: [DONE]\r\r",
    // No choices at all, null params, no space after the colon.
    "data:{\"object\":\"x\"}\n\ndata:{\"choices\":[{\"delta\":{\"content\":\"kv_transfer_params\"}}],\"kv_transfer_params\":null}\n\ndata:{\"a\":1,@}\n\n",
    // Several data lines make one event.
    "data: {\"choices\":\ndata:  [],\"b\":2,@\ndata: }\n\ndata: [DONE]\n\n",
    // No end.
    "data: {\"choices\":[]}\n\ndata: {\"c\":3,@}",
    // Nothing that is JSON.
    "\n\n\ndata\n\ndata: not {json\n\n:\n\nfoo: bar\n\nhello\n\n\r\n\r\n",
    // Errors of the node pass.
    "data: {\"error\":{\"message\":\"boom\",\"type\":\"x\",\"code\":null}}\n\ndata: [DONE]\n\n",
    // The key in places where it is none.
    "data: {\"choices\":[{\"delta\":{\"content\":\"\\\"kv_transfer_params\\\": {}\"}}],\"deep\":{\"kv_transfer_params\":{\"a\":1}}}\n\ndata: [DONE]\n\n",
];

fn with_handle(stream: &str) -> String {
    // Within lines, so that no line end gets into the handle.
    stream.replace(",@", &format!(",\"kv_transfer_params\":{HANDLE}"))
}

/// What a client is to get. An event of several lines that is changed is written as one where its JSON
/// has no line ends between values.
fn without_handle(stream: &str) -> String {
    match stream.contains("data:  [],") {
        true => "data: {\"choices\":[],\"b\":2}\n\ndata: [DONE]\n\n".to_owned(),
        false => stream.replace(",@", ""),
    }
}

fn cut(text: &str, cuts: &[usize]) -> Vec<Step> {
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (text.len() + 1)).collect();
    cuts.extend([0, text.len()]);
    cuts.sort_unstable();
    cuts.windows(2)
        .map(|pair| {
            Step::Send(bytes::Bytes::copy_from_slice(
                &text.as_bytes()[pair[0]..pair[1]],
            ))
        })
        .filter(|step| !matches!(step, Step::Send(bytes) if bytes.is_empty()))
        .collect()
}

#[test]
fn what_is_relayed_is_what_came_but_for_the_handle() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let (p, d) = (Node::start("p"), Node::start("d"));
    let client = runtime.block_on(Client::start(config(&[&p], &[&d])));
    let cases = ProptestConfig {
        cases: 200,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    proptest!(cases, |(
        which in prop::sample::subsequence((0..STREAMS.len()).collect::<Vec<_>>(), 1..4),
        cuts in prop::collection::vec(any::<usize>(), 0..40),
        named in any::<bool>(),
    )| {
        // A stream without an end can only be the last.
        let streams: Vec<_> = which.iter().map(|&i| STREAMS[i]).collect();
        let streams = match streams.iter().position(|s| s.ends_with('}')) {
            Some(at) => &streams[..=at],
            None => &streams,
        };
        let sent: String = streams.iter().map(|s| with_handle(s)).collect();
        let expected: String = streams.iter().map(|s| without_handle(s)).collect();
        d.next_stream(cut(&sent, &cuts));
        let mut request = body("c", true);
        if !named {
            request.as_object_mut().unwrap().remove("conversation_id");
        }
        let got = runtime.block_on(client.ok(client.chat(&request)));
        prop_assert_eq!(&got, &expected);
        if named && sent.contains(HANDLE) {
            d.next_stream(vec![send("data: [DONE]\n\n")]);
            runtime.block_on(client.turn("c", true));
            let last = p.last();
            prop_assert_eq!(&last.params()["remote_block_ids"], &json!([[1, 2], [3]]));
            prop_assert!(last.text.contains(r#""remote_block_ids":[[1,2],[ 3 ]],"x":1.50"#));
        }
    });
    runtime.block_on(client.router.shutdown());
}

#[tokio::test]
async fn each_event_arrives_before_the_next_is_sent() {
    let (p, d) = (Node::start("p"), Node::start("d"));
    let client = Client::start(config(&[&p], &[&d])).await;
    let gate = Arc::new(Semaphore::new(0));
    let parts = [
        "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n",
        ": keep-alive\n",
        "\n",
        "data: b\r\n\r",
        "data: [DONE]\n\n",
    ];
    d.next_stream(
        parts
            .iter()
            .flat_map(|part| [send(*part), Step::Wait(Arc::clone(&gate))])
            .collect(),
    );
    let mut response = client.chat(&body("c", true)).send().await.unwrap();
    for part in parts {
        let mut got = Vec::new();
        while got.len() < part.len() {
            got.extend_from_slice(&response.chunk().await.unwrap().expect("the stream ended"));
        }
        // Only now may the node go on.
        assert_eq!(String::from_utf8(got).unwrap(), part);
        gate.add_permits(1);
    }
    assert_eq!(response.chunk().await.unwrap(), None);
}

#[tokio::test]
async fn the_next_turn_finds_the_handle_before_the_stream_has_ended() {
    let (p, d) = (Node::start("p"), Node::start("d"));
    let client = Client::start(config(&[&p], &[&d])).await;
    let gate = Arc::new(Semaphore::new(0));
    let last = json!({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}], "kv_transfer_params": handle_of("d", 9)});
    d.next_stream(vec![
        send(format!("data: {last}\n\ndata: [DONE]\n\n")),
        Step::Wait(Arc::clone(&gate)),
    ]);
    let request =
        json!({"model": "m", "stream": true, "messages": [{"role": "user", "content": "hi"}]});
    let mut response = client.chat(&request).send().await.unwrap();
    response.chunk().await.unwrap().unwrap();
    let next = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "go on"}]});
    client.ok(client.chat(&next)).await;
    assert_eq!(p.last().params(), &handle_of("d", 9));
    gate.add_permits(1);
}

#[tokio::test]
async fn a_stream_that_breaks_off_ends_with_an_error() {
    let (p, d) = (Node::start("p"), Node::start("d"));
    let mut config = config(&[&p], &[&d]);
    config.max_event_bytes = 64;
    let client = Client::start(config).await;
    let event = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n";
    for (sent, relayed) in [
        (event.to_owned(), event.to_owned()),
        // A part of an event is of no use.
        (format!("{event}data: {{\"cho"), event.to_owned()),
        // What went out in parts is ended first.
        (
            format!("data: {}", "x".repeat(100)),
            format!("data: {}\n\n", "x".repeat(100)),
        ),
    ] {
        d.next_stream(vec![send(sent), Step::Break]);
        let text = client.turn("c", true).await;
        let error = text
            .strip_prefix(&relayed)
            .unwrap_or_else(|| panic!("{text}"));
        let error = error
            .strip_prefix("data: ")
            .unwrap()
            .strip_suffix("\n\n")
            .unwrap();
        let error: Value = serde_json::from_str(error).unwrap();
        assert_eq!(error["error"]["code"], json!("node_lost"));
        assert_eq!(error["error"]["type"], json!("upstream_error"));
    }
    assert_eq!(client.outcomes("cut").await, 3);
    client.turn("c", true).await;
    assert_eq!(client.outcomes("ok").await, 1);
}

#[tokio::test]
async fn a_stream_that_falls_silent_ends_with_an_error() {
    let (p, d) = (Node::start("p"), Node::start("d"));
    let mut config = config(&[&p], &[&d]);
    config.idle_timeout = Duration::from_millis(50);
    let client = Client::start(config).await;
    d.next_stream(vec![send("data: a\n\n"), Step::Hang]);
    let text = client.turn("c", true).await;
    assert!(
        text.starts_with("data: a\n\ndata: {\"error\":") && text.contains("node_silent"),
        "{text}"
    );
    d.cancelled(1).await;
}

/// An answer whose end is that of the connection, as HTTP/1.0 has it, looks whole wherever it breaks.
#[tokio::test]
async fn without_framing_an_end_too_early_is_told_from_a_good_one() {
    let (p, d) = (Node::start("p"), Node::start("d"));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut config = config(&[&p], &[&d]);
    config.decode = vec![listener.local_addr().unwrap().to_string().parse().unwrap()];
    config.health_interval = LONG;
    tokio::spawn(async move {
        let mut answers = ["data: a\n\n", "data: a\n\ndata: [DONE]\n\n"].iter();
        while let Ok((mut socket, _)) = listener.accept().await {
            let mut request = Vec::new();
            while !request.ends_with(b"}") && !request.ends_with(b"\r\n\r\n") {
                if socket.read_buf(&mut request).await.unwrap() == 0 {
                    break;
                }
            }
            // Headers may come in a packet of their own.
            if request.starts_with(b"POST") && !request.ends_with(b"}") {
                while !request.ends_with(b"}") && socket.read_buf(&mut request).await.unwrap() > 0 {
                }
            }
            let (kind, body) = match request.starts_with(b"POST") {
                true => ("text/event-stream", *answers.next().unwrap_or(&"")),
                false => ("text/plain", "ok"),
            };
            let answer = format!("HTTP/1.0 200 OK\r\ncontent-type: {kind}\r\n\r\n{body}");
            socket.write_all(answer.as_bytes()).await.unwrap();
        }
    });
    let client = Client::start(config).await;
    let text = client.turn("c", true).await;
    assert!(text.contains("node_lost"), "{text}");
    let text = client.turn("c", true).await;
    assert_eq!(text, "data: a\n\ndata: [DONE]\n\n");
}

#[tokio::test]
async fn events_over_the_limit_pass_and_are_counted() {
    let (p, d) = (Node::start("p"), Node::start("d"));
    let mut config = config(&[&p], &[&d]);
    config.max_event_bytes = 1000;
    let client = Client::start(config).await;
    let long = format!("data: {}\n\n", "y".repeat(5000));
    let (head, tail) = long.split_at(3000);
    // Seen to be too long before it has ended.
    let gate = Arc::new(Semaphore::new(0));
    let steps = [
        send(head),
        Step::Wait(Arc::clone(&gate)),
        send(tail),
        send("data: [DONE]\n\n"),
    ];
    d.next_stream(steps.to_vec());
    let mut response = client.chat(&body("c", true)).send().await.unwrap();
    let mut got = response.chunk().await.unwrap().unwrap().to_vec();
    gate.add_permits(1);
    got.extend_from_slice(&response.bytes().await.unwrap());
    assert_eq!(got, format!("{long}data: [DONE]\n\n").as_bytes());
    assert_eq!(client.metric("kvx_router_oversized_events_total").await, 1);
}

#[tokio::test]
async fn a_client_that_goes_away_cancels_the_leg_under_way() {
    let (p, d) = (Node::start("p"), Node::start("d"));
    let client = Client::start(config(&[&p], &[&d])).await;
    // While prefill computes.
    p.next(Reply::Hang);
    let request = tokio::spawn(client.chat(&body("c", true)).send());
    until(|| async { p.count() == 1 }).await;
    request.abort();
    p.cancelled(1).await;
    // While decode has not begun.
    d.next(Reply::Hang);
    let request = tokio::spawn(client.chat(&body("c", true)).send());
    until(|| async { d.count() == 1 }).await;
    request.abort();
    d.cancelled(1).await;
    // While decode streams.
    d.next_stream(vec![send("data: a\n\n"), Step::Hang]);
    let mut response = client.chat(&body("c", true)).send().await.unwrap();
    response.chunk().await.unwrap().unwrap();
    drop(response);
    d.cancelled(2).await;
    until(|| async { client.outcomes("client_gone").await == 3 }).await;
    until(|| async { client.metric("kvx_router_in_flight{role=\"decode\"}").await == 0 }).await;
    assert_eq!(
        client
            .metric("kvx_router_in_flight{role=\"prefill\"}")
            .await,
        0
    );
    // The conversation goes on.
    client.turn("c", true).await;
}

#[tokio::test]
async fn a_client_that_stops_reading_is_left() {
    let (p, d) = (Node::start("p"), Node::start("d"));
    let mut config = config(&[&p], &[&d]);
    config.stall_timeout = Duration::from_millis(200);
    let client = Client::start(config).await;
    // More than the buffers of all sockets on the way.
    let part = bytes::Bytes::from(format!("data: {}\n\n", "x".repeat(64 << 10)));
    d.next_stream(vec![Step::Send(part); 1024]);
    let mut socket = tokio::net::TcpStream::connect(client.router.addr)
        .await
        .unwrap();
    let body = body("c", true).to_string();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all(head.as_bytes()).await.unwrap();
    socket.write_all(body.as_bytes()).await.unwrap();
    // It stays, and reads nothing.
    d.cancelled(1).await;
    until(|| async { client.outcomes("client_gone").await == 1 }).await;
    until(|| async { client.metric("kvx_router_in_flight{role=\"decode\"}").await == 0 }).await;
    // What it could still read ends, and not as a whole answer does.
    let mut got = Vec::new();
    let ended = tokio::time::timeout(LONG, socket.read_to_end(&mut got)).await;
    assert!(ended.expect("the connection is closed").is_err() || !got.ends_with(b"0\r\n\r\n"));
    // The conversation goes on.
    client.turn("c", true).await;
}

//! The HTTP side: errors, limits, addresses, many at once.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use kvx_router::{ApiKeys, Router, StartError};
use serde_json::{Value, json};
use support::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;

async fn pair_with(set: impl FnOnce(&mut kvx_router::RouterConfig)) -> (Node, Node, Client) {
    let (p, d) = (Node::start("p"), Node::start("d"));
    let mut config = config(&[&p], &[&d]);
    set(&mut config);
    let client = Client::start(config).await;
    (p, d, client)
}

#[tokio::test]
async fn wrong_requests_are_refused_in_openais_form() {
    let (p, d, client) = pair_with(|config| config.max_request_bytes = 1000).await;
    let chat = client.url("/v1/chat/completions");
    for (request, status) in [
        (client.http.get(client.url("/v1/nothing")), 404),
        (client.http.post(client.url("/")), 404),
        (client.http.get(&chat), 405),
        (client.http.post(client.url("/v1/models")), 405),
        (client.http.post(&chat), 400),
        (client.http.post(&chat).body("{"), 400),
        (client.http.post(&chat).body("[1]"), 400),
        (client.http.post(&chat).body("{\"model\":1}"), 400),
        (client.http.post(&chat).body(vec![b'{', 0xff, b'}']), 400),
        (client.http.post(&chat).body(" ".repeat(1001)), 413),
    ] {
        let (got, error) = client.failed(request).await;
        assert_eq!(got, status, "{error}");
        assert_eq!(error["type"], json!("invalid_request_error"));
    }
    assert_eq!(p.count() + d.count(), 0);
}

#[tokio::test]
async fn only_listed_keys_may_ask_where_keys_are_listed() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "# keys\n\n  one \ntwo\n").unwrap();
    let (p, _d, client) =
        pair_with(|config| config.api_keys = Some(ApiKeys::read(file.path()).unwrap())).await;
    let with = |value: &'static str| client.chat(&body("c", true)).header("authorization", value);
    for value in ["Bearer three", "Bearer", "one ", "Bearer # keys"] {
        if value == "one " {
            continue;
        }
        let (status, error) = client.failed(with(value)).await;
        assert_eq!(
            (status, &error["code"]),
            (401, &json!("invalid_api_key")),
            "{value}"
        );
    }
    let (status, _) = client.failed(client.chat(&body("c", true))).await;
    assert_eq!(status, 401);
    let (status, _) = client
        .failed(client.http.get(client.url("/v1/models")))
        .await;
    assert_eq!(status, 401);
    assert_eq!(p.count(), 0);
    client.ok(with("Bearer one")).await;
    client.ok(with("Bearer two")).await;
    client.metrics().await;
    std::fs::write(file.path(), "# none\n").unwrap();
    assert!(ApiKeys::read(file.path()).is_err());
}

#[tokio::test]
async fn models_health_and_metrics_are_there() {
    let (mut p, _d, client) = pair_with(|_| {}).await;
    let models: Value =
        serde_json::from_str(&client.ok(client.http.get(client.url("/v1/models"))).await).unwrap();
    assert_eq!(models["data"][0]["id"], json!("p"));
    p.kill();
    until(|| async {
        let models = client.ok(client.http.get(client.url("/v1/models"))).await;
        models.contains("\"d\"")
    })
    .await;
    let health: Value =
        serde_json::from_str(&client.ok(client.http.get(client.url("/health"))).await).unwrap();
    assert_eq!(health["status"], json!("ok"));
    assert_eq!(health["decode"]["up"], json!(1));
    assert!(
        client
            .metrics()
            .await
            .contains("# TYPE kvx_router_hits_total counter")
    );
}

#[tokio::test]
async fn headers_pass_both_ways_but_those_of_a_connection_do_not() {
    let (_p, d, client) = pair_with(|_| {}).await;
    let request = client
        .chat(&body("c", false))
        .header("x-mine", "1")
        .header("x-hop", "2")
        .header("connection", "x-hop")
        .header("accept-encoding", "gzip");
    client.ok(request).await;
    let seen = d.last();
    assert_eq!(seen.header("x-mine"), "1");
    for name in ["x-hop", "accept-encoding"] {
        assert_eq!(seen.header(name), "", "{name}");
    }
    assert_eq!(seen.header("host"), d.addr.to_string());
}

#[tokio::test]
async fn ipv6_works_on_both_sides() {
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        let _ = writeln!(std::io::stderr(), "skipped: no IPv6 on this machine");
        return;
    }
    let (p, d) = (
        Node::at("p", "[::1]:0".parse().unwrap()),
        Node::at("d", "[::1]:0".parse().unwrap()),
    );
    for host in ["::1", "[::1]"] {
        let mut config = config(&[&p], &[&d]);
        config.host = host.to_owned();
        let client = Client::start(config).await;
        assert!(client.router.addr.to_string().starts_with("[::1]:"));
        client.turn("c", true).await;
        assert!(d.last().header("host").starts_with("[::1]:"));
    }
}

/// A loopback address with a scope id goes a way of its own, since URLs have no form for it.
#[tokio::test]
async fn scope_ids_are_kept_when_connecting() {
    let p = match std::net::TcpListener::bind("[::1]:0") {
        Ok(_) => Node::at("p", "[::1]:0".parse().unwrap()),
        Err(_) => {
            return drop(writeln!(
                std::io::stderr(),
                "skipped: no IPv6 on this machine"
            ));
        }
    };
    let d = Node::start("d");
    let mut config = config(&[&p], &[&d]);
    config.prefill = vec![format!("http://[::1%1]:{}", p.addr.port()).parse().unwrap()];
    let client = Client::start(config.clone()).await;
    client.turn("c", true).await;
    assert_eq!(p.last().header("host"), format!("[::1]:{}", p.addr.port()));
    config.prefill = vec!["http://[fe80::1%nosuchif0]:1".parse().unwrap()];
    let error = Router::start(config).await.unwrap_err();
    assert!(
        matches!(error, StartError::Config(_)) && error.to_string().contains("nosuchif0"),
        "{error}"
    );
}

#[tokio::test]
async fn a_port_that_is_taken_and_bad_settings_are_errors() {
    let (p, d) = (Node::start("p"), Node::start("d"));
    let mut config = config(&[&p], &[&d]);
    config.port = p.addr.port();
    let error = Router::start(config.clone()).await.unwrap_err();
    assert!(matches!(error, StartError::Listen { .. }), "{error}");
    config.port = 0;
    config.idle_timeout = Duration::ZERO;
    let error = Router::start(config.clone()).await.unwrap_err();
    assert_eq!(error.to_string(), "idle-timeout must be more than 0");
    config.decode.clear();
    let error = Router::start(config).await.unwrap_err();
    assert!(error.to_string().contains("--decode"), "{error}");
}

/// Sends the beginning of a request, and then nothing. Gives what is answered until the connection is closed.
async fn begins(client: &Client, request: &str) -> String {
    let mut socket = tokio::net::TcpStream::connect(client.router.addr)
        .await
        .unwrap();
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    tokio::time::timeout(LONG, socket.read_to_string(&mut answer))
        .await
        .expect("the connection is closed")
        .unwrap();
    answer
}

#[tokio::test]
async fn a_client_that_does_not_send_its_request_is_left() {
    let (p, d, client) =
        pair_with(|config| config.request_timeout = Duration::from_millis(200)).await;
    let post = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n";
    for begun in ["", "PO", post] {
        assert_eq!(begins(&client, begun).await, "", "{begun}");
    }
    // One whose headers came is told.
    let late = begins(&client, &format!("{post}content-length: 9\r\n\r\n{{")).await;
    assert!(late.starts_with("HTTP/1.1 408 "), "{late}");
    assert!(late.contains("\"request_timeout\""), "{late}");
    // One that asked before may ask again, or is left.
    let kept = begins(&client, "GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert!(kept.starts_with("HTTP/1.1 200 "), "{kept}");
    assert_eq!(p.count() + d.count(), 0);
    // An answer may take longer than that.
    let gate = Arc::new(Semaphore::new(0));
    d.next_stream(vec![
        Step::Wait(Arc::clone(&gate)),
        send("data: [DONE]\n\n"),
    ]);
    let answer = tokio::spawn(client.chat(&body("c", true)).send());
    tokio::time::sleep(Duration::from_millis(600)).await;
    gate.add_permits(1);
    let answer = answer.await.unwrap().unwrap().text().await.unwrap();
    assert!(answer.contains("[DONE]"), "{answer}");
}

#[tokio::test]
async fn two_hundred_at_once_are_all_answered() {
    let (p, d, client) = pair_with(|_| {}).await;
    for turn in 0..2 {
        let turns: Vec<_> = (0..200)
            .map(|n| tokio::spawn(client.chat(&body(&n.to_string(), n % 2 == 0)).send()))
            .collect();
        for turn in turns {
            let response = turn.await.unwrap().unwrap();
            assert_eq!(response.status(), 200);
            response.text().await.unwrap();
        }
        assert_eq!(client.hits().await, 200 * turn);
    }
    assert_eq!((p.count(), d.count()), (400, 400));
    // Every handle reached the conversation's own next turn.
    for seen in p.seen().iter().skip(200) {
        let n = seen.params()["remote_block_ids"][0][0].as_u64().unwrap();
        let told = d.seen()[..200]
            .iter()
            .filter(|s| s.header("x-conversation-id") == seen.header("x-conversation-id"))
            .count();
        assert!(n < 200 && told == 1);
    }
    assert_eq!(
        client.metric("kvx_router_in_flight{role=\"decode\"}").await,
        0
    );
}

//! Nodes that fail, and how a request gets its answer all the same.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use support::*;
use tokio::sync::Semaphore;

/// Two nodes of each role; `first` is chosen first.
async fn four(set: impl FnOnce(&mut kvx_router::RouterConfig)) -> ([Node; 2], [Node; 2], Client) {
    let p = [Node::start("p0"), Node::start("p1")];
    let d = [Node::start("d0"), Node::start("d1")];
    let mut config = config(&[&p[0], &p[1]], &[&d[0], &d[1]]);
    // Only what the legs themselves see counts here.
    config.health_interval = LONG;
    set(&mut config);
    (p, d, Client::start(config).await)
}

fn failing(status: u16) -> Reply {
    Reply::Json(
        status,
        json!({"error": {"message": "no", "type": "x", "param": null, "code": null}}).to_string(),
    )
}

#[tokio::test]
async fn a_failed_prefill_is_tried_elsewhere_with_the_same_handle() {
    for (failure, reached) in [
        (failing(500), 2),
        (failing(503), 2),
        (failing(429), 2),
        (Reply::BrokenJson, 2),
        (Reply::Json(200, "no".into()), 2),
    ] {
        let (p, d, client) = four(|_| {}).await;
        client.turn("c", true).await;
        p[0].next(failure);
        let text = client.turn("c", true).await;
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        assert_eq!((p[0].count(), p[1].count()), (reached, 1));
        let handle = handle_of("d0", 0);
        assert_eq!(
            (p[0].last().params(), p[1].last().params()),
            (&handle, &handle)
        );
        assert_eq!(d[0].last().params(), &handle_of("p1", 0));
        assert_eq!(
            client
                .metric("kvx_router_retries_total{leg=\"prefill\"}")
                .await,
            1
        );
    }
}

#[tokio::test]
async fn without_prefill_decode_computes_all() {
    let (mut p, d, client) = four(|_| {}).await;
    client.turn("c", true).await;
    for p in &p {
        p.always(failing(500));
    }
    let text = client
        .ok(client.chat(&body("c", true)).header("X-KVX-Report", "1"))
        .await;
    // Nothing to read, and its own blocks to describe.
    assert_eq!(d[0].last().params()["do_remote_prefill"], json!(false));
    assert_eq!(d[0].last().params()["do_remote_decode"], json!(false));
    let report = events(&text).pop().unwrap()["kvx"]["router"].clone();
    assert_eq!(
        (&report["fallback"], &report["prefill_node"]),
        (&json!("decode_alone"), &Value::Null)
    );
    assert_eq!(
        client
            .metric("kvx_router_fallbacks_total{to=\"decode_alone\"}")
            .await,
        1
    );
    for p in &mut p {
        p.kill();
    }
    client.turn("c", true).await;
    client.turn("c", true).await;
    assert_eq!(
        client
            .metric("kvx_router_nodes{role=\"prefill\",state=\"down\"}")
            .await,
        2
    );
    assert_eq!(client.outcomes("ok").await, 4);
}

#[tokio::test]
async fn a_handle_that_reached_no_node_is_kept() {
    let (mut p, d, client) = four(|_| {}).await;
    for p in &p {
        p.keep_no_connections();
    }
    // Uses up the connections over which health was asked for.
    client.turn("a", true).await;
    client.turn("b", true).await;
    client.turn("c", true).await;
    for p in &mut p {
        p.kill();
    }
    // Decode does not help either: the turn fails as a whole.
    for d in &d {
        d.next(failing(500));
    }
    let (status, _) = client.failed(client.chat(&body("c", true))).await;
    assert_eq!(status, 500);
    for p in &mut p {
        p.restart();
    }
    until(|| async {
        client
            .metric("kvx_router_nodes{role=\"prefill\",state=\"up\"}")
            .await
            == 2
    })
    .await;
    client.turn("c", true).await;
    let params: Vec<_> = p
        .iter()
        .flat_map(Node::seen)
        .map(|seen| seen.params()["remote_engine_id"].clone())
        .collect();
    assert!(params.iter().any(|engine| !engine.is_null()), "{params:?}");
}

#[tokio::test]
async fn a_request_that_prefill_refuses_is_refused_and_keeps_its_handle() {
    let (p, d, client) = four(|_| {}).await;
    client.turn("c", true).await;
    p[0].next(failing(400));
    let (status, error) = client.failed(client.chat(&body("c", true))).await;
    assert_eq!((status, &error["message"]), (400, &json!("no")));
    assert_eq!(d[0].count() + d[1].count(), 1, "decode was not asked");
    client.turn("c", true).await;
    assert_eq!(p[0].last().params(), &handle_of("d0", 0));
    assert_eq!(client.outcomes("client_error").await, 1);
}

#[tokio::test]
async fn a_failed_decode_is_tried_elsewhere_with_the_same_params() {
    for (stream, failure) in [
        (true, failing(500)),
        (true, Reply::Stream(vec![Step::Break])),
        (true, Reply::Stream(vec![])),
        (false, Reply::BrokenJson),
        (false, failing(502)),
    ] {
        let (_p, d, client) = four(|_| {}).await;
        d[0].next(failure);
        let text = client.turn("c", stream).await;
        assert!(
            text.contains("of d1") || stream && text.ends_with("[DONE]\n\n"),
            "{text}"
        );
        assert_eq!((d[0].count(), d[1].count()), (1, 1));
        assert_eq!(d[0].last().params(), &handle_of("p0", 0));
        assert_eq!(d[0].last().body, d[1].last().body);
        assert_eq!(
            client
                .metric("kvx_router_retries_total{leg=\"decode\"}")
                .await,
            1
        );
    }
}

#[tokio::test]
async fn without_decode_a_prefill_node_answers_whole() {
    let (p, mut d, client) = four(|_| {}).await;
    for d in &mut d {
        d.kill();
    }
    let text = client.turn("c", true).await;
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    assert!(!text.contains("kv_transfer_params"), "{text}");
    // Nothing to read, and its own blocks to describe.
    assert_eq!(p[0].last().params()["do_remote_prefill"], json!(false));
    assert_eq!(p[0].last().params()["do_remote_decode"], json!(false));
    assert_eq!(p[0].last().body["stream"], json!(true));
    assert_eq!(
        client
            .metric("kvx_router_fallbacks_total{to=\"prefill_alone\"}")
            .await,
        1
    );
    // Its blocks are read in the next turn.
    client.turn("c", true).await;
    assert_eq!(client.hits().await, 1);
}

#[tokio::test]
async fn the_legs_have_deadlines() {
    let (p, d, client) = four(|config| {
        config.prefill_timeout = Duration::from_millis(60);
        config.first_byte_timeout = Duration::from_millis(60);
        config.answer_timeout = Duration::from_millis(60);
    })
    .await;
    p[0].next(Reply::Hang);
    d[0].next(Reply::Hang);
    let text = client.turn("c", true).await;
    assert!(text.ends_with("[DONE]\n\n"), "{text}");
    p[0].cancelled(1).await;
    d[0].cancelled(1).await;
    for node in p.iter().chain(&d) {
        node.always(Reply::Hang);
    }
    for stream in [true, false] {
        let (status, error) = client.failed(client.chat(&body("c", stream))).await;
        assert_eq!((status, &error["code"]), (504, &json!("node_timeout")));
    }
}

#[tokio::test]
async fn a_node_that_goes_down_without_a_word_is_not_waited_for() {
    let (p, d, client) = four(|config| config.health_interval = Duration::from_millis(20)).await;
    for hung in [&p[0], &d[0]] {
        hung.always(Reply::Hang);
    }
    let asked = async {
        let first = client.turn("streamed", true).await;
        for hung in [&p[0], &d[0]] {
            assert_eq!(hung.count(), 1);
        }
        first
    };
    let go_down = async {
        for hung in [&p[0], &d[0]] {
            until(|| async { hung.count() > 0 }).await;
            hung.set_health(503);
        }
    };
    let (text, ()) = tokio::join!(asked, go_down);
    assert!(text.ends_with("[DONE]\n\n"), "{text}");
    assert_eq!((p[1].count(), d[1].count()), (1, 1));
    // The same for an answer in one piece.
    d[0].set_health(200);
    until(|| async {
        client
            .metric("kvx_router_nodes{role=\"decode\",state=\"down\"}")
            .await
            == 0
    })
    .await;
    d[1].set_health(503);
    until(|| async {
        client
            .metric("kvx_router_nodes{role=\"decode\",state=\"down\"}")
            .await
            == 1
    })
    .await;
    let go_down = async {
        until(|| async { d[0].count() > 1 }).await;
        d[1].set_health(200);
        d[0].set_health(503);
    };
    tokio::join!(client.turn("whole", false), go_down);
    assert_eq!((d[0].count(), d[1].count()), (2, 2));
}

#[tokio::test]
async fn with_all_nodes_gone_the_client_is_told() {
    let (mut p, mut d, client) = four(|_| {}).await;
    for node in p.iter_mut().chain(&mut d) {
        node.kill();
    }
    let (status, error) = client.failed(client.chat(&body("c", true))).await;
    assert_eq!((status, &error["code"]), (502, &json!("node_failed")));
    let response = client.chat(&body("c", true)).send().await.unwrap();
    assert_eq!(
        (
            response.status().as_u16(),
            &response.headers()["retry-after"]
        ),
        (503, &"1".parse().unwrap())
    );
    assert_eq!(client.outcomes("no_node").await, 1);
    let health = client.http.get(client.url("/health")).send().await.unwrap();
    assert_eq!(health.status(), 503);
    for node in p.iter_mut().chain(&mut d) {
        node.restart();
    }
    until(|| async {
        client
            .http
            .get(client.url("/health"))
            .send()
            .await
            .unwrap()
            .status()
            == 200
    })
    .await;
    until(|| async { client.chat(&body("c", true)).send().await.unwrap().status() == 200 }).await;
}

#[tokio::test]
async fn a_handle_is_given_up_when_its_holder_is_down() {
    let (p, mut d, client) =
        four(|config| config.health_interval = Duration::from_millis(20)).await;
    client.turn("c", true).await;
    d[0].kill();
    let down = "kvx_router_nodes{role=\"decode\",state=\"down\"}";
    until(|| async { client.metric(down).await == 1 }).await;
    client.turn("c", true).await;
    assert_eq!(p[0].last().params()["remote_engine_id"], Value::Null);
    assert_eq!(client.misses("node_gone").await, 1);
    d[0].restart();
    until(|| async { client.metric(down).await == 0 }).await;
}

#[tokio::test]
async fn nodes_that_say_that_they_cannot_serve_get_nothing_until_they_can() {
    let (p, d, client) = four(|config| config.health_interval = Duration::from_millis(20)).await;
    d[0].set_health(503);
    let down = "kvx_router_nodes{role=\"decode\",state=\"down\"}";
    until(|| async { client.metric(down).await == 1 }).await;
    for n in 0..4 {
        client.turn(&n.to_string(), true).await;
    }
    assert_eq!((d[0].count(), d[1].count()), (0, 4));
    assert_eq!(p[0].count() + p[1].count(), 4);
    d[0].set_health(200);
    until(|| async { client.metric(down).await == 0 }).await;
    for n in 4..8 {
        client.turn(&n.to_string(), true).await;
    }
    assert_eq!((d[0].count(), d[1].count()), (2, 6), "in turn again");
}

#[tokio::test]
async fn conversations_stay_with_their_nodes_and_new_ones_go_round() {
    let (p, d, client) = four(|_| {}).await;
    for _ in 0..3 {
        for name in ["a", "b", "c"] {
            client.turn(name, true).await;
        }
    }
    for nodes in [&p, &d] {
        for node in nodes.iter() {
            let mut names: Vec<_> = node
                .seen()
                .iter()
                .map(|s| s.header("x-conversation-id").to_owned())
                .collect();
            names.sort();
            assert_eq!(names.len() % 3, 0, "{names:?}");
        }
        assert_eq!((nodes[0].count(), nodes[1].count()), (6, 3));
    }
}

#[tokio::test]
async fn a_conversations_node_is_left_when_it_is_overloaded() {
    let (p, _d, client) = four(|config| config.affinity_slack = 2).await;
    client.turn("c", true).await;
    let gate = Arc::new(Semaphore::new(0));
    p[0].always(Reply::Gate(Arc::clone(&gate)));
    p[1].always(Reply::Gate(Arc::clone(&gate)));
    let turns: Vec<_> = (0..4)
        .map(|_| tokio::spawn(client.chat(&body("c", true)).send()))
        .collect();
    until(|| async { p[0].count() + p[1].count() == 5 }).await;
    assert_eq!((p[0].count(), p[1].count()), (1 + 3, 1));
    gate.add_permits(100);
    for turn in turns {
        assert_eq!(turn.await.unwrap().unwrap().status(), 200);
    }
}

/// Field report: without params in streams "on" silently equals "off".
#[tokio::test]
async fn misses_for_want_of_params_are_warned_of_once() {
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);
    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_writer(move || writer.clone())
        .with_ansi(false)
        .finish();
    // For this thread, which runs the router, too.
    let _guard = tracing::subscriber::set_default(subscriber);
    let (_p, d, client) = four(|_| {}).await;
    let warnings = || {
        String::from_utf8(log.0.lock().clone())
            .unwrap()
            .matches("no kv_transfer_params")
            .count()
    };
    let bare = Reply::Stream(vec![
        send("data: {\"choices\":[]}\n\n"),
        send("data: [DONE]\n\n"),
    ]);
    for d in &d {
        d.always(bare.clone());
    }
    for (turns, warned) in [(3, 0), (1, 1), (5, 1)] {
        for _ in 0..turns {
            client.turn("c", true).await;
        }
        assert_eq!(warnings(), warned);
    }
    assert_eq!(client.misses("no_params").await, 8);
}

#[tokio::test]
async fn shutting_down_lets_answers_end_and_cuts_those_that_do_not() {
    let (_p, d, client) = four(|config| config.grace = LONG).await;
    let gate = Arc::new(Semaphore::new(0));
    d[0].next_stream(vec![
        send("data: a\n\n"),
        Step::Wait(Arc::clone(&gate)),
        send("data: [DONE]\n\n"),
    ]);
    let mut response = client.chat(&body("c", true)).send().await.unwrap();
    response.chunk().await.unwrap().unwrap();
    let url = client.url("/health");
    let shutdown = tokio::spawn(client.router.shutdown());
    until(|| async { client.http.get(&url).send().await.is_err() }).await;
    gate.add_permits(1);
    assert_eq!(response.text().await.unwrap(), "data: [DONE]\n\n");
    shutdown.await.unwrap();

    let (_p, d, client) = four(|config| config.grace = Duration::from_millis(20)).await;
    d[0].next_stream(vec![send("data: a\n\n"), Step::Hang]);
    let mut response = client.chat(&body("c", true)).send().await.unwrap();
    response.chunk().await.unwrap().unwrap();
    let shutdown = tokio::spawn(client.router.shutdown());
    let text = response.text().await.unwrap();
    assert!(text.contains("router_closing"), "{text}");
    shutdown.await.unwrap();
    d[0].cancelled(1).await;
}

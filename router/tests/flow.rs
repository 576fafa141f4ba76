//! The way of a request: two legs, the handle between turns, whose it is.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use support::*;
use tokio::sync::Semaphore;

async fn pair() -> (Node, Node, Client) {
    pair_with(|_| {}).await
}

async fn pair_with(set: impl FnOnce(&mut kvx_router::RouterConfig)) -> (Node, Node, Client) {
    let (p, d) = (Node::start("p"), Node::start("d"));
    let mut config = config(&[&p], &[&d]);
    set(&mut config);
    let client = Client::start(config).await;
    (p, d, client)
}

#[tokio::test]
async fn a_first_turn_goes_to_prefill_then_decode() {
    let (p, d, client) = pair().await;
    let mut request = body("c", true);
    request["stream_options"] = json!({"include_usage": true});
    request["max_completion_tokens"] = json!(50);
    let response = client
        .chat(&request)
        .header("authorization", "Bearer k")
        .send()
        .await
        .unwrap();
    assert_eq!(
        response.headers()["content-type"],
        "text/event-stream; charset=utf-8"
    );
    let id = response.headers()["x-request-id"]
        .to_str()
        .unwrap()
        .to_owned();
    let text = response.text().await.unwrap();
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    assert!(
        !text.contains("kv_transfer_params") && !text.contains("10.9.8.7"),
        "{text}"
    );

    let (to_p, to_d) = (p.last(), d.last());
    assert_eq!(
        (to_p.path.as_str(), to_d.path.as_str()),
        ("/v1/chat/completions", "/v1/chat/completions")
    );
    assert_eq!(to_p.body["stream"], json!(false));
    assert_eq!(to_p.body["max_tokens"], json!(1));
    for field in ["stream_options", "max_completion_tokens", "conversation_id"] {
        assert!(to_p.body.get(field).is_none(), "{field}");
    }
    assert_eq!(to_p.params()["remote_engine_id"], Value::Null);
    assert_eq!(to_p.params()["do_remote_decode"], json!(true));
    let mut sent = request.clone();
    sent.as_object_mut().unwrap().remove("conversation_id");
    sent["kv_transfer_params"] = handle_of("p", 0);
    assert_eq!(to_d.body, sent);
    for seen in [&to_p, &to_d] {
        assert_eq!(seen.header("x-conversation-id"), "c");
        assert_eq!(seen.header("x-request-id"), id);
        assert_eq!(seen.header("authorization"), "Bearer k");
    }
    assert_eq!(client.misses("unknown").await, 1);
    assert_eq!(client.outcomes("ok").await, 1);
}

#[tokio::test]
async fn the_next_turn_takes_the_handle_along_once() {
    for stream in [true, false] {
        let (p, _d, client) = pair().await;
        for n in 0..3 {
            client.turn("c", stream).await;
            let params = p.last().params().clone();
            if n > 0 {
                assert_eq!(params, handle_of("d", n - 1), "all fields survive");
            }
        }
        assert_eq!(client.hits().await, 2);
        let metrics = client.metrics().await;
        assert!(
            metrics.contains("kvx_router_handle_age_seconds_count 2"),
            "{metrics}"
        );
        assert!(
            metrics.contains("kvx_router_handle_bytes_count 3"),
            "{metrics}"
        );
        assert!(metrics.contains("kvx_router_conversations 1"), "{metrics}");
    }
}

#[tokio::test]
async fn an_answer_in_one_piece_keeps_its_fields() {
    let (_p, _d, client) = pair().await;
    let answer: Value = serde_json::from_str(&client.turn("c", false).await).unwrap();
    assert_eq!(answer["usage"]["total_tokens"], json!(7));
    assert_eq!(
        answer["choices"][0]["message"]["content"],
        json!("answer 0 of d")
    );
    assert!(answer.get("kv_transfer_params").is_none());
}

#[tokio::test]
async fn the_header_names_a_conversation_too() {
    let (p, _d, client) = pair().await;
    let request = json!({"model": "m", "messages": []});
    for _ in 0..2 {
        client
            .ok(client
                .chat(&request)
                .header("X-Conversation-ID", "from header"))
            .await;
    }
    assert_eq!(p.last().params(), &handle_of("d", 0));
    assert_eq!(p.last().header("x-conversation-id"), "from header");
}

#[tokio::test]
async fn bad_ids_are_refused_and_lose_nothing() {
    let (p, _d, client) = pair().await;
    client.turn("c", true).await;
    for id in [
        json!(""),
        json!("x".repeat(257)),
        json!("a\nb"),
        json!("a\u{0}"),
        json!(7),
        json!(["c"]),
    ] {
        let mut request = body("c", true);
        request["conversation_id"] = id.clone();
        let (status, error) = client.failed(client.chat(&request)).await;
        assert_eq!(
            (status, &error["param"]),
            (400, &json!("conversation_id")),
            "{id}"
        );
    }
    let none = json!({"model": "m", "messages": []});
    for id in [String::new(), "x".repeat(257), "a\tb".to_owned()] {
        let request = client.chat(&none).header("X-Conversation-ID", &id);
        let (status, error) = client.failed(request).await;
        assert_eq!(status, 400, "{id}");
        assert!(
            error["message"]
                .as_str()
                .unwrap()
                .starts_with("X-Conversation-ID"),
            "{error}"
        );
    }
    assert_eq!(p.count(), 1, "no node was asked");
    client.turn("c", true).await;
    assert_eq!(client.hits().await, 1, "the handle is still there");
    assert_eq!(client.outcomes("client_error").await, 9);
}

#[tokio::test]
async fn tenants_and_models_do_not_reach_each_others_handles() {
    let (p, _d, client) = pair().await;
    let ask = |key: &'static str, model: &'static str| {
        let mut request = body("same", true);
        request["model"] = json!(model);
        client.ok(client
            .chat(&request)
            .header("authorization", format!("Bearer {key}")))
    };
    ask("a", "m").await;
    ask("b", "m").await;
    assert_eq!(p.last().params()["remote_engine_id"], Value::Null);
    client.turn("same", true).await;
    assert_eq!(
        p.last().params()["remote_engine_id"],
        Value::Null,
        "without a key"
    );
    ask("a", "other").await;
    assert_eq!(p.last().params()["remote_engine_id"], Value::Null);
    assert_eq!(client.misses("unknown").await, 3);
    assert_eq!(client.misses("other_model").await, 1);
    ask("a", "m").await;
    assert_eq!(p.last().params(), &handle_of("d", 0));
    ask("b", "m").await;
    assert_eq!(p.last().params(), &handle_of("d", 1));
}

#[tokio::test]
async fn clients_neither_see_nor_send_params_unless_allowed() {
    let own = json!({"remote_engine_id": "evil", "remote_host": "169.254.0.1", "remote_port": 1});
    let mut request = body("c", false);
    request["kv_transfer_params"] = own.clone();

    let (p, _d, client) = pair().await;
    client.ok(client.chat(&request)).await;
    assert_eq!(p.last().params()["remote_host"], Value::Null);

    let (p, d, client) = pair_with(|config| {
        config.return_kv_params = true;
        config.accept_kv_params = true;
    })
    .await;
    let answer: Value = serde_json::from_str(&client.ok(client.chat(&request)).await).unwrap();
    assert_eq!(answer["kv_transfer_params"], handle_of("d", 0));
    assert_eq!(p.last().params()["remote_engine_id"], json!("evil"));
    assert_eq!(d.last().params(), &handle_of("p", 0));
    let streamed = client.turn("c", true).await;
    assert_eq!(
        events(&streamed).last().unwrap()["kv_transfer_params"],
        handle_of("d", 1)
    );
}

#[tokio::test]
async fn a_chat_without_an_id_is_recognised_by_its_messages() {
    let (p, d, client) = pair().await;
    let mut messages = vec![json!({"role": "system", "content": "be brief"})];
    for n in 0..4 {
        messages.push(json!({"role": "user", "content": format!("question {n}")}));
        let request = json!({"model": "m", "messages": messages, "stream": n % 2 == 0});
        client.ok(client.chat(&request)).await;
        if n > 0 {
            assert_eq!(p.last().params(), &handle_of("d", n - 1));
        }
        messages.push(json!({"role": "assistant", "content": text_of("d", n)}));
    }
    let id = p.seen()[0].header("x-conversation-id").to_owned();
    assert!(id.starts_with("kvx-"), "{id}");
    assert!(
        p.seen()
            .iter()
            .chain(&d.seen())
            .all(|seen| seen.header("x-conversation-id") == id)
    );
    assert_eq!(
        (client.misses("no_conversation").await, client.hits().await),
        (1, 3)
    );
    // Another tenant with the same words.
    let request = json!({"model": "m", "messages": messages});
    client
        .ok(client
            .chat(&request)
            .header("authorization", "Bearer other"))
        .await;
    assert_ne!(p.last().header("x-conversation-id"), id);
    // An edited last turn still is the same conversation, by its longest beginning.
    let edited = [
        &messages[..5],
        &[json!({"role": "user", "content": "something else"})],
    ]
    .concat();
    client
        .ok(client.chat(&json!({"model": "m", "messages": edited})))
        .await;
    assert_eq!(p.last().header("x-conversation-id"), id);
}

#[tokio::test]
async fn a_prompt_without_an_id_is_recognised_by_its_text() {
    let (p, _d, client) = pair().await;
    let mut prompt = "Once upon a time there was a router that remembered everything. ".repeat(3);
    for n in 0..3 {
        let request = json!({"model": "m", "prompt": prompt, "stream": n == 1});
        client.ok(client.post("/v1/completions", &request)).await;
        if n > 0 {
            assert_eq!(p.last().params(), &handle_of("d", n - 1));
        }
        prompt += &text_of("d", n);
        prompt += &" And what then? Nobody knows, but it went on for quite a while.".repeat(2);
    }
    assert_eq!(client.hits().await, 2);
}

#[tokio::test]
async fn tool_calls_make_a_history_too() {
    let (p, d, client) = pair().await;
    let handle = handle_of("d", 70);
    let chunk = |delta: Value, finish: Value| {
        send(format!(
            "data: {}\n\n",
            json!({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
        ))
    };
    let mut last = json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]});
    last["kv_transfer_params"] = handle.clone();
    d.next_stream(vec![
        chunk(json!({"role": "assistant", "content": null, "reasoning_content": "hm"}), Value::Null),
        chunk(json!({"tool_calls": [{"index": 0, "id": "t1", "type": "function", "function": {"name": "f", "arguments": ""}}]}), Value::Null),
        chunk(json!({"tool_calls": [{"index": 0, "function": {"arguments": "{\"x\":"}}]}), Value::Null),
        chunk(json!({"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}), Value::Null),
        send(format!("data: {last}\n\n")),
        send("data: [DONE]\n\n"),
    ]);
    let mut messages = vec![json!({"role": "user", "content": "call it"})];
    client
        .ok(client.chat(&json!({"model": "m", "stream": true, "messages": messages})))
        .await;
    messages.push(
        json!({"role": "assistant", "content": null, "tool_calls": [{"id": "t1", "type": "function",
        "function": {"name": "f", "arguments": "{\"x\":1}"}}]}),
    );
    messages.push(json!({"role": "tool", "tool_call_id": "t1", "content": "42"}));
    client
        .ok(client.chat(&json!({"model": "m", "stream": true, "messages": messages})))
        .await;
    assert_eq!(p.last().params(), &handle);
}

/// Field report: params may be anywhere in a stream.
#[tokio::test]
async fn params_are_found_wherever_a_stream_has_them() {
    let (p, d, client) = pair().await;
    let params = |n: u64| json!({"remote_engine_id": "d", "n": n, "do_remote_decode": true, "do_remote_prefill": false});
    let plain =
        r#"{"choices":[{"index":0,"delta":{"content":"a"}}],"kv_transfer_params":null}"#.to_owned();
    let done = r#"{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#.to_owned();
    let with = |text: &str, n| {
        format!(
            "{},\"kv_transfer_params\":{}}}",
            &text[..text.len() - 1],
            params(n)
        )
    };
    let usage = r#"{"choices":[],"usage":{"total_tokens":3}}"#.to_owned();
    let bare = r#"{"choices":[{"index":0,"delta":{"content":"a"}}]}"#;
    for (place, stream, found) in [
        ("first", vec![with(bare, 1), done.clone()], Some(1)),
        ("last", vec![plain.clone(), with(&done, 2)], Some(2)),
        (
            "usage only",
            vec![plain.clone(), done.clone(), with(&usage, 3)],
            Some(3),
        ),
        (
            "after finish",
            vec![
                plain.clone(),
                done.clone(),
                with("{ }", 4).replace("{ ,", "{"),
            ],
            Some(4),
        ),
        (
            "twice",
            vec![plain.clone(), with(&done, 5), with(&usage, 6)],
            Some(6),
        ),
        (
            "absent",
            vec![plain.clone(), done.clone(), usage.clone()],
            None,
        ),
    ] {
        let mut steps: Vec<_> = stream
            .iter()
            .map(|data| send(format!("data: {data}\n\n")))
            .collect();
        steps.push(send("data: [DONE]\n\n"));
        d.next_stream(steps);
        let text = client.turn(place, true).await;
        assert!(!text.contains("remote_engine_id"), "{place}: {text}");
        assert!(text.ends_with("data: [DONE]\n\n"), "{place}");
        client.turn(place, true).await;
        let got = p.last().params()["n"].as_u64();
        assert_eq!(got, found, "{place}");
    }
    assert_eq!(client.misses("no_params").await, 1);
    assert_eq!(client.hits().await, 5);
}

/// Field report: with several choices each has a handle, and the first one's counts.
#[tokio::test]
async fn of_several_choices_the_first_ones_handle_is_kept() {
    let (p, d, client) = pair().await;
    let finish = |index: u64| {
        let mut event =
            json!({"choices": [{"index": index, "delta": {}, "finish_reason": "stop"}]});
        event["kv_transfer_params"] = handle_of("d", 100 + index);
        send(format!("data: {event}\n\n"))
    };
    d.next_stream(vec![
        finish(1),
        finish(0),
        finish(2),
        send("data: [DONE]\n\n"),
    ]);
    let text = client.turn("c", true).await;
    assert!(!text.contains("kv_transfer_params"), "{text}");
    client.turn("c", true).await;
    assert_eq!(p.last().params(), &handle_of("d", 100));

    let choice = |n: u64| json!({"index": n, "message": {"content": "a"}, "finish_reason": "stop", "kv_transfer_params": handle_of("d", 200 + n)});
    d.next(Reply::Json(
        200,
        json!({"choices": [choice(0), choice(1)]}).to_string(),
    ));
    let text = client.turn("c", false).await;
    assert!(!text.contains("kv_transfer_params"), "{text}");
    client.turn("c", true).await;
    assert_eq!(p.last().params(), &handle_of("d", 200));
}

#[tokio::test]
async fn two_turns_at_once_are_both_right_and_one_has_the_handle() {
    let (p, d, client) = pair().await;
    client.turn("c", true).await;
    let gate = Arc::new(Semaphore::new(0));
    p.next(Reply::Gate(Arc::clone(&gate)));
    let first = tokio::spawn(client.chat(&body("c", true)).send());
    until(|| async { p.count() == 2 }).await;
    client.turn("c", true).await;
    assert_eq!(p.last().params()["remote_engine_id"], Value::Null);
    assert_eq!(client.misses("in_use").await, 1);
    gate.add_permits(1);
    let text = first.await.unwrap().unwrap().text().await.unwrap();
    assert!(text.ends_with("[DONE]\n\n"), "{text}");
    assert_eq!(d.count(), 3);
    client.turn("c", true).await;
    assert_eq!(client.hits().await, 2);
}

#[tokio::test]
async fn old_and_large_handles_are_misses_with_their_reason() {
    let (_p, _d, client) = pair_with(|config| config.ttl = Duration::from_millis(1)).await;
    client.turn("c", true).await;
    tokio::time::sleep(Duration::from_millis(5)).await;
    client.turn("c", true).await;
    assert_eq!(client.misses("expired").await, 1);

    let (_p, _d, client) = pair_with(|config| config.max_one_handle_bytes = 10).await;
    client.turn("c", true).await;
    client.turn("c", true).await;
    assert_eq!(client.misses("too_large").await, 1);

    let (_p, _d, client) = pair_with(|config| config.max_conversations = 4).await;
    for n in 0..20 {
        client.turn(&n.to_string(), true).await;
    }
    assert!(client.metric("kvx_router_conversations").await <= 4);
    client.turn("0", true).await;
    assert_eq!(client.misses("evicted").await, 1);
}

#[tokio::test]
async fn with_bidirectional_off_nothing_is_kept() {
    let (p, _d, client) = pair_with(|config| config.bidirectional = false).await;
    for _ in 0..2 {
        let text = client.turn("c", true).await;
        assert!(!text.contains("kv_transfer_params"), "{text}");
        assert_eq!(p.last().params()["remote_engine_id"], Value::Null);
    }
    assert_eq!(client.misses("bidirectional_off").await, 2);
    assert_eq!(client.metric("kvx_router_conversations").await, 0);
}

#[tokio::test]
async fn several_prompts_go_to_decode_alone() {
    let (p, d, client) = pair().await;
    let request = json!({"model": "m", "prompt": ["a", "b"]});
    client.ok(client.post("/v1/completions", &request)).await;
    assert_eq!((p.count(), d.count()), (0, 1));
    assert!(d.last().params().is_null());
    assert_eq!(client.misses("many_prompts").await, 1);
}

#[tokio::test]
async fn a_report_tells_of_both_legs() {
    let (p, d, client) = pair().await;
    for (stream, hit) in [(true, false), (false, true)] {
        let text = client
            .ok(client.chat(&body("c", stream)).header("X-KVX-Report", "1"))
            .await;
        let last = match stream {
            true => events(&text).pop().unwrap(),
            false => serde_json::from_str(&text).unwrap(),
        };
        let report = &last["kvx"];
        assert_eq!(report["prefill"], json!({"decision": "none", "node": "p"}));
        assert_eq!(report["decode"], json!({"decision": "none", "node": "d"}));
        let router = &report["router"];
        assert_eq!(router["hit"], json!(hit));
        assert_eq!(
            router["miss_reason"],
            if hit { Value::Null } else { json!("unknown") }
        );
        assert_eq!(router["prefill_node"], json!(p.url()));
        assert_eq!(router["decode_node"], json!(d.url()));
        assert!(router["prefill_ms"].is_f64(), "{router}");
        assert_eq!(d.last().header("x-kvx-report"), "1");
    }
    assert!(!client.turn("c", true).await.contains("kvx\""));
}

//! Turns of conversations over a prefill and a decode node: what is read, what is computed, and that
//! the text is that of a node which computes everything itself.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use common::{Client, NodeProcess, conversation, extended};
use serde_json::{Value, json};

const BLOCK: u64 = 16;

struct Pair {
    prefill: NodeProcess,
    decode: NodeProcess,
}

impl Pair {
    fn nodes(&self) -> (&NodeProcess, &NodeProcess) {
        (&self.prefill, &self.decode)
    }
}

fn number(report: &Value, name: &str) -> u64 {
    report[name]
        .as_u64()
        .unwrap_or_else(|| panic!("{name} is not in {report}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_of_conversations() {
    let cache = ["--kv-cache-mib", "96"];
    let pair = Pair {
        prefill: NodeProcess::start("prefill", &cache),
        decode: NodeProcess::start("decode", &cache),
    };
    whole_and_streamed_answers_are_equal(&pair).await;
    the_next_turn_reads_the_history(&pair).await;
    prefill_with_its_own_cache_reads_only_the_rest(&pair).await;
    an_edited_history_is_read_up_to_the_edit(&pair).await;
    a_handle_serves_once(&pair).await;
    handles_of_others_are_not_read(&pair).await;
    two_turns_at_once(&pair).await;
    several_answers_have_a_handle_each(&pair).await;
    let client = Client::new();
    for node in [&pair.prefill, &pair.decode] {
        client.settled(node).await;
    }
}

async fn whole_and_streamed_answers_are_equal(pair: &Pair) {
    let client = Client::new();
    let messages = conversation("tea", 3);
    let whole = client.chat(&pair.decode, &messages, json!({})).await.ok();
    assert_eq!(
        whole.text(),
        client.computed(&pair.prefill, &messages).await
    );
    let usage = &whole.body["usage"];
    let sum = number(usage, "prompt_tokens") + number(usage, "completion_tokens");
    assert_eq!(number(usage, "total_tokens"), sum);
    assert_eq!(whole.body["object"], "chat.completion");
    // Nobody asked for a description.
    assert!(whole.params().is_null());

    let extra = json!({"messages": messages, "stream_options": {"include_usage": true}});
    let pieces = client
        .pieces(&pair.decode, "/v1/chat/completions", extra)
        .await;
    assert_eq!(pieces[0]["choices"][0]["delta"]["role"], "assistant");
    let text: String = pieces
        .iter()
        .filter_map(|piece| piece["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(text, whole.text());
    let [.., last, usage] = &pieces[..] else {
        panic!("too few pieces: {pieces:?}");
    };
    assert_eq!(
        last["choices"][0]["finish_reason"],
        whole.body["choices"][0]["finish_reason"]
    );
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(
        usage["usage"]["completion_tokens"],
        whole.body["usage"]["completion_tokens"]
    );
    // The second time the prompt was there, except for its end.
    let cached = number(&usage["usage"]["prompt_tokens_details"], "cached_tokens");
    assert_eq!(
        cached,
        (number(&usage["usage"], "prompt_tokens") - 1) / BLOCK * BLOCK
    );

    let prompt = json!({"prompt": "One, two, three,", "max_tokens": 8});
    let whole = client
        .post(&pair.decode, "/v1/completions", prompt.clone())
        .await
        .ok();
    let pieces = client.pieces(&pair.decode, "/v1/completions", prompt).await;
    let text: String = pieces
        .iter()
        .filter_map(|piece| piece["choices"][0]["text"].as_str())
        .collect();
    assert_eq!(text, whole.text());
    assert_eq!(whole.body["choices"][0]["finish_reason"], "length");
}

async fn the_next_turn_reads_the_history(pair: &Pair) {
    let client = Client::of("key", Some("history"));
    let first = conversation("coffee", 8);
    let turn = client.turn(pair.nodes(), &first, None).await;
    assert_eq!(turn.text, client.computed(&pair.decode, &first).await);
    let prompt = number(&turn.prefill, "prompt_tokens");
    assert_eq!(turn.prefill["decision"], "none");
    assert_eq!(number(&turn.prefill, "computed_tokens"), prompt);
    // The decode node reads the prompt, except for its end.
    assert_eq!(turn.decode["decision"], "read", "{}", turn.decode);
    assert_eq!(
        number(&turn.decode, "read_tokens"),
        (prompt - 1) / BLOCK * BLOCK
    );

    client.reset(&pair.prefill).await;
    let second = extended(&first, &turn.text, "Which item is the cheapest?");
    let next = client.turn(pair.nodes(), &second, Some(&turn.handle)).await;
    assert_eq!(next.prefill["decision"], "read", "{}", next.prefill);
    let held = turn.handle["remote_num_tokens"].as_u64().unwrap();
    assert!(held > prompt);
    assert_eq!(number(&next.prefill, "read_tokens"), held / BLOCK * BLOCK);
    assert_eq!(number(&next.prefill, "local_hit_tokens"), 0);
    let (prompt, read) = (
        number(&next.prefill, "prompt_tokens"),
        number(&next.prefill, "read_tokens"),
    );
    assert_eq!(number(&next.prefill, "computed_tokens"), prompt - read);
    assert_eq!(next.text, client.computed(&pair.decode, &second).await);
    // The decode node has the history still and reads what is new.
    assert!(number(&next.decode, "local_hit_tokens") >= held / BLOCK * BLOCK);

    client.reset(&pair.prefill).await;
    let third = extended(&second, &next.text, "And the dearest?");
    let last = client.turn(pair.nodes(), &third, Some(&next.handle)).await;
    assert_eq!(last.prefill["decision"], "read", "{}", last.prefill);
    assert_eq!(last.text, client.computed(&pair.decode, &third).await);
}

async fn prefill_with_its_own_cache_reads_only_the_rest(pair: &Pair) {
    let client = Client::new().with(json!({"max_tokens": 80, "ignore_eos": true}));
    let first = conversation("cocoa", 4);
    let turn = client.turn(pair.nodes(), &first, None).await;
    let second = extended(&first, &turn.text, "Why?");
    let next = client.turn(pair.nodes(), &second, Some(&turn.handle)).await;
    let local = number(&next.prefill, "local_hit_tokens");
    assert_eq!(
        local,
        number(&turn.prefill, "prompt_tokens") / BLOCK * BLOCK
    );
    assert_eq!(next.prefill["decision"], "read", "{}", next.prefill);
    let answer = client.prefill(&pair.prefill, &second, None).await.ok();
    // All of it is there now.
    assert!(number(answer.report(), "computed_tokens") <= BLOCK);
}

async fn an_edited_history_is_read_up_to_the_edit(pair: &Pair) {
    let client = Client::new();
    let first = conversation("juice", 9);
    let turn = client.turn(pair.nodes(), &first, None).await;
    client.reset(&pair.prefill).await;
    let mut edited = extended(&first, &turn.text, "Which item is the cheapest?");
    let content = edited[1]["content"]
        .as_str()
        .unwrap()
        .replace("Item 7 on", "Thing 7 on");
    edited[1]["content"] = content.into();
    let next = client.turn(pair.nodes(), &edited, Some(&turn.handle)).await;
    assert_eq!(next.prefill["decision"], "read", "{}", next.prefill);
    let read = number(&next.prefill, "read_tokens");
    assert!(read >= 4 * BLOCK, "{}", next.prefill);
    assert!(
        read < number(&turn.prefill, "prompt_tokens") / BLOCK * BLOCK,
        "{}",
        next.prefill
    );
    assert_eq!(next.text, client.computed(&pair.decode, &edited).await);

    // From the first word on: nothing is read.
    client.reset(&pair.prefill).await;
    let mut other = extended(&first, &turn.text, "Which?");
    other[0]["content"] = "Something else altogether.".into();
    let next = client.turn(pair.nodes(), &other, Some(&next.handle)).await;
    assert_eq!(next.prefill["reason"], "no_match", "{}", next.prefill);
    assert_eq!(next.text, client.computed(&pair.decode, &other).await);
}

async fn a_handle_serves_once(pair: &Pair) {
    let client = Client::new();
    let first = conversation("milk", 6);
    let turn = client.turn(pair.nodes(), &first, None).await;
    let second = extended(&first, &turn.text, "Which item is the cheapest?");
    let mut texts = Vec::new();
    for expected in ["read", "recompute"] {
        client.reset(&pair.prefill).await;
        let next = client.turn(pair.nodes(), &second, Some(&turn.handle)).await;
        assert_eq!(next.prefill["decision"], expected, "{}", next.prefill);
        texts.push((next.text, next.prefill));
    }
    assert_eq!(texts[0].0, texts[1].0);
    assert_eq!(texts[1].1["fallback"], "lease_lost", "{}", texts[1].1);
    assert_eq!(texts[0].0, client.computed(&pair.decode, &second).await);
}

async fn handles_of_others_are_not_read(pair: &Pair) {
    let owner = Client::of("mine", Some("a"));
    let first = conversation("soup", 5);
    let turn = owner.turn(pair.nodes(), &first, None).await;
    let second = extended(&first, &turn.text, "Which item is the cheapest?");
    let text = owner.computed(&pair.decode, &second).await;
    for (key, conversation) in [("theirs", Some("a")), ("mine", Some("b")), ("mine", None)] {
        let other = Client::of(key, conversation);
        other.reset(&pair.prefill).await;
        let next = other.turn(pair.nodes(), &second, Some(&turn.handle)).await;
        assert_eq!(
            next.prefill["fallback"], "not_authentic",
            "{}",
            next.prefill
        );
        assert_eq!(number(&next.prefill, "read_tokens"), 0);
        assert_eq!(next.text, text);
    }
    // The owner's lease is untouched.
    owner.reset(&pair.prefill).await;
    let next = owner.turn(pair.nodes(), &second, Some(&turn.handle)).await;
    assert_eq!(next.prefill["decision"], "read", "{}", next.prefill);
}

async fn two_turns_at_once(pair: &Pair) {
    let client = Client::new();
    let first = conversation("bread", 6);
    let turn = client.turn(pair.nodes(), &first, None).await;
    client.reset(&pair.prefill).await;
    let (a, b) = (
        extended(&first, &turn.text, "Which item is the cheapest?"),
        extended(&first, &turn.text, "Which item is the dearest?"),
    );
    let (one, two) = tokio::join!(
        client.turn(pair.nodes(), &a, Some(&turn.handle)),
        client.turn(pair.nodes(), &b, Some(&turn.handle)),
    );
    assert_eq!(one.text, client.computed(&pair.decode, &a).await);
    assert_eq!(two.text, client.computed(&pair.decode, &b).await);
}

async fn several_answers_have_a_handle_each(pair: &Pair) {
    let client = Client::new().with(json!({"n": 3, "temperature": 1, "seed": 7, "max_tokens": 8}));
    let messages = conversation("rice", 4);
    let extra = || json!({"kv_transfer_params": {}});
    let whole = client.chat(&pair.decode, &messages, extra()).await.ok();
    let choices = whole.body["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    assert!(
        choices
            .iter()
            .all(|choice| choice["kv_transfer_params"].is_object())
    );
    assert_eq!(whole.params(), choices[0]["kv_transfer_params"]);
    assert_ne!(
        choices[0]["message"]["content"],
        choices[1]["message"]["content"]
    );

    let mut extra = extra();
    extra["messages"] = messages;
    let pieces = client
        .pieces(&pair.decode, "/v1/chat/completions", extra)
        .await;
    for (index, choice) in choices.iter().enumerate() {
        let own: Vec<&Value> = pieces
            .iter()
            .filter(|piece| piece["choices"][0]["index"] == index)
            .collect();
        let text: String = own
            .iter()
            .filter_map(|piece| piece["choices"][0]["delta"]["content"].as_str())
            .collect();
        // The seed makes it the same text.
        assert_eq!(choice["message"]["content"], text);
        let last = own.last().unwrap();
        assert!(last["choices"][0]["finish_reason"].is_string());
        assert!(last["kv_transfer_params"].is_object());
    }
}

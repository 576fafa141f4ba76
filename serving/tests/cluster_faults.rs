//! Conversations over router, prefill and decode nodes go on with the right text whatever is killed, lost
//! or mixed up in between: real processes, real NIXL, the real model.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use serving::client::{Answer, Ask, Client, metric};
use serving::cluster::{Cluster, ClusterSpec, Served};
use serving::provision;

const LIMIT: Duration = Duration::from_secs(60);
/// How long decode nodes keep blocks for a next turn: longer than from turn to turn, and short enough to
/// see the end of it.
const TTL: &str = "30";

fn spec(prefill: usize, decode: usize) -> ClusterSpec {
    ClusterSpec {
        program: PathBuf::from(env!("CARGO_BIN_EXE_serving")),
        prefill,
        decode,
        bidirectional: true,
        kv_cache_mib: 96,
        node_arguments: vec!["--decoder-kv-blocks-ttl".into(), TTL.into()],
        router_arguments: vec!["--health-interval".into(), "0.2".into()],
    }
}

/// A runtime, unless the model cannot be had here.
fn runtime(test: &str) -> Option<tokio::runtime::Runtime> {
    if let Err(error) = provision::model() {
        let _ = writeln!(std::io::stderr(), "skipped: {test}: {error}");
        return None;
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    Some(runtime.unwrap())
}

/// A conversation with its history, and the same one on a node that computes everything by itself.
struct Talk {
    id: Option<&'static str>,
    messages: Vec<Value>,
    client: Client,
    reference: Client,
}

impl Talk {
    fn new(cluster: &Cluster, router: &str, node: usize, id: Option<&'static str>) -> Self {
        let key = format!("key-{}", id.unwrap_or("none"));
        Self {
            id,
            messages: Vec::new(),
            client: Client::new(router, &key).unwrap(),
            // Another tenant: nothing of the conversation can be in its cache.
            reference: Client::new(&cluster.prefill[node].url(), "reference").unwrap(),
        }
    }

    fn ask(&self) -> Ask<'_> {
        Ask {
            conversation: self.id,
            messages: &self.messages,
            max_tokens: 12,
            ignore_eos: false,
        }
    }

    /// Asks; the answer is the one that a node gives without any transfer.
    async fn turn(&mut self, question: &str) -> Answer {
        let question = format!(
            "{question} {}",
            "Think of rivers, ships and bread. ".repeat(14)
        );
        self.messages
            .push(json!({"role": "user", "content": question}));
        let answer = self.client.chat(self.ask(), |_| {}).await.unwrap();
        let expected = Ask {
            conversation: None,
            ..self.ask()
        };
        let expected = self.reference.chat(expected, |_| {}).await.unwrap();
        assert_eq!(answer.text, expected.text, "{question}");
        self.messages
            .push(json!({"role": "assistant", "content": answer.text}));
        answer
    }
}

/// Which of these nodes served an answer as `role`.
fn position(answer: &Answer, role: &str, nodes: &[Served]) -> usize {
    let node = answer.report.pointer(&format!("/router/{role}_node"));
    let node = node.and_then(Value::as_str).unwrap();
    let is = |one: &Served| node.contains(one.url().trim_start_matches("http://"));
    nodes.iter().position(is).unwrap()
}

fn hit(answer: &Answer) -> bool {
    answer.report.pointer("/router/hit") == Some(&Value::Bool(true))
}

fn read_tokens(answer: &Answer) -> u64 {
    let tokens = answer.report.pointer("/prefill/read_tokens");
    tokens.and_then(Value::as_u64).unwrap_or(0)
}

async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let limit = LIMIT + Duration::from_secs(TTL.parse().unwrap());
    let end = Instant::now() + limit;
    while !holds().await {
        assert!(Instant::now() < end, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// No request, read or quarantine holds a block on any node that lives.
async fn nothing_leaks(nodes: impl IntoIterator<Item = &Served>) {
    none_in(&["active", "claimed", "quarantined"], nodes).await;
}

/// Neither does a lease, once the last of them is over.
async fn nothing_is_left(nodes: impl IntoIterator<Item = &Served>) {
    none_in(&["active", "claimed", "quarantined", "leased"], nodes).await;
}

async fn none_in(states: &[&str], nodes: impl IntoIterator<Item = &Served>) {
    let client = Client::new("http://localhost", "metrics").unwrap();
    for node in nodes {
        for state in states {
            eventually(
                &format!("no {state} blocks on {}", node.url()),
                async || {
                    let text = client.metrics(&node.url()).await.unwrap();
                    metric(&text, "kvx_pool_blocks", &format!("state=\"{state}\"")) == 0.0
                },
            )
            .await;
        }
    }
}

#[test]
fn conversations_with_and_without_a_name_read_their_history() {
    let Some(runtime) = runtime("conversations_with_and_without_a_name_read_their_history") else {
        return;
    };
    runtime.block_on(async {
        let cluster = Cluster::start(&spec(1, 1)).unwrap();
        for id in [Some("named"), None] {
            let mut talk = Talk::new(&cluster, &cluster.router.url(), 0, id);
            assert!(!hit(&talk.turn("first").await));
            talk.client
                .reset_prefix_cache(&cluster.prefill[0].url())
                .await
                .unwrap();
            let second = talk.turn("second").await;
            assert!(
                hit(&second) && read_tokens(&second) > 100,
                "{:?}",
                second.report
            );
            // Edited history: what is still the same is read, the rest computed.
            let edited = json!({"role": "assistant", "content": "Something else."});
            talk.messages[1] = edited;
            talk.turn("third").await;
            // Shortened: the last question and its answer are taken back.
            talk.messages.truncate(talk.messages.len() - 2);
            talk.turn("fourth").await;
            // Sent back as other tokens: the client has changed the white space of the answer.
            if let Some(answer) = talk.messages.last_mut() {
                let text = answer["content"].as_str().unwrap_or_default();
                answer["content"] = json!(format!(" {} ", text.replace(' ', "  ")));
            }
            talk.turn("fifth").await;
        }
        nothing_is_left(cluster.prefill.iter().chain(&cluster.decode)).await;
    });
}

#[test]
fn a_decode_node_that_is_killed_between_turns_costs_time_only() {
    let Some(runtime) = runtime("a_decode_node_that_is_killed_between_turns_costs_time_only")
    else {
        return;
    };
    runtime.block_on(async {
        let spec = spec(1, 2);
        let mut cluster = Cluster::start(&spec).unwrap();
        let mut talk = Talk::new(&cluster, &cluster.router.url(), 0, Some("decode-killed"));
        talk.turn("first").await;
        let second = talk.turn("second").await;
        assert!(hit(&second));
        // Whoever holds the blocks dies.
        let at = position(&second, "decode", &cluster.decode);
        cluster.decode[at].kill();
        let reset = cluster.prefill[0].url();
        talk.client.reset_prefix_cache(&reset).await.unwrap();
        let third = talk.turn("third").await;
        assert_eq!(read_tokens(&third), 0);
        // The next one is read from the node that is left.
        talk.client.reset_prefix_cache(&reset).await.unwrap();
        let fourth = talk.turn("fourth").await;
        assert!(
            hit(&fourth) && read_tokens(&fourth) > 100,
            "{:?}",
            fourth.report
        );
        // And when none is left, the prefill node answers whole.
        cluster.decode[1 - at].kill();
        talk.turn("fifth").await;
        nothing_leaks(&cluster.prefill).await;
    });
}

#[test]
fn a_prefill_node_that_is_killed_costs_time_only() {
    let Some(runtime) = runtime("a_prefill_node_that_is_killed_costs_time_only") else {
        return;
    };
    runtime.block_on(async {
        let mut cluster = Cluster::start(&spec(2, 1)).unwrap();
        // The reference is the node that stays.
        let mut talk = Talk::new(&cluster, &cluster.router.url(), 1, Some("prefill-killed"));
        talk.turn("first").await;
        talk.turn("second").await;
        cluster.prefill[0].kill();
        let third = talk.turn("third").await;
        assert!(third.prompt_tokens > 0);
        let fourth = talk.turn("fourth").await;
        assert!(hit(&fourth), "{:?}", fourth.report);
        nothing_leaks(cluster.prefill.iter().skip(1).chain(&cluster.decode)).await;
    });
}

#[test]
fn nodes_that_are_killed_at_work_cost_time_or_one_answer() {
    let Some(runtime) = runtime("nodes_that_are_killed_at_work_cost_time_or_one_answer") else {
        return;
    };
    runtime.block_on(async {
        let mut cluster = Cluster::start(&spec(2, 2)).unwrap();
        let mut talk = Talk::new(&cluster, &cluster.router.url(), 0, Some("at-work"));
        let first = talk.turn("first").await;
        // The prefill node dies while it reads or computes the next prompt.
        let at = position(&first, "prefill", &cluster.prefill);
        let mut victim = cluster.prefill.remove(at);
        talk.reference = Client::new(&cluster.prefill[0].url(), "reference").unwrap();
        for node in [&victim, &cluster.prefill[0]] {
            talk.client.reset_prefix_cache(&node.url()).await.unwrap();
        }
        let watch = Client::new(&victim.url(), "metrics").unwrap();
        let url = victim.url();
        let long = "And then? ".repeat(150);
        let (second, ()) = tokio::join!(talk.turn(&long), async {
            eventually("it is at work", async || {
                let text = watch.metrics(&url).await.unwrap();
                let blocks =
                    |state| metric(&text, "kvx_pool_blocks", &format!("state=\"{state}\""));
                blocks("active") + blocks("claimed") > 0.0
            })
            .await;
            victim.kill();
        });
        assert_eq!(position(&second, "prefill", &cluster.prefill), 0);
        // The decode node dies while it streams: the client is told, and asks again.
        let at = position(&second, "decode", &cluster.decode);
        let mut victim = cluster.decode.remove(at);
        talk.messages
            .push(json!({"role": "user", "content": "Tell me a very long story."}));
        let ask = Ask {
            max_tokens: 400,
            ignore_eos: true,
            ..talk.ask()
        };
        let broken = talk.client.chat(ask, |_| victim.kill()).await;
        assert!(broken.is_err(), "{broken:?}");
        talk.messages.pop();
        talk.turn("third").await;
        let fourth = talk.turn("fourth").await;
        assert!(hit(&fourth), "{:?}", fourth.report);
        nothing_is_left(cluster.prefill.iter().chain(&cluster.decode)).await;
    });
}

#[test]
fn what_no_node_can_serve_is_refused_and_the_conversation_goes_on() {
    let Some(runtime) = runtime("what_no_node_can_serve_is_refused_and_the_conversation_goes_on")
    else {
        return;
    };
    runtime.block_on(async {
        let cluster = Cluster::start(&spec(1, 1)).unwrap();
        let router = cluster.router.url();
        let mut talk = Talk::new(&cluster, &router, 0, Some("refused"));
        talk.turn("first").await;
        let http = reqwest::Client::new();
        let post = async |extra: Value| {
            let mut body = json!({
                "conversation_id": "refused", "max_tokens": 4, "temperature": 0,
                "messages": [{"role": "user", "content": "Hello."}],
            });
            let (body, extra) = (body.as_object_mut().unwrap(), extra.as_object().unwrap());
            body.extend(extra.clone());
            let request = http
                .post(format!("{router}/v1/chat/completions"))
                .json(body);
            let response = request.bearer_auth("key-refused").send().await.unwrap();
            let status = response.status().as_u16();
            (status, response.json::<Value>().await.unwrap())
        };
        let endless = "Again and again. ".repeat(4000);
        for (bad, keeps_description) in [
            (
                vec![
                    json!({"conversation_id": ""}),
                    json!({"conversation_id": "x".repeat(100_000)}),
                    json!({"conversation_id": "a\u{7}b"}),
                    json!({"conversation_id": 7}),
                ],
                true,
            ),
            (
                vec![
                    json!({"messages": [{"role": "user", "content": endless}]}),
                    json!({"messages": "Hello."}),
                    json!({"temperature": "warm"}),
                ],
                true,
            ),
            // These the decode node refuses, when the prefill node has used the description.
            (vec![json!({"max_tokens": -1}), json!({"n": 0})], false),
        ] {
            for bad in bad {
                let (status, body) = post(bad.clone()).await;
                let bad: String = bad.to_string().chars().take(60).collect();
                assert!(status == 400 || status == 422, "{status} {bad} {body}");
                assert!(body["error"]["message"].is_string(), "{bad} {body}");
            }
            let next = talk.turn("again").await;
            assert!(hit(&next) || !keeps_description, "{:?}", next.report);
        }
        // What clients say of blocks does not reach the nodes.
        for params in [
            json!({"do_remote_prefill": true, "remote_engine_id": "x", "remote_block_ids": [[0]]}),
            json!({"do_remote_decode": "yes", "remote_port": -1}),
        ] {
            let other = json!({"kv_transfer_params": params, "conversation_id": "other"});
            let (status, body) = post(other).await;
            assert_eq!(status, 200, "{body}");
            assert!(body.get("kv_transfer_params").is_none(), "{body}");
        }
        assert!(hit(&talk.turn("last").await));
        nothing_is_left(cluster.prefill.iter().chain(&cluster.decode)).await;
    });
}

#[test]
fn an_answer_without_prefill_is_remembered_too() {
    let Some(runtime) = runtime("an_answer_without_prefill_is_remembered_too") else {
        return;
    };
    runtime.block_on(async {
        let spec = spec(1, 1);
        let mut cluster = Cluster::start(&spec).unwrap();
        let mut talk = Talk::new(&cluster, &cluster.router.url(), 0, Some("alone"));
        talk.reference = Client::new(&cluster.decode[0].url(), "reference").unwrap();
        // No prefill node: decode computes all.
        cluster.prefill[0].kill();
        talk.turn("first").await;
        // It takes its own blocks up again.
        let second = talk.turn("second").await;
        assert!(hit(&second), "{:?}", second.report);
        nothing_leaks(&cluster.decode).await;
    });
}

#[test]
fn a_router_that_is_restarted_knows_nothing_and_is_right() {
    let Some(runtime) = runtime("a_router_that_is_restarted_knows_nothing_and_is_right") else {
        return;
    };
    runtime.block_on(async {
        let spec = spec(1, 1);
        let mut cluster = Cluster::start(&spec).unwrap();
        let mut talk = Talk::new(&cluster, &cluster.router.url(), 0, Some("router"));
        talk.turn("first").await;
        cluster.router.kill();
        let router = Cluster::router(&spec, &cluster.prefill, &cluster.decode, 0).unwrap();
        talk.client = Client::new(&router.url(), "key-router").unwrap();
        let second = talk.turn("second").await;
        assert!(!hit(&second));
        assert!(hit(&talk.turn("third").await));
        nothing_leaks(cluster.prefill.iter().chain(&cluster.decode)).await;
    });
}

#[test]
fn turns_at_once_and_clients_that_leave_do_no_harm() {
    let Some(runtime) = runtime("turns_at_once_and_clients_that_leave_do_no_harm") else {
        return;
    };
    runtime.block_on(async {
        let cluster = Cluster::start(&spec(1, 1)).unwrap();
        let mut talk = Talk::new(&cluster, &cluster.router.url(), 0, Some("twice"));
        talk.turn("first").await;
        // Two next turns of one conversation at once: one of them finds the blocks.
        talk.messages
            .push(json!({"role": "user", "content": "And now?"}));
        let (a, b) = tokio::join!(
            talk.client.chat(talk.ask(), |_| {}),
            talk.client.chat(talk.ask(), |_| {})
        );
        let (a, b) = (a.unwrap(), b.unwrap());
        assert_eq!(a.text, b.text);
        assert!(hit(&a) != hit(&b), "{:?} {:?}", a.report, b.report);
        talk.messages
            .push(json!({"role": "assistant", "content": a.text}));
        // A client that leaves at whatever moment.
        for wait in [1, 20, 60, 120, 250, 500, 900] {
            let mut messages = talk.messages.clone();
            messages
                .push(json!({"role": "user", "content": "Tell me a very long story. ".repeat(20)}));
            let ask = Ask {
                messages: &messages,
                max_tokens: 200,
                ignore_eos: true,
                ..talk.ask()
            };
            let asked = talk.client.chat(ask, |_| {});
            let _ = tokio::time::timeout(Duration::from_millis(wait), asked).await;
        }
        talk.turn("second").await;
        nothing_is_left(cluster.prefill.iter().chain(&cluster.decode)).await;
    });
}

#[test]
fn two_hundred_requests_at_once_are_all_answered() {
    let Some(runtime) = runtime("two_hundred_requests_at_once_are_all_answered") else {
        return;
    };
    runtime.block_on(async {
        let cluster = Cluster::start(&spec(1, 1)).unwrap();
        let client = Client::new(&cluster.router.url(), "crowd").unwrap();
        let mut asked = tokio::task::JoinSet::new();
        for n in 0..200 {
            let client = client.clone();
            asked.spawn(async move {
                let messages =
                    [json!({"role": "user", "content": format!("Count from {}.", n % 20)})];
                let ask = Ask {
                    conversation: None,
                    messages: &messages,
                    max_tokens: 3,
                    ignore_eos: true,
                };
                (n % 20, client.chat(ask, |_| {}).await)
            });
        }
        let mut texts: Vec<Option<String>> = vec![None; 20];
        while let Some(one) = asked.join_next().await {
            let (n, answer) = one.unwrap();
            let answer = answer.unwrap();
            // The same question has the same answer, whoever else is served.
            let text = texts[n].get_or_insert_with(|| answer.text.clone());
            assert_eq!(*text, answer.text);
        }
        nothing_leaks(cluster.prefill.iter().chain(&cluster.decode)).await;
    });
}

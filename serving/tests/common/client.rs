//! A client of nodes, and what a router does for two of them.

use std::time::{Duration, Instant};

use reqwest::StatusCode;
use serde_json::{Map, Value, json};

use super::process::{NodeProcess, Pool};

/// How long anything may take on a slow machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// What a node answered.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: StatusCode,
    pub body: Value,
}

impl Answer {
    pub fn text(&self) -> &str {
        let choice = &self.body["choices"][0];
        let text = choice["message"]["content"].as_str();
        text.or_else(|| choice["text"].as_str())
            .unwrap_or_else(|| panic!("no text in {self:?}"))
    }

    pub fn report(&self) -> &Value {
        &self.body["kvx"]
    }

    pub fn params(&self) -> Value {
        self.body["kv_transfer_params"].clone()
    }

    pub fn ok(self) -> Self {
        assert_eq!(self.status, StatusCode::OK, "{}", self.body);
        self
    }
}

/// A turn of a conversation.
#[derive(Debug, Clone)]
pub struct Turn {
    pub text: String,
    /// What the decode node said about its blocks.
    pub handle: Value,
    pub prefill: Value,
    pub decode: Value,
}

/// A client with an API key and a conversation.
#[derive(Clone)]
pub struct Client {
    http: reqwest::Client,
    pub key: Option<String>,
    pub conversation: Option<String>,
    /// Fields of every request.
    pub fields: Map<String, Value>,
}

impl Client {
    pub fn new() -> Self {
        let fields = json!({"temperature": 0, "max_tokens": 12});
        Self {
            http: reqwest::Client::builder()
                .timeout(PATIENCE)
                .build()
                .unwrap(),
            key: None,
            conversation: None,
            fields: fields.as_object().unwrap().clone(),
        }
    }

    /// With an API key and, perhaps, a conversation.
    pub fn of(key: &str, conversation: Option<&str>) -> Self {
        Self {
            key: Some(key.to_owned()),
            conversation: conversation.map(str::to_owned),
            ..Self::new()
        }
    }

    pub fn with(&self, fields: Value) -> Self {
        let mut client = self.clone();
        client.fields.extend(fields.as_object().unwrap().clone());
        client
    }

    /// Shares no cached block with any other client.
    pub fn apart(&self) -> Self {
        self.with(json!({"cache_salt": format!("{:x}", rand::random::<u64>())}))
    }

    fn request(&self, node: &NodeProcess, path: &str, body: &Value) -> reqwest::RequestBuilder {
        let mut request = self.http.post(format!("{}{path}", node.url));
        if let Some(key) = &self.key {
            request = request.bearer_auth(key);
        }
        if let Some(conversation) = &self.conversation {
            request = request.header("X-Conversation-ID", conversation);
        }
        request.header("X-KVX-Report", "1").json(body)
    }

    fn body(&self, extra: Value) -> Value {
        let mut body = self.fields.clone();
        body.extend(extra.as_object().unwrap().clone());
        Value::Object(body)
    }

    pub async fn post(&self, node: &NodeProcess, path: &str, extra: Value) -> Answer {
        let response = self.request(node, path, &self.body(extra)).send().await;
        let response = response.expect("an answer");
        let status = response.status();
        let body = response.json().await.expect("JSON");
        Answer { status, body }
    }

    pub async fn chat(&self, node: &NodeProcess, messages: &Value, extra: Value) -> Answer {
        let mut extra = extra;
        extra["messages"] = messages.clone();
        self.post(node, "/v1/chat/completions", extra).await
    }

    /// The pieces of a streamed answer; the last one, `[DONE]`, is checked and left out.
    pub async fn pieces(&self, node: &NodeProcess, path: &str, extra: Value) -> Vec<Value> {
        let mut extra = extra;
        extra["stream"] = true.into();
        let response = self.request(node, path, &self.body(extra)).send().await;
        let response = response.expect("an answer");
        assert_eq!(response.status(), StatusCode::OK);
        let text = response.text().await.unwrap();
        let mut lines: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .collect();
        assert_eq!(lines.pop(), Some("[DONE]"), "{text}");
        let parse = |line: &&str| serde_json::from_str(line).expect("JSON");
        lines.iter().map(parse).collect()
    }

    /// Begins an answer of a chat, whatever its status.
    pub async fn open(&self, node: &NodeProcess, extra: Value) -> reqwest::Response {
        let request = self.request(node, "/v1/chat/completions", &self.body(extra));
        request.send().await.expect("an answer")
    }

    /// Begins a streamed answer, and returns when its first bytes have come.
    pub async fn begin(&self, node: &NodeProcess, extra: Value) -> reqwest::Response {
        let mut extra = extra;
        extra["stream"] = true.into();
        let mut response = self.open(node, extra).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert!(response.chunk().await.unwrap().is_some());
        response
    }

    /// Begins a streamed answer and goes away after its first bytes, or after `patience`.
    pub async fn leave(&self, node: &NodeProcess, extra: Value, patience: Duration) {
        let _ = tokio::time::timeout(patience, self.begin(node, extra)).await;
    }

    /// What a router does: prefill with the handle of the turn before, then decode.
    pub async fn turn(
        &self,
        (prefill, decode): (&NodeProcess, &NodeProcess),
        messages: &Value,
        handle: Option<&Value>,
    ) -> Turn {
        let first = self.prefill(prefill, messages, handle).await.ok();
        let params = first.params();
        assert!(params.is_object(), "{first:?}");
        let second = self
            .chat(decode, messages, json!({"kv_transfer_params": params}))
            .await
            .ok();
        Turn {
            text: second.text().to_owned(),
            handle: second.params(),
            prefill: first.report().clone(),
            decode: second.report().clone(),
        }
    }

    /// A router's first leg.
    pub async fn prefill(
        &self,
        node: &NodeProcess,
        messages: &Value,
        handle: Option<&Value>,
    ) -> Answer {
        let mut params = handle.cloned().unwrap_or_else(|| {
            json!({"remote_engine_id": null, "remote_block_ids": null, "remote_host": null,
                   "remote_port": null})
        });
        if params.is_object() {
            params["do_remote_decode"] = true.into();
            params["do_remote_prefill"] = false.into();
        }
        let extra = json!({"max_tokens": 1, "kv_transfer_params": params});
        self.chat(node, messages, extra).await
    }

    pub async fn metrics(&self, node: &NodeProcess) -> String {
        let response = self.http.get(format!("{}/metrics", node.url)).send().await;
        response.unwrap().text().await.unwrap()
    }

    /// The value of a metric, labels included in its name; 0 if it is not there.
    pub async fn metric(&self, node: &NodeProcess, name: &str) -> u64 {
        let text = self.metrics(node).await;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map_or(0, |value| value.parse().unwrap())
    }

    pub async fn pool(&self, node: &NodeProcess) -> Pool {
        let text = self.metrics(node).await;
        let states = text.lines().filter_map(|line| {
            let (state, count) = line
                .strip_prefix("kvx_pool_blocks{state=\"")?
                .split_once("\"} ")?;
            Some((state.to_owned(), count.parse().unwrap()))
        });
        states.collect()
    }

    /// Waits until nothing is claimed, quarantined or in use, and checks that no block is lost.
    pub async fn settled(&self, node: &NodeProcess) -> Pool {
        let begin = Instant::now();
        loop {
            let pool = self.pool(node).await;
            let busy = ["claimed", "quarantined", "active"].map(|state| pool[state]);
            if busy == [0, 0, 0] {
                assert_eq!(self.metric(node, "kvx_faults_total").await, 0);
                return pool;
            }
            assert!(
                begin.elapsed() < Duration::from_secs(30),
                "not settled: {pool:?}"
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub async fn reset(&self, node: &NodeProcess) {
        self.post(node, "/reset_prefix_cache", json!({})).await.ok();
    }

    /// The text of a node that reads nothing and finds nothing.
    pub async fn computed(&self, node: &NodeProcess, messages: &Value) -> String {
        let answer = self.apart().chat(node, messages, json!({})).await.ok();
        assert_eq!(answer.report()["local_hit_tokens"], 0);
        assert_eq!(answer.report()["read_tokens"], 0);
        answer.text().to_owned()
    }
}

/// The messages of a first turn; `topic` makes them different from others from the start.
pub fn conversation(topic: &str, facts: usize) -> Value {
    let facts: Vec<String> = (0..facts)
        .map(|n| {
            format!(
                "Item {n} on the list about {topic} costs {} coins.",
                n * 7 % 50 + 3
            )
        })
        .collect();
    json!([
        {"role": "system", "content": format!("You know all about {topic}.")},
        {"role": "user", "content": format!("{} What is this list about?", facts.join(" "))},
    ])
}

/// The messages of the next turn.
pub fn extended(messages: &Value, answer: &str, question: &str) -> Value {
    let mut messages = messages.as_array().unwrap().clone();
    messages.push(json!({"role": "assistant", "content": answer}));
    messages.push(json!({"role": "user", "content": question}));
    messages.into()
}

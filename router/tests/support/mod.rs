//! Nodes that do what a test says, and a router in front of them.
#![allow(dead_code)]

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use kvx_router::{Router, RouterConfig, RunningRouter};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};

/// Longer than anything takes unless it hangs.
pub const LONG: Duration = Duration::from_secs(60);

/// What a node got.
#[derive(Debug, Clone)]
pub struct Seen {
    pub path: String,
    pub headers: HeaderMap,
    pub body: Value,
    pub text: String,
}

impl Seen {
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |v| v.to_str().unwrap())
    }

    pub fn params(&self) -> &Value {
        &self.body["kv_transfer_params"]
    }
}

/// A part of a scripted stream.
#[derive(Clone)]
pub enum Step {
    Send(Bytes),
    /// Waits for a permit of the test.
    Wait(Arc<Semaphore>),
    /// Breaks the connection.
    Break,
    /// Says nothing more, for ever.
    Hang,
}

pub fn send(text: impl Into<String>) -> Step {
    Step::Send(Bytes::from(text.into()))
}

/// What a node answers.
#[derive(Clone)]
pub enum Reply {
    Json(u16, String),
    Stream(Vec<Step>),
    /// No answer, for ever.
    Hang,
    /// No answer until the test permits the usual one.
    Gate(Arc<Semaphore>),
    /// The usual one.
    Usual,
    /// A body that breaks off.
    BrokenJson,
}

struct Inner {
    name: &'static str,
    seen: Mutex<Vec<Seen>>,
    script: Mutex<VecDeque<Reply>>,
    usual: Mutex<Reply>,
    answers: AtomicU64,
    /// Requests that were given up before their answer was complete.
    cancelled: watch::Sender<usize>,
    healthy: Mutex<StatusCode>,
    close: AtomicBool,
}

/// A node on a runtime of its own, so that it can be killed with all its connections.
pub struct Node {
    pub addr: SocketAddr,
    inner: Arc<Inner>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Node {
    pub fn start(name: &'static str) -> Self {
        Self::at(name, "127.0.0.1:0".parse().unwrap())
    }

    pub fn at(name: &'static str, addr: SocketAddr) -> Self {
        let inner = Arc::new(Inner {
            name,
            seen: Mutex::default(),
            script: Mutex::default(),
            usual: Mutex::new(Reply::Usual),
            answers: AtomicU64::new(0),
            cancelled: watch::Sender::new(0),
            healthy: Mutex::new(StatusCode::OK),
            close: AtomicBool::new(false),
        });
        let listener = std::net::TcpListener::bind(addr).unwrap();
        listener.set_nonblocking(true).unwrap();
        let addr = listener.local_addr().unwrap();
        let mut node = Self {
            addr,
            inner,
            runtime: None,
        };
        node.serve(listener);
        node
    }

    fn serve(&mut self, listener: std::net::TcpListener) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let app = axum::Router::new()
            .fallback(handle)
            .with_state(Arc::clone(&self.inner));
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            axum::serve(listener, app).await.unwrap();
        });
        self.runtime = Some(runtime);
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Kills it with all its connections; returns when they are closed.
    pub fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // A runtime must not be waited for on a thread of another one.
            let ended = std::thread::spawn(move || runtime.shutdown_timeout(LONG));
            ended.join().unwrap();
        }
    }

    /// From now on it closes every connection after one answer, so that none is left when it is killed
    /// on which a request could still be sent.
    pub fn keep_no_connections(&self) {
        self.inner.close.store(true, Ordering::Relaxed);
    }

    /// Starts it again, where it was.
    pub fn restart(&mut self) {
        let begun = std::time::Instant::now();
        // The old socket goes when its runtime has noticed.
        let listener = loop {
            match std::net::TcpListener::bind(self.addr) {
                Ok(listener) => break listener,
                Err(error) => assert!(begun.elapsed() < LONG, "{error}"),
            }
            std::thread::yield_now();
        };
        listener.set_nonblocking(true).unwrap();
        self.serve(listener);
    }

    /// What it answers next, once.
    pub fn next(&self, reply: Reply) {
        self.inner.script.lock().push_back(reply);
    }

    pub fn next_stream(&self, steps: Vec<Step>) {
        self.next(Reply::Stream(steps));
    }

    /// What it answers always.
    pub fn always(&self, reply: Reply) {
        *self.inner.usual.lock() = reply;
    }

    pub fn set_health(&self, status: u16) {
        *self.inner.healthy.lock() = StatusCode::from_u16(status).unwrap();
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.inner.seen.lock().clone()
    }

    pub fn last(&self) -> Seen {
        self.seen().last().expect("it saw nothing").clone()
    }

    pub fn count(&self) -> usize {
        self.inner.seen.lock().len()
    }

    /// Returns when so many requests were given up.
    pub async fn cancelled(&self, count: usize) {
        let mut cancelled = self.inner.cancelled.subscribe();
        let wait = cancelled.wait_for(|n| *n >= count);
        tokio::time::timeout(LONG, wait)
            .await
            .expect("not cancelled")
            .unwrap();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Counts a request as given up if it is dropped early.
struct Watch(Option<Arc<Inner>>);

impl Watch {
    /// The answer is complete.
    fn done(&mut self) {
        self.0 = None;
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(inner) = self.0.take() {
            inner.cancelled.send_modify(|n| *n += 1);
        }
    }
}

async fn handle(State(inner): State<Arc<Inner>>, request: Request) -> Response {
    let close = inner.close.load(Ordering::Relaxed);
    let mut response = answer(inner, request).await;
    if close {
        let value = "close".parse().unwrap();
        response.headers_mut().insert("connection", value);
    }
    response
}

async fn answer(inner: Arc<Inner>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path().to_owned();
    if path == "/health" {
        return (*inner.healthy.lock()).into_response();
    }
    if path == "/v1/models" {
        return json_response(
            200,
            json!({"object": "list", "data": [{"id": inner.name}]}).to_string(),
        );
    }
    let bytes = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    let body: Value = serde_json::from_str(&text).unwrap();
    let seen = Seen {
        path,
        headers: parts.headers,
        body,
        text,
    };
    inner.seen.lock().push(seen.clone());
    let reply = inner.script.lock().pop_front();
    let reply = reply.unwrap_or_else(|| inner.usual.lock().clone());
    let mut watch = Watch(Some(Arc::clone(&inner)));
    let response = match reply {
        Reply::Json(status, text) => json_response(status, text),
        Reply::Usual => usual(&inner, &seen),
        Reply::Gate(gate) => {
            gate.acquire().await.unwrap().forget();
            usual(&inner, &seen)
        }
        Reply::Hang => std::future::pending().await,
        Reply::BrokenJson => {
            let parts = [
                Ok(Bytes::from_static(b"{\"id\":")),
                Err(std::io::Error::other("broken")),
            ];
            return with_type("application/json", Body::from_stream(stream::iter(parts)));
        }
        Reply::Stream(steps) => return stream_response(steps, watch),
    };
    watch.done();
    response
}

fn with_type(kind: &'static str, body: Body) -> Response {
    ([("content-type", kind)], body).into_response()
}

fn json_response(status: u16, text: String) -> Response {
    let mut response = with_type("application/json", Body::from(text));
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    response
}

fn stream_response(steps: Vec<Step>, watch: Watch) -> Response {
    let body = stream::unfold(
        (VecDeque::from(steps), watch),
        |(mut steps, mut watch)| async move {
            loop {
                match steps.pop_front() {
                    Some(Step::Send(bytes)) => return Some((Ok(bytes), (steps, watch))),
                    Some(Step::Wait(gate)) => gate.acquire().await.unwrap().forget(),
                    Some(Step::Break) => {
                        // hyper may drop what was not yet written when a body fails.
                        tokio::time::sleep(Duration::from_millis(20)).await;
                        return Some((Err(std::io::Error::other("broken")), (steps, watch)));
                    }
                    Some(Step::Hang) => std::future::pending().await,
                    None => {
                        watch.done();
                        return None;
                    }
                }
            }
        },
    );
    with_type("text/event-stream; charset=utf-8", Body::from_stream(body))
}

/// The handle that a node named `name` gives with its `n`th answer.
pub fn handle_of(name: &str, n: u64) -> Value {
    json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": name, "remote_block_ids": [[n]],
        "remote_host": "10.9.8.7", "remote_port": 5600, "remote_request_id": format!("r{n}"), "x_unknown": {"keep": [1.50]}})
}

/// What a node says in answer number `n`.
pub fn text_of(name: &str, n: u64) -> String {
    format!("answer {n} of {name}")
}

fn usual(inner: &Arc<Inner>, seen: &Seen) -> Response {
    let n = inner.answers.fetch_add(1, Ordering::Relaxed);
    let handle = handle_of(inner.name, n);
    let text = text_of(inner.name, n);
    let chat = seen.path.ends_with("chat/completions");
    let report = (seen.header("x-kvx-report") == "1")
        .then(|| json!({"decision": "none", "node": inner.name}));
    let choice = |delta: &'static str, finish: Option<&str>, text: &str| {
        let mut choice = json!({"index": 0, "finish_reason": finish});
        if chat {
            choice[delta] = json!({"role": "assistant", "content": text});
        } else {
            choice["text"] = json!(text);
        }
        choice
    };
    let object = |choices: Value, last: bool| {
        let mut object = json!({"id": format!("x-{}", seen.header("x-request-id")), "object": "x", "created": 1,
            "model": "m", "choices": choices});
        if last {
            object["kv_transfer_params"] = handle.clone();
            if let Some(report) = &report {
                object["kvx"] = report.clone();
            }
        }
        object
    };
    if seen.body["stream"] == json!(true) {
        let (a, b) = text.split_at(text.len() / 2);
        let events = [
            object(json!([choice("delta", None, a)]), false),
            object(json!([choice("delta", Some("stop"), b)]), true),
        ];
        let mut steps: Vec<Step> = events
            .iter()
            .map(|e| send(format!("data: {e}\n\n")))
            .collect();
        steps.push(send("data: [DONE]\n\n"));
        return stream_response(steps, Watch(None));
    }
    let mut whole = object(json!([choice("message", Some("stop"), &text)]), true);
    whole["usage"] = json!({"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7});
    json_response(200, whole.to_string())
}

/// Settings for a router before these nodes; every time is long enough never to matter.
pub fn config(prefill: &[&Node], decode: &[&Node]) -> RouterConfig {
    let urls = |nodes: &[&Node]| {
        nodes
            .iter()
            .map(|node| node.url().parse().unwrap())
            .collect()
    };
    let mut config = RouterConfig::new(urls(prefill), urls(decode));
    config.health_interval = Duration::from_millis(50);
    config
}

pub struct Client {
    pub router: RunningRouter,
    pub http: reqwest::Client,
}

impl Client {
    pub async fn start(config: RouterConfig) -> Self {
        let router = Router::start(config).await.unwrap();
        Self {
            router,
            http: reqwest::Client::builder().no_proxy().build().unwrap(),
        }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.router.addr)
    }

    pub fn post(&self, path: &str, body: &Value) -> reqwest::RequestBuilder {
        self.http
            .post(self.url(path))
            .header("content-type", "application/json")
            .body(body.to_string())
            .timeout(LONG)
    }

    pub fn chat(&self, body: &Value) -> reqwest::RequestBuilder {
        self.post("/v1/chat/completions", body)
    }

    /// Has an answer that is right, and gives its text.
    pub async fn ok(&self, request: reqwest::RequestBuilder) -> String {
        let response = request.send().await.unwrap();
        let status = response.status();
        let text = response.text().await.unwrap();
        assert_eq!(status, 200, "{text}");
        text
    }

    /// A turn of a named conversation.
    pub async fn turn(&self, conversation: &str, stream: bool) -> String {
        self.ok(self.chat(&body(conversation, stream))).await
    }

    /// A turn that fails: its status and the error that it tells.
    pub async fn failed(&self, request: reqwest::RequestBuilder) -> (u16, Value) {
        let response = request.send().await.unwrap();
        let status = response.status().as_u16();
        let text = response.text().await.unwrap();
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        let error = value["error"].clone();
        for field in ["message", "type", "param", "code"] {
            assert!(error.get(field).is_some(), "{field} is not in {value}");
        }
        (status, error)
    }

    pub async fn metrics(&self) -> String {
        self.ok(self.http.get(self.url("/metrics"))).await
    }

    /// The value of a line of metrics; 0 where there is none.
    pub async fn metric(&self, line: &str) -> u64 {
        let text = self.metrics().await;
        let value = text
            .lines()
            .find_map(|l| l.strip_prefix(line)?.strip_prefix(' '));
        value.map_or(0, |value| value.parse().unwrap())
    }

    pub async fn misses(&self, reason: &str) -> u64 {
        self.metric(&format!("kvx_router_misses_total{{reason=\"{reason}\"}}"))
            .await
    }

    pub async fn hits(&self) -> u64 {
        self.metric("kvx_router_hits_total").await
    }

    pub async fn outcomes(&self, outcome: &str) -> u64 {
        self.metric(&format!(
            "kvx_router_requests_total{{outcome=\"{outcome}\"}}"
        ))
        .await
    }
}

/// A request of a named conversation.
pub fn body(conversation: &str, stream: bool) -> Value {
    json!({"model": "m", "stream": stream, "conversation_id": conversation, "messages": [{"role": "user", "content": "hi"}]})
}

/// Returns when `condition` holds.
pub async fn until<F: Future<Output = bool>>(mut condition: impl FnMut() -> F) {
    let wait = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, wait)
        .await
        .expect("it did not come about");
}

/// The objects in a stream's events.
pub fn events(text: &str) -> Vec<Value> {
    text.split("\n\n")
        .filter_map(|event| event.strip_prefix("data: "))
        .filter(|data| *data != "[DONE]")
        .map(|data| serde_json::from_str(data).unwrap())
        .collect()
}

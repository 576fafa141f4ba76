//! The two legs of a request: prefill, then decode, each tried on one node after another.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};

use crate::error::ApiError;
use crate::json::{Fields, is_object};
use crate::metrics::Outcome;
use crate::nodes::{Busy, Group, Node};
use crate::request::{Api, ClientBody, PARAMS, end_to_end};
use crate::server::Shared;
use crate::store::{Homes, Taken};

/// For how long a node must have been down before what it was asked is asked of another: one that is merely
/// late with its health is waited for.
const DOWN_FOR: Duration = Duration::from_secs(2);
/// How often it is looked at whether a node is down.
const LOOK: Duration = Duration::from_millis(200);
/// Bytes of a node's error that are passed on.
const MAX_ERROR_BYTES: usize = 1 << 20;

/// A request on its way.
pub(crate) struct Legs<'a> {
    pub shared: &'a Arc<Shared>,
    pub api: Api,
    pub body: &'a ClientBody<'a>,
    /// For nodes.
    pub headers: &'a HeaderMap,
    /// Where the conversation was served last.
    pub homes: Homes,
}

/// A node's whole answer.
#[derive(Debug)]
pub(crate) struct Whole {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

/// A node's answer as far as it has come.
pub(crate) enum Answer {
    Whole(Whole),
    Stream {
        response: reqwest::Response,
        first: Bytes,
    },
}

/// What a prefill leg brought.
#[derive(Debug)]
pub(crate) struct Prefilled {
    pub params: Option<String>,
    pub report: Option<Arc<str>>,
    pub node: usize,
    pub url: String,
    pub time: Duration,
}

/// Why a node gave no answer.
#[derive(Debug)]
enum Failure {
    /// It was never reached.
    Unreachable(String),
    TimedOut,
    Broken(String),
    /// It says that it cannot.
    Refused(Box<Whole>),
}

/// Why there is no answer.
#[derive(Debug)]
pub(crate) struct NoAnswer(Option<Failure>);

impl Legs<'_> {
    /// Has the prompt computed. `None` where no prefill node could; an error is the answer of one that
    /// says that the request itself is wrong.
    pub async fn prefill(
        &self,
        mut taken: Option<&mut Taken>,
        params: Option<&str>,
    ) -> Result<Option<Prefilled>, Whole> {
        let params = taken.as_ref().map(|t| &*t.handle().params).or(params);
        let body = self.body.for_prefill(params);
        let limit = self.shared.config.prefill_timeout;
        let mut tried = Vec::new();
        // Whether a node may have used the handle.
        let mut spent = false;
        let mut spend = |spent| {
            if let Some(taken) = &mut taken {
                taken.set_spent(spent);
            }
        };
        while let Some(busy) = self.next(&self.shared.prefill, self.homes.prefill, &mut tried) {
            let since = Instant::now();
            spend(true);
            let failure = match self.ask(&busy, &body, limit, limit).await {
                Ok(Answer::Whole(whole)) if whole.status.is_success() => {
                    match prefilled(&whole.body, &busy, since.elapsed()) {
                        Ok(prefilled) => return Ok(Some(prefilled)),
                        Err(failure) => failure,
                    }
                }
                Ok(Answer::Whole(whole)) => {
                    // Refused before anything was computed.
                    spend(spent);
                    return Err(whole);
                }
                Ok(Answer::Stream { .. }) => Failure::Broken("a stream came".to_owned()),
                Err(failure) => failure,
            };
            spent |= !matches!(failure, Failure::Unreachable(_));
            spend(spent);
            self.note(&busy, &failure);
        }
        Ok(None)
    }

    /// Has the answer generated, with what prefill said. If no decode node can, a prefill node answers
    /// whole, at best the one that has just computed the prompt; this is said by the last of the three.
    pub async fn decode(
        &self,
        prefilled: Option<&Prefilled>,
    ) -> Result<(Answer, Busy, bool), NoAnswer> {
        let params = prefilled.and_then(|prefilled| prefilled.params.as_deref());
        let keep = self.shared.config.bidirectional && !self.body.many_prompts;
        let body = self.body.for_decode(params, keep);
        let decode = self.generate(&self.shared.decode, self.homes.decode, &body);
        let failure = match decode.await {
            Ok((answer, busy)) => return Ok((answer, busy, false)),
            Err(failure) => failure,
        };
        let body = self.body.for_decode(None, keep);
        let near = prefilled
            .map(|prefilled| prefilled.node)
            .or(self.homes.prefill);
        match self.generate(&self.shared.prefill, near, &body).await {
            Ok((answer, busy)) => Ok((answer, busy, true)),
            Err(last) => Err(NoAnswer(last.or(failure))),
        }
    }

    async fn generate(
        &self,
        group: &Group,
        preferred: Option<usize>,
        body: &Bytes,
    ) -> Result<(Answer, Busy), Option<Failure>> {
        let config = &self.shared.config;
        let mut tried = Vec::new();
        let mut last = None;
        while let Some(busy) = self.next(group, preferred, &mut tried) {
            let asked = self.ask(
                &busy,
                body,
                config.first_byte_timeout,
                config.answer_timeout,
            );
            match asked.await {
                Ok(answer) => return Ok((answer, busy)),
                Err(failure) => {
                    self.note(&busy, &failure);
                    last = Some(failure);
                }
            }
        }
        Err(last)
    }

    /// The node for the next attempt, if there is to be one.
    fn next(
        &self,
        group: &Group,
        preferred: Option<usize>,
        tried: &mut Vec<usize>,
    ) -> Option<Busy> {
        let retries = usize::try_from(self.shared.config.retries).unwrap_or(usize::MAX);
        if tried.len() > retries {
            return None;
        }
        let tokens = self
            .body
            .prompt_tokens
            .saturating_add(self.body.answer_tokens);
        let busy = group.choose(preferred, tried, tokens)?;
        if !tried.is_empty() {
            self.shared.metrics.retried(busy.node.id.role.name());
        }
        tried.push(busy.node.id.index);
        Some(busy)
    }

    /// Sends a body to a node, and waits for its answer: `first` for a stream to begin, `whole` for an
    /// answer in one piece. A node that goes down without a word is not waited for.
    async fn ask(
        &self,
        busy: &Busy,
        body: &Bytes,
        first: Duration,
        whole: Duration,
    ) -> Result<Answer, Failure> {
        tokio::select! {
            answer = self.answer_of(busy, body, first, whole) => answer,
            () = down(&busy.node) => Err(Failure::Broken("the node went down".to_owned())),
        }
    }

    async fn answer_of(
        &self,
        busy: &Busy,
        body: &Bytes,
        first: Duration,
        whole: Duration,
    ) -> Result<Answer, Failure> {
        let begun = Instant::now();
        let request = self
            .shared
            .client
            .post(&busy.node, self.api.path())
            .headers(self.headers.clone())
            .body(body.clone());
        // An answer in one piece has no byte before it is whole.
        let until_head = if self.body.streams() { first } else { whole };
        let mut response = within(until_head, request.send()).await??;
        let limit = self.shared.config.max_answer_bytes;
        let status = response.status();
        if status.is_server_error()
            || matches!(
                status,
                StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT
            )
        {
            let left = until_head.saturating_sub(begun.elapsed());
            let read = read_whole(response, limit.min(MAX_ERROR_BYTES));
            return Err(Failure::Refused(Box::new(within(left, read).await??)));
        }
        if is_event_stream(response.headers()) {
            let left = first.saturating_sub(begun.elapsed());
            let first = loop {
                match within(left, response.chunk()).await?? {
                    Some(bytes) if bytes.is_empty() => {}
                    Some(bytes) => break bytes,
                    None => return Err(Failure::Broken("an empty stream".to_owned())),
                }
            };
            return Ok(Answer::Stream { response, first });
        }
        let left = whole.saturating_sub(begun.elapsed());
        Ok(Answer::Whole(
            within(left, read_whole(response, limit)).await??,
        ))
    }

    fn note(&self, busy: &Busy, failure: &Failure) {
        let node = &busy.node;
        tracing::warn!(node = %node.url, role = node.id.role.name(), %failure, "a leg failed");
        match failure {
            Failure::Unreachable(why) => node.unreachable(why),
            Failure::TimedOut | Failure::Broken(_) => node.check.notify_one(),
            Failure::Refused(_) => {}
        }
    }
}

/// Until a node has been down for a while.
async fn down(node: &Node) {
    let mut since = Instant::now();
    while since.elapsed() < DOWN_FOR {
        tokio::time::sleep(LOOK).await;
        if node.is_up() {
            since = Instant::now();
        }
    }
}

async fn within<T>(limit: Duration, future: impl Future<Output = T>) -> Result<T, Failure> {
    tokio::time::timeout(limit, future)
        .await
        .map_err(|_| Failure::TimedOut)
}

async fn read_whole(mut response: reqwest::Response, limit: usize) -> Result<Whole, Failure> {
    let mut body = BytesMut::new();
    while let Some(part) = response.chunk().await? {
        if body.len().saturating_add(part.len()) > limit {
            return Err(Failure::Broken(format!(
                "the answer is larger than {limit} bytes"
            )));
        }
        body.extend_from_slice(&part);
    }
    Ok(Whole {
        status: response.status(),
        headers: response.headers().clone(),
        body: body.freeze(),
    })
}

fn prefilled(body: &[u8], busy: &Busy, time: Duration) -> Result<Prefilled, Failure> {
    let fields = Fields::parse_bytes(body)
        .map_err(|error| Failure::Broken(format!("prefill's answer is no object: {error}")))?;
    Ok(Prefilled {
        params: fields
            .get(PARAMS)
            .filter(|params| is_object(params))
            .map(str::to_owned),
        report: fields.get("kvx").map(Arc::from),
        node: busy.node.id.index,
        url: busy.node.url.to_string(),
        time,
    })
}

fn is_event_stream(headers: &HeaderMap) -> bool {
    headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .is_some_and(|value| {
            value
                .trim_start()
                .to_ascii_lowercase()
                .starts_with("text/event-stream")
        })
}

impl Whole {
    /// The answer to a request, if one comes.
    pub async fn of(request: reqwest::RequestBuilder, limit: usize) -> Option<Self> {
        read_whole(request.send().await.ok()?, limit).await.ok()
    }

    pub fn outcome(&self) -> Outcome {
        match self.status {
            status if status.is_client_error() => Outcome::ClientError,
            status if status.is_server_error() => Outcome::UpstreamError,
            _ => Outcome::Ok,
        }
    }
}

impl IntoResponse for Whole {
    fn into_response(self) -> Response {
        let mut response = Response::new(Body::from(self.body));
        *response.status_mut() = self.status;
        *response.headers_mut() = end_to_end(&self.headers);
        response
    }
}

impl NoAnswer {
    pub fn outcome(&self) -> Outcome {
        match &self.0 {
            None => Outcome::NoNode,
            Some(_) => Outcome::UpstreamError,
        }
    }
}

impl IntoResponse for NoAnswer {
    fn into_response(self) -> Response {
        match self.0 {
            None => ApiError::no_node().into_response(),
            Some(Failure::Refused(whole)) => whole.into_response(),
            Some(failure @ Failure::TimedOut) => ApiError::upstream(
                StatusCode::GATEWAY_TIMEOUT,
                "node_timeout",
                failure.to_string(),
            )
            .into_response(),
            Some(failure) => {
                ApiError::upstream(StatusCode::BAD_GATEWAY, "node_failed", failure.to_string())
                    .into_response()
            }
        }
    }
}

/// Says nothing of addresses: clients get to see it.
impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unreachable(_) => f.write_str("the node cannot be reached"),
            Self::TimedOut => f.write_str("the node took too long"),
            Self::Broken(why) => write!(f, "the node gave no whole answer: {why}"),
            Self::Refused(whole) => write!(f, "the node answered {}", whole.status),
        }
    }
}

impl From<reqwest::Error> for Failure {
    fn from(error: reqwest::Error) -> Self {
        if error.is_connect() {
            return Self::Unreachable(error.without_url().to_string());
        }
        if error.is_timeout() {
            return Self::TimedOut;
        }
        Self::Broken(error.without_url().to_string())
    }
}

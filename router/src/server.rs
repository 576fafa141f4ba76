//! The HTTP server: endpoints, and what all requests share.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::json;
use tokio::sync::watch;

use crate::client::Upstream;
use crate::config::{ConfigError, RouterConfig};
use crate::conversation::api_key;
use crate::error::ApiError;
use crate::legs::Whole;
use crate::metrics::{Levels, Metrics};
use crate::nodes::{Group, Node, NodeId, Role};
use crate::request::{Api, end_to_end};
use crate::store::{Limits, Store};
use crate::turn;

/// What all requests share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub config: RouterConfig,
    pub client: Upstream,
    pub prefill: Group,
    pub decode: Group,
    pub store: Arc<Store>,
    pub metrics: Metrics,
    /// Turns true when answers under way have to end.
    pub closing: watch::Sender<bool>,
    /// Misses for want of params since the last hit.
    pub no_params: AtomicU32,
}

impl Shared {
    pub fn new(config: RouterConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let prefill = Group::new(Role::Prefill, &config.prefill, config.affinity_slack);
        let decode = Group::new(Role::Decode, &config.decode, config.affinity_slack);
        let client = Upstream::new(&config, prefill.nodes().iter().chain(decode.nodes()))?;
        let store = Store::new(Limits {
            ttl: config.ttl,
            conversations: config.max_conversations,
            bytes: config.max_handle_bytes,
            handle_bytes: config.max_one_handle_bytes,
        });
        Ok(Self {
            config,
            client,
            prefill,
            decode,
            store: Arc::new(store),
            metrics: Metrics::new(),
            closing: watch::Sender::new(false),
            no_params: AtomicU32::new(0),
        })
    }

    pub fn nodes(&self) -> impl Iterator<Item = &Arc<Node>> {
        self.prefill.nodes().iter().chain(self.decode.nodes())
    }

    pub fn node(&self, id: NodeId) -> Option<&Arc<Node>> {
        match id.role {
            Role::Prefill => self.prefill.get(id.index),
            Role::Decode => self.decode.get(id.index),
        }
    }

    fn levels(&self) -> Levels {
        let (conversations, held_bytes) = self.store.held();
        Levels {
            conversations,
            held_bytes,
            roles: [self.prefill.levels(), self.decode.levels()],
        }
    }

    fn authorise(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        match &self.config.api_keys {
            Some(keys) if !keys.allow(api_key(headers)) => Err(ApiError::refused(
                StatusCode::UNAUTHORIZED,
                "invalid_api_key",
                "a valid API key is needed, as Authorization: Bearer KEY",
            )),
            _ => Ok(()),
        }
    }
}

/// All endpoints.
pub(crate) fn app(shared: Arc<Shared>) -> axum::Router {
    axum::Router::new()
        .route(Api::Chat.path(), post(chat))
        .route(Api::Completions.path(), post(completions))
        .route("/v1/models", get(models))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .with_state(shared)
}

async fn chat(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    complete(shared, Api::Chat, request).await
}

async fn completions(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    complete(shared, Api::Completions, request).await
}

async fn complete(shared: Arc<Shared>, api: Api, request: Request) -> Response {
    match shared.authorise(request.headers()) {
        Ok(()) => turn::answer(shared, api, request).await,
        Err(error) => error.into_response(),
    }
}

/// The models of any node.
async fn models(State(shared): State<Arc<Shared>>, headers: HeaderMap) -> Response {
    if let Err(error) = shared.authorise(&headers) {
        return error.into_response();
    }
    let mut sent = end_to_end(&headers);
    for name in [header::HOST, header::ACCEPT_ENCODING] {
        sent.remove(name);
    }
    for node in shared.nodes().filter(|node| node.is_up()) {
        let asked = shared
            .client
            .get(node, "/v1/models")
            .headers(sent.clone())
            .timeout(shared.config.health_timeout);
        match Whole::of(asked, shared.config.max_answer_bytes).await {
            Some(whole) if whole.status.is_success() => return whole.into_response(),
            _ => {}
        }
    }
    ApiError::no_node().into_response()
}

async fn health(State(shared): State<Arc<Shared>>) -> Response {
    // Any node can do any part.
    let up = shared.prefill.any_up() || shared.decode.any_up();
    let levels = shared.levels();
    let [prefill, decode] = levels
        .roles
        .map(|role| json!({"up": role.up, "down": role.down, "in_flight": role.in_flight}));
    let body = json!({
        "status": if up { "ok" } else { "no_node" },
        "prefill": prefill,
        "decode": decode,
        "conversations": levels.conversations,
    });
    let status = match up {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    (status, axum::Json(body)).into_response()
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    let kind = (
        header::CONTENT_TYPE,
        "text/plain; version=0.0.4; charset=utf-8",
    );
    ([kind], shared.metrics.text(&shared.levels())).into_response()
}

async fn unknown(uri: Uri) -> ApiError {
    ApiError::refused(
        StatusCode::NOT_FOUND,
        "not_found",
        format!("there is no {}", uri.path()),
    )
}

async fn wrong_method(uri: Uri) -> ApiError {
    ApiError::refused(
        StatusCode::METHOD_NOT_ALLOWED,
        "method_not_allowed",
        format!("{} does not take this method", uri.path()),
    )
}

//! The node's HTTP interface: OpenAI's chat and completions, and what operators need.
//!
//! `kv_transfer_params` travel as vLLM's do, at the top level of request and response; streamed
//! answers carry them on the piece with the `finish_reason`.

mod answer;
mod body;
mod error;
mod fields;
mod prepare;
mod stream;

use std::future::Future;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use kvx_router::http::{Patience, read_body};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc::UnboundedReceiver;

pub use answer::{Answer, Shape, Usage};
pub use body::{Api, Asked, Source};
pub use error::ApiError;
pub use fields::Fields;
pub use prepare::{Caller, Prepared, prepare};

use crate::node::{Event, Node};

/// Most bytes of a request body: a description of the longest conversation, and its text.
const MAX_BODY: usize = 16 << 20;

/// What the handlers share.
#[derive(Debug)]
pub struct App {
    node: Arc<Node>,
    model: String,
    patience: Patience,
    started: u64,
}

impl App {
    /// Serves a node under a model name.
    #[must_use]
    pub fn new(node: Arc<Node>, model: String, patience: Patience) -> Self {
        Self {
            node,
            model,
            patience,
            started: unix_time(),
        }
    }

    /// The routes.
    pub fn router(self) -> Router {
        Router::new()
            .route("/v1/chat/completions", post(chat))
            .route("/v1/completions", post(completions))
            .route("/v1/models", get(models))
            .route("/health", get(health))
            .route("/metrics", get(metrics))
            .route("/reset_prefix_cache", post(reset_prefix_cache))
            .fallback(async || ApiError::not_found("there is no such path here", None))
            .method_not_allowed_fallback(async || {
                ApiError::invalid("this path takes another method")
                    .status(StatusCode::METHOD_NOT_ALLOWED)
            })
            .with_state(Arc::new(self))
    }
}

/// Serves until `stop` is done and the connections have ended.
pub async fn serve(listener: TcpListener, app: App, stop: impl Future<Output = ()>) {
    let patience = app.patience;
    kvx_router::http::serve(listener, app.router(), patience, stop).await;
}

fn unix_time() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |time| time.as_secs())
}

async fn chat(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    generate(app, Api::Chat, request).await
}

async fn completions(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    generate(app, Api::Completions, request).await
}

async fn generate(app: Arc<App>, api: Api, request: Request) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let (parts, body) = request.into_parts();
    let headers = &parts.headers;
    let body = read_body(headers, body, MAX_BODY, app.patience.request)
        .await
        .inspect_err(|_| app.node.metrics().request("refused"))?;
    let caller = Caller::of(headers);
    let id_prefix = match api {
        Api::Chat => "chatcmpl-",
        Api::Completions => "cmpl-",
    };
    // Long prompts take milliseconds to parse, render and encode.
    let node = Arc::clone(&app.node);
    let model = app.model.clone();
    let work = {
        let caller = caller.clone();
        move || -> Result<_, ApiError> {
            let asked = Asked::read(api, &body)?;
            check_model(asked.model.as_deref(), &model)?;
            let how = (asked.stream, asked.include_usage);
            Ok((how, prepare(&node, &caller, id_prefix, asked, arrived)?))
        }
    };
    let ((stream, include_usage), prepared) = tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| ApiError::internal(error.to_string()))?
        .inspect_err(|_| app.node.metrics().request("refused"))?;
    let shape = Shape {
        api,
        id: prepared.request.id.clone(),
        created: unix_time(),
        model: app.model.clone(),
        report: caller.report,
        choices: prepared.request.choices,
    };
    app.node.submit(prepared.request)?;
    if stream {
        stream::respond(shape, prepared.events, include_usage).await
    } else {
        let body = whole(&shape, prepared.events).await?;
        Ok(Json(body).into_response())
    }
}

fn check_model(asked: Option<&str>, served: &str) -> Result<(), ApiError> {
    match asked {
        Some(model) if model != served => Err(ApiError::not_found(
            format!("the model {model:?} does not exist; this node serves {served:?}"),
            Some("model_not_found"),
        )),
        _ => Ok(()),
    }
}

/// Waits for all answers.
async fn whole(shape: &Shape, mut events: UnboundedReceiver<Event>) -> Result<Value, ApiError> {
    let mut answers: Vec<Answer> = (0..shape.choices).map(|_| Answer::default()).collect();
    while answers.iter().any(|answer| answer.end.is_none()) {
        match events.recv().await {
            Some(Event::Text { choice, text }) => {
                if let Some(answer) = answers.get_mut(choice as usize) {
                    answer.text.push_str(&text);
                }
            }
            Some(Event::Finished { choice, end }) => {
                if let Some(answer) = answers.get_mut(choice as usize) {
                    answer.end = Some(end);
                }
            }
            Some(Event::Failed(failure)) => return Err(failure.into()),
            None => return Err(ApiError::internal("the engine thread has ended")),
        }
    }
    Ok(shape.whole(&mut answers))
}

async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [{
        "id": app.model, "object": "model", "created": app.started, "owned_by": "kv-xfer",
        "max_model_len": app.node.max_tokens(),
    }]}))
}

async fn health(State(app): State<Arc<App>>) -> Result<StatusCode, ApiError> {
    match app.node.healthy() {
        true => Ok(StatusCode::OK),
        false => Err(ApiError::unavailable("the engine thread has ended")),
    }
}

async fn metrics(State(app): State<Arc<App>>) -> impl IntoResponse {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], app.node.metrics().text())
}

async fn reset_prefix_cache(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let freed = app.node.reset_prefix_cache().await?;
    Ok(Json(json!({"freed_blocks": freed})))
}

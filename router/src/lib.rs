//! A router for disaggregated serving that remembers where a conversation's KV blocks are.
//!
//! Prefill nodes compute prompts, decode nodes generate. At the end of an answer a decode node still has
//! the KV blocks of the whole conversation, and says so in `kv_transfer_params`. The router keeps this
//! description, the *handle*, by conversation, and hands it to a prefill node with the next turn: that
//! node then reads the blocks instead of computing them again. The router sees metadata only, never
//! tensors.
//!
//! # The life of a request
//!
//! 1. **Arrival** (`server`, `request`). `POST /v1/chat/completions` or `/v1/completions`. Only fields at
//!    the top of the body are looked at; everything else keeps its bytes. `kv_transfer_params` of a client
//!    is dropped: engines connect to where it says.
//! 2. **Whose turn is it?** (`conversation`, `history`). The conversation is named by `conversation_id` in
//!    the body, else by the header `X-Conversation-ID`, else recognised by its messages: after each answer
//!    the router remembers a hash of history and answer, and a request that begins with them goes on with
//!    that conversation. Tenant (a hash of the API key), model and name together are the key to all that
//!    is remembered.
//! 3. **The handle** (`store`) is taken out: it is used once. A turn that finds none is a miss, counted
//!    with its reason, and is computed in full. A handle goes back if no node was reached with it.
//! 4. **Prefill leg** (`legs`, `nodes`). The body with one token to generate goes to the prefill node that
//!    served the conversation before, or to the one with the least to do. If it fails, another one gets the
//!    same handle; if none can, decode computes the prompt itself.
//! 5. **Decode leg**. The client's body goes, with the `kv_transfer_params` that prefill answered, to the
//!    decode node that served the conversation before, or to the one with the least to do. If it fails
//!    before its first byte another one gets the same; if none can, a prefill node answers whole.
//! 6. **Relay** (`relay`, `sse`, `record`). Events are relayed as they come, byte for byte. Only one that
//!    carries a handle is changed: the handle is taken out of it, and is stored before the event goes on, so
//!    that it is there when the next turn comes. A node that breaks off its answer leaves the client with an
//!    error event, not with a part that looks whole. A client that goes away, or that
//!    stops reading for too long, cancels the leg that is under way.
//!
//! A wrong guess, an old handle, a lost node: all of these cost time, never right text. Engines compare the
//! tokens of blocks before they use them, and compute what they cannot read.
//!
//! # Example
//!
//! ```no_run
//! use kvx_router::{Router, RouterConfig};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let prefill = vec!["http://10.0.0.1:8100".parse()?];
//! let decode = vec!["http://10.0.0.2:8200".parse()?];
//! let router = Router::start(RouterConfig::new(prefill, decode)).await?;
//! println!("http://{}/v1", router.addr);
//! router.shutdown().await;
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod address;
mod client;
mod config;
mod conversation;
mod error;
mod health;
mod history;
pub mod http;
mod json;
mod legs;
mod metrics;
mod nodes;
mod record;
mod relay;
mod report;
mod request;
mod run;
mod server;
mod sse;
mod store;
mod turn;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinHandle};

pub use address::{NodeUrl, NodeUrlError};
pub use config::{ApiKeys, ConfigError, ROUTER_HELP, RouterArgs, RouterConfig};
pub use conversation::api_key;
pub use run::{Ended, RunError, run};

use http::Patience;
use server::Shared;

/// Why a router does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// Its settings cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// It cannot listen where it should.
    #[error("cannot listen on {host}, port {port}: {source}")]
    Listen {
        /// The host that was set.
        host: String,
        /// The port that was set.
        port: u16,
        /// What the system says.
        source: std::io::Error,
    },
}

/// Starts routers.
#[derive(Debug)]
pub struct Router;

impl Router {
    /// Starts a router on the current Tokio runtime. When this returns it listens, and has asked every node
    /// once whether it can serve.
    ///
    /// # Errors
    ///
    /// Where the settings cannot be used, or the address cannot be listened on.
    pub async fn start(config: RouterConfig) -> Result<RunningRouter, StartError> {
        let shared = Arc::new(Shared::new(config)?);
        let config = &shared.config;
        let cannot = |source| StartError::Listen {
            host: config.host.clone(),
            port: config.port,
            source,
        };
        let listener = listen(&config.host, config.port).await.map_err(cannot)?;
        let addr = listener.local_addr().map_err(cannot)?;
        health::check_all(&shared).await;
        let watchers = shared
            .nodes()
            .map(|node| {
                tokio::spawn(health::watch(Arc::clone(&shared), Arc::clone(node))).abort_handle()
            })
            .collect();
        let stop = watch::Sender::new(false);
        let mut stopped = stop.subscribe();
        let patience = Patience {
            request: config.request_timeout,
            stall: config.stall_timeout,
        };
        let app = server::app(Arc::clone(&shared));
        let serving = tokio::spawn(http::serve(listener, app, patience, async move {
            // A sender that is gone means the same.
            let _ = stopped.wait_for(|stop| *stop).await;
        }));
        Ok(RunningRouter {
            addr,
            shared,
            stop,
            serving,
            watchers,
        })
    }
}

async fn listen(host: &str, port: u16) -> std::io::Result<TcpListener> {
    let host = host.to_owned();
    let address = tokio::task::spawn_blocking(move || address::resolve(&host, port))
        .await
        .map_err(std::io::Error::other)??;
    TcpListener::bind(address).await
}

/// A router that serves. Ends when dropped; [`shutdown`](Self::shutdown) lets answers under way come to
/// their end.
#[derive(Debug)]
pub struct RunningRouter {
    /// Where it listens.
    pub addr: SocketAddr,
    shared: Arc<Shared>,
    stop: watch::Sender<bool>,
    serving: JoinHandle<()>,
    watchers: Vec<AbortHandle>,
}

/// How long streams may take to send their last event when they are cut off.
const LAST_WORDS: Duration = Duration::from_secs(1);

impl RunningRouter {
    /// Takes no more requests, and returns when all answers under way have ended, or were cut off because
    /// they took longer than [`RouterConfig::grace`].
    pub async fn shutdown(mut self) {
        self.stop.send_replace(true);
        let grace = self.shared.config.grace;
        if tokio::time::timeout(grace, &mut self.serving)
            .await
            .is_err()
        {
            self.shared.closing.send_replace(true);
            // Those that are not streams have nothing to say yet.
            let _ = tokio::time::timeout(LAST_WORDS, &mut self.serving).await;
        }
    }
}

impl Drop for RunningRouter {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        self.shared.closing.send_replace(true);
        self.serving.abort();
        for watcher in &self.watchers {
            watcher.abort();
        }
    }
}

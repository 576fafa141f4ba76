//! Requests to nodes.

use std::time::Duration;

use axum::http::Method;
use axum::http::header;
use reqwest::redirect::Policy;
use reqwest::{Client, ClientBuilder, RequestBuilder};

use crate::config::{ConfigError, RouterConfig};
use crate::nodes::Node;

/// How long a connection to a node is kept for the next request. Below what nodes and other servers keep one, so that
/// it is not used when it is about to end.
const IDLE: Duration = Duration::from_secs(20);

/// The HTTP client for all nodes. HTTP/1 without proxies and without redirects: a node is where the
/// settings say.
#[derive(Debug)]
pub(crate) struct Upstream(Client);

impl Upstream {
    pub fn new<'a>(
        config: &RouterConfig,
        nodes: impl Iterator<Item = &'a std::sync::Arc<Node>>,
    ) -> Result<Self, ConfigError> {
        let mut builder = ClientBuilder::new()
            .no_proxy()
            .redirect(Policy::none())
            .http1_only()
            .tcp_nodelay(true)
            .connect_timeout(config.connect_timeout)
            .pool_idle_timeout(IDLE);
        for node in nodes {
            // URLs have no form for scope ids: such a node gets a name that only this client knows.
            if let Some(address) = node.url.scoped() {
                let address = address.map_err(|source| ConfigError::Scope {
                    node: node.url.clone(),
                    source,
                })?;
                builder = builder.resolve(&node.alias, address);
            }
        }
        let client = builder
            .build()
            .map_err(|error| ConfigError::Client(error.to_string()))?;
        Ok(Self(client))
    }

    pub fn get(&self, node: &Node, path: &str) -> RequestBuilder {
        self.request(Method::GET, node, path)
    }

    pub fn post(&self, node: &Node, path: &str) -> RequestBuilder {
        self.request(Method::POST, node, path)
    }

    fn request(&self, method: Method, node: &Node, path: &str) -> RequestBuilder {
        let request = self
            .0
            .request(method, node.url.request_url(&node.alias, path));
        match &node.host {
            Some(host) => request.header(header::HOST, host),
            None => request,
        }
    }
}

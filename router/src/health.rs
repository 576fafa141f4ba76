//! Watches the nodes: each is asked at an interval whether it can serve.
//!
//! A node that is down is asked soon again, then less often, up to the interval; its first good answer
//! brings it back into service.

use std::sync::Arc;
use std::time::Duration;

use crate::nodes::Node;
use crate::server::Shared;

/// The first wait before a node that is down is asked again.
const FIRST_RETRY: Duration = Duration::from_millis(200);

/// Asks a node once.
pub(crate) async fn check(shared: &Shared, node: &Node) {
    let answer = shared
        .client
        .get(node, "/health")
        .timeout(shared.config.health_timeout)
        .send()
        .await;
    match answer {
        // Whoever answers that there is no such path is there.
        Ok(response) if !response.status().is_server_error() => node.healthy(),
        Ok(response) => node.unhealthy(true, response.status().as_str()),
        Err(error) => node.unhealthy(
            error.is_connect() && !error.is_timeout(),
            &error.to_string(),
        ),
    }
}

/// Asks all nodes at once, and waits for their answers.
pub(crate) async fn check_all(shared: &Shared) {
    let checks = shared.nodes().map(|node| check(shared, node));
    futures_util::future::join_all(checks).await;
}

/// Keeps asking one node, for ever.
pub(crate) async fn watch(shared: Arc<Shared>, node: Arc<Node>) {
    let interval = shared.config.health_interval;
    let mut retry = FIRST_RETRY;
    loop {
        let wait = if node.is_up() {
            retry = FIRST_RETRY;
            interval
        } else {
            let wait = retry.min(interval);
            retry = retry.saturating_mul(2);
            wait
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = node.check.notified() => retry = FIRST_RETRY,
        }
        check(&shared, &node).await;
    }
}

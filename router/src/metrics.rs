//! What the router counts, for Prometheus.

use prometheus_client::encoding::prometheus_text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

pub(crate) type Label = [(&'static str, &'static str); 1];
type NodeLabels = [(&'static str, &'static str); 2];

/// All counters; the registry holds their other halves.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    pub requests: Family<Label, Counter>,
    pub hits: Counter,
    pub misses: Family<Label, Counter>,
    pub handle_age: Histogram,
    pub handle_bytes: Histogram,
    pub first_byte: Histogram,
    pub prefill: Histogram,
    pub retries: Family<Label, Counter>,
    pub fallbacks: Family<Label, Counter>,
    pub oversized_events: Counter,
    conversations: Gauge,
    held_bytes: Gauge,
    nodes: Family<NodeLabels, Gauge>,
    in_flight: Family<Label, Gauge>,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// With its whole answer.
    Ok,
    /// The client sent what cannot be answered.
    ClientError,
    /// Nodes failed, and none was left.
    UpstreamError,
    /// No node was up.
    NoNode,
    /// A node went away in the middle of its answer.
    Cut,
    /// The client went away.
    ClientGone,
}

impl Outcome {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::ClientError => "client_error",
            Self::UpstreamError => "upstream_error",
            Self::NoNode => "no_node",
            Self::Cut => "cut",
            Self::ClientGone => "client_gone",
        }
    }
}

/// What changes by itself and is read when metrics are asked for.
#[derive(Debug, Default)]
pub(crate) struct Levels {
    pub conversations: u64,
    pub held_bytes: u64,
    /// Of prefill and of decode nodes.
    pub roles: [RoleLevels; 2],
}

#[derive(Debug, Default)]
pub(crate) struct RoleLevels {
    pub role: &'static str,
    pub up: usize,
    pub down: usize,
    pub in_flight: usize,
}

impl Metrics {
    pub fn new() -> Self {
        let seconds = || Histogram::new(exponential_buckets(0.001, 2.0, 18));
        let metrics = Self {
            registry: Registry::with_prefix("kvx_router"),
            requests: Family::default(),
            hits: Counter::default(),
            misses: Family::default(),
            // The time to live is 450 s by default: a second to half an hour.
            handle_age: Histogram::new(exponential_buckets(0.25, 2.0, 14)),
            handle_bytes: Histogram::new(exponential_buckets(64.0, 2.0, 18)),
            first_byte: seconds(),
            prefill: seconds(),
            retries: Family::default(),
            fallbacks: Family::default(),
            oversized_events: Counter::default(),
            conversations: Gauge::default(),
            held_bytes: Gauge::default(),
            nodes: Family::default(),
            in_flight: Family::default(),
        };
        metrics.registered()
    }

    fn registered(mut self) -> Self {
        let r = &mut self.registry;
        r.register(
            "requests",
            "Completions, by how they ended",
            self.requests.clone(),
        );
        r.register("hits", "Turns that took a handle along", self.hits.clone());
        r.register(
            "misses",
            "Turns that had no handle, by reason",
            self.misses.clone(),
        );
        r.register(
            "handle_age_seconds",
            "Age of handles when taken",
            self.handle_age.clone(),
        );
        r.register(
            "handle_bytes",
            "Size of handles when stored",
            self.handle_bytes.clone(),
        );
        r.register(
            "time_to_first_byte_seconds",
            "From a request's arrival until the first byte of a node's answer",
            self.first_byte.clone(),
        );
        r.register(
            "prefill_seconds",
            "Duration of prefill legs that succeeded",
            self.prefill.clone(),
        );
        r.register("retries", "Further attempts, by leg", self.retries.clone());
        r.register(
            "fallbacks",
            "Requests that left the usual way, by the way taken",
            self.fallbacks.clone(),
        );
        r.register(
            "oversized_events",
            "Events over the limit, relayed without a look into them",
            self.oversized_events.clone(),
        );
        r.register(
            "conversations",
            "Conversations of which a handle is held",
            self.conversations.clone(),
        );
        r.register(
            "held_bytes",
            "Bytes of the handles held",
            self.held_bytes.clone(),
        );
        r.register("nodes", "Nodes, by role and state", self.nodes.clone());
        r.register(
            "in_flight",
            "Legs under way, by role",
            self.in_flight.clone(),
        );
        self
    }

    /// Counts a request that has ended.
    pub fn ended(&self, outcome: Outcome) {
        self.requests
            .get_or_create(&[("outcome", outcome.name())])
            .inc();
    }

    /// Counts a turn without a handle.
    pub fn missed(&self, reason: &'static str) {
        self.misses.get_or_create(&[("reason", reason)]).inc();
    }

    /// Counts a further attempt.
    pub fn retried(&self, leg: &'static str) {
        self.retries.get_or_create(&[("leg", leg)]).inc();
    }

    /// Counts a request that left the usual way.
    pub fn fell_back(&self, to: &'static str) {
        self.fallbacks.get_or_create(&[("to", to)]).inc();
    }

    /// All of it in Prometheus' text format, with what `levels` says.
    pub fn text(&self, levels: &Levels) -> String {
        let gauge = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
        self.conversations
            .set(i64::try_from(levels.conversations).unwrap_or(i64::MAX));
        self.held_bytes
            .set(i64::try_from(levels.held_bytes).unwrap_or(i64::MAX));
        for role in &levels.roles {
            for (state, count) in [("up", role.up), ("down", role.down)] {
                self.nodes
                    .get_or_create(&[("role", role.role), ("state", state)])
                    .set(gauge(count));
            }
            self.in_flight
                .get_or_create(&[("role", role.role)])
                .set(gauge(role.in_flight));
        }
        let mut text = String::new();
        // Writing into memory cannot fail.
        let _ = prometheus_text::encode(&mut text, &self.registry);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_show_with_their_labels() {
        let metrics = Metrics::new();
        metrics.ended(Outcome::Ok);
        metrics.missed("expired");
        metrics.missed("expired");
        metrics.handle_age.observe(3.0);
        let levels = Levels {
            conversations: 5,
            ..Levels::default()
        };
        let text = metrics.text(&levels);
        for line in [
            r#"kvx_router_requests_total{outcome="ok"} 1"#,
            r#"kvx_router_misses_total{reason="expired"} 2"#,
            "kvx_router_handle_age_seconds_count 1",
            "kvx_router_conversations 5",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
    }
}

//! What a node counts, as Prometheus reads it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kv_xfer::telemetry::{EngineSnapshot, MetricKind};
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::cache::{Counts, State};

type ByName = Family<[(&'static str, String); 1], Counter>;

/// A node at one moment, as its engine thread last saw it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Published {
    /// The pool.
    pub blocks: Counts,
    /// The counters of the transfer engine.
    pub engine: EngineSnapshot,
    /// Sequences that wait.
    pub waiting: usize,
    /// Sequences whose blocks are being read.
    pub reading: usize,
    /// Sequences that are computed.
    pub running: usize,
}

/// The counters of a node. Clones share them.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    published: Arc<Mutex<Published>>,
    requests: ByName,
    decisions: ByName,
    fallbacks: ByName,
    /// Prompt tokens read from other nodes.
    pub read_tokens: Counter,
    /// Tokens computed.
    pub computed_tokens: Counter,
    /// Prompt tokens found in the node's own cache.
    pub local_hit_tokens: Counter,
    /// Tokens of answers.
    pub generated_tokens: Counter,
    /// Sequences that gave their blocks to older ones, and are computed again.
    pub preemptions: Counter,
    /// Leases ended early because their blocks were needed, in blocks.
    pub revoked_blocks: Counter,
    /// Faults of the node's own bookkeeping; always 0 unless there is a bug.
    pub faults: Counter,
    ttft: Histogram,
    steps: Arc<AtomicU64>,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All at zero.
    #[must_use]
    pub fn new() -> Self {
        let published = Arc::new(Mutex::new(Published::default()));
        let mut registry = Registry::with_prefix("kvx");
        let requests = ByName::default();
        let decisions = ByName::default();
        let fallbacks = ByName::default();
        registry.register("requests", "Requests by outcome", requests.clone());
        registry.register(
            "decisions",
            "Decisions about offered blocks, by reason",
            decisions.clone(),
        );
        registry.register(
            "fallbacks",
            "Offered blocks that were computed instead, by what went wrong",
            fallbacks.clone(),
        );
        let mut counter = |name: &str, help: &str| {
            let counter = Counter::default();
            registry.register(name, help, counter.clone());
            counter
        };
        let read_tokens = counter("read_tokens", "Prompt tokens read from other nodes");
        let computed_tokens = counter("computed_tokens", "Tokens computed");
        let local_hit_tokens = counter("local_hit_tokens", "Prompt tokens found in the own cache");
        let generated_tokens = counter("generated_tokens", "Tokens of answers");
        let preemptions = counter(
            "preemptions",
            "Sequences that gave their blocks to older ones",
        );
        let revoked_blocks = counter("revoked_blocks", "Leased blocks taken back under pressure");
        let faults = counter("faults", "Faults of the node's bookkeeping");
        let ttft = Histogram::new([
            0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0,
        ]);
        registry.register(
            "time_to_first_token_seconds",
            "From a request's arrival to its first token",
            ttft.clone(),
        );
        registry.register_collector(Box::new(Gauges(Arc::clone(&published))));
        Self {
            registry: Arc::new(registry),
            published,
            requests,
            decisions,
            fallbacks,
            read_tokens,
            computed_tokens,
            local_hit_tokens,
            generated_tokens,
            preemptions,
            revoked_blocks,
            faults,
            ttft,
            steps: Arc::default(),
        }
    }

    /// Counts a request's end.
    pub fn request(&self, outcome: &str) {
        count(&self.requests, "outcome", outcome);
    }

    /// Counts a decision.
    pub fn decision(&self, reason: &str) {
        count(&self.decisions, "reason", reason);
    }

    /// Counts offered blocks that had to be computed.
    pub fn fallback(&self, reason: &str) {
        count(&self.fallbacks, "reason", reason);
    }

    /// Notes a time to first token.
    pub fn first_token(&self, seconds: f64) {
        self.ttft.observe(seconds);
    }

    /// Replaces what is known of the node.
    pub fn publish(&self, published: Published) {
        *self.published.lock() = published;
        self.steps.fetch_add(1, Ordering::Relaxed);
    }

    /// The node as it was last published.
    #[must_use]
    pub fn published(&self) -> Published {
        *self.published.lock()
    }

    /// Everything, in the text format of Prometheus (OpenMetrics).
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing into a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

fn count(family: &ByName, label: &'static str, value: &str) {
    family.get_or_create(&[(label, value.to_owned())]).inc();
}

/// Shows what the engine thread has published.
#[derive(Debug)]
struct Gauges(Arc<Mutex<Published>>);

impl Collector for Gauges {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        let now = *self.0.lock();
        let mut blocks = encoder.encode_descriptor(
            "pool_blocks",
            "Blocks of the pool by state",
            None,
            MetricType::Gauge,
        )?;
        for state in State::ALL {
            let labels = [("state", state.as_str())];
            gauge(now.blocks.of(state)).encode(blocks.encode_family(&labels)?)?;
        }
        let mut sequences = encoder.encode_descriptor(
            "sequences",
            "Sequences that wait, are being read, or are computed",
            None,
            MetricType::Gauge,
        )?;
        for (state, count) in [
            ("waiting", now.waiting),
            ("reading", now.reading),
            ("running", now.running),
        ] {
            gauge(count).encode(sequences.encode_family(&[("state", state)])?)?;
        }
        engine(&mut encoder, &now.engine)
    }
}

fn gauge(count: usize) -> ConstGauge<i64> {
    ConstGauge::new(i64::try_from(count).unwrap_or(i64::MAX))
}

/// Every counter and gauge of the transfer engine, under its own name.
fn engine(encoder: &mut DescriptorEncoder<'_>, engine: &EngineSnapshot) -> fmt::Result {
    for metric in engine.metrics() {
        let name = format!("engine_{}", metric.name);
        let help = metric.help.trim_end_matches('.');
        match metric.kind {
            MetricKind::Gauge => {
                let value = ConstGauge::new(i64::try_from(metric.value).unwrap_or(i64::MAX));
                value.encode(encoder.encode_descriptor(&name, help, None, MetricType::Gauge)?)?;
            }
            MetricKind::Counter => {
                let value = ConstCounter::new(metric.value);
                value.encode(encoder.encode_descriptor(
                    &name,
                    help,
                    None,
                    MetricType::Counter,
                )?)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_shows_states_and_counters() {
        let metrics = Metrics::new();
        metrics.request("stop");
        metrics.decision("worth_reading");
        metrics.publish(Published {
            blocks: Counts {
                free: 7,
                ..Counts::default()
            },
            engine: EngineSnapshot {
                landed: 3,
                ..EngineSnapshot::default()
            },
            ..Published::default()
        });
        let text = metrics.text();
        for line in [
            "kvx_pool_blocks{state=\"free\"} 7",
            "kvx_pool_blocks{state=\"leased\"} 0",
            "kvx_engine_landed_total 3",
            "kvx_engine_bytes_shm_total 0",
            "kvx_engine_leases 0",
            "kvx_requests_total{outcome=\"stop\"} 1",
            "kvx_decisions_total{reason=\"worth_reading\"} 1",
            "kvx_read_tokens_total 0",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}

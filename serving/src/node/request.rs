//! A request as the engine thread gets it, and what it sends back.

use std::time::{Duration, Instant};

use kv_xfer::descriptor::{DescriptorLimits, Params, RemoteBlocks};
use kv_xfer::identity::{BlockHash, HashChain};
use serde::Serialize;
use serde_json::{Map, Value};
use tokio::sync::mpsc::UnboundedSender;

use crate::model::SamplingParams;

/// A request, made ready by the task that serves it.
#[derive(Debug)]
pub struct Request {
    /// Its name in logs and, with a suffix, in descriptors.
    pub id: String,
    /// The prompt.
    pub tokens: Vec<u32>,
    /// The chain of the prompt's block hashes, extended by the whole prompt.
    pub chain: HashChain,
    /// The hashes of the prompt's full blocks.
    pub hashes: Vec<BlockHash>,
    /// What its blocks belong to, besides the salt.
    pub owner: Owner,
    /// What it says about blocks elsewhere.
    pub transfer: Transfer,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// When it ends.
    pub limits: Limits,
    /// How many answers.
    pub choices: u32,
    /// Where the answers go. Once nobody listens the request is aborted.
    pub output: UnboundedSender<Event>,
    /// When it arrived.
    pub arrived: Instant,
}

/// Who and what a request's descriptors are bound to.
#[derive(Debug, Clone, Default)]
pub struct Owner {
    /// The tenant, as [`tenant_of`](crate::node::tenant_of) derives it.
    pub tenant: Option<String>,
    /// The conversation, as the router names it.
    pub conversation: Option<String>,
}

/// When an answer ends.
#[derive(Debug, Clone, Default)]
pub struct Limits {
    /// Most tokens of an answer.
    pub max_tokens: usize,
    /// Fewest tokens before the end-of-text token or a stop string ends it.
    pub min_tokens: usize,
    /// Strings that end the text before them.
    pub stop: Vec<String>,
    /// Whether the end-of-text token ends nothing.
    pub ignore_eos: bool,
}

/// The field in which a prefill node says how many tokens of the prompt it did not have to compute: vLLM's
/// name for it.
pub const PREFILL_CACHED: &str = "remote_prefill_cached_tokens";

/// What `kv_transfer_params` said.
#[derive(Debug, Default)]
pub struct Transfer {
    /// Whether there were any: somebody wants the blocks described when the request is finished.
    pub asked: bool,
    /// Whether they said `do_remote_decode`: this node is the prefill.
    pub to_decode: bool,
    /// Tokens of the prompt that the prefill node did not compute, if it says so.
    pub prefill_cached: Option<usize>,
    /// Blocks that are offered.
    pub remote: Option<Box<RemoteBlocks>>,
    /// Why the parameters were not understood; the tokens are computed.
    pub malformed: Option<String>,
}

impl Transfer {
    /// Reads the parameters. They come from outside, through routers: what is not understood is
    /// recomputed, not refused.
    #[must_use]
    pub fn parse(params: Map<String, Value>) -> Self {
        let says = |flag: &str| params.get(flag).and_then(Value::as_bool) == Some(true);
        // With both flags vLLM takes the decode side's path, too.
        let to_decode = says("do_remote_decode") && !says("do_remote_prefill");
        let prefill_cached = params
            .get(PREFILL_CACHED)
            .and_then(Value::as_u64)
            .and_then(|tokens| usize::try_from(tokens).ok());
        let mut transfer = Self {
            asked: true,
            to_decode,
            prefill_cached,
            ..Self::default()
        };
        match Params::from_json_value(Value::Object(params), &DescriptorLimits::default()) {
            Ok(Params::Remote(remote)) => transfer.remote = Some(remote),
            Ok(Params::Miss(_)) => {}
            Err(error) => transfer.malformed = Some(error.to_string()),
        }
        transfer
    }
}

/// Why an answer ended, in OpenAI's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The end-of-text token or a stop string.
    Stop,
    /// The most tokens there may be.
    Length,
}

/// What became of the offered blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum Decided {
    /// Nothing was offered.
    #[default]
    None,
    /// They were read.
    Read,
    /// Computing was better, or had to do.
    Recompute,
    /// They held nothing that was not here.
    Nothing,
}

/// Where the time and the tokens of one answer went: the `kvx` object of the HTTP interface.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Report {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of it found in the node's own cache.
    pub local_hit_tokens: usize,
    /// Tokens of it read from another node.
    pub read_tokens: usize,
    /// Tokens of it that nobody computed for this request, as far as is known here.
    #[serde(skip)]
    pub cached_tokens: usize,
    /// Tokens of it computed.
    pub computed_tokens: usize,
    /// What became of the offered blocks.
    pub decision: Decided,
    /// Why.
    pub reason: String,
    /// From submitting the read until its outcome was known.
    #[serde(serialize_with = "milliseconds", rename = "transfer_ms")]
    pub transfer: Duration,
    /// From arrival until the request was first worked on.
    #[serde(serialize_with = "milliseconds", rename = "queue_ms")]
    pub queue: Duration,
    /// From the first step (or the outcome of the read) until the first token.
    #[serde(serialize_with = "milliseconds", rename = "prefill_ms")]
    pub prefill: Duration,
    /// Why offered blocks that should have been read were computed instead.
    pub fallback: Option<String>,
}

fn milliseconds<S: serde::Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64((time.as_secs_f64() * 1e6).round() / 1e3)
}

/// The end of one answer.
#[derive(Debug)]
pub struct Finished {
    /// Why.
    pub reason: FinishReason,
    /// Tokens of the answer.
    pub completion_tokens: usize,
    /// The description of its blocks, for the next reader.
    pub kv_transfer_params: Option<Value>,
    /// Where time and tokens went.
    pub report: Report,
}

/// What the engine thread sends back.
#[derive(Debug)]
pub enum Event {
    /// More text of an answer.
    Text {
        /// Which answer.
        choice: u32,
        /// The text; never empty.
        text: String,
    },
    /// An answer has ended.
    Finished {
        /// Which answer.
        choice: u32,
        /// How.
        end: Box<Finished>,
    },
    /// The request cannot be served.
    Failed(Failure),
}

/// Why a request was not served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The node is ending.
    #[error("the node is shutting down; send the request to another one")]
    ShuttingDown,
    /// It waited too long before it was worked on.
    #[error("the request waited for {} s and others are before it; try again later", waited.as_secs())]
    Overdue {
        /// How long it waited.
        waited: Duration,
    },
    /// The model failed.
    #[error("the model failed: {0}")]
    Model(String),
    /// The bookkeeping failed, which is a bug.
    #[error("the node's bookkeeping failed: {0}; please report it")]
    Internal(String),
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(value: Value) -> Transfer {
        match value {
            Value::Object(map) => Transfer::parse(map),
            other => panic!("{other} is no object"),
        }
    }

    #[test]
    fn a_miss_asks_for_a_description_and_offers_nothing() {
        let transfer = parse(json!({
            "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
            "remote_block_ids": null, "remote_host": null, "remote_port": null,
        }));
        assert!(transfer.asked && transfer.to_decode);
        assert!(transfer.remote.is_none() && transfer.malformed.is_none());
    }

    #[test]
    fn what_is_not_understood_is_noted_and_still_asked_for() {
        for bad in [
            json!({"do_remote_decode": true, "remote_block_ids": "x"}),
            json!({"do_remote_decode": true, "remote_block_ids": [[-1]], "remote_engine_id": "e",
                   "remote_request_id": "r", "remote_host": "h", "remote_port": 1}),
            json!({"do_remote_decode": true, "remote_port": 1e300}),
        ] {
            let transfer = parse(bad.clone());
            assert!(transfer.asked && transfer.to_decode, "{bad}");
            assert!(transfer.malformed.is_some(), "{bad}");
        }
    }
}

//! What the demo's three processes say to each other, one JSON object a line. The parent plays the
//! router: it tells the decode process to finish a turn, carries the description of the blocks to the
//! prefill process, and collects what came of it.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::allocator::FreeOrder;
use super::history::History;
use super::report::{NixlReport, TurnReport};
use crate::memory::PoolMemory;

/// What both processes are started with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    /// Name of a model preset.
    pub model: String,
    /// Tensor-parallel size that the rank's share is cut for.
    pub tp: u32,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Blocks of the pool.
    pub blocks: u32,
    /// Seed of everything that is drawn.
    pub seed: u64,
    /// Where the pool is.
    pub memory: PoolMemory,
}

/// What is asked of the decode process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum ToDecode {
    /// Start the engine.
    Start(Setup),
    /// Have the KV of this text in blocks, lease and describe them.
    Finish {
        /// Prompt and answer.
        history: History,
        /// How long the lease lasts, ms.
        ttl_ms: u64,
        /// In which order the allocator hands out blocks.
        order: FreeOrder,
        /// Say where the blocks lie, for the baseline.
        want_pieces: bool,
    },
    /// Revoke the newest lease and overwrite its blocks.
    Revoke,
    /// Free everything, report and end.
    Stop,
}

/// What the decode process answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum FromDecode {
    /// The engine runs.
    Ready {
        /// Host of its side channel.
        host: String,
        /// Port of its side channel.
        port: u16,
        /// Its engine id.
        engine_id: String,
    },
    /// The turn is over.
    Finished {
        /// The description of its blocks, as `kv_transfer_params`.
        kv_transfer_params: Value,
        /// Where the blocks lie, if that was asked: address and length of each piece in bytes.
        pieces: Vec<(u64, u64)>,
    },
    /// The lease is revoked, the blocks are overwritten.
    Revoked,
    /// Everything was freed.
    Stopped {
        /// Blocks that were not.
        leaked_blocks: u64,
    },
    /// It cannot go on.
    Failed {
        /// Why, and what would help.
        why: String,
    },
}

/// What is asked of the prefill process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum ToPrefill {
    /// Start the engine.
    Start {
        /// The common part.
        setup: Setup,
        /// Process of the decode engine, for the baseline.
        decode_pid: u32,
    },
    /// Prefill a turn: decide, read, verify.
    Turn {
        /// Its number.
        turn: u32,
        /// The prompt.
        prompt: History,
        /// Tokens at its head whose blocks are in the local pool.
        local_hit_tokens: u32,
        /// In which order the allocator hands out blocks.
        order: FreeOrder,
        /// The description of the remote blocks, if there is one.
        kv_transfer_params: Option<Value>,
        /// Say [`FromPrefill::Submitted`] as soon as the read is under way, so that it can be
        /// disturbed.
        tell_when_submitted: bool,
    },
    /// Measure the baselines over these pieces of the decode process's memory.
    Baseline {
        /// Address and length of each piece in bytes.
        pieces: Vec<(u64, u64)>,
    },
    /// Free everything, report and end.
    Stop,
}

/// What the prefill process answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum FromPrefill {
    /// The engine runs.
    Ready {
        /// What carries the bytes.
        nixl: NixlReport,
    },
    /// The read is under way.
    Submitted,
    /// The turn is over.
    Turn {
        /// What came of it.
        report: TurnReport,
        /// Bytes that differed from what they must be.
        wrong_bytes: u64,
    },
    /// The baselines.
    Baseline {
        /// A plain copy, GB/s.
        memcpy_gbps: f64,
        /// `process_vm_readv`, GB/s, where it is allowed.
        process_vm_readv_gbps: Option<f64>,
    },
    /// Everything was freed.
    Stopped {
        /// Blocks still in quarantine.
        quarantined: u64,
        /// Blocks that were not freed.
        leaked_blocks: u64,
    },
    /// It cannot go on.
    Failed {
        /// Why, and what would help.
        why: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_one_line_and_come_back_equal() {
        let message = ToPrefill::Turn {
            turn: 3,
            prompt: History::new(1),
            local_hit_tokens: 16,
            kv_transfer_params: Some(serde_json::json!({"remote_request_id": "a\nb"})),
            tell_when_submitted: true,
            order: FreeOrder::Shuffled,
        };
        let line = serde_json::to_string(&message).unwrap();
        assert!(!line.contains('\n'));
        assert_eq!(serde_json::from_str::<ToPrefill>(&line).unwrap(), message);
        assert_eq!(
            serde_json::to_string(&ToDecode::Stop).unwrap(),
            r#"{"do":"stop"}"#
        );
    }
}

//! What an engine is asked and answers.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::time::Duration;

use super::job::ReleasePolicy;
use super::offer::Offer;
use crate::descriptor::RemoteBlocks;
use crate::identity::BlockHash;
use crate::ids::{BlockId, LeaseId, RequestId};
use crate::memory::OwnedBlocks;

/// Which way blocks are offered, which decides about vLLM's two flags.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// A prefill engine offers a prompt to a decode engine.
    PrefillToDecode,
    /// A decode engine offers prompt and answer to the next turn's prefill.
    DecodeToPrefill,
}

/// Blocks to be leased and described.
#[derive(Debug, Clone)]
pub struct LeaseSpec<'a> {
    /// The request whose blocks they are; unique among live leases.
    pub request: RequestId,
    /// The blocks in token order.
    pub blocks: Vec<BlockId>,
    /// Tokens whose KV is in the blocks; the last block may be partly filled.
    pub tokens: u64,
    /// One chained hash per full block.
    pub hashes: Vec<BlockHash>,
    /// How long, if not the configured default.
    pub ttl: Option<Duration>,
    /// Which way they are offered.
    pub direction: Direction,
    /// Tenant that the descriptor is bound to.
    pub tenant: Option<&'a str>,
    /// Conversation that the descriptor is bound to.
    pub conversation: Option<&'a str>,
}

/// A leased descriptor, with the lease's name for renewing and revoking.
#[derive(Debug, Clone)]
pub struct Leased {
    /// The lease.
    pub lease: LeaseId,
    /// What travels to the reader.
    pub remote: RemoteBlocks,
}

/// What an engine knows of a prompt when it decides.
#[derive(Debug, Clone, Copy)]
pub struct Prompt<'a> {
    /// Its length in tokens.
    pub tokens: u64,
    /// One chained hash per full block of it.
    pub hashes: &'a [BlockHash],
    /// Tokens found in the local prefix cache.
    pub local_hit_tokens: u64,
    /// Tokens under which recomputing is preferred; 0 always reads.
    pub threshold: u64,
}

/// A read to be made.
#[derive(Debug)]
pub struct ReadRequest<'a> {
    /// What is offered.
    pub offer: &'a Offer,
    /// The chained hashes of the prompt's full blocks, which say what the blocks must hold. They must
    /// be one chain, as [`HashChain`](crate::identity::HashChain) makes it: each hash is taken to stand
    /// for all before it.
    pub hashes: &'a [BlockHash],
    /// Which of the offered blocks, by index; all of them and all before them must hold the
    /// prompt's tokens.
    pub span: Range<usize>,
    /// Where to: exactly as many blocks of this engine's pool.
    pub blocks: OwnedBlocks,
    /// The read ends by then, however it ends.
    pub timeout: Duration,
    /// When the holder is told that the lease is needed no longer.
    pub release: ReleasePolicy,
}

/// How a shutdown went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShutdownReport {
    /// Blocks that may still be written: they stay claimed, and their pool mapped, for ever. When the
    /// driver hangs in a call of the transport, every claimed block counts.
    pub quarantined: u64,
}

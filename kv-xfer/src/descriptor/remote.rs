//! The fields of a descriptor, in vLLM's names.

use std::num::{NonZeroU16, NonZeroU32};

use serde_json::{Map, Value};

use super::host::Host;
use super::key::ClusterKey;
use super::runs::BlockRuns;
use super::ticket::{Binding, Ticket, TicketFault, full_blocks};
use super::ticket_codec::{SealedTicket, TicketError};
use crate::ids::{EngineId, RequestId};

/// Who moves the bytes. For routers to know; only `pull` is read here.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum TransferMode {
    /// The reader reads.
    Pull,
    /// Another mode, by its name.
    Other(String),
}

impl TransferMode {
    /// The name in JSON.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::Pull => "pull",
            Self::Other(name) => name,
        }
    }
}

/// Blocks that live on another engine: `kv_transfer_params` with something to read.
///
/// The fields are those of vLLM's NIXL connector and keep its names, so that routers, proxies and
/// vLLM engines pass them on and read them. A descriptor from a vLLM engine has no ticket, so
/// nothing could prove its bytes: it is parsed and passed on, but
/// [`Engine::accept`](crate::engine::Engine::accept) refuses it.
#[derive(Debug, Clone, PartialEq)]
pub struct RemoteBlocks {
    /// To a decode engine: load the prompt from the blocks.
    pub do_remote_prefill: bool,
    /// To a prefill engine: the blocks are an earlier turn's; prefill what is missing.
    pub do_remote_decode: bool,
    /// The blocks, one list per KV-cache group, in token order.
    pub remote_block_ids: Vec<BlockRuns>,
    /// The holder.
    pub remote_engine_id: EngineId,
    /// The holder's request.
    pub remote_request_id: RequestId,
    /// Host of the holder's side channel. Proxies overwrite it.
    pub remote_host: Host,
    /// Port of the holder's side channel.
    pub remote_port: NonZeroU16,
    /// The holder's tensor-parallel size.
    pub tp_size: NonZeroU32,
    /// The holder's decode-context-parallel size.
    pub dcp_size: NonZeroU32,
    /// The holder's pipeline-parallel size.
    pub pp_size: NonZeroU32,
    /// Tokens whose KV is in the blocks. vLLM's count may include positions of draft tokens.
    pub remote_num_tokens: u64,
    /// When the holder frees the blocks, in seconds of its own monotonic clock; never in seconds of
    /// ours. The ticket's remaining time takes its place where there is a ticket.
    pub remote_blocks_expiry_time: Option<f64>,
    /// Who moves the bytes.
    pub transfer_mode: Option<TransferMode>,
    /// What is ours: blocks, hashes and lease under one tag.
    pub ticket: Option<SealedTicket>,
    /// Fields that this build does not know, passed on as they came.
    pub extra: Map<String, Value>,
}

impl RemoteBlocks {
    /// Number of blocks, over all groups.
    #[must_use]
    pub fn block_count(&self) -> usize {
        self.remote_block_ids
            .iter()
            .fold(0, |sum, group| sum.saturating_add(group.len()))
    }

    /// What the ticket must be bound to, given what this engine knows of the request.
    #[must_use]
    pub fn binding<'a>(
        &'a self,
        tenant: Option<&'a str>,
        conversation: Option<&'a str>,
    ) -> Binding<'a> {
        Binding {
            engine: &self.remote_engine_id,
            request: &self.remote_request_id,
            tenant,
            conversation,
        }
    }

    /// The ticket's contents, once its tag has been checked; `None` when there is no ticket.
    ///
    /// # Errors
    /// [`TicketError`] when the ticket is not for this engine, request, tenant and conversation, or
    /// not under this key.
    pub fn verify_ticket(
        &self,
        key: Option<&ClusterKey>,
        tenant: Option<&str>,
        conversation: Option<&str>,
    ) -> Result<Option<&Ticket>, TicketError> {
        let Some(sealed) = &self.ticket else {
            return Ok(None);
        };
        let binding = Binding {
            engine: &self.remote_engine_id,
            request: &self.remote_request_id,
            tenant,
            conversation,
        };
        sealed.verify(key, &binding).map(Some)
    }

    /// Checks that the tokens fill the blocks, for descriptors without a ticket (which says its block
    /// size itself). Several groups are not checked: some of them may be clipped to a window.
    ///
    /// # Errors
    /// [`TicketFault`] naming both counts.
    pub fn check_token_count(&self, block_tokens: u32) -> Result<(), TicketFault> {
        match self.remote_block_ids.as_slice() {
            [group] => full_blocks(self.remote_num_tokens, group.len(), block_tokens).map(|_| ()),
            _ => Ok(()),
        }
    }
}

//! Tickets and descriptors that the tests start from.
#![allow(dead_code, clippy::unwrap_used)]

use std::num::{NonZeroU16, NonZeroU32};
use std::time::Duration;

use kv_xfer::clock::MonoTime;
use kv_xfer::descriptor::{
    Binding, BlockRuns, ClusterKey, DescriptorLimits, Host, LeaseRef, RemoteBlocks, SealedTicket,
    Ticket, TicketError, TransferMode,
};
use kv_xfer::identity::BlockHash;
use kv_xfer::ids::{BlockId, EngineId, Incarnation, LeaseId, LeaseWord, RequestId, WordSlot};
use kv_xfer::layout::LayoutFingerprint;

pub fn key(secret: &str) -> ClusterKey {
    ClusterKey::from_secret(secret.as_bytes()).unwrap()
}

/// A name for everything that a ticket is bound to.
pub struct Names {
    pub engine: EngineId,
    pub request: RequestId,
    pub tenant: Option<String>,
    pub conversation: Option<String>,
}

impl Names {
    pub fn binding(&self) -> Binding<'_> {
        Binding {
            engine: &self.engine,
            request: &self.request,
            tenant: self.tenant.as_deref(),
            conversation: self.conversation.as_deref(),
        }
    }
}

pub fn names() -> Names {
    Names {
        engine: EngineId::new("decode-0").unwrap(),
        request: RequestId::new("chatcmpl-7f3a-0badcafe").unwrap(),
        tenant: Some("acme".into()),
        conversation: Some("conv-1".into()),
    }
}

/// A ticket for these blocks of 16 tokens, the last of them holding `in_last` tokens.
pub fn ticket(ids: &[u32], in_last: u64) -> Ticket {
    let ids: Vec<BlockId> = ids.iter().copied().map(BlockId).collect();
    let tokens = (ids.len() as u64 - 1) * 16 + in_last;
    Ticket {
        incarnation: Incarnation(0x0123_4567_89ab_cdef),
        lease: LeaseRef {
            id: LeaseId(42),
            slot: WordSlot(3),
            word: LeaseWord(0x1111_2222_3333_4444),
        },
        runs: BlockRuns::from_ids(&ids),
        block_tokens: 16,
        tokens,
        hashes: (0..tokens / 16).map(hash).collect(),
        remaining: Duration::from_millis(479_500),
        stamp: MonoTime::from_nanos(987_654_321),
        fingerprint: LayoutFingerprint([0x5a; 32]),
    }
}

/// Some hash, another for each block.
fn hash(block: u64) -> BlockHash {
    BlockHash(
        u128::from(block + 1)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835)
            .to_le_bytes(),
    )
}

/// Parses and verifies, as a reader does.
pub fn open(
    text: &str,
    key: Option<&ClusterKey>,
    binding: &Binding<'_>,
) -> Result<Ticket, TicketError> {
    let sealed = SealedTicket::parse(text, &DescriptorLimits::default())?;
    sealed.verify(key, binding).cloned()
}

pub fn remote(ticket: Option<SealedTicket>, ids: &[u32], tokens: u64) -> RemoteBlocks {
    let names = names();
    RemoteBlocks {
        do_remote_prefill: false,
        do_remote_decode: true,
        remote_block_ids: vec![ids.iter().copied().map(BlockId).collect()],
        remote_engine_id: names.engine,
        remote_request_id: names.request,
        remote_host: Host::new("10.1.2.3").unwrap(),
        remote_port: NonZeroU16::new(5600).unwrap(),
        tp_size: NonZeroU32::new(8).unwrap(),
        dcp_size: NonZeroU32::MIN,
        pp_size: NonZeroU32::MIN,
        remote_num_tokens: tokens,
        remote_blocks_expiry_time: Some(12_345.5),
        transfer_mode: Some(TransferMode::Pull),
        ticket,
        extra: serde_json::Map::new(),
    }
}

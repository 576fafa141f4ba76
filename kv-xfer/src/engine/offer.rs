//! A descriptor that has been believed: its ticket is authentic, verifiable and of our layout.
#![forbid(unsafe_code)]

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::error::OfferError;
use crate::clock::MonoTime;
use crate::descriptor::{ClusterKey, RemoteBlocks, Ticket};
use crate::identity::{BlockHash, matching_prefix};
use crate::ids::{EngineId, Rank, RequestId};
use crate::layout::LayoutFingerprint;
use crate::peer::{PeerAddr, PeerKey};

/// Blocks that another engine offers. Only an offer can be read, and only a verified descriptor
/// becomes one.
#[derive(Debug, Clone)]
pub struct Offer {
    pub(super) engine: EngineId,
    pub(super) request: RequestId,
    pub(super) peer: PeerKey,
    pub(super) ticket: Arc<Ticket>,
    pub(super) arrived: MonoTime,
    compared: Arc<Mutex<Option<Compared>>>,
    /// When the lease ends on our clock, by the holder's last answer to a renewal.
    pub(super) told_end: Arc<Mutex<Option<MonoTime>>>,
    /// What a read found instead of the lease's word.
    pub(super) lost: Arc<OnceLock<u64>>,
}

/// What is known of one prompt's hashes: the first `count` are those of the ticket. A chained hash
/// stands for all before it, so the last of them names the prompt's list.
#[derive(Debug, Clone, Copy)]
struct Compared {
    count: usize,
    last: BlockHash,
}

impl Offer {
    pub(super) fn verify(
        remote: &RemoteBlocks,
        key: Option<&ClusterKey>,
        tenant: Option<&str>,
        conversation: Option<&str>,
        layout: LayoutFingerprint,
        rank: Rank,
        now: MonoTime,
    ) -> Result<Self, OfferError> {
        let engine = remote.remote_engine_id.clone();
        let ticket = match remote.verify_ticket(key, tenant, conversation) {
            Ok(Some(ticket)) => ticket.clone(),
            Ok(None) => return Err(OfferError::Unverifiable { engine }),
            Err(cause) => return Err(OfferError::NotAuthentic { engine, cause }),
        };
        if ticket.fingerprint != layout {
            return Err(OfferError::Layout { engine });
        }
        let addr = PeerAddr::new(remote.remote_host.unbracketed(), remote.remote_port.get())?;
        Ok(Self {
            engine,
            request: remote.remote_request_id.clone(),
            peer: PeerKey { addr, rank },
            ticket: Arc::new(ticket),
            arrived: now,
            compared: Arc::default(),
            told_end: Arc::default(),
            lost: Arc::default(),
        })
    }

    /// The holder.
    #[must_use]
    pub fn engine(&self) -> &EngineId {
        &self.engine
    }

    /// The holder's request.
    #[must_use]
    pub fn request(&self) -> &RequestId {
        &self.request
    }

    /// What is offered.
    #[must_use]
    pub fn ticket(&self) -> &Ticket {
        &self.ticket
    }

    /// How many leading full blocks hold the tokens that `hashes` stand for, whatever the token
    /// counts say.
    #[must_use]
    pub fn matching_blocks(&self, hashes: &[BlockHash]) -> usize {
        let count = matching_prefix(hashes, &self.ticket.hashes);
        self.remember(hashes, count);
        count
    }

    fn remember(&self, hashes: &[BlockHash], count: usize) {
        if let Some(last) = count.checked_sub(1).and_then(|at| hashes.get(at)) {
            *self.compared.lock() = Some(Compared { count, last: *last });
        }
    }

    /// Whether the first `count` blocks hold the tokens that `hashes` stand for. Costs nothing when
    /// that was found out before, for a decision say.
    pub(super) fn matches_first(&self, hashes: &[BlockHash], count: usize) -> bool {
        let known = *self.compared.lock();
        if let Some(known) = known
            && count <= known.count
            && known.count.checked_sub(1).and_then(|at| hashes.get(at)) == Some(&known.last)
        {
            return true;
        }
        let matches = match (hashes.get(..count), self.ticket.hashes.get(..count)) {
            (Some(ours), Some(theirs)) => ours == theirs,
            _ => false,
        };
        if matches {
            self.remember(hashes, count);
        }
        matches
    }
}

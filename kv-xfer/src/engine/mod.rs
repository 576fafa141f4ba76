//! The engine: one rank's end of every transfer.
//!
//! It holds blocks for others ([`Engine::lease`]), believes or refuses what others offer
//! ([`Engine::accept`]), decides ([`Engine::decide`]) and reads ([`Engine::read`]). A read's
//! destination blocks move into it and come back landed, returned, or later through
//! [`Engine::returned`], once nothing can write into them any more.
#![forbid(unsafe_code)]

mod cards;
mod clocks;
mod completion;
mod config;
mod connect;
mod driver;
mod error;
mod handle;
mod holder;
mod job;
mod lane;
mod lease_care;
mod link;
mod notice;
mod offer;
mod probing;
mod read;
mod start;
mod stepped;
mod threads;
mod types;
mod workers;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, SendError, Sender};

pub(crate) use cards::Answers;
pub use cards::SideChannelCards;
pub use config::{EngineConfig, HolderConfig, ReaderConfig};
pub use connect::{CardSource, ConnectError, FetchedPeer};
pub(crate) use driver::Event;
pub use driver::ReturnedBlocks;
pub use error::{
    Advice, LeaseError, LeaseRefused, OfferError, ReadError, StartError, SubmitError, SubmitRefused,
};
pub use handle::{FailedBlocks, Landed, ReadFailure, ReadHandle, ReadId, ReadOutcome, ReadReport};
pub use job::ReleasePolicy;
pub use notice::{MAX_NOTICE_BYTES, Notice, NoticeError};
pub use offer::Offer;
pub(crate) use start::Birth;
pub(crate) use stepped::{Errands, Stepped};
pub use types::{Direction, LeaseSpec, Leased, Prompt, ReadRequest, ShutdownReport};

use self::cards::Serving;
use self::clocks::Clocks;
use self::driver::{Command, LeaseJob, LeaseWish};
use self::handle::{HandleOwner, ReadShared};
use self::holder::{Holder, HolderThread, STOP_LIMIT};
use self::job::{ReadJob, Submitted};
use self::threads::{join_by, until};
use self::workers::Workers;
use crate::clock::{Clock, MonoTime};
use crate::descriptor::{Binding, BlockRuns, LeaseRef, RemoteBlocks, Ticket, TransferMode};
use crate::ids::{EngineId, Incarnation, LeaseId, LeaseWord, WordSlot};
use crate::layout::LayoutFingerprint;
use crate::lease::{FreedBlocks, NewLease};
use crate::memory::{Gate, KvPool, OwnedBlocks, StreamOrder};
use crate::peer::{PeerAddr, PeerKey};
use crate::policy::{Decision, DecisionInput, decide};
use crate::telemetry::{EngineSnapshot, EngineStats};
use crate::transport::TransportInfo;

/// What is shared with read handles.
struct Owner {
    wake: Sender<()>,
    returned: Sender<ReturnedBlocks>,
}

impl HandleOwner for Owner {
    fn cancelled(&self, _: ReadId) {
        // A full channel means that the driver is about to look anyway.
        let _ = self.wake.try_send(());
    }

    fn unclaimed(&self, read: ReadId, blocks: OwnedBlocks) {
        let _ = self.returned.send(ReturnedBlocks { read, blocks });
    }
}

/// One rank's engine. Dropping it shuts it down.
pub struct Engine {
    config: EngineConfig,
    incarnation: Incarnation,
    fingerprint: LayoutFingerprint,
    pool: Arc<KvPool>,
    clock: Arc<dyn Clock>,
    stats: Arc<EngineStats>,
    clocks: Arc<Clocks>,
    info: TransportInfo,
    holder: Arc<Holder>,
    holder_thread: HolderThread,
    serving: Option<Serving>,
    owner: Arc<Owner>,
    next_read: AtomicU64,
    reads: Sender<Submitted>,
    commands: Sender<Command>,
    freed: Receiver<FreedBlocks>,
    returned: Receiver<ReturnedBlocks>,
    driver: Option<JoinHandle<()>>,
    workers: Option<Workers>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("engine_id", &self.config.engine_id)
            .field("incarnation", &self.incarnation)
            .finish_non_exhaustive()
    }
}

/// Time that dropping an engine gives its reads to end.
const DROP_LIMIT: Duration = Duration::from_secs(5);
/// Pause between looks at whether blocks that are to be leased are written.
const GATE_NAP: Duration = Duration::from_micros(20);
/// Time beyond a shutdown's limit that the driver is given to notice that it has passed.
const STOP_GRACE: Duration = Duration::from_millis(500);

impl Engine {
    /// Its name.
    #[must_use]
    pub fn engine_id(&self) -> &EngineId {
        &self.config.engine_id
    }

    /// This life of it.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Its pool.
    #[must_use]
    pub fn pool(&self) -> &Arc<KvPool> {
        &self.pool
    }

    /// What moves its bytes.
    #[must_use]
    pub fn transport(&self) -> &TransportInfo {
        &self.info
    }

    /// Where its side channel listens; `None` when it serves nobody.
    #[must_use]
    pub fn side_channel(&self) -> Option<&PeerAddr> {
        self.serving.as_ref().map(Serving::advertised)
    }

    /// Its counters now.
    #[must_use]
    pub fn stats(&self) -> EngineSnapshot {
        self.stats.snapshot()
    }

    /// Its clock now.
    #[must_use]
    pub fn now(&self) -> MonoTime {
        self.clock.now()
    }

    /// Leases blocks and describes them. Their content must not change until they come back
    /// through [`freed`](Self::freed), exactly once.
    ///
    /// # Errors
    /// [`LeaseRefused`] with the blocks.
    pub fn lease(&self, spec: LeaseSpec<'_>) -> Result<Leased, LeaseRefused> {
        let LeaseSpec {
            request,
            blocks,
            tokens,
            hashes,
            ttl,
            direction,
            tenant,
            conversation,
        } = spec;
        let refuse = |error, blocks| Err(LeaseRefused { error, blocks });
        let Some(serving) = &self.serving else {
            return refuse(LeaseError::NotServing, blocks);
        };
        let pool_blocks = self.pool.block_count();
        if let Some(block) = blocks.iter().copied().find(|block| block.0 >= pool_blocks) {
            return refuse(
                LeaseError::OutOfRange {
                    block,
                    blocks: pool_blocks,
                },
                blocks,
            );
        }
        let runs = BlockRuns::from_ids(&blocks);
        let mut ticket = Ticket {
            incarnation: self.incarnation,
            lease: LeaseRef {
                id: LeaseId(0),
                slot: WordSlot(0),
                word: LeaseWord(0),
            },
            runs: runs.clone(),
            block_tokens: self.pool.layout().block_tokens(),
            tokens,
            hashes,
            remaining: Duration::ZERO,
            stamp: MonoTime::ZERO,
            fingerprint: self.fingerprint,
        };
        // Before anything is granted: an ended lease gives its blocks back by another way.
        if let Err(fault) = ticket.validate() {
            return refuse(LeaseError::Describe(fault.into()), blocks);
        }
        let new = NewLease {
            request: request.clone(),
            blocks: blocks.clone(),
            ttl,
        };
        let grant = match self.holder.grant(new) {
            Ok(grant) => grant,
            Err(refused) => return refuse(refused.error.into(), refused.blocks),
        };
        let now = self.clock.now();
        ticket.lease = LeaseRef {
            id: grant.lease,
            slot: grant.slot,
            word: grant.word,
        };
        ticket.remaining = grant.deadline.saturating_since(now);
        ticket.stamp = now;
        let binding = Binding {
            engine: &self.config.engine_id,
            request: &request,
            tenant,
            conversation,
        };
        let sealed = match ticket.seal(self.config.cluster_key.as_ref(), &binding) {
            Ok(sealed) => sealed,
            Err(cause) => {
                // Nobody has the descriptor: the blocks are the caller's again, not the channel's,
                // unless the lease is over and the channel has them.
                let held = self.holder.take_back(grant.lease);
                let blocks = if held { blocks } else { Vec::new() };
                return refuse(LeaseError::Describe(cause), blocks);
            }
        };
        let decode = direction == Direction::DecodeToPrefill;
        let one = NonZeroU32::MIN;
        let remote = RemoteBlocks {
            do_remote_prefill: !decode,
            do_remote_decode: decode,
            remote_block_ids: vec![runs],
            remote_engine_id: self.config.engine_id.clone(),
            remote_request_id: request,
            remote_host: serving.host().clone(),
            remote_port: serving.port(),
            tp_size: NonZeroU32::new(self.config.tp_size).unwrap_or(one),
            dcp_size: one,
            pp_size: one,
            remote_num_tokens: tokens,
            remote_blocks_expiry_time: decode.then(|| grant.deadline.as_secs_f64()),
            transfer_mode: Some(TransferMode::Pull),
            ticket: Some(sealed),
            extra: serde_json::Map::new(),
        };
        Ok(Leased {
            lease: grant.lease,
            remote,
        })
    }

    /// Leases blocks once what writes them has ended, so that nobody reads what a kernel still writes. Waits for it on the
    /// calling thread, at most for `limit`.
    ///
    /// # Errors
    /// [`LeaseRefused`] with the blocks.
    pub fn lease_after(
        &self,
        spec: LeaseSpec<'_>,
        written: &dyn Gate,
        limit: Duration,
    ) -> Result<Leased, LeaseRefused> {
        let end = until(limit);
        loop {
            let error = match written.is_open() {
                Ok(true) => return self.lease(spec),
                Ok(false) if Instant::now() < end => {
                    std::thread::sleep(GATE_NAP);
                    continue;
                }
                Ok(false) => LeaseError::StillWritten { limit },
                Err(cause) => cause.into(),
            };
            let blocks = spec.blocks;
            return Err(LeaseRefused { error, blocks });
        }
    }

    /// Ends a lease at once, safely: a read under way fails, it does not return changed bytes. True
    /// if it held; its blocks come through [`freed`](Self::freed).
    pub fn revoke(&self, lease: LeaseId) -> bool {
        self.holder.revoke(lease)
    }

    /// Ends the oldest leases until at least `blocks` blocks are on their way back, for a pool
    /// under pressure. Returns how many are.
    pub fn revoke_until(&self, blocks: u64) -> u64 {
        self.holder.revoke_until(blocks)
    }

    /// Extends a lease; true if it held.
    pub fn renew(&self, lease: LeaseId, extension: Duration) -> bool {
        self.holder.renew(lease, extension).deadline().is_some()
    }

    /// Blocks whose lease has ended: released by the reader, expired or revoked. Each lease's
    /// blocks come exactly once.
    #[must_use]
    pub fn freed(&self) -> &Receiver<FreedBlocks> {
        &self.freed
    }

    /// Blocks of failed or dropped reads, once nothing can write into them any more.
    #[must_use]
    pub fn returned(&self) -> &Receiver<ReturnedBlocks> {
        &self.returned
    }

    /// Believes a descriptor, or says why not: its ticket must be there, authentic (without
    /// a cluster key: undamaged) for this tenant and conversation, and of this pool's layout.
    ///
    /// # Errors
    /// [`OfferError`]; the tokens are to be computed.
    pub fn accept(
        &self,
        remote: &RemoteBlocks,
        tenant: Option<&str>,
        conversation: Option<&str>,
    ) -> Result<Offer, OfferError> {
        Offer::verify(
            remote,
            self.config.cluster_key.as_ref(),
            tenant,
            conversation,
            self.fingerprint,
            self.config.rank,
            self.clock.now(),
        )
    }

    /// Time left on the lease behind an offer, at most. Time that the descriptor spent on its way
    /// counts once the holder has been met and its clock is known.
    #[must_use]
    pub fn lease_remaining(&self, offer: &Offer) -> Duration {
        self.clocks
            .lease_end(offer)
            .saturating_since(self.clock.now())
    }

    /// Read or recompute? Pure: nothing is started or released. The decision says whether the
    /// lease is to be [released](Self::release).
    #[must_use]
    pub fn decide(&self, offer: &Offer, prompt: &Prompt<'_>) -> Decision {
        let block_tokens = NonZeroU32::new(self.pool.layout().block_tokens());
        let block_tokens = block_tokens.unwrap_or(NonZeroU32::MIN);
        let matched = offer.matching_blocks(prompt.hashes) as u64;
        decide(&DecisionInput {
            remote_tokens: offer.ticket.tokens,
            matched_tokens: matched.saturating_mul(u64::from(block_tokens.get())),
            prompt_tokens: prompt.tokens,
            local_hit_tokens: prompt.local_hit_tokens,
            threshold: prompt.threshold,
            lease_remaining: Some(self.lease_remaining(offer)),
            ..DecisionInput::new(block_tokens)
        })
    }

    /// Starts a read. Moves no bytes itself: some ten microseconds, plus one comparison of hashes a block.
    ///
    /// # Errors
    /// [`SubmitRefused`] with the destination blocks.
    pub fn read(&self, request: ReadRequest<'_>) -> Result<ReadHandle, SubmitRefused> {
        self.read_ordered(request, StreamOrder::default())
    }

    /// Starts a read that is ordered with work on a GPU's streams: it begins after what still uses its destination blocks,
    /// and what will use them begins after it. Whatever waits for it is told, also when the read is refused.
    ///
    /// # Errors
    /// [`SubmitRefused`] with the destination blocks.
    pub fn read_ordered(
        &self,
        request: ReadRequest<'_>,
        order: StreamOrder,
    ) -> Result<ReadHandle, SubmitRefused> {
        let ReadRequest {
            offer,
            hashes,
            span,
            mut blocks,
            timeout,
            release,
        } = request;
        let refuse = |error, blocks| {
            self.stats.refused.fetch_add(1, Ordering::Relaxed);
            Err(SubmitRefused { error, blocks })
        };
        let available = offer.ticket.runs.len();
        if span.start > span.end || span.end > available {
            let (first, end) = (span.start, span.end);
            return refuse(
                SubmitError::SpanOutOfRange {
                    first,
                    end,
                    available,
                },
                blocks,
            );
        }
        if span.is_empty() {
            return refuse(SubmitError::Nothing, blocks);
        }
        // Whatever was decided: KV of other tokens is not read.
        if !offer.matches_first(hashes, span.end) {
            let (end, matched) = (span.end, offer.matching_blocks(hashes));
            return refuse(SubmitError::OtherTokens { end, matched }, blocks);
        }
        if span.len() != blocks.len() {
            let (remote, local) = (span.len(), blocks.len());
            return refuse(SubmitError::CountMismatch { remote, local }, blocks);
        }
        if !Arc::ptr_eq(blocks.pool(), &self.pool) {
            return refuse(SubmitError::ForeignBlocks, blocks);
        }
        let queue = self.config.reader.queue;
        if self.stats.queued.fetch_add(1, Ordering::Relaxed) >= queue as u64 {
            self.stats.queued.fetch_sub(1, Ordering::Relaxed);
            return refuse(SubmitError::QueueFull { queued: queue }, blocks);
        }
        let id = ReadId(self.next_read.fetch_add(1, Ordering::Relaxed));
        let StreamOrder { after, then } = order;
        let shared = ReadShared::new(then);
        let submitted = self.clock.now();
        let none = blocks.split_off(blocks.len());
        let job = ReadJob {
            id,
            shared: Arc::clone(&shared),
            engine: offer.engine.clone(),
            peer: offer.peer.clone(),
            incarnation: offer.ticket.incarnation,
            lease: offer.ticket.lease,
            ticket: Arc::clone(&offer.ticket),
            lost: Arc::clone(&offer.lost),
            span,
            blocks,
            submitted,
            deadline: submitted.saturating_add(timeout),
            release,
            after,
        };
        let owner = Arc::clone(&self.owner) as Arc<dyn HandleOwner>;
        match self.reads.send(Submitted::new(job, Arc::clone(&owner))) {
            Ok(()) => {
                self.stats.submitted.fetch_add(1, Ordering::Relaxed);
                Ok(ReadHandle::new(id, shared, owner))
            }
            Err(SendError(unsent)) => {
                self.stats.queued.fetch_sub(1, Ordering::Relaxed);
                let blocks = unsent.into_job().map_or(none, |job| job.blocks);
                refuse(SubmitError::ShuttingDown, blocks)
            }
        }
    }

    /// Tells the holder that the offered blocks are not needed (any longer): after a decision not
    /// to read, or after a read under [`ReleasePolicy::Never`]. Doing it twice does no harm. False
    /// when the engine is too busy to do it; the lease then ends by its time.
    pub fn release(&self, offer: &Offer) -> bool {
        self.wish(offer, LeaseWish::Release)
    }

    /// Asks the holder to keep the lease behind an offer for `extension` from now, while the request
    /// that needs it waits: vLLM's heartbeat. Best effort: the answer comes later, and
    /// [`lease_remaining`](Self::lease_remaining) and [`decide`](Self::decide) go by it from then on. The
    /// holder may grant less, and may revoke the lease all the same. False when the engine is too
    /// busy to ask.
    pub fn keep(&self, offer: &Offer, extension: Duration) -> bool {
        let told_end = Arc::clone(&offer.told_end);
        let wish = LeaseWish::Renew {
            extension,
            told_end,
        };
        self.wish(offer, wish)
    }

    fn wish(&self, offer: &Offer, wish: LeaseWish) -> bool {
        let job = LeaseJob {
            peer: offer.peer.clone(),
            incarnation: offer.ticket.incarnation,
            lease: offer.ticket.lease,
            wish,
        };
        self.commands.try_send(Command::Lease(job)).is_ok()
    }

    /// Meets a peer ahead of its first read. False when the engine is too busy.
    pub fn connect(&self, addr: PeerAddr) -> bool {
        let peer = PeerKey {
            addr,
            rank: self.config.rank,
        };
        self.commands.try_send(Command::Connect { peer }).is_ok()
    }

    /// Shuts down within `limit`: refuses new reads, ends the running ones, destroys the agents,
    /// ends the leases.
    pub fn shutdown(mut self, limit: Duration) -> ShutdownReport {
        let ended = self.stop(limit);
        let quarantined = if ended {
            self.stats.quarantined.load(Ordering::Relaxed)
        } else {
            // Nobody can say which of them the driver has posted.
            self.pool.claimed_blocks() as u64
        };
        ShutdownReport { quarantined }
    }

    /// False when the driver hangs in a call of the transport and is left behind. It ends with that
    /// call, and keeps all that its reads may write into until then.
    fn stop(&mut self, limit: Duration) -> bool {
        if let Some(serving) = self.serving.take() {
            serving.stop();
        }
        let deadline = self.clock.now().saturating_add(limit);
        let end = until(limit.saturating_add(STOP_GRACE));
        let mut ended = true;
        if let Some(driver) = self.driver.take() {
            // Should there be no room: the driver also stops once the channel is closed.
            let _ = self
                .commands
                .send_timeout(Command::Shutdown { deadline }, limit);
            ended = join_by(driver, end);
        }
        if let Some(workers) = self.workers.take() {
            workers.join(end);
        }
        self.holder_thread.stop(until(STOP_LIMIT));
        ended
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop(DROP_LIMIT);
    }
}

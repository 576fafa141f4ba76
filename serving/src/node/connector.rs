//! The node's end of KV transfers: offers, decisions, reads and leases, all through
//! [`kv_xfer::engine::Engine`].

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender};
use kv_xfer::descriptor::BlockIdsJson;
use kv_xfer::engine::{
    Direction, Engine, EngineConfig, LeaseSpec, Offer, Prompt, ReadHandle, ReadOutcome,
    ReadRequest, ReleasePolicy, ReturnedBlocks, ShutdownReport, StartError,
};
use kv_xfer::identity::BlockHash;
use kv_xfer::ids::{BlockId, RequestId};
use kv_xfer::lease::FreedBlocks;
use kv_xfer::memory::KvPool;
use kv_xfer::peer::PeerAddr;
use kv_xfer::policy::{Decision, LeaseAction};
use kv_xfer::telemetry::EngineSnapshot;
use kv_xfer::transport::Transport;
use serde_json::Value;

use super::request::{Owner, Request, Transfer};
use super::settings::NodeSettings;

/// How much longer than its own timeout a read is waited for: it ends by that unless a call of the
/// transport hangs.
const READ_GRACE: Duration = Duration::from_secs(2);

/// Why offered blocks are not read, by a name for metrics and a text for the log.
#[derive(Debug, Clone)]
pub struct NotRead {
    /// A stable name.
    pub name: &'static str,
    /// What happened.
    pub why: String,
}

/// A read under way.
#[derive(Debug)]
pub struct Reading {
    handle: ReadHandle,
    /// Its destination.
    pub blocks: Vec<BlockId>,
    /// The block of the sequence that the first of them is.
    pub first: usize,
    /// What is read; its lease is kept alive meanwhile.
    pub offer: Offer,
    /// When it is given up, whatever the transport does.
    pub give_up: Instant,
}

/// Wakes the engine thread.
struct Bell(Sender<()>);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        // A full channel means that it is about to wake anyway.
        let _ = self.0.try_send(());
    }
}

/// The node's transfer engine with the node's rules.
#[derive(Debug)]
pub struct Connector {
    engine: Engine,
    pool: Arc<KvPool>,
    threshold: u64,
    bidirectional: bool,
    decode_ttl: Duration,
    prefill_ttl: Duration,
    read_timeout: Duration,
    waker: Waker,
    /// Makes the request ids of leases unique.
    leases: u64,
}

impl Connector {
    /// Starts the transfer engine over a pool. `bell` is rung when a read has ended.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start<T: Transport>(
        settings: &NodeSettings,
        model: &str,
        pool: Arc<KvPool>,
        transport: Arc<T>,
        bell: Sender<()>,
    ) -> Result<Self, StartError> {
        let mut config = EngineConfig::new(settings.engine_id.clone(), model);
        config.holder.bind = Some(settings.side_channel);
        config
            .holder
            .advertise_host
            .clone_from(&settings.advertise_host);
        config.holder.default_ttl = settings.decoder_kv_blocks_ttl;
        config.holder.max_ttl = config
            .holder
            .max_ttl
            .max(settings.decoder_kv_blocks_ttl)
            .max(settings.kv_lease_duration);
        config.dial = settings.dial.clone();
        config.cluster_key.clone_from(&settings.cluster_key);
        let engine = Engine::start(config, Arc::clone(&pool), transport)?;
        Ok(Self {
            engine,
            pool,
            threshold: settings.kv_recompute_threshold,
            bidirectional: settings.bidirectional_kv_xfer,
            decode_ttl: settings.decoder_kv_blocks_ttl,
            prefill_ttl: settings.kv_lease_duration,
            read_timeout: settings.kv_read_timeout,
            waker: Waker::from(Arc::new(Bell(bell))),
            leases: 0,
        })
    }

    /// The pool.
    #[must_use]
    pub fn pool(&self) -> &Arc<KvPool> {
        &self.pool
    }

    /// Where the side channel listens.
    #[must_use]
    pub fn side_channel(&self) -> Option<&PeerAddr> {
        self.engine.side_channel()
    }

    /// The engine's counters.
    #[must_use]
    pub fn stats(&self) -> EngineSnapshot {
        self.engine.stats()
    }

    /// Blocks whose lease has ended.
    #[must_use]
    pub fn freed(&self) -> &Receiver<FreedBlocks> {
        self.engine.freed()
    }

    /// Blocks of failed reads that nothing can write into any more.
    #[must_use]
    pub fn returned(&self) -> &Receiver<ReturnedBlocks> {
        self.engine.returned()
    }

    /// Looks at what a request offers. `Ok(None)` when that is nothing.
    ///
    /// # Errors
    /// [`NotRead`]; the tokens are to be computed.
    pub fn accept(&self, transfer: &Transfer, owner: &Owner) -> Result<Option<Offer>, NotRead> {
        if let Some(why) = &transfer.malformed {
            return Err(NotRead {
                name: "malformed",
                why: why.clone(),
            });
        }
        let Some(remote) = &transfer.remote else {
            return Ok(None);
        };
        let (tenant, conversation) = (owner.tenant.as_deref(), owner.conversation.as_deref());
        let offer = self
            .engine
            .accept(remote, tenant, conversation)
            .map_err(|error| NotRead {
                name: error.name(),
                why: error.to_string(),
            })?;
        if transfer.to_decode && !self.bidirectional {
            // What vLLM's flag means, but the holder is told, and nothing waits for a read that nobody
            // makes.
            self.engine.release(&offer);
            return Err(NotRead {
                name: "bidirectional_off",
                why: "bidirectional transfer is switched off here".to_owned(),
            });
        }
        Ok(Some(offer))
    }

    /// Read or compute? A decision not to read releases the lease.
    #[must_use]
    pub fn decide(
        &self,
        offer: &Offer,
        request: &Request,
        hashes: &[BlockHash],
        local_hit_tokens: usize,
    ) -> Decision {
        // From prefill to decode vLLM knows no threshold.
        let threshold = if request.transfer.to_decode {
            self.threshold
        } else {
            0
        };
        let prompt = Prompt {
            tokens: request.tokens.len() as u64,
            hashes,
            local_hit_tokens: local_hit_tokens as u64,
            threshold,
        };
        let decision = self.engine.decide(offer, &prompt);
        if decision.lease == LeaseAction::Release {
            self.engine.release(offer);
        }
        decision
    }

    /// Reads the blocks of a sequence from `first` on into `blocks`. However it ends, the lease is
    /// released.
    ///
    /// # Errors
    /// [`NotRead`]; nothing was started, and the blocks are the caller's.
    pub fn read(
        &self,
        offer: Offer,
        hashes: &[BlockHash],
        first: usize,
        blocks: Vec<BlockId>,
    ) -> Result<Reading, NotRead> {
        let destination = match self.pool.claim(blocks.clone()) {
            Ok(destination) => destination,
            Err(error) => {
                self.engine.release(&offer);
                return Err(NotRead {
                    name: "claim_refused",
                    why: error.to_string(),
                });
            }
        };
        let started = self.engine.read(ReadRequest {
            offer: &offer,
            hashes,
            span: first..first.saturating_add(blocks.len()),
            blocks: destination,
            timeout: self.read_timeout,
            release: ReleasePolicy::Always,
        });
        match started {
            Ok(handle) => Ok(Reading {
                handle,
                blocks,
                first,
                offer,
                give_up: Instant::now() + self.read_timeout + READ_GRACE,
            }),
            Err(refused) => {
                self.engine.release(&offer);
                Err(NotRead {
                    name: refused.error.name(),
                    why: refused.error.to_string(),
                })
            }
        }
    }

    /// The outcome of a read, once there is one. Until then the engine thread is woken when there is.
    pub fn poll(&self, reading: &mut Reading) -> Option<ReadOutcome> {
        let mut context = Context::from_waker(&self.waker);
        match Pin::new(&mut reading.handle).poll(&mut context) {
            Poll::Ready(outcome) => Some(outcome),
            Poll::Pending => None,
        }
    }

    /// Tells the holder that the offered blocks are not needed.
    pub fn release(&self, offer: &Offer) {
        if !self.engine.release(offer) {
            tracing::debug!(holder = %offer.engine(), "no time to release a lease; it expires");
        }
    }

    /// Keeps the lease behind an offer alive while its request waits.
    pub fn keep_alive(&self, offer: &Offer) {
        // As long as vLLM's heartbeats extend it: four of them may be lost.
        self.engine.keep(offer, self.prefill_ttl * 2 / 3);
    }

    /// How often [`keep_alive`](Self::keep_alive) is due.
    #[must_use]
    pub fn heartbeat(&self) -> Duration {
        self.prefill_ttl / 6
    }

    /// Leases a finished request's blocks, if it asked for that, and describes them. `tokens` have
    /// their KV in `blocks`.
    pub fn lease(
        &mut self,
        request: &Request,
        blocks: &[BlockId],
        hashes: &[BlockHash],
        tokens: usize,
    ) -> Option<Value> {
        let to_decode = request.transfer.to_decode;
        if !request.transfer.asked || blocks.is_empty() || !(to_decode || self.bidirectional) {
            return None;
        }
        self.leases = self.leases.saturating_add(1);
        let refused = |reason: &str, error: &dyn std::fmt::Display| {
            tracing::warn!(request = request.id, reason, %error, "blocks are not leased");
        };
        let name = RequestId::new(format!("{}-{:x}", request.id, self.leases))
            .inspect_err(|error| refused("bad_name", error))
            .ok()?;
        let (ttl, direction) = if to_decode {
            (self.prefill_ttl, Direction::PrefillToDecode)
        } else {
            (self.decode_ttl, Direction::DecodeToPrefill)
        };
        let spec = LeaseSpec {
            request: name,
            blocks: blocks.to_vec(),
            tokens: tokens as u64,
            hashes: hashes.to_vec(),
            ttl: Some(ttl),
            direction,
            tenant: request.owner.tenant.as_deref(),
            conversation: request.owner.conversation.as_deref(),
        };
        match self.engine.lease(spec) {
            Ok(leased) => Some(leased.remote.to_json_value(BlockIdsJson::Expanded)),
            Err(error) => {
                refused(error.error.name(), &error.error);
                None
            }
        }
    }

    /// Ends the oldest leases until `blocks` blocks are on their way back; says how many are.
    pub fn revoke(&self, blocks: usize) -> u64 {
        self.engine.revoke_until(blocks as u64)
    }

    /// Ends everything.
    pub fn shutdown(self, limit: Duration) -> ShutdownReport {
        self.engine.shutdown(limit)
    }
}

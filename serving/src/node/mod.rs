//! One serving node: a model, a paged KV cache, and a [`kv_xfer::engine::Engine`] that moves blocks of
//! it between nodes.
//!
//! One thread owns them all and works in steps; requests come to it over a channel and their text
//! goes back over one each. What is asked about tokens and hashes is worked out before, in the tasks
//! that serve HTTP.

mod connector;
mod memory;
mod metrics;
mod request;
mod scheduler;
mod sequence;
mod settings;
mod stop;
mod worker;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel::{Sender, TrySendError, bounded};
use kv_xfer::engine::StartError;
use kv_xfer::identity::{HashChain, IdentityError, Salt};
use kv_xfer::memory::{HostOptions, KvPool, PoolError};
use kv_xfer::peer::PeerAddr;
use kv_xfer::transport::Transport;
use parking_lot::Mutex;
use thiserror::Error;

pub use connector::{Connector, NotRead, Reading};
pub use memory::Memory;
pub use metrics::{Metrics, Published};
pub use request::{
    Decided, Event, Failure, FinishReason, Finished, Limits, Owner, Report, Request, Transfer,
};
pub use scheduler::{Piece, Scheduler};
pub use sequence::Sequence;
pub use settings::{NodeSettings, Role};
pub use stop::{Scanned, StopScanner};

use self::worker::{Command, Worker};
use crate::cache::BlockCache;
use crate::model::{Loaded, ModelError};

/// Sequences that may wait.
const QUEUE: usize = 4096;

/// Why a node did not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NodeError {
    /// The model's KV cannot be cut into such blocks.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// There is no memory for the pool.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The cache is too small to be of use.
    #[error(
        "{bytes} bytes hold {blocks} blocks of KV cache, at least 2 are needed; raise --kv-cache-mib"
    )]
    SmallCache {
        /// The memory given.
        bytes: u64,
        /// Blocks that fit.
        blocks: u64,
    },
    /// The transfer engine did not start.
    #[error(transparent)]
    Engine(#[from] StartError),
    /// The block hashes cannot be made.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The thread could not be started.
    #[error("the engine thread could not be started: {0}")]
    Thread(#[from] std::io::Error),
}

/// Why a request was not taken.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Refused {
    /// Too many requests wait.
    #[error("{QUEUE} sequences are waiting already; try again later")]
    Busy,
    /// The node is ending.
    #[error("the node is shutting down")]
    ShuttingDown,
}

/// A running node. Dropping it ends it.
pub struct Node {
    commands: Sender<Command>,
    thread: Mutex<Option<JoinHandle<()>>>,
    ended: Arc<AtomicBool>,
    loaded: Arc<Loaded>,
    metrics: Metrics,
    side_channel: Option<PeerAddr>,
    max_tokens: usize,
    pool_tokens: usize,
    block_tokens: u32,
    prefix: HashChain,
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node")
            .field("side_channel", &self.side_channel)
            .finish_non_exhaustive()
    }
}

impl Node {
    /// Makes the pool, starts the transfer engine and the engine thread.
    ///
    /// # Errors
    /// [`NodeError`]; then nothing is left running.
    pub fn start<T: Transport>(
        settings: &NodeSettings,
        loaded: Arc<Loaded>,
        transport: Arc<T>,
    ) -> Result<Self, NodeError> {
        let layout = loaded.model.layout(settings.block_tokens)?;
        let fit = settings.kv_cache_bytes.checked_div(layout.block_bytes());
        let fit = fit.unwrap_or(0);
        let blocks = u32::try_from(fit).unwrap_or(u32::MAX);
        if blocks < 2 {
            return Err(NodeError::SmallCache {
                bytes: settings.kv_cache_bytes,
                blocks: fit,
            });
        }
        let (pool, report) = KvPool::host(layout, blocks, &HostOptions::default())?;
        tracing::info!(blocks, ?report, "KV cache");
        let metrics = Metrics::new();
        let identity = loaded.model.identity();
        let prefix = HashChain::new(identity, &Salt::none(), settings.block_tokens)?;
        let (ring, bell) = bounded(1);
        let name = identity.to_string();
        let connector = Connector::start(settings, &name, pool, transport, ring.clone())?;
        let side_channel = connector.side_channel().cloned();
        let cache = BlockCache::new(blocks, settings.prefix_caching);
        let memory = Memory::new(cache, connector, metrics.clone());
        let scheduler = Scheduler::new(memory, settings, metrics.clone());
        let (commands, taken) = bounded(QUEUE);
        let worker = Worker::new(
            Arc::clone(&loaded),
            scheduler,
            taken,
            (ring, bell),
            metrics.clone(),
        );
        let ended = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&ended);
        let thread = std::thread::Builder::new()
            .name("serving-engine".into())
            .spawn(move || {
                // Also when it unwinds: whoever asks must not take the node for a healthy one.
                let _flag = OnDrop(flag);
                worker.run();
            })?;
        let context = loaded.model.config().context;
        let pool_tokens = (blocks as usize).saturating_mul(settings.block_tokens as usize);
        Ok(Self {
            commands,
            thread: Mutex::new(Some(thread)),
            ended,
            loaded,
            metrics,
            side_channel,
            max_tokens: settings.max_model_len.unwrap_or(context).min(context),
            pool_tokens,
            block_tokens: settings.block_tokens,
            prefix,
        })
    }

    /// Hands a request to the engine thread.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn submit(&self, request: Request) -> Result<(), Refused> {
        // The thread takes them from the channel at once; where they wait is its own list.
        if self.metrics.published().waiting >= QUEUE {
            return Err(Refused::Busy);
        }
        self.send(Command::Submit(Box::new(request)))
    }

    /// Frees every cached block that no request and no lease holds; says how many.
    ///
    /// # Errors
    /// [`Refused`].
    pub async fn reset_prefix_cache(&self) -> Result<usize, Refused> {
        let (answer, answered) = tokio::sync::oneshot::channel();
        self.send(Command::Reset(answer))?;
        answered.await.map_err(|_| Refused::ShuttingDown)
    }

    fn send(&self, command: Command) -> Result<(), Refused> {
        self.commands
            .try_send(command)
            .map_err(|error| match error {
                TrySendError::Full(_) => Refused::Busy,
                TrySendError::Disconnected(_) => Refused::ShuttingDown,
            })
    }

    /// The chain that a prompt's block hashes begin with, for one tenant and cache salt.
    ///
    /// # Errors
    /// [`IdentityError`], which cannot be: the node started with the same block size.
    pub fn chain(&self, salt: &Salt) -> Result<HashChain, IdentityError> {
        if salt.is_none() {
            return Ok(self.prefix.clone());
        }
        HashChain::new(self.loaded.model.identity(), salt, self.block_tokens)
    }

    /// The model, its tokenizer and its chat template.
    #[must_use]
    pub fn loaded(&self) -> &Arc<Loaded> {
        &self.loaded
    }

    /// Its counters.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Where its side channel listens.
    #[must_use]
    pub fn side_channel(&self) -> Option<&PeerAddr> {
        self.side_channel.as_ref()
    }

    /// Longest sequence, prompt and answer together.
    #[must_use]
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Tokens that the whole pool holds.
    #[must_use]
    pub fn pool_tokens(&self) -> usize {
        self.pool_tokens
    }

    /// Whether it can serve.
    #[must_use]
    pub fn healthy(&self) -> bool {
        !self.ended.load(Ordering::Acquire)
    }

    /// Ends requests, reads and leases. False when that took longer than `limit`; the thread is left
    /// behind then.
    pub fn shutdown(&self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        let _ = self.commands.send_timeout(Command::Shutdown, limit);
        let Some(thread) = self.thread.lock().take() else {
            return true;
        };
        while !thread.is_finished() {
            if Instant::now() >= end {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        thread.join().is_ok()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.shutdown(Duration::from_secs(5));
    }
}

struct OnDrop(Arc<AtomicBool>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// The tenant behind an API key: a name that is no secret, the same on every node and the router.
#[must_use]
pub fn tenant_of(key: &[u8]) -> String {
    let hash = blake3::hash(key).to_hex();
    hash.chars().take(32).collect()
}

/// The salt of a request's block hashes: tenants share no blocks, and neither do different values of
/// `cache_salt`.
#[must_use]
pub fn salt_of(tenant: Option<&str>, cache_salt: Option<&str>) -> Salt {
    match (tenant, cache_salt) {
        (None, None) => Salt::none(),
        (tenant, salt) => {
            let (tenant, salt) = (tenant.unwrap_or_default(), salt.unwrap_or_default());
            // No tenant's name holds a zero byte, so no two pairs make one salt.
            Salt::new(&[tenant.as_bytes(), &[0], salt.as_bytes()].concat())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_and_salts_are_told_apart() {
        assert_eq!(tenant_of(b"key").len(), 32);
        assert_ne!(tenant_of(b"key"), tenant_of(b"other"));
        let salts = [
            salt_of(None, None),
            salt_of(Some("a"), None),
            salt_of(None, Some("a")),
            salt_of(Some("a"), Some("b")),
            salt_of(Some("ab"), None),
        ];
        for (at, salt) in salts.iter().enumerate() {
            assert!(!salts[..at].contains(salt));
        }
    }
}

//! What both processes of the check have: a pool, an engine, and what blocks hold.

use std::sync::Arc;

use kv_xfer::descriptor::DescriptorError;
use kv_xfer::engine::{Engine, EngineConfig, OfferError, StartError};
use kv_xfer::identity::{BlockHash, HashChain, IdentityError, ModelIdentity, Salt};
use kv_xfer::ids::{BlockId, EngineId, NameError};
use kv_xfer::memory::cuda::CudaError;
use kv_xfer::memory::{AccessError, ClaimError, HostOptions, KvPool, MemoryError, PoolError};
use kv_xfer::transport::Transport;
use thiserror::Error;

use crate::bench::pattern;
use crate::bench::proto::Shape;
use crate::bench::worker::{Settings, WorkerError};
use crate::memory::PoolMemory;
use crate::proc::ProcError;
use crate::require;
use crate::runtime::OpenError;

/// What both call their model.
const MODEL: &str = "check";

/// Why the check could not be carried out.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CheckError {
    /// NIXL is missing or does not work.
    #[error(transparent)]
    Nixl(#[from] OpenError),
    /// There is no such GPU, or it does not work.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// An engine did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The layout is impossible.
    #[error(transparent)]
    Layout(#[from] WorkerError),
    /// There is no memory for a pool.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// A name is malformed.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The block hashes cannot be made.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// A block could not be written or read.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// Memory could not be written or read.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Blocks are in another read already.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// The description does not parse.
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    /// The description was not believed.
    #[error(transparent)]
    Offer(#[from] OfferError),
    /// The other process.
    #[error(transparent)]
    Proc(#[from] ProcError),
    /// Something that must not be.
    #[error("{0}")]
    Wrong(String),
    /// `--timeout` has passed.
    #[error("the check did not end in time; give it more with --timeout")]
    Late,
}

/// One process's end.
#[derive(Debug)]
pub struct Side {
    /// The engine.
    pub engine: Engine,
    /// Its pool.
    pub pool: Arc<KvPool>,
    /// What carries the bytes, in NIXL's words.
    pub nixl: String,
}

impl Side {
    /// Makes the pool and starts the engine.
    ///
    /// # Errors
    /// [`CheckError`].
    pub fn start(
        name: &str,
        shape: &Shape,
        memory: PoolMemory,
        change: impl FnOnce(&mut EngineConfig),
    ) -> Result<Self, CheckError> {
        let transport = require::open()?;
        let layout = Settings::default().layout(shape)?;
        let options = HostOptions::default().populate(true);
        let (pool, given) = memory.pool(layout, shape.blocks, &options)?;
        tracing::info!(%memory, given, "pool");
        let name = format!("check-{name}-{}", std::process::id());
        let mut config = EngineConfig::new(EngineId::new(name)?, MODEL);
        config.tp_size = pool.layout().tp();
        config.require = require::required();
        config.cluster_key = crate::runtime::cluster_key()?;
        change(&mut config);
        let info = transport.info();
        let engine = Engine::start(config, Arc::clone(&pool), transport)?;
        Ok(Self {
            engine,
            pool,
            nixl: format!("NIXL {} / {}", info.version, info.backend),
        })
    }

    /// Fills a block in all regions.
    ///
    /// # Errors
    /// [`CheckError`].
    pub fn fill(&self, seed: u64, block: u32) -> Result<(), CheckError> {
        for (number, region) in (0..).zip(self.pool.regions()) {
            let bytes = expected(seed, number, block, region.block_len);
            let addr = region
                .block_addr(BlockId(block))
                .map_err(AccessError::from)?;
            self.pool.memory().write(addr, &bytes)?;
        }
        Ok(())
    }

    /// The chained hashes of a made-up prompt that fills so many blocks.
    ///
    /// # Errors
    /// [`CheckError`].
    pub fn hashes(&self, blocks: usize) -> Result<Vec<BlockHash>, CheckError> {
        let block_tokens = self.pool.layout().block_tokens();
        let tokens = u32::try_from(blocks)
            .unwrap_or(u32::MAX)
            .saturating_mul(block_tokens);
        let chain = HashChain::new(&ModelIdentity::new(MODEL, "")?, &Salt::none(), block_tokens)?;
        Ok(chain.hash_blocks(&(0..tokens).collect::<Vec<_>>()))
    }
}

/// What a block of a region holds.
#[must_use]
pub fn expected(seed: u64, region: u32, block: u32, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
    pattern::fill(seed, region, block, &mut bytes);
    bytes
}

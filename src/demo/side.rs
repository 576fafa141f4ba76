//! What the decode and the prefill process have in common: NIXL, a pool, its allocator, an engine.

use std::num::TryFromIntError;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_xfer::descriptor::DescriptorError;
use kv_xfer::engine::{Engine, EngineConfig, OfferError, StartError};
use kv_xfer::identity::{BlockHash, HashChain, IdentityError, ModelIdentity, Salt};
use kv_xfer::ids::{BlockId, EngineId, NameError};
use kv_xfer::layout::{Chunk, KvLayout, KvSplit, LayoutError, PoolOrder, Preset};
use kv_xfer::memory::{AccessError, ClaimError, HostOptions, KvPool, PoolError};
use thiserror::Error;

use super::allocator::{BlockAllocator, FreeOrder, NotHandedOut, OutOfBlocks};
use super::content::ChunkShape;
use super::messages::Setup;
use crate::proc::ProcError;
use crate::require;
use crate::runtime::OpenError;

/// How long a process waits for blocks that must come back.
const COME_BACK: Duration = Duration::from_secs(10);

/// Why a process of the demo cannot go on.
#[derive(Debug, Error)]
pub enum SideError {
    /// NIXL is missing or does not work.
    #[error(transparent)]
    Nixl(#[from] OpenError),
    /// The engine did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The model is not known.
    #[error("{0} is no known model")]
    Model(String),
    /// The layout is impossible.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// There is no memory for the pool.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// A name is malformed.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The block hashes cannot be made.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The pool is too small.
    #[error(transparent)]
    OutOfBlocks(#[from] OutOfBlocks),
    /// A block came back twice.
    #[error(transparent)]
    NotHandedOut(#[from] NotHandedOut),
    /// A block could not be written or read.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// Blocks are in another read already.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// Blocks did not come back.
    #[error("{count} blocks did not come back within {waited:?}")]
    NotBack {
        /// How many.
        count: usize,
        /// How long was waited.
        waited: Duration,
    },
    /// The lease was refused.
    #[error("the blocks cannot be leased: {0}")]
    Lease(String),
    /// The read was refused at once.
    #[error("the read was not taken: {0}")]
    Submit(String),
    /// The description does not parse.
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    /// The description was not believed.
    #[error(transparent)]
    Offer(#[from] OfferError),
    /// The other process.
    #[error(transparent)]
    Proc(#[from] ProcError),
    /// A count does not fit this machine.
    #[error(transparent)]
    Count(#[from] TryFromIntError),
    /// The parent asked for something out of turn.
    #[error("{0}")]
    OutOfTurn(&'static str),
}

/// The layout of one rank.
///
/// # Errors
/// [`SideError`] when the model is unknown or cannot be cut so.
pub fn layout(setup: &Setup) -> Result<KvLayout, SideError> {
    let preset =
        Preset::by_name(&setup.model).ok_or_else(|| SideError::Model(setup.model.clone()))?;
    Ok(KvLayout::new(
        &preset.geometry(),
        setup.tp,
        setup.block_tokens,
        PoolOrder::LayerFirst,
        KvSplit::Fused,
    )?)
}

/// One process's end of the demo.
#[derive(Debug)]
pub struct Side {
    /// The engine.
    pub engine: Engine,
    /// Its pool.
    pub pool: Arc<KvPool>,
    /// How it was set up.
    pub setup: Setup,
    chunks: Vec<(Chunk, ChunkShape)>,
    allocator: BlockAllocator,
    order: FreeOrder,
}

impl Side {
    /// Loads NIXL, makes the pool and starts the engine.
    ///
    /// # Errors
    /// [`SideError`].
    pub fn start(name: &str, setup: Setup, serve: bool) -> Result<Self, SideError> {
        let transport = require::open()?;
        let layout = layout(&setup)?;
        let options = HostOptions::default().huge_pages(true).populate(true);
        let (pool, given) = setup.memory.pool(layout, setup.blocks, &options)?;
        tracing::info!(memory = %setup.memory, given, "pool");
        let mut config = EngineConfig::new(EngineId::new(name)?, setup.model.as_str());
        config.tp_size = setup.tp;
        config.require = require::required();
        config.cluster_key = crate::runtime::cluster_key()?;
        if serve {
            config.holder.bind = Some(([127, 0, 0, 1], 0).into());
        }
        let engine = Engine::start(config, Arc::clone(&pool), transport)?;
        let chunks = pool
            .layout()
            .chunks()
            .iter()
            .filter_map(|chunk| Some((*chunk, ChunkShape::of(pool.layout(), chunk)?)))
            .collect();
        let order = FreeOrder::Contiguous;
        let allocator = BlockAllocator::new(setup.blocks, order, setup.seed);
        Ok(Self {
            engine,
            pool,
            setup,
            chunks,
            allocator,
            order,
        })
    }

    /// The chunks of a block, with what tells their content.
    #[must_use]
    pub fn chunks(&self) -> &[(Chunk, ChunkShape)] {
        &self.chunks
    }

    /// Bytes of the largest chunk.
    #[must_use]
    pub fn largest_chunk(&self) -> usize {
        self.chunks
            .iter()
            .map(|(_, shape)| shape.len())
            .max()
            .unwrap_or(0)
    }

    /// The chained hashes of a text's full blocks.
    ///
    /// # Errors
    /// [`SideError`].
    pub fn hashes(&self, tokens: &[u32]) -> Result<Vec<BlockHash>, SideError> {
        let identity = ModelIdentity::new(&self.setup.model, "")?;
        let chain = HashChain::new(&identity, &Salt::none(), self.setup.block_tokens)?;
        Ok(chain.hash_blocks(tokens))
    }

    /// Blocks for so many tokens, in the wanted order. Every block must be free when the order
    /// changes.
    ///
    /// # Errors
    /// [`SideError`].
    pub fn alloc(&mut self, tokens: usize, order: FreeOrder) -> Result<Vec<BlockId>, SideError> {
        if order != self.order {
            self.settle()?;
            let seed = self.setup.seed;
            self.allocator = BlockAllocator::new(self.setup.blocks, order, seed);
            self.order = order;
        }
        let per_block = usize::try_from(self.setup.block_tokens)?.max(1);
        Ok(self.allocator.alloc(tokens.div_ceil(per_block))?)
    }

    /// Takes blocks back.
    ///
    /// # Errors
    /// [`SideError::NotHandedOut`].
    pub fn free(&mut self, blocks: &[BlockId]) -> Result<(), SideError> {
        Ok(self.allocator.free(blocks)?)
    }

    /// Blocks handed out.
    #[must_use]
    pub fn used(&self) -> usize {
        self.allocator.used_blocks()
    }

    /// Takes back what leases and failed reads have given up.
    ///
    /// # Errors
    /// [`SideError::NotHandedOut`].
    pub fn collect(&mut self) -> Result<(), SideError> {
        while let Ok(freed) = self.engine.freed().try_recv() {
            self.allocator.free(&freed.blocks)?;
        }
        while let Ok(returned) = self.engine.returned().try_recv() {
            self.allocator.free(&returned.blocks.into_ids())?;
        }
        Ok(())
    }

    /// Waits until every block is back.
    ///
    /// # Errors
    /// [`SideError::NotBack`].
    pub fn settle(&mut self) -> Result<(), SideError> {
        let end = Instant::now() + COME_BACK;
        loop {
            self.collect()?;
            match self.used() {
                0 => return Ok(()),
                count if Instant::now() >= end => {
                    return Err(SideError::NotBack {
                        count,
                        waited: COME_BACK,
                    });
                }
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }
}

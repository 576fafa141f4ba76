//! What the benches start from: pools of any shape, engines over them, and offers.

use std::sync::Arc;
use std::time::Duration;

use kv_xfer::descriptor::{DescriptorError, DescriptorLimits, Params};
use kv_xfer::engine::{Engine, EngineConfig, Offer, OfferError, ReadError, StartError};
use kv_xfer::identity::BlockHash;
use kv_xfer::ids::{BlockId, EngineId, NameError};
use kv_xfer::layout::{
    Attention, Dtype, GeometryError, KvLayout, KvSplit, LayoutError, ModelGeometry, PoolOrder,
};
use kv_xfer::memory::{AccessError, ClaimError, HostOptions, KvPool, OwnedBlocks, PoolError};
use kv_xfer::transport::TransportError;
use kv_xfer::transport::nixl::NixlTransport;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use thiserror::Error;

use super::pattern;
use super::proto::Shape;
use crate::proc::ProcError;
use crate::runtime::{self, OpenError};

/// Tokens of a block, in every shape.
pub const BLOCK_TOKENS: u32 = 16;
/// Seed of what the holders' blocks contain.
pub const SEED: u64 = 0x6b76_7866_6572;
/// By then whatever was waited for has happened, or never will.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Why a bench cannot go on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BenchError {
    /// NIXL is missing or does not work.
    #[error(transparent)]
    Nixl(#[from] OpenError),
    /// The engine did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// Blocks of so many bytes cannot be made.
    #[error("blocks of {0} bytes cannot be made; take a multiple of 32")]
    BlockBytes(u64),
    /// The model is impossible.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// The layout is impossible.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// There is no memory for the pool.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// A name is malformed.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A block could not be written or read.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// Blocks are in another read already.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// The lease was refused.
    #[error("the blocks cannot be leased: {0}")]
    Lease(String),
    /// The read was refused at once.
    #[error("the read was not taken: {0}")]
    Submit(String),
    /// A read failed.
    #[error("a read failed: {0}")]
    Read(#[from] ReadError),
    /// The description does not parse.
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    /// The description was not believed.
    #[error(transparent)]
    Offer(#[from] OfferError),
    /// The transport failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The other process.
    #[error(transparent)]
    Proc(#[from] ProcError),
    /// The other process said that it cannot go on.
    #[error("the holders cannot go on: {0}")]
    Holder(String),
    /// Something did not happen in time.
    #[error("{what} did not happen within {waited:?}")]
    TookTooLong {
        /// What.
        what: &'static str,
        /// How long was waited.
        waited: Duration,
    },
    /// A thread could not be started or a file not be read.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// A process does not stand still, or does not go on.
    #[error("process {pid} did not do as told")]
    NotFrozen {
        /// Which.
        pid: u32,
    },
    /// Something was asked for out of turn.
    #[error("{0}")]
    OutOfTurn(&'static str),
}

/// A pool of that shape: one region a layer.
///
/// # Errors
/// [`BenchError`] when it cannot be made.
pub fn pool(shape: &Shape) -> Result<Arc<KvPool>, BenchError> {
    let per_row = u64::from(BLOCK_TOKENS) * 2;
    let row = u32::try_from(shape.block_bytes / per_row)
        .ok()
        .filter(|row| *row > 0 && u64::from(*row) * per_row == shape.block_bytes)
        .ok_or(BenchError::BlockBytes(shape.block_bytes))?;
    let heads = Attention::Gqa {
        kv_heads: 1,
        head_dim_k: row,
        head_dim_v: row,
    };
    let model = ModelGeometry::new("bench", shape.regions, heads, Dtype::Int8, None)?;
    let layout = KvLayout::new(
        &model,
        1,
        BLOCK_TOKENS,
        PoolOrder::LayerFirst,
        KvSplit::Fused,
    )?;
    let options = HostOptions::default().populate(true);
    Ok(KvPool::host(layout, shape.blocks, &options)?.0)
}

/// Fills blocks with the [pattern].
///
/// # Errors
/// [`BenchError::Access`].
pub fn fill(pool: &KvPool, seed: u64, blocks: impl Iterator<Item = u32>) -> Result<(), BenchError> {
    let mut bytes = vec![0; block_bytes(pool)];
    for block in blocks {
        for region in 0..regions(pool) {
            pattern::fill(seed, region, block, &mut bytes);
            pool.write_block(region as usize, BlockId(block), 0, &bytes)?;
        }
    }
    Ok(())
}

/// Overwrites claimed blocks with what no holder has.
///
/// # Errors
/// [`BenchError::Access`].
pub fn scribble(blocks: &mut OwnedBlocks) -> Result<(), BenchError> {
    let nothing = vec![0xee; block_bytes(blocks.pool())];
    for region in 0..regions(blocks.pool()) {
        for index in 0..blocks.len() {
            blocks.write_at(index, region as usize, 0, &nothing)?;
        }
    }
    Ok(())
}

/// How many bytes of a claimed block are not those of the holder's block `remote`.
///
/// # Errors
/// [`BenchError::Access`].
pub fn wrong_bytes(
    blocks: &OwnedBlocks,
    index: usize,
    seed: u64,
    remote: u32,
) -> Result<u64, BenchError> {
    let mut bytes = vec![0; block_bytes(blocks.pool())];
    let mut wrong = 0;
    for region in 0..regions(blocks.pool()) {
        blocks.read_at(index, region as usize, 0, &mut bytes)?;
        wrong += pattern::wrong_bytes(seed, region, remote, &bytes);
    }
    Ok(wrong)
}

fn block_bytes(pool: &KvPool) -> usize {
    let len = pool.regions().first().map_or(0, |region| region.block_len);
    usize::try_from(len).unwrap_or(0)
}

fn regions(pool: &KvPool) -> u32 {
    u32::try_from(pool.regions().len()).unwrap_or(u32::MAX)
}

/// The hash of the `index`-th block of the one text that all benches read.
#[must_use]
pub fn hashes(blocks: usize) -> Vec<BlockHash> {
    (1..=blocks as u128)
        .map(|index| {
            let spread = index.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
            BlockHash(spread.to_le_bytes())
        })
        .collect()
}

/// Blocks `0..blocks`, shuffled.
#[must_use]
pub fn shuffled(blocks: u32, seed: u64) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..blocks).collect();
    ids.shuffle(&mut ChaCha8Rng::seed_from_u64(seed));
    ids
}

/// Starts an engine of the benches' model.
///
/// # Errors
/// [`BenchError`].
pub fn start(
    name: &str,
    pool: &Arc<KvPool>,
    transport: &Arc<NixlTransport>,
    configure: impl FnOnce(&mut EngineConfig),
) -> Result<Engine, BenchError> {
    let mut config = EngineConfig::new(EngineId::new(name)?, "bench");
    config.require = crate::require::required();
    config.cluster_key = runtime::cluster_key()?;
    configure(&mut config);
    Ok(Engine::start(
        config,
        Arc::clone(pool),
        Arc::clone(transport),
    )?)
}

/// Believes a holder's description.
///
/// # Errors
/// [`BenchError`].
pub fn accept(engine: &Engine, params: Value) -> Result<Offer, BenchError> {
    match Params::from_json_value(params, &DescriptorLimits::default())? {
        Params::Remote(remote) => Ok(engine.accept(&remote, None, None)?),
        Params::Miss(_) => Err(BenchError::OutOfTurn("the holder offered nothing")),
    }
}

/// Claims blocks as a destination.
///
/// # Errors
/// [`BenchError::Claim`].
pub fn claim(
    engine: &Engine,
    blocks: impl Iterator<Item = u32>,
) -> Result<OwnedBlocks, BenchError> {
    Ok(engine.pool().claim(blocks.map(BlockId).collect())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_has_the_shape_that_was_asked_for() {
        let shape = Shape {
            regions: 3,
            blocks: 5,
            block_bytes: 96,
        };
        let pool = pool(&shape).unwrap();
        assert_eq!(pool.regions().len(), 3);
        assert!(pool.regions().iter().all(|r| r.block_len == 96));
        assert_eq!(pool.block_count(), 5);
        fill(&pool, 1, 0..5).unwrap();
        let owned = pool.claim(vec![BlockId(3)]).unwrap();
        assert_eq!(wrong_bytes(&owned, 0, 1, 3).unwrap(), 0);
        assert!(wrong_bytes(&owned, 0, 1, 2).unwrap() > 100);
    }

    #[test]
    fn impossible_blocks_are_refused() {
        for block_bytes in [0, 8, 33] {
            let shape = Shape {
                regions: 1,
                blocks: 1,
                block_bytes,
            };
            assert!(matches!(
                super::pool(&shape),
                Err(BenchError::BlockBytes(_))
            ));
        }
    }
}

//! What the engine tests share: a small model, pools of known content, and pairs of engines.
#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_xfer::engine::{
    Direction, Engine, EngineConfig, LeaseSpec, Leased, Offer, ReadHandle, ReadRequest,
    ReleasePolicy,
};
use kv_xfer::identity::{BlockHash, HashChain, ModelIdentity, Salt};
use kv_xfer::ids::{BlockId, EngineId, RequestId};
use kv_xfer::layout::{
    Attention, Dtype, KvLayout, KvSplit, MemKind, ModelGeometry, PoolOrder, RegionGeometry,
};
use kv_xfer::memory::{KvPool, OwnedBlocks};
use kv_xfer::transport::Transport;
use kv_xfer::transport::sim::SimFabric;

pub const BLOCK_TOKENS: u32 = 16;
pub const LIMIT: Duration = Duration::from_secs(20);

/// Four layers, two heads of eight: 512 bytes a block and region.
pub fn layout(order: PoolOrder) -> KvLayout {
    let heads = Attention::Gqa {
        kv_heads: 2,
        head_dim_k: 8,
        head_dim_v: 8,
    };
    let model = ModelGeometry::new("tiny", 4, heads, Dtype::Bf16, None).unwrap();
    KvLayout::new(&model, 1, BLOCK_TOKENS, order, KvSplit::Separate).unwrap()
}

pub fn sim_pool(fabric: &SimFabric, layout: KvLayout, blocks: u32) -> Arc<KvPool> {
    let bytes: u64 = layout
        .regions()
        .iter()
        .map(|r| r.block_len * u64::from(blocks))
        .sum();
    let memory = fabric.memory(usize::try_from(bytes).unwrap());
    let mut base = memory.base();
    let regions = layout
        .regions()
        .iter()
        .map(|spec| {
            let region = RegionGeometry {
                base,
                block_len: spec.block_len,
                block_stride: spec.block_len,
                block_count: blocks,
                mem: MemKind::Dram,
                device: 0,
            };
            base += spec.block_len * u64::from(blocks);
            region
        })
        .collect();
    KvPool::from_memory(layout, regions, memory).unwrap()
}

/// The byte at `offset` of a block's chunk (one component of one layer), for a content generation.
pub fn byte(generation: u8, chunk: usize, block: BlockId, offset: usize) -> u8 {
    let mixed = (block.0 as usize * 31 + chunk * 7 + offset) as u8;
    mixed
        .wrapping_mul(167)
        .wrapping_add(generation.wrapping_mul(89))
}

/// Fills blocks chunk by chunk, so that the content means the same in pools of any order.
pub fn fill(pool: &KvPool, blocks: &[BlockId], generation: u8) {
    for (index, chunk) in pool.layout().chunks().iter().enumerate() {
        for block in blocks {
            let bytes: Vec<u8> = (0..chunk.len as usize)
                .map(|offset| byte(generation, index, *block, offset))
                .collect();
            pool.write_block(chunk.region as usize, *block, chunk.offset, &bytes)
                .unwrap();
        }
    }
}

/// How many bytes of `local` differ from what `remote` was filled with.
pub fn wrong_bytes(local: &OwnedBlocks, remote: &[BlockId], generation: u8) -> usize {
    let mut wrong = 0;
    for (index, chunk) in local.pool().layout().chunks().iter().enumerate() {
        let mut bytes = vec![0; chunk.len as usize];
        for (at, block) in remote.iter().enumerate() {
            local
                .read_at(at, chunk.region as usize, chunk.offset, &mut bytes)
                .unwrap();
            wrong += bytes
                .iter()
                .enumerate()
                .filter(|(offset, b)| **b != byte(generation, index, *block, *offset))
                .count();
        }
    }
    wrong
}

pub fn ids(range: impl IntoIterator<Item = u32>) -> Vec<BlockId> {
    range.into_iter().map(BlockId).collect()
}

pub fn hashes(blocks: usize) -> Vec<BlockHash> {
    let identity = ModelIdentity::new("tiny", "1").unwrap();
    let chain = HashChain::new(&identity, &Salt::none(), BLOCK_TOKENS).unwrap();
    let tokens: Vec<u32> = (0..blocks as u32 * BLOCK_TOKENS).collect();
    chain.hash_blocks(&tokens)
}

pub fn config(name: &str) -> EngineConfig {
    let mut config = EngineConfig::new(EngineId::new(name).unwrap(), "tiny");
    config.holder.bind = Some("127.0.0.1:0".parse().unwrap());
    config.holder.max_leases = 64;
    config
}

pub fn engine<T: Transport>(
    config: EngineConfig,
    pool: &Arc<KvPool>,
    transport: &Arc<T>,
) -> Engine {
    Engine::start(config, Arc::clone(pool), Arc::clone(transport)).unwrap()
}

pub fn lease(holder: &Engine, request: &str, blocks: &[BlockId], ttl: Option<Duration>) -> Leased {
    holder
        .lease(LeaseSpec {
            request: RequestId::new(request).unwrap(),
            blocks: blocks.to_vec(),
            tokens: blocks.len() as u64 * u64::from(BLOCK_TOKENS),
            hashes: hashes(blocks.len()),
            ttl,
            direction: Direction::DecodeToPrefill,
            tenant: None,
            conversation: None,
        })
        .unwrap()
}

/// A read of everything that is offered.
pub fn request(offer: &Offer, blocks: OwnedBlocks) -> ReadRequest<'_> {
    ReadRequest {
        offer,
        hashes: &offer.ticket().hashes,
        span: 0..offer.ticket().runs.len(),
        blocks,
        timeout: LIMIT,
        release: ReleasePolicy::Always,
    }
}

/// Waits until `condition` holds; fails the test if it never does.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < until, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A holder and a reader over one scripted fabric.
pub struct Pair {
    pub fabric: Arc<SimFabric>,
    pub holder: Engine,
    pub reader: Engine,
}

pub const POOL_BLOCKS: u32 = 64;

pub fn pair_with(tune: impl FnOnce(&mut EngineConfig)) -> Pair {
    pair_of(|_| {}, tune)
}

pub fn pair_of(
    tune_holder: impl FnOnce(&mut EngineConfig),
    tune: impl FnOnce(&mut EngineConfig),
) -> Pair {
    let fabric = Arc::new(SimFabric::new());
    let holder_pool = sim_pool(&fabric, layout(PoolOrder::LayerFirst), POOL_BLOCKS);
    let reader_pool = sim_pool(&fabric, layout(PoolOrder::LayerFirst), POOL_BLOCKS);
    let mut holder_config = config("decode");
    tune_holder(&mut holder_config);
    let holder = engine(holder_config, &holder_pool, &fabric);
    let mut reader_config = config("prefill");
    reader_config.holder.bind = None;
    tune(&mut reader_config);
    let reader = engine(reader_config, &reader_pool, &fabric);
    Pair {
        fabric,
        holder,
        reader,
    }
}

pub fn pair() -> Pair {
    pair_with(|_| {})
}

impl Pair {
    /// Fills and leases `blocks` at the holder, and has the reader accept the descriptor.
    pub fn offer(&self, request: &str, blocks: &[BlockId]) -> (Leased, Offer) {
        fill(self.holder.pool(), blocks, 1);
        let leased = lease(&self.holder, request, blocks, None);
        let offer = self.reader.accept(&leased.remote, None, None).unwrap();
        (leased, offer)
    }

    pub fn claim(&self, blocks: impl IntoIterator<Item = u32>) -> OwnedBlocks {
        self.reader.pool().claim(ids(blocks)).unwrap()
    }

    /// Reads everything that is offered into these blocks.
    pub fn read(&self, offer: &Offer, blocks: impl IntoIterator<Item = u32>) -> ReadHandle {
        self.reader
            .read(request(offer, self.claim(blocks)))
            .unwrap()
    }

    /// Nothing is claimed, leased, quarantined or in flight any more.
    pub fn assert_clean(&self) {
        eventually("every block is free again", || {
            let stats = self.reader.stats();
            self.reader.returned().try_iter().for_each(drop);
            self.holder.freed().try_iter().for_each(drop);
            self.reader.pool().claimed_blocks() == 0
                && stats.quarantined == 0
                && stats.active == 0
                && stats.queued == 0
                && self.holder.stats().leases == 0
                && self.fabric.windows_in_flight() == 0
        });
    }
}

//! Pools of known content: every word tells which block and which generation it is of.

use std::sync::Arc;

use kv_xfer::identity::{BlockHash, HashChain, ModelIdentity, Salt};
use kv_xfer::ids::BlockId;
use kv_xfer::layout::{Attention, Dtype, KvLayout, KvSplit, ModelGeometry, PoolOrder};
use kv_xfer::memory::{HostOptions, KvPool, OwnedBlocks};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

pub const BLOCK_TOKENS: u32 = 16;

/// How large a block is, and how it lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    layers: u32,
    head_dim: u32,
    block_first: bool,
}

impl Shape {
    /// One layer; 512 bytes a block, in two regions.
    pub const TINY: Self = Self {
        layers: 1,
        head_dim: 8,
        block_first: false,
    };
    /// Eight layers; 64 KiB a block, in sixteen regions.
    pub const MEDIUM: Self = Self {
        layers: 8,
        head_dim: 128,
        block_first: false,
    };

    /// All layers of a block side by side.
    pub const fn block_first(self) -> Self {
        Self {
            block_first: true,
            ..self
        }
    }

    pub fn layout(self) -> KvLayout {
        let heads = Attention::Gqa {
            kv_heads: 1,
            head_dim_k: self.head_dim,
            head_dim_v: self.head_dim,
        };
        let model = ModelGeometry::new("test", self.layers, heads, Dtype::Bf16, None).unwrap();
        let order = if self.block_first {
            PoolOrder::BlockFirst
        } else {
            PoolOrder::LayerFirst
        };
        KvLayout::new(&model, 1, BLOCK_TOKENS, order, KvSplit::Separate).unwrap()
    }
}

pub fn pool(shape: Shape, blocks: u32) -> Arc<KvPool> {
    let options = HostOptions::default();
    KvPool::host(shape.layout(), blocks, &options).unwrap().0
}

/// The word at `index` of a chunk (one component of one layer) of a block. No two are equal.
fn word(generation: u16, chunk: usize, block: BlockId, index: usize) -> u64 {
    let place = u64::from(generation) << 48
        | (chunk as u64) << 40
        | u64::from(block.0) << 12
        | index as u64;
    place.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

fn chunk_bytes(generation: u16, chunk: usize, block: BlockId, len: usize) -> Vec<u8> {
    (0..len / 8)
        .flat_map(|index| word(generation, chunk, block, index).to_le_bytes())
        .collect()
}

/// Fills blocks chunk by chunk, so that the content means the same in pools of any order.
pub fn fill(pool: &KvPool, blocks: &[BlockId], generation: u16) {
    for (index, chunk) in pool.layout().chunks().iter().enumerate() {
        for block in blocks {
            let bytes = chunk_bytes(generation, index, *block, chunk.len as usize);
            pool.write_block(chunk.region as usize, *block, chunk.offset, &bytes)
                .unwrap();
        }
    }
}

/// Fills claimed blocks as if they were `blocks` of a pool.
pub fn fill_owned(owned: &mut OwnedBlocks, generation: u16) {
    let pool = Arc::clone(owned.pool());
    for (index, chunk) in pool.layout().chunks().iter().enumerate() {
        for (at, block) in owned.ids().to_vec().iter().enumerate() {
            let bytes = chunk_bytes(generation, index, *block, chunk.len as usize);
            owned
                .write_at(at, chunk.region as usize, chunk.offset, &bytes)
                .unwrap();
        }
    }
}

/// How many words of `local` differ from what the blocks `remote` were filled with.
pub fn wrong_words(local: &OwnedBlocks, remote: &[BlockId], generation: u16) -> usize {
    assert_eq!(local.len(), remote.len());
    let mut wrong = 0;
    for (index, chunk) in local.pool().layout().chunks().iter().enumerate() {
        let mut bytes = vec![0; chunk.len as usize];
        for (at, block) in remote.iter().enumerate() {
            local
                .read_at(at, chunk.region as usize, chunk.offset, &mut bytes)
                .unwrap();
            wrong += bytes
                .chunks_exact(8)
                .enumerate()
                .filter(|(n, found)| *found != word(generation, index, *block, *n).to_le_bytes())
                .count();
        }
    }
    wrong
}

/// `count` different blocks of a pool of `of`, in an order that a busy allocator might give.
pub fn shuffled(count: usize, of: u32, seed: u64) -> Vec<BlockId> {
    let mut blocks: Vec<BlockId> = (0..of).map(BlockId).collect();
    blocks.shuffle(&mut ChaCha8Rng::seed_from_u64(seed));
    blocks.truncate(count);
    blocks
}

/// Chained hashes of the full blocks of a prompt.
pub fn hashes(full_blocks: usize) -> Vec<BlockHash> {
    let identity = ModelIdentity::new("test", "1").unwrap();
    let chain = HashChain::new(&identity, &Salt::none(), BLOCK_TOKENS).unwrap();
    let tokens: Vec<u32> = (0..full_blocks as u32 * BLOCK_TOKENS).collect();
    chain.hash_blocks(&tokens)
}

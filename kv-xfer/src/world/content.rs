//! What the world's blocks hold, and what its prompts are.

use std::sync::{Arc, LazyLock};

use super::dice::mix;
use super::fabric::{Fabric, FabricMemory, Use};
use crate::identity::{BlockHash, HashChain, ModelIdentity, Salt};
use crate::ids::BlockId;
use crate::layout::{
    Attention, Dtype, KvLayout, KvSplit, MemKind, ModelGeometry, PoolOrder, RegionGeometry,
};
use crate::memory::{KvPool, OwnedBlocks};

/// Tokens in a block.
pub(super) const BLOCK_TOKENS: u32 = 4;
/// Blocks of the longest prompt.
pub(super) const PROMPT_BLOCKS: usize = 6;
/// Conversations, and histories of each: they part from the first at another block each.
pub(super) const CONVERSATIONS: usize = 3;
pub(super) const HISTORIES: usize = 3;

/// One model, cut in both ways.
static LAYOUTS: LazyLock<Option<[Arc<KvLayout>; 2]>> = LazyLock::new(|| {
    let heads = Attention::Gqa {
        kv_heads: 1,
        head_dim_k: 4,
        head_dim_v: 4,
    };
    let model = ModelGeometry::new("world", 2, heads, Dtype::Bf16, None).ok()?;
    let cut = |order| {
        let layout = KvLayout::new(&model, 1, BLOCK_TOKENS, order, KvSplit::Separate);
        layout.ok().map(Arc::new)
    };
    Some([cut(PoolOrder::LayerFirst)?, cut(PoolOrder::BlockFirst)?])
});

/// The hashes of every prompt.
static PROMPTS: LazyLock<Vec<Vec<BlockHash>>> = LazyLock::new(|| {
    let chain = ModelIdentity::new("world", "1")
        .ok()
        .and_then(|identity| HashChain::new(&identity, &Salt::none(), BLOCK_TOKENS).ok());
    let Some(chain) = chain else {
        return Vec::new();
    };
    let prompts = (0..CONVERSATIONS).flat_map(|c| (0..HISTORIES).map(move |h| (c, h)));
    prompts
        .map(|(conversation, history)| {
            let parts = [PROMPT_BLOCKS, 0, PROMPT_BLOCKS / 2];
            let from = parts.get(history).copied().unwrap_or(0) * BLOCK_TOKENS as usize;
            let tokens: Vec<u32> = (0..PROMPT_BLOCKS * BLOCK_TOKENS as usize)
                .map(|at| {
                    let other = if at >= from { history } else { 0 };
                    u32::try_from(conversation * 10_000 + other * 1_000 + at).unwrap_or(0)
                })
                .collect();
            chain.hash_blocks(&tokens)
        })
        .collect()
});

/// The hashes of one history of a conversation.
pub(super) fn prompt(conversation: usize, history: usize) -> &'static [BlockHash] {
    PROMPTS
        .get(conversation * HISTORIES + history)
        .map_or(&[], Vec::as_slice)
}

pub(super) const NAMES: [&str; CONVERSATIONS] = ["first", "second", "third"];

/// A pool in the fabric's memory.
pub(super) fn pool(
    fabric: &Fabric,
    life: usize,
    block_first: bool,
    blocks: u32,
) -> Option<Arc<KvPool>> {
    let layouts = LAYOUTS.as_ref()?;
    let layout = layouts.get(usize::from(block_first))?;
    let of = |len: u64| len.saturating_mul(u64::from(blocks));
    let bytes: u64 = layout.regions().iter().map(|spec| of(spec.block_len)).sum();
    let memory: FabricMemory = fabric.memory(usize::try_from(bytes).ok()?, life, Use::Pool);
    let mut base = memory.base();
    let mut regions = Vec::with_capacity(layout.regions().len());
    for spec in layout.regions() {
        regions.push(RegionGeometry {
            base,
            block_len: spec.block_len,
            block_stride: spec.block_len,
            block_count: blocks,
            mem: MemKind::Dram,
            device: 0,
        });
        base = base.saturating_add(of(spec.block_len));
    }
    KvPool::from_memory(Arc::clone(layout), regions, Arc::new(memory)).ok()
}

/// What a block is filled with, as one number: of which life, which block, for which time.
pub(super) fn tag(life: usize, block: u32, generation: u32) -> u64 {
    mix(life as u64, u64::from(block) << 32 | u64::from(generation))
}

const MAX_CHUNK: usize = 64;

fn chunk(tag: u64, index: usize, len: u64) -> ([u8; MAX_CHUNK], usize) {
    let len = usize::try_from(len).unwrap_or(0).min(MAX_CHUNK);
    let mut bytes = [0; MAX_CHUNK];
    for (word, at) in bytes.chunks_exact_mut(8).zip(0_u64..) {
        word.copy_from_slice(&mix(tag, (index as u64) << 8 | at).to_le_bytes());
    }
    (bytes, len)
}

/// Fills a block, chunk by chunk, so that the content means the same in pools of either cut. False
/// when the pool refuses.
pub(super) fn fill(pool: &KvPool, block: u32, tag: u64) -> bool {
    pool.layout().chunks().iter().enumerate().all(|(index, c)| {
        let (bytes, len) = chunk(tag, index, c.len);
        let data = bytes.get(..len).unwrap_or_default();
        pool.write_block(c.region as usize, BlockId(block), c.offset, data)
            .is_ok()
    })
}

/// Whether a landed block holds what was promised.
pub(super) fn holds(blocks: &OwnedBlocks, at: usize, tag: u64) -> bool {
    let layout = blocks.pool().layout();
    layout.chunks().iter().enumerate().all(|(index, c)| {
        let (wanted, len) = chunk(tag, index, c.len);
        let mut found = [0; MAX_CHUNK];
        let Some(found) = found.get_mut(..len) else {
            return false;
        };
        blocks
            .read_at(at, c.region as usize, c.offset, found)
            .is_ok()
            && wanted.get(..len) == Some(&*found)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histories_part_where_they_should() {
        for conversation in 0..CONVERSATIONS {
            let same = |a: usize| {
                let (ours, theirs) = (prompt(conversation, 0), prompt(conversation, a));
                crate::identity::matching_prefix(ours, theirs)
            };
            assert_eq!(
                [same(0), same(1), same(2)],
                [PROMPT_BLOCKS, 0, PROMPT_BLOCKS / 2]
            );
        }
    }

    #[test]
    fn every_chunk_fits() {
        for layout in LAYOUTS.as_ref().unwrap() {
            assert!(
                layout
                    .chunks()
                    .iter()
                    .all(|c| c.len <= MAX_CHUNK as u64 && c.len > 0)
            );
        }
    }
}

//! How one rank's pool is cut: blocks, regions, and where each layer's bytes lie within a block.

use std::fmt;

use thiserror::Error;

use super::model::{Attention, GeometryError, ModelGeometry};

/// Which index runs slowest over a pool's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PoolOrder {
    /// One region per layer and component; the bytes of a block are spread over all of them. What
    /// vLLM registers by default.
    LayerFirst,
    /// One region; all layers of a block lie side by side, so that one block is one descriptor.
    /// Recommended: a read costs per descriptor.
    BlockFirst,
}

impl fmt::Display for PoolOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LayerFirst => "layer-first",
            Self::BlockFirst => "block-first",
        })
    }
}

/// Whether K and V of a layer are one component or two. Latent attention has nothing to separate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvSplit {
    /// Head by head and token by token, a K row followed by its V row, as vLLM packs them.
    Fused,
    /// All K rows of the block, then all V rows.
    Separate,
}

impl fmt::Display for KvSplit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fused => "fused",
            Self::Separate => "separate",
        })
    }
}

/// What a chunk holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Component {
    /// K and V of all of the rank's heads.
    Kv,
    /// K of all of the rank's heads.
    K,
    /// V of all of the rank's heads.
    V,
    /// Latent rows: compressed KV followed by the rotary key.
    Latent,
    /// Keys of the sparse-attention indexer.
    Indexer,
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kv => "kv",
            Self::K => "k",
            Self::V => "v",
            Self::Latent => "latent",
            Self::Indexer => "indexer",
        })
    }
}

/// One region that a pool of this layout has.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RegionSpec {
    /// Name for reports, such as `layers.3.kv`.
    pub name: String,
    /// Bytes of one block in this region.
    pub block_len: u64,
}

/// Where one component of one layer lies within a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Chunk {
    /// The layer.
    pub layer: u32,
    /// The component.
    pub component: Component,
    /// Index into [`KvLayout::regions`].
    pub region: u32,
    /// Bytes from the start of the block in that region.
    pub offset: u64,
    /// Bytes per block.
    pub len: u64,
}

/// Why a layout was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The model itself is not valid.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// A count that must be at least one is zero.
    #[error("{what} is zero; give at least one")]
    Zero {
        /// Which count.
        what: &'static str,
    },
    /// KV heads neither split evenly over the ranks nor replicate evenly.
    #[error(
        "{kv_heads} KV heads do not divide over {tp} ranks; choose a tensor-parallel size that \
         divides the heads or is a multiple of them"
    )]
    HeadsDoNotDivide {
        /// KV heads of the model.
        kv_heads: u32,
        /// Tensor-parallel size.
        tp: u32,
    },
    /// Latent attention caches one row per token: there is no separate K and V.
    #[error("latent attention has no separate K and V; use KvSplit::Fused")]
    NothingToSplit,
    /// The byte counts do not fit 64 bits.
    #[error("the bytes of one block do not fit 64 bits; check block size and model")]
    Overflow,
}

/// How one rank's pool is cut. Two ranks of one engine have equal layouts.
///
/// Within a chunk the bytes are `[heads][tokens][row]`, slowest first; latent and indexer rows are
/// `[tokens][row]`.
///
/// ```
/// use kv_xfer::layout::{KvLayout, KvSplit, PoolOrder, Preset};
///
/// let model = Preset::Qwen3_32B.geometry();
/// let layout = KvLayout::new(&model, 8, 16, PoolOrder::LayerFirst, KvSplit::Fused)?;
/// assert_eq!(layout.bytes_per_token(), 32_768);
/// assert_eq!(layout.regions().len(), 64);
/// assert_eq!(layout.regions()[0].block_len, 8_192);
/// # Ok::<(), kv_xfer::layout::LayoutError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvLayout {
    model: ModelGeometry,
    tp: u32,
    block_tokens: u32,
    order: PoolOrder,
    split: KvSplit,
    regions: Vec<RegionSpec>,
    chunks: Vec<Chunk>,
    block_bytes: u64,
}

impl KvLayout {
    /// Cuts `model` for one of `tp` ranks into blocks of `block_tokens` tokens. KV heads are split
    /// over the ranks, or replicated where there are more ranks than heads; latent and indexer rows
    /// are on every rank.
    ///
    /// # Errors
    /// [`LayoutError`] when heads and ranks do not divide, a count is zero, or bytes overflow.
    pub fn new(
        model: &ModelGeometry,
        tp: u32,
        block_tokens: u32,
        order: PoolOrder,
        split: KvSplit,
    ) -> Result<Self, LayoutError> {
        if tp == 0 {
            return Err(LayoutError::Zero {
                what: "the tensor-parallel size",
            });
        }
        if block_tokens == 0 {
            return Err(LayoutError::Zero {
                what: "the number of tokens in a block",
            });
        }
        let parts = layer_components(model, tp, split)?;
        let mut regions = Vec::new();
        let mut chunks = Vec::new();
        let mut block_bytes = 0_u64;
        for layer in 0..model.layers() {
            for &(component, per_token) in &parts {
                if component == Component::Indexer
                    && model.indexer().is_some_and(|i| layer >= i.layers)
                {
                    continue;
                }
                let len = per_token
                    .checked_mul(u64::from(block_tokens))
                    .ok_or(LayoutError::Overflow)?;
                let (region, offset) = match order {
                    PoolOrder::BlockFirst => (0, block_bytes),
                    PoolOrder::LayerFirst => {
                        regions.push(RegionSpec {
                            name: format!("layers.{layer}.{component}"),
                            block_len: len,
                        });
                        let last = u32::try_from(regions.len().saturating_sub(1));
                        (last.map_err(|_| LayoutError::Overflow)?, 0)
                    }
                };
                chunks.push(Chunk {
                    layer,
                    component,
                    region,
                    offset,
                    len,
                });
                block_bytes = block_bytes.checked_add(len).ok_or(LayoutError::Overflow)?;
            }
        }
        if order == PoolOrder::BlockFirst {
            regions.push(RegionSpec {
                name: "blocks".to_owned(),
                block_len: block_bytes,
            });
        }
        Ok(Self {
            model: model.clone(),
            tp,
            block_tokens,
            order,
            split,
            regions,
            chunks,
            block_bytes,
        })
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &ModelGeometry {
        &self.model
    }

    /// Tensor-parallel size: over how many ranks the model is split.
    #[must_use]
    pub fn tp(&self) -> u32 {
        self.tp
    }

    /// Tokens in a block.
    #[must_use]
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Number of layers.
    #[must_use]
    pub fn layers(&self) -> u32 {
        self.model.layers()
    }

    /// Which index runs slowest over the memory.
    #[must_use]
    pub fn order(&self) -> PoolOrder {
        self.order
    }

    /// Whether K and V are one component or two.
    #[must_use]
    pub fn split(&self) -> KvSplit {
        self.split
    }

    /// The regions a pool of this layout has, in the order in which they are registered.
    #[must_use]
    pub fn regions(&self) -> &[RegionSpec] {
        &self.regions
    }

    /// Where each (layer, component) lies within a block, in layer order.
    #[must_use]
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Bytes of one block on this rank, over all regions.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Bytes of one token on this rank, over all regions.
    #[must_use]
    pub fn bytes_per_token(&self) -> u64 {
        // Every chunk's length is a multiple of the block's tokens, which are at least one.
        self.block_bytes
            .checked_div(u64::from(self.block_tokens))
            .unwrap_or(0)
    }
}

/// The components that a layer has on one rank, each with its bytes per token.
fn layer_components(
    model: &ModelGeometry,
    tp: u32,
    split: KvSplit,
) -> Result<Vec<(Component, u64)>, LayoutError> {
    let element = model.dtype().bytes();
    let mut parts = Vec::with_capacity(3);
    match model.attention() {
        Attention::Gqa {
            kv_heads,
            head_dim_k,
            head_dim_v,
        } => {
            let heads = heads_per_rank(kv_heads, tp)?;
            let bytes = |dim: u64| {
                dim.checked_mul(heads)
                    .and_then(|elements| elements.checked_mul(element))
                    .ok_or(LayoutError::Overflow)
            };
            let (k, v) = (u64::from(head_dim_k), u64::from(head_dim_v));
            match split {
                KvSplit::Fused => {
                    let row = k.checked_add(v).ok_or(LayoutError::Overflow)?;
                    parts.push((Component::Kv, bytes(row)?));
                }
                KvSplit::Separate => {
                    parts.push((Component::K, bytes(k)?));
                    parts.push((Component::V, bytes(v)?));
                }
            }
        }
        Attention::Mla {
            latent_dim,
            rope_dim,
        } => {
            if split == KvSplit::Separate {
                return Err(LayoutError::NothingToSplit);
            }
            let row = u64::from(latent_dim)
                .checked_add(u64::from(rope_dim))
                .and_then(|elements| elements.checked_mul(element))
                .ok_or(LayoutError::Overflow)?;
            parts.push((Component::Latent, row));
        }
    }
    if let Some(indexer) = model.indexer() {
        parts.push((Component::Indexer, u64::from(indexer.bytes_per_token)));
    }
    Ok(parts)
}

/// KV heads on one rank: a share of them, or one copy of one where there are more ranks than heads.
fn heads_per_rank(kv_heads: u32, tp: u32) -> Result<u64, LayoutError> {
    let refused = LayoutError::HeadsDoNotDivide { kv_heads, tp };
    let share = match (kv_heads.checked_rem(tp), tp.checked_rem(kv_heads)) {
        (Some(0), _) => kv_heads.checked_div(tp),
        (_, Some(0)) => Some(1),
        _ => None,
    };
    share.map(u64::from).ok_or(refused)
}

#[cfg(test)]
mod tests {
    use super::super::model::{Dtype, Indexer};
    use super::*;

    fn gqa(kv_heads: u32) -> ModelGeometry {
        let attention = Attention::Gqa {
            kv_heads,
            head_dim_k: 128,
            head_dim_v: 64,
        };
        ModelGeometry::new("m", 3, attention, Dtype::Bf16, None).unwrap()
    }

    fn mla() -> ModelGeometry {
        let attention = Attention::Mla {
            latent_dim: 512,
            rope_dim: 64,
        };
        let indexer = Indexer {
            bytes_per_token: 132,
            layers: 2,
        };
        ModelGeometry::new("m", 3, attention, Dtype::Bf16, Some(indexer)).unwrap()
    }

    #[test]
    fn heads_split_or_replicate_or_are_refused() {
        let per_token = |tp| {
            KvLayout::new(&gqa(8), tp, 16, PoolOrder::LayerFirst, KvSplit::Fused)
                .map(|l| l.bytes_per_token())
        };
        let one_head = 3 * (128 + 64) * 2;
        assert_eq!(per_token(1), Ok(8 * one_head));
        assert_eq!(per_token(4), Ok(2 * one_head));
        assert_eq!(per_token(8), Ok(one_head));
        assert_eq!(per_token(16), Ok(one_head));
        for tp in [3, 6, 12] {
            let refused = LayoutError::HeadsDoNotDivide { kv_heads: 8, tp };
            assert_eq!(per_token(tp), Err(refused));
        }
    }

    #[test]
    fn latent_rows_are_on_every_rank_and_not_split() {
        for tp in [1, 3, 8] {
            let layout =
                KvLayout::new(&mla(), tp, 64, PoolOrder::BlockFirst, KvSplit::Fused).unwrap();
            assert_eq!(layout.bytes_per_token(), 3 * 576 * 2 + 2 * 132);
        }
        assert_eq!(
            KvLayout::new(&mla(), 1, 64, PoolOrder::BlockFirst, KvSplit::Separate),
            Err(LayoutError::NothingToSplit)
        );
    }

    #[test]
    fn chunks_cover_each_block_once_in_layer_order() {
        for model in [gqa(8), mla()] {
            for order in [PoolOrder::LayerFirst, PoolOrder::BlockFirst] {
                for split in [KvSplit::Fused, KvSplit::Separate] {
                    let Ok(layout) = KvLayout::new(&model, 2, 16, order, split) else {
                        continue;
                    };
                    let mut end = vec![0; layout.regions().len()];
                    let mut layer = 0;
                    for chunk in layout.chunks() {
                        assert!(chunk.layer >= layer);
                        layer = chunk.layer;
                        let end = &mut end[chunk.region as usize];
                        assert_eq!(chunk.offset, *end);
                        *end += chunk.len;
                    }
                    assert_eq!(layer, 2);
                    let lens: Vec<u64> = layout.regions().iter().map(|r| r.block_len).collect();
                    assert_eq!(end, lens);
                    assert_eq!(lens.iter().sum::<u64>(), layout.block_bytes());
                    assert_eq!(layout.block_bytes(), layout.bytes_per_token() * 16);
                }
            }
        }
    }

    #[test]
    fn regions_are_named_after_layer_and_component() {
        let layout =
            KvLayout::new(&gqa(8), 1, 16, PoolOrder::LayerFirst, KvSplit::Separate).unwrap();
        let names: Vec<&str> = layout.regions().iter().map(|r| r.name.as_str()).collect();
        assert_eq!(names[..3], ["layers.0.k", "layers.0.v", "layers.1.k"]);
        let layout = KvLayout::new(&mla(), 1, 64, PoolOrder::LayerFirst, KvSplit::Fused).unwrap();
        let names: Vec<&str> = layout.regions().iter().map(|r| r.name.as_str()).collect();
        // Only the first two layers have an indexer.
        assert_eq!(
            names,
            [
                "layers.0.latent",
                "layers.0.indexer",
                "layers.1.latent",
                "layers.1.indexer",
                "layers.2.latent"
            ]
        );
    }

    #[test]
    fn zeroes_and_overflow_are_refused() {
        let new = |tp, block_tokens| {
            KvLayout::new(
                &gqa(8),
                tp,
                block_tokens,
                PoolOrder::LayerFirst,
                KvSplit::Fused,
            )
        };
        assert!(matches!(new(0, 16), Err(LayoutError::Zero { .. })));
        assert!(matches!(new(1, 0), Err(LayoutError::Zero { .. })));
        let attention = Attention::Mla {
            latent_dim: u32::MAX,
            rope_dim: u32::MAX,
        };
        let wide = ModelGeometry::new("m", 4, attention, Dtype::F32, None).unwrap();
        assert_eq!(
            KvLayout::new(&wide, 1, u32::MAX, PoolOrder::BlockFirst, KvSplit::Fused),
            Err(LayoutError::Overflow)
        );
    }
}

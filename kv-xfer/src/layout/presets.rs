//! Geometries of published models, with the configuration values they come from.

use super::model::{Attention, Dtype, Indexer, ModelGeometry};

/// A published model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)] // The models' own spelling.
#[non_exhaustive]
pub enum Preset {
    /// `Qwen/Qwen3-32B`: 64 layers, 8 KV heads of 128, bfloat16; 262,144 B per token.
    Qwen3_32B,
    /// `zai-org/GLM-5`: 78 layers, MLA of 512 + 64 in bfloat16, and on every layer the sparse
    /// indexer's 128 FP8 keys with a 4-byte scale; 100,152 B per token on every rank.
    Glm5,
    /// `meta-llama/Llama-3.3-70B-Instruct`: 80 layers, 8 KV heads of 128, bfloat16; 327,680 B per
    /// token.
    Llama3_3_70B,
    /// `HuggingFaceTB/SmolLM2-135M`: 30 layers, 3 KV heads of 64, bfloat16; 23,040 B per token.
    SmolLM2_135M,
}

impl Preset {
    /// All presets.
    pub const ALL: &[Self] = &[
        Self::Qwen3_32B,
        Self::Glm5,
        Self::Llama3_3_70B,
        Self::SmolLM2_135M,
    ];

    /// The model's name, without its organisation.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Qwen3_32B => "Qwen3-32B",
            Self::Glm5 => "GLM-5",
            Self::Llama3_3_70B => "Llama-3.3-70B",
            Self::SmolLM2_135M => "SmolLM2-135M",
        }
    }

    /// The preset of that [`name`](Self::name), in any case.
    #[must_use]
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL
            .iter()
            .copied()
            .find(|preset| preset.name().eq_ignore_ascii_case(name))
    }

    /// The model's geometry with bfloat16 KV, which is what serving engines cache by default.
    #[must_use]
    pub fn geometry(self) -> ModelGeometry {
        self.geometry_with(Dtype::Bf16)
    }

    /// The model's geometry with KV of another dtype. An indexer's cache keeps its own format.
    #[must_use]
    #[allow(clippy::expect_used)] // Constants; a test makes every one.
    pub fn geometry_with(self, dtype: Dtype) -> ModelGeometry {
        let gqa = |kv_heads, head_dim| Attention::Gqa {
            kv_heads,
            head_dim_k: head_dim,
            head_dim_v: head_dim,
        };
        let (layers, attention, indexer) = match self {
            Self::Qwen3_32B => (64, gqa(8, 128), None),
            Self::Glm5 => (
                78,
                Attention::Mla {
                    latent_dim: 512,
                    rope_dim: 64,
                },
                Some(Indexer {
                    bytes_per_token: 132,
                    layers: 78,
                }),
            ),
            Self::Llama3_3_70B => (80, gqa(8, 128), None),
            Self::SmolLM2_135M => (30, gqa(3, 64), None),
        };
        ModelGeometry::new(self.name(), layers, attention, dtype, indexer)
            .expect("presets are valid")
    }
}

#[cfg(test)]
mod tests {
    use super::super::kv::{KvLayout, KvSplit, PoolOrder};
    use super::*;

    const DTYPES: [Dtype; 6] = [
        Dtype::F32,
        Dtype::F16,
        Dtype::Bf16,
        Dtype::Fp8E4m3,
        Dtype::Fp8E5m2,
        Dtype::Int8,
    ];

    fn per_token(preset: Preset, tp: u32) -> u64 {
        KvLayout::new(
            &preset.geometry(),
            tp,
            16,
            PoolOrder::BlockFirst,
            KvSplit::Fused,
        )
        .unwrap()
        .bytes_per_token()
    }

    #[test]
    fn bytes_per_token_are_the_published_ones() {
        for (tp, bytes) in [(1, 262_144), (2, 131_072), (4, 65_536), (8, 32_768)] {
            assert_eq!(per_token(Preset::Qwen3_32B, tp), bytes);
            assert_eq!(per_token(Preset::Glm5, tp), 100_152);
        }
        assert_eq!(per_token(Preset::Llama3_3_70B, 1), 327_680);
        assert_eq!(per_token(Preset::SmolLM2_135M, 1), 23_040);
        assert_eq!(per_token(Preset::SmolLM2_135M, 3), 7_680);
    }

    #[test]
    fn every_preset_of_every_dtype_is_valid_and_found_by_name() {
        for &preset in Preset::ALL {
            assert_eq!(Preset::by_name(preset.name()), Some(preset));
            assert_eq!(Preset::by_name(&preset.name().to_lowercase()), Some(preset));
            for dtype in DTYPES {
                assert_eq!(preset.geometry_with(dtype).dtype(), dtype);
            }
        }
        assert_eq!(Preset::by_name("GPT-2"), None);
    }

    #[test]
    fn glm5_blocks_of_64_have_the_published_sizes() {
        let layout = KvLayout::new(
            &Preset::Glm5.geometry(),
            8,
            64,
            PoolOrder::LayerFirst,
            KvSplit::Fused,
        )
        .unwrap();
        assert_eq!(layout.regions().len(), 156);
        assert_eq!(layout.regions()[0].block_len, 73_728);
        assert_eq!(layout.regions()[1].block_len, 8_448);
    }
}

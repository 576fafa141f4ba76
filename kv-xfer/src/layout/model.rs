//! What one token's KV consists of, for a whole model: layers, heads, dtypes. No parallelism, no
//! blocks.

use std::fmt;
use std::sync::Arc;

use thiserror::Error;

use crate::ids::{MAX_NAME_BYTES, NameError};

/// Most layers accepted. The deepest published models have under 200; the limit keeps a damaged or
/// hostile layout from asking for millions of regions.
pub const MAX_LAYERS: u32 = 4096;

/// The type of a cached element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dtype {
    /// 32-bit IEEE float.
    F32,
    /// 16-bit IEEE float.
    F16,
    /// bfloat16.
    Bf16,
    /// 8-bit float with 4 exponent bits and 3 mantissa bits.
    Fp8E4m3,
    /// 8-bit float with 5 exponent bits and 2 mantissa bits.
    Fp8E5m2,
    /// 8-bit signed integer.
    Int8,
}

impl Dtype {
    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Fp8E4m3 | Self::Fp8E5m2 | Self::Int8 => 1,
        }
    }

    /// The name that serving engines write, such as `bfloat16`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            Self::Fp8E4m3 => "fp8_e4m3",
            Self::Fp8E5m2 => "fp8_e5m2",
            Self::Int8 => "int8",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a layer caches per token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Attention {
    /// Multi-head, grouped-query or multi-query attention: one K row and one V row per KV head.
    Gqa {
        /// KV heads of the whole model, before tensor parallelism.
        kv_heads: u32,
        /// Elements of a K row.
        head_dim_k: u32,
        /// Elements of a V row.
        head_dim_v: u32,
    },
    /// Multi-head latent attention: one compressed row per token, the same on every rank.
    Mla {
        /// Elements of the compressed KV (`kv_lora_rank`).
        latent_dim: u32,
        /// Elements of the decoupled rotary key, stored behind it.
        rope_dim: u32,
    },
}

impl fmt::Display for Attention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gqa {
                kv_heads,
                head_dim_k,
                head_dim_v,
            } => write!(
                f,
                "GQA of {kv_heads} KV heads, K {head_dim_k}, V {head_dim_v}"
            ),
            Self::Mla {
                latent_dim,
                rope_dim,
            } => write!(f, "MLA of {latent_dim}+{rope_dim}"),
        }
    }
}

/// The key cache of a sparse-attention indexer, which some models keep beside their KV. Opaque
/// bytes, the same on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Indexer {
    /// Bytes per token and layer. GLM-5's and DeepSeek-V3.2's is 132: 128 FP8 elements and one
    /// 4-byte scale.
    pub bytes_per_token: u32,
    /// How many layers have one: layers `0..layers`.
    pub layers: u32,
}

impl fmt::Display for Indexer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} B on {} layers", self.bytes_per_token, self.layers)
    }
}

/// Why a model geometry was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GeometryError {
    /// The model's name is not a name.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A count that must be at least one is zero.
    #[error("{what} is zero; give the model's own value")]
    Zero {
        /// Which count.
        what: &'static str,
    },
    /// More layers than [`MAX_LAYERS`], or more indexer layers than layers.
    #[error("{what} is {value}; at most {max} are accepted")]
    TooMany {
        /// Which count.
        what: &'static str,
        /// The value given.
        value: u32,
        /// The most accepted.
        max: u32,
    },
    /// The byte counts do not fit 64 bits.
    #[error("{what} does not fit 64 bits; check head counts and dimensions")]
    Overflow {
        /// Which byte count.
        what: &'static str,
    },
}

/// What one token's KV consists of, for a whole model. Always valid: checked when made.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ModelGeometry {
    name: Arc<str>,
    layers: u32,
    attention: Attention,
    dtype: Dtype,
    indexer: Option<Indexer>,
}

impl ModelGeometry {
    /// Checks and makes a geometry. `name` is for people: it takes no part in compatibility, since
    /// one model is served under hub names and under local paths.
    ///
    /// # Errors
    /// [`GeometryError`] for empty, oversized or overflowing values.
    pub fn new(
        name: impl AsRef<str>,
        layers: u32,
        attention: Attention,
        dtype: Dtype,
        indexer: Option<Indexer>,
    ) -> Result<Self, GeometryError> {
        let name = name.as_ref();
        check_name(name)?;
        at_least_one("the layer count", layers)?;
        if layers > MAX_LAYERS {
            return Err(GeometryError::TooMany {
                what: "the layer count",
                value: layers,
                max: MAX_LAYERS,
            });
        }
        match attention {
            Attention::Gqa {
                kv_heads,
                head_dim_k,
                head_dim_v,
            } => {
                at_least_one("the number of KV heads", kv_heads)?;
                at_least_one("the head dimension of K", head_dim_k)?;
                at_least_one("the head dimension of V", head_dim_v)?;
            }
            Attention::Mla { latent_dim, .. } => at_least_one("the latent dimension", latent_dim)?,
        }
        if let Some(indexer) = indexer {
            at_least_one("the indexer's bytes per token", indexer.bytes_per_token)?;
            at_least_one("the indexer's layer count", indexer.layers)?;
            if indexer.layers > layers {
                return Err(GeometryError::TooMany {
                    what: "the indexer's layer count",
                    value: indexer.layers,
                    max: layers,
                });
            }
        }
        let geometry = Self {
            name: Arc::from(name),
            layers,
            attention,
            dtype,
            indexer,
        };
        geometry
            .checked_bytes_per_token()
            .ok_or(GeometryError::Overflow {
                what: "the model's bytes per token",
            })?;
        Ok(geometry)
    }

    /// The model's name, for people.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number of layers that cache KV.
    #[must_use]
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// What a layer caches per token.
    #[must_use]
    pub fn attention(&self) -> Attention {
        self.attention
    }

    /// Type of the cached elements.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The indexer's cache, where the model has one.
    #[must_use]
    pub fn indexer(&self) -> Option<Indexer> {
        self.indexer
    }

    /// Bytes that one token's KV takes on a rank that holds the whole model.
    #[must_use]
    pub fn bytes_per_token(&self) -> u64 {
        // Checked when made.
        self.checked_bytes_per_token().unwrap_or(u64::MAX)
    }

    fn checked_bytes_per_token(&self) -> Option<u64> {
        let elements = match self.attention {
            Attention::Gqa {
                kv_heads,
                head_dim_k,
                head_dim_v,
            } => u64::from(head_dim_k)
                .checked_add(u64::from(head_dim_v))?
                .checked_mul(u64::from(kv_heads))?,
            Attention::Mla {
                latent_dim,
                rope_dim,
            } => u64::from(latent_dim).checked_add(u64::from(rope_dim))?,
        };
        let attention = elements
            .checked_mul(self.dtype.bytes())?
            .checked_mul(u64::from(self.layers))?;
        let indexer = match self.indexer {
            Some(i) => u64::from(i.bytes_per_token).checked_mul(u64::from(i.layers))?,
            None => 0,
        };
        attention.checked_add(indexer)
    }
}

fn check_name(name: &str) -> Result<(), NameError> {
    let what = "model name";
    if name.is_empty() {
        return Err(NameError::Empty { what });
    }
    if name.len() > MAX_NAME_BYTES {
        return Err(NameError::TooLong {
            what,
            len: name.len(),
        });
    }
    match name.char_indices().find(|(_, c)| c.is_control()) {
        Some((at, _)) => Err(NameError::Control { what, at }),
        None => Ok(()),
    }
}

fn at_least_one(what: &'static str, value: u32) -> Result<(), GeometryError> {
    if value == 0 {
        return Err(GeometryError::Zero { what });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gqa(kv_heads: u32, dim: u32) -> Attention {
        Attention::Gqa {
            kv_heads,
            head_dim_k: dim,
            head_dim_v: dim,
        }
    }

    #[test]
    fn zeroes_are_refused_by_name() {
        for (layers, attention, indexer, what) in [
            (0, gqa(1, 1), None, "the layer count"),
            (1, gqa(0, 1), None, "the number of KV heads"),
            (1, gqa(1, 0), None, "the head dimension of K"),
            (
                1,
                Attention::Mla {
                    latent_dim: 0,
                    rope_dim: 64,
                },
                None,
                "the latent dimension",
            ),
            (
                1,
                gqa(1, 1),
                Some(Indexer {
                    bytes_per_token: 0,
                    layers: 1,
                }),
                "the indexer's bytes per token",
            ),
            (
                1,
                gqa(1, 1),
                Some(Indexer {
                    bytes_per_token: 1,
                    layers: 0,
                }),
                "the indexer's layer count",
            ),
        ] {
            assert_eq!(
                ModelGeometry::new("m", layers, attention, Dtype::Bf16, indexer),
                Err(GeometryError::Zero { what })
            );
        }
    }

    #[test]
    fn too_much_is_refused() {
        assert!(matches!(
            ModelGeometry::new("m", MAX_LAYERS + 1, gqa(1, 1), Dtype::Bf16, None),
            Err(GeometryError::TooMany { .. })
        ));
        let indexer = Some(Indexer {
            bytes_per_token: 132,
            layers: 3,
        });
        assert!(matches!(
            ModelGeometry::new("m", 2, gqa(1, 1), Dtype::Bf16, indexer),
            Err(GeometryError::TooMany { max: 2, .. })
        ));
        assert_eq!(
            ModelGeometry::new("m", 64, gqa(u32::MAX, u32::MAX), Dtype::F32, None),
            Err(GeometryError::Overflow {
                what: "the model's bytes per token"
            })
        );
        assert!(matches!(
            ModelGeometry::new("", 1, gqa(1, 1), Dtype::F32, None),
            Err(GeometryError::Name(NameError::Empty { .. }))
        ));
    }

    #[test]
    fn keys_and_values_may_differ_in_width() {
        let attention = Attention::Gqa {
            kv_heads: 2,
            head_dim_k: 192,
            head_dim_v: 128,
        };
        let model = ModelGeometry::new("m", 3, attention, Dtype::Fp8E4m3, None).unwrap();
        assert_eq!(model.bytes_per_token(), 3 * 2 * 320);
    }
}

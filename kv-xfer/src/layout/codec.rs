//! The bytes of a layout, as a peer's card carries them, and its fingerprint.
//!
//! One layout has one encoding. All integers are little-endian; `tag` is one byte.
//!
//! ```text
//! "KVL" version=1 | dtype tag, attention tag, its dimensions u32 each, layers u32,
//!                   indexer tag [bytes u32, layers u32], tp u32, block tokens u32, split tag
//!                 | order tag, name length u16, name
//! ```
//!
//! The middle line is what the fingerprint covers.

use thiserror::Error;

use super::compat::LayoutFingerprint;
use super::kv::{KvLayout, KvSplit, LayoutError, PoolOrder};
use super::model::{Attention, Dtype, GeometryError, Indexer, ModelGeometry};
use crate::ids::MAX_NAME_BYTES;

const MAGIC: [u8; 3] = *b"KVL";
const VERSION: u8 = 1;

/// Separates layout fingerprints from every other use of BLAKE3. Changes with the meaning of a
/// chunk's bytes, such as the order of heads and tokens within it.
const FINGERPRINT_CONTEXT: &str = "kv-xfer 2026 layout content v1: heads, tokens, row";

/// The longest encoding of a layout, in bytes: what to limit a card's layout field to.
pub const MAX_LAYOUT_BYTES: usize = 64 + MAX_NAME_BYTES;

/// Why bytes are not a layout.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LayoutDecodeError {
    /// The bytes end early.
    #[error("the layout ends after {len} bytes, within its {field}; the card is damaged")]
    Truncated {
        /// Bytes given.
        len: usize,
        /// What was being read.
        field: &'static str,
    },
    /// Bytes are left over.
    #[error("{extra} bytes follow the layout; the card is damaged")]
    Trailing {
        /// How many.
        extra: usize,
    },
    /// The bytes do not start as a layout does.
    #[error("these bytes are not a layout; the card is damaged or of another program")]
    NotALayout,
    /// The encoding is of a version that this build does not read.
    #[error(
        "the layout has version {found}, this build reads {VERSION}; run the same release on both sides"
    )]
    Version {
        /// The version found.
        found: u8,
    },
    /// A tag has no meaning.
    #[error("{value} is no {field} that this build knows; run the same release on both sides")]
    UnknownTag {
        /// Which tag.
        field: &'static str,
        /// Its value.
        value: u8,
    },
    /// The name is not UTF-8.
    #[error("the model name of the layout is not UTF-8; the card is damaged")]
    NameNotUtf8,
    /// The values do not make a layout.
    #[error(transparent)]
    Invalid(#[from] LayoutError),
}

impl From<GeometryError> for LayoutDecodeError {
    fn from(error: GeometryError) -> Self {
        Self::Invalid(error.into())
    }
}

impl KvLayout {
    /// The digest of what this layout's chunks mean.
    #[must_use]
    pub fn content_fingerprint(&self) -> LayoutFingerprint {
        let mut content = Vec::with_capacity(64);
        self.write_content(&mut content);
        LayoutFingerprint(blake3::derive_key(FINGERPRINT_CONTEXT, &content))
    }

    /// The canonical encoding: equal layouts give equal bytes. At most [`MAX_LAYOUT_BYTES`].
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let name = self.model().name();
        let mut out = Vec::with_capacity(MAX_LAYOUT_BYTES);
        out.extend_from_slice(&MAGIC);
        out.push(VERSION);
        self.write_content(&mut out);
        out.push(match self.order() {
            PoolOrder::LayerFirst => 0,
            PoolOrder::BlockFirst => 1,
        });
        // A name is at most MAX_NAME_BYTES long.
        let len = u16::try_from(name.len()).unwrap_or(u16::MAX);
        out.extend_from_slice(&len.to_le_bytes());
        out.extend_from_slice(name.as_bytes());
        out
    }

    /// Decodes what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// [`LayoutDecodeError`] for every other sequence of bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, LayoutDecodeError> {
        let mut from = Input {
            rest: bytes,
            len: bytes.len(),
        };
        if from.array::<3>("magic")? != MAGIC {
            return Err(LayoutDecodeError::NotALayout);
        }
        let version = from.u8("version")?;
        if version != VERSION {
            return Err(LayoutDecodeError::Version { found: version });
        }
        let dtype = from.tag("dtype", dtype_of)?;
        let attention = match from.u8("attention")? {
            0 => Attention::Gqa {
                kv_heads: from.u32("KV heads")?,
                head_dim_k: from.u32("head dimension of K")?,
                head_dim_v: from.u32("head dimension of V")?,
            },
            1 => Attention::Mla {
                latent_dim: from.u32("latent dimension")?,
                rope_dim: from.u32("rope dimension")?,
            },
            value => {
                return Err(LayoutDecodeError::UnknownTag {
                    field: "attention",
                    value,
                });
            }
        };
        let layers = from.u32("layer count")?;
        let indexer = if from.tag("indexer", flag)? {
            Some(Indexer {
                bytes_per_token: from.u32("indexer bytes")?,
                layers: from.u32("indexer layers")?,
            })
        } else {
            None
        };
        let tp = from.u32("tensor-parallel size")?;
        let block_tokens = from.u32("block size")?;
        let split = match from.tag("K/V split", flag)? {
            false => KvSplit::Fused,
            true => KvSplit::Separate,
        };
        let order = match from.tag("pool order", flag)? {
            false => PoolOrder::LayerFirst,
            true => PoolOrder::BlockFirst,
        };
        let name_len = u16::from_le_bytes(from.array("name length")?);
        let name = from.take(usize::from(name_len), "name")?;
        if !from.rest.is_empty() {
            return Err(LayoutDecodeError::Trailing {
                extra: from.rest.len(),
            });
        }
        let name = std::str::from_utf8(name).map_err(|_| LayoutDecodeError::NameNotUtf8)?;
        let model = ModelGeometry::new(name, layers, attention, dtype, indexer)?;
        Ok(Self::new(&model, tp, block_tokens, order, split)?)
    }

    fn write_content(&self, out: &mut Vec<u8>) {
        let model = self.model();
        out.push(dtype_tag(model.dtype()));
        let put = |out: &mut Vec<u8>, values: &[u32]| {
            for value in values {
                out.extend_from_slice(&value.to_le_bytes());
            }
        };
        match model.attention() {
            Attention::Gqa {
                kv_heads,
                head_dim_k,
                head_dim_v,
            } => {
                out.push(0);
                put(out, &[kv_heads, head_dim_k, head_dim_v]);
            }
            Attention::Mla {
                latent_dim,
                rope_dim,
            } => {
                out.push(1);
                put(out, &[latent_dim, rope_dim]);
            }
        }
        put(out, &[model.layers()]);
        match model.indexer() {
            None => out.push(0),
            Some(indexer) => {
                out.push(1);
                put(out, &[indexer.bytes_per_token, indexer.layers]);
            }
        }
        put(out, &[self.tp(), self.block_tokens()]);
        out.push(match self.split() {
            KvSplit::Fused => 0,
            KvSplit::Separate => 1,
        });
    }
}

fn dtype_tag(dtype: Dtype) -> u8 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::F16 => 1,
        Dtype::Bf16 => 2,
        Dtype::Fp8E4m3 => 3,
        Dtype::Fp8E5m2 => 4,
        Dtype::Int8 => 5,
    }
}

fn dtype_of(tag: u8) -> Option<Dtype> {
    Some(match tag {
        0 => Dtype::F32,
        1 => Dtype::F16,
        2 => Dtype::Bf16,
        3 => Dtype::Fp8E4m3,
        4 => Dtype::Fp8E5m2,
        5 => Dtype::Int8,
        _ => return None,
    })
}

fn flag(tag: u8) -> Option<bool> {
    match tag {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}

/// What is left to read.
struct Input<'a> {
    rest: &'a [u8],
    len: usize,
}

impl<'a> Input<'a> {
    fn take(&mut self, n: usize, field: &'static str) -> Result<&'a [u8], LayoutDecodeError> {
        let (taken, rest) = self
            .rest
            .split_at_checked(n)
            .ok_or(LayoutDecodeError::Truncated {
                len: self.len,
                field,
            })?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], LayoutDecodeError> {
        let (taken, rest) =
            self.rest
                .split_first_chunk::<N>()
                .ok_or(LayoutDecodeError::Truncated {
                    len: self.len,
                    field,
                })?;
        self.rest = rest;
        Ok(*taken)
    }

    fn u8(&mut self, field: &'static str) -> Result<u8, LayoutDecodeError> {
        self.array::<1>(field).map(|[byte]| byte)
    }

    fn u32(&mut self, field: &'static str) -> Result<u32, LayoutDecodeError> {
        self.array(field).map(u32::from_le_bytes)
    }

    fn tag<T>(
        &mut self,
        field: &'static str,
        of: impl Fn(u8) -> Option<T>,
    ) -> Result<T, LayoutDecodeError> {
        let value = self.u8(field)?;
        of(value).ok_or(LayoutDecodeError::UnknownTag { field, value })
    }
}

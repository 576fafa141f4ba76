//! Whether two layouts give the same meaning to the same bytes.

use std::fmt;

use thiserror::Error;

use super::kv::KvLayout;

/// A digest of everything that decides what a chunk's bytes mean: model geometry, dtype,
/// tensor-parallel size, block size, and whether K and V are separate.
///
/// Not in it: the model's name (one model is served under many), the pool order and the number of
/// blocks (both may differ between peers), and the rank. Which weights made the KV is
/// [`ModelIdentity`](crate::identity::ModelIdentity)'s matter.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct LayoutFingerprint(pub [u8; 32]);

impl fmt::Display for LayoutFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for LayoutFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LayoutFingerprint({self})")
    }
}

/// What two layouts can differ in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LayoutFactor {
    /// Number of layers.
    Layers,
    /// Kind of attention, head count or dimensions.
    Attention,
    /// Type of the cached elements.
    Dtype,
    /// The sparse-attention indexer's cache.
    Indexer,
    /// Tensor-parallel size.
    TensorParallel,
    /// Tokens in a block.
    BlockTokens,
    /// Whether K and V are one component or two.
    Split,
}

impl fmt::Display for LayoutFactor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Layers => "layer count",
            Self::Attention => "attention",
            Self::Dtype => "cache dtype",
            Self::Indexer => "indexer cache",
            Self::TensorParallel => "tensor-parallel size",
            Self::BlockTokens => "block size in tokens",
            Self::Split => "K/V split",
        })
    }
}

/// The first factor in which two layouts differ.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "the peer's {factor} is {remote}, ours is {local}; run both engines with the same model and \
     settings, or recompute"
)]
pub struct LayoutMismatch {
    /// What differs.
    pub factor: LayoutFactor,
    /// Our value.
    pub local: String,
    /// The peer's value.
    pub remote: String,
}

impl KvLayout {
    /// Checks that `remote`'s chunks mean what ours mean: then, and only then, the fingerprints are
    /// equal. The pool orders may differ.
    ///
    /// # Errors
    /// [`LayoutMismatch`] naming the first factor that differs, with both values.
    pub fn check_compatible(&self, remote: &Self) -> Result<(), LayoutMismatch> {
        let (ours, theirs) = (self.model(), remote.model());
        same(LayoutFactor::Layers, ours.layers(), theirs.layers())?;
        same(
            LayoutFactor::Attention,
            ours.attention(),
            theirs.attention(),
        )?;
        same(LayoutFactor::Dtype, ours.dtype(), theirs.dtype())?;
        if ours.indexer() != theirs.indexer() {
            let text = |indexer: Option<super::Indexer>| {
                indexer.map_or_else(|| "none".to_owned(), |i| i.to_string())
            };
            return Err(LayoutMismatch {
                factor: LayoutFactor::Indexer,
                local: text(ours.indexer()),
                remote: text(theirs.indexer()),
            });
        }
        same(LayoutFactor::TensorParallel, self.tp(), remote.tp())?;
        same(
            LayoutFactor::BlockTokens,
            self.block_tokens(),
            remote.block_tokens(),
        )?;
        same(LayoutFactor::Split, self.split(), remote.split())
    }
}

fn same<T: PartialEq + fmt::Display>(
    factor: LayoutFactor,
    local: T,
    remote: T,
) -> Result<(), LayoutMismatch> {
    if local == remote {
        return Ok(());
    }
    Err(LayoutMismatch {
        factor,
        local: local.to_string(),
        remote: remote.to_string(),
    })
}

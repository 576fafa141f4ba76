//! What the bytes mean: models, layers, dtypes, and how a pool's regions are cut from them.
//!
//! A [`ModelGeometry`] says what one token's KV consists of. A [`KvLayout`] cuts it for one rank into
//! blocks and regions. [`pair_regions`] lays the regions of two pools side by side, once per peer, so
//! that a read only has to name blocks.
#![forbid(unsafe_code)]

mod codec;
mod compat;
mod kv;
mod model;
mod pairing;
mod presets;
mod region;

pub use codec::{LayoutDecodeError, MAX_LAYOUT_BYTES};
pub use compat::{LayoutFactor, LayoutFingerprint, LayoutMismatch};
pub use kv::{Chunk, Component, KvLayout, KvSplit, LayoutError, PoolOrder, RegionSpec};
pub use model::{Attention, Dtype, GeometryError, Indexer, MAX_LAYERS, ModelGeometry};
pub use pairing::{PairingError, Side, pair_regions};
pub use presets::Preset;
pub use region::{MemKind, RegionError, RegionGeometry, RegionPair};

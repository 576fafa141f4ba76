//! What the bytes mean: models, layers, dtypes, and how a pool's regions are cut from them.
#![forbid(unsafe_code)]

mod region;

pub use region::{MemKind, RegionError, RegionGeometry, RegionPair};

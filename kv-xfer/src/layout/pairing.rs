//! Laying the regions of two pools side by side.

use std::fmt;

use thiserror::Error;

use super::compat::LayoutMismatch;
use super::kv::{Chunk, KvLayout};
use super::region::{RegionError, RegionGeometry, RegionPair};

/// Whose regions an error is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// Ours, which is written to.
    Local,
    /// The peer's, which is read.
    Remote,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Local => "local",
            Self::Remote => "remote",
        })
    }
}

/// Why two pools cannot be paired.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PairingError {
    /// The same bytes mean different things on the two sides.
    #[error(transparent)]
    Mismatch(#[from] LayoutMismatch),
    /// A pool has not the regions of its layout.
    #[error(
        "the {side} pool has {found} regions, its layout has {expected}; register each region once"
    )]
    RegionCount {
        /// Whose pool.
        side: Side,
        /// Regions of the layout.
        expected: usize,
        /// Regions given.
        found: usize,
    },
    /// A region is not a sound array of blocks.
    #[error("{side} region {name}: {error}")]
    Region {
        /// Whose region.
        side: Side,
        /// The region's name in its layout.
        name: String,
        /// What is wrong with it.
        #[source]
        error: RegionError,
    },
    /// A region's blocks have not the length that the layout gives them.
    #[error(
        "{side} region {name} has blocks of {found} bytes, its layout has {expected}; check block size and dtype"
    )]
    BlockLen {
        /// Whose region.
        side: Side,
        /// The region's name in its layout.
        name: String,
        /// Bytes by the layout.
        expected: u64,
        /// Bytes given.
        found: u64,
    },
    /// The regions of one pool have different numbers of blocks.
    #[error(
        "{side} region {name} has {found} blocks, the first region has {expected}; all regions of a pool are cut into the same blocks"
    )]
    BlockCount {
        /// Whose region.
        side: Side,
        /// The region's name in its layout.
        name: String,
        /// Blocks of the pool's first region.
        expected: u32,
        /// Blocks of this one.
        found: u32,
    },
}

/// Pairs the regions of two pools for reading, in layer order.
///
/// Pools of the same order give one pair per region (block-first: one pair, whose layer is the last
/// one). Pools of different order give one pair per chunk. With [`KvSplit::Separate`] or an indexer a
/// layer has several pairs.
///
/// [`KvSplit::Separate`]: super::KvSplit::Separate
///
/// # Errors
/// [`PairingError`] when the layouts mean different things or a pool is not what its layout says.
pub fn pair_regions(
    local: &KvLayout,
    local_regions: &[RegionGeometry],
    remote: &KvLayout,
    remote_regions: &[RegionGeometry],
) -> Result<Vec<RegionPair>, PairingError> {
    local.check_compatible(remote)?;
    check_pool(Side::Local, local, local_regions)?;
    check_pool(Side::Remote, remote, remote_regions)?;
    if local.order() == remote.order() {
        let layers = last_layers(local);
        return Ok(local_regions
            .iter()
            .zip(remote_regions)
            .zip(layers)
            .map(|((l, r), layer)| pair(l, 0, r, 0, l.block_len, layer))
            .collect());
    }
    local
        .chunks()
        .iter()
        .zip(remote.chunks())
        .map(|(l, r)| {
            let (l_region, l_offset) = place(Side::Local, local, local_regions, l)?;
            let (r_region, r_offset) = place(Side::Remote, remote, remote_regions, r)?;
            Ok(pair(l_region, l_offset, r_region, r_offset, l.len, l.layer))
        })
        .collect()
}

/// Checks a pool against its layout.
fn check_pool(
    side: Side,
    layout: &KvLayout,
    regions: &[RegionGeometry],
) -> Result<(), PairingError> {
    let specs = layout.regions();
    if specs.len() != regions.len() {
        return Err(PairingError::RegionCount {
            side,
            expected: specs.len(),
            found: regions.len(),
        });
    }
    let blocks = regions.first().map_or(0, |r| r.block_count);
    for (spec, region) in specs.iter().zip(regions) {
        let name = || spec.name.clone();
        region.validate().map_err(|error| PairingError::Region {
            side,
            name: name(),
            error,
        })?;
        if region.block_len != spec.block_len {
            return Err(PairingError::BlockLen {
                side,
                name: name(),
                expected: spec.block_len,
                found: region.block_len,
            });
        }
        if region.block_count != blocks {
            return Err(PairingError::BlockCount {
                side,
                name: name(),
                expected: blocks,
                found: region.block_count,
            });
        }
    }
    Ok(())
}

/// The last layer of each region.
fn last_layers(layout: &KvLayout) -> Vec<u32> {
    let mut layers = vec![0; layout.regions().len()];
    for chunk in layout.chunks() {
        if let Some(layer) = usize::try_from(chunk.region)
            .ok()
            .and_then(|index| layers.get_mut(index))
        {
            *layer = chunk.layer;
        }
    }
    layers
}

/// The region that a chunk lies in, and the chunk's offset within its blocks.
fn place<'a>(
    side: Side,
    layout: &KvLayout,
    regions: &'a [RegionGeometry],
    chunk: &Chunk,
) -> Result<(&'a RegionGeometry, u64), PairingError> {
    usize::try_from(chunk.region)
        .ok()
        .and_then(|index| regions.get(index))
        .map(|region| (region, chunk.offset))
        .ok_or(PairingError::RegionCount {
            side,
            expected: layout.regions().len(),
            found: regions.len(),
        })
}

/// Offsets lie within a block of a validated region, so that no address wraps.
fn pair(
    local: &RegionGeometry,
    local_offset: u64,
    remote: &RegionGeometry,
    remote_offset: u64,
    len: u64,
    layer: u32,
) -> RegionPair {
    RegionPair {
        remote_base: remote.base.saturating_add(remote_offset),
        remote_stride: remote.block_stride,
        local_base: local.base.saturating_add(local_offset),
        local_stride: local.block_stride,
        len,
        layer,
        remote_mem: remote.mem,
        remote_device: remote.device,
        local_mem: local.mem,
        local_device: local.device,
    }
}

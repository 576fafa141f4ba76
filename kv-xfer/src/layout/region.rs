//! Where blocks lie: strided regions, as numbers only. The same type describes local and remote
//! memory; nothing here is dereferenced.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::ids::BlockId;

/// What kind of memory a region lies in, in NIXL's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
#[non_exhaustive]
pub enum MemKind {
    /// Host memory.
    Dram,
    /// Device memory.
    Vram,
}

impl fmt::Display for MemKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dram => "DRAM",
            Self::Vram => "VRAM",
        })
    }
}

/// One strided array of blocks: block `i` occupies `block_len` bytes at `base + i * block_stride`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RegionGeometry {
    /// Address of block 0 in its owner's address space.
    pub base: u64,
    /// Bytes of one block.
    pub block_len: u64,
    /// Bytes from the start of one block to the start of the next; at least `block_len`.
    pub block_stride: u64,
    /// Number of blocks.
    pub block_count: u32,
    /// Kind of memory.
    pub mem: MemKind,
    /// Device index in NIXL's sense; 0 for host memory.
    pub device: u32,
}

/// Why a region or a block of it was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RegionError {
    /// Block length or block count is zero.
    #[error("a region needs at least one block of at least one byte, got {blocks} of {len} bytes")]
    Empty {
        /// Block count given.
        blocks: u32,
        /// Block length given, bytes.
        len: u64,
    },
    /// Blocks would overlap.
    #[error("block stride {stride} is less than block length {len}: blocks would overlap")]
    StrideTooShort {
        /// Stride given, bytes.
        stride: u64,
        /// Block length given, bytes.
        len: u64,
    },
    /// The region runs over the end of the address space.
    #[error("region at {base:#x} with {blocks} blocks of stride {stride} wraps the address space")]
    Wraps {
        /// Base address given.
        base: u64,
        /// Block count given.
        blocks: u32,
        /// Stride given, bytes.
        stride: u64,
    },
    /// A block id lies outside the pool.
    #[error("block {block} is outside the pool of {blocks} blocks")]
    BlockOutOfRange {
        /// The block asked for.
        block: BlockId,
        /// How many blocks there are.
        blocks: u32,
    },
    /// An offset and length lie outside a block.
    #[error("{len} bytes at offset {offset} do not fit into a block of {block_len} bytes")]
    OutsideBlock {
        /// Offset within the block, bytes.
        offset: u64,
        /// Length, bytes.
        len: u64,
        /// Block length, bytes.
        block_len: u64,
    },
}

impl RegionGeometry {
    /// Checks that the region is not empty, does not overlap itself and does not wrap.
    ///
    /// # Errors
    /// [`RegionError`] naming the fault.
    pub fn validate(&self) -> Result<(), RegionError> {
        if self.block_len == 0 || self.block_count == 0 {
            return Err(RegionError::Empty {
                blocks: self.block_count,
                len: self.block_len,
            });
        }
        if self.block_stride < self.block_len {
            return Err(RegionError::StrideTooShort {
                stride: self.block_stride,
                len: self.block_len,
            });
        }
        self.checked_end().map(|_| ())
    }

    /// Bytes from the first byte of block 0 to the last byte of the last block.
    ///
    /// # Errors
    /// [`RegionError::Wraps`] when that exceeds the address space.
    pub fn byte_len(&self) -> Result<u64, RegionError> {
        Ok(self.checked_end()?.saturating_sub(self.base))
    }

    /// Address of block `block`.
    ///
    /// # Errors
    /// [`RegionError::BlockOutOfRange`], or [`RegionError::Wraps`] for an unvalidated region.
    pub fn block_addr(&self, block: BlockId) -> Result<u64, RegionError> {
        if block.0 >= self.block_count {
            return Err(RegionError::BlockOutOfRange {
                block,
                blocks: self.block_count,
            });
        }
        u64::from(block.0)
            .checked_mul(self.block_stride)
            .and_then(|offset| self.base.checked_add(offset))
            .filter(|addr| addr.checked_add(self.block_len).is_some())
            .ok_or_else(|| self.wraps())
    }

    /// Address of `len` bytes at `offset` within block `block`.
    ///
    /// # Errors
    /// [`RegionError`] when the bytes are not all inside that block.
    pub fn byte_addr(&self, block: BlockId, offset: u64, len: u64) -> Result<u64, RegionError> {
        let start = self.block_addr(block)?;
        match offset.checked_add(len) {
            Some(end) if end <= self.block_len => {
                start.checked_add(offset).ok_or_else(|| self.wraps())
            }
            _ => Err(RegionError::OutsideBlock {
                offset,
                len,
                block_len: self.block_len,
            }),
        }
    }

    fn checked_end(&self) -> Result<u64, RegionError> {
        u64::from(self.block_count)
            .saturating_sub(1)
            .checked_mul(self.block_stride)
            .and_then(|last| self.base.checked_add(last))
            .and_then(|last| last.checked_add(self.block_len))
            .ok_or_else(|| self.wraps())
    }

    fn wraps(&self) -> RegionError {
        RegionError::Wraps {
            base: self.base,
            blocks: self.block_count,
            stride: self.block_stride,
        }
    }
}

/// A strided array on the remote side and the one on the local side that its blocks go to: for each
/// pair of blocks `(r, l)`, `len` bytes move from `remote_base + r * remote_stride` to
/// `local_base + l * local_stride`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionPair {
    /// Remote address of the bytes of block 0.
    pub remote_base: u64,
    /// Remote bytes from block to block.
    pub remote_stride: u64,
    /// Local address of the bytes of block 0.
    pub local_base: u64,
    /// Local bytes from block to block.
    pub local_stride: u64,
    /// Bytes that move per block.
    pub len: u64,
    /// Last layer that these bytes belong to. Pairs come in layer order, and a layer may have several
    /// pairs: layers `..=layer` are complete once every pair whose `layer` is at most this has landed.
    pub layer: u32,
    /// Kind of the remote memory.
    pub remote_mem: MemKind,
    /// Remote device index.
    pub remote_device: u32,
    /// Kind of the local memory.
    pub local_mem: MemKind,
    /// Local device index.
    pub local_device: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region() -> RegionGeometry {
        RegionGeometry {
            base: 0x1000,
            block_len: 100,
            block_stride: 128,
            block_count: 4,
            mem: MemKind::Dram,
            device: 0,
        }
    }

    #[test]
    fn addresses_are_bounded() {
        let r = region();
        assert_eq!(r.block_addr(BlockId(3)), Ok(0x1000 + 384));
        assert!(matches!(
            r.block_addr(BlockId(4)),
            Err(RegionError::BlockOutOfRange { .. })
        ));
        assert_eq!(r.byte_addr(BlockId(1), 99, 1), Ok(0x1000 + 128 + 99));
        assert!(r.byte_addr(BlockId(1), 99, 2).is_err());
        assert!(r.byte_addr(BlockId(1), u64::MAX, 2).is_err());
        assert_eq!(r.byte_len(), Ok(484));
    }

    #[test]
    fn bad_regions_are_refused() {
        assert!(region().validate().is_ok());
        assert!(
            RegionGeometry {
                block_count: 0,
                ..region()
            }
            .validate()
            .is_err()
        );
        assert!(
            RegionGeometry {
                block_len: 0,
                ..region()
            }
            .validate()
            .is_err()
        );
        assert!(
            RegionGeometry {
                block_stride: 99,
                ..region()
            }
            .validate()
            .is_err()
        );
        let wraps = RegionGeometry {
            base: u64::MAX - 400,
            ..region()
        };
        assert!(matches!(wraps.validate(), Err(RegionError::Wraps { .. })));
        let huge = RegionGeometry {
            block_stride: u64::MAX,
            ..region()
        };
        assert!(huge.validate().is_err());
    }
}

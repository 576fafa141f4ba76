//! The KV memory of one rank: regions cut as a layout says, the memory behind them, and which blocks
//! are destinations of a read.

use std::sync::Arc;

use thiserror::Error;

use super::claims::{ClaimError, Claims};
use super::cuda::CudaError;
use super::foreign::ForeignMemory;
use super::host::{HostMemory, HostMemoryError, HostOptions, HostReport};
use super::{Memory, MemoryError};
use crate::descriptor::BlockRuns;
use crate::ids::BlockId;
use crate::layout::{KvLayout, MemKind, RegionError, RegionGeometry};

/// Alignment of the regions of a host pool, bytes: a page.
const REGION_ALIGN: u64 = 4096;

/// Why a pool could not be made.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PoolError {
    /// There is no memory for it.
    #[error(transparent)]
    Host(#[from] HostMemoryError),
    /// There is no GPU, or no memory on it.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The bytes of so many blocks do not fit an address space.
    #[error("{blocks} blocks of {block_bytes} bytes do not fit an address space; use fewer blocks")]
    TooLarge {
        /// Blocks asked for.
        blocks: u32,
        /// Bytes of one block over all regions.
        block_bytes: u64,
    },
    /// The layout has another number of regions.
    #[error("the layout has {expected} regions, {found} were given; give one for each")]
    RegionCount {
        /// Regions of the layout.
        expected: usize,
        /// Regions given.
        found: usize,
    },
    /// A region is not a sound array of blocks.
    #[error("region {name}: {error}")]
    Region {
        /// The region's name in the layout.
        name: String,
        /// What is wrong.
        #[source]
        error: RegionError,
    },
    /// A region's blocks have not the length that the layout gives them.
    #[error(
        "region {name} has blocks of {found} bytes, its layout has {expected}; check block size \
         and dtype"
    )]
    BlockLen {
        /// The region's name in the layout.
        name: String,
        /// Bytes by the layout.
        expected: u64,
        /// Bytes given.
        found: u64,
    },
    /// Regions have different numbers of blocks.
    #[error(
        "region {name} has {found} blocks, the first region has {expected}; all regions of a pool \
         are cut into the same blocks"
    )]
    BlockCount {
        /// The region's name in the layout.
        name: String,
        /// Blocks of the first region.
        expected: u32,
        /// Blocks given.
        found: u32,
    },
    /// A region reaches beyond the memory that it should lie in.
    #[error(
        "region {name} ({len} bytes at {base:#x}) is longer than its mapping or outside of it; \
         check its base, stride and block count"
    )]
    OutsideMemory {
        /// The region's name in the layout.
        name: String,
        /// Its base address.
        base: u64,
        /// Its length, bytes.
        len: u64,
    },
    /// A region says that it is on another GPU than its memory.
    #[error("region {name} is declared on GPU {declared} and lies on GPU {found}")]
    WrongDevice {
        /// The region's name in the layout.
        name: String,
        /// Ordinal given.
        declared: u32,
        /// Ordinal of the GPU that it lies on.
        found: u32,
    },
    /// A region says that it is of one kind of memory and lies in another.
    #[error("region {name} is declared as {declared} and lies in memory of the other kind")]
    WrongKind {
        /// The region's name in the layout.
        name: String,
        /// The kind given.
        declared: MemKind,
    },
}

/// Why bytes of a block could not be read or written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AccessError {
    /// The pool has no such region.
    #[error("region {region} is outside the pool of {regions} regions")]
    NoSuchRegion {
        /// The region asked for.
        region: usize,
        /// How many there are.
        regions: usize,
    },
    /// These owned blocks have no such index.
    #[error("index {index} is outside these {len} owned blocks")]
    NoSuchIndex {
        /// The index asked for.
        index: usize,
        /// How many blocks there are.
        len: usize,
    },
    /// The range is not inside the block.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The memory refused.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A read may be writing into the block.
    #[error(
        "block {block} is the destination of a read that may still write into it; wait for the read"
    )]
    Claimed {
        /// The block.
        block: BlockId,
    },
}

/// The KV memory of one rank.
#[derive(Debug)]
pub struct KvPool {
    layout: Arc<KvLayout>,
    regions: Vec<RegionGeometry>,
    blocks: u32,
    memory: Arc<dyn Memory>,
    claims: Claims,
}

impl KvPool {
    /// Maps host memory for `blocks` blocks: one region after the other, each on a page of its own,
    /// blocks side by side. Zero-filled.
    ///
    /// # Errors
    /// [`PoolError`] when `blocks` is zero or the memory cannot be had.
    pub fn host(
        layout: impl Into<Arc<KvLayout>>,
        blocks: u32,
        options: &HostOptions,
    ) -> Result<(Arc<Self>, HostReport), PoolError> {
        let layout = layout.into();
        let (offsets, bytes) = side_by_side(&layout, blocks, REGION_ALIGN)?;
        let (memory, report) = HostMemory::new(bytes, options)?;
        let place = Place {
            base: memory.base(),
            mem: MemKind::Dram,
            device: 0,
        };
        let regions = place.regions(&layout, blocks, &offsets);
        Ok((
            Self::from_memory(layout, regions, Arc::new(memory))?,
            report,
        ))
    }

    /// Takes regions in host memory that an engine mapped. Memory on a GPU: [`on_gpu`](Self::on_gpu).
    ///
    /// # Errors
    /// [`PoolError`] when the regions are not those of the layout, or not inside the memory.
    pub fn foreign(
        layout: impl Into<Arc<KvLayout>>,
        regions: Vec<RegionGeometry>,
        memory: Arc<ForeignMemory>,
    ) -> Result<Arc<Self>, PoolError> {
        let layout = layout.into();
        let blocks = check(&layout, &regions)?;
        for (spec, region) in layout.regions().iter().zip(&regions) {
            let name = || spec.name.clone();
            let len = byte_len(region, name)?;
            if region.mem != MemKind::Dram {
                return Err(PoolError::WrongKind {
                    name: name(),
                    declared: region.mem,
                });
            }
            if !memory.holds(region.base, len) {
                return Err(PoolError::OutsideMemory {
                    name: name(),
                    base: region.base,
                    len,
                });
            }
        }
        Ok(Self::checked(layout, regions, blocks, memory))
    }

    /// Takes regions in any memory, such as a simulated one. Only the first and the last byte of a
    /// region are tried.
    ///
    /// # Errors
    /// [`PoolError`] when the regions are not those of the layout, or not inside the memory.
    pub fn from_memory(
        layout: impl Into<Arc<KvLayout>>,
        regions: Vec<RegionGeometry>,
        memory: Arc<dyn Memory>,
    ) -> Result<Arc<Self>, PoolError> {
        let layout = layout.into();
        let blocks = check(&layout, &regions)?;
        for (spec, region) in layout.regions().iter().zip(&regions) {
            let name = || spec.name.clone();
            let len = byte_len(region, name)?;
            let last = region.base.saturating_add(len).saturating_sub(1);
            for addr in [region.base, last] {
                if let Err(MemoryError::OutOfRange { .. }) = memory.read(addr, &mut [0]) {
                    return Err(PoolError::OutsideMemory {
                        name: name(),
                        base: region.base,
                        len,
                    });
                }
            }
        }
        Ok(Self::checked(layout, regions, blocks, memory))
    }

    fn checked(
        layout: Arc<KvLayout>,
        regions: Vec<RegionGeometry>,
        blocks: u32,
        memory: Arc<dyn Memory>,
    ) -> Arc<Self> {
        Arc::new(Self {
            layout,
            regions,
            blocks,
            memory,
            claims: Claims::new(blocks),
        })
    }

    /// How the pool is cut.
    #[must_use]
    pub fn layout(&self) -> &Arc<KvLayout> {
        &self.layout
    }

    /// Its regions, in the layout's order.
    #[must_use]
    pub fn regions(&self) -> &[RegionGeometry] {
        &self.regions
    }

    /// Number of blocks.
    #[must_use]
    pub fn block_count(&self) -> u32 {
        self.blocks
    }

    /// The memory behind it.
    #[must_use]
    pub fn memory(&self) -> &Arc<dyn Memory> {
        &self.memory
    }

    /// Blocks that are destinations of reads, quarantined ones included. Zero when nothing leaks and
    /// no read is under way.
    #[must_use]
    pub fn claimed_blocks(&self) -> usize {
        self.claims.count()
    }

    /// Copies bytes out of a block, from `offset` bytes into it.
    ///
    /// # Errors
    /// [`AccessError`] when they are not inside the block or the processor cannot reach them.
    pub fn read_block(
        &self,
        region: usize,
        block: BlockId,
        offset: u64,
        out: &mut [u8],
    ) -> Result<(), AccessError> {
        let addr = self.addr(region, block, offset, out.len())?;
        Ok(self.memory.read(addr, out)?)
    }

    /// Copies bytes into a block, from `offset` bytes into it. Refused while the block is the
    /// destination of a read; no claim begins while the bytes are copied.
    ///
    /// # Errors
    /// [`AccessError`] when they are not inside the block, the processor cannot reach them, or the
    /// block is claimed.
    pub fn write_block(
        &self,
        region: usize,
        block: BlockId,
        offset: u64,
        data: &[u8],
    ) -> Result<(), AccessError> {
        let addr = self.addr(region, block, offset, data.len())?;
        let claims = self.claims.hold();
        if claims.has(block) {
            return Err(AccessError::Claimed { block });
        }
        Ok(self.memory.write(addr, data)?)
    }

    /// Claims blocks as destinations of a read: all of them, or none.
    ///
    /// # Errors
    /// [`ClaimError`], with the list handed back, when a block is outside the pool, listed twice or
    /// claimed already.
    pub fn claim(self: &Arc<Self>, ids: Vec<BlockId>) -> Result<OwnedBlocks, ClaimError> {
        match self.claims.claim(&ids) {
            Ok(()) => Ok(OwnedBlocks {
                runs: BlockRuns::from_ids(&ids).into(),
                ids,
                pool: Arc::clone(self),
            }),
            Err((block, why)) => Err(ClaimError { block, why, ids }),
        }
    }

    fn addr(
        &self,
        region: usize,
        block: BlockId,
        offset: u64,
        len: usize,
    ) -> Result<u64, AccessError> {
        let geometry = self.regions.get(region).ok_or(AccessError::NoSuchRegion {
            region,
            regions: self.regions.len(),
        })?;
        Ok(geometry.byte_addr(block, offset, len as u64)?)
    }
}

/// Blocks that one owner may have written into, and nobody else: the destinations of a read. Dropping
/// it gives the claim up, so whoever knows that bytes may still arrive keeps it.
#[derive(Debug)]
#[must_use = "dropping the blocks gives the claim on them up"]
pub struct OwnedBlocks {
    ids: Vec<BlockId>,
    // Boxed, because errors carry the blocks and are moved about.
    runs: Box<BlockRuns>,
    pool: Arc<KvPool>,
}

impl OwnedBlocks {
    /// The blocks, in the order in which they were claimed.
    #[must_use]
    pub fn ids(&self) -> &[BlockId] {
        &self.ids
    }

    /// The same blocks as runs.
    #[must_use]
    pub fn runs(&self) -> &BlockRuns {
        &self.runs
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The pool that they belong to.
    #[must_use]
    pub fn pool(&self) -> &Arc<KvPool> {
        &self.pool
    }

    /// Gives the claim up and returns the blocks.
    #[must_use]
    pub fn into_ids(mut self) -> Vec<BlockId> {
        let ids = std::mem::take(&mut self.ids);
        self.pool.claims.release(&ids);
        ids
    }

    /// Splits off the blocks from `at` on (none when there are fewer). Both parts stay claimed.
    pub fn split_off(&mut self, at: usize) -> Self {
        let at = at.min(self.ids.len());
        if at == self.ids.len() {
            return Self {
                runs: Box::default(),
                ids: Vec::new(),
                pool: Arc::clone(&self.pool),
            };
        }
        let split = Self {
            runs: self
                .runs
                .slice(at..self.ids.len())
                .unwrap_or_default()
                .into(),
            ids: self.ids.split_off(at),
            pool: Arc::clone(&self.pool),
        };
        *self.runs = self.runs.first_n(at);
        split
    }

    /// Copies bytes out of the `index`-th block, from `offset` bytes into it.
    ///
    /// # Errors
    /// [`AccessError`] as for [`KvPool::read_block`].
    pub fn read_at(
        &self,
        index: usize,
        region: usize,
        offset: u64,
        out: &mut [u8],
    ) -> Result<(), AccessError> {
        self.pool
            .read_block(region, self.id_at(index)?, offset, out)
    }

    /// Copies bytes into the `index`-th block, from `offset` bytes into it.
    ///
    /// # Errors
    /// [`AccessError`] when they are not inside the block or the processor cannot reach them.
    pub fn write_at(
        &mut self,
        index: usize,
        region: usize,
        offset: u64,
        data: &[u8],
    ) -> Result<(), AccessError> {
        let block = self.id_at(index)?;
        let addr = self.pool.addr(region, block, offset, data.len())?;
        Ok(self.pool.memory.write(addr, data)?)
    }

    fn id_at(&self, index: usize) -> Result<BlockId, AccessError> {
        let len = self.ids.len();
        let id = self.ids.get(index).copied();
        id.ok_or(AccessError::NoSuchIndex { index, len })
    }
}

impl Drop for OwnedBlocks {
    fn drop(&mut self) {
        self.pool.claims.release(&self.ids);
    }
}

/// Checks regions against the layout; returns their number of blocks.
fn check(layout: &KvLayout, regions: &[RegionGeometry]) -> Result<u32, PoolError> {
    let specs = layout.regions();
    let first = match regions.first() {
        Some(first) if regions.len() == specs.len() => first.block_count,
        _ => {
            return Err(PoolError::RegionCount {
                expected: specs.len(),
                found: regions.len(),
            });
        }
    };
    for (spec, region) in specs.iter().zip(regions) {
        let name = || spec.name.clone();
        region.validate().map_err(|error| PoolError::Region {
            name: name(),
            error,
        })?;
        if region.block_len != spec.block_len {
            return Err(PoolError::BlockLen {
                name: name(),
                expected: spec.block_len,
                found: region.block_len,
            });
        }
        if region.block_count != first {
            return Err(PoolError::BlockCount {
                name: name(),
                expected: first,
                found: region.block_count,
            });
        }
    }
    Ok(first)
}

fn byte_len(region: &RegionGeometry, name: impl Fn() -> String) -> Result<u64, PoolError> {
    region.byte_len().map_err(|error| PoolError::Region {
        name: name(),
        error,
    })
}

/// Where regions lie side by side.
struct Place {
    base: u64,
    mem: MemKind,
    device: u32,
}

impl Place {
    fn regions(&self, layout: &KvLayout, blocks: u32, offsets: &[u64]) -> Vec<RegionGeometry> {
        let specs = layout.regions().iter().zip(offsets);
        specs
            .map(|(spec, offset)| RegionGeometry {
                base: self.base.saturating_add(*offset),
                block_len: spec.block_len,
                block_stride: spec.block_len,
                block_count: blocks,
                mem: self.mem,
                device: self.device,
            })
            .collect()
    }
}

/// Where each region of `blocks` blocks begins, one after the other, and the bytes of all.
fn side_by_side(layout: &KvLayout, blocks: u32, align: u64) -> Result<(Vec<u64>, u64), PoolError> {
    let mut offsets = Vec::with_capacity(layout.regions().len());
    let mut bytes = 0_u64;
    for spec in layout.regions() {
        offsets.push(bytes);
        bytes = spec
            .block_len
            .checked_mul(u64::from(blocks))
            .and_then(|len| bytes.checked_add(len))
            .and_then(|end| end.checked_next_multiple_of(align))
            .ok_or_else(|| PoolError::TooLarge {
                blocks,
                block_bytes: layout.block_bytes(),
            })?;
    }
    Ok((offsets, bytes))
}

mod gpu;
#[cfg(test)]
mod tests;

//! Pools on a GPU.

use std::sync::Arc;

use super::{KvPool, Place, PoolError, byte_len, check, side_by_side};
use crate::layout::{KvLayout, MemKind, RegionGeometry};
use crate::memory::cuda::{CudaMemory, CudaOptions, CudaReport, GPU_PAGE};

impl KvPool {
    /// Allocates memory on a GPU for `blocks` blocks: one region after the other, each on a page of its own, blocks side by
    /// side. Zero-filled.
    ///
    /// # Errors
    /// [`PoolError`] when `blocks` is zero, there is no such GPU, or its memory cannot be had.
    pub fn cuda(
        layout: impl Into<Arc<KvLayout>>,
        blocks: u32,
        options: &CudaOptions,
    ) -> Result<(Arc<Self>, CudaReport), PoolError> {
        let layout = layout.into();
        let (offsets, bytes) = side_by_side(&layout, blocks, GPU_PAGE)?;
        let (memory, report) = CudaMemory::new(bytes, options)?;
        let place = Place {
            base: memory.base(),
            mem: MemKind::Vram,
            device: options.device,
        };
        let regions = place.regions(&layout, blocks, &offsets);
        let pool = Self::on_gpu(layout, regions, Arc::new(memory))?;
        Ok((pool, report))
    }

    /// Takes regions in memory on a GPU, such as an engine's own tensors
    /// ([`CudaMemory::foreign`](crate::memory::cuda::CudaMemory::foreign)).
    ///
    /// # Errors
    /// [`PoolError`] when the regions are not those of the layout, or not inside the memory.
    pub fn on_gpu(
        layout: impl Into<Arc<KvLayout>>,
        regions: Vec<RegionGeometry>,
        memory: Arc<CudaMemory>,
    ) -> Result<Arc<Self>, PoolError> {
        let layout = layout.into();
        let blocks = check(&layout, &regions)?;
        let found = memory.device().ordinal();
        for (spec, region) in layout.regions().iter().zip(&regions) {
            let name = || spec.name.clone();
            let len = byte_len(region, name)?;
            if region.mem != MemKind::Vram {
                return Err(PoolError::WrongKind {
                    name: name(),
                    declared: region.mem,
                });
            }
            if region.device != found {
                return Err(PoolError::WrongDevice {
                    name: name(),
                    declared: region.device,
                    found,
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
}

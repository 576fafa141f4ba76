//! Memory that breaks its word: it can be unmapped while a pool and its registrations use it.

use std::sync::{Arc, RwLock};

use kv_xfer::layout::{MemKind, RegionGeometry};
use kv_xfer::memory::{HostMemory, HostOptions, KvPool, Memory, MemoryError};

use super::content::Shape;

/// Host memory until it is unmapped, nothing after that.
#[derive(Debug)]
pub struct Vanishing(RwLock<Option<HostMemory>>);

impl Vanishing {
    pub fn unmap(&self) {
        *self.0.write().unwrap() = None;
    }

    fn with<T>(
        &self,
        use_it: impl FnOnce(&HostMemory) -> Result<T, MemoryError>,
    ) -> Result<T, MemoryError> {
        let gone = MemoryError::OutOfRange { addr: 0, len: 0 };
        self.0.read().unwrap().as_ref().map_or(Err(gone), use_it)
    }
}

impl Memory for Vanishing {
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), MemoryError> {
        self.with(|memory| memory.read(addr, out))
    }

    fn write(&self, addr: u64, data: &[u8]) -> Result<(), MemoryError> {
        self.with(|memory| memory.write(addr, data))
    }
}

/// A pool whose memory can be unmapped under it.
pub fn vanishing_pool(shape: Shape, blocks: u32) -> (Arc<KvPool>, Arc<Vanishing>) {
    let layout = shape.layout();
    let len = |block_len: u64| (block_len * u64::from(blocks)).next_multiple_of(4096);
    let bytes = layout
        .regions()
        .iter()
        .map(|spec| len(spec.block_len))
        .sum();
    let (memory, _) = HostMemory::new(bytes, &HostOptions::default()).unwrap();
    let mut base = memory.base();
    let mut regions = Vec::new();
    for spec in layout.regions() {
        regions.push(RegionGeometry {
            base,
            block_len: spec.block_len,
            block_stride: spec.block_len,
            block_count: blocks,
            mem: MemKind::Dram,
            device: 0,
        });
        base += len(spec.block_len);
    }
    let memory = Arc::new(Vanishing(RwLock::new(Some(memory))));
    let pool = KvPool::from_memory(layout, regions, Arc::clone(&memory) as Arc<dyn Memory>);
    (pool.unwrap(), memory)
}

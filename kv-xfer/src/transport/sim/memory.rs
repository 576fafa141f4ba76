//! The memory of the simulated fabric.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use parking_lot::RwLock;

use crate::ids::WordSlot;
use crate::layout::{MemKind, RegionGeometry};
use crate::memory::{ControlWords, Memory, MemoryError};

/// Virtual memory of the fabric.
pub struct SimMemory {
    base: u64,
    bytes: RwLock<Vec<u8>>,
}

impl SimMemory {
    pub(super) fn new(base: u64, len: usize) -> Self {
        Self {
            base,
            bytes: RwLock::new(vec![0; len]),
        }
    }

    /// Address of its first byte.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.base
    }

    fn range(&self, addr: u64, len: usize) -> Result<std::ops::Range<usize>, MemoryError> {
        let out = MemoryError::OutOfRange {
            addr,
            len: len as u64,
        };
        let start = addr
            .checked_sub(self.base)
            .and_then(|offset| usize::try_from(offset).ok())
            .ok_or(out)?;
        let end = start.checked_add(len).ok_or(out)?;
        if end > self.bytes.read().len() {
            Err(out)
        } else {
            Ok(start..end)
        }
    }
}

impl fmt::Debug for SimMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimMemory({:#x})", self.base)
    }
}

impl Memory for SimMemory {
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), MemoryError> {
        let range = self.range(addr, out.len())?;
        if let Some(bytes) = self.bytes.read().get(range) {
            out.copy_from_slice(bytes);
        }
        Ok(())
    }

    fn write(&self, addr: u64, data: &[u8]) -> Result<(), MemoryError> {
        let range = self.range(addr, data.len())?;
        if let Some(bytes) = self.bytes.write().get_mut(range) {
            bytes.copy_from_slice(data);
        }
        Ok(())
    }
}

/// A table of words in it.
#[derive(Debug)]
pub(super) struct SimWords {
    memory: Arc<SimMemory>,
    slots: u32,
}

impl SimWords {
    pub(super) fn new(memory: Arc<SimMemory>, slots: u32) -> Self {
        Self { memory, slots }
    }
}

impl ControlWords for SimWords {
    fn region(&self) -> RegionGeometry {
        RegionGeometry {
            base: self.memory.base,
            block_len: 8,
            block_stride: 8,
            block_count: self.slots,
            mem: MemKind::Dram,
            device: 0,
        }
    }

    fn load(&self, slot: WordSlot) -> Option<u64> {
        let mut word = [0; 8];
        let addr = self
            .memory
            .base
            .checked_add(u64::from(slot.0).checked_mul(8)?)?;
        self.memory.read(addr, &mut word).ok()?;
        fence(Ordering::SeqCst);
        Some(u64::from_le_bytes(word))
    }

    fn store(&self, slot: WordSlot, value: u64) -> bool {
        let addr = self
            .memory
            .base
            .saturating_add(u64::from(slot.0).saturating_mul(8));
        fence(Ordering::SeqCst);
        let stored = self.memory.write(addr, &value.to_le_bytes()).is_ok();
        fence(Ordering::SeqCst);
        stored
    }
}

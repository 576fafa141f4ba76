//! The table of lease words in host memory.

use std::sync::atomic::Ordering;

use rustix::mm::MapFlags;

use super::ControlWords;
use super::host::HostMemoryError;
use super::mapping::{Mapping, WORD};
use super::publish::publish;
use crate::ids::WordSlot;
use crate::layout::{MemKind, RegionGeometry};

/// 64-bit words, all zero at first, in a page-aligned mapping of their own.
#[derive(Debug)]
pub struct HostWords {
    mapping: Mapping,
    slots: u32,
}

impl HostWords {
    /// A table of `slots` words.
    ///
    /// # Errors
    /// [`HostMemoryError`] when `slots` is zero or the memory cannot be had.
    pub fn new(slots: u32) -> Result<Self, HostMemoryError> {
        let bytes = u64::from(slots) * WORD as u64;
        let len = usize::try_from(bytes)
            .ok()
            .filter(|len| *len > 0)
            .ok_or(HostMemoryError::BadSize { bytes })?;
        let mapping =
            Mapping::new(len, MapFlags::empty()).map_err(|errno| HostMemoryError::Map {
                bytes,
                errno: errno.raw_os_error(),
            })?;
        Ok(Self { mapping, slots })
    }
}

impl ControlWords for HostWords {
    fn region(&self) -> RegionGeometry {
        RegionGeometry {
            base: self.mapping.base().addr().get() as u64,
            block_len: WORD as u64,
            block_stride: WORD as u64,
            block_count: self.slots,
            mem: MemKind::Dram,
            device: 0,
        }
    }

    fn load(&self, slot: WordSlot) -> Option<u64> {
        let index = usize::try_from(slot.0).ok()?;
        Some(self.mapping.words().get(index)?.load(Ordering::Acquire))
    }

    fn store(&self, slot: WordSlot, value: u64) -> bool {
        let word = usize::try_from(slot.0)
            .ok()
            .and_then(|index| self.mapping.words().get(index));
        let Some(word) = word else { return false };
        publish(word, value);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_kept_and_bounded() {
        let words = HostWords::new(3).unwrap();
        assert_eq!(words.load(WordSlot(2)), Some(0));
        assert!(words.store(WordSlot(2), 77));
        assert_eq!(words.load(WordSlot(2)), Some(77));
        assert_eq!(words.load(WordSlot(1)), Some(0));
        assert_eq!(words.load(WordSlot(3)), None);
        assert!(!words.store(WordSlot(3), 1));
        assert!(!words.store(WordSlot(u32::MAX), 1));
        let region = words.region();
        assert_eq!(region.base % 4096, 0);
        assert_eq!((region.block_len, region.block_count), (8, 3));
        assert!(region.validate().is_ok());
    }

    #[test]
    fn no_words_are_refused() {
        assert!(HostWords::new(0).is_err());
    }
}

//! Host memory that somebody else mapped: an engine's own tensors.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;

use thiserror::Error;

use super::host::out_of_range;
use super::mapping::{WORD, Words};
use super::maps::{MapsError, mapped_until};
use super::{Memory, MemoryError};

/// Why foreign memory was refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ForeignError {
    /// No range was given.
    #[error("no memory range was given; give at least one")]
    NoRanges,
    /// A range is empty or wraps the address space.
    #[error("range {index} ({len} bytes at {addr:#x}) is empty or wraps the address space")]
    BadRange {
        /// Position in the list.
        index: usize,
        /// First address.
        addr: u64,
        /// Length, bytes.
        len: u64,
    },
    /// A host range does not start and end on a multiple of eight bytes.
    #[error(
        "range {index} ({len} bytes at {addr:#x}) does not start and end on a multiple of 8 bytes; \
         give the range of the whole allocation"
    )]
    Misaligned {
        /// Position in the list.
        index: usize,
        /// First address.
        addr: u64,
        /// Length, bytes.
        len: u64,
    },
    /// A host range reaches beyond what is mapped for reading and writing.
    #[error(
        "range {index} ({len} bytes at {addr:#x}) is longer than its mapping: only {mapped} bytes \
         are readable and writable there; check pointer and length"
    )]
    LongerThanMapping {
        /// Position in the list.
        index: usize,
        /// First address.
        addr: u64,
        /// Length given, bytes.
        len: u64,
        /// Bytes from the first address on that are mapped readable and writable.
        mapped: u64,
    },
    /// The process's mappings could not be read.
    #[error("cannot check the ranges against this process's mappings")]
    Maps(#[from] MapsError),
}

#[derive(Debug, Clone, Copy)]
struct Range {
    addr: u64,
    len: u64,
    base: NonNull<u8>,
}

/// Ranges that another owner mapped, and that owner, kept alive for as long as this lives.
pub struct ForeignMemory {
    /// Sorted by address.
    ranges: Vec<Range>,
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: the pointers name memory without thread affinity (contract of `new`) and are accessed
// through `Words`, whose accesses are atomic; the owner is `Send` and `Sync`.
unsafe impl Send for ForeignMemory {}
// SAFETY: as above.
unsafe impl Sync for ForeignMemory {}

impl ForeignMemory {
    /// Takes host ranges, each a first byte and a length in bytes. Ranges are checked against the
    /// process's mappings as they are now, so that a range longer than its mapping is refused here
    /// and not met as a crash; a range that reaches into a neighbour's mapping cannot be told apart.
    ///
    /// # Safety
    /// For as long as `owner` lives, every range must stay mapped readable and writable and be one
    /// allocation that the pointer may access. Other code may access the bytes only while no read
    /// lands in them and no call on this memory touches them (or through atomics).
    ///
    /// # Errors
    /// [`ForeignError`] naming the range at fault.
    pub unsafe fn new(
        ranges: Vec<(NonNull<u8>, usize)>,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Self, ForeignError> {
        let mut checked = Vec::with_capacity(ranges.len());
        for (index, (base, len)) in ranges.into_iter().enumerate() {
            let (addr, len) = (base.addr().get() as u64, len as u64);
            let end = check_range(index, addr, len)?;
            if addr % WORD as u64 != 0 || len % WORD as u64 != 0 {
                return Err(ForeignError::Misaligned { index, addr, len });
            }
            let until = mapped_until(addr)?;
            if until < end {
                return Err(ForeignError::LongerThanMapping {
                    index,
                    addr,
                    len,
                    mapped: until.saturating_sub(addr),
                });
            }
            base.as_ptr().expose_provenance();
            checked.push(Range { addr, len, base });
        }
        Self::from_ranges(checked, owner)
    }

    fn from_ranges(
        mut ranges: Vec<Range>,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Self, ForeignError> {
        if ranges.is_empty() {
            return Err(ForeignError::NoRanges);
        }
        ranges.sort_unstable_by_key(|range| range.addr);
        Ok(Self {
            ranges,
            _owner: owner,
        })
    }

    /// Whether one range holds `len` bytes at `addr`.
    #[must_use]
    pub fn holds(&self, addr: u64, len: u64) -> bool {
        self.find(addr, len).is_some()
    }

    /// The range that holds `len` bytes at `addr`, and their offset in it.
    fn find(&self, addr: u64, len: u64) -> Option<(&Range, u64)> {
        let after = self.ranges.partition_point(|range| range.addr <= addr);
        let range = self.ranges.get(after.checked_sub(1)?)?;
        let offset = addr - range.addr;
        let fits = offset.checked_add(len).is_some_and(|end| end <= range.len);
        fits.then_some((range, offset))
    }

    fn words(&self, addr: u64, len: usize) -> Result<(Words<'_>, usize), MemoryError> {
        let refuse = out_of_range(addr, len);
        let (range, offset) = self.find(addr, len as u64).ok_or(refuse)?;
        let range_len = usize::try_from(range.len).map_err(|_| refuse)?;
        let offset = usize::try_from(offset).map_err(|_| refuse)?;
        // SAFETY: the range was checked to be aligned, and by the contract of `new` it stays mapped
        // while the owner lives, which is at least as long as `self`.
        Ok((unsafe { Words::new(range.base, range_len) }, offset))
    }
}

impl Memory for ForeignMemory {
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), MemoryError> {
        let (words, offset) = self.words(addr, out.len())?;
        let refuse = out_of_range(addr, out.len());
        words.read(offset, out).ok_or(refuse)
    }

    fn write(&self, addr: u64, data: &[u8]) -> Result<(), MemoryError> {
        let (words, offset) = self.words(addr, data.len())?;
        words
            .write(offset, data)
            .ok_or(out_of_range(addr, data.len()))
    }
}

impl fmt::Debug for ForeignMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForeignMemory")
            .field("ranges", &self.ranges)
            .finish_non_exhaustive()
    }
}

fn check_range(index: usize, addr: u64, len: u64) -> Result<u64, ForeignError> {
    addr.checked_add(len)
        .filter(|_| len > 0 && isize::try_from(len).is_ok())
        .ok_or(ForeignError::BadRange { index, addr, len })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::mm::MapFlags;

    use super::super::mapping::Mapping;
    use super::*;

    struct Owner {
        _mapping: Mapping,
        gone: Arc<AtomicBool>,
    }

    impl Drop for Owner {
        fn drop(&mut self) {
            self.gone.store(true, Ordering::SeqCst);
        }
    }

    #[test]
    fn keeps_its_owner_and_its_bounds() {
        let gone = Arc::new(AtomicBool::new(false));
        let mapping = Mapping::new(8192, MapFlags::empty()).unwrap();
        let base = mapping.base();
        let owner = Box::new(Owner {
            _mapping: mapping,
            gone: gone.clone(),
        });
        // SAFETY: the first page of the owner's mapping, which nobody else accesses.
        let memory = unsafe { ForeignMemory::new(vec![(base, 4096)], owner) }.unwrap();
        let addr = base.addr().get() as u64;
        memory.write(addr + 4094, &[1, 2]).unwrap();
        let mut out = [0; 2];
        memory.read(addr + 4094, &mut out).unwrap();
        assert_eq!(out, [1, 2]);
        assert!(memory.read(addr + 4095, &mut out).is_err());
        assert!(memory.read(addr - 1, &mut out).is_err());
        assert!(memory.read(u64::MAX, &mut out).is_err());
        assert!(memory.holds(addr, 4096));
        assert!(!memory.holds(addr, u64::MAX));
        assert!(!gone.load(Ordering::SeqCst));
        drop(memory);
        assert!(gone.load(Ordering::SeqCst));
    }

    #[test]
    fn a_range_longer_than_its_mapping_is_refused() {
        // An unmapped page behind the mapping, so that no neighbour can follow it.
        let mapping = Mapping::new(8192, MapFlags::empty()).unwrap();
        let base = mapping.base();
        // SAFETY: takes access to the second page away; nothing uses it.
        unsafe {
            rustix::mm::mprotect(
                base.as_ptr().add(4096).cast(),
                4096,
                rustix::mm::MprotectFlags::empty(),
            )
        }
        .unwrap();
        // SAFETY: refused before any access.
        let result = unsafe { ForeignMemory::new(vec![(base, 8192)], Box::new(())) };
        assert!(matches!(
            result,
            Err(ForeignError::LongerThanMapping {
                index: 0,
                mapped: 4096,
                len: 8192,
                ..
            })
        ));
        // SAFETY: the first page is mapped as long as `mapping`, which outlives the value.
        assert!(unsafe { ForeignMemory::new(vec![(base, 4096)], Box::new(())) }.is_ok());
    }

    #[test]
    fn bad_ranges_are_typed_errors() {
        let odd = NonNull::new(std::ptr::without_provenance_mut::<u8>(0x1001)).unwrap();
        let null_page = NonNull::new(std::ptr::without_provenance_mut::<u8>(8)).unwrap();
        // SAFETY: all are refused before any access.
        unsafe {
            assert!(matches!(
                ForeignMemory::new(vec![], Box::new(())),
                Err(ForeignError::NoRanges)
            ));
            assert!(matches!(
                ForeignMemory::new(vec![(odd, 8)], Box::new(())),
                Err(ForeignError::Misaligned { .. })
            ));
            assert!(matches!(
                ForeignMemory::new(vec![(null_page, usize::MAX)], Box::new(())),
                Err(ForeignError::BadRange { .. })
            ));
            assert!(matches!(
                ForeignMemory::new(vec![(null_page, 8)], Box::new(())),
                Err(ForeignError::LongerThanMapping { mapped: 0, .. })
            ));
        }
    }
}

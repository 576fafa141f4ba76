//! Host memory that we map ourselves.

use std::fmt;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, madvise, mlock};
use thiserror::Error;

use super::mapping::Mapping;
use super::{Memory, MemoryError};

/// Size of a huge page on the machines that this runs on, bytes. Lengths are rounded up to it when
/// huge pages are wished for.
const HUGE_PAGE: usize = 2 << 20;
/// Size of a small page, bytes.
const PAGE: usize = 4096;

/// What is wished for beyond plain memory. A wish that the machine refuses is reported, not an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct HostOptions {
    /// Ask for huge pages: reserved ones first, transparent ones where none are reserved.
    pub huge_pages: bool,
    /// Ask that the memory be locked, so that it is never paged out. Touches every page now.
    pub lock: bool,
    /// Ask that every page be there from the start, so that no read waits for the kernel to find and
    /// clear one (several times slower than the read itself). Takes a second for each few GB.
    pub populate: bool,
}

impl HostOptions {
    /// With or without a wish for huge pages.
    #[must_use]
    pub fn huge_pages(mut self, wish: bool) -> Self {
        self.huge_pages = wish;
        self
    }

    /// With or without a wish for locked memory.
    #[must_use]
    pub fn lock(mut self, wish: bool) -> Self {
        self.lock = wish;
        self
    }

    /// With or without a wish for pages that are there from the start.
    #[must_use]
    pub fn populate(mut self, wish: bool) -> Self {
        self.populate = wish;
        self
    }
}

/// What became of a wish.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wish {
    /// It was not made.
    NotAsked,
    /// It was granted.
    Granted,
    /// Second best was granted.
    Partly {
        /// What was got instead and why.
        instead: String,
    },
    /// It was refused; the memory works without.
    Refused {
        /// Why, and what would help.
        why: String,
    },
}

impl fmt::Display for Wish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAsked => f.write_str("not asked for"),
            Self::Granted => f.write_str("yes"),
            Self::Partly { instead } => f.write_str(instead),
            Self::Refused { why } => write!(f, "no: {why}"),
        }
    }
}

/// What the machine gave.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostReport {
    /// Bytes mapped.
    pub bytes: u64,
    /// Whether huge pages back it.
    pub huge_pages: Wish,
    /// Whether it is locked.
    pub locked: Wish,
    /// Whether every page is there from the start.
    pub populated: Wish,
}

/// Why host memory could not be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum HostMemoryError {
    /// Zero bytes, or more than an address can count.
    #[error(
        "a pool of {bytes} bytes cannot be mapped; ask for 1 to {} bytes",
        isize::MAX
    )]
    BadSize {
        /// Bytes asked for.
        bytes: u64,
    },
    /// The kernel refused.
    #[error(
        "the kernel refused to map {bytes} bytes ({}); make the pool smaller or free memory",
        std::io::Error::from_raw_os_error(*errno)
    )]
    Map {
        /// Bytes asked for.
        bytes: u64,
        /// Its error number.
        errno: i32,
    },
}

/// Zero-filled anonymous memory, page-aligned, unmapped when dropped.
#[derive(Debug)]
pub struct HostMemory {
    mapping: Mapping,
}

impl HostMemory {
    /// Maps at least `bytes` bytes.
    ///
    /// # Errors
    /// [`HostMemoryError`] when there is no such memory. Wishes that are refused are no error.
    pub fn new(bytes: u64, options: &HostOptions) -> Result<(Self, HostReport), HostMemoryError> {
        let granule = if options.huge_pages { HUGE_PAGE } else { PAGE };
        let len = usize::try_from(bytes)
            .ok()
            .filter(|len| *len > 0)
            .and_then(|len| len.checked_next_multiple_of(granule))
            .filter(|len| isize::try_from(*len).is_ok())
            .ok_or(HostMemoryError::BadSize { bytes })?;
        let (mapping, huge_pages) =
            map(len, options.huge_pages).map_err(|errno| HostMemoryError::Map {
                bytes,
                errno: errno.raw_os_error(),
            })?;
        let locked = if options.lock {
            lock(&mapping)
        } else {
            Wish::NotAsked
        };
        let populated = match (options.populate, &locked) {
            (false, _) => Wish::NotAsked,
            // Locking has found every page.
            (true, Wish::Granted) => Wish::Granted,
            (true, _) => populate(&mapping),
        };
        let report = HostReport {
            bytes: len as u64,
            huge_pages,
            locked,
            populated,
        };
        Ok((Self { mapping }, report))
    }

    /// Address of the first byte.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.mapping.base().addr().get() as u64
    }

    /// Bytes mapped.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.mapping.len() as u64
    }

    fn offset(&self, addr: u64, len: usize) -> Result<usize, MemoryError> {
        addr.checked_sub(self.base())
            .and_then(|offset| usize::try_from(offset).ok())
            .filter(|offset| *offset <= self.mapping.len())
            .ok_or(out_of_range(addr, len))
    }
}

impl Memory for HostMemory {
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), MemoryError> {
        let len = out.len();
        let offset = self.offset(addr, len)?;
        self.mapping
            .words()
            .read(offset, out)
            .ok_or(out_of_range(addr, len))
    }

    fn write(&self, addr: u64, data: &[u8]) -> Result<(), MemoryError> {
        let offset = self.offset(addr, data.len())?;
        self.mapping
            .words()
            .write(offset, data)
            .ok_or(out_of_range(addr, data.len()))
    }
}

pub(super) fn out_of_range(addr: u64, len: usize) -> MemoryError {
    MemoryError::OutOfRange {
        addr,
        len: len as u64,
    }
}

/// Maps with huge pages if wished: reserved ones, else transparent ones, else small ones.
fn map(len: usize, huge_pages: bool) -> Result<(Mapping, Wish), Errno> {
    if !huge_pages {
        return Ok((Mapping::new(len, MapFlags::empty())?, Wish::NotAsked));
    }
    let reserved = match Mapping::new(len, MapFlags::HUGETLB) {
        Ok(mapping) => return Ok((mapping, Wish::Granted)),
        Err(errno) => errno,
    };
    let mapping = Mapping::new(len, MapFlags::empty())?;
    // SAFETY: advice about a mapping that we own; this one changes how it is backed, not what it holds.
    let advised = unsafe {
        madvise(
            mapping.base().as_ptr().cast(),
            mapping.len(),
            Advice::LinuxHugepage,
        )
    };
    let wish = match advised {
        Ok(()) => Wish::Partly {
            instead: format!(
                "transparent huge pages where the kernel finds them (no reserved ones: {reserved}; \
                 raise vm.nr_hugepages to get them)"
            ),
        },
        Err(errno) => Wish::Refused {
            why: format!(
                "no reserved huge pages ({reserved}) and no transparent ones ({errno}); raise \
                 vm.nr_hugepages or set transparent_hugepage to madvise"
            ),
        },
    };
    Ok((mapping, wish))
}

fn lock(mapping: &Mapping) -> Wish {
    // SAFETY: locks pages of a mapping that we own; unmapping unlocks them.
    match unsafe { mlock(mapping.base().as_ptr().cast(), mapping.len()) } {
        Ok(()) => Wish::Granted,
        Err(errno) => Wish::Refused {
            why: format!("{errno}; raise the limit on locked memory (ulimit -l)"),
        },
    }
}

fn populate(mapping: &Mapping) -> Wish {
    // SAFETY: advice about a mapping that we own; this one makes its pages present and writable and
    // changes nothing that they hold.
    let advised = unsafe {
        madvise(
            mapping.base().as_ptr().cast(),
            mapping.len(),
            Advice::LinuxPopulateWrite,
        )
    };
    match advised {
        Ok(()) => Wish::Granted,
        Err(errno) => Wish::Refused {
            why: format!("{errno}; it needs Linux 5.14 and enough free memory"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_zero_filled_and_bounded() {
        let (memory, report) = HostMemory::new(5000, &HostOptions::default()).unwrap();
        assert_eq!(report.bytes, 8192);
        assert_eq!(report.huge_pages, Wish::NotAsked);
        assert_eq!(report.locked, Wish::NotAsked);
        assert_eq!(report.populated, Wish::NotAsked);
        let mut all = vec![1; 8192];
        memory.read(memory.base(), &mut all).unwrap();
        assert!(all.iter().all(|byte| *byte == 0));
        memory.write(memory.base() + 8190, &[1, 2]).unwrap();
        for (addr, len) in [
            (memory.base() + 8191, 2),
            (memory.base() - 1, 1),
            (memory.base() + 8193, 0),
            (u64::MAX, 1),
            (0, 1),
        ] {
            assert!(memory.write(addr, &vec![0; len]).is_err(), "{addr:#x}");
            assert!(memory.read(addr, &mut vec![0; len]).is_err(), "{addr:#x}");
        }
    }

    #[test]
    fn impossible_sizes_are_typed_errors() {
        let options = HostOptions::default();
        for bytes in [0, u64::MAX, 1 << 63] {
            assert!(matches!(
                HostMemory::new(bytes, &options),
                Err(HostMemoryError::BadSize { .. })
            ));
        }
        assert!(matches!(
            HostMemory::new(1 << 60, &options),
            Err(HostMemoryError::Map { .. })
        ));
    }

    #[test]
    fn wishes_are_answered() {
        let options = HostOptions::default()
            .huge_pages(true)
            .lock(true)
            .populate(true);
        let (memory, report) = HostMemory::new(3 << 20, &options).unwrap();
        assert_eq!(report.bytes, 4 << 20);
        assert_ne!(report.huge_pages, Wish::NotAsked);
        assert_ne!(report.locked, Wish::NotAsked);
        assert_ne!(report.populated, Wish::NotAsked);
        assert!(!report.huge_pages.to_string().is_empty());
        memory.write(memory.base(), &[1]).unwrap();
    }
}

//! An anonymous mapping that is unmapped when dropped, and copies in and out of memory that others
//! write at the same time.
//!
//! A pool's memory is written by the transport (another process, a NIC) and read and written by any
//! thread of the engine. So that no access of ours is a data race, whatever the others do, every one
//! of them is a relaxed atomic access of an aligned 64-bit word; all of them have the same size and
//! none overlaps another in part. Bytes at the edge of a range are merged into their word.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// Bytes of a word, and the alignment that every range of reachable memory must have.
pub(super) const WORD: usize = size_of::<u64>();

/// A private, zero-filled, page-aligned mapping.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory without thread affinity, and shared access to it goes through
// `Words`, whose accesses are atomic.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes (not zero), with extra mapping flags.
    pub(super) fn new(len: usize, flags: MapFlags) -> Result<Self, Errno> {
        // SAFETY: a new anonymous mapping at an address that the kernel chooses replaces nothing.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | flags,
            )
        }?;
        // The transport is given addresses as numbers.
        base.expose_provenance();
        match NonNull::new(base.cast::<u8>()) {
            Some(base) => Ok(Self { base, len }),
            None => Err(Errno::NOMEM),
        }
    }

    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The mapping's words.
    pub(super) fn words(&self) -> Words<'_> {
        // SAFETY: the mapping is page-aligned, spans `len` bytes and lives as long as `self`; a
        // trailing part of a word is cut off. It is only accessed through `Words`.
        unsafe { Words::new(self.base, self.len / WORD * WORD) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are those of a mapping that this value made and alone owns; every
        // `Words` borrowed from it has ended.
        let result = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        if let Err(error) = result {
            tracing::error!(%error, len = self.len, "could not unmap pool memory; it stays mapped");
        }
    }
}

/// A range of memory as words that anybody may read and write at any time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Words<'a> {
    words: &'a [AtomicU64],
}

impl<'a> Words<'a> {
    /// # Safety
    /// `base` must be aligned to [`WORD`], `len` a multiple of it, and the range mapped readable and
    /// writable for `'a`. During `'a` it must be accessed by this process only through atomic words,
    /// or at times when nobody else accesses the same bytes.
    pub(super) unsafe fn new(base: NonNull<u8>, len: usize) -> Self {
        // SAFETY: aligned, mapped and long enough by this function's contract; `AtomicU64` allows
        // shared mutation and every bit pattern is a value of it.
        let words =
            unsafe { std::slice::from_raw_parts(base.as_ptr().cast::<AtomicU64>(), len / WORD) };
        Self { words }
    }

    /// The word at `index`, if there is one.
    pub(super) fn get(&self, index: usize) -> Option<&'a AtomicU64> {
        self.words.get(index)
    }

    /// Copies from `offset` on. `None`, and nothing copied, when the range is not inside.
    pub(super) fn read(&self, offset: usize, out: &mut [u8]) -> Option<()> {
        let (words, skip) = self.covering(offset, out.len())?;
        let (head, body, tail) = split(words, skip, out.len());
        let (out_head, rest) = out.split_at_mut(head.len);
        let (out_body, out_tail) = rest.split_at_mut(body.len() * WORD);
        if let Some(word) = head.word {
            let bytes = word.load(Ordering::Relaxed).to_ne_bytes();
            out_head.copy_from_slice(&bytes[skip..skip + head.len]);
        }
        for (out, word) in out_body.chunks_exact_mut(WORD).zip(body) {
            out.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        if let Some(word) = tail.word {
            let bytes = word.load(Ordering::Relaxed).to_ne_bytes();
            out_tail.copy_from_slice(&bytes[..tail.len]);
        }
        Some(())
    }

    /// Copies `data` to `offset` on. `None`, and nothing copied, when the range is not inside.
    pub(super) fn write(&self, offset: usize, data: &[u8]) -> Option<()> {
        let (words, skip) = self.covering(offset, data.len())?;
        let (head, body, tail) = split(words, skip, data.len());
        let (data_head, rest) = data.split_at(head.len);
        let (data_body, data_tail) = rest.split_at(body.len() * WORD);
        if let Some(word) = head.word {
            merge(word, skip, data_head);
        }
        for (data, word) in data_body.as_chunks::<WORD>().0.iter().zip(body) {
            word.store(u64::from_ne_bytes(*data), Ordering::Relaxed);
        }
        if let Some(word) = tail.word {
            merge(word, 0, data_tail);
        }
        Some(())
    }

    /// The words that `len` bytes at `offset` touch, and how many bytes of the first are before them.
    fn covering(&self, offset: usize, len: usize) -> Option<(&'a [AtomicU64], usize)> {
        let end = offset.checked_add(len)?;
        if end > self.words.len().checked_mul(WORD)? {
            return None;
        }
        if len == 0 {
            return Some((&[], 0));
        }
        let words = self.words.get(offset / WORD..end.div_ceil(WORD))?;
        Some((words, offset % WORD))
    }
}

/// A word of which only some bytes belong to a range.
struct Edge<'a> {
    word: Option<&'a AtomicU64>,
    len: usize,
}

const NO_EDGE: Edge<'static> = Edge { word: None, len: 0 };

/// Splits the words that `len` bytes touch, `skip` bytes into the first, into a partial first word,
/// whole words, and a partial last word.
fn split(words: &[AtomicU64], skip: usize, len: usize) -> (Edge<'_>, &[AtomicU64], Edge<'_>) {
    let mut body = words;
    let mut head = NO_EDGE;
    let mut tail = NO_EDGE;
    let partial_head = skip != 0 || len < WORD;
    if partial_head && let Some((first, rest)) = body.split_first() {
        head = Edge {
            word: Some(first),
            len: (WORD - skip).min(len),
        };
        body = rest;
    }
    let over = (len - head.len) % WORD;
    if over != 0
        && let Some((last, rest)) = body.split_last()
    {
        tail = Edge {
            word: Some(last),
            len: over,
        };
        body = rest;
    }
    (head, body, tail)
}

/// Stores `data` into the bytes of `word` from byte `at` on and leaves its other bytes, even when
/// another thread stores those at the same time.
fn merge(word: &AtomicU64, at: usize, data: &[u8]) {
    word.update(Ordering::Relaxed, Ordering::Relaxed, |old| {
        let mut bytes = old.to_ne_bytes();
        bytes[at..at + data.len()].copy_from_slice(data);
        u64::from_ne_bytes(bytes)
    });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn edges_are_bounded() {
        let mapping = Mapping::new(4096, MapFlags::empty()).unwrap();
        let words = mapping.words();
        assert_eq!(words.write(4095, &[7]), Some(()));
        assert_eq!(words.write(4096, &[]), Some(()));
        assert_eq!(words.write(4095, &[7, 7]), None);
        assert_eq!(words.write(usize::MAX, &[7]), None);
        let mut out = [0; 2];
        assert_eq!(words.read(4094, &mut out), Some(()));
        assert_eq!(out, [0, 7]);
        assert_eq!(words.read(4095, &mut out), None);
    }

    #[test]
    fn writers_of_neighbouring_bytes_do_not_undo_each_other() {
        let mapping = Mapping::new(4096, MapFlags::empty()).unwrap();
        std::thread::scope(|scope| {
            for lane in 0..WORD {
                let words = mapping.words();
                scope.spawn(move || {
                    for value in 0..=255 {
                        words.write(lane, &[value]).unwrap();
                    }
                });
            }
        });
        let mut out = [0; WORD];
        mapping.words().read(0, &mut out).unwrap();
        assert_eq!(out, [255; WORD]);
    }

    proptest! {
        #[test]
        fn copies_are_those_of_a_slice(
            writes in prop::collection::vec((0usize..80, prop::collection::vec(any::<u8>(), 0..40)), 1..12),
        ) {
            let mapping = Mapping::new(64, MapFlags::empty()).unwrap();
            let mut model = vec![0u8; 64];
            for (offset, data) in writes {
                let fits = offset + data.len() <= model.len();
                prop_assert_eq!(mapping.words().write(offset, &data).is_some(), fits);
                let mut out = vec![0; data.len()];
                prop_assert_eq!(mapping.words().read(offset, &mut out).is_some(), fits);
                if fits {
                    model[offset..offset + data.len()].copy_from_slice(&data);
                    prop_assert_eq!(&out, &data);
                }
                let mut all = vec![0; model.len()];
                mapping.words().read(0, &mut all).unwrap();
                prop_assert_eq!(&all, &model);
            }
        }
    }
}

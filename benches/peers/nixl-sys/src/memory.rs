//! The regions. They are atomics, since NIXL writes them at any time.

use std::sync::atomic::{AtomicU64, Ordering};

use nixl_sys::{MemType, MemoryRegion, NixlDescriptor};

use crate::Failure;
use crate::pattern::word;
use crate::proto::Shape;

const PAGE: usize = 4096;
const POISON: u64 = 0xA5A5_A5A5_A5A5_A5A5;

/// One region, page-aligned.
#[derive(Debug)]
pub struct Region {
    words: Vec<AtomicU64>,
    /// Where its first page begins.
    skip: usize,
    bytes: usize,
}

impl Region {
    fn new(bytes: usize) -> Self {
        let mut words = Vec::new();
        words.resize_with((bytes + PAGE) / 8, AtomicU64::default);
        let skip = (words.as_ptr().addr().next_multiple_of(PAGE) - words.as_ptr().addr()) / 8;
        Self { words, skip, bytes }
    }

    fn words(&self) -> &[AtomicU64] {
        &self.words[self.skip..][..self.bytes / 8]
    }

    pub fn address(&self) -> usize {
        self.words().as_ptr().addr()
    }
}

impl MemoryRegion for Region {
    unsafe fn as_ptr(&self) -> *const u8 {
        self.words().as_ptr().cast()
    }

    fn size(&self) -> usize {
        self.bytes
    }
}

impl NixlDescriptor for Region {
    fn mem_type(&self) -> MemType {
        MemType::Dram
    }

    fn device_id(&self) -> u64 {
        0
    }
}

/// All regions.
pub struct Memory {
    pub shape: Shape,
    pub regions: Vec<Region>,
}

impl Memory {
    pub fn new(shape: Shape) -> Result<Self, Failure> {
        if shape.bytes().is_none_or(|bytes| bytes == 0) || !shape.block_bytes.is_multiple_of(8) {
            return Err("blocks are multiples of 8 bytes, and there is at least one".into());
        }
        let bytes = usize::try_from(u64::from(shape.blocks) * shape.block_bytes)?;
        let regions = (0..shape.regions).map(|_| Region::new(bytes)).collect();
        Ok(Self { shape, regions })
    }

    fn block(&self, region: &Region, block: u32) -> std::ops::Range<usize> {
        debug_assert!(region.bytes as u64 >= self.shape.block_bytes);
        let words = (self.shape.block_bytes / 8) as usize;
        let start = block as usize * words;
        start..start + words
    }

    /// All words of a block, each with its region and its place.
    fn each(&self, block: u32, mut action: impl FnMut(u32, u64, &AtomicU64)) {
        for (index, region) in (0..).zip(&self.regions) {
            let words = &region.words()[self.block(region, block)];
            for (place, word) in (0..).zip(words) {
                action(index, place, word);
            }
        }
    }

    pub fn fill(&self, seed: u64) {
        for block in 0..self.shape.blocks {
            self.each(block, |region, place, at| {
                at.store(word(seed, region, block, place), Ordering::Relaxed);
            });
        }
    }

    pub fn poison(&self, block: u32) {
        self.each(block, |_, _, at| at.store(POISON, Ordering::Relaxed));
    }

    pub fn wrong_bytes(&self, seed: u64, remote: u32, local: u32) -> u64 {
        let mut wrong = 0;
        self.each(local, |region, place, at| {
            let differing = word(seed, region, remote, place) ^ at.load(Ordering::Relaxed);
            wrong += differing
                .to_le_bytes()
                .iter()
                .filter(|byte| **byte != 0)
                .count() as u64;
        });
        wrong
    }

    pub fn bytes_of_block(&self) -> u64 {
        u64::from(self.shape.regions) * self.shape.block_bytes
    }
}

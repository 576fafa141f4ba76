//! Which blocks a read moves: the four patterns, from a seed.

use clap::ValueEnum;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::proto::Shape;

/// In which order blocks lie on the two sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum)]
pub enum Pattern {
    /// One run on both sides.
    Contiguous,
    /// The highest block first, on both sides.
    Reversed,
    /// Two runs on both sides, dealt in turn.
    Interleaved,
    /// Any block, on each side by itself.
    Random,
}

impl Pattern {
    /// All of them.
    pub const ALL: [Self; 4] = [
        Self::Contiguous,
        Self::Reversed,
        Self::Interleaved,
        Self::Random,
    ];

    /// Its name in cases.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Contiguous => "contiguous",
            Self::Reversed => "reversed",
            Self::Interleaved => "interleaved",
            Self::Random => "random",
        }
    }
}

/// A read to be measured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    /// Its name in rows.
    pub name: String,
    /// The reads that are made together: block ids at the holder and at the reader.
    pub reads: Vec<(Vec<u32>, Vec<u32>)>,
}

impl Case {
    /// A single read of `shape.blocks` blocks of each region, out of a pool of `pool` blocks.
    #[must_use]
    pub fn of_pattern(pattern: Pattern, shape: &Shape, pool: u32, suffix: &str, seed: u64) -> Self {
        Self {
            name: format!("{}-{}{suffix}", pattern.name(), shape_name(shape)),
            reads: vec![lists(pattern, shape.blocks, pool, seed)],
        }
    }

    /// Blocks of all reads.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.reads
            .iter()
            .map(|(remote, _)| remote.len() as u64)
            .sum()
    }

    /// The names that the reads have among processes.
    #[must_use]
    pub fn read_names(&self) -> Vec<String> {
        (0..self.reads.len())
            .map(|index| format!("{}#{index}", self.name))
            .collect()
    }
}

/// The two lists of a pattern: `blocks` different blocks each, out of a pool of `pool` blocks, which
/// are at least as many.
#[must_use]
pub fn lists(pattern: Pattern, blocks: u32, pool: u32, seed: u64) -> (Vec<u32>, Vec<u32>) {
    let ascending = || (0..blocks).collect::<Vec<_>>();
    match pattern {
        Pattern::Contiguous => (ascending(), ascending()),
        Pattern::Reversed => {
            let list: Vec<_> = (0..blocks).rev().collect();
            (list.clone(), list)
        }
        Pattern::Interleaved => {
            let half = blocks.div_ceil(2);
            let deal = |i: u32| {
                if i.is_multiple_of(2) {
                    i / 2
                } else {
                    half + i / 2
                }
            };
            let list: Vec<_> = (0..blocks).map(deal).collect();
            (list.clone(), list)
        }
        Pattern::Random => {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let mut any = || {
                let mut list: Vec<_> = (0..pool.max(blocks)).collect();
                list.shuffle(&mut rng);
                list.truncate(usize::try_from(blocks).unwrap_or(usize::MAX));
                list
            };
            (any(), any())
        }
    }
}

/// `16384x8KiB`, or `64x256x8KiB` when there is more than one region.
#[must_use]
pub fn shape_name(shape: &Shape) -> String {
    let block = bytes_name(shape.block_bytes);
    match shape.regions {
        1 => format!("{}x{block}", shape.blocks),
        regions => format!("{regions}x{}x{block}", shape.blocks),
    }
}

/// Bytes in the largest unit that divides them.
#[must_use]
pub fn bytes_name(bytes: u64) -> String {
    let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    let unit = units
        .iter()
        .find(|(unit, _)| bytes > 0 && bytes.is_multiple_of(*unit));
    match unit {
        Some((unit, name)) => format!("{}{name}", bytes / unit),
        None => format!("{bytes}B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_what_they_are_called() {
        let remote = |pattern| lists(pattern, 5, 9, 1).0;
        assert_eq!(remote(Pattern::Contiguous), [0, 1, 2, 3, 4]);
        assert_eq!(remote(Pattern::Reversed), [4, 3, 2, 1, 0]);
        assert_eq!(remote(Pattern::Interleaved), [0, 3, 1, 4, 2]);
        for pattern in Pattern::ALL {
            for blocks in [1, 2, 7, 1000] {
                let (remote, local) = lists(pattern, blocks, blocks, 3);
                for mut list in [remote, local] {
                    list.sort_unstable();
                    assert!(list.into_iter().eq(0..blocks), "{pattern:?}");
                }
            }
        }
    }

    #[test]
    fn a_seed_gives_the_same_blocks_again() {
        let random = |seed| lists(Pattern::Random, 1000, 1000, seed);
        assert_eq!(random(1), random(1));
        assert_ne!(random(1), random(2));
        let (remote, local) = random(1);
        assert_ne!(remote, local);
    }

    #[test]
    fn names_say_what_is_read() {
        let mut shape = Shape {
            regions: 1,
            blocks: 16_384,
            block_bytes: 8192,
        };
        let case = Case::of_pattern(Pattern::Random, &shape, shape.blocks, "", 1);
        assert_eq!(case.name, "random-16384x8KiB");
        assert_eq!(case.read_names(), ["random-16384x8KiB#0"]);
        shape.regions = 64;
        shape.blocks = 256;
        let case = Case::of_pattern(Pattern::Random, &shape, 4096, "-tcp", 1);
        assert_eq!(case.name, "random-64x256x8KiB-tcp");
        assert_eq!(case.blocks(), 256);
        assert_eq!(bytes_name(2 << 20), "2MiB");
        assert_eq!(bytes_name(100), "100B");
    }
}

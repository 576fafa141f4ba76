//! `kvx bench read`: block sizes, patterns and orders of a pool.

use serde_json::Map;

use super::cases::{Case, Pattern};
use super::contender::{Carrier, Contender, Group};
use super::proto::Shape;
use super::row::Who;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Bytes of a case of the sweep, unless told otherwise.
const SWEEP_BYTES: u64 = 128 * MIB;
/// Of a quick one.
const QUICK_BYTES: u64 = 8 * MIB;
/// Of the whole grid.
const FULL_BYTES: u64 = 1 << 30;
/// Most blocks of a case.
const MOST_BLOCKS: u64 = 100_000;

/// How much of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// A look.
    Quick,
    /// A few sizes.
    Sweep,
    /// The whole grid.
    Full,
}

/// The participants of this tool: the engine, and what the machine can do.
#[must_use]
pub fn contenders() -> Vec<Contender> {
    [
        (Who::KvXfer, ""),
        (Who::KvXfer, "1 lane"),
        (Who::OneDescriptor, ""),
        (Who::ProcessVmReadv, ""),
        (Who::Memcpy, ""),
    ]
    .map(|(who, setting)| Contender::new(who, setting))
    .to_vec()
}

/// The cases.
#[must_use]
pub fn groups(extent: Extent, max_bytes: Option<u64>, seed: u64) -> Vec<Group> {
    let (sizes, counts, bytes): (&[u64], &[u64], u64) = match extent {
        Extent::Quick => (&[8 * KIB, 128 * KIB], &[], QUICK_BYTES),
        Extent::Sweep => (
            &[4 * KIB, 8 * KIB, 32 * KIB, 128 * KIB, 2 * MIB],
            &[],
            SWEEP_BYTES,
        ),
        Extent::Full => (
            &[
                4 * KIB,
                8 * KIB,
                16 * KIB,
                32 * KIB,
                64 * KIB,
                128 * KIB,
                256 * KIB,
                512 * KIB,
                MIB,
                2 * MIB,
            ],
            &[1, 10, 100, 1000, 10_000],
            FULL_BYTES,
        ),
    };
    let bytes = max_bytes.unwrap_or(bytes);
    let mut groups = Vec::new();
    for size in sizes {
        let most = match extent {
            Extent::Full => (bytes / size).min(MOST_BLOCKS),
            _ => bytes / size,
        };
        for regions in [1, layers(most)] {
            let pool = u32::try_from(most / regions).unwrap_or(u32::MAX);
            let regions = u32::try_from(regions).unwrap_or(1);
            let of_counts = counts
                .iter()
                .filter_map(|count| u32::try_from(count / u64::from(regions)).ok())
                .filter(|blocks| *blocks < pool);
            let cases: Vec<_> = of_counts
                .chain([pool])
                .filter(|blocks| *blocks > 0)
                .flat_map(|blocks| {
                    let shape = Shape {
                        regions,
                        blocks,
                        block_bytes: *size,
                    };
                    // One block has no order.
                    let patterns = if blocks == 1 { 1 } else { Pattern::ALL.len() };
                    Pattern::ALL
                        .into_iter()
                        .take(patterns)
                        .map(move |pattern| Case::of_pattern(pattern, &shape, pool, "", seed))
                })
                .collect();
            if cases.is_empty()
                || groups
                    .last()
                    .is_some_and(|last| same_pool(last, regions, *size))
            {
                continue;
            }
            groups.push(Group {
                shape: Shape {
                    regions,
                    blocks: pool,
                    block_bytes: *size,
                },
                carrier: Carrier::Auto,
                settings: Map::new(),
                contenders: contenders(),
                cases,
            });
        }
    }
    groups
}

fn same_pool(group: &Group, regions: u32, block_bytes: u64) -> bool {
    (group.shape.regions, group.shape.block_bytes) == (regions, block_bytes)
}

/// Layers of a layer-first pool of so many pieces.
fn layers(pieces: u64) -> u64 {
    [64, 16, 4]
        .into_iter()
        .find(|layers| pieces / layers >= 4)
        .unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(extent: Extent, max_bytes: Option<u64>) -> Vec<String> {
        groups(extent, max_bytes, 1)
            .iter()
            .flat_map(|group| group.cases.iter().map(|case| case.name.clone()))
            .collect()
    }

    #[test]
    fn the_sweep_has_every_size_pattern_and_order() {
        let names = names(Extent::Sweep, None);
        assert_eq!(names.len(), 5 * 2 * 4);
        for name in [
            "random-16384x8KiB",
            "reversed-64x256x8KiB",
            "interleaved-64x2MiB",
            "contiguous-16x4x2MiB",
        ] {
            assert!(names.contains(&name.to_owned()), "{name}");
        }
    }

    #[test]
    fn the_grid_goes_from_one_block_to_a_hundred_thousand() {
        let names = names(Extent::Full, None);
        for name in [
            "contiguous-1x4KiB",
            "random-100000x4KiB",
            "random-1000x1MiB",
            "random-512x2MiB",
        ] {
            assert!(names.contains(&name.to_owned()), "{name}");
        }
        assert!(!names.contains(&"random-1x4KiB".to_owned()));
        let mut unique = names.clone();
        unique.sort();
        unique.dedup();
        assert_eq!(unique.len(), names.len());
    }

    #[test]
    fn memory_is_bounded() {
        for extent in [Extent::Quick, Extent::Sweep, Extent::Full] {
            for group in groups(extent, Some(MIB), 1) {
                assert!(group.shape.bytes().unwrap() <= MIB);
            }
            assert!(names(extent, Some(1)).is_empty());
        }
    }
}

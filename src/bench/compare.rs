//! `kvx bench compare`: the same reads by others, in the same run.

use serde_json::Map;

use super::cases::{Case, Pattern};
use super::contender::{
    Carrier, Contender, Group, NO_PROGRESS_THREAD, PROGRESS_THREAD, SAME_DESCRIPTORS,
};
use super::proto::Shape;
use super::row::Who;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// A quick comparison moves so much less.
const QUICK_DIVISOR: u32 = 16;

/// Who takes part over what UCX chooses.
fn over_auto() -> Vec<Contender> {
    let mut contenders = over_ucx();
    contenders.push(Contender::new(Who::ProcessVmReadv, ""));
    contenders.push(Contender::new(Who::Memcpy, ""));
    contenders
}

/// Who takes part over TCP.
fn over_tcp() -> Vec<Contender> {
    let mut contenders = over_ucx();
    contenders.push(Contender::new(Who::Mooncake, ""));
    contenders
}

fn over_ucx() -> Vec<Contender> {
    vec![
        Contender::new(Who::KvXfer, ""),
        Contender::new(Who::KvXfer, "1 lane"),
        Contender::new(Who::OneDescriptor, ""),
        Contender::new(Who::OneDescriptor, SAME_DESCRIPTORS),
        Contender::new(Who::NixlPython, PROGRESS_THREAD),
        Contender::new(Who::NixlPython, NO_PROGRESS_THREAD),
        Contender::new(Who::NixlSys, ""),
    ]
}

/// The cases.
#[must_use]
pub fn groups(quick: bool, max_bytes: Option<u64>, seed: u64) -> Vec<Group> {
    use Carrier::{Auto, Tcp};
    let random = [Pattern::Random];
    let all = [
        Pattern::Random,
        Pattern::Reversed,
        Pattern::Interleaved,
        Pattern::Contiguous,
    ];
    let plan: [(Carrier, u32, u32, u64, &[Pattern]); 5] = [
        (Auto, 1, 16_384, 8 * KIB, &all),
        (Auto, 1, 4096, 32 * KIB, &random),
        (Auto, 64, 256, 8 * KIB, &random),
        (Tcp, 1, 4096, 32 * KIB, &random),
        (Tcp, 1, 128, MIB, &random),
    ];
    plan.into_iter()
        .map(|(carrier, regions, blocks, block_bytes, patterns)| {
            let blocks = if quick {
                blocks / QUICK_DIVISOR
            } else {
                blocks
            };
            let most = max_bytes.map_or(u64::MAX, |bytes| {
                bytes / block_bytes.saturating_mul(regions.into())
            });
            let shape = Shape {
                regions,
                blocks: u32::try_from(most).unwrap_or(u32::MAX).min(blocks),
                block_bytes,
            };
            let case = |pattern: &Pattern| {
                Case::of_pattern(*pattern, &shape, shape.blocks, carrier.suffix(), seed)
            };
            Group {
                shape,
                carrier,
                settings: Map::new(),
                contenders: match carrier {
                    Auto => over_auto(),
                    Tcp => over_tcp(),
                },
                cases: match shape.blocks {
                    0 => Vec::new(),
                    _ => patterns.iter().map(case).collect(),
                },
            }
        })
        .filter(|group| !group.cases.is_empty())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_is_there() {
        let names: Vec<_> = groups(false, None, 1)
            .iter()
            .flat_map(|group| group.cases.iter().map(|case| case.name.clone()))
            .collect();
        assert_eq!(
            names,
            [
                "random-16384x8KiB",
                "reversed-16384x8KiB",
                "interleaved-16384x8KiB",
                "contiguous-16384x8KiB",
                "random-4096x32KiB",
                "random-64x256x8KiB",
                "random-4096x32KiB-tcp",
                "random-128x1MiB-tcp",
            ]
        );
        assert!(groups(true, Some(1), 1).is_empty());
    }

    #[test]
    fn mooncake_is_compared_over_tcp_only() {
        for group in groups(true, None, 1) {
            let mooncake = group.contenders.iter().any(|c| c.who == Who::Mooncake);
            assert_eq!(mooncake, group.carrier == Carrier::Tcp);
        }
    }
}

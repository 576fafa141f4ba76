//! Block lists: runs give back the ids they were made from, in few bytes, and refuse all others.
#![allow(clippy::unwrap_used)]

use kv_xfer::descriptor::{BlockRun, BlockRuns, DescriptorLimits, RunsError, Step};
use kv_xfer::ids::BlockId;
use proptest::prelude::*;

const LIMITS: DescriptorLimits = DescriptorLimits {
    max_blocks: 1 << 18,
    max_block_id: u32::MAX,
    max_bytes: 8 << 20,
    max_groups: 64,
};

fn ids(raw: impl IntoIterator<Item = u32>) -> Vec<BlockId> {
    raw.into_iter().map(BlockId).collect()
}

fn encode(runs: &BlockRuns) -> Vec<u8> {
    let mut out = Vec::new();
    runs.encode_into(&mut out);
    out
}

fn run(first: u32, len: u32, step: Step) -> BlockRun {
    BlockRun::new(BlockId(first), len, step).unwrap()
}

/// Lists with many neighbours, so that runs begin, end, turn and touch.
fn lists() -> impl Strategy<Value = Vec<BlockId>> {
    prop_oneof![
        prop::collection::vec(0_u32..6, 0..40),
        prop::collection::vec(any::<u32>(), 0..200),
        prop::collection::vec((0_u32..1 << 20, 1_u32..30, any::<bool>()), 0..20).prop_map(|runs| {
            runs.into_iter()
                .flat_map(|(first, len, up)| {
                    (0..len).map(move |i| {
                        if up {
                            first + i
                        } else {
                            first.saturating_sub(i)
                        }
                    })
                })
                .collect()
        }),
        Just(vec![u32::MAX - 1, u32::MAX, 0, 1, u32::MAX]),
    ]
    .prop_map(ids)
}

proptest! {
    #[test]
    fn runs_give_back_their_ids(list in lists()) {
        let runs = BlockRuns::from_ids(&list);
        prop_assert_eq!(&runs, &list.iter().copied().collect::<BlockRuns>());
        prop_assert_eq!(runs.len(), list.len());
        prop_assert_eq!(runs.iter().collect::<Vec<_>>(), list.clone());
        prop_assert_eq!(runs.max_id(), list.iter().copied().max());
        for (index, id) in list.iter().enumerate() {
            prop_assert_eq!(runs.get(index), Some(*id));
        }
        prop_assert_eq!(runs.get(list.len()), None);
    }

    #[test]
    fn slices_are_the_runs_of_their_ids(list in lists(), a: prop::sample::Index, b: prop::sample::Index) {
        let runs = BlockRuns::from_ids(&list);
        let (a, b) = (a.index(list.len() + 1), b.index(list.len() + 1));
        let range = a.min(b)..a.max(b);
        prop_assert_eq!(runs.slice(range.clone()), Some(BlockRuns::from_ids(&list[range.clone()])));
        prop_assert_eq!(runs.first_n(a), BlockRuns::from_ids(&list[..a]));
        prop_assert_eq!(runs.slice(0..list.len() + 1), None);
    }

    #[test]
    fn joined_runs_are_the_runs_of_their_ids(head in lists(), tail in lists()) {
        let mut joined = BlockRuns::from_ids(&head);
        for run in BlockRuns::from_ids(&tail).runs() {
            joined.push_run(*run);
        }
        prop_assert_eq!(joined, BlockRuns::from_ids(&[head, tail].concat()));
    }

    #[test]
    fn lists_round_trip(list in lists()) {
        let runs = BlockRuns::from_ids(&list);
        prop_assert_eq!(BlockRuns::decode(&encode(&runs), &LIMITS), Ok(runs));
    }

    #[test]
    fn a_run_costs_at_most_six_bytes(list in prop::collection::vec(0_u32..1 << 20, 0..500)) {
        let runs = BlockRuns::from_ids(&ids(list));
        prop_assert!(encode(&runs).len() <= 16 + 6 * runs.runs().len());
    }

    #[test]
    fn whatever_is_decoded_encodes_to_the_same_bytes(
        bytes in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..64),
            // Counts and widths that fit what follows.
            (1_u8..3, 0_u8..2, prop::collection::vec(0_u8..7, 1..60)).prop_map(|(d, s, mut rest)| {
                let runs = rest.len() / usize::from(d + s);
                rest.truncate(runs * usize::from(d + s));
                rest.splice(0..0, [runs as u8, d | s << 4]);
                rest
            }),
        ],
    ) {
        if let Ok(runs) = BlockRuns::decode(&bytes, &LIMITS) {
            prop_assert_eq!(encode(&runs), bytes);
            prop_assert_eq!(BlockRuns::from_ids(&runs.iter().collect::<Vec<_>>()), runs);
        }
    }

    #[test]
    fn truncated_lists_are_refused(list in lists(), at: prop::sample::Index) {
        let bytes = encode(&BlockRuns::from_ids(&list));
        let short = &bytes[..at.index(bytes.len())];
        prop_assert!(BlockRuns::decode(short, &LIMITS).is_err());
    }
}

#[test]
fn a_long_contiguous_list_is_a_few_bytes() {
    for list in [ids(0..150_000), ids((0..150_000).rev())] {
        let runs = BlockRuns::from_ids(&list);
        assert_eq!(runs.runs().len(), 1);
        assert!(encode(&runs).len() < 16);
    }
}

#[test]
fn limits_are_kept() {
    let bytes = encode(&BlockRuns::from_ids(&ids(10..20)));
    let limits = |max_blocks, max_block_id| DescriptorLimits {
        max_blocks,
        max_block_id,
        ..LIMITS
    };
    assert!(BlockRuns::decode(&bytes, &limits(10, 19)).is_ok());
    assert_eq!(
        BlockRuns::decode(&bytes, &limits(9, 19)),
        Err(RunsError::TooManyBlocks { max_blocks: 9 })
    );
    assert_eq!(
        BlockRuns::decode(&bytes, &limits(10, 18)),
        Err(RunsError::IdOutOfRange {
            run: 0,
            max_block_id: 18
        })
    );
}

#[test]
fn a_claimed_count_allocates_nothing() {
    // 2^62 runs in ten bytes.
    let bytes = [0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x40, 0x01];
    assert_eq!(
        BlockRuns::decode(&bytes, &LIMITS),
        Err(RunsError::Truncated)
    );
}

#[test]
fn only_the_one_form_is_read() {
    for (bytes, what) in [
        (&[2, 0x01, 8, 2][..], "4 and 5 are one run"),
        (&[2, 0x11, 8, 2, 2, 0], "4, 5 and 6 are one run"),
        (&[2, 0x11, 8, 3, 1, 0], "4, 3 and 2 are one run"),
        (&[1, 0x11, 8, 1], "one block is ascending"),
        (&[0x81, 0, 0x01, 8], "a long count"),
        (&[1, 0x02, 8, 0], "a wide distance"),
        (&[1, 0x11, 8, 0], "a needless shape"),
        (&[1, 0x10, 2], "no distance"),
        (&[1, 0x06, 8, 0, 0, 0, 0, 0], "a distance of six bytes"),
        (&[1, 0x61, 8, 2, 0, 0, 0, 0, 0], "a shape of six bytes"),
    ] {
        assert!(
            matches!(
                BlockRuns::decode(bytes, &LIMITS),
                Err(RunsError::NotCanonical { .. })
            ),
            "{what}"
        );
    }
    assert_eq!(
        BlockRuns::decode(&[0, 0], &LIMITS),
        Err(RunsError::Trailing { extra: 1 })
    );
    assert_eq!(BlockRuns::decode(&[], &LIMITS), Err(RunsError::Truncated));
}

#[test]
fn runs_stay_inside_the_ids() {
    assert!(BlockRun::new(BlockId(5), 0, Step::Ascending).is_none());
    assert!(BlockRun::new(BlockId(u32::MAX), 2, Step::Ascending).is_none());
    assert!(BlockRun::new(BlockId(3), 5, Step::Descending).is_none());
    let down = run(3, 4, Step::Descending);
    assert_eq!((down.lowest(), down.highest()), (BlockId(0), BlockId(3)));
    assert_eq!(down.last(), BlockId(0));
    // -1 before the first id, and a descent through zero.
    for bytes in [&[1, 0x01, 1][..], &[1, 0x11, 2, 5]] {
        assert!(matches!(
            BlockRuns::decode(bytes, &LIMITS),
            Err(RunsError::IdOutOfRange { .. })
        ));
    }
}

#[test]
fn blocks_outside_the_pool_are_named() {
    let runs = BlockRuns::from_ids(&ids([1, 2, 3, 9, 8]));
    assert_eq!(runs.check_within(10), Ok(()));
    assert_eq!(
        runs.check_within(9),
        Err(RunsError::OutsidePool {
            block: BlockId(9),
            pool_blocks: 9
        })
    );
    assert_eq!(BlockRuns::new().check_within(0), Ok(()));
}

#[test]
fn a_list_is_shown_as_runs() {
    let runs = BlockRuns::from_ids(&ids([7, 8, 9, 4, 3, 11]));
    assert_eq!(
        format!("{runs:?}"),
        "BlockRuns[7..=9, 4..=3, 11..=11]".replace("11..=11", "11")
    );
}

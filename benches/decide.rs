//! What a decision about 1,500 blocks costs.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::hint::black_box;
use std::num::NonZeroU32;
use std::time::Duration;

use criterion::{Criterion, criterion_group};
use kv_xfer::descriptor::BlockRuns;
use kv_xfer::identity::{BlockHash, matching_prefix};
use kv_xfer::ids::BlockId;
use kv_xfer::policy::{Decision, DecisionInput, decide};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use common::{Budgets, US, shuffled};

fn decision(c: &mut Criterion) {
    let mut group = c.benchmark_group("decide");
    let hashes: Vec<BlockHash> = {
        let mut rng = ChaCha8Rng::seed_from_u64(2);
        (0..1500).map(|_| BlockHash(rng.random())).collect()
    };
    let remote = hashes.clone();
    let blocks = shuffled(1500, 3);
    let input = DecisionInput {
        remote_tokens: 24_000,
        prompt_tokens: 30_000,
        lease_remaining: Some(Duration::from_secs(400)),
        ..DecisionInput::new(NonZeroU32::new(16).unwrap())
    };
    group.bench_function("bare", |b| b.iter(|| decide(black_box(&input))));
    group.bench_function("1500_blocks", |b| {
        b.iter(|| whole(&input, &hashes, &remote, &blocks));
    });
    group.finish();
    let mut budgets = Budgets::default();
    budgets.time("decide + bounds + prefix of 1,500 blocks", 50 * US, || {
        whole(&input, &hashes, &remote, &blocks)
    });
    budgets.time(
        "the same, bounds from the runs of a descriptor",
        50 * US,
        || {
            let runs = BlockRuns::from_ids(black_box(&blocks));
            black_box(runs.check_within(1500).is_ok());
            whole(&input, &hashes, &remote, &blocks)
        },
    );
    budgets.print("decide");
}

/// Everything that a decision takes: are the blocks inside the pool, how many hold our tokens, and
/// is it worth it.
fn whole(
    input: &DecisionInput,
    hashes: &[BlockHash],
    remote: &[BlockHash],
    blocks: &[BlockId],
) -> Decision {
    let inside = black_box(blocks).iter().all(|b| b.0 < 1500);
    let matched = matching_prefix(black_box(hashes), black_box(remote));
    decide(&DecisionInput {
        matched_tokens: matched as u64 * 16,
        peer_ok: inside,
        ..*input
    })
}

criterion_group!(benches, decision);
criterion::criterion_main!(benches);

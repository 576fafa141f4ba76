//! Reads over the real NIXL between two processes, beside what the machine can do. `kvx bench read`
//! measures more cases, and in turn rather than one after the other. With `KVX_BENCH_PEER=host:port`
//! it reads from `kvx target` on another node.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use criterion::{Criterion, criterion_group, criterion_main};
use kvx::bench::read::Extent;
use kvx::bench::{models, read};

/// Memory of one end.
const BYTES: u64 = 64 << 20;

fn reads(criterion: &mut Criterion) {
    let smoke = support::is_smoke();
    let peer = support::peer();
    let groups = match (&peer, smoke) {
        (Some(_), _) => models::groups(smoke, None, support::SEED).unwrap(),
        (None, true) => read::groups(Extent::Quick, Some(1 << 20), support::SEED),
        (None, false) => read::groups(Extent::Sweep, Some(BYTES), support::SEED),
    };
    support::run(criterion, "read", &groups, peer);
}

criterion_group!(benches, reads);
criterion_main!(benches);

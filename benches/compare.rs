//! The same reads by others. `kvx bench compare` measures them in turn, which tells more; who cannot
//! run here is printed with its own error.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use criterion::{Criterion, criterion_group, criterion_main};
use kvx::bench::compare;

fn comparisons(criterion: &mut Criterion) {
    if support::peer().is_some() {
        eprintln!("skipped: others cannot read from another node here; unset KVX_BENCH_PEER");
        return;
    }
    let groups = compare::groups(support::is_smoke(), None, support::SEED);
    support::run(criterion, "compare", &groups, None);
}

criterion_group!(benches, comparisons);
criterion_main!(benches);

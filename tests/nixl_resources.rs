//! What engines over the real NIXL use up in the long run: nothing. `KVX_LONG=1` counts far.
#![allow(clippy::panic, clippy::unwrap_used, missing_docs)]

mod support;

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use kv_xfer::ids::AgentName;
use kv_xfer::transport::{Agent, AgentRole, Transport};
use support::*;

#[test]
#[ignore = "the body of the holders' processes"]
fn holder_process() {
    serve_holder();
}

/// Resident memory of this process, KiB.
fn resident_kib() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size() / 1024
}

fn files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

over!(registering_and_deregistering_grows_nothing: shm);
fn registering_and_deregistering_grows_nothing() {
    // Sixteen regions each; an agent and what it registered go together.
    let cycles = if long() { 20_000 } else { 300 };
    let (transport, pool) = (open(), pool(Shape::MEDIUM, 64));
    let cycle = |n: u32| {
        let name = AgentName::new(format!("cycle-{n}")).unwrap();
        let mut agent = transport.open_agent(&name, AgentRole::Read).unwrap();
        let keep = Arc::clone(&pool) as Arc<dyn Any + Send + Sync>;
        agent.register(pool.regions(), keep).unwrap();
        agent.destroy().unwrap();
    };
    let warm = cycles / 10;
    (0..warm).for_each(cycle);
    let (base, open) = (resident_kib(), files());
    let since = Instant::now();
    (warm..cycles).for_each(cycle);
    let each = since.elapsed() / (cycles - warm);
    let grown = resident_kib().saturating_sub(base);
    println!("shown: {cycles} cycles of 16 regions, {grown} KiB grown, {each:?} each");
    assert!(grown < 8 << 10, "{grown} KiB");
    assert_eq!(files(), open);
    assert_eq!(Arc::strong_count(&pool), 1);
}

over!(reading_grows_nothing: shm, tcp);
fn reading_grows_nothing() {
    const BLOCKS: u32 = 4;
    const AT_ONCE: u32 = 16;
    let reads: u32 = if long() { 1_000_000 } else { 20_000 };
    let mut holder = Holder::start(&HolderSpec::new(Shape::TINY, BLOCKS));
    let reader = reader(Shape::TINY, BLOCKS * AT_ONCE, |_| {});
    let remote = ids((0..BLOCKS).rev());
    let lent = holder.lend("r", &remote, 1);
    let offer = reader.accept(&lent.remote, None, None).unwrap();
    let round = || {
        let handles: Vec<_> = (0..AT_ONCE)
            .map(|n| {
                let blocks = claim(&reader, n * BLOCKS..(n + 1) * BLOCKS);
                reader.read(keeping(&offer, blocks)).unwrap()
            })
            .collect();
        for handle in handles {
            let landed = landed(handle.wait());
            assert_eq!(wrong_words(&landed.blocks, &remote, 1), 0);
        }
    };
    let rounds = reads / AT_ONCE;
    let part = rounds / 10;
    (0..part).for_each(|_| round());
    let (base, open) = (resident_kib(), files());
    let since = Instant::now();
    (part..rounds).for_each(|_| round());
    let grown = resident_kib().saturating_sub(base);
    let took = since.elapsed();
    println!("shown: {reads} reads, {grown} KiB grown in the last nine tenths, {took:?} for them");
    assert!(grown < 8 << 10, "{grown} KiB");
    assert!(files() <= open, "{} files, {open} before", files());
    assert_eq!(reader.stats().partings, 0);
    assert_eq!(reader.stats().landed, u64::from(rounds * AT_ONCE));
    assert_clean(&reader);
    assert_eq!(holder.counts().0, 1);
}

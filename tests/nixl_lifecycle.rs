//! Engines over the real NIXL from start to end: backends that do not work, handles that nobody
//! waits for, shutdown under load, and what is left in the process afterwards.
#![allow(clippy::panic, clippy::unwrap_used, missing_docs)]

mod support;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_xfer::engine::{Engine, FailedBlocks, ReadError, ReadRequest, StartError};
use kv_xfer::ids::AgentName;
use kv_xfer::layout::{MemKind, RegionGeometry};
use kv_xfer::memory::{HostMemory, HostOptions, KvPool};
use kv_xfer::transport::nixl::BackendConfig;
use kv_xfer::transport::{Agent, AgentRole, FailureKind, Transport};
use kvx::runtime::{self, OpenError};
use rustix::time::{ClockId, clock_gettime};
use support::*;

#[test]
#[ignore = "the body of the holders' processes"]
fn holder_process() {
    serve_holder();
}

fn entries(dir: &str) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

/// Resident memory of this process, MiB.
fn resident_mib() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
    (pages * rustix::param::page_size()) >> 20
}

over!(handles_dropped_right_after_submit_give_every_block_back: shm, tcp, fabric);
fn handles_dropped_right_after_submit_give_every_block_back() {
    const BLOCKS: u32 = 16;
    let rounds: u32 = if long() { 10_000 } else { 2000 };
    let mut holder = Holder::start(&HolderSpec::new(Shape::MEDIUM, BLOCKS));
    // Room for a few at once, so that some are dropped while others are in flight.
    let reader = reader(Shape::MEDIUM, 4 * BLOCKS, |_| {});
    let remote = shuffled(BLOCKS as usize, BLOCKS, 2);
    let lent = holder.lend("r", &remote, 1);
    let offer = reader.accept(&lent.remote, None, None).unwrap();
    let mut base = 0;
    for round in 0..rounds {
        if round == rounds / 10 {
            base = resident_mib();
        }
        let first = round % 4 * BLOCKS;
        let blocks = loop {
            match reader.pool().claim(ids(first..first + BLOCKS)) {
                Ok(blocks) => break blocks,
                Err(_) => drop(reader.returned().recv_timeout(LIMIT).unwrap()),
            }
        };
        let handle = reader.read(keeping(&offer, blocks)).unwrap();
        if round % 3 == 1 {
            // Likely in flight.
            std::thread::sleep(Duration::from_micros(u64::from(round % 7) * 100));
        }
        drop(handle);
    }
    assert_clean(&reader);
    let grown = resident_mib().saturating_sub(base);
    assert!(grown < 64, "{grown} MiB more in nine tenths of the reads");
    let stats = reader.stats();
    assert_eq!(stats.submitted, u64::from(rounds));
    assert_eq!(stats.partings, 0, "no agent had to go for it");
    println!(
        "shown: of {rounds} dropped reads {} landed all the same, {} were cancelled; {grown} MiB grown",
        stats.landed, stats.failed_cancelled
    );
    let landed = landed(read(&reader, request(&offer, claim(&reader, 0..BLOCKS))));
    assert_eq!(wrong_words(&landed.blocks, &remote, 1), 0);
}

over!(shutdown_under_load_ends_and_gives_each_handle_one_outcome: shm, tcp, fabric);
fn shutdown_under_load_ends_and_gives_each_handle_one_outcome() {
    // Eight are worked on, the others queued.
    const READS: u32 = 1008;
    const EACH: u32 = 4;
    for frozen in [false, true] {
        let mut holder = Holder::start(&HolderSpec::new(Shape::MEDIUM, EACH));
        let reader = reader(Shape::MEDIUM, READS * EACH, |config| {
            config.reader.active = 8;
        });
        let remote = shuffled(EACH as usize, EACH, 3);
        let lent = holder.lend("r", &remote, 1);
        let offer = reader.accept(&lent.remote, None, None).unwrap();
        let mut handles: Vec<_> = (0..READS)
            .map(|n| {
                let blocks = claim(&reader, n * EACH..(n + 1) * EACH);
                reader.read(keeping(&offer, blocks)).unwrap()
            })
            .collect();
        eventually("it is met", || reader.stats().meetings == 1);
        if frozen {
            holder.freeze();
        } else {
            eventually("some have landed", || reader.stats().landed > 0);
        }
        let pool = Arc::clone(reader.pool());
        let since = Instant::now();
        let report = reader.shutdown(Duration::from_secs(5));
        let took = since.elapsed();
        // Twice what was asked for, for machines that are busy with other things.
        assert!(took < Duration::from_secs(10), "{took:?}");
        assert_eq!(report.quarantined, 0);
        let mut ended = 0;
        for handle in &mut handles {
            match handle.wait_timeout(Duration::ZERO) {
                Some(Ok(landed)) => assert_eq!(wrong_words(&landed.blocks, &remote, 1), 0),
                Some(Err(failure)) => {
                    let told = matches!(failure.error, ReadError::ShuttingDown);
                    assert!(told, "{failure}");
                    ended += 1;
                }
                None => panic!("no outcome"),
            }
            assert!(handle.wait_timeout(Duration::ZERO).is_none(), "two");
        }
        drop(handles);
        eventually("every block is free", || pool.claimed_blocks() == 0);
        println!("shown: shut down in {took:?} with {ended} of {READS} reads not yet over");
    }
}

over!(opening_and_closing_engines_leaves_nothing_behind: shm, tcp, fabric);
fn opening_and_closing_engines_leaves_nothing_behind() {
    const CYCLES: u32 = 50;
    let mut holder = Holder::start(&HolderSpec::new(Shape::TINY, 8));
    let remote = ids(0..8);
    let lent = holder.lend("r", &remote, 1);
    let state = || (entries("/proc/self/fd"), entries("/proc/self/task"));
    let (mut base, mut memory) = ((0, 0), 0);
    for cycle in 0..CYCLES {
        if cycle == 5 {
            (base, memory) = (state(), resident_mib());
        }
        let reader = reader(Shape::TINY, 8, |_| {});
        let offer = reader.accept(&lent.remote, None, None).unwrap();
        let landed = landed(read(&reader, keeping(&offer, claim(&reader, 0..8))));
        assert_eq!(wrong_words(&landed.blocks, &remote, 1), 0);
    }
    eventually("files and threads are back", || state() <= base);
    let grown = resident_mib().saturating_sub(memory);
    assert!(grown < 64, "{grown} MiB more in {} cycles", CYCLES - 5);
    println!(
        "shown: {CYCLES} engines opened and closed, {base:?} files and threads before and after, {grown} MiB grown"
    );
    assert_eq!(holder.counts(), (1, 0));
    holder.leave();
}

over!(an_idle_engine_uses_little_of_the_processor: shm, tcp, fabric);
fn an_idle_engine_uses_little_of_the_processor() {
    let mut holder = Holder::start(&HolderSpec::new(Shape::TINY, 8));
    let reader = reader(Shape::TINY, 8, |_| {});
    let lent = holder.lend("r", &ids(0..8), 1);
    let offer = reader.accept(&lent.remote, None, None).unwrap();
    drop(landed(read(&reader, keeping(&offer, claim(&reader, 0..8)))));
    std::thread::sleep(Duration::from_millis(200));
    let used = || {
        let time = clock_gettime(ClockId::ProcessCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    let (before, since) = (used(), Instant::now());
    std::thread::sleep(Duration::from_secs(3));
    let share = (used() - before).as_secs_f64() / since.elapsed().as_secs_f64();
    println!("shown: idle, {:.2} % of a processor", 100.0 * share);
    assert!(share < 0.10, "{share}");
    drop(landed(read(&reader, request(&offer, claim(&reader, 0..8)))));
    assert_clean(&reader);
}

over!(a_backend_that_is_not_there_is_named_with_those_that_are: shm);
fn a_backend_that_is_not_there_is_named_with_those_that_are() {
    let unknown = BackendConfig {
        name: "CARRIER_PIGEON".into(),
        params: Vec::new(),
    };
    let Err(OpenError::Backend(error)) = runtime::open(unknown) else {
        panic!("such a backend is not known");
    };
    assert_eq!(error.kind, FailureKind::Unsupported);
    let text = error.to_string();
    for part in ["CARRIER_PIGEON", "UCX", "POSIX"] {
        assert!(text.contains(part), "{text}");
    }
    assert!(runtime::open(BackendConfig::default()).is_ok());
}

over!(an_engine_whose_transport_cannot_work_does_not_start: rc);
fn an_engine_whose_transport_cannot_work_does_not_start() {
    if Path::new("/sys/class/infiniband").exists() {
        return println!("shown: skipped, this machine may have InfiniBand");
    }
    for _ in 0..3 {
        let Err(error) = Engine::start(config("reader"), pool(Shape::TINY, 8), open()) else {
            panic!("there is no InfiniBand here");
        };
        let StartError::Transport(cause) = &error else {
            panic!("{error}");
        };
        assert_eq!(cause.operation, "open agent");
        assert!(error.to_string().contains("backend UCX"), "{error}");
        assert!(cause.raw.is_some());
        println!("shown: {error}");
    }
}

over!(device_memory_without_a_device_is_refused_and_host_memory_still_works: shm);
fn device_memory_without_a_device_is_refused_and_host_memory_still_works() {
    if Path::new("/dev/nvidiactl").exists() {
        return println!("shown: skipped, this machine has a GPU");
    }
    let layout = Shape::TINY.layout();
    let (memory, _) = HostMemory::new(1 << 20, &HostOptions::default()).unwrap();
    let mut base = memory.base();
    let mut regions: Vec<RegionGeometry> = Vec::new();
    for spec in layout.regions() {
        regions.push(RegionGeometry {
            base,
            block_len: spec.block_len,
            block_stride: spec.block_len,
            block_count: 8,
            mem: MemKind::Vram,
            device: 0,
        });
        base += 1 << 16;
    }
    let transport = open();
    let memory = Arc::new(memory);
    let name = AgentName::new("mixed").unwrap();
    let mut agent = transport.open_agent(&name, AgentRole::Serve).unwrap();
    let keep = || Arc::clone(&memory) as Arc<dyn std::any::Any + Send + Sync>;
    let refused = agent.register(&regions, keep()).unwrap_err();
    assert_eq!(refused.operation, "register");
    println!("shown: {refused}");
    // Neither does it spoil the same agent.
    let on_host: Vec<_> = regions
        .iter()
        .map(|region| RegionGeometry {
            mem: MemKind::Dram,
            ..*region
        })
        .collect();
    let mixed: Vec<_> = on_host.iter().take(1).chain(&regions).copied().collect();
    assert!(agent.register(&mixed, keep()).is_err(), "all or nothing");
    agent.register(&on_host, keep()).unwrap();
    assert!(!agent.metadata().unwrap().is_empty());
    drop(agent);
    // Nor is an engine over such a pool started, nor anything left of it.
    let pool = KvPool::from_memory(Shape::TINY.layout(), regions, memory).unwrap();
    let weak = Arc::downgrade(&pool);
    let mut on_device = config("device");
    on_device.holder.bind = Some(([127, 0, 0, 1], 0).into());
    let error = Engine::start(on_device, pool, Arc::clone(&transport)).unwrap_err();
    assert!(matches!(error, StartError::Transport(_)), "{error}");
    assert!(weak.upgrade().is_none(), "the pool is let go");
    let mut holder = Holder::start(&HolderSpec::new(Shape::TINY, 8));
    let reader = reader(Shape::TINY, 8, |_| {});
    let lent = holder.lend("r", &ids(0..8), 1);
    let offer = reader.accept(&lent.remote, None, None).unwrap();
    let landed = landed(read(&reader, request(&offer, claim(&reader, 0..8))));
    assert_eq!(wrong_words(&landed.blocks, &ids(0..8), 1), 0);
}

/// A reader that has read something from its holder and is reading more.
fn busy() -> (Holder, Engine, kv_xfer::engine::ReadHandle) {
    const BLOCKS: u32 = 256;
    let mut holder = Holder::start(&HolderSpec::new(Shape::MEDIUM, BLOCKS));
    let mut serving = config("both");
    serving.holder.bind = Some(([127, 0, 0, 1], 0).into());
    let reader = Engine::start(serving, pool(Shape::MEDIUM, 2 * BLOCKS), open()).unwrap();
    let lent = holder.lend("r", &shuffled(BLOCKS as usize, BLOCKS, 1), 1);
    let offer = reader.accept(&lent.remote, None, None).unwrap();
    drop(landed(read(
        &reader,
        keeping(&offer, claim(&reader, 0..BLOCKS)),
    )));
    let more = ReadRequest {
        timeout: Duration::from_secs(5),
        ..keeping(&offer, claim(&reader, BLOCKS..2 * BLOCKS))
    };
    let handle = reader.read(more).unwrap();
    (holder, reader, handle)
}

over!(a_process_ends_well_when_its_engines_are_dropped: shm, tcp, fabric);
fn a_process_ends_well_when_its_engines_are_dropped() {
    let (holder, reader, handle) = busy();
    drop(reader);
    if let Err(failure) = handle.wait() {
        assert!(matches!(failure.error, ReadError::ShuttingDown));
        assert!(matches!(
            failure.blocks,
            FailedBlocks::Returned(_) | FailedBlocks::Quarantined { .. }
        ));
    }
    holder.leave();
}

over!(a_process_ends_well_when_its_engines_are_leaked: shm, tcp, fabric);
fn a_process_ends_well_when_its_engines_are_leaked() {
    let (holder, reader, handle) = busy();
    std::mem::forget(reader);
    std::mem::forget(handle);
    // Main returns with the driver, the holder and their agents alive.
    std::mem::forget(holder);
}

over!(a_process_ends_well_when_it_exits_in_the_middle: shm, tcp, fabric);
fn a_process_ends_well_when_it_exits_in_the_middle() {
    let _busy = busy();
    finished();
    std::process::exit(0);
}

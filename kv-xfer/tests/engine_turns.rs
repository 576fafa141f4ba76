//! Whose window is next: no read is forgotten, none waits for more than its turn.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::*;
use kv_xfer::engine::{Engine, ReadRequest, ReleasePolicy};
use kv_xfer::layout::{MemKind, PoolOrder, RegionGeometry};
use kv_xfer::memory::KvPool;
use kv_xfer::transport::sim::{Behaviour, SimFabric};

/// A pool whose regions lie on two devices in turn.
fn two_device_pool(fabric: &SimFabric) -> Arc<KvPool> {
    let layout = layout(PoolOrder::LayerFirst);
    let blocks = POOL_BLOCKS;
    let bytes: u64 = layout
        .regions()
        .iter()
        .map(|r| r.block_len * u64::from(blocks))
        .sum();
    let memory = fabric.memory(usize::try_from(bytes).unwrap());
    let mut base = memory.base();
    let regions = (0_u32..)
        .zip(layout.regions())
        .map(|(n, spec)| {
            let region = RegionGeometry {
                base,
                block_len: spec.block_len,
                block_stride: spec.block_len,
                block_count: blocks,
                mem: MemKind::Dram,
                device: n % 2,
            };
            base += spec.block_len * u64::from(blocks);
            region
        })
        .collect();
    KvPool::from_memory(layout, regions, memory).unwrap()
}

#[test]
fn a_tiny_read_from_several_devices_takes_a_window_for_each() {
    for in_flight in [1, 8] {
        let fabric = Arc::new(SimFabric::new());
        let (theirs, ours) = (two_device_pool(&fabric), two_device_pool(&fabric));
        let holder = engine(config("decode"), &theirs, &fabric);
        let mut reader_config = config("prefill");
        reader_config.holder.bind = None;
        reader_config.reader.windows_in_flight = in_flight;
        let reader = engine(reader_config, &ours, &fabric);
        let blocks = ids(0..1);
        fill(&theirs, &blocks, 1);
        let leased = lease(&holder, "r", &blocks, None);
        let offer = reader.accept(&leased.remote, None, None).unwrap();
        let landed = reader
            .read(ReadRequest {
                timeout: Duration::from_secs(5),
                release: ReleasePolicy::Never,
                ..request(&offer, ours.claim(ids(3..4)).unwrap())
            })
            .unwrap()
            .wait()
            .unwrap();
        assert!(landed.report.windows > 1, "{:?}", landed.report);
        assert_eq!(wrong_bytes(&landed.blocks, &blocks, 1), 0);
    }
}

#[test]
fn a_read_with_windows_to_post_does_not_wait_behind_full_ones() {
    const FULL: u32 = 600;
    let fabric = Arc::new(SimFabric::new());
    let holder_pool = sim_pool(&fabric, layout(PoolOrder::LayerFirst), POOL_BLOCKS);
    let reader_pool = sim_pool(&fabric, layout(PoolOrder::LayerFirst), FULL + 1);
    let holder = engine(config("decode"), &holder_pool, &fabric);
    let mut reader_config = config("prefill");
    reader_config.holder.bind = None;
    reader_config.reader.lanes = 1;
    reader_config.reader.windows_in_flight = 1;
    // A block has eight descriptors: no read is short.
    reader_config.reader.window_descriptors = 4;
    let reader = engine(reader_config, &reader_pool, &fabric);
    let blocks = ids(0..1);
    fill(&holder_pool, &blocks, 1);
    let leased = lease(&holder, "r", &blocks, None);
    let offer = reader.accept(&leased.remote, None, None).unwrap();
    let read = |block| {
        reader
            .read(ReadRequest {
                release: ReleasePolicy::Never,
                ..request(&offer, reader_pool.claim(ids([block])).unwrap())
            })
            .unwrap()
    };
    fabric.script((0..FULL).map(|_| Behaviour {
        never_ends: true,
        ..Behaviour::default()
    }));
    let full: Vec<_> = (0..FULL).map(&read).collect();
    eventually("all of them have a window in flight", || {
        fabric.windows_in_flight() == FULL as usize
    });
    // The driver has backed off by the time that the next one comes.
    let best = (0..5)
        .map(|_| {
            std::thread::sleep(Duration::from_millis(20));
            let landed = read(FULL).wait().unwrap();
            landed.report.total
        })
        .min()
        .unwrap();
    assert!(best < Duration::from_millis(20), "{best:?}");
    drop(full);
}

#[test]
fn peers_that_come_one_after_the_other_do_not_keep_an_earlier_one_waiting() {
    const PEERS: usize = 8;
    const BLOCKS: u32 = 1024;
    let fabric = Arc::new(SimFabric::new());
    let holders: Vec<_> = (0..PEERS)
        .map(|n| {
            let pool = sim_pool(&fabric, layout(PoolOrder::LayerFirst), BLOCKS);
            engine(config(&format!("holder{n}")), &pool, &fabric)
        })
        .collect();
    let ours = sim_pool(
        &fabric,
        layout(PoolOrder::LayerFirst),
        BLOCKS * PEERS as u32,
    );
    let mut reader_config = config("prefill");
    reader_config.holder.bind = None;
    reader_config.reader.lanes = 1;
    reader_config.reader.max_descriptor_bytes = 1;
    let reader = Arc::new(engine(reader_config, &ours, &fabric));
    let offers: Vec<_> = holders
        .iter()
        .map(|holder| {
            let leased = lease(holder, "r", &ids(0..BLOCKS), None);
            reader.accept(&leased.remote, None, None).unwrap()
        })
        .collect();
    let read = move |reader: &Engine, n: usize, blocks: u32| {
        let first = n as u32 * BLOCKS;
        let offer = offers.get(n).unwrap();
        reader
            .read(ReadRequest {
                span: 0..blocks as usize,
                release: ReleasePolicy::Never,
                ..request(
                    offer,
                    reader.pool().claim(ids(first..first + blocks)).unwrap(),
                )
            })
            .unwrap()
    };
    for n in 0..PEERS {
        drop(read(&reader, n, 1).wait().unwrap());
    }
    // Whose descriptor is moved, by its destination.
    let size = ours.regions().first().unwrap().block_stride;
    let owner = {
        let ours = Arc::clone(&ours);
        move |local: u64| {
            let region = ours.regions().iter().rfind(|r| r.base <= local);
            region.map(|r| ((local - r.base) / size) as usize / BLOCKS as usize)
        }
    };
    // The first peer's read goes first; each of the others is submitted when the one before it is
    // first served.
    let order = Arc::new(Mutex::new((Vec::new(), Vec::new())));
    let (seen, weak) = (Arc::clone(&order), Arc::downgrade(&reader));
    let first = read(&reader, 0, BLOCKS);
    fabric.watch(move |d| {
        let Some(n) = owner(d.local) else { return };
        let mut seen = seen.lock().unwrap();
        let (order, handles) = &mut *seen;
        let next = match n {
            0 => order.len() == 2048,
            _ => !order.contains(&n),
        };
        order.push(n);
        if next && n + 1 < PEERS {
            let reader = weak.upgrade().unwrap();
            handles.push(read(&reader, n + 1, BLOCKS));
        }
    });
    first.wait().unwrap();
    let mut seen = order.lock().unwrap();
    let (order, handles) = (seen.0.clone(), std::mem::take(&mut seen.1));
    drop(seen);
    assert_eq!(handles.len(), PEERS - 1);
    // Each of them is owed two windows' worth of bytes, 13 windows of so many descriptors.
    let longest = order.split(|n| *n == 0).map(<[usize]>::len).max().unwrap();
    assert!(longest < (PEERS - 1) * 15 * 64, "{longest}");
}

#[test]
fn callers_that_release_without_end_do_not_keep_reads_from_moving() {
    let pair = pair();
    let blocks = ids(0..1);
    let (leased, offer) = pair.offer("r", &blocks);
    let (_, other) = pair.offer("other", &ids(1..2));
    let stop = AtomicBool::new(false);
    let mut landed = 0;
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    pair.reader.release(&other);
                }
            });
        }
        for n in 0..5 {
            let request = ReadRequest {
                timeout: Duration::from_secs(2),
                release: ReleasePolicy::Never,
                ..request(&offer, pair.claim([n]))
            };
            let mut handle = pair.reader.read(request).unwrap();
            let outcome = handle.wait_timeout(Duration::from_secs(3));
            landed += u32::from(matches!(outcome, Some(Ok(_))));
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(landed, 5);
    assert!(pair.holder.revoke(leased.lease));
}

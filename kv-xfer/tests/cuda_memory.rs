//! Pools on a GPU, over a stand-in for the CUDA driver: contexts, bounds, what is refused, and that all is given back.
//! It shows that our own logic holds, and nothing about GPUs.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;
mod cuda_common;

use std::sync::Arc;

use common::{POOL_BLOCKS, fill, ids, layout, wrong_bytes};
use cuda_common::{Stub, alone, stub};
use kv_xfer::layout::{MemKind, PoolOrder, RegionGeometry};
use kv_xfer::memory::cuda::{
    CudaCompare, CudaDevice, CudaError, CudaKind, CudaMemory, CudaOptions, CudaStream,
};
use kv_xfer::memory::{KvPool, Memory, MemoryError, PoolError};

/// All is given back, and no context is left current.
fn assert_nothing_left(stub: &Stub, before: i64) {
    assert_eq!(
        stub.live_allocations(),
        before,
        "memory that was not given back"
    );
    assert_eq!(stub.live_handles(), 0);
    assert_eq!(stub.depth(), 0, "a context that is still current");
}

#[test]
fn pools_of_both_kinds_hold_what_is_written_and_give_all_back() {
    let _alone = alone();
    let Some(stub) = stub() else { return };
    let before = stub.live_allocations();
    for kind in [CudaKind::Plain, CudaKind::Rdma] {
        let options = CudaOptions::on(0).kind(kind);
        let layout = layout(PoolOrder::LayerFirst);
        let (pool, report) = KvPool::cuda(layout, POOL_BLOCKS, &options).unwrap();
        assert_eq!(report.device.name, "stand-in 0");
        assert_eq!(
            (report.kind, report.rdma, report.fabric_handle),
            (kind, true, false)
        );
        if kind == CudaKind::Rdma {
            assert!(stub.last_rdma(), "asked for as memory that NICs can reach");
        }
        for region in pool.regions() {
            assert_eq!((region.mem, region.device), (MemKind::Vram, 0));
            assert_eq!(region.base % 512, 0);
        }
        let mut first = [1; 8];
        pool.read_block(0, ids([0])[0], 0, &mut first).unwrap();
        assert_eq!(first, [0; 8], "zeroed");
        let blocks = ids([3, 60, 5]);
        fill(&pool, &blocks, 7);
        let owned = pool.claim(blocks.clone()).unwrap();
        assert_eq!(wrong_bytes(&owned, &blocks, 7), 0);
        assert_ne!(wrong_bytes(&owned, &blocks, 8), 0);
        drop(owned);
        drop(pool);
        assert_nothing_left(stub, before);
    }
}

#[test]
fn what_is_outside_is_refused_before_the_device_is_asked() {
    let _alone = alone();
    let Some(stub) = stub() else { return };
    let before = stub.live_allocations();
    let (memory, _) = CudaMemory::new(4096, &CudaOptions::on(0)).unwrap();
    let base = memory.base();
    for (addr, len) in [(base + 4090, 8), (base - 1, 1), (u64::MAX, 1), (0, 1)] {
        let out = MemoryError::OutOfRange {
            addr,
            len: len as u64,
        };
        assert_eq!(memory.read(addr, &mut vec![0; len]), Err(out));
        assert_eq!(memory.write(addr, &vec![0; len]), Err(out));
    }
    memory.write(base + 4096, &[]).unwrap();
    memory.write(base + 4088, &[9; 8]).unwrap();
    let stream = CudaStream::new(memory.device()).unwrap();
    memory.copy_within(base + 4088, base, 8, &stream).unwrap();
    memory.set(base + 8, 3, 4, &stream).unwrap();
    assert!(memory.copy_within(base + 4089, base, 8, &stream).is_err());
    assert!(memory.copy_within(base, base + 4089, 8, &stream).is_err());
    assert!(memory.set(base + 4096, 3, 1, &stream).is_err());
    stream.synchronize().unwrap();
    let mut out = [0; 12];
    memory.read(base, &mut out).unwrap();
    assert_eq!(out, [9, 9, 9, 9, 9, 9, 9, 9, 3, 3, 3, 3]);
    drop((stream, memory));
    assert_nothing_left(stub, before);
}

#[test]
fn a_thread_is_bound_for_as_long_as_it_says_and_left_as_it_was() {
    let _alone = alone();
    let Some(stub) = stub() else { return };
    let (memory, _) = CudaMemory::new(4096, &CudaOptions::on(0)).unwrap();
    assert_eq!(stub.depth(), 0);
    let bound = memory.bind_thread().unwrap();
    assert_eq!(stub.depth(), 1);
    memory.write(memory.base(), &[1]).unwrap();
    assert_eq!(stub.depth(), 1);
    drop(bound);
    assert_eq!(stub.depth(), 0);
    // Given back by a thread that nobody has prepared.
    std::thread::spawn(move || drop(memory)).join().unwrap();
}

#[test]
fn impossible_wishes_are_typed_errors() {
    let _alone = alone();
    let Some(stub) = stub() else { return };
    let before = stub.live_allocations();
    let refused = |bytes, options| CudaMemory::new(bytes, &options).unwrap_err();
    assert_eq!(
        refused(0, CudaOptions::on(0)),
        CudaError::BadSize { bytes: 0 }
    );
    assert!(matches!(
        refused(u64::MAX, CudaOptions::on(0)),
        CudaError::BadSize { .. }
    ));
    let error = refused(4096, CudaOptions::on(2));
    assert_eq!(
        error,
        CudaError::NoSuchDevice {
            wanted: 2,
            found: 2
        }
    );
    assert!(
        error.to_string().contains("CUDA_VISIBLE_DEVICES"),
        "{error}"
    );
    for kind in [CudaKind::Plain, CudaKind::Rdma] {
        let error = refused(4 << 30, CudaOptions::on(0).kind(kind));
        assert!(
            matches!(&error, CudaError::Call { code: 2, name, .. } if name == "CUDA_ERROR_OUT_OF_MEMORY"),
            "{error}"
        );
    }
    let error = refused(4096, CudaOptions::on(1).kind(CudaKind::Rdma));
    assert!(
        matches!(error, CudaError::Lacks { device: 1, .. }),
        "{error}"
    );
    let layout = layout(PoolOrder::BlockFirst);
    assert!(matches!(
        KvPool::cuda(layout, 4, &CudaOptions::on(9)),
        Err(PoolError::Cuda(CudaError::NoSuchDevice { .. }))
    ));
    assert_nothing_left(stub, before);
}

#[test]
fn foreign_pointers_are_believed_only_where_the_driver_agrees() {
    let _alone = alone();
    let Some(stub) = stub() else { return };
    let before = stub.live_allocations();
    let (owner, _) = CudaMemory::new(8192, &CudaOptions::on(0)).unwrap();
    let base = owner.base();
    let owner = Arc::new(owner);
    let take = |device, ranges: Vec<(u64, u64)>| {
        // SAFETY: the owner keeps the memory, and nothing else uses it.
        unsafe { CudaMemory::foreign(device, ranges, Box::new(Arc::clone(&owner))) }
    };
    assert_eq!(take(0, vec![]).unwrap_err(), CudaError::NoRanges);
    assert!(matches!(
        take(0, vec![(base, 0)]),
        Err(CudaError::BadRange { index: 0, .. })
    ));
    assert!(matches!(
        take(0, vec![(u64::MAX, 8)]),
        Err(CudaError::BadRange { .. })
    ));
    let on_stack = 0_u64;
    let host = std::ptr::from_ref(&on_stack).addr() as u64;
    let error = take(0, vec![(base, 8), (host, 8)]).unwrap_err();
    assert!(
        matches!(error, CudaError::NotDeviceMemory { index: 1, .. }),
        "{error}"
    );
    let error = take(1, vec![(base, 8)]).unwrap_err();
    assert!(
        matches!(
            error,
            CudaError::OtherDevice {
                index: 0,
                found: 0,
                expected: 1,
                ..
            }
        ),
        "{error}"
    );
    let error = take(0, vec![(base + 4096, 8192)]).unwrap_err();
    assert!(
        matches!(
            error,
            CudaError::LongerThanAllocation {
                allocated: 4096,
                ..
            }
        ),
        "{error}"
    );

    let memory = Arc::new(take(0, vec![(base + 4096, 4096), (base, 4096)]).unwrap());
    memory.write(base + 4096, &[5]).unwrap();
    assert!(
        memory.write(base + 4095, &[1, 2]).is_err(),
        "one range at a time"
    );
    let region = |base, mem, device, block_count| RegionGeometry {
        base,
        block_len: 4096,
        block_stride: 4096,
        block_count,
        mem,
        device,
    };
    let make = |region| {
        KvPool::on_gpu(
            layout(PoolOrder::BlockFirst),
            vec![region],
            Arc::clone(&memory),
        )
    };
    assert!(matches!(
        make(region(base, MemKind::Dram, 0, 1)),
        Err(PoolError::WrongKind { .. })
    ));
    assert!(matches!(
        make(region(base, MemKind::Vram, 1, 1)),
        Err(PoolError::WrongDevice {
            declared: 1,
            found: 0,
            ..
        })
    ));
    assert!(matches!(
        make(region(base, MemKind::Vram, 0, 2)),
        Err(PoolError::OutsideMemory { .. })
    ));
    let pool = make(region(base, MemKind::Vram, 0, 1)).unwrap();
    pool.write_block(0, ids([0])[0], 0, &[6]).unwrap();
    drop((pool, memory, owner));
    assert_nothing_left(stub, before);
}

#[test]
fn what_nics_write_is_flushed_where_it_must_be() {
    let _alone = alone();
    let Some(stub) = stub() else { return };
    let flushes = stub.flushes();
    let (ordered, report) = CudaMemory::new(4096, &CudaOptions::on(0)).unwrap();
    assert!(!report.flushes);
    ordered.settle().unwrap();
    assert_eq!(stub.flushes(), flushes);
    let (loose, report) = CudaMemory::new(4096, &CudaOptions::on(1)).unwrap();
    assert!(report.flushes);
    loose.settle().unwrap();
    assert_eq!(stub.flushes(), flushes + 1);
    // Neither ordered nor to be flushed: no pool there.
    stub.set_attribute(117, Some(0));
    let refused = CudaMemory::new(4096, &CudaOptions::on(1));
    stub.set_attribute(117, None);
    assert!(matches!(refused, Err(CudaError::Lacks { device: 1, .. })));
}

#[test]
fn words_are_compared_on_the_device() {
    let _alone = alone();
    let Some(stub) = stub() else { return };
    let before = stub.live_allocations();
    let options = CudaOptions::on(0);
    let (one, _) = CudaMemory::new(4096, &options).unwrap();
    let (other, _) = CudaMemory::new(4096, &options).unwrap();
    let mut compare = CudaCompare::new(one.device()).unwrap();
    let (a, b) = (one.base(), other.base());
    assert_eq!(compare.differing((&one, a), (&other, b), 512), Ok(0));
    one.write(a + 9, &[1]).unwrap();
    other.write(b + 4088, &[1; 8]).unwrap();
    assert_eq!(compare.differing((&one, a), (&other, b), 512), Ok(2));
    assert_eq!(
        compare.differing((&one, a + 16), (&other, b + 16), 509),
        Ok(0)
    );
    for (found, words) in [(a + 8, 512), (a + 1, 1), (a, u64::MAX)] {
        assert!(
            compare
                .differing((&one, found), (&other, b), words)
                .is_err()
        );
    }
    drop((compare, one, other));
    assert_nothing_left(stub, before);
}

#[test]
fn devices_say_what_they_are() {
    let _alone = alone();
    let Some(_) = stub() else { return };
    assert_eq!(CudaDevice::count(), Ok(2));
    assert_eq!(CudaDevice::driver_version(), Ok((12, 8)));
    let device = CudaDevice::open(1).unwrap();
    assert_eq!(device.info().bus_id, "0000:02:00.0");
    assert_eq!(device.info().bytes, 1 << 30);
}

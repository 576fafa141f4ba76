//! Reads into and out of pools on a GPU, and their order with work on streams: the scripted fabric over a stand-in for the
//! CUDA driver. It shows that our own logic holds, and nothing about GPUs.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;
mod cuda_common;

use std::sync::Arc;
use std::time::Duration;

use common::*;
use cuda_common::{alone, stub};
use kv_xfer::engine::{
    Engine, FailedBlocks, LeaseError, LeaseSpec, Offer, ReadError, ReadRequest, SubmitError,
};
use kv_xfer::ids::BlockId;
use kv_xfer::layout::{MemKind, PoolOrder};
use kv_xfer::memory::cuda::{
    CudaDevice, CudaMemory, CudaOptions, CudaStream, FlagState, StreamFlag, StreamFlags,
};
use kv_xfer::memory::{Gate, KvPool, MemoryError, Signal, StreamOrder};
use kv_xfer::transport::sim::{Behaviour, SimFabric};
use parking_lot::Mutex;

/// A wait that must not end by itself is looked at for this long.
const A_WHILE: Duration = Duration::from_millis(30);

fn gpu_pool(fabric: &SimFabric, device: u32) -> Arc<KvPool> {
    let options = CudaOptions::on(device);
    let (pool, _) = KvPool::cuda(layout(PoolOrder::LayerFirst), POOL_BLOCKS, &options).unwrap();
    fabric.adopt(pool.regions()[0].base, Arc::clone(pool.memory()));
    pool
}

fn host_pool(fabric: &SimFabric) -> Arc<KvPool> {
    sim_pool(fabric, layout(PoolOrder::LayerFirst), POOL_BLOCKS)
}

fn pair_of(fabric: Arc<SimFabric>, holder: &Arc<KvPool>, reader: &Arc<KvPool>) -> Pair {
    let mut settings = config("prefill");
    settings.holder.bind = None;
    settings.reader.window_descriptors = 1;
    Pair {
        holder: engine(config("decode"), holder, &fabric),
        reader: engine(settings, reader, &fabric),
        fabric,
    }
}

/// Both pools on one GPU, the peers met.
fn gpu_pair() -> Pair {
    let fabric = Arc::new(SimFabric::new());
    let (holder, reader) = (gpu_pool(&fabric, 0), gpu_pool(&fabric, 0));
    let pair = pair_of(fabric, &holder, &reader);
    let (_, offer) = pair.offer("first", &ids(0..1));
    drop(pair.read(&offer, 0..1).wait().unwrap());
    pair.assert_clean();
    pair
}

fn ordered(
    pair: &Pair,
    offer: &Offer,
    blocks: std::ops::Range<u32>,
    timeout: Duration,
    order: StreamOrder,
) -> kv_xfer::engine::ReadHandle {
    let request = ReadRequest {
        timeout,
        ..request(offer, pair.claim(blocks))
    };
    pair.reader.read_ordered(request, order).unwrap()
}

fn bytes_of_block(pool: &KvPool, region: usize, block: BlockId) -> Vec<u8> {
    let mut bytes = vec![0; pool.regions()[region].block_len as usize];
    pool.read_block(region, block, 0, &mut bytes).unwrap();
    bytes
}

fn addr(pool: &KvPool, region: usize, block: u32) -> u64 {
    pool.regions()[region].block_addr(BlockId(block)).unwrap()
}

/// The same memory as a pool's, for work on streams.
fn memory_of(pool: &Arc<KvPool>) -> CudaMemory {
    let (first, last) = (&pool.regions()[0], pool.regions().last().unwrap());
    let len = last.base + last.byte_len().unwrap() - first.base;
    // SAFETY: the pool keeps the memory, and the tests keep what they do with it apart.
    unsafe { CudaMemory::foreign(0, vec![(first.base, len)], Box::new(Arc::clone(pool))) }.unwrap()
}

fn flag() -> StreamFlag {
    let device = CudaDevice::open(0).unwrap();
    StreamFlags::new(&device, 4).unwrap().take().unwrap()
}

fn stream() -> CudaStream {
    CudaStream::new(&CudaDevice::open(0).unwrap()).unwrap()
}

#[test]
fn reads_land_between_every_two_kinds_of_memory() {
    let _alone = alone();
    let Some(stub) = stub() else { return };
    let before = stub.live_allocations();
    for (there, here) in [(true, true), (true, false), (false, true)] {
        let fabric = Arc::new(SimFabric::new());
        let pool = |gpu| match gpu {
            true => gpu_pool(&fabric, 0),
            false => host_pool(&fabric),
        };
        let (holder, reader) = (pool(there), pool(here));
        let pair = pair_of(Arc::clone(&fabric), &holder, &reader);
        let blocks = ids([9, 8, 7, 3, 4, 5, 40]);
        let (_, offer) = pair.offer("r", &blocks);
        let landed = pair.read(&offer, 10..17).wait().unwrap();
        assert_eq!(wrong_bytes(&landed.blocks, &blocks, 1), 0);
        drop(landed);
        pair.assert_clean();
    }
    assert_eq!(stub.live_allocations(), before, "every pool is given back");
    assert_eq!(stub.depth(), 0);
}

#[test]
fn the_word_is_in_host_memory_and_read_after_the_last_byte_on_the_device() {
    let _alone = alone();
    let Some(stub) = stub() else { return };
    let pair = gpu_pair();
    let regions = pair.reader.pool().regions().to_vec();
    let last = regions.last().unwrap();
    let device = regions[0].base..last.base + last.byte_len().unwrap();
    assert!(regions.iter().all(|region| region.mem == MemKind::Vram));
    let writes = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&writes);
    pair.fabric.watch(move |d| {
        seen.lock()
            .push((device.contains(&d.local), d.len, stub.depth()));
    });
    // Windows that end in another order than they were posted in, and long after their bytes are there.
    let slow = |extra_polls| Behaviour {
        per_poll: Some(1),
        extra_polls,
        ..Behaviour::default()
    };
    pair.fabric
        .script((0..8).map(|n| slow(if n % 2 == 0 { 40 } else { 1 })));
    let (_, offer) = pair.offer("r", &ids(0..4));
    let landed = pair.read(&offer, 0..4).wait().unwrap();
    assert_eq!(wrong_bytes(&landed.blocks, &ids(0..4), 1), 0);
    let writes = writes.lock();
    let (word, blocks) = writes.split_last().unwrap();
    assert_eq!(
        *word,
        (false, 8, 1),
        "the word, into host memory, after everything else"
    );
    assert_eq!(blocks.len(), 8);
    for (on_device, _, contexts) in blocks {
        assert!(*on_device);
        assert_eq!(*contexts, 1, "current where the transport is called");
    }
}

#[test]
fn a_lease_revoked_and_overwritten_by_a_kernel_is_never_reported_as_landed() {
    let _alone = alone();
    let Some(_) = stub() else { return };
    for at in 0..8 {
        let pair = Arc::new(gpu_pair());
        let (leased, offer) = pair.offer("r", &ids(0..4));
        let hook = {
            let pair = Arc::clone(&pair);
            let (memory, stream) = (memory_of(pair.holder.pool()), stream());
            move |_| {
                if pair.holder.revoke(leased.lease) {
                    let freed = pair.holder.freed().recv_timeout(LIMIT).unwrap();
                    // The next request's kernel, put on a stream once the blocks are free.
                    for region in 0..8 {
                        for block in &freed.blocks {
                            let addr = addr(pair.holder.pool(), region, block.0);
                            memory.set(addr, 0xee, 512, &stream).unwrap();
                        }
                    }
                    stream.synchronize().unwrap();
                }
            }
        };
        let mut script: Vec<Behaviour> = (0..at).map(|_| Behaviour::default()).collect();
        script.push(Behaviour {
            hook: Some(Box::new(hook)),
            ..Behaviour::default()
        });
        pair.fabric.script(script);
        let failure = pair.read(&offer, 0..4).wait().unwrap_err();
        assert!(
            matches!(failure.error, ReadError::LeaseLost { .. }),
            "at {at}: {failure}"
        );
        drop(failure);
        pair.assert_clean();
    }
}

#[test]
fn a_read_begins_after_what_still_writes_its_blocks() {
    let _alone = alone();
    let Some(_) = stub() else { return };
    let pair = gpu_pair();
    let (memory, stream, flag) = (memory_of(pair.reader.pool()), stream(), flag());
    // A kernel that has not begun yet, and will write into the destination.
    flag.hold(&stream).unwrap();
    memory
        .set(addr(pair.reader.pool(), 0, 0), 0x77, 512, &stream)
        .unwrap();
    let written = stream.record().unwrap();
    assert_eq!(written.is_open(), Ok(false));
    let (_, offer) = pair.offer("r", &ids(0..4));
    let posted = pair.fabric.windows_posted();
    let order = StreamOrder::default().after(written);
    let mut handle = ordered(&pair, &offer, 0..4, LIMIT, order);
    assert!(handle.wait_timeout(A_WHILE).is_none());
    assert_eq!(
        pair.fabric.windows_posted(),
        posted,
        "nothing is posted before"
    );
    // Others do not wait for it.
    let (_, other) = pair.offer("other", &ids(10..12));
    pair.read(&other, 20..22).wait().unwrap();

    flag.give_up();
    let landed = handle.wait_timeout(LIMIT).unwrap().unwrap();
    assert_eq!(
        wrong_bytes(&landed.blocks, &ids(0..4), 1),
        0,
        "it has landed last"
    );
    drop(landed);
    pair.assert_clean();
}

#[test]
fn a_read_waits_for_its_stream_no_longer_than_its_deadline() {
    let _alone = alone();
    let Some(_) = stub() else { return };
    let pair = gpu_pair();
    let (stream, flag, waited_for) = (stream(), flag(), flag());
    flag.hold(&stream).unwrap();
    let (_, offer) = pair.offer("r", &ids(0..4));
    let posted = pair.fabric.windows_posted();
    let order = StreamOrder::default()
        .after(stream.record().unwrap())
        .then(waited_for.signal());
    let handle = ordered(&pair, &offer, 0..4, A_WHILE, order);
    let failure = handle.wait().unwrap_err();
    assert!(
        matches!(
            failure.error,
            ReadError::Deadline {
                phase: "waiting for its stream",
                ..
            }
        ),
        "{failure}"
    );
    assert!(matches!(failure.blocks, FailedBlocks::Returned(_)));
    eventually("the flag is set", || {
        waited_for.state() == FlagState::Failed
    });
    // The same for one that is cancelled.
    let (_, offer) = pair.offer("again", &ids(0..4));
    let order = StreamOrder::default().after(stream.record().unwrap());
    let handle = ordered(&pair, &offer, 8..12, LIMIT, order);
    std::thread::sleep(A_WHILE);
    handle.cancel();
    assert!(matches!(
        handle.wait().unwrap_err().error,
        ReadError::Cancelled
    ));
    assert_eq!(pair.fabric.windows_posted(), posted);
    flag.give_up();
    drop(failure);
    pair.assert_clean();
}

#[test]
fn a_stream_goes_on_once_every_byte_has_landed() {
    let _alone = alone();
    let Some(_) = stub() else { return };
    let pair = gpu_pair();
    let pool = pair.reader.pool();
    let (memory, stream, flag) = (memory_of(pool), stream(), flag());
    // A kernel that uses what will have landed in block 0: it copies it to block 50.
    flag.hold(&stream).unwrap();
    let (from, to) = (addr(pool, 0, 0), addr(pool, 0, 50));
    memory.copy_within(from, to, 512, &stream).unwrap();
    let done = stream.record().unwrap();
    let (_, offer) = pair.offer("r", &ids([7, 6]));
    pair.fabric.script((0..4).map(|_| Behaviour {
        per_poll: Some(1),
        extra_polls: 200,
        ..Behaviour::default()
    }));
    std::thread::sleep(A_WHILE);
    assert_eq!(done.is_open(), Ok(false), "nothing has landed");
    let order = StreamOrder::default().then(flag.signal());
    let landed = ordered(&pair, &offer, 0..2, LIMIT, order).wait().unwrap();
    stream.synchronize().unwrap();
    assert_eq!(done.is_open(), Ok(true));
    assert_eq!(flag.state(), FlagState::Landed);
    let used = bytes_of_block(pool, 0, BlockId(50));
    assert_eq!(used, bytes_of_block(pair.holder.pool(), 0, BlockId(7)));
    drop(landed);
    pair.assert_clean();
}

/// A stream that waits for a flag: an event after the wait.
fn waiting(flag: &StreamFlag) -> impl Gate + use<> {
    let stream = stream();
    flag.hold(&stream).unwrap();
    let after = stream.record().unwrap();
    assert_eq!(after.is_open(), Ok(false));
    after
}

#[test]
fn a_failed_read_lets_its_stream_go_on_and_says_so() {
    let _alone = alone();
    let Some(_) = stub() else { return };
    let pair = gpu_pair();
    let end = |what: &str, flag: &StreamFlag, after: &dyn Gate| {
        eventually(what, || after.is_open() == Ok(true));
        assert_eq!(flag.state(), FlagState::Failed, "{what}");
    };

    // The lease is over.
    let (leased, offer) = pair.offer("lost", &ids(0..2));
    pair.holder.revoke(leased.lease);
    let (one, order) = (flag(), StreamOrder::default());
    let after = waiting(&one);
    let handle = ordered(&pair, &offer, 0..2, LIMIT, order.then(one.signal()));
    assert!(handle.wait().is_err());
    end("a lost lease", &one, &after);

    // The handle is dropped while bytes are on their way.
    let (_, offer) = pair.offer("dropped", &ids(0..2));
    let one = flag();
    let after = waiting(&one);
    pair.fabric.script([Behaviour {
        per_poll: Some(1),
        extra_polls: 2000,
        ..Behaviour::default()
    }]);
    let order = StreamOrder::default().then(one.signal());
    drop(ordered(&pair, &offer, 0..2, LIMIT, order));
    end("a dropped handle", &one, &after);

    // The read is refused.
    let (_, offer) = pair.offer("refused", &ids(0..2));
    let one = flag();
    let after = waiting(&one);
    let too_few = request(&offer, pair.claim(30..31));
    let order = StreamOrder::default().then(one.signal());
    let refused = pair.reader.read_ordered(too_few, order).unwrap_err();
    assert!(matches!(refused.error, SubmitError::CountMismatch { .. }));
    end("a refused read", &one, &after);
    drop(refused);
    assert!(pair.reader.release(&offer));

    // Nobody has ever given it to a read.
    let one = flag();
    let after = waiting(&one);
    drop(one.signal());
    end("a signal that was dropped", &one, &after);
    pair.assert_clean();

    // The engine ends while the read waits for its own turn.
    let (_, offer) = pair.offer("shut", &ids(0..2));
    let (gate, one) = (flag(), flag());
    let stream = stream();
    gate.hold(&stream).unwrap();
    let after = waiting(&one);
    let order = StreamOrder::default()
        .after(stream.record().unwrap())
        .then(one.signal());
    let handle = ordered(&pair, &offer, 0..2, LIMIT, order);
    let Pair { reader, .. } = pair;
    reader.shutdown(LIMIT);
    assert!(handle.wait().is_err());
    end("a shutdown", &one, &after);
    gate.give_up();
}

#[test]
fn blocks_that_are_still_written_are_not_leased() {
    let _alone = alone();
    let Some(stub) = stub() else { return };
    let pair = gpu_pair();
    let (stream, flag) = (stream(), flag());
    flag.hold(&stream).unwrap();
    let written = stream.record().unwrap();
    let lease = |engine: &Engine, gate: &dyn Gate, limit| {
        let blocks = ids(0..2);
        let spec = LeaseSpec {
            request: kv_xfer::ids::RequestId::new("written").unwrap(),
            tokens: 2 * u64::from(BLOCK_TOKENS),
            hashes: hashes(2),
            blocks,
            ttl: None,
            direction: kv_xfer::engine::Direction::DecodeToPrefill,
            tenant: None,
            conversation: None,
        };
        engine.lease_after(spec, gate, limit)
    };
    let refused = lease(&pair.holder, &written, A_WHILE).unwrap_err();
    assert!(matches!(refused.error, LeaseError::StillWritten { limit } if limit == A_WHILE));
    assert_eq!(refused.blocks, ids(0..2));
    assert_eq!(pair.holder.stats().leases, 0);

    // A device that is lost, for a lease and for a read.
    let (_, offer) = pair.offer("lost", &ids(4..6));
    stub.lose_events(700);
    let refused = lease(&pair.holder, &written, LIMIT).unwrap_err();
    let order = StreamOrder::default().after(stream.record().unwrap());
    let failure = ordered(&pair, &offer, 4..6, LIMIT, order)
        .wait()
        .unwrap_err();
    stub.lose_events(0);
    let lost = MemoryError::Device {
        operation: "cuEventQuery",
        code: 700,
    };
    assert!(matches!(refused.error, LeaseError::Device(cause) if cause == lost));
    assert!(
        matches!(failure.error, ReadError::Device { cause, .. } if cause == lost),
        "{failure}"
    );
    assert_eq!(failure.error.name(), "device_failed");

    flag.give_up();
    let leased = lease(&pair.holder, &written, LIMIT).unwrap();
    assert!(pair.holder.revoke(leased.lease));
    drop(failure);
    pair.assert_clean();
}

#[test]
fn what_nics_write_is_flushed_before_a_read_is_reported_as_landed() {
    let _alone = alone();
    let Some(stub) = stub() else { return };
    let fabric = Arc::new(SimFabric::new());
    // The second GPU of the stand-in needs it.
    let (holder, reader) = (host_pool(&fabric), gpu_pool(&fabric, 1));
    let pair = pair_of(Arc::clone(&fabric), &holder, &reader);
    let (_, offer) = pair.offer("r", &ids(0..2));
    let flushes = stub.flushes();
    pair.read(&offer, 0..2).wait().unwrap();
    assert!(stub.flushes() > flushes);
}

#[test]
fn flags_are_lent_again_and_those_who_wait_for_an_earlier_turn_go_on() {
    let _alone = alone();
    let Some(_) = stub() else { return };
    let device = CudaDevice::open(0).unwrap();
    assert!(StreamFlags::new(&device, 0).is_err());
    let flags = StreamFlags::new(&device, 1).unwrap();
    let mut last = None;
    for turn in 0..5 {
        let flag = flags.take().unwrap();
        assert!(flags.take().is_none(), "all are lent");
        assert_eq!(flag.state(), FlagState::Waiting, "turn {turn}");
        assert_eq!(
            *last.get_or_insert(flag.device_address()),
            flag.device_address()
        );
        let after = waiting(&flag);
        match turn % 3 {
            0 => drop(flag),
            1 => {
                Box::new(flag.signal()).ended(true);
                assert_eq!(flag.state(), FlagState::Landed);
                flag.give_up();
                assert_eq!(flag.state(), FlagState::Landed, "set once");
            }
            _ => flag.give_up(),
        }
        eventually("the stream goes on", || after.is_open() == Ok(true));
    }
}

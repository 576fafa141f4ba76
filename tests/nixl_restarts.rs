//! A holder that comes back again and again under the same name, host and port while it is read from,
//! one that finds its port taken, and one whose memory goes away.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, missing_docs)]

mod support;

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kv_xfer::engine::{Engine, Offer, ReadError, ReadRequest, StartError};
use kv_xfer::ids::BlockId;
use kv_xfer::side_channel::ServerError;
use support::*;

#[test]
#[ignore = "the body of the holders' processes"]
fn holder_process() {
    serve_holder();
}

/// What the readers are to read: an offer, and which life it is of.
type Current = Mutex<Option<(Arc<Offer>, u16)>>;

/// What came of the reads of all loops.
#[derive(Default)]
struct Counts {
    landed: AtomicU64,
    failed: AtomicU64,
    /// The life that each loop has last landed blocks of.
    seen: [AtomicU32; LOOPS],
    stop: AtomicBool,
}

const LOOPS: usize = 3;
const BLOCKS: u32 = 64;

/// Reads whatever is offered until told to stop. Every read ends, and lands right or not at all.
fn loop_reading(
    reader: &Engine,
    remote: &[BlockId],
    number: usize,
    now: &Current,
    counts: &Counts,
) {
    let first = number as u32 * BLOCKS;
    while !counts.stop.load(Ordering::Relaxed) {
        reader.returned().try_iter().for_each(drop);
        let Some((offer, life)) = now.lock().unwrap().clone() else {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        let Ok(blocks) = reader.pool().claim(ids(first..first + BLOCKS)) else {
            // In quarantine.
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        let request = ReadRequest {
            timeout: Duration::from_secs(3),
            ..keeping(&offer, blocks)
        };
        let mut handle = reader.read(request).unwrap();
        match handle.wait_timeout(LIMIT).expect("it ends in time") {
            Ok(landed) => {
                assert_eq!(wrong_words(&landed.blocks, remote, life), 0, "life {life}");
                counts.landed.fetch_add(1, Ordering::Relaxed);
                counts.seen[number].store(life.into(), Ordering::Relaxed);
            }
            Err(failure) => {
                let told = matches!(
                    failure.error,
                    ReadError::Connect { .. }
                        // It left in order.
                        | ReadError::LeaseLost { .. }
                        | ReadError::PeerRestarted { .. }
                        | ReadError::Transport { .. }
                        | ReadError::PeerSilent { .. }
                        | ReadError::Fenced { .. }
                        | ReadError::Deadline { .. }
                );
                assert!(told, "{failure}");
                counts.failed.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

over!(a_holder_restarted_again_and_again_is_met_each_time: shm, tcp, net);
fn a_holder_restarted_again_and_again_is_met_each_time() {
    let lives: u16 = if long() { 200 } else { 20 };
    let mut spec = HolderSpec::new(Shape::MEDIUM, BLOCKS);
    let reader = reader(Shape::MEDIUM, LOOPS as u32 * BLOCKS, |config| {
        config.reader.abandon_after = Duration::from_secs(1);
    });
    let remote = shuffled(BLOCKS as usize, BLOCKS, 9);
    let (now, counts) = (Current::default(), Counts::default());
    let mut met: Vec<Duration> = Vec::new();
    let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mut base = 0;
    std::thread::scope(|scope| {
        for number in 0..LOOPS {
            let (reader, remote, now, counts) = (&reader, &remote, &now, &counts);
            scope.spawn(move || loop_reading(reader, remote, number, now, counts));
        }
        let stopping = Stop(&counts.stop);
        for life in 1..=lives {
            let mut holder = Holder::start(&spec);
            spec.port = holder.port;
            let lent = holder.lend("r", &remote, life);
            let offer = reader.accept(&lent.remote, None, None).unwrap();
            let since = Instant::now();
            *now.lock().unwrap() = Some((Arc::new(offer), life));
            eventually("every loop reads from the new life", || {
                let seen = |seen: &AtomicU32| seen.load(Ordering::Relaxed) == u32::from(life);
                counts.seen.iter().all(seen)
            });
            met.push(since.elapsed());
            if life == lives / 4 {
                base = files();
            }
            // At any point of their reads, and in any way.
            std::thread::sleep(Duration::from_millis(u64::from(life) * 7 % 23));
            match life % 4 {
                3 => holder.leave(),
                2 => {
                    holder.freeze();
                    std::thread::sleep(Duration::from_millis(20));
                    holder.kill_and_wait();
                }
                _ => holder.kill_and_wait(),
            }
        }
        drop(stopping);
    });
    assert_clean(&reader);
    // Of agents and connections to earlier lives nothing is left, give or take one that is open.
    eventually("files are back", || files() < base + 40);
    met.sort_unstable();
    let (landed, failed) = (&counts.landed, &counts.failed);
    println!(
        "shown: {lives} lives; {landed:?} reads landed right, {failed:?} failed; every loop read from \
         the new life within {:?}, median {:?}",
        met[met.len() - 1],
        met[met.len() / 2]
    );
}

/// Ends the loops, also when the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

over!(a_holder_whose_port_is_taken_does_not_start_and_leaves_nothing: shm);
fn a_holder_whose_port_is_taken_does_not_start_and_leaves_nothing() {
    let squatter = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = squatter.local_addr().unwrap();
    let start = || {
        let mut config = config("decode");
        config.holder.bind = Some(taken);
        let pool = pool(Shape::TINY, 8);
        let weak = Arc::downgrade(&pool);
        (Engine::start(config, pool, open()), weak)
    };
    for _ in 0..3 {
        let (started, pool) = start();
        let error = started.unwrap_err();
        let named = matches!(
            error,
            StartError::SideChannel(ServerError::AddressTaken { addr }) if addr == taken
        );
        assert!(named, "{error}");
        assert!(pool.upgrade().is_none(), "the pool is let go");
    }
    drop(squatter);
    let (engine, _) = start();
    assert_eq!(engine.unwrap().side_channel().unwrap().port(), taken.port());
}

over!(memory_that_a_holder_unmaps_fails_its_reads_and_no_others: shm, tcp);
fn memory_that_a_holder_unmaps_fails_its_reads_and_no_others() {
    const MANY: u32 = 512;
    let mut other = Holder::start(&HolderSpec::new(Shape::MEDIUM, BLOCKS).named("other"));
    let reader = reader(Shape::MEDIUM, MANY + BLOCKS, |config| {
        config.reader.abandon_after = Duration::from_secs(1);
    });
    let aside = ids(0..BLOCKS);
    let lent = other.lend("aside", &aside, 1);
    let other_offer = reader.accept(&lent.remote, None, None).unwrap();
    let remote = shuffled(MANY as usize, MANY, 7);
    let mut ended = Vec::new();
    for (life, layers) in [0, 1, 4, 0, 2, 6].into_iter().enumerate() {
        let mut holder = Holder::start(&HolderSpec::new(Shape::MEDIUM, MANY));
        let generation = life as u16 + 1;
        let lent = holder.lend("r", &remote, generation);
        let offer = reader.accept(&lent.remote, None, None).unwrap();
        let into = |timeout| ReadRequest {
            timeout,
            ..keeping(&offer, claim(&reader, BLOCKS..BLOCKS + MANY))
        };
        drop(landed(read(&reader, into(LIMIT))));
        // Before the next read, or while it runs.
        let running = (layers > 0).then(|| {
            let handle = reader.read(into(Duration::from_secs(3))).unwrap();
            eventually("it gets on", || handle.layers_ready() >= layers);
            handle
        });
        holder.unmap();
        let handle = running.unwrap_or_else(|| reader.read(into(Duration::from_secs(3))).unwrap());
        match handle.wait() {
            Ok(landed) => {
                assert_eq!(wrong_words(&landed.blocks, &remote, generation), 0);
                ended.push("landed before it".to_owned());
            }
            Err(failure) => ended.push(failure.error.to_string()),
        }
        eventually("the blocks are back", || {
            reader.returned().try_iter().for_each(drop);
            reader.pool().claimed_blocks() == 0
        });
        let landed = landed(read(
            &reader,
            keeping(&other_offer, claim(&reader, 0..BLOCKS)),
        ));
        assert_eq!(wrong_words(&landed.blocks, &aside, 1), 0);
    }
    println!("shown: {ended:?}");
    assert!(ended.iter().any(|how| how != "landed before it"));
    assert_clean(&reader);
}

over!(a_stopped_holder_harms_no_read_and_is_read_from_again: shm);
fn a_stopped_holder_harms_no_read_and_is_read_from_again() {
    let mut holder = Holder::start(&HolderSpec::new(Shape::MEDIUM, BLOCKS));
    let reader = reader(Shape::MEDIUM, BLOCKS, |config| {
        config.reader.silent_after = Duration::from_millis(500);
        config.reader.connect_timeout = Duration::from_secs(1);
    });
    let remote = shuffled(BLOCKS as usize, BLOCKS, 3);
    let lent = holder.lend("r", &remote, 1);
    let offer = reader.accept(&lent.remote, None, None).unwrap();
    let read_all = || match read(&reader, keeping(&offer, claim(&reader, 0..BLOCKS))) {
        Ok(landed) => {
            assert_eq!(wrong_words(&landed.blocks, &remote, 1), 0);
            None
        }
        Err(failure) => {
            let error = &failure.error;
            let silent = matches!(
                error,
                ReadError::PeerSilent { .. } | ReadError::Connect { .. }
            );
            assert!(silent, "{error}");
            let error = error.name();
            drop(failure);
            assert_clean(&reader);
            Some(error)
        }
    };
    assert_eq!(read_all(), None);
    holder.freeze();
    // The reader's process copies by itself. Now and then UCX waits for the peer all the same: then the read
    // ends, and long before its deadline.
    let mut ended: BTreeMap<_, u32> = BTreeMap::new();
    (0..20).for_each(|_| *ended.entry(read_all().unwrap_or("landed")).or_default() += 1);
    println!("shown: {ended:?}");
    holder.thaw();
    eventually("it is read from again", || read_all().is_none());
    assert_clean(&reader);
    assert!(holder.answers());
}

//! What other processes can do to a reader over the real NIXL: die, hang, come back, or be somebody
//! else.
#![allow(clippy::panic, clippy::unwrap_used, missing_docs)]

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::num::NonZeroU16;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kv_xfer::engine::{ConnectError, Engine, FailedBlocks, Offer, ReadError, ReadRequest};
use kv_xfer::ids::BlockId;
use support::*;

#[test]
#[ignore = "the body of the holders' processes"]
fn holder_process() {
    serve_holder();
}

#[test]
#[ignore = "the body of the processes that read and are killed"]
fn reader_process() {
    read_without_end();
}

/// Reads the same blocks again and again until told to stop; returns how often.
fn keep_reading(reader: &Engine, offer: &Offer, remote: &[BlockId], stop: &AtomicBool) -> u32 {
    let mut count = 0;
    while !stop.load(Ordering::Relaxed) {
        let blocks = claim(reader, 0..remote.len() as u32);
        let landed = landed(read(reader, keeping(offer, blocks)));
        assert_eq!(wrong_words(&landed.blocks, remote, 1), 0);
        count += 1;
    }
    count
}

/// Blocks of the bystander's reads, at the beginning of the reader's pool.
const ASIDE: u32 = 16;
/// Blocks of each read from a victim.
const EACH: u32 = 128;
/// Reads from a victim.
const READS: u32 = 4;

/// A holder that is about to be killed, and what it offers.
struct Victim {
    holder: Holder,
    remote: Vec<Vec<BlockId>>,
    offers: Vec<Offer>,
}

impl Victim {
    fn new(reader: &Engine, name: &str) -> Self {
        let blocks = EACH * READS;
        let spec = HolderSpec::new(Shape::MEDIUM, blocks).named(name);
        let mut holder = Holder::start(&spec);
        let order = shuffled(blocks as usize, blocks, 8);
        let remote: Vec<_> = order.chunks(EACH as usize).map(<[_]>::to_vec).collect();
        let offers = remote.iter().enumerate().map(|(n, remote)| {
            let lent = holder.lend(&format!("r{n}"), remote, 1);
            reader.accept(&lent.remote, None, None).unwrap()
        });
        Self {
            offers: offers.collect(),
            remote,
            holder,
        }
    }

    fn request(&self, reader: &Engine, n: usize) -> ReadRequest<'_> {
        let first = ASIDE + n as u32 * EACH;
        request(&self.offers[n], claim(reader, first..first + EACH))
    }
}

/// A read of a victim may have landed before it died; else it says what happened, and in time.
/// Returns whether it landed.
fn landed_or_lost(outcome: kv_xfer::engine::ReadOutcome, remote: &[BlockId]) -> bool {
    match outcome {
        Ok(landed) => {
            assert_eq!(wrong_words(&landed.blocks, remote, 1), 0);
            true
        }
        Err(failure) => {
            let told = matches!(
                failure.error,
                ReadError::Transport { .. } | ReadError::Connect { .. } | ReadError::Fenced { .. }
            );
            assert!(told, "{failure}");
            false
        }
    }
}

over!(a_killed_holder_fails_its_own_reads_and_no_others: shm, tcp, net, fabric);
fn a_killed_holder_fails_its_own_reads_and_no_others() {
    let mut other = Holder::start(
        &HolderSpec::new(Shape::MEDIUM, ASIDE)
            .named("other")
            .on(OTHER),
    );
    let reader = reader(Shape::MEDIUM, ASIDE + EACH * READS, |_| {});
    let aside = ids((0..ASIDE).rev());
    let lent = other.lend("aside", &aside, 1);
    let other_offer = reader.accept(&lent.remote, None, None).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let bystander = scope.spawn(|| keep_reading(&reader, &other_offer, &aside, &stop));
        killed_at_every_stage(&reader);
        stop.store(true, Ordering::Relaxed);
        let count = bystander.join().unwrap();
        assert!(count > 0);
        println!("shown: {count} reads from another holder landed meanwhile");
    });
    assert_clean(&reader);
    let blocks = claim(&reader, 0..ASIDE);
    let last = landed(read(&reader, request(&other_offer, blocks)));
    assert_eq!(wrong_words(&last.blocks, &aside, 1), 0);
    drop(last);
    assert_clean(&reader);
}

fn killed_at_every_stage(reader: &Engine) {
    // Before anything is known of it.
    let mut victim = Victim::new(reader, "before");
    victim.holder.kill_and_wait();
    let failure = failed(read(reader, victim.request(reader, 0)));
    assert!(
        matches!(failure.error, ReadError::Connect { .. }),
        "{failure}"
    );
    assert!(matches!(failure.blocks, FailedBlocks::Returned(_)));
    drop(failure);

    // After a read: what has landed stays; the next read fails.
    let mut victim = Victim::new(reader, "idle");
    let first = landed(read(reader, victim.request(reader, 0)));
    victim.holder.kill_and_wait();
    assert_eq!(wrong_words(&first.blocks, &victim.remote[0], 1), 0);
    for n in 1..READS as usize {
        let outcome = read(reader, victim.request(reader, n));
        assert!(!landed_or_lost(outcome, &victim.remote[n]));
    }
    drop(first);

    // At some time while it is met or read from.
    let (mut kept, mut lost) = (0, 0);
    for round in 0..8 {
        eventually("the blocks of the last victim are back", || {
            reader.returned().try_iter().for_each(drop);
            reader.pool().claimed_blocks() <= ASIDE as usize
        });
        let mut victim = Victim::new(reader, &format!("victim{round}"));
        let handles: Vec<_> = (0..READS as usize)
            .map(|n| reader.read(victim.request(reader, n)).unwrap())
            .collect();
        if round % 2 == 0 {
            eventually("a layer is there", || handles[0].layers_ready() > round / 2);
        } else {
            std::thread::sleep(Duration::from_millis(u64::from(round) * 5));
        }
        victim.holder.kill();
        for (n, handle) in handles.into_iter().enumerate() {
            if landed_or_lost(handle.wait(), &victim.remote[n]) {
                kept += 1;
            } else {
                lost += 1;
            }
        }
    }
    assert!(lost > 0, "every read was faster than the signal");
    println!("shown: reads whose holder was killed meanwhile: {lost} failed, {kept} landed right");
}

over!(a_killed_reader_does_its_holder_no_harm: shm, tcp, net, fabric);
fn a_killed_reader_does_its_holder_no_harm() {
    const BLOCKS: u32 = 512;
    let over_tcp = std::env::var("UCX_TLS").is_ok_and(|carriers| carriers.contains("tcp"));
    let spec = HolderSpec::new(Shape::MEDIUM, BLOCKS);
    let mut holder = Holder::start(&spec);
    let reader = reader(Shape::MEDIUM, BLOCKS, |_| {});
    let remote = shuffled(BLOCKS as usize, BLOCKS, 4);
    let mut lent = holder.lend("r", &remote, 1);
    let mut offer = reader.accept(&lent.remote, None, None).unwrap();
    let mut aborted = 0;
    for round in 0..8 {
        let victim = ReadingProcess::start(Shape::MEDIUM, &lent);
        std::thread::sleep(Duration::from_millis(round * 7));
        victim.kill_and_wait();
        let mut outcome = read(&reader, keeping(&offer, claim(&reader, 0..BLOCKS)));
        // Over TCP, UCX sometimes aborts a process whose answers find the dead one's connection gone: its other
        // readers are told, and read from its successor.
        if let Err(failure) = outcome {
            println!("in round {round}: {failure}");
            assert!(over_tcp, "in round {round}: {failure}");
            drop(failure);
            assert_clean(&reader);
            if !holder.answers() {
                aborted += 1;
                println!("the holder was ended by UCX: {}", holder.ended());
                holder = Holder::start(&spec);
                lent = holder.lend("r", &remote, 1);
                offer = reader.accept(&lent.remote, None, None).unwrap();
            }
            outcome = read(&reader, keeping(&offer, claim(&reader, 0..BLOCKS)));
        }
        assert_eq!(wrong_words(&landed(outcome).blocks, &remote, 1), 0);
        assert_eq!(holder.counts(), (1, 0), "in round {round}");
    }
    assert_clean(&reader);
    println!("shown: 8 readers killed; UCX aborted the holder {aborted} times");
}

over!(a_holder_that_hangs_costs_its_reads_their_time_and_nobody_any_bytes: tcp, net, fabric);
fn a_holder_that_hangs_costs_its_reads_their_time_and_nobody_any_bytes() {
    const BLOCKS: u32 = 1024;
    let mut spec = HolderSpec::new(Shape::MEDIUM, BLOCKS);
    let mut holder = Holder::start(&spec);
    spec.port = holder.port;
    let reader = reader(Shape::MEDIUM, BLOCKS, |config| {
        config.reader.abandon_after = Duration::from_millis(500);
    });
    let remote = shuffled(BLOCKS as usize, BLOCKS, 6);
    let mut aborted = 0;
    for round in 0..3 {
        let lent = holder.lend("before", &remote, 1);
        let offer = reader.accept(&lent.remote, None, None).unwrap();
        let met = reader.stats().meetings;
        let handle = reader
            .read(ReadRequest {
                timeout: Duration::from_secs(1),
                ..request(&offer, claim(&reader, 0..BLOCKS))
            })
            .unwrap();
        // Frozen when it has just been met, or when bytes flow.
        if round == 0 {
            eventually("it is met", || reader.stats().meetings > met);
        } else {
            eventually("a layer is there", || handle.layers_ready() > 0);
        }
        holder.freeze();
        let failure = failed(handle.wait());
        assert!(
            matches!(failure.error, ReadError::Deadline { .. }),
            "{failure}"
        );
        assert!(
            matches!(failure.blocks, FailedBlocks::Quarantined { blocks } if blocks == BLOCKS as usize),
            "{:?}",
            failure.blocks
        );
        assert!(
            reader.pool().claim(ids([0])).is_err(),
            "what is in doubt is not free"
        );
        let returned = reader.returned().recv_timeout(LIMIT).unwrap();
        assert_eq!(returned.blocks.len(), BLOCKS as usize);
        assert_eq!(reader.stats().quarantined, 0);
        // The blocks are used for something else; then the holder wakes up and sends what it owes.
        let mut canary = returned.blocks;
        fill_owned(&mut canary, 7);
        holder.thaw();
        let own = canary.ids().to_vec();
        let until = Instant::now() + Duration::from_millis(500);
        while Instant::now() < until {
            assert_eq!(
                wrong_words(&canary, &own, 7),
                0,
                "late bytes in round {round}"
            );
        }
        drop(canary);
        // UCX's emulated reads have a fault of their own: a process whose answers to several reads
        // find the connection gone aborts. Its successor is then read from.
        let mut tries = 0..20;
        loop {
            assert!(tries.next().is_some(), "it is not read from again");
            if !holder.answers() {
                aborted += 1;
                println!("the holder was ended by UCX: {}", holder.ended());
                holder = Holder::start(&spec);
            }
            let lent = holder.lend(&format!("after{tries:?}"), &remote, 2);
            let offer = reader.accept(&lent.remote, None, None).unwrap();
            match read(&reader, request(&offer, claim(&reader, 0..BLOCKS))) {
                Ok(landed) => {
                    assert_eq!(wrong_words(&landed.blocks, &remote, 2), 0);
                    break;
                }
                Err(failure) => println!("not yet: {failure}"),
            }
            assert_clean(&reader);
            std::thread::sleep(Duration::from_millis(100));
        }
        // The first lease may be left to its time: its holder did not take the release. Taken back
        // here, for the next round.
        holder.begin_revoke(lent.lease, Duration::ZERO, 3);
        holder.end_revoke();
        eventually("no lease is left", || holder.counts().0 == 0);
    }
    assert_clean(&reader);
    println!(
        "shown: 3 times frozen, quarantined and fenced, no late byte, read again; UCX aborted the \
         holder {aborted} times"
    );
}

over!(a_holder_that_hangs_before_it_is_met_is_given_up: tcp, net, fabric);
fn a_holder_that_hangs_before_it_is_met_is_given_up() {
    let mut holder = Holder::start(&HolderSpec::new(Shape::MEDIUM, 32));
    let reader = reader(Shape::MEDIUM, 32, |config| {
        config.reader.connect_timeout = Duration::from_millis(500);
    });
    let remote = ids(0..8);
    let lent = holder.lend("r", &remote, 1);
    let offer = reader.accept(&lent.remote, None, None).unwrap();
    holder.freeze();
    let failure = failed(read(&reader, keeping(&offer, claim(&reader, 0..8))));
    assert!(
        matches!(failure.error, ReadError::Connect { .. }),
        "{failure}"
    );
    drop(failure);
    holder.thaw();
    eventually("it is met after all", || {
        read(&reader, keeping(&offer, claim(&reader, 0..8)))
            .is_ok_and(|landed| wrong_words(&landed.blocks, &remote, 1) == 0)
    });
    assert_clean(&reader);
}

over!(a_restarted_holder_is_never_taken_for_its_predecessor: shm, tcp, net, fabric);
fn a_restarted_holder_is_never_taken_for_its_predecessor() {
    const BLOCKS: u32 = 64;
    let mut spec = HolderSpec::new(Shape::MEDIUM, BLOCKS);
    let reader = reader(Shape::MEDIUM, BLOCKS, |_| {});
    let remote = shuffled(BLOCKS as usize, BLOCKS, 9);
    let try_read = |offer: &Offer| read(&reader, keeping(offer, claim(&reader, 0..BLOCKS)));
    let back = || {
        eventually("the blocks are back", || {
            reader.returned().try_iter().for_each(drop);
            reader.pool().claimed_blocks() == 0
        });
    };
    let refused = |offer: &Offer| {
        let failure = failed(try_read(offer));
        let told = matches!(
            failure.error,
            ReadError::PeerRestarted { .. }
                | ReadError::Connect { .. }
                | ReadError::Transport { .. }
        );
        assert!(told, "{failure}");
        drop(failure);
        back();
    };
    let mut old: Vec<Offer> = Vec::new();
    let mut longest = Duration::ZERO;
    for life in 0..6_u16 {
        let mut holder = Holder::start(&spec);
        spec.port = holder.port;
        let lent = holder.lend("r", &remote, life + 1);
        let offer = reader.accept(&lent.remote, None, None).unwrap();
        let since = Instant::now();
        if life % 2 == 0 {
            old.last().iter().for_each(|old| refused(old));
        }
        eventually("the new life is read from", || match try_read(&offer) {
            Ok(landed) => {
                assert_eq!(wrong_words(&landed.blocks, &remote, life + 1), 0);
                true
            }
            Err(failure) => {
                drop(failure);
                back();
                false
            }
        });
        longest = longest.max(since.elapsed());
        // Every earlier descriptor is refused, and does the new life no harm.
        old.iter().for_each(refused);
        assert!(try_read(&offer).is_ok());
        old.push(offer);
        if life % 3 == 2 {
            holder.leave();
            refused(&old[old.len() - 1]);
        } else {
            holder.kill_and_wait();
        }
    }
    println!("shown: five restarts; the new life was read from within {longest:?}");
    assert_clean(&reader);
}

/// Serves connections on a port of its own until the process ends.
fn imposter(serve: impl Fn(TcpStream) + Send + 'static) -> NonZeroU16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            serve(stream.unwrap());
        }
    });
    NonZeroU16::new(port).unwrap()
}

/// Passes on to a holder and back, but of what the holder says only the first bytes; then hangs or
/// closes.
fn cut(holder: u16, after: usize, hang: bool) -> NonZeroU16 {
    imposter(move |mut client| {
        let mut server = TcpStream::connect(("127.0.0.1", holder)).unwrap();
        let (mut up, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut up, &mut to));
        std::thread::spawn(move || {
            let mut said = vec![0; after];
            let mut have = 0;
            while have < after {
                match server.read(&mut said[have..]) {
                    Ok(0) | Err(_) => break,
                    Ok(n) => {
                        if client.write_all(&said[have..have + n]).is_err() {
                            return;
                        }
                        have += n;
                    }
                }
            }
            if hang {
                std::thread::sleep(LIMIT);
            }
            let _ = client.shutdown(Shutdown::Both);
        });
    })
}

over!(whoever_else_answers_at_the_address_fails_the_read_in_time: shm);
fn whoever_else_answers_at_the_address_fails_the_read_in_time() {
    const CONNECT: Duration = Duration::from_millis(700);
    let mut holder = Holder::start(&HolderSpec::new(Shape::MEDIUM, 32));
    let mut stranger = Holder::start(&HolderSpec::new(Shape::MEDIUM, 32).named("stranger"));
    let mut larger = Holder::start(&HolderSpec::new(Shape::TINY, 32).named("decode"));
    let reader = reader(Shape::MEDIUM, 32, |config| {
        config.reader.connect_timeout = CONNECT;
    });
    let remote = ids(0..8);
    let lent = holder.lend("r", &remote, 1);

    let (sender, kept) = std::sync::mpsc::channel();
    let silent = imposter(move |stream| sender.send(stream).unwrap());
    let closed = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        NonZeroU16::new(listener.local_addr().unwrap().port()).unwrap()
    };
    let mut ports = vec![
        ("nobody".to_owned(), closed),
        ("never answers".to_owned(), silent),
        ("closes at once".to_owned(), imposter(drop)),
        (
            "another protocol".to_owned(),
            imposter(|mut stream| {
                let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n");
            }),
        ),
        (
            "noise without an end".to_owned(),
            imposter(|mut stream| {
                std::thread::spawn(move || while stream.write_all(&[0xa5; 4096]).is_ok() {});
            }),
        ),
        (
            "another engine".to_owned(),
            NonZeroU16::new(stranger.port).unwrap(),
        ),
        (
            "the same name with another layout".to_owned(),
            NonZeroU16::new(larger.port).unwrap(),
        ),
    ];
    for after in [1, 10, 11, 63, 64, 65, 90, 150, 300, 600, 900] {
        ports.push((
            format!("closes after {after}"),
            cut(holder.port, after, false),
        ));
    }
    for after in [0, 64, 100, 500] {
        ports.push((
            format!("hangs after {after}"),
            cut(holder.port, after, true),
        ));
    }
    for (who, port) in ports {
        let mut elsewhere = lent.remote.clone();
        elsewhere.remote_port = port;
        let offer = reader.accept(&elsewhere, None, None).unwrap();
        let since = Instant::now();
        let failure = failed(read(&reader, keeping(&offer, claim(&reader, 0..8))));
        // A loaded machine may be late, but not as late as the read's own end.
        assert!(since.elapsed() < LIMIT - Duration::from_secs(5), "{who}");
        let ReadError::Connect { cause, .. } = &failure.error else {
            panic!("{who}: {failure}");
        };
        println!("{who}: {cause}");
        if who == "another engine" {
            let named = matches!(cause, ConnectError::OtherEngine { found } if found.as_str() == "stranger");
            assert!(named, "{cause}");
        }
        let FailedBlocks::Returned(blocks) = failure.blocks else {
            panic!("{who}: the blocks are in doubt though nothing was posted");
        };
        assert_eq!(blocks.ids(), ids(0..8));
    }
    drop(kept);
    // The real one is not held up by any of them.
    let offer = reader.accept(&lent.remote, None, None).unwrap();
    let landed = landed(read(&reader, request(&offer, claim(&reader, 0..8))));
    assert_eq!(wrong_words(&landed.blocks, &remote, 1), 0);
    drop(landed);
    assert_clean(&reader);
    assert_eq!(stranger.counts(), (0, 0));
    assert_eq!(larger.counts(), (0, 0));
}

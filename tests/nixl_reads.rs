//! Reads over the real NIXL, between processes: what lands is right, whatever the holder does.
#![allow(clippy::panic, clippy::unwrap_used, missing_docs)]

mod support;

use std::time::Duration;

use kv_xfer::engine::{ReadError, ReadRequest, SubmitError};
use kv_xfer::ids::BlockId;
use support::*;

#[test]
#[ignore = "the body of the holders' processes"]
fn holder_process() {
    serve_holder();
}

over!(reads_land_with_every_byte_right: shm, tcp, fabric);
fn reads_land_with_every_byte_right() {
    const BLOCKS: u32 = 256;
    let orders: [(&str, Vec<BlockId>); 6] = [
        ("one block", ids([17])),
        ("the last block", ids([BLOCKS - 1])),
        ("contiguous", ids(32..160)),
        ("reversed", ids((32..160).rev())),
        ("interleaved", ids((0..BLOCKS).step_by(2))),
        ("random", shuffled(200, BLOCKS, 1)),
    ];
    let shapes = [
        (Shape::MEDIUM, Shape::MEDIUM),
        (Shape::MEDIUM.block_first(), Shape::MEDIUM.block_first()),
        (Shape::MEDIUM, Shape::MEDIUM.block_first()),
        (Shape::MEDIUM.block_first(), Shape::MEDIUM),
    ];
    for (there, here) in shapes {
        let mut holder = Holder::start(&HolderSpec::new(there, BLOCKS));
        let reader = reader(here, BLOCKS, |_| {});
        for (n, (name, remote)) in orders.iter().enumerate() {
            let generation = n as u16 + 1;
            let lent = holder.lend(name, remote, generation);
            let offer = reader.accept(&lent.remote, None, None).unwrap();
            let local = shuffled(remote.len(), BLOCKS, 100 + n as u64);
            let claimed = reader.pool().claim(local.clone()).unwrap();
            let landed = landed(read(&reader, request(&offer, claimed)));
            assert_eq!(wrong_words(&landed.blocks, remote, generation), 0, "{name}");
            assert_eq!(landed.blocks.ids(), local);
            assert_eq!(landed.report.bytes, remote.len() as u64 * (64 << 10));
            // Released once, and its blocks came back once.
            let mut freed = Vec::new();
            eventually(name, || {
                freed.extend(holder.freed());
                !freed.is_empty()
            });
            assert_eq!(freed.len(), 1);
            assert_eq!(freed[0].lease, lent.lease.0);
            assert_eq!(freed[0].reason, "released");
            assert_eq!(ids(freed[0].blocks.iter().copied()), *remote);
        }
        assert_clean(&reader);
        reader.shutdown(LIMIT);
        assert_eq!(holder.freed(), [], "nothing comes back twice");
        // Over LIBFABRIC releases go by the side channel.
        let notices = if over_libfabric() { 0 } else { orders.len() };
        assert_eq!(holder.counts(), (0, notices as u64));
        holder.leave();
    }
}

over!(a_partial_last_block_is_not_offered: shm);
fn a_partial_last_block_is_not_offered() {
    let mut holder = Holder::start(&HolderSpec::new(Shape::MEDIUM, 32));
    let reader = reader(Shape::MEDIUM, 32, |_| {});
    let remote = ids([3, 9, 4, 20]);
    let lent = holder.lend_tokens("partial", &remote, 3 * 16 + 5, 1);
    let offer = reader.accept(&lent.remote, None, None).unwrap();
    let prompt = hashes(10);
    let full = offer.matching_blocks(&prompt);
    assert_eq!(full, 3, "only full blocks have a hash to match");
    let landed = landed(read(
        &reader,
        ReadRequest {
            span: 0..full,
            ..request(&offer, claim(&reader, 0..3))
        },
    ));
    assert_eq!(wrong_words(&landed.blocks, &remote[..3], 1), 0);
    drop(landed);
    assert_clean(&reader);
}

over!(a_lease_that_ends_during_the_read_never_lands_changed_bytes: shm, tcp, net, fabric);
fn a_lease_that_ends_during_the_read_never_lands_changed_bytes() {
    const BLOCKS: u32 = 512;
    const ROUNDS: u32 = 60;
    let mut holder = Holder::start(&HolderSpec::new(Shape::MEDIUM, BLOCKS));
    let reader = reader(Shape::MEDIUM, BLOCKS, |config| {
        config.reader.window_descriptors = 64;
    });
    let remote = shuffled(BLOCKS as usize, BLOCKS, 3);
    let (mut kept, mut lost) = (0, 0);
    for round in 0..ROUNDS {
        let (old, new) = (2 * round as u16 + 1, 2 * round as u16 + 2);
        let lent = holder.lend(&format!("r{round}"), &remote, old);
        let offer = reader.accept(&lent.remote, None, None).unwrap();
        let blocks = claim(&reader, 0..BLOCKS);
        let revoke = |holder: &mut Holder, after| holder.begin_revoke(lent.lease, after, new);
        let outcome = match round % 6 {
            // Before the first byte.
            0 => {
                revoke(&mut holder, Duration::ZERO);
                assert!(holder.end_revoke());
                read(&reader, keeping(&offer, blocks))
            }
            // When some of the eight layers are there.
            layers @ 1..=3 => {
                let mut handle = reader.read(keeping(&offer, blocks)).unwrap();
                let mut outcome = None;
                while outcome.is_none() && handle.layers_ready() < 2 * layers {
                    outcome = handle.wait_timeout(Duration::from_micros(10));
                }
                revoke(&mut holder, Duration::ZERO);
                let outcome = outcome.unwrap_or_else(|| handle.wait());
                assert!(holder.end_revoke());
                outcome
            }
            // At some time.
            4 => {
                revoke(&mut holder, Duration::from_micros(u64::from(round) * 700));
                let outcome = read(&reader, keeping(&offer, blocks));
                assert!(holder.end_revoke());
                outcome
            }
            // After the last byte.
            _ => {
                let outcome = read(&reader, keeping(&offer, blocks));
                assert!(outcome.is_ok());
                revoke(&mut holder, Duration::ZERO);
                assert!(holder.end_revoke());
                outcome
            }
        };
        match outcome {
            Ok(landed) => {
                assert_eq!(wrong_words(&landed.blocks, &remote, old), 0, "{round}");
                kept += 1;
            }
            Err(failure) => {
                assert!(
                    matches!(failure.error, ReadError::LeaseLost { lease, .. } if lease == lent.lease),
                    "{failure}"
                );
                lost += 1;
            }
        }
    }
    assert!(kept >= ROUNDS / 6 && lost >= ROUNDS / 6);
    println!("shown: of {ROUNDS} reads {lost} lost their lease and {kept} landed unchanged");
    assert_clean(&reader);
}

over!(a_second_read_of_a_released_lease_fails: shm, tcp, fabric);
fn a_second_read_of_a_released_lease_fails() {
    let mut holder = Holder::start(&HolderSpec::new(Shape::MEDIUM, 32));
    let reader = reader(Shape::MEDIUM, 32, |_| {});
    let remote = ids([5, 4, 3, 30]);
    let lent = holder.lend("twice", &remote, 1);
    let offer = reader.accept(&lent.remote, None, None).unwrap();
    let first = landed(read(&reader, request(&offer, claim(&reader, 0..4))));
    assert_eq!(wrong_words(&first.blocks, &remote, 1), 0);
    eventually("the release arrives", || holder.counts().0 == 0);
    let second = failed(read(&reader, request(&offer, claim(&reader, 4..8))));
    assert!(
        matches!(second.error, ReadError::LeaseLost { .. }),
        "{second}"
    );
    // The next lease of the same blocks is not taken for the old one.
    let again = holder.lend("again", &remote, 2);
    let failure = failed(read(&reader, request(&offer, claim(&reader, 8..12))));
    assert!(
        matches!(failure.error, ReadError::LeaseLost { .. }),
        "{failure}"
    );
    assert_eq!(holder.counts().0, 1, "a stale release ends no other lease");
    let offer = reader.accept(&again.remote, None, None).unwrap();
    let landed = landed(read(&reader, request(&offer, claim(&reader, 12..16))));
    assert_eq!(wrong_words(&landed.blocks, &remote, 2), 0);
    drop((first, second, failure, landed));
    assert_clean(&reader);
}

over!(submitting_does_not_wait_for_the_driver: shm, tcp);
fn submitting_does_not_wait_for_the_driver() {
    const EACH: u32 = 1600;
    const READS: u32 = 100;
    for queue in [1024, 8] {
        let mut holder = Holder::start(&HolderSpec::new(Shape::TINY, EACH));
        let reader = reader(Shape::TINY, EACH * READS, |config| {
            config.reader.queue = queue;
            config.reader.active = 4;
        });
        let remote = shuffled(EACH as usize, EACH, 5);
        let lent = holder.lend("all", &remote, 1);
        let offer = reader.accept(&lent.remote, None, None).unwrap();
        let (mut handles, mut refused) = (Vec::new(), 0);
        for n in 0..READS {
            let blocks = claim(&reader, n * EACH..(n + 1) * EACH);
            match reader.read(keeping(&offer, blocks)) {
                Ok(handle) => handles.push(handle),
                Err(back) => {
                    assert_eq!(back.error, SubmitError::QueueFull { queued: queue });
                    assert_eq!(back.blocks.len(), EACH as usize);
                    refused += 1;
                }
            }
        }
        assert_eq!(refused == 0, queue == 1024, "{refused} refused");
        for handle in handles {
            let landed = landed(handle.wait());
            assert_eq!(wrong_words(&landed.blocks, &remote, 1), 0);
        }
        println!("shown: queue of {queue}: {refused} of {READS} refused, the others landed");
        assert_clean(&reader);
    }
}

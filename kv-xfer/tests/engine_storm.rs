//! Random faults in random orders: no byte is ever written into a block that is not a read's, every
//! read ends once, what landed is right, and in the end nothing is left.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::*;
use kv_xfer::engine::{FailedBlocks, ReadRequest, ReleasePolicy};
use kv_xfer::ids::BlockId;
use kv_xfer::memory::AccessError;
use kv_xfer::transport::sim::Behaviour;
use kv_xfer::transport::{AfterError, FailureKind};

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % n
    }
}

fn behaviour(random: &mut Random) -> Behaviour {
    let mut of = Behaviour::default();
    match random.below(32) {
        0 => of.never_ends = true,
        1 => of.fail_at = Some((random.below(9) as usize, AfterError::InDoubt)),
        2 => of.fail_at = Some((random.below(9) as usize, AfterError::Quiet)),
        3 => of.refuse_post = Some(FailureKind::Rejected),
        4 => of.refuse_post = Some(FailureKind::PeerLost),
        5 | 6 => of.per_poll = Some(1),
        7 => {
            of.per_poll = Some(1);
            of.extra_polls = 2000;
        }
        8 => of.reversed = true,
        _ => {}
    }
    of
}

/// Returns how many blocks were written.
fn storm(seed: u64) -> u64 {
    let mut random = Random(seed);
    let pair = pair_with(|config| {
        config.reader.abandon_after = Duration::from_millis(random.below(20));
        config.reader.active = 4;
        config.reader.window_descriptors = 3;
        config.reader.windows_in_flight = 1 + random.below(3) as usize;
        config.reader.idle_peer = Duration::from_millis(30);
        config.reader.lanes = 1 + random.below(3) as usize;
        config.reader.wide_peers = 1 + random.below(2) as usize;
    });
    if random.below(3) > 0 {
        pair.fabric.move_when_posted();
    }
    // The landing words are not the pool's; every other write must go to a claimed block.
    let stray = Arc::new(AtomicU64::new(0));
    let written = Arc::new(AtomicU64::new(0));
    let (seen, all) = (Arc::clone(&stray), Arc::clone(&written));
    let pool = Arc::clone(pair.reader.pool());
    pair.fabric.watch(move |d| {
        for (index, region) in pool.regions().iter().enumerate() {
            let end = region.base + region.byte_len().unwrap();
            if (region.base..end).contains(&d.local) {
                let first = (d.local - region.base) / region.block_stride;
                for n in 0..d.len / region.block_len {
                    let block = BlockId((first + n) as u32);
                    all.fetch_add(1, Ordering::SeqCst);
                    let probed = pool.write_block(index, block, 0, &[]);
                    if !matches!(probed, Err(AccessError::Claimed { .. })) {
                        seen.fetch_add(1, Ordering::SeqCst);
                    }
                }
            }
        }
    });
    let mut handles = Vec::new();
    let mut failed_peer = 0;
    for n in 0..60 {
        pair.reader.returned().try_iter().for_each(drop);
        if pair.reader.stats().failed_peer > failed_peer {
            // It is left alone for a while.
            failed_peer = pair.reader.stats().failed_peer;
            std::thread::sleep(Duration::from_millis(100));
        }
        pair.holder.freed().try_iter().for_each(drop);
        let first = random.below(40) as u32;
        let blocks = ids(first..first + 1 + random.below(12) as u32);
        let (leased, offer) = pair.offer(&format!("r{n}"), &blocks);
        let script: Vec<Behaviour> = (0..random.below(4))
            .map(|_| behaviour(&mut random))
            .collect();
        pair.fabric.script(script);
        let at = random.below(48) as u32;
        let len = blocks.len() as u32;
        let Ok(claimed) = pair.reader.pool().claim(ids(at..at + len)) else {
            pair.holder.revoke(leased.lease);
            continue;
        };
        let handle = pair.reader.read(ReadRequest {
            timeout: Duration::from_millis(1 + random.below(40)),
            release: ReleasePolicy::Always,
            ..request(&offer, claimed)
        });
        let mut handle = handle.unwrap();
        match random.below(6) {
            0 => drop(handle),
            1 => {
                handle.cancel();
                handles.push((handle, blocks));
            }
            2 => {
                pair.holder.revoke(leased.lease);
                drop(handle.wait());
            }
            3 => {
                pair.fabric.land_late_bytes();
                drop(handle.wait_timeout(Duration::from_millis(random.below(4))));
            }
            _ => handles.push((handle, blocks)),
        }
        if handles.len() > 3 {
            let at = random.below(4) as usize;
            let (handle, blocks) = handles.swap_remove(at);
            match handle.wait() {
                Ok(landed) => assert_eq!(wrong_bytes(&landed.blocks, &blocks, 1), 0),
                Err(failure) => drop::<FailedBlocks>(failure.blocks),
            }
        }
    }
    for (handle, _) in handles {
        drop(handle.wait());
    }
    pair.holder.revoke_until(u64::MAX);
    pair.assert_clean();
    assert_eq!(stray.load(Ordering::SeqCst), 0, "seed {seed}");
    let (written, stats) = (written.load(Ordering::SeqCst), pair.reader.stats());
    let ended = stats.landed
        + stats.failed_lease
        + stats.failed_peer
        + stats.failed_transport
        + stats.failed_deadline
        + stats.failed_cancelled
        + stats.failed_other;
    assert_eq!(stats.submitted, ended, "seed {seed}: {stats:?}");
    written
}

#[test]
fn random_faults_in_random_orders_lose_nothing() {
    let written: u64 = (0..24).map(storm).sum();
    assert!(written > 1000, "{written}");
}

//! The engine over the scripted fabric: orders of events that real hardware rarely shows.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::*;
use kv_xfer::engine::{
    Advice, Direction, FailedBlocks, LeaseError, LeaseSpec, OfferError, ReadError, ReadRequest,
    ReleasePolicy, SubmitError,
};
use kv_xfer::identity::BlockHash;
use kv_xfer::ids::{BlockId, RequestId};
use kv_xfer::layout::PoolOrder;
use kv_xfer::transport::sim::Behaviour;
use kv_xfer::transport::{AfterError, FailureKind};

#[test]
fn a_read_lands_every_byte_and_releases_the_lease_once() {
    let pair = pair();
    let blocks = ids([9, 8, 7, 3, 4, 5, 40]);
    let (_, offer) = pair.offer("r", &blocks);
    let landed = pair.read(&offer, 10..17).wait().unwrap();
    assert_eq!(wrong_bytes(&landed.blocks, &blocks, 1), 0);
    assert_eq!(landed.blocks.ids(), ids(10..17));
    assert_eq!(landed.report.bytes, 7 * 8 * 512);
    assert_eq!(landed.report.descriptors_unmerged, 7 * 8);
    let freed = pair.holder.freed().recv_timeout(LIMIT).unwrap();
    assert_eq!(freed.blocks, blocks);
    assert!(
        pair.holder
            .freed()
            .recv_timeout(Duration::from_millis(50))
            .is_err()
    );
    drop(landed);
    pair.assert_clean();
}

#[test]
fn layers_become_ready_in_order_and_all_of_them() {
    let pair = pair_with(|config| config.reader.window_descriptors = 1);
    let (_, offer) = pair.offer("r", &ids(0..4));
    let slow = || Behaviour {
        extra_polls: 3,
        ..Behaviour::default()
    };
    pair.fabric.script((0..8).map(|_| slow()));
    let mut handle = pair.read(&offer, 0..4);
    let mut seen = 0;
    let outcome = loop {
        let ready = handle.layers_ready();
        assert!(ready >= seen, "layers never become unready");
        seen = ready;
        if let Some(outcome) = handle.wait_timeout(Duration::from_micros(1)) {
            break outcome;
        }
    };
    assert!(outcome.is_ok());
    assert_eq!(handle.layers_ready(), 4);
}

#[test]
fn a_lease_revoked_at_any_point_of_the_read_is_never_reported_as_landed() {
    // 8 windows of one descriptor each: revoke before each of them.
    for at in 0..8 {
        let pair = Arc::new(pair_with(|config| config.reader.window_descriptors = 1));
        let blocks = ids(0..4);
        let (leased, offer) = pair.offer("r", &blocks);
        let hook = {
            let pair = Arc::clone(&pair);
            let blocks = blocks.clone();
            move |_| {
                if pair.holder.revoke(leased.lease) {
                    // Freed, and filled with the next request's content at once.
                    let freed = pair.holder.freed().recv_timeout(LIMIT).unwrap();
                    fill(pair.holder.pool(), &freed.blocks, 2);
                    assert_eq!(freed.blocks, blocks);
                }
            }
        };
        let mut script: Vec<Behaviour> = (0..at).map(|_| Behaviour::default()).collect();
        script.push(Behaviour {
            hook: Some(Box::new(hook)),
            ..Behaviour::default()
        });
        pair.fabric.script(script);
        let handle = pair.read(&offer, 0..4);
        let failure = handle.wait().unwrap_err();
        assert!(
            matches!(failure.error, ReadError::LeaseLost { .. }),
            "at {at}: {failure}"
        );
        assert_eq!(failure.error.advice(), Advice::Recompute);
        drop(failure);
        pair.assert_clean();
    }
}

#[test]
fn a_second_read_of_a_released_lease_fails() {
    let pair = pair();
    let (_, offer) = pair.offer("r", &ids(0..4));
    pair.read(&offer, 0..4).wait().unwrap();
    assert_eq!(
        pair.holder.freed().recv_timeout(LIMIT).unwrap().blocks,
        ids(0..4)
    );
    let failure = pair.read(&offer, 0..4).wait().unwrap_err();
    assert!(matches!(failure.error, ReadError::LeaseLost { .. }));
    drop(failure);
    // That is known from now on: nothing is posted to see it again.
    let posted = pair.fabric.windows_posted();
    let failure = pair.read(&offer, 0..4).wait().unwrap_err();
    assert!(matches!(failure.error, ReadError::LeaseLost { .. }));
    assert_eq!(pair.fabric.windows_posted(), posted);
    drop(failure);
    pair.assert_clean();
}

#[test]
fn two_reads_of_one_lease_both_land_while_it_holds() {
    let pair = pair();
    let blocks = ids(0..4);
    let (leased, offer) = pair.offer("r", &blocks);
    let keep = |blocks| ReadRequest {
        release: ReleasePolicy::Never,
        ..request(&offer, blocks)
    };
    let first = pair.reader.read(keep(pair.claim(0..4))).unwrap();
    let second = pair.reader.read(keep(pair.claim(4..8))).unwrap();
    for landed in [first.wait().unwrap(), second.wait().unwrap()] {
        assert_eq!(wrong_bytes(&landed.blocks, &blocks, 1), 0);
    }
    assert!(pair.holder.revoke(leased.lease));
    pair.assert_clean();
}

#[test]
fn an_expired_lease_gives_its_blocks_back_without_any_traffic() {
    let pair = pair();
    fill(pair.holder.pool(), &ids(0..4), 1);
    let leased = lease(
        &pair.holder,
        "r",
        &ids(0..4),
        Some(Duration::from_millis(30)),
    );
    let offer = pair.reader.accept(&leased.remote, None, None).unwrap();
    let freed = pair.holder.freed().recv_timeout(LIMIT).unwrap();
    assert_eq!(freed.blocks, ids(0..4));
    let failure = pair.read(&offer, 0..4).wait().unwrap_err();
    assert!(matches!(failure.error, ReadError::LeaseLost { .. }));
    drop(failure);
    pair.assert_clean();
}

#[test]
fn an_error_on_any_descriptor_ends_the_read_once_and_the_peer_is_met_again() {
    for (at, after) in [
        (0, AfterError::Quiet),
        (4, AfterError::Quiet),
        (0, AfterError::InDoubt),
        (4, AfterError::InDoubt),
        (7, AfterError::InDoubt),
    ] {
        let pair = pair();
        let (_, offer) = pair.offer("r", &ids(0..4));
        pair.fabric.script([Behaviour {
            fail_at: Some((at, after)),
            ..Behaviour::default()
        }]);
        let failure = pair.read(&offer, 0..4).wait().unwrap_err();
        assert!(
            matches!(failure.error, ReadError::Transport { .. }),
            "{failure}"
        );
        let quarantined = matches!(failure.blocks, FailedBlocks::Quarantined { blocks: 4 });
        assert_eq!(quarantined, after == AfterError::InDoubt);
        drop(failure);
        pair.assert_clean();
        let blocks = ids(8..12);
        let (_, offer) = pair.offer("r2", &blocks);
        let landed = pair.read(&offer, 0..4).wait().unwrap();
        assert_eq!(wrong_bytes(&landed.blocks, &blocks, 1), 0);
    }
}

#[test]
fn a_refused_post_is_an_error_with_its_blocks() {
    let pair = pair();
    let (_, offer) = pair.offer("r", &ids(0..4));
    let refuse = Some(FailureKind::Rejected);
    pair.fabric.script([Behaviour {
        refuse_post: refuse,
        ..Behaviour::default()
    }]);
    let failure = pair.read(&offer, 0..4).wait().unwrap_err();
    assert!(matches!(failure.blocks, FailedBlocks::Returned(_)));
    drop(failure);
    pair.assert_clean();
}

#[test]
fn a_read_that_never_ends_is_quarantined_until_its_agent_is_destroyed() {
    let pair = pair_with(|config| config.reader.abandon_after = Duration::from_millis(100));
    let (_, offer) = pair.offer("r", &ids(0..4));
    pair.fabric.script([Behaviour {
        never_ends: true,
        ..Behaviour::default()
    }]);
    let blocks = pair.claim(0..4);
    let handle = pair
        .reader
        .read(ReadRequest {
            timeout: Duration::from_millis(50),
            ..request(&offer, blocks)
        })
        .unwrap();
    let failure = handle.wait().unwrap_err();
    assert!(matches!(
        failure.error,
        ReadError::Deadline {
            phase: "moving blocks",
            ..
        }
    ));
    assert!(matches!(
        failure.blocks,
        FailedBlocks::Quarantined { blocks: 4 }
    ));
    assert_eq!(pair.reader.stats().quarantined, 4);
    assert!(
        pair.reader.pool().claim(ids([0])).is_err(),
        "in doubt is not free"
    );
    let returned = pair.reader.returned().recv_timeout(LIMIT).unwrap();
    assert_eq!(returned.blocks.ids(), ids(0..4));
    // The agent is gone, so nothing of it can land any more.
    assert_eq!(pair.fabric.land_late_bytes(), 0);
    drop(returned);
    pair.assert_clean();
}

#[test]
fn bytes_that_land_after_the_failure_find_their_blocks_in_quarantine() {
    let pair = pair_with(|config| config.reader.abandon_after = Duration::from_secs(600));
    let (_, offer) = pair.offer("r", &ids(0..4));
    pair.fabric.script([Behaviour {
        never_ends: true,
        ..Behaviour::default()
    }]);
    let handle = pair.read(&offer, 0..4);
    eventually("the window is posted", || pair.fabric.windows_posted() == 1);
    drop(handle);
    eventually("the read is told", || pair.reader.stats().quarantined == 4);
    assert!(pair.reader.returned().try_recv().is_err());
    assert!(pair.fabric.land_late_bytes() > 0);
    // The operation is over now, which the next poll sees.
    let returned = pair.reader.returned().recv_timeout(LIMIT).unwrap();
    assert_eq!(returned.blocks.len(), 4);
    drop(returned);
    pair.assert_clean();
}

#[test]
fn handles_dropped_right_after_submit_give_every_block_back() {
    let pair = pair();
    let blocks = ids(0..4);
    fill(pair.holder.pool(), &blocks, 1);
    for n in 0..500 {
        let leased = lease(&pair.holder, &format!("r{n}"), &blocks, None);
        let offer = pair.reader.accept(&leased.remote, None, None).unwrap();
        let claimed = loop {
            match pair.reader.pool().claim(ids(0..4)) {
                Ok(claimed) => break claimed,
                Err(_) => drop(pair.reader.returned().recv_timeout(LIMIT).unwrap()),
            }
        };
        drop(pair.reader.read(request(&offer, claimed)).unwrap());
        pair.holder.revoke(leased.lease);
    }
    pair.assert_clean();
}

#[test]
fn nonsense_is_refused_at_submission_and_loses_nothing() {
    let pair = pair();
    let (_, offer) = pair.offer("r", &ids(0..4));
    let read = |span: std::ops::Range<usize>, blocks| {
        pair.reader
            .read(ReadRequest {
                span,
                ..request(&offer, blocks)
            })
            .map(|_| ())
            .unwrap_err()
    };
    let refused = read(0..0, pair.claim(0..4));
    assert_eq!(refused.error, SubmitError::Nothing);
    assert_eq!(refused.blocks.len(), 4);
    drop(refused);
    let refused = read(2..9, pair.claim(0..4));
    assert!(matches!(
        refused.error,
        SubmitError::SpanOutOfRange { available: 4, .. }
    ));
    drop(refused);
    #[allow(clippy::reversed_empty_ranges)]
    let refused = read(3..1, pair.claim(0..4));
    assert!(matches!(refused.error, SubmitError::SpanOutOfRange { .. }));
    drop(refused);
    let refused = read(0..4, pair.claim(0..3));
    assert_eq!(
        refused.error,
        SubmitError::CountMismatch {
            remote: 4,
            local: 3
        }
    );
    drop(refused);
    let other = sim_pool(&pair.fabric, layout(PoolOrder::LayerFirst), 8);
    let refused = read(0..4, other.claim(ids(0..4)).unwrap());
    assert_eq!(refused.error, SubmitError::ForeignBlocks);
    drop(refused);
    assert!(pair.reader.release(&offer));
    pair.assert_clean();
}

#[test]
fn a_full_queue_refuses_with_the_blocks() {
    let pair = pair_with(|config| {
        config.reader.queue = 1;
        config.reader.active = 1;
        config.reader.abandon_after = Duration::from_millis(50);
    });
    let (_, offer) = pair.offer("r", &ids(0..1));
    pair.fabric.script([Behaviour {
        never_ends: true,
        ..Behaviour::default()
    }]);
    let read = |block: u32, timeout| {
        let blocks = pair.claim([block]);
        pair.reader.read(ReadRequest {
            timeout,
            ..request(&offer, blocks)
        })
    };
    let running = read(0, LIMIT).unwrap();
    eventually("it runs", || pair.fabric.windows_posted() == 1);
    let queued = read(1, Duration::from_millis(100)).unwrap();
    let refused = read(2, LIMIT).map(|_| ()).unwrap_err();
    assert_eq!(refused.error, SubmitError::QueueFull { queued: 1 });
    assert_eq!(refused.blocks.ids(), ids([2]));
    let failure = queued.wait().unwrap_err();
    assert!(
        matches!(
            failure.error,
            ReadError::Deadline {
                phase: "queued",
                ..
            }
        ),
        "{failure}"
    );
    running.cancel();
    assert!(matches!(
        running.wait().unwrap_err().error,
        ReadError::Cancelled
    ));
    drop((failure, refused));
    pair.assert_clean();
}

#[test]
fn offers_that_cannot_be_verified_are_refused() {
    let pair = pair();
    let (leased, _) = pair.offer("r", &ids(0..4));
    let mut vllm = leased.remote.clone();
    vllm.ticket = None;
    let refused = pair.reader.accept(&vllm, None, None).unwrap_err();
    assert!(matches!(refused, OfferError::Unverifiable { .. }));
    let refused = pair
        .reader
        .accept(&leased.remote, Some("another tenant"), None)
        .unwrap_err();
    assert!(matches!(refused, OfferError::NotAuthentic { .. }));
}

#[test]
fn a_block_id_equal_to_the_pool_size_is_not_leased() {
    let pair = pair();
    let refused = pair
        .holder
        .lease(LeaseSpec {
            request: RequestId::new("r").unwrap(),
            blocks: vec![BlockId(0), BlockId(POOL_BLOCKS)],
            tokens: 32,
            hashes: hashes(2),
            ttl: None,
            direction: Direction::DecodeToPrefill,
            tenant: None,
            conversation: None,
        })
        .unwrap_err();
    assert!(matches!(
        refused.error,
        LeaseError::OutOfRange {
            block: BlockId(POOL_BLOCKS),
            ..
        }
    ));
    assert_eq!(refused.blocks, ids([0, POOL_BLOCKS]));
    pair.assert_clean();
}

#[test]
fn blocks_of_other_tokens_are_not_read_whatever_the_caller_asks_for() {
    let pair = pair();
    let (_, offer) = pair.offer("r", &ids(0..4));
    // The history was edited in the third block.
    let mut edited = offer.ticket().hashes.clone();
    edited[2] = BlockHash([7; 16]);
    for (span, matched) in [(0..4, 2), (2..3, 2), (3..4, 2)] {
        let blocks = pair.claim(0..u32::try_from(span.len()).unwrap());
        let end = span.end;
        let asked = ReadRequest {
            hashes: &edited,
            span,
            ..request(&offer, blocks)
        };
        let refused = pair.reader.read(asked).map(|_| ()).unwrap_err();
        assert_eq!(refused.error, SubmitError::OtherTokens { end, matched });
    }
    let right = ReadRequest {
        hashes: &edited,
        span: 0..2,
        ..request(&offer, pair.claim(0..2))
    };
    let landed = pair.reader.read(right).unwrap().wait().unwrap();
    assert_eq!(wrong_bytes(&landed.blocks, &ids(0..2), 1), 0);
    drop(landed);
    pair.assert_clean();
}

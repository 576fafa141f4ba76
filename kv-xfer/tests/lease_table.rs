//! The lease table: its rules, one by one.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod lease_support;

use std::collections::HashSet;
use std::time::Duration;

use kv_xfer::clock::MonoTime;
use kv_xfer::ids::{LeaseId, LeaseWord, WordSlot};
use kv_xfer::lease::{
    EndReason, FreedBlocks, GrantError, LeaseConfig, LeaseConfigError, LeaseTable, MAX_LEASES,
    NewLease, ReleaseIgnored, ReleaseOutcome, RenewOutcome, RetireError, WordTableTooSmall,
};
use lease_support::{Words, at, blocks, holds, leases, request, secs, table};

fn new(i: u64, ttl: u64) -> NewLease {
    NewLease {
        request: request(i),
        blocks: blocks([u32::try_from(i).unwrap()]),
        ttl: Some(secs(ttl)),
    }
}

#[test]
fn the_word_advances_before_the_blocks_come_out() {
    let (mut t, words) = table(4);
    let g = t.grant(at(0), new(7, 30)).unwrap();
    assert!(holds(&words, g));
    let ended = t.release(g.lease, g.word).ended().unwrap();
    // Ended, not retired: readers may go on, the blocks are out of reach.
    assert!(holds(&words, g));
    assert_eq!((t.unretired(), ended.block_count()), (1, 1));
    let freed = t.retire(ended, &words).unwrap();
    assert!(!holds(&words, g));
    assert_eq!(
        freed,
        FreedBlocks {
            lease: g.lease,
            request: request(7),
            blocks: blocks([7]),
            reason: EndReason::Released,
        }
    );
    assert_eq!((t.unretired(), t.len(), t.blocks()), (0, 0, 0));
}

#[test]
fn a_slot_is_used_again_only_after_it_was_retired_and_with_a_new_word() {
    let (mut t, words) = table(1);
    let first = t.grant(at(0), new(1, 30)).unwrap();
    let ended = t.revoke(first.lease).unwrap();
    let refused = t.grant(at(0), new(2, 30)).unwrap_err();
    let full = GrantError::Full {
        max: 1,
        unretired: 1,
    };
    assert_eq!((refused.error, refused.blocks), (full, blocks([2])));
    let _ = t.retire(ended, &words).unwrap();
    let second = t.grant(at(0), new(2, 30)).unwrap();
    assert_eq!(second.slot, first.slot);
    assert_ne!(second.word, first.word);
    assert_ne!(second.lease, first.lease);
    assert!(holds(&words, second));
    // The old lease's id and word mean nothing in the same slot.
    assert!(matches!(
        t.release(first.lease, first.word),
        ReleaseOutcome::Ignored(ReleaseIgnored::NotLive)
    ));
    assert!(matches!(
        t.release(second.lease, first.word),
        ReleaseOutcome::Ignored(ReleaseIgnored::WrongWord)
    ));
    assert!(holds(&words, second));
}

#[test]
fn a_dropped_ended_lease_leaks_and_never_frees() {
    let (mut t, words) = table(1);
    let g = t.grant(at(0), new(1, 30)).unwrap();
    drop(t.revoke(g.lease));
    assert!(
        holds(&words, g),
        "its blocks are not reused, so its readers may be right"
    );
    assert_eq!(t.unretired(), 1);
    assert!(t.grant(at(0), new(2, 30)).is_err());
}

#[test]
fn another_tables_lease_is_not_retired() {
    let (mut t, words) = table(1);
    let mut other = LeaseTable::new(LeaseConfig::new(1, 43)).unwrap();
    let g = t.grant(at(0), new(1, 30)).unwrap();
    let h = other.grant(at(0), new(1, 30)).unwrap();
    assert_ne!(g.word, h.word, "another incarnation has other words");
    let ended = t.revoke(g.lease).unwrap();
    let stray = other.revoke(h.lease).unwrap();
    let failed = t.retire(stray, &words).unwrap_err();
    assert_eq!(failed.error, RetireError::Foreign { lease: h.lease });
    assert!(holds(&words, g));
    // Nor without a word to advance; the lease comes back and can be retired properly.
    let failed = t.retire(ended, &Words::new(0)).unwrap_err();
    assert_eq!(failed.error, RetireError::NoSuchSlot { slot: g.slot });
    let _ = t.retire(failed.ended, &words).unwrap();
}

#[test]
fn heartbeats_keep_a_lease_and_lost_ones_do_not() {
    // A lease of 30 s, heartbeats of +20 s.
    let beat = secs(20);
    let (mut t, _) = table(4);
    let g = t.grant(at(0), new(1, 30)).unwrap();
    assert_eq!(g.deadline, at(30));
    assert_eq!(
        t.renew(at(10), g.lease, beat),
        RenewOutcome::Unchanged(at(30))
    );
    assert_eq!(
        t.renew(at(20), g.lease, beat),
        RenewOutcome::Extended(at(40))
    );
    assert_eq!(
        t.renew_request(at(30), &request(1), beat),
        RenewOutcome::Extended(at(50))
    );
    // The heartbeats at 40 and 50 are lost.
    assert_eq!(t.next_deadline(), Some(at(50)));
    assert!(
        t.expire(MonoTime::from_nanos(at(50).as_nanos() - 1))
            .is_empty()
    );
    let ended = t.expire(at(50));
    assert_eq!(leases(&ended), [g.lease]);
    assert_eq!(ended[0].reason(), EndReason::Expired);
    assert_eq!(t.next_deadline(), None);
    assert_eq!(t.renew(at(50), g.lease, beat), RenewOutcome::Unknown);
    assert_eq!(t.counters().renewals_ignored, 1);
    assert_eq!(t.counters().renewed, 2);
}

#[test]
fn a_renewal_after_the_deadline_does_not_resurrect() {
    let (mut t, _) = table(4);
    let g = t.grant(at(0), new(1, 30)).unwrap();
    let late = at(30) + Duration::from_millis(1);
    assert_eq!(t.renew(at(30), g.lease, secs(20)), RenewOutcome::TooLate);
    assert_eq!(t.renew(late, g.lease, secs(20)), RenewOutcome::TooLate);
    assert_eq!(leases(&t.expire(late)), [g.lease]);
    let unknown = RenewOutcome::Unknown;
    assert_eq!(t.renew(late, LeaseId(u64::MAX), secs(20)), unknown);
    assert_eq!(t.renew(late, LeaseId(0), secs(20)), unknown);
    assert_eq!(t.renew_request(late, &request(9), secs(20)), unknown);
}

#[test]
fn unsorted_deadlines_are_all_collected() {
    let (mut t, _) = table(8);
    // A long one at the head hides nothing behind it.
    let g: Vec<_> = [480, 30, 60, 10, 30]
        .into_iter()
        .zip(0..)
        .map(|(ttl, i)| t.grant(at(0), new(i, ttl)).unwrap().lease)
        .collect();
    assert_eq!(leases(&t.expire_some(at(30), 0)), []);
    assert_eq!(leases(&t.expire_some(at(30), 2)), [g[3], g[1]]);
    assert_eq!(leases(&t.expire(at(30))), [g[4]]);
    assert_eq!(t.next_deadline(), Some(at(60)));
    assert_eq!(leases(&t.expire(at(10_000))), [g[2], g[0]]);
    assert!(t.is_empty());
}

#[test]
fn times_are_bounded() {
    let (mut t, _) = table(8);
    let max = t.config().max_ttl;
    let default = NewLease {
        ttl: None,
        ..new(0, 1)
    };
    assert_eq!(t.grant(at(5), default).unwrap().deadline, at(485));
    let long = t.grant(at(5), new(1, u64::MAX / 4)).unwrap();
    assert_eq!(long.deadline, at(5) + max);
    let renewed = t.renew(at(6), long.lease, Duration::MAX);
    assert_eq!(renewed, RenewOutcome::Extended(at(6) + max));
    let refused = t.grant(at(5), new(2, 0)).unwrap_err();
    assert_eq!(refused.error, GrantError::ZeroTtl);
    let end = t.grant(MonoTime::FAR_FUTURE, new(3, 1)).unwrap();
    assert_eq!(end.deadline, MonoTime::FAR_FUTURE);
}

#[test]
fn every_rank_releases_once() {
    let (mut t, words) = table(4);
    let g = t.grant(at(0), new(1, 30)).unwrap();
    let r = request(1);
    for seen in 1..4 {
        let outcome = t.release_request(&r, 4);
        assert!(matches!(outcome, ReleaseOutcome::Counted { seen: s, of: 4 } if s == seen));
    }
    let ended = t.release_request(&r, 4).ended().unwrap();
    let _ = t.retire(ended, &words).unwrap();
    for _ in 0..3 {
        assert!(matches!(
            t.release_request(&r, 4),
            ReleaseOutcome::Ignored(ReleaseIgnored::NotLive)
        ));
        assert!(t.release(g.lease, g.word).ended().is_none());
    }
    assert_eq!(t.counters().releases_ignored, 6);
    assert_eq!(t.counters().released, 1);
}

#[test]
fn odd_rank_counts_do_no_harm() {
    let (mut t, _) = table(4);
    t.grant(at(0), new(1, 30)).unwrap();
    let r = request(1);
    assert!(matches!(
        t.release_request(&r, 0),
        ReleaseOutcome::Ignored(ReleaseIgnored::ZeroRanks)
    ));
    assert!(t.release_request(&r, 3).ended().is_none());
    // One says that it is alone: the larger number counts.
    assert!(t.release_request(&r, 1).ended().is_none());
    assert!(t.release_request(&r, 3).ended().is_some());
}

#[test]
fn memory_pressure_takes_the_oldest_first() {
    let (mut t, words) = table(16);
    let g: Vec<_> = (0..8)
        .map(|i| {
            let lease = NewLease {
                blocks: blocks(0..10),
                ..new(i, 100 - i)
            };
            t.grant(at(0), lease).unwrap().lease
        })
        .collect();
    let _ = t.revoke(g[1]).unwrap();
    assert_eq!(leases(&t.revoke_oldest(2)), [g[0], g[2]]);
    assert_eq!(t.blocks(), 50);
    let ended = t.revoke_until(11);
    assert_eq!(leases(&ended), [g[3], g[4]]);
    for one in ended {
        let _ = t.retire(one, &words).unwrap();
    }
    assert!(t.revoke_until(0).is_empty());
    // Slots used again make a lease the newest, whatever its slot.
    let newest = t.grant(at(0), new(20, 1)).unwrap().lease;
    assert_eq!(
        leases(&t.revoke_until(u64::MAX)),
        [g[5], g[6], g[7], newest]
    );
    assert!(t.revoke_all().is_empty());
    assert_eq!(t.counters().revoked, 9);
}

#[test]
fn a_request_has_one_lease() {
    let (mut t, words) = table(4);
    let g = t.grant(at(0), new(1, 30)).unwrap();
    let refused = t.grant(at(0), new(1, 30)).unwrap_err();
    assert_eq!(refused.error, GrantError::RequestLeased { lease: g.lease });
    assert_eq!(refused.blocks, blocks([1]));
    let ended = t.revoke_request(&request(1)).unwrap();
    // The name is free as soon as the lease has ended, the slot only once it is retired.
    let again = t.grant(at(0), new(1, 30)).unwrap();
    assert_ne!(again.slot, g.slot);
    let _ = t.retire(ended, &words).unwrap();
    assert_eq!(t.get_request(&request(1)).unwrap().grant, again);
    assert_eq!(t.get(again.lease).unwrap().blocks, blocks([1]));
    assert_eq!(t.get(g.lease), None);
    let none = NewLease {
        blocks: Vec::new(),
        ..new(2, 30)
    };
    assert_eq!(
        t.grant(at(0), none).unwrap_err().error,
        GrantError::NoBlocks
    );
}

#[test]
fn bad_configurations_are_refused() {
    let good = LeaseConfig::new(1, 0);
    let refuse = |c| LeaseTable::new(c).unwrap_err();
    for given in [0, MAX_LEASES + 1, u32::MAX] {
        let config = LeaseConfig {
            max_leases: given,
            ..good
        };
        assert_eq!(refuse(config), LeaseConfigError::MaxLeases { given });
    }
    let zero = LeaseConfig {
        default_ttl: Duration::ZERO,
        ..good
    };
    assert_eq!(refuse(zero), LeaseConfigError::ZeroTtl);
    let order = LeaseConfig {
        max_ttl: secs(479),
        ..good
    };
    assert!(matches!(refuse(order), LeaseConfigError::TtlOrder { .. }));
    let t = LeaseTable::new(LeaseConfig::new(3, 0)).unwrap();
    let small = WordTableTooSmall { slot: 2, needed: 3 };
    assert_eq!(t.publish_words(&Words::new(2)), Err(small));
}

#[test]
fn words_are_scattered_and_never_zero() {
    let t = LeaseTable::new(LeaseConfig::new(1, 0)).unwrap();
    let u = LeaseTable::new(LeaseConfig::new(1, 1)).unwrap();
    let mut seen = HashSet::new();
    for slot in (0..10_000).map(WordSlot) {
        for word in [t.initial_word(slot), u.initial_word(slot)] {
            assert_ne!(word, LeaseWord(0));
            assert!(seen.insert(word.0 >> 20), "within a million of another");
        }
    }
}

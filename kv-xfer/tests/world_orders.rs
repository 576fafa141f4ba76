//! Every order of what can happen to a read, and to two reads at once.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use std::sync::atomic::{AtomicUsize, Ordering};

use kv_xfer::world::{Act, Play, Which};

/// What can happen to a read besides its start.
fn acts(which: Which, in_doubt: bool) -> [Act; 7] {
    [
        Act::Cancel(which),
        Act::Complete(which),
        Act::Release(which),
        if in_doubt {
            Act::FailInDoubt(which)
        } else {
            Act::Fail(which)
        },
        Act::Expire(which),
        Act::Revoke(which),
        Act::Lose(which),
    ]
}

/// Every order of `rest` after `done`.
fn orders(done: &mut Vec<Act>, rest: &[Act], each: &mut impl FnMut(&[Act])) {
    if rest.is_empty() {
        each(done);
    }
    for (at, act) in rest.iter().enumerate() {
        let mut left = rest.to_vec();
        left.remove(at);
        done.push(*act);
        orders(done, &left, each);
        done.pop();
    }
}

/// Every way to do two lists of acts at once, each in its order.
fn merges(done: &mut Vec<Act>, a: &[Act], b: &[Act], each: &mut impl FnMut(&[Act])) {
    if a.is_empty() && b.is_empty() {
        each(done);
    }
    for (first, rest_a, rest_b) in [
        (a.first(), a.get(1..), Some(b)),
        (b.first(), Some(a), b.get(1..)),
    ] {
        if let (Some(first), Some(rest_a), Some(rest_b)) = (first, rest_a, rest_b) {
            done.push(*first);
            merges(done, rest_a, rest_b, each);
            done.pop();
        }
    }
}

/// Plays all of these, on all processors.
fn play_all(play: Play, histories: &[Vec<Act>]) {
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(acts) = histories.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let outcome = play.run(acts);
                    assert!(
                        outcome.violations.is_empty(),
                        "{play:?} {acts:?}: {:#?}",
                        outcome.violations
                    );
                    assert!(outcome.events > acts.len() as u64, "nothing happened");
                }
            });
        }
    });
}

#[test]
fn every_order_of_all_that_can_happen_to_one_read() {
    for in_doubt in [false, true] {
        let mut all = acts(Which::A, in_doubt).to_vec();
        all.push(Act::Start(Which::A));
        let mut histories = Vec::new();
        orders(&mut Vec::new(), &all, &mut |acts| {
            histories.push(acts.to_vec())
        });
        assert_eq!(histories.len(), 40_320);
        // What comes after the peer is lost is lost on it: one order of those is as good as all.
        let lost = |acts: &Vec<Act>| {
            let at = acts.iter().position(|act| matches!(act, Act::Lose(_)));
            let after = acts.get(at.unwrap_or(0) + 1..).unwrap_or_default();
            let idle = |act: &&Act| matches!(act, Act::Expire(_) | Act::Revoke(_));
            after.iter().filter(idle).count() < 2
        };
        histories.retain(lost);
        play_all(Play::default(), &histories);
    }
}

#[test]
fn every_order_of_two_events_each_for_two_reads() {
    for (one_holder, in_doubt, seed) in [(true, true, 1), (true, false, 2), (false, true, 3)] {
        let play = Play {
            one_holder,
            seed,
            ..Play::default()
        };
        let mut histories = Vec::new();
        let (of_a, of_b) = (acts(Which::A, in_doubt), acts(Which::B, in_doubt));
        for first in of_a {
            for second in of_a.into_iter().filter(|act| *act != first) {
                for other in of_b {
                    let a = [Act::Start(Which::A), first, second];
                    let b = [Act::Start(Which::B), other];
                    merges(&mut Vec::new(), &a, &b, &mut |acts| {
                        histories.push(acts.to_vec())
                    });
                }
            }
        }
        assert_eq!(histories.len(), 42 * 7 * 10);
        play_all(play, &histories);
    }
}

#[test]
fn handles_dropped_at_every_point() {
    for seed in 0..8 {
        let play = Play {
            seed,
            ..Play::default()
        };
        let mut histories = Vec::new();
        let of_a = acts(Which::A, seed % 2 == 0);
        for first in of_a {
            for second in of_a.into_iter().filter(|act| *act != first) {
                for at in 0..4 {
                    let mut acts = vec![Act::Start(Which::A), first, second];
                    acts.insert(at, Act::Drop(Which::A));
                    histories.push(acts);
                }
            }
        }
        play_all(play, &histories);
    }
}

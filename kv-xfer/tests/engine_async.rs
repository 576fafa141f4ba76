//! Read handles as futures, under an executor of a few lines: the engine needs no async runtime.
#![allow(clippy::expect_used, clippy::unwrap_used, missing_docs)]

mod common;

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use common::*;
use kv_xfer::engine::{FailedBlocks, ReadError, ReadHandle, ReadOutcome, ReadRequest};
use kv_xfer::transport::AfterError;
use kv_xfer::transport::sim::Behaviour;

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future to its end on this thread, which sleeps until it is woken.
fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let until = Instant::now() + LIMIT;
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        let left = until.saturating_duration_since(Instant::now());
        assert!(!left.is_zero(), "nobody woke the executor");
        std::thread::park_timeout(left);
    }
}

/// A read against a number of polls. Whichever ends first wins; the other is dropped.
struct Race {
    read: Option<ReadHandle>,
    polls_left: usize,
}

impl Future for Race {
    type Output = Option<ReadOutcome>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let read = self.read.as_mut().expect("not polled after its end");
        if let Poll::Ready(outcome) = Pin::new(read).poll(context) {
            self.read = None;
            return Poll::Ready(Some(outcome));
        }
        if self.polls_left == 0 {
            self.read = None;
            return Poll::Ready(None);
        }
        self.polls_left -= 1;
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

#[test]
fn a_read_is_awaited() {
    let pair = pair();
    let blocks = ids([9, 8, 7, 3]);
    let (_, offer) = pair.offer("r", &blocks);
    let handle = pair.reader.read(request(&offer, pair.claim(0..4))).unwrap();
    let landed = block_on(handle).unwrap();
    assert_eq!(wrong_bytes(&landed.blocks, &blocks, 1), 0);
    drop(landed);
    pair.assert_clean();
}

#[test]
fn many_reads_are_awaited_on_one_thread() {
    let pair = pair();
    let blocks = ids(0..1);
    let (leased, offer) = pair.offer("r", &blocks);
    let handles: Vec<ReadHandle> = (0..64)
        .map(|n| {
            let keep = ReadRequest {
                release: kv_xfer::engine::ReleasePolicy::Never,
                ..request(&offer, pair.claim([n]))
            };
            pair.reader.read(keep).unwrap()
        })
        .collect();
    let landed = block_on(async {
        let mut landed = Vec::new();
        // Awaited in the other order than they were submitted in.
        for handle in handles.into_iter().rev() {
            landed.push(handle.await.unwrap());
        }
        landed
    });
    for landed in &landed {
        assert_eq!(wrong_bytes(&landed.blocks, &blocks, 1), 0);
    }
    assert_eq!(landed.len(), 64);
    drop(landed);
    assert!(pair.holder.revoke(leased.lease));
    pair.assert_clean();
}

#[test]
fn every_kind_of_end_wakes_the_executor() {
    let failing = |behaviour: Behaviour, timeout| {
        let pair = pair_with(|config| config.reader.abandon_after = Duration::from_millis(50));
        let (_, offer) = pair.offer("r", &ids(0..4));
        pair.fabric.script([behaviour]);
        let request = ReadRequest {
            timeout,
            ..request(&offer, pair.claim(0..4))
        };
        let failure = block_on(pair.reader.read(request).unwrap()).unwrap_err();
        let error = failure.error.clone();
        drop(failure);
        pair.assert_clean();
        error
    };
    let failed = Behaviour {
        fail_at: Some((2, AfterError::Quiet)),
        ..Behaviour::default()
    };
    assert!(matches!(
        failing(failed, LIMIT),
        ReadError::Transport { .. }
    ));
    let stuck = || Behaviour {
        never_ends: true,
        ..Behaviour::default()
    };
    assert!(matches!(
        failing(stuck(), Duration::from_millis(50)),
        ReadError::Deadline { .. }
    ));
    // And the end of the engine.
    let pair = pair();
    let (_, offer) = pair.offer("r", &ids(0..4));
    pair.fabric.script([stuck()]);
    let handle = pair.reader.read(request(&offer, pair.claim(0..4))).unwrap();
    let reader = pair.reader;
    let stopping = std::thread::spawn(move || reader.shutdown(LIMIT));
    let failure = block_on(handle).unwrap_err();
    assert!(matches!(failure.error, ReadError::ShuttingDown));
    assert_eq!(stopping.join().unwrap().quarantined, 0);
}

#[test]
fn a_cancelled_read_wakes_the_executor() {
    let pair = pair_with(|config| config.reader.abandon_after = Duration::from_millis(50));
    let (_, offer) = pair.offer("r", &ids(0..4));
    pair.fabric.script([Behaviour {
        never_ends: true,
        ..Behaviour::default()
    }]);
    let handle = pair.reader.read(request(&offer, pair.claim(0..4))).unwrap();
    eventually("the window is posted", || pair.fabric.windows_posted() == 1);
    handle.cancel();
    let failure = block_on(handle).unwrap_err();
    assert!(matches!(failure.error, ReadError::Cancelled));
    assert!(matches!(
        failure.blocks,
        FailedBlocks::Quarantined { blocks: 4 }
    ));
    pair.assert_clean();
}

#[test]
fn the_loser_of_a_race_gives_its_blocks_back() {
    let pair = pair();
    let blocks = ids(0..4);
    fill(pair.holder.pool(), &blocks, 1);
    let (mut won, mut lost) = (0, 0);
    // Dropped after any number of polls: queued, meeting the peer, in flight, or landed.
    for polls_left in 0..200 {
        let leased = lease(&pair.holder, &format!("r{polls_left}"), &blocks, None);
        let offer = pair.reader.accept(&leased.remote, None, None).unwrap();
        pair.fabric.script([Behaviour {
            extra_polls: 5,
            ..Behaviour::default()
        }]);
        let claimed = loop {
            match pair.reader.pool().claim(ids(0..4)) {
                Ok(claimed) => break claimed,
                Err(_) => drop(pair.reader.returned().recv_timeout(LIMIT).unwrap()),
            }
        };
        let read = pair.reader.read(request(&offer, claimed)).unwrap();
        let race = Race {
            read: Some(read),
            polls_left: polls_left * polls_left,
        };
        match block_on(race) {
            Some(outcome) => {
                assert_eq!(wrong_bytes(&outcome.unwrap().blocks, &blocks, 1), 0);
                won += 1;
            }
            None => lost += 1,
        }
        pair.holder.revoke(leased.lease);
    }
    // The first is dropped after one poll, before its peer has been met.
    assert!(lost > 0, "{won} won, {lost} lost");
    pair.assert_clean();
}

#[test]
fn a_read_may_be_polled_by_one_task_and_finished_by_another() {
    let pair = pair();
    let blocks = ids(0..4);
    let (_, offer) = pair.offer("r", &blocks);
    let (hold, held) = std::sync::mpsc::channel::<()>();
    pair.fabric.script([Behaviour {
        hook: Some(Box::new(move |descriptor| {
            if descriptor == 0 {
                held.recv_timeout(LIMIT).unwrap();
            }
        })),
        ..Behaviour::default()
    }]);
    let mut handle = pair.reader.read(request(&offer, pair.claim(0..4))).unwrap();
    let ignored = Waker::noop();
    let mut context = Context::from_waker(ignored);
    assert!(Pin::new(&mut handle).poll(&mut context).is_pending());
    let other = std::thread::spawn(move || block_on(handle));
    // Polled by the other task or not yet: it must be woken either way.
    hold.send(()).unwrap();
    let landed = other.join().unwrap().unwrap();
    assert_eq!(wrong_bytes(&landed.blocks, &blocks, 1), 0);
    drop(landed);
    pair.assert_clean();
}

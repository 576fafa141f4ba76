//! Shutdown while reads are on their way to the driver.
#![allow(missing_docs)]

mod common;

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use common::*;
use kv_xfer::engine::ReadError;
use kv_xfer::transport::sim::Behaviour;

#[test]
fn a_read_that_the_driver_sees_only_after_the_shutdown_ends_with_it() {
    let pair = pair();
    let (_, offer) = pair.offer("r", &ids(0..4));
    // Holds the driver in the middle of a post.
    let (entered_tx, entered) = channel();
    let (release, released) = channel::<()>();
    pair.fabric.script([Behaviour {
        hook: Some(Box::new(move |descriptor| {
            if descriptor == 0 {
                entered_tx.send(()).unwrap();
                released.recv_timeout(LIMIT).unwrap();
            }
        })),
        ..Behaviour::default()
    }]);
    let running = pair.reader.read(request(&offer, pair.claim(0..4))).unwrap();
    entered.recv_timeout(LIMIT).unwrap();
    let late = pair.reader.read(request(&offer, pair.claim(4..8))).unwrap();
    let pool = std::sync::Arc::clone(pair.reader.pool());
    let reader = pair.reader;
    let since = Instant::now();
    let stopping = std::thread::spawn(move || reader.shutdown(LIMIT));
    // Until the shutdown is in the driver's channel, which nothing tells from outside.
    std::thread::sleep(Duration::from_millis(100));
    release.send(()).unwrap();
    let failure = late.wait().unwrap_err();
    assert!(
        matches!(failure.error, ReadError::ShuttingDown),
        "{failure}"
    );
    assert_eq!(stopping.join().unwrap().quarantined, 0);
    assert!(since.elapsed() < LIMIT / 2, "it did not wait for the limit");
    let _ = running.wait();
    drop(failure);
    assert_eq!(pool.claimed_blocks(), 0);
}

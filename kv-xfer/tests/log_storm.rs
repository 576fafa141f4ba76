//! A storm of errors does not fill the log. Alone in its binary: it counts the process's log lines.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

mod common;

use std::net::TcpListener;
use std::num::NonZeroU16;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::*;
use kv_xfer::engine::{ReadRequest, ReleasePolicy};
use kv_xfer::transport::FailureKind;
use kv_xfer::transport::sim::Behaviour;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

static LINES: AtomicUsize = AtomicUsize::new(0);

/// Counts what a log at the usual level would have written.
struct Count;

impl Subscriber for Count {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {
        LINES.fetch_add(1, Ordering::Relaxed);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn a_storm_of_errors_is_told_in_tens_of_lines() {
    tracing::subscriber::set_global_default(Count).unwrap();
    let pair = pair_with(|config| config.reader.connect_timeout = Duration::from_secs(1));
    let (_, offer) = pair.offer("r", &ids(0..4));
    // A wrong address after the other, each refused at once: nobody listens there.
    let closed = || {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().port()
    };
    let mut remote = lease(&pair.holder, "s", &ids(8..12), None).remote;
    for _ in 0..1000 {
        remote.remote_port = NonZeroU16::new(closed()).unwrap();
        let elsewhere = pair.reader.accept(&remote, None, None).unwrap();
        assert!(pair.read(&elsewhere, 0..4).wait().is_err());
    }
    let unmet = LINES.load(Ordering::Relaxed);
    assert!(unmet >= 1, "the first is told");
    assert!(
        unmet < 50,
        "{unmet} lines of 1000 peers that could not be met"
    );

    // A peer whose every read fails in the transport.
    for _ in 0..1000 {
        let refuse_post = Some(FailureKind::PeerLost);
        pair.fabric.script([Behaviour {
            refuse_post,
            ..Behaviour::default()
        }]);
        eventually("blocks are back", || {
            pair.reader.returned().try_iter().for_each(drop);
            pair.reader.pool().claimed_blocks() == 0
        });
        let request = ReadRequest {
            release: ReleasePolicy::Never,
            ..request(&offer, pair.claim(0..4))
        };
        assert!(pair.reader.read(request).unwrap().wait().is_err());
    }
    let all = LINES.load(Ordering::Relaxed);
    assert!(all < 100, "{all} lines of 2000 failures");
    println!("shown: {unmet} lines of 1000 peers not met, {all} of 2000 failures");
}

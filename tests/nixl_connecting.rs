//! A holder that dies at the very moment at which UCX connects to it.
//!
//! The moment is a few microseconds long. A small library that is loaded ahead of libc holds UCX still within the
//! call, so that it is met each time.
#![allow(clippy::panic, clippy::unwrap_used, missing_docs)]

mod support;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use kv_xfer::engine::ReadError;
use support::*;

#[test]
#[ignore = "the body of the holders' processes"]
fn holder_process() {
    serve_holder();
}

const DIRECTORY: &str = "KVX_TEST_LATE";
const CALL: &str = "KVX_TEST_LATE_CALL";
const BLOCKS: u32 = 64;

/// Compiles what holds UCX still.
fn library(dir: &Path) -> Result<PathBuf, String> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/late.c");
    let library = dir.join("late.so");
    let built = Command::new("cc")
        .args(["-std=gnu11", "-O1", "-shared", "-fPIC", source, "-o"])
        .arg(&library)
        .arg("-ldl")
        .status()
        .map_err(|error| format!("no C compiler ({error})"))?;
    assert!(built.success(), "cc: {built}");
    Ok(library)
}

fn held_in(call: &'static str, test: &str, carrier: &str) {
    let dir = tempfile::tempdir().unwrap();
    let library = match library(dir.path()) {
        Ok(library) => library,
        Err(why) => return skipped(test, why),
    };
    let path = |path: &Path| Some(path.to_str().unwrap().to_owned());
    let late = [
        ("LD_PRELOAD", path(&library)),
        (DIRECTORY, path(dir.path())),
        (CALL, Some(call.to_owned())),
        // What UCX is told without any variable is enough.
        ("UCX_TCP_CONN_NB", None),
        ("UCX_TCP_MAX_CONN_RETRIES", None),
    ];
    in_process_with(test, carrier, &late, dies_while_it_is_connected_to);
}

/// Defines one test per carrier, in which UCX is held in a call.
macro_rules! held {
    ($body:ident in $call:literal) => {
        mod $body {
            #[test]
            fn tcp() {
                super::held_in($call, concat!(stringify!($body), "::tcp"), "tcp");
            }

            #[test]
            fn net() {
                super::held_in($call, concat!(stringify!($body), "::net"), "net");
            }
        }
    };
}

held!(a_holder_that_dies_while_it_is_connected_to_costs_its_read_only in "connect");
// UCX asks for the other end's address when it looks whether a connection stands.
held!(a_holder_that_dies_once_it_is_connected_to_costs_its_read_only in "getpeername");
// The first thing that UCX sends is the request to connect, which is answered.
held!(a_holder_that_dies_once_it_is_greeted_costs_its_read_only in "send");

fn dies_while_it_is_connected_to() {
    let dir = PathBuf::from(std::env::var(DIRECTORY).unwrap());
    let happens = |name: &'static str| eventually(name, || dir.join(name).exists());
    let go_on = |name: &str| drop(File::create(dir.join(name)).unwrap());
    let reader = reader(Shape::MEDIUM, BLOCKS, |_| {});
    let remote = shuffled(BLOCKS as usize, BLOCKS, 9);
    let mut spec = HolderSpec::new(Shape::MEDIUM, BLOCKS);
    let mut holder = Holder::start(&spec);
    spec.port = holder.port;
    let lent = holder.lend("first", &remote, 1);
    let offer = reader.accept(&lent.remote, None, None).unwrap();
    let handle = reader
        .read(keeping(&offer, claim(&reader, 0..BLOCKS)))
        .unwrap();
    happens("asked");
    // The kernel takes the connection, the process does not: when it dies, the connection is reset.
    holder.freeze();
    go_on("ask");
    happens("answered");
    holder.kill_and_wait();
    go_on("go");
    let failure = failed(handle.wait());
    println!("shown: {failure}");
    assert!(
        matches!(
            failure.error,
            ReadError::Connect { .. } | ReadError::Transport { .. }
        ),
        "{failure}"
    );
    drop(failure);
    assert_clean(&reader);

    // Its successor is met like any other.
    let mut holder = Holder::start(&spec);
    let lent = holder.lend("second", &remote, 2);
    let offer = reader.accept(&lent.remote, None, None).unwrap();
    eventually("the successor is read from", || {
        match read(&reader, keeping(&offer, claim(&reader, 0..BLOCKS))) {
            Ok(landed) => {
                assert_eq!(wrong_words(&landed.blocks, &remote, 2), 0);
                true
            }
            Err(failure) => {
                drop(failure);
                assert_clean(&reader);
                false
            }
        }
    });
    assert_clean(&reader);
    holder.leave();
}

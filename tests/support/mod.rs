//! What the tests over the real NIXL share.
//!
//! UCX reads its environment once, so every test body runs in a process of its own, started with the
//! environment that it needs: the test binary again, told to run this one test. The holders that it
//! reads from are processes of their own as well, so that they can be killed and stopped for real.
#![allow(dead_code, missing_docs, unused_imports)]

mod content;
mod holder;
mod net;
mod vanishing;

use std::fmt::Debug;
use std::io::{Read, Seek, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_xfer::engine::{
    Engine, EngineConfig, Landed, Offer, ReadFailure, ReadOutcome, ReadRequest, ReleasePolicy,
};
use kv_xfer::fabric::Backend;
use kv_xfer::ids::{BlockId, EngineId};
use kv_xfer::memory::OwnedBlocks;
use kv_xfer::transport::nixl::NixlTransport;
use kvx::runtime;
use nixl_sys::Environment;
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

pub use content::{Shape, fill_owned, hashes, pool, shuffled, wrong_words};
pub use holder::{Holder, HolderSpec, Lent, ReadingProcess, read_without_end, serve_holder};
pub use net::{HOLDER, Net, OTHER, Outage, READER};

/// No wait in a test is longer.
pub const LIMIT: Duration = Duration::from_secs(30);
/// No test process lives longer.
const PROCESS_LIMIT: Duration = Duration::from_secs(120);
/// Nor in the long mode.
const LONG_LIMIT: Duration = Duration::from_secs(3600);
/// Names the test whose body a process is to run.
const BODY: &str = "KVX_TEST_BODY";
/// Tells a process whose child it is.
const PARENT: &str = "KVX_TEST_PARENT";
/// Names the backend of a test's processes, where it is not UCX.
const BACKEND: &str = "KVX_TEST_BACKEND";
/// What a body that ran to its end leaves in the output.
const FINISHED: &str = "the body of the test has finished";

/// Defines one test per carrier, which runs the function of that name in a process of its own.
#[allow(unused_macros)]
macro_rules! over {
    ($body:ident: $($carrier:ident),+) => {
        mod $body {
            $(
                #[test]
                fn $carrier() {
                    let name = concat!(stringify!($body), "::", stringify!($carrier));
                    crate::support::in_process(name, stringify!($carrier), super::$body);
                }
            )+
        }
    };
}
#[allow(unused_imports)]
pub(crate) use over;

/// The variables that make NIXL use a carrier.
fn variables(carrier: &str) -> &'static [(&'static str, &'static str)] {
    match carrier {
        "shm" => &[],
        // LIBFABRIC, which takes its tcp provider here. Its agents' threads leave the allocator with some 16 MiB in each
        // arena to use again, up to 700 MiB on two processors: given back at once, a leak can be told from it.
        "fabric" => &[
            (BACKEND, "libfabric"),
            ("FI_PROVIDER", "tcp"),
            ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ],
        "tcp" | "net" => &[("UCX_TLS", "tcp,self")],
        // InfiniBand only, on a machine without.
        "rc" => &[("UCX_TLS", "rc")],
        other => panic!("no carrier {other}"),
    }
}

/// Runs a test's body in a process of its own; fails if that fails or does not end.
pub fn in_process(test: &str, carrier: &str, body: fn()) {
    in_process_with(test, carrier, &[], body);
}

/// Like [`in_process`], with more variables in that process's environment, or fewer.
pub fn in_process_with(test: &str, carrier: &str, more: &[(&str, Option<String>)], body: fn()) {
    if std::env::var(BODY).is_ok_and(|wanted| wanted == test) {
        die_with_parent();
        body();
        return finished();
    }
    let nixl = match runtime::resolve() {
        Ok(nixl) => nixl,
        Err(missing) => return skipped(test, missing),
    };
    if carrier == "fabric"
        && let Err(why) = kvx::libfabric::fits(&nixl)
    {
        return skipped(test, why);
    }
    let net = match carrier {
        "net" => match Net::build(test) {
            Ok(net) => Some(net),
            Err(why) => return skipped(test, why),
        },
        _ => None,
    };
    let mut log = tempfile::tempfile().unwrap();
    let mut command = this_binary_on(net.as_ref().map(|net| (&net.0, READER)), test);
    command
        .env(BODY, test)
        .env("UCX_LOG_LEVEL", "info")
        .envs(variables(carrier).iter().copied())
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log.try_clone().unwrap());
    for variable in Environment::recommended().plan().set {
        command.env(variable.name, variable.value);
    }
    for (name, value) in more {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let mut child = command.spawn().unwrap();
    let limit = if long() { LONG_LIMIT } else { PROCESS_LIMIT };
    let until = Instant::now() + limit;
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
            None => {
                child.kill().unwrap();
                child.wait().unwrap();
                break None;
            }
        }
    };
    let mut said = Vec::new();
    log.rewind().unwrap();
    log.read_to_end(&mut said).unwrap();
    let said = String::from_utf8_lossy(&said);
    let noise = |line: &&str| {
        !line.contains("UCX  INFO")
            && !line.contains("was not returned to mpool")
            // What LIBFABRIC says of each descriptor of a peer that has gone.
            && !line.contains(" libfabric_rail")
            && !line.contains(" libfabric_backend.cpp")
    };
    let said_by_us: Vec<&str> = said.lines().filter(noise).collect();
    let said_by_us = said_by_us.join("\n");
    let status = status.unwrap_or_else(|| panic!("{test} did not end; it said:\n{said_by_us}"));
    assert!(status.success(), "{test}: {status}; it said:\n{said_by_us}");
    assert!(said.contains(FINISHED), "{test} ran no body:\n{said_by_us}");
    for line in said_by_us.lines() {
        if let Some(why) = line.strip_prefix("skipped: ") {
            skipped(test, why);
        } else if line.starts_with("shown: ") {
            eprintln!("{test}: {line}");
        }
    }
    if carrier == "fabric" {
        // UCX says nothing of it.
        return;
    }
    let carried = kv_xfer::fabric::UcxLanes::parse(&said).carrier();
    eprintln!("{test}: carried by {carried}");
    match carrier {
        "shm" => assert!(["cma", "unknown"].contains(&carried.as_str()), "{carried}"),
        "tcp" | "net" => assert!(
            ["tcp (emulated)", "unknown"].contains(&carried.as_str()),
            "{carried}"
        ),
        _ => {}
    }
}

/// Leaves word that the body has run to its end, for bodies that end their process themselves.
pub fn finished() {
    println!("\n{FINISHED}");
    std::io::stdout().flush().unwrap();
}

/// Says why a test, or a part of it, does not run.
pub fn skipped(test: &str, why: impl std::fmt::Display) {
    // Not `eprintln!`, which the test harness swallows.
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
}

/// Whether the tests that count are to count far: `KVX_LONG=1`.
pub fn long() -> bool {
    std::env::var("KVX_LONG").is_ok_and(|value| value == "1")
}

/// This test binary, to run one of its tests, here or on a machine of a network.
fn this_binary_on(place: Option<(&Net, u8)>, test: &str) -> Command {
    let program = std::env::current_exe().unwrap();
    let mut command = match place {
        Some((net, machine)) => net.command(machine, &program),
        None => Command::new(program),
    };
    command
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(PARENT, std::process::id().to_string());
    command
}

/// Whatever ends the parent ends this process.
fn die_with_parent() {
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    // It may have died before the line above took effect.
    let parent = std::env::var(PARENT).unwrap().parse().unwrap();
    assert_eq!(getppid(), Pid::from_raw(parent), "the parent is gone");
}

/// Whether this process reads and serves over LIBFABRIC.
pub fn over_libfabric() -> bool {
    std::env::var_os(BACKEND).is_some()
}

pub fn open() -> Arc<NixlTransport> {
    let backend = match std::env::var(BACKEND) {
        Ok(name) => name.parse().unwrap(),
        Err(_) => Backend::ucx(),
    };
    runtime::open(backend).unwrap()
}

pub fn config(name: &str) -> EngineConfig {
    let mut config = EngineConfig::new(EngineId::new(name).unwrap(), "test");
    config.holder.max_leases = 1024;
    if Net::current().is_some() {
        config.dial = config.dial.with_network(net::NETWORK.parse().unwrap());
    }
    config
}

/// An engine that only reads.
pub fn reader(shape: Shape, blocks: u32, tune: impl FnOnce(&mut EngineConfig)) -> Engine {
    let mut config = config("reader");
    tune(&mut config);
    Engine::start(config, pool(shape, blocks), open()).unwrap()
}

pub fn ids(range: impl IntoIterator<Item = u32>) -> Vec<BlockId> {
    range.into_iter().map(BlockId).collect()
}

pub fn claim(engine: &Engine, blocks: impl IntoIterator<Item = u32>) -> OwnedBlocks {
    engine.pool().claim(ids(blocks)).unwrap()
}

/// A read of everything that is offered.
pub fn request(offer: &Offer, blocks: OwnedBlocks) -> ReadRequest<'_> {
    ReadRequest {
        offer,
        hashes: &offer.ticket().hashes,
        span: 0..offer.ticket().runs.len(),
        blocks,
        timeout: LIMIT,
        release: ReleasePolicy::Always,
    }
}

/// A read whose caller ends the lease.
pub fn keeping(offer: &Offer, blocks: OwnedBlocks) -> ReadRequest<'_> {
    ReadRequest {
        release: ReleasePolicy::Never,
        ..request(offer, blocks)
    }
}

/// Starts a read and waits for its end.
pub fn read(engine: &Engine, request: ReadRequest<'_>) -> ReadOutcome {
    engine.read(request).unwrap().wait()
}

pub fn landed(outcome: ReadOutcome) -> Landed {
    outcome.unwrap_or_else(|failure| panic!("{failure}"))
}

pub fn failed(outcome: ReadOutcome) -> ReadFailure {
    match outcome {
        Ok(landed) => panic!("it landed: {:?}", landed.report),
        Err(failure) => failure,
    }
}

/// Waits until `condition` holds; fails the test if it never does.
pub fn eventually(what: impl Debug, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < until, "never happened: {what:?}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Nothing of the reader is claimed, quarantined or in flight any more.
pub fn assert_clean(reader: &Engine) {
    eventually("every block is free again", || {
        reader.returned().try_iter().for_each(drop);
        let stats = reader.stats();
        reader.pool().claimed_blocks() == 0
            && stats.quarantined == 0
            && stats.active == 0
            && stats.queued == 0
    });
    let stats = reader.stats();
    let ended = stats.landed
        + stats.failed_lease
        + stats.failed_peer
        + stats.failed_transport
        + stats.failed_deadline
        + stats.failed_cancelled
        + stats.failed_other;
    assert_eq!(stats.submitted, ended, "each read ends once: {stats:?}");
}

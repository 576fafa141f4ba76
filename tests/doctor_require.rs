//! What must carry the bytes and is not there: refused at once, in the library, the demo, the benches and the target.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_xfer::engine::{Engine, EngineConfig, StartError};
use kv_xfer::fabric::{LIBFABRIC, Requirement};
use kv_xfer::ids::EngineId;
use kv_xfer::layout::{KvLayout, KvSplit, PoolOrder, Preset};
use kv_xfer::memory::{HostOptions, KvPool};
use kv_xfer::transport::nixl::{BackendConfig, NixlTransport};
use serde_json::Value;

const KVX: &str = env!("CARGO_BIN_EXE_kvx");
/// How long a refusal may take; a busy machine is given more than what is promised to a quiet one.
const SOON: Duration = Duration::from_secs(2);

fn skipped(test: &str) -> bool {
    let fast = Path::new("/sys/class/infiniband").exists() || Path::new("/dev/nvidia0").exists();
    let why = match kvx::runtime::resolve() {
        Err(error) => error.to_string(),
        Ok(_) if fast => "this machine has RDMA or a GPU".to_owned(),
        Ok(_) => return false,
    };
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
    true
}

/// The fastest of three tries: what is measured is the tool, not who else uses the machine.
fn soonest(mut try_it: impl FnMut() -> Duration) -> Duration {
    (0..3).map(|_| try_it()).min().unwrap()
}

fn pool() -> Arc<KvPool> {
    let geometry = Preset::Qwen3_32B.geometry();
    let layout = KvLayout::new(&geometry, 8, 16, PoolOrder::BlockFirst, KvSplit::Fused).unwrap();
    KvPool::host(layout, 4, &HostOptions::default()).unwrap().0
}

fn transport(backend: &str) -> Arc<NixlTransport> {
    let backend = BackendConfig {
        name: backend.to_owned(),
        params: Vec::new(),
    };
    kvx::runtime::open(backend).unwrap()
}

fn start(transport: &Arc<NixlTransport>, require: Requirement) -> Result<Engine, StartError> {
    let name = format!("{require}-{}", std::process::id());
    let mut config = EngineConfig::new(EngineId::new(name).unwrap(), "m");
    config.tp_size = 8;
    config.require = require;
    Engine::start(config, pool(), Arc::clone(transport))
}

#[test]
fn an_engine_does_not_start_without_what_it_requires() {
    if skipped("an_engine_does_not_start_without_what_it_requires") {
        return;
    }
    for (backend, require, found) in [
        ("UCX", Requirement::Efa, "no EFA device"),
        ("UCX", Requirement::Rdma, "no RDMA device"),
        ("UCX", Requirement::Nvlink, "no GPU"),
        (LIBFABRIC, Requirement::Efa, "no EFA device"),
        (
            LIBFABRIC,
            Requirement::Shm,
            "cxi, efa, tcp and sockets only",
        ),
    ] {
        let transport = transport(backend);
        let begin = Instant::now();
        let error = start(&transport, require).unwrap_err();
        assert!(begin.elapsed() < SOON);
        let StartError::Fabric(unmet) = &error else {
            panic!("{error}")
        };
        assert_eq!(unmet.wanted, require);
        assert!(
            unmet.found.contains(found) && !unmet.fix.is_empty(),
            "{unmet}"
        );
    }
}

#[test]
fn what_is_required_is_what_nixl_may_use() {
    if skipped("what_is_required_is_what_nixl_may_use") {
        return;
    }
    let held = transport("UCX");
    let engine = start(&held, Requirement::Shm).unwrap();
    // Held once for all.
    let unmet = start(&held, Requirement::Tcp).unwrap_err().to_string();
    assert!(unmet.contains("another engine has held to shm"), "{unmet}");
    drop(engine);
    drop(start(&transport("UCX"), Requirement::Tcp).unwrap());
}

#[test]
fn every_command_refuses_at_once_and_says_what_would_help() {
    if skipped("every_command_refuses_at_once_and_says_what_would_help") {
        return;
    }
    for arguments in [
        "demo --require efa",
        "demo --require rdma --json",
        "bench read --quick --require efa",
        "bench --require rdma compare --quick",
        "bench latency --require rdma",
        "bench scale --require nvlink",
        "target --require efa",
        "doctor --require efa",
        "doctor --require rdma --json",
    ] {
        let wanted = arguments
            .split(' ')
            .skip_while(|word| *word != "--require")
            .nth(1)
            .unwrap();
        let mut text = String::new();
        let took = soonest(|| {
            let begin = Instant::now();
            let output = Command::new(KVX)
                .args(arguments.split(' '))
                .output()
                .unwrap();
            let took = begin.elapsed();
            assert_eq!(output.status.code(), Some(1), "{arguments}");
            text = String::from_utf8_lossy(&output.stdout).into_owned();
            text.push_str(&String::from_utf8_lossy(&output.stderr));
            took
        });
        // The doctor asks the libraries first.
        let limit = match arguments.starts_with("doctor") {
            true => SOON * 10,
            false => SOON,
        };
        assert!(took < limit, "{arguments}: {took:?}");
        for part in [&format!("{wanted} is required"), "Found: ", "What helps: "] {
            assert!(text.contains(part), "{arguments}: {text}");
        }
    }
    let usage = Command::new(KVX)
        .args(["demo", "--require", "pigeon"])
        .output()
        .unwrap();
    assert_eq!(usage.status.code(), Some(2));
    for tls in ["tcp", "cma,self,tcp", "all"] {
        let conflict = Command::new(KVX)
            .args(["demo", "--require", "shm"])
            .env("UCX_TLS", tls)
            .output()
            .unwrap();
        assert_eq!(conflict.status.code(), Some(1), "{tls}");
        let text = String::from_utf8_lossy(&conflict.stderr);
        assert!(text.contains(&format!("UCX_TLS={tls}")), "{text}");
    }
}

#[test]
fn the_demo_runs_over_what_is_required() {
    if skipped("the_demo_runs_over_what_is_required") {
        return;
    }
    for (require, transport) in [("shm", "cma"), ("tcp", "tcp")] {
        let output = Command::new(KVX)
            .args(["demo", "--turns", "1", "--json", "--require", require])
            .env_remove("UCX_TLS")
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        let report: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{require}: {error}: {errors}"));
        assert_eq!(report["ok"], true, "{require}: {report}");
        assert_eq!(report["wrong_bytes"], 0);
        let carried = report["nixl"]["transport"].as_str().unwrap();
        assert!(carried.contains(transport), "{carried}");
        assert_eq!(carried.contains("tcp"), require == "tcp", "{carried}");
    }
}

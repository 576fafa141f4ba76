//! NIXL's LIBFABRIC backend as a person chooses it: the demo over libfabric's TCP, and what is said where the plugin does
//! not load.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use std::io::Write;
use std::process::{Command, Output};

use kvx::libfabric::{self, ProvideError};
use serde_json::Value;

const KVX: &str = env!("CARGO_BIN_EXE_kvx");

fn skip(test: &str, why: impl std::fmt::Display) {
    // Not `eprintln!`, which the test harness swallows.
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
}

fn kvx(arguments: &[&str]) -> Output {
    Command::new(KVX).args(arguments).output().unwrap()
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_demo_runs_over_libfabric() {
    const NAME: &str = "the_demo_runs_over_libfabric";
    let nixl = match kvx::runtime::resolve() {
        Ok(nixl) => nixl,
        Err(missing) => return skip(NAME, missing),
    };
    if let Err(why) = libfabric::fits(&nixl) {
        return skip(NAME, why);
    }
    let output = kvx(&[
        "demo",
        "--turns",
        "2",
        "--json",
        "--backend",
        "libfabric",
        "--require",
        "tcp",
    ]);
    assert!(output.status.success(), "{}", errors(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["ok"], true, "{report:#}");
    assert_eq!(report["wrong_bytes"], 0);
    assert_eq!(report["quarantined_at_exit"], 0);
    assert_eq!(report["nixl"]["backend"], "LIBFABRIC");
    assert_eq!(report["nixl"]["transport"], "tcp", "it is held to it");
    let turns = report["turns"].as_array().unwrap();
    assert!(turns.iter().any(|turn| turn["bytes"].as_u64().unwrap() > 0));
}

#[test]
fn a_libfabric_that_is_too_old_for_nixl_is_named_with_the_way_out() {
    const NAME: &str = "a_libfabric_that_is_too_old_for_nixl_is_named_with_the_way_out";
    let nixl = match kvx::runtime::resolve() {
        Ok(nixl) => nixl,
        Err(missing) => return skip(NAME, missing),
    };
    let unusable = match libfabric::fits(&nixl) {
        Err(ProvideError::Unusable(unusable)) => unusable,
        Err(why) => return skip(NAME, why),
        Ok(()) => return skip(NAME, format!("NIXL {} takes this libfabric", nixl.version)),
    };
    let parts = [
        format!("NIXL {}", nixl.version),
        "newer than libfabric 2.6.0".to_owned(),
        "FABRIC_1.10".to_owned(),
        "FABRIC_1.9".to_owned(),
        "NIXL 1.4.1".to_owned(),
        "UCX".to_owned(),
    ];
    let told = |text: &str| {
        for part in &parts {
            assert!(text.contains(part), "{part}: {text}");
        }
    };
    told(&unusable.to_string());
    // The tool says so before it starts anything.
    let demo = kvx(&["demo", "--turns", "1", "--backend", "libfabric"]);
    assert_eq!(demo.status.code(), Some(3), "{}", errors(&demo));
    told(&errors(&demo));
    // A library that embeds the engine is told by the transport, which has asked libfabric for its version.
    let probe = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "probe", "--ignored", "--nocapture"])
        .env(PROBE, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&probe.stdout).into_owned();
    assert!(probe.status.success(), "{said} {}", errors(&probe));
    told(&said);
    assert!(said.contains("libfabric 2."), "{said}");
    // And the doctor.
    let words = unusable.to_string();
    let Some(file) = named_file(&words) else {
        panic!("no file is named: {unusable}");
    };
    let doctor = Command::new(KVX)
        .args(["doctor", "--json"])
        .env("KVX_LIBFABRIC", file)
        .output()
        .unwrap();
    let report: Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let checks = report["checks"].as_array().unwrap();
    let check = checks.iter().find(|check| check["name"] == "libfabric");
    told(&check.unwrap().to_string());
}

/// The libfabric that a message names.
fn named_file(text: &str) -> Option<&str> {
    let mut words = text.split(' ');
    words.find(|word| word.ends_with("libfabric.so.1"))
}

const PROBE: &str = "KVX_TEST_PROBE";

#[test]
#[ignore = "the body of a process that loads NIXL"]
fn probe() {
    use kv_xfer::fabric::Backend;
    use kv_xfer::ids::AgentName;
    use kv_xfer::transport::{AgentRole, FailureKind, Transport};

    if std::env::var_os(PROBE).is_none() {
        return;
    }
    let transport = kvx::runtime::open(Backend::libfabric()).unwrap();
    let name = AgentName::new("probe").unwrap();
    let error = transport.open_agent(&name, AgentRole::Read).unwrap_err();
    assert_eq!(error.kind, FailureKind::Unsupported);
    println!("{error}");
}

#[test]
fn an_unknown_backend_is_a_usage_error_and_ucx_can_be_named() {
    let output = kvx(&["demo", "--backend", "verbs"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        errors(&output).contains("choose ucx or libfabric"),
        "{}",
        errors(&output)
    );
    // What it cannot carry is said at once.
    let output = kvx(&["demo", "--backend", "libfabric", "--require", "shm"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        errors(&output).contains("use the backend UCX"),
        "{}",
        errors(&output)
    );
}

#[test]
fn without_tools_it_is_said_what_is_missing() {
    const NAME: &str = "without_tools_it_is_said_what_is_missing";
    if kvx::runtime::resolve().is_err() || nixl_sys::has_rdma() {
        return skip(NAME, "no NIXL, or RDMA here");
    }
    let cache = tempfile::tempdir().unwrap();
    let output = Command::new(KVX)
        .args(["demo", "--backend", "libfabric"])
        .env("KVX_LIBFABRIC_CACHE", cache.path())
        .env("PATH", cache.path())
        .output()
        .unwrap();
    let errors = errors(&output);
    if output.status.code() != Some(3) {
        return skip(NAME, "all that is needed is installed");
    }
    assert!(errors.contains("python3 is missing"), "{errors}");
}

//! `kvx demo` as a person runs it: its report, its exit statuses, and what happens when it is
//! interrupted or loses a process.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(240);

fn kvx(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
    command
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn run(arguments: &[&str]) -> Output {
    kvx(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Why the demo cannot run here, if it cannot.
fn skipped(test: &str) -> bool {
    match kvx::runtime::resolve() {
        Ok(_) => false,
        Err(error) => {
            // Not `eprintln!`, which the test harness swallows.
            let _ = writeln!(std::io::stderr(), "skipped: {test}: {error}");
            true
        }
    }
}

/// The children of a process, by the kernel's list.
fn children(pid: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split_whitespace()
        .filter_map(|pid| pid.parse().ok())
        .collect()
}

#[expect(clippy::zombie_processes, reason = "it is waited for on every path")]
/// Starts a demo that runs for a while and waits until both children have NIXL loaded.
fn started() -> (Child, Vec<u32>) {
    let mut child = kvx(&["demo", "--turns", "64", "--json"]).spawn().unwrap();
    let until = Instant::now() + LIMIT;
    loop {
        let children = children(child.id());
        let loaded = |pid: &u32| {
            fs::read_to_string(format!("/proc/{pid}/maps"))
                .is_ok_and(|m| m.contains("libplugin_UCX"))
        };
        if children.len() == 2 && children.iter().all(loaded) {
            return (child, children);
        }
        if Instant::now() >= until {
            let _ = child.kill();
            let _ = child.wait();
            panic!("the demo's processes never came up");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

fn assert_gone(pids: &[u32]) {
    let until = Instant::now() + LIMIT;
    while pids
        .iter()
        .any(|pid| Path::new(&format!("/proc/{pid}")).exists())
    {
        assert!(Instant::now() < until, "a child outlived the demo");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_short_demo_reports_every_turn_and_no_wrong_byte() {
    if skipped("a_short_demo_reports_every_turn_and_no_wrong_byte") {
        return;
    }
    let output = run(&["demo", "--turns", "2", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["ok"], true, "{report:#}");
    assert_eq!(report["wrong_bytes"], 0);
    assert_eq!(report["quarantined_at_exit"], 0);
    assert_eq!(report["nixl"]["backend"], "UCX");
    let turns = report["turns"].as_array().unwrap();
    assert_eq!(turns.len(), 4 * 2 + 5);
    for turn in turns {
        for field in [
            "turn",
            "prompt_tokens",
            "local_hit_tokens",
            "decision",
            "reason",
            "read_tokens",
            "bytes",
            "descriptors_unmerged",
            "descriptors",
            "submit_us",
            "total_ms",
            "gbps",
            "verified",
        ] {
            assert!(!turn[field].is_null(), "{field} is missing in {turn:#}");
        }
    }
    let reason = |special: &str| {
        let turn = turns
            .iter()
            .find(|turn| turn["special"] == special)
            .unwrap();
        (
            turn["decision"].as_str().unwrap(),
            turn["reason"].as_str().unwrap(),
        )
    };
    assert_eq!(reason("partial local hit"), ("read", "worth_reading"));
    assert_eq!(
        reason("under the threshold"),
        ("recompute", "below_threshold")
    );
    assert_eq!(reason("history edited"), ("read", "worth_reading"));
    assert_eq!(reason("lease expired"), ("recompute", "lease_expired"));
    assert_eq!(reason("lease revoked"), ("recompute", "lease_lost"));
}

#[test]
fn another_models_geometry_and_block_size_work_too() {
    if skipped("another_models_geometry_and_block_size_work_too") {
        return;
    }
    let output = run(&[
        "demo",
        "--turns",
        "1",
        "--model",
        "GLM-5",
        "--block-tokens",
        "64",
        "--json",
    ]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["ok"], true, "{report:#}");
}

#[test]
fn a_trace_is_replayed() {
    if skipped("a_trace_is_replayed") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.jsonl");
    fs::write(
        &trace,
        concat!(
            r#"{"timestamp":0,"input_length":1600,"output_length":200,"hash_ids":[1,2,3,4]}"#,
            "\n",
            r#"{"timestamp":100,"input_length":900,"output_length":50,"hash_ids":[9,10]}"#,
            "\n",
            r#"{"timestamp":60000,"input_length":2500,"output_length":100,"hash_ids":[1,2,3,5,6]}"#,
            "\n",
        ),
    )
    .unwrap();
    let output = run(&["demo", "--trace", trace.to_str().unwrap(), "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["turns"].as_array().unwrap().len(), 1);
    assert_eq!(report["turns"][0]["decision"], "read");
}

#[test]
fn a_bad_trace_is_a_usage_error_that_names_the_line() {
    if skipped("a_bad_trace_is_a_usage_error_that_names_the_line") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.jsonl");
    fs::write(
        &trace,
        "{\"timestamp\":0,\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}\nnonsense\n",
    )
    .unwrap();
    let output = run(&["demo", "--trace", trace.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert!(
        text(&output.stderr).contains("line 2"),
        "{}",
        text(&output.stderr)
    );
    let output = run(&["demo", "--trace", "/nowhere/at/all"]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
}

#[test]
fn without_nixl_it_says_where_it_looked_and_what_helps() {
    let output = kvx(&["demo", "--json"])
        .env("KVX_NIXL_DIR", "/nowhere/nixl")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert!(output.stdout.is_empty());
    let said = text(&output.stderr);
    assert!(
        said.contains("/nowhere/nixl") && said.contains("What helps"),
        "{said}"
    );
}

#[test]
fn the_processes_have_the_environments_cluster_key() {
    if skipped("the_processes_have_the_environments_cluster_key") {
        return;
    }
    let demo = |secret: &str| {
        kvx(&["demo", "--turns", "1", "--json"])
            .env("KVX_CLUSTER_KEY", secret)
            .output()
            .unwrap()
    };
    let output = demo("of-the-demo-0123456789");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["ok"], true, "{report:#}");
    let output = demo("short");
    assert_eq!(output.status.code(), Some(3));
    let said = text(&output.stderr);
    assert!(said.contains("at least 16"), "{said}");
}

#[test]
fn a_backend_that_cannot_start_is_an_environment_error() {
    if skipped("a_backend_that_cannot_start_is_an_environment_error") {
        return;
    }
    // No such transport: UCX refuses, and the demo must say so instead of hanging.
    let output = kvx(&["demo", "--json"])
        .env("UCX_TLS", "no_such_transport")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    assert!(
        text(&output.stderr).contains("cannot start"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn ctrl_c_ends_it_and_its_children() {
    if skipped("ctrl_c_ends_it_and_its_children") {
        return;
    }
    let (child, children) = started();
    signal(child.id(), Signal::INT);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    assert_gone(&children);
}

#[test]
fn a_killed_child_ends_it_with_an_error_that_names_it() {
    if skipped("a_killed_child_ends_it_with_an_error_that_names_it") {
        return;
    }
    for (index, role) in ["decode", "prefill"].into_iter().enumerate() {
        let (child, children) = started();
        signal(children[index], Signal::KILL);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
        // Who is asked next notices first; killing the decode process also ends prefill's reads.
        assert!(
            text(&output.stderr).contains(role),
            "{}",
            text(&output.stderr)
        );
        assert_gone(&children);
    }
}

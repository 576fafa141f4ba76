//! `serving bench` and `serving replay`, small: what they print, and how they end.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::fs;
use std::io::Write as _;
use std::process::Command;

use serde_json::Value;
use serving::provision;

/// Runs it; `None` where the model cannot be had.
fn run(test: &str, arguments: &[&str]) -> Option<(Option<i32>, String, String)> {
    if let Err(error) = provision::model() {
        let _ = writeln!(std::io::stderr(), "skipped: {test}: {error}");
        return None;
    }
    let output = Command::new(env!("CARGO_BIN_EXE_serving"))
        .args(arguments)
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    Some((output.status.code(), out, err))
}

/// The rows of one mode: (turns, requests, failed, hit rate).
fn rows(report: &Value, mode: &str) -> Vec<(String, u64, u64, f64)> {
    let rows = report["rows"].as_array().unwrap().iter();
    rows.filter(|row| row["mode"] == mode)
        .map(|row| {
            let number = |name: &str| row[name].as_u64().unwrap();
            let turns = row["turns"].as_str().unwrap().to_owned();
            let hits = row["hit_rate"].as_f64().unwrap();
            (turns, number("requests"), number("failed"), hits)
        })
        .collect()
}

#[test]
fn a_bench_shows_hits_only_with_the_transfer_on() {
    let out = tempfile::tempdir().unwrap();
    let folder = out.path().to_str().unwrap();
    let arguments = [
        "bench",
        "--json",
        "--contexts",
        "96,160",
        "--conversations",
        "2",
        "--turns",
        "2",
        "--input",
        "12",
        "--output",
        "3",
        "--clients",
        "2",
        "--kv-cache-mib",
        "96",
        "--out",
        folder,
    ];
    let Some((code, stdout, stderr)) = run("a_bench_shows_hits", &arguments) else {
        return;
    };
    assert_eq!(code, Some(0), "{stdout}\n{stderr}");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    let sum = |mode, turns| {
        let rows = rows(&report, mode).into_iter();
        rows.filter(|row| row.0 == turns)
            .fold((0, 0, 0.0_f64), |all, row| {
                (all.0 + row.1, all.1 + row.2, all.2 + row.3)
            })
    };
    assert_eq!(sum("off", "later"), (4, 0, 0.0));
    // Two groups, every later turn of each a hit.
    assert_eq!(sum("on", "later"), (4, 0, 2.0));
    assert_eq!(sum("on", "first"), (4, 0, 0.0));
    assert_eq!(report["leaked_blocks"], 0);
    assert_eq!(report["texts_equal"], true);
    for file in ["bench.json", "bench-ttft.svg", "bench-pinned.svg"] {
        assert!(
            fs::metadata(out.path().join(file)).unwrap().len() > 100,
            "{file}"
        );
    }
}

#[test]
fn a_trace_is_replayed_with_several_conversations_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.jsonl");
    let mut lines = String::new();
    // Three chats of three turns; each prompt begins with all full blocks of the one before it.
    for turn in 0..3_u64 {
        for chat in 0..3_u64 {
            let blocks = 4 + 2 * turn;
            let ids: Vec<u64> = (0..blocks).map(|block| chat * 1000 + block).collect();
            lines.push_str(&format!(
                "{{\"timestamp\":{},\"input_length\":{},\"output_length\":64,\"hash_ids\":{ids:?}}}\n",
                turn * 10_000 + chat * 100,
                blocks * 512 - 100,
            ));
        }
    }
    fs::write(&trace, lines).unwrap();
    let arguments = [
        "replay",
        "--json",
        "--trace",
        trace.to_str().unwrap(),
        "--divide",
        "32",
        "--speed",
        "100",
        "--kv-cache-mib",
        "96",
    ];
    let Some((code, stdout, stderr)) = run("a_trace_is_replayed", &arguments) else {
        return;
    };
    assert_eq!(code, Some(0), "{stdout}\n{stderr}");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    for mode in ["off", "on"] {
        let rows = rows(&report, mode);
        let requests: u64 = rows.iter().map(|row| row.1).sum();
        assert_eq!(requests, 9, "{rows:?}");
        assert!(rows.iter().all(|row| row.2 == 0), "{rows:?}");
    }
    let mut later = rows(&report, "on")
        .into_iter()
        .filter(|row| row.0 == "later");
    assert!(later.all(|row| row.3 > 0.99));
    assert_eq!(report["texts_equal"], true);
    // Groups are by length: the prompts' end is within a group's name.
    for row in report["rows"].as_array().unwrap() {
        let most = row["group"].as_str().unwrap().trim_start_matches('≤');
        assert!(row["prompt_tokens"].as_u64() <= most.parse().ok(), "{row}");
    }
}

#[test]
fn bad_arguments_are_refused_before_anything_starts() {
    for arguments in [
        &["bench", "--contexts", "0"][..],
        &["bench", "--turns", "0"],
        &["bench", "--rate", "0"],
        &["bench", "--rate", "nan"],
        &["replay"],
        &["demo", "--chat", "--json"],
    ] {
        let Some((code, _, stderr)) = run("bad_arguments", arguments) else {
            return;
        };
        assert_eq!(code, Some(2), "{arguments:?}: {stderr}");
    }
    let Some((code, _, stderr)) = run("bad_arguments", &["replay", "--trace", "/nowhere"]) else {
        return;
    };
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains("/nowhere: cannot open"), "{stderr}");
    assert!(stderr.contains("No such file"), "{stderr}");
}

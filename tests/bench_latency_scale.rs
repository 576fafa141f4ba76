//! `kvx bench latency` and `kvx bench scale` as a person runs them, but small. Nothing here depends
//! on how fast the machine is.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use std::io::Write;
use std::process::{Command, Output};

use kvx::bench::row::{BenchReport, Row};

/// Why they cannot run here, if they cannot.
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

fn kvx(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvx"))
        .args(arguments)
        .output()
        .unwrap()
}

fn report(arguments: &[&str]) -> BenchReport {
    let output = kvx(arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}: {errors}", output.status);
    serde_json::from_slice(&output.stdout).unwrap()
}

fn rows<'a>(report: &'a BenchReport, case: &str) -> Vec<&'a Row> {
    let rows: Vec<_> = report.rows.iter().filter(|row| row.case == case).collect();
    assert!(!rows.is_empty(), "no row of {case}");
    rows
}

fn has(row: &Row, names: &[&str]) {
    for name in names {
        assert!(row.more.contains_key(*name), "{}: no {name}", row.case);
    }
}

#[test]
fn latency_has_the_promised_rows() {
    if skipped("latency_has_the_promised_rows") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let report = report(&[
        "bench",
        "latency",
        "--json",
        "--quick",
        "--samples",
        "30",
        "--idle",
        "1",
        "--out",
        folder.path().to_str().unwrap(),
    ]);
    assert!(report.ok);
    assert_eq!(report.bench, "latency");
    for shape in [
        "layer-first-64x8KiB",
        "block-first-1x512KiB",
        "single-1x8KiB",
    ] {
        let rows = rows(&report, &format!("one-block-{shape}"));
        let (engine, nixl) = (rows[0], rows[1]);
        assert!(engine.verified);
        assert_eq!(engine.bytes, nixl.bytes);
        assert_eq!(engine.descriptors, nixl.descriptors, "{shape}");
        has(
            engine,
            &[
                "p50_us",
                "p999_us",
                "histogram",
                "p99_over_nixl_us",
                "queued_p50_us",
            ],
        );
        has(nixl, &["p50_us", "p999_us", "histogram", "post_p50_us"]);
    }
    let random = rows(&report, "random-2048x8KiB");
    assert_eq!(random.len(), 3);
    has(
        random[0],
        &[
            "over_windows_ns_each",
            "over_one_post_ns_each",
            "within_200_ns",
        ],
    );
    let large = rows(&report, "large-64x160x4KiB")[0];
    assert!(large.first_layer_ms.unwrap() <= large.max_ms);
    has(
        rows(&report, "submit-10240-descriptors")[0],
        &["p99_us", "within_50_us"],
    );
    has(
        rows(&report, "idle-1s")[0],
        &["reader_cpu_percent", "holder_cpu_percent"],
    );
    for blocks in [1000, 2000] {
        let rows = rows(&report, &format!("first-contact-64x{blocks}"));
        assert_eq!(rows.len(), 2);
        has(
            rows[0],
            &["card_bytes", "step_open_agent_ms", "within_50_ms"],
        );
        assert!(rows.iter().all(|row| row.verified));
        assert_eq!(rows[0].more["card_within_1_mib"], true);
    }
    has(rows(&report, "meet-16-peers")[0], &["one_ms", "each_ms"]);
    assert!(folder.path().join("latency.md").exists());
    assert!(folder.path().join("latency-latency.svg").exists());
}

#[test]
fn scale_has_the_promised_rows_and_loses_nothing() {
    if skipped("scale_has_the_promised_rows_and_loses_nothing") {
        return;
    }
    let report = report(&[
        "bench",
        "scale",
        "--json",
        "--peers",
        "3",
        "--reads",
        "24",
        "--leases",
        "500",
        "--seconds",
        "1",
    ]);
    assert!(report.ok);
    assert_eq!(report.bench, "scale");
    let fan = rows(&report, "fan-in-3-peers-24-reads")[0];
    assert!(fan.verified && fan.bytes > 0);
    assert_eq!(fan.more["failed"], 0.0);
    has(
        fan,
        &[
            "share_min_to_mean",
            "fair",
            "memory_flat",
            "resident_peak_mib",
        ],
    );
    let probes = rows(&report, "one-block");
    assert_eq!(probes.len(), 2);
    has(
        probes[1],
        &["p99_to_idle", "p99_within_3x", "queued_p50_us"],
    );
    for loss in ["killed", "stopped"] {
        let beside = rows(&report, &format!("3-peers-beside-one-{loss}"))[0];
        assert!(beside.verified && beside.bytes > 0);
        assert_eq!(beside.more["ok"], true);
        has(
            beside,
            &["gbps_before", "rate_to_before", "kept_90_percent"],
        );
        if loss == "killed" {
            assert!(beside.more["failed"].as_f64().unwrap() > 0.0);
            has(beside, &["why", "last_failure_ms"]);
        }
    }
    let queue = rows(&report, "queue-of-32")[0];
    let count = |name: &str| queue.more[name].as_f64().unwrap();
    assert_eq!(count("taken") + count("refused"), count("burst"));
    assert_eq!(count("landed"), count("taken"));
    let back = rows(&report, "give-back")[0];
    assert_eq!(back.more["blocks"], back.more["returned"]);
    assert_eq!(back.more["twice"], 0.0);
    has(
        rows(&report, "resources")[0],
        &["open_files_after", "threads_after"],
    );
    let leases = rows(&report, "leases-500")[0];
    assert_eq!(leases.more["lost"], 0.0);
    has(
        leases,
        &[
            "grant_p99_us",
            "renew_p99_us",
            "revoke_p99_us",
            "expire_us",
            "bytes_each",
        ],
    );
}

#[test]
fn wrong_arguments_are_usage_errors() {
    for arguments in [
        &["bench"][..],
        &["bench", "scale", "--peers", "0"],
        &["bench", "latency", "--samples", "0"],
        &["bench", "latency", "--idle", "x"],
    ] {
        assert_eq!(kvx(arguments).status.code(), Some(2), "{arguments:?}");
    }
}

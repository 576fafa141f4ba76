//! The script for machines with a GPU, packed as it travels, in its variant for host memory; and what the tool says where a
//! GPU is asked for and there is none.
#![allow(missing_docs, clippy::unwrap_used)]

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};

use kv_xfer::memory::cuda::CudaDevice;
use kvx::runtime;

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn script(name: &str) -> Command {
    Command::new(
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/gpu")
            .join(name),
    )
}

fn assert_well(what: &str, output: &Output) {
    assert!(
        output.status.success(),
        "{what}: {}\n{}\n{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
}

#[test]
fn the_packed_script_runs_in_host_memory() {
    if let Err(missing) = runtime::resolve() {
        let _ = writeln!(std::io::stderr(), "skipped: {missing}");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let pack = dir.path().join("pack");
    let packed = script("pack.sh")
        .args(["--kvx", env!("CARGO_BIN_EXE_kvx"), "--out"])
        .arg(&pack)
        .output()
        .unwrap();
    assert_well("pack.sh", &packed);
    // As on the other machine: nothing of this build is at hand.
    let ran = Command::new(pack.join("run.sh"))
        .args(["--memory", "host", "--quick"])
        .env_clear()
        .env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")
        .env("HOME", dir.path())
        .current_dir("/")
        .output()
        .unwrap();
    assert_well("run.sh", &ran);
    let said = text(&ran.stdout);
    for wanted in [
        "none: this says nothing about GPUs",
        "reads and rates: passed",
        "into host memory from host: ",
        "compute-sanitizer: skipped: the blocks are in host memory",
        "all is well on memory host",
    ] {
        assert!(said.contains(wanted), "{wanted} is not in:\n{said}");
    }
    let report = std::fs::read(pack.join("results/gpu-check.json")).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
    assert_eq!(report["ok"], true);
    assert_eq!(report["gpu"], serde_json::Value::Null);
    let checks: Vec<_> = report["checks"].as_array().unwrap().iter().collect();
    let names: Vec<_> = checks
        .iter()
        .map(|check| check["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        [
            "every byte",
            "revoked during the read",
            "order with streams"
        ]
    );
    assert!(checks.iter().all(|check| check["ok"] == true), "{report}");
    assert!(
        report["rates"]
            .as_array()
            .unwrap()
            .iter()
            .all(|rate| rate["read_gbps"].as_f64() > Some(0.0))
    );
}

#[test]
fn a_gpu_that_is_not_there_is_said_to_be_missing() {
    if runtime::resolve().is_err() || CudaDevice::count().is_ok() {
        let _ = writeln!(std::io::stderr(), "skipped: no NIXL, or a GPU is here");
        return;
    }
    for arguments in [
        vec!["gpu-check", "--memory", "cuda:0"],
        vec!["demo", "--memory", "cuda:0"],
        vec!["bench", "read", "--memory", "cuda:0"],
        vec!["target", "--bind", "127.0.0.1:0", "--memory", "cuda:0"],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_kvx"))
            .args(&arguments)
            .output()
            .unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{arguments:?}: {said}");
        assert!(
            said.contains("libcuda.so.1") && said.contains("host memory"),
            "{arguments:?}: {said}"
        );
    }
}

//! `kvx doctor` as a person runs it: on this machine, in worse surroundings, and on trees of other machines.
#![allow(
    clippy::type_complexity,
    missing_docs,
    clippy::unwrap_used,
    clippy::panic
)]

#[path = "../kv-xfer/tests/fabric_common/mod.rs"]
mod fabric_common;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use fabric_common::{Machine, limits};
use serde_json::{Value, json};

const KVX: &str = env!("CARGO_BIN_EXE_kvx");

/// What the doctor says, and its exit status.
struct Said {
    report: Value,
    exit: i32,
}

fn said(command: &mut Command) -> Said {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let report = serde_json::from_str(&text).unwrap_or_else(|error| {
        let errors = String::from_utf8_lossy(&output.stderr);
        panic!("{error}: {text} {errors}")
    });
    Said {
        report,
        exit: output.status.code().unwrap(),
    }
}

fn doctor() -> Command {
    let mut command = Command::new(KVX);
    command.args(["doctor", "--json"]);
    for name in [
        "UCX_TLS",
        "UCX_NET_DEVICES",
        "KVX_LIBFABRIC",
        "KVX_REQUIRE",
        "FI_PROVIDER",
    ] {
        command.env_remove(name);
    }
    command
}

impl Said {
    fn verdict(&self) -> &str {
        self.report["verdict"].as_str().unwrap()
    }

    fn check(&self, name: &str) -> &Value {
        let checks = self.report["checks"].as_array().unwrap();
        let found = checks.iter().find(|check| check["name"] == name);
        found.unwrap_or_else(|| panic!("no check {name}: {}", self.report))
    }

    /// The check's text, and whether it is well.
    fn found(&self, name: &str) -> (String, bool) {
        let check = self.check(name);
        (check.to_string(), check["ok"].as_bool().unwrap())
    }
}

/// Why a test about a machine without anything fast cannot run here.
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

#[test]
fn a_machine_without_rdma_is_told_so() {
    if skipped("a_machine_without_rdma_is_told_so") {
        return;
    }
    let said = said(&mut doctor());
    assert_eq!((said.verdict(), said.exit), ("shm", 1), "{}", said.report);
    let text = |name: &str| said.report[name].as_str().unwrap().to_owned();
    assert!(
        text("found").contains("no RDMA device"),
        "{}",
        text("found")
    );
    assert!(text("local").contains("cma"), "{}", text("local"));
    assert!(
        text("remote").starts_with("tcp") || text("remote") == "nothing",
        "{}",
        text("remote")
    );
    for check in said.report["checks"].as_array().unwrap() {
        for field in ["name", "found", "needed", "fix"] {
            assert!(check[field].is_string(), "{check}");
        }
        assert!(
            check["ok"].as_bool().unwrap() || check["fix"] != "",
            "{check}"
        );
    }
    let (ucx, ok) = said.found("UCX");
    assert!(ok && ucx.contains("cma/memory"), "{ucx}");
    let plain = Command::new(KVX).arg("doctor").output().unwrap();
    let plain = String::from_utf8_lossy(&plain.stdout).into_owned();
    assert!(plain.starts_with("verdict      shm"), "{plain}");
    assert!(plain.contains("no RDMA"), "{plain}");
}

#[test]
fn with_tcp_only_it_says_tcp_only() {
    if skipped("with_tcp_only_it_says_tcp_only") {
        return;
    }
    let said = said(doctor().env("UCX_TLS", "tcp"));
    assert_eq!(
        (said.verdict(), said.exit),
        ("tcp-only", 1),
        "{}",
        said.report
    );
    let local = said.report["local"].as_str().unwrap();
    assert!(
        local.starts_with("tcp") && local.contains("emulated"),
        "{local}"
    );
}

#[test]
fn without_loopback_nothing_works_and_it_says_why() {
    const TEST: &str = "without_loopback_nothing_works_and_it_says_why";
    if skipped(TEST) {
        return;
    }
    let script = "mount -t sysfs sysfs /sys && exec \"$0\" doctor --json";
    let unshare = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--net", "--mount", "sh", "-c", script, KVX]);
        command.env_remove("UCX_TLS");
        command
    };
    let allowed = unshare("mount -t sysfs sysfs /sys").output();
    if !allowed.is_ok_and(|output| output.status.success()) {
        let _ = writeln!(
            std::io::stderr(),
            "skipped: {TEST}: namespaces are not permitted"
        );
        return;
    }
    let said = said(&mut unshare(script));
    assert_eq!(
        (said.verdict(), said.exit),
        ("broken", 3),
        "{}",
        said.report
    );
    for name in ["UCX backend", "loopback interface"] {
        let (check, ok) = said.found(name);
        assert!(!ok && check.contains("ip link set lo up"), "{check}");
    }
}

#[test]
fn a_libfabric_that_is_missing_wrong_or_too_old_is_told_apart() {
    if skipped("a_libfabric_that_is_missing_wrong_or_too_old_is_told_apart") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.so");
    std::fs::write(&text, "no library").unwrap();
    let library = |name: &str, code: &str| {
        let (source, library) = (folder.path().join("x.c"), folder.path().join(name));
        std::fs::write(&source, code).unwrap();
        let cc = Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .args([&library, &source])
            .status();
        assert!(cc.unwrap().success());
        library
    };
    let other = library("other.so", "int other;");
    let old = library(
        "old.so",
        "const char *symbols = \"FABRIC_1.6\"; unsigned fi_version(void) { return 0x00010011; }\n\
         int fi_getinfo() { return -61; } void fi_freeinfo() {}",
    );
    let crash = library(
        "crash.so",
        "unsigned fi_version(void) { return *(volatile unsigned *)0; }\n\
         int fi_getinfo() { return -61; } void fi_freeinfo() {}",
    );
    let missing = folder.path().join("missing.so");
    for (file, words) in [
        (missing, "is not there"),
        (text, "is not a shared library"),
        (other, "has no fi_version"),
        (old, "libfabric 1.17 (symbols up to FABRIC_1.6)"),
        (crash, "brought its process down"),
    ] {
        let said = said(doctor().env("KVX_LIBFABRIC", &file));
        // It is needed for EFA only.
        assert_eq!(said.verdict(), "shm", "{}", said.report);
        let (check, _) = said.found("libfabric");
        assert!(check.contains(words), "{check}");
        let nixl = said.report["nixl"]["version"].as_str().unwrap();
        assert!(
            check.contains(&format!("NIXL {nixl}")) && check.contains("FABRIC_1."),
            "{check}"
        );
        assert!(said.check("libfabric")["fix"] != "", "{check}");
        if nixl.starts_with("1.5") {
            assert!(
                check.contains("newer than libfabric 2.6.0") && check.contains("NIXL 1.4.1"),
                "{check}"
            );
        }
    }
}

#[test]
fn a_small_limit_of_locked_memory_matters_to_rdma_only() {
    if skipped("a_small_limit_of_locked_memory_matters_to_rdma_only") {
        return;
    }
    let mut limited = Command::new("sh");
    limited
        .args(["-c", "ulimit -l 64 && exec \"$0\" doctor --json", KVX])
        .env_remove("UCX_TLS");
    let said = said(&mut limited);
    assert_eq!(said.verdict(), "shm");
    let (memlock, ok) = said.found("memlock");
    assert!(ok && memlock.contains("64 KiB"), "{memlock}");
}

/// What the libraries of a machine said.
fn record(machine: &Machine, transports: &[&str], libfabric: &[&str], plugin: Value) {
    let resources: Vec<_> = transports.iter().map(|name| [*name, "x"]).collect();
    let providers: Vec<_> = libfabric.iter().map(|name| [*name, "x", "2.7"]).collect();
    let answers = json!({
        "nixl": {"Ok": {"version": "1.5.1", "library": "/x", "plugins": ["UCX", "LIBFABRIC"],
                 "ucx_modules": ["cma", "ib"], "needs_fabric": "1.10", "findings": []}},
        "backend": {"Ok": null},
        "ucx": {"Ok": {"version": "1.23.0", "library": "/x", "resources": resources}},
        "libfabric": {"Ok": {"version": "2.7", "library": "/x", "symbols": "1.10", "providers": providers}},
        "plugin": plugin,
    });
    machine.put("kvx-probe.json", &answers.to_string());
}

#[test]
fn other_machines_get_the_right_verdict() {
    type Change = fn(&Machine);
    type Case<'a> = (&'a str, Change, &'a [&'a str], Value, &'a str, i32);
    let efa: &[&str] = &["efa", "tcp"];
    let works = || json!({"Ok": null});
    let cases: [Case<'_>; 7] = [
        ("whole", |_| {}, efa, works(), "efa", 0),
        ("no provider", |_| {}, &["tcp"], works(), "broken", 3),
        (
            "no plugin",
            |_| {},
            efa,
            json!({"Err": "libcudart.so.12 is missing"}),
            "broken",
            3,
        ),
        (
            "memlock",
            |m| m.put("proc/self/limits", &limits("65536")),
            efa,
            works(),
            "broken",
            3,
        ),
        ("one NIC refused", |m| m.refuse(3), efa, works(), "efa", 0),
        ("one NIC nowhere", |m| m.dangle(3), efa, works(), "efa", 0),
        (
            "no device files",
            |m| m.remove("dev/infiniband"),
            efa,
            works(),
            "broken",
            3,
        ),
    ];
    for (name, change, libfabric, plugin, verdict, exit) in cases {
        let machine = Machine::p5en();
        change(&machine);
        record(&machine, &["tcp", "cma", "cuda_ipc"], libfabric, plugin);
        let said = said(doctor().arg("--root").arg(machine.root()));
        assert_eq!(
            (said.verdict(), said.exit),
            (verdict, exit),
            "{name}: {}",
            said.report
        );
        assert_eq!(said.report["gpus"].as_object().unwrap().len(), 8, "{name}");
        if verdict == "broken" {
            let checks = said.report["checks"].as_array().unwrap();
            assert!(
                checks.iter().any(|c| c["ok"] == false && c["fix"] != ""),
                "{name}"
            );
        }
    }
    let plain = Machine::plain();
    record(&plain, &["tcp"], &[], json!({"Err": "x"}));
    let said_plain = said(doctor().arg("--root").arg(plain.root()));
    assert_eq!((said_plain.verdict(), said_plain.exit), ("tcp-only", 1));
    plain.put("kvx-probe.json", "{");
    let said_broken = said(doctor().arg("--root").arg(plain.root()));
    assert_eq!((said_broken.verdict(), said_broken.exit), ("broken", 3));
}

#[test]
fn a_whole_p5en_reads_well() {
    let machine = Machine::p5en();
    record(&machine, &["tcp", "cma"], &["efa"], json!({"Ok": null}));
    let output = Command::new(KVX)
        .args(["doctor", "--require", "efa", "--root"])
        .arg(machine.root())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0), "{text}");
    for part in [
        "verdict      efa",
        "required     efa: it is there",
        "16 EFA devices",
        "0000:53:00.0 NVIDIA H200: rdmap0s0, rdmap1s0 (same PCI bridge",
        "FI_PROVIDER=efa",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_peer_is_measured_both_ways() {
    if skipped("a_peer_is_measured_both_ways") {
        return;
    }
    let mut target = Command::new(KVX)
        .args(["target", "--bind", "127.0.0.1:0"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(target.stdout.take().unwrap()).lines();
    let address = lines
        .by_ref()
        .map_while(Result::ok)
        .find_map(|line| line.strip_prefix("listening at ").map(str::to_owned))
        .unwrap();
    let measured = said(doctor().args(["--require", "any", "--peer", &address]));
    target.kill().unwrap();
    target.wait().unwrap();
    drop(lines);
    assert_eq!(measured.exit, 0, "{}", measured.report);
    let peer = &measured.report["peer"];
    assert_eq!(peer["ok"], true, "{peer}");
    for way in ["read", "write"] {
        let way = &peer[way];
        assert!(way["gbps"].as_f64().unwrap() > 0.01, "{way}");
        assert_eq!(
            (&way["carrier"], &way["wrong_bytes"]),
            (&json!("shm"), &json!(0)),
            "{way}"
        );
        assert!(way["checked_bytes"].as_u64().unwrap() >= 64 << 20, "{way}");
        assert_eq!(way["agree"], true, "{way}");
        assert_eq!(way["emulated"], false, "{way}");
        assert!(
            way["protocol"][0].as_str().unwrap().contains("cma"),
            "{way}"
        );
    }
    let nobody = said(doctor().args(["--peer", "127.0.0.1:1"]));
    assert_eq!(nobody.exit, 1);
    assert!(
        nobody.report["peer"]["problems"][0]
            .as_str()
            .unwrap()
            .contains("kvx target")
    );
}

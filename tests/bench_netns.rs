//! The two-node mode between two network namespaces: a target in one, a bench in the other, and a
//! virtual cable between them that the bytes cross.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvx::bench::row::BenchReport;

/// The name of the cable's end in both namespaces.
const DEVICE: &str = "kvxbench";

fn ip(arguments: &str) -> Result<String, String> {
    let output = Command::new("ip")
        .args(arguments.split(' '))
        .output()
        .map_err(|error| format!("ip: {error}"))?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        return Err(format!("ip {arguments}: {}", why.trim()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Two namespaces and the cable, removed when dropped.
struct Nodes {
    holder: String,
    reader: String,
    address: String,
}

impl Nodes {
    fn new() -> Result<Self, String> {
        let pid = std::process::id();
        let nodes = Self {
            holder: format!("kvx-holder-{pid}"),
            reader: format!("kvx-reader-{pid}"),
            address: "10.213.77.1".to_owned(),
        };
        let Self { holder, reader, .. } = &nodes;
        ip(&format!("netns add {holder}"))?;
        ip(&format!("netns add {reader}"))?;
        let make = format!("link add {DEVICE} netns {holder} type veth peer name {DEVICE}");
        ip(&format!("{make} netns {reader}"))?;
        for (node, address) in [(holder, nodes.address.as_str()), (reader, "10.213.77.2")] {
            ip(&format!("-n {node} addr add {address}/24 dev {DEVICE}"))?;
            ip(&format!("-n {node} link set {DEVICE} up"))?;
            ip(&format!("-n {node} link set lo up"))?;
        }
        // The kernel takes up to a second to see that both ends are plugged in.
        let until = Instant::now() + Duration::from_secs(20);
        for node in [holder, reader] {
            let file = format!("/sys/class/net/{DEVICE}/operstate");
            while ip(&format!("netns exec {node} cat {file}"))?.trim() != "up" {
                assert!(Instant::now() < until, "the cable is not up in {node}");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(nodes)
    }

    /// The tool on one of the nodes, with nothing but the cable to carry bytes.
    fn kvx(node: &str) -> Command {
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", node, env!("CARGO_BIN_EXE_kvx")])
            .env("UCX_TLS", "tcp")
            .env("UCX_NET_DEVICES", DEVICE)
            .stdout(Stdio::piped());
        command
    }

    fn received_bytes(&self) -> u64 {
        let file = format!("/sys/class/net/{DEVICE}/statistics/rx_bytes");
        let count = ip(&format!("netns exec {} cat {file}", self.reader)).unwrap();
        count.trim().parse().unwrap()
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        for node in [&self.holder, &self.reader] {
            // Its end of the cable goes with it.
            let _ = ip(&format!("netns delete {node}"));
        }
    }
}

struct Target(Child);

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_bench_reads_from_another_node() {
    let skip = |why: &str| {
        // Not `eprintln!`, which the test harness swallows.
        let _ = writeln!(
            std::io::stderr(),
            "skipped: a_bench_reads_from_another_node: {why}"
        );
    };
    if let Err(error) = kvx::runtime::resolve() {
        return skip(&error.to_string());
    }
    let nodes = match Nodes::new() {
        Ok(nodes) => nodes,
        Err(why) => return skip(&why),
    };
    let address = format!("{}:7400", nodes.address);
    // `ip netns exec` becomes the tool, so that killing the child ends the tool.
    let child = Nodes::kvx(&nodes.holder)
        .args(["target", "--bind", &address])
        .spawn()
        .unwrap();
    let mut target = Target(child);
    let mut lines = BufReader::new(target.0.stdout.take().unwrap()).lines();
    let listening = lines.find(|line| line.as_ref().unwrap().contains("listening at"));
    assert!(listening.is_some(), "no target");
    std::thread::spawn(move || lines.for_each(drop));

    let before = nodes.received_bytes();
    let output = Nodes::kvx(&nodes.reader)
        .args(["bench", "read", "--quick", "--rounds", "1", "--json"])
        .args(["--cases", "block-first"])
        .env("KVX_BENCH_PEER", &address)
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(stderr.contains("RDMA"), "{stderr}");
    let report: BenchReport = serde_json::from_slice(&output.stdout).unwrap();
    assert!(report.ok && report.rows.len() == 4, "{report:#?}");
    let mut least = 0;
    for row in &report.rows {
        assert!(row.verified && row.transport.contains("tcp"), "{row:?}");
        // The warm-up, one round and the check at least.
        least += 3 * row.bytes;
    }
    let crossed = nodes.received_bytes() - before;
    assert!(
        crossed > least,
        "{crossed} of {least} bytes crossed the cable"
    );
}

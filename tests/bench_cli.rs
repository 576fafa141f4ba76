//! `kvx bench` and `kvx target` as a person runs them: the rows, the exit statuses, and what a
//! target makes of whoever connects.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use kvx::bench::row::{BenchReport, Who};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(120);

fn kvx(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
    command
        .args(arguments)
        .env_remove("KVX_BENCH_PEER")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

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

fn report(output: &Output) -> BenchReport {
    let said = text(&output.stderr) + &text(&output.stdout);
    assert!(output.status.success(), "{said}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn children(pid: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split_whitespace()
        .filter_map(|pid| pid.parse().ok())
        .collect()
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + LIMIT;
    while !done() {
        assert!(Instant::now() < until, "{what} did not happen in time");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_small_read_bench_has_every_row_and_no_wrong_byte() {
    if skipped("a_small_read_bench_has_every_row_and_no_wrong_byte") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("results");
    let output = kvx(&["bench", "read", "--quick", "--max-bytes", "1MiB"])
        .args(["--rounds", "2", "--json", "--out"])
        .arg(&out)
        .output()
        .unwrap();
    let report = report(&output);
    assert_eq!((report.bench.as_str(), report.ok), ("read", true));
    assert!(report.absent.is_empty(), "{:?}", report.absent);
    assert!(report.machine.one_machine && report.machine.cores > 0);
    for shape in ["128x8KiB", "16x8x8KiB", "8x128KiB"] {
        for pattern in ["contiguous", "reversed", "interleaved", "random"] {
            let case = format!("{pattern}-{shape}");
            for who in [
                Who::KvXfer,
                Who::OneDescriptor,
                Who::ProcessVmReadv,
                Who::Memcpy,
            ] {
                let row = report
                    .rows
                    .iter()
                    .find(|row| row.case == case && row.who == who)
                    .unwrap_or_else(|| panic!("no row of {case} by {who:?}"));
                assert!(row.verified, "{row:?}");
                assert_eq!((row.bytes, row.rounds), (1 << 20, 2), "{row:?}");
                assert!(row.min_ms <= row.median_ms && row.median_ms <= row.max_ms);
                assert!(row.min_ms > 0.0 && row.gbps > 0.0 && row.cpu_s_per_gib > 0.0);
                let pieces = match who {
                    Who::OneDescriptor => 1..=1,
                    Who::KvXfer => 1..=128,
                    _ => 8..=128,
                };
                assert!(pieces.contains(&row.descriptors), "{row:?}");
                assert_ne!(row.transport, "unknown", "{row:?}");
            }
        }
    }
    let contiguous =
        |row: &&kvx::bench::row::Row| row.case == "contiguous-128x8KiB" && row.who == Who::KvXfer;
    let row = report.rows.iter().find(contiguous).unwrap();
    assert_eq!(row.descriptors, 1, "neighbours are merged");
    assert!(row.submit_us < row.median_ms * 1e3);
    let written = fs::read_to_string(out.join("read.json")).unwrap();
    assert_eq!(written, text(&output.stdout));
    let table = fs::read_to_string(out.join("read.txt")).unwrap();
    assert!(table.contains("contiguous-128x8KiB"), "{table}");
}

#[test]
fn the_engine_beside_the_same_descriptors_over_tcp() {
    if skipped("the_engine_beside_the_same_descriptors_over_tcp") {
        return;
    }
    let output = kvx(&["bench", "compare", "--quick", "--rounds", "1", "--json"])
        .args(["--cases", "8x1MiB-tcp", "--who", "kv-xfer,one-descriptor"])
        .output()
        .unwrap();
    let report = report(&output);
    let settings: Vec<_> = report
        .rows
        .iter()
        .map(|row| (row.who, row.setting.as_str()))
        .collect();
    assert_eq!(
        settings,
        [
            (Who::KvXfer, ""),
            (Who::KvXfer, "1 lane"),
            (Who::OneDescriptor, ""),
            (Who::OneDescriptor, "same descriptors")
        ]
    );
    for row in &report.rows {
        assert!(row.transport.contains("tcp") && row.verified, "{row:?}");
    }
    assert_eq!(report.rows[0].descriptors, report.rows[3].descriptors);
    assert!(
        report.rows[0]
            .more
            .contains_key("overhead_us_per_descriptor")
    );
}

#[test]
fn what_cannot_be_measured_is_a_usage_error() {
    if skipped("what_cannot_be_measured_is_a_usage_error") {
        return;
    }
    for (arguments, says) in [
        (vec!["bench", "read", "--cases", "nonsense"], "no case"),
        (vec!["bench", "read", "--memory", "gpu"], "cuda:N"),
        (vec!["bench", "read", "--who", "nobody"], "kv-xfer"),
        (vec!["bench", "read", "--max-bytes", "12 MB"], "MiB"),
        (vec!["target", "--memory", "cuda:x"], "cuda:N"),
    ] {
        let output = kvx(&arguments).output().unwrap();
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
        assert!(stderr.contains(says), "{arguments:?}: {stderr}");
    }
    let output = kvx(&["bench", "read", "--peer", "127.0.0.1:1"])
        .output()
        .unwrap();
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("is `kvx target` running"), "{stderr}");
}

/// A process that does not outlive its test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn an_interrupted_bench_leaves_no_process() {
    if skipped("an_interrupted_bench_leaves_no_process") {
        return;
    }
    let mut bench = Running(kvx(&["bench", "read", "--rounds", "1000"]).spawn().unwrap());
    let mut pids = Vec::new();
    wait_for("a bench of ten processes", || {
        pids = children(bench.0.id());
        pids.len() == 10
    });
    let pid = Pid::from_raw(i32::try_from(bench.0.id()).unwrap()).unwrap();
    kill_process(pid, Signal::INT).unwrap();
    assert_eq!(bench.0.wait().unwrap().code(), Some(130));
    wait_for("the end of all processes", || {
        pids.iter()
            .all(|pid| !Path::new(&format!("/proc/{pid}")).exists())
    });
}

/// A target, and where it listens.
struct Target {
    child: Child,
    address: String,
}

impl Target {
    fn start(arguments: &[&str]) -> Self {
        let mut child = kvx(&["target", "--bind", "127.0.0.1:0"])
            .args(arguments)
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut head = Vec::new();
        let address = loop {
            let line = lines.next().unwrap().unwrap();
            if let Some(address) = line.strip_prefix("listening at ") {
                break address.to_owned();
            }
            head.push(line);
        };
        for word in ["NIXL", "RDMA", "GPUs", "host"] {
            assert!(head.iter().any(|line| line.contains(word)), "{head:?}");
        }
        // Whatever else it prints is not to fill the pipe.
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, address }
    }

    fn connect(&self) -> (TcpStream, BufReader<TcpStream>) {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.set_write_timeout(Some(LIMIT)).unwrap();
        let reader = BufReader::new(stream.try_clone().unwrap());
        (stream, reader)
    }

    /// A short bench against it goes well.
    fn serves(&self) {
        let output = kvx(&["bench", "read", "--quick", "--rounds", "1", "--json"])
            .args(["--cases", "block-first"])
            .env("KVX_BENCH_PEER", &self.address)
            .output()
            .unwrap();
        let report = report(&output);
        assert!(report.ok && !report.machine.one_machine);
        let names: Vec<_> = report
            .rows
            .iter()
            .map(|row| (row.case.as_str(), row.who))
            .collect();
        let (one, four) = (
            "SmolLM2-135M-tp1-block-first-page16-1k",
            "SmolLM2-135M-tp1-block-first-page16-1k-x4",
        );
        assert_eq!(
            names,
            [
                (one, Who::KvXfer),
                (one, Who::OneDescriptor),
                (four, Who::KvXfer),
                (four, Who::OneDescriptor),
            ]
        );
        assert!(report.rows.iter().all(|row| row.verified));
    }

    fn holders(&self) -> Vec<u32> {
        // It starts them on its main thread.
        children(self.child.id())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn setup(blocks: u64) -> Value {
    json!({
        "op": "setup", "role": "holder", "seed": 1,
        "shape": {"regions": 1, "blocks": blocks, "block_bytes": 8192},
        "settings": {"bind": "8.8.8.8:1", "advertise": "elsewhere"},
    })
}

fn ask(stream: &mut TcpStream, reader: &mut impl BufRead, line: &str) -> Value {
    stream.write_all(format!("{line}\n").as_bytes()).unwrap();
    let mut answer = String::new();
    reader.read_line(&mut answer).unwrap();
    serde_json::from_str(&answer).unwrap_or_else(|_| panic!("{line}: {answer:?}"))
}

#[test]
fn a_target_serves_whatever_was_there_before() {
    if skipped("a_target_serves_whatever_was_there_before") {
        return;
    }
    let target = Target::start(&["--max-bytes", "128MiB"]);
    target.serves();

    // Nonsense is refused, line by line, and nothing is started for it.
    let (mut stream, mut reader) = target.connect();
    for line in [
        "garbage".to_owned(),
        "\u{0}\u{1}".to_owned(),
        "[]".to_owned(),
        json!({"op": "nothing"}).to_string(),
        json!({"op": "cpu"}).to_string(),
        json!({"op": "case", "name": "c", "remote": [1], "local": [1]}).to_string(),
        json!({"op": "run", "names": ["c"], "times": 1, "verify": 0}).to_string(),
        setup(1 << 40).to_string(),
        setup(u64::from(u32::MAX)).to_string(),
        setup(0).to_string(),
        setup(1).to_string().replace("holder", "reader"),
        setup(1).to_string().replace("8192", "8191"),
        setup(1).to_string().replace("8.8.8.8:1", "nowhere"),
        setup(1).to_string().replace("\"bind\"", "\"memory\""),
    ] {
        let answer = ask(&mut stream, &mut reader, &line);
        assert_eq!(answer["re"], "failed", "{line}: {answer}");
    }
    // It chooses by itself where its side channel is.
    let ready = ask(&mut stream, &mut reader, &setup(16).to_string());
    assert_eq!(ready["re"], "ready", "{ready}");
    assert_eq!(ready["card"]["host"], "127.0.0.1");
    let outside = json!({"op": "case", "name": "c", "remote": [16], "local": []});
    let answer = ask(&mut stream, &mut reader, &outside.to_string());
    assert_eq!(answer["re"], "failed", "{answer}");
    let case = json!({"op": "case", "name": "c", "remote": [3, 1], "local": []});
    let answer = ask(&mut stream, &mut reader, &case.to_string());
    assert!(
        answer["ticket"]["kv_transfer_params"].is_object(),
        "{answer}"
    );
    let holders = target.holders();
    assert_eq!(holders.len(), 1);

    // Gone in the middle of a line: its memory is given up.
    stream.write_all(b"{\"op\": \"case\", \"na").unwrap();
    drop((stream, reader));
    wait_for("the end of the holder", || target.holders().is_empty());
    target.serves();

    // A line without end.
    let (mut stream, mut reader) = target.connect();
    let chunk = vec![b'x'; 1 << 20];
    while stream.write_all(&chunk).is_ok() {}
    let mut rest = Vec::new();
    let _ = reader.read_to_end(&mut rest);
    target.serves();

    // Nonsense without end.
    let (mut stream, mut reader) = target.connect();
    while stream.write_all(b"{}\n").is_ok() {}
    let _ = reader.read_to_end(&mut rest);
    target.serves();

    // Its holder dies under it.
    let (mut stream, mut reader) = target.connect();
    let ready = ask(&mut stream, &mut reader, &setup(16).to_string());
    assert_eq!(ready["re"], "ready", "{ready}");
    let pid = i32::try_from(target.holders()[0]).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    let answer = ask(&mut stream, &mut reader, &case.to_string());
    assert_eq!(answer["re"], "failed", "{answer}");
    let ready = ask(&mut stream, &mut reader, &setup(16).to_string());
    assert_eq!(ready["re"], "ready", "{ready}");
    let bye = ask(&mut stream, &mut reader, &json!({"op": "quit"}).to_string());
    assert_eq!(bye["re"], "bye");
    target.serves();
}

#[test]
fn a_silent_visitor_is_not_waited_for() {
    if skipped("a_silent_visitor_is_not_waited_for") {
        return;
    }
    let target = Target::start(&["--idle", "6"]);
    let (silent, _reader) = target.connect();
    target.serves();
    // One that says something and then no more.
    let (mut stream, mut reader) = target.connect();
    let ready = ask(&mut stream, &mut reader, &setup(16).to_string());
    assert_eq!(ready["re"], "ready", "{ready}");
    target.serves();
    drop(silent);
}

//! `kvx router` as a process: what it prints, and how it ends.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};

use kvx::cli::Exit;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

fn router(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
    command
        .arg("router")
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn output(args: &[&str]) -> (Option<i32>, Output) {
    let output = router(args).output().unwrap();
    (output.status.code(), output)
}

/// Starts one, and says where it listens.
fn start(args: &[&str]) -> (Child, String) {
    let mut child = router(args).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap())
        .read_line(&mut line)
        .unwrap();
    let ready: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line:?}"));
    assert_eq!(ready["ready"], Value::Bool(true));
    (child, ready["http"].as_str().unwrap().to_owned())
}

/// Nobody listens there.
const NOBODY: [&str; 6] = [
    "--prefill",
    "127.0.0.1:1",
    "--decode",
    "127.0.0.1:1",
    "--port",
    "0",
];

#[test]
fn it_says_where_it_listens_and_ends_when_asked() {
    for (signal, code) in [(Signal::TERM, Exit::Ok), (Signal::INT, Exit::Interrupted)] {
        let (mut child, http) = start(&NOBODY);
        let mut stream = TcpStream::connect(&http).unwrap();
        stream.write_all(b"GET /health HTTP/1.0\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(
            answer.contains("503") && answer.contains("\"no_node\""),
            "{answer}"
        );
        let pid = Pid::from_raw(child.id().try_into().unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(code as i32));
    }
}

#[test]
fn the_ready_line_of_ipv6_has_brackets() {
    if TcpListener::bind("[::1]:0").is_err() {
        let _ = writeln!(std::io::stderr(), "skipped: no IPv6 on this machine");
        return;
    }
    let (mut child, http) = start(&[&NOBODY[..], &["--host", "::1"]].concat());
    assert!(http.starts_with("[::1]:"), "{http}");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn help_has_examples_and_errors_have_a_status() {
    let (code, help) = output(&["--help"]);
    let help = String::from_utf8(help.stdout).unwrap();
    assert_eq!(code, Some(0));
    for part in [
        "Examples:",
        "--no-bidirectional",
        "--ttl",
        "X-Conversation-ID",
    ] {
        assert!(help.contains(part), "{part} is not in\n{help}");
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    for (args, status, why) in [
        (vec!["--prefill", "a:1"], Exit::Usage, "--decode"),
        (
            vec!["--prefill", "https://a:1", "--decode", "b:1"],
            Exit::Usage,
            "http",
        ),
        (
            vec!["--prefill", "::1:80", "--decode", "b:1"],
            Exit::Usage,
            "brackets",
        ),
        ([&NOBODY[..], &["--ttl", "0"]].concat(), Exit::Usage, "ttl"),
        (
            [&NOBODY[..], &["--idle-timeout", "nan"]].concat(),
            Exit::Usage,
            "idle-timeout",
        ),
        (
            [&NOBODY[..], &["--api-keys-file", "/nonexistent"]].concat(),
            Exit::Usage,
            "API keys",
        ),
        (
            ["--port", &port]
                .iter()
                .copied()
                .chain(NOBODY[..4].iter().copied())
                .collect(),
            Exit::Environment,
            "listen",
        ),
    ] {
        let (code, output) = output(&args);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(code, Some(status as i32), "{args:?}: {stderr}");
        assert!(stderr.contains(why), "{args:?}: {stderr}");
        assert!(output.stdout.is_empty());
    }
}

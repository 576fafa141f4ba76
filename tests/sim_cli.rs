//! `kvx sim` as a person runs it.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use std::process::{Command, Output};

use serde_json::Value;

fn sim(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
    command.arg("sim").args(arguments).output().unwrap()
}

fn json(arguments: &[&str]) -> Value {
    let output = sim(arguments);
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_few_hundred_histories_are_reported() {
    let report = json(&["--seed", "5", "--count", "300", "--json"]);
    assert_eq!(report["histories"], 300);
    assert_eq!(report["violations"], Value::Array(Vec::new()));
    assert!(report["events"].as_u64().unwrap() > 30_000, "{report}");
    // The same seeds are the same histories, however they are spread over threads.
    let again = json(&["--seed", "5", "--count", "300", "--json"]);
    assert_eq!(report["hash"], again["hash"]);
    let others = json(&["--seed", "6", "--count", "300", "--json"]);
    assert_ne!(report["hash"], others["hash"]);
}

#[test]
fn a_history_is_told_event_by_event() {
    let arguments = ["--seed", "5", "--count", "1", "--steps", "40", "--trace"];
    let output = sim(&arguments);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains("starts as life 0") && text.contains("no more trouble"),
        "{text}"
    );
    assert!(text.contains("1 histories"), "{text}");
    assert_eq!(sim(&["--count", "2", "--trace"]).status.code(), Some(2));
}

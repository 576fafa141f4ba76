//! `--memory` of a node: its cache is in host memory, and a GPU that is asked for is refused before anything is started.
#![allow(missing_docs, clippy::unwrap_used)]

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use kv_xfer::memory::cuda::CudaDevice;

fn prefill(memory: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_serving"));
    // No model: whoever gets so far fails there.
    command
        .args(["prefill", "--port", "0", "--model", "/nowhere.gguf"])
        .args(memory)
        .env("KVX_LOG", "info");
    command
}

/// Its exit status and what it said, however long it takes, up to a limit.
fn ended(mut command: Command) -> (Option<i32>, String) {
    let mut child: Child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = child.stderr.take().unwrap();
    let (said, heard) = mpsc::channel();
    std::thread::spawn(move || {
        let mut text = String::new();
        let _ = stderr.read_to_string(&mut text);
        let _ = said.send(text);
    });
    let text = heard.recv_timeout(Duration::from_secs(30));
    if text.is_err() {
        let _ = child.kill();
    }
    (child.wait().unwrap().code(), text.unwrap())
}

#[test]
fn the_cache_is_in_host_memory_and_the_log_says_so() {
    for memory in [&[][..], &["--memory", "auto"]] {
        let (code, said) = ended(prefill(memory));
        assert_eq!(code, Some(3), "no model: {said}");
        assert!(said.contains("in host memory"), "{said}");
        assert!(said.contains("/nowhere.gguf"), "{said}");
    }
    let (code, said) = ended(prefill(&["--memory", "host"]));
    assert_eq!(code, Some(3), "no model: {said}");
    let (code, said) = ended(prefill(&["--memory", "gpu"]));
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("cuda:N"), "{said}");
}

#[test]
fn a_gpu_is_refused_before_anything_is_started() {
    let (code, said) = ended(prefill(&["--memory", "cuda:0"]));
    assert!(!said.contains("panicked"), "{said}");
    if CudaDevice::check(0).is_ok() {
        let _ = writeln!(std::io::stderr(), "a GPU is here");
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains("computes on the processor"), "{said}");
    } else {
        assert_eq!(code, Some(3), "{said}");
        assert!(said.contains("--memory cuda:0: "), "{said}");
        assert!(said.contains("host memory"), "{said}");
    }
}

//! A node as a process of its own.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Loading the model takes a second or so; a slow machine that does much else, far longer.
const START: Duration = Duration::from_secs(180);

/// How many blocks are in which state.
pub type Pool = BTreeMap<String, u64>;

/// A running node; killed when dropped.
pub struct NodeProcess {
    child: Child,
    pub url: String,
    pub ready: Value,
}

impl NodeProcess {
    /// Starts one on free ports and waits until it is ready.
    pub fn start(role: &str, args: &[&str]) -> Self {
        Self::start_with(role, args, &[])
    }

    /// The same, with environment variables.
    pub fn start_with(role: &str, args: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_serving"))
            .args([role, "--port", "0", "--side-channel-port", "0"])
            .args(args)
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the node starts");
        let stdout = child.stdout.take().unwrap();
        let (send, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        let line = lines.recv_timeout(START);
        let Ok(line) = line else {
            let _ = child.kill();
            panic!("{role} did not get ready: {:?}", child.wait());
        };
        let ready: Value = serde_json::from_str(&line).expect("a JSON line");
        assert_eq!(ready["ready"], true, "{line}");
        let url = format!("http://{}", ready["http"].as_str().unwrap());
        Self { child, url, ready }
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Stops it in its tracks: it keeps its connections and answers nothing.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// Asks it to end, and waits for it.
    pub fn terminate(&mut self, limit: Duration) -> ExitStatus {
        self.signal(Signal::TERM);
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < end, "it did not end within {limit:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Kills it.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for NodeProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

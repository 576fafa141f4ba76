//! The other participants of a comparison, each as a pair that reads a little through the protocol.
//! A test is skipped, and says so, where its participant cannot be had: without a network, for one.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use std::io::Write;
use std::time::Duration;

use kvx::bench::proto::{Answer, Request, Role, Shape};
use kvx::bench::provision::participant;
use kvx::bench::row::Who;
use kvx::proc::{Interrupt, Worker};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Map, Value, json};

const LIMIT: Duration = Duration::from_secs(60);
const SHAPE: Shape = Shape {
    regions: 2,
    blocks: 64,
    block_bytes: 4096,
};
const SEED: u64 = 0xFFFF_FFFF_FFFF_FFF0;

struct Peer(Worker);

impl Peer {
    fn start(role: &str, who: Who) -> Option<Self> {
        match participant(who) {
            Ok(command) => Some(Self(
                Worker::spawn(role, command, &Interrupt::default()).unwrap(),
            )),
            Err(error) => {
                let text = error.to_string();
                assert!(!text.contains("could not compile"), "{text}");
                // Not `eprintln!`, which the test harness swallows.
                let _ = writeln!(std::io::stderr(), "skipped: {who:?}: {text}");
                None
            }
        }
    }

    fn ask(&mut self, request: &Request) -> Answer {
        self.0.send(request).unwrap();
        self.0.recv(LIMIT).unwrap()
    }

    fn setup(&mut self, role: Role, settings: &Value, card: Option<Value>) -> Option<Value> {
        let answer = self.ask(&Request::Setup {
            role,
            shape: SHAPE,
            seed: SEED,
            settings: settings.as_object().cloned().unwrap(),
            card,
        });
        let Answer::Ready { card, about } = answer else {
            panic!("{answer:?}");
        };
        assert!(about.contains_key("library") && about.contains_key("version"));
        card
    }

    fn case(&mut self, remote: &[u32], local: &[u32], ticket: Option<Value>) -> Option<Value> {
        let answer = self.ask(&Request::Case {
            name: "random".to_owned(),
            remote: remote.to_vec(),
            local: local.to_vec(),
            ticket,
        });
        match answer {
            Answer::Case { ticket } => ticket,
            other => panic!("{other:?}"),
        }
    }

    fn run(&mut self, times: u32) -> Answer {
        self.ask(&Request::Run {
            names: vec!["random".to_owned()],
            times,
            verify: u32::MAX,
            pause_us: 100,
        })
    }

    fn fails(&mut self, request: &impl serde::Serialize) {
        self.0.send(request).unwrap();
        let answer: Answer = self.0.recv(LIMIT).unwrap();
        assert!(
            matches!(&answer, Answer::Failed { error } if !error.is_empty()),
            "{answer:?}"
        );
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.0.id()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }
}

/// Reads of `count` blocks, no two of which follow one another, are right.
fn reads(reader: &mut Peer, count: u64) {
    let Answer::Ran {
        samples,
        checked_bytes,
        wrong_bytes,
    } = reader.run(3)
    else {
        panic!("no answer to a run");
    };
    let bytes = count * u64::from(SHAPE.regions) * SHAPE.block_bytes;
    assert_eq!((checked_bytes, wrong_bytes), (bytes, 0));
    assert_eq!(samples.len(), 3);
    for sample in samples {
        assert_eq!(sample.bytes, bytes);
        assert_eq!(sample.descriptors, count * u64::from(SHAPE.regions));
        assert!(sample.submit_us > 0.0 && sample.total_us >= sample.submit_us);
    }
}

fn pair(who: Who, settings: &Value) {
    let (Some(mut holder), Some(mut reader)) =
        (Peer::start("holder", who), Peer::start("reader", who))
    else {
        return;
    };
    reader.fails(&json!({"op": "no-such-request"}));
    reader.fails(&json!([1, 2]));
    reader.fails(&Request::Run {
        names: Vec::new(),
        times: 1,
        verify: 0,
        pause_us: 0,
    });
    let card = holder.setup(Role::Holder, settings, None);
    reader.setup(Role::Reader, settings, card);

    let remote: Vec<u32> = (0..48).map(|i| (i * 37 + 11) % 64).collect();
    let local: Vec<u32> = (0..48).map(|i| (i * 23 + 5) % 64).collect();
    reader.fails(&json!({"op": "case", "name": "far", "remote": [64], "local": [0]}));
    reader.fails(&json!({"op": "case", "name": "odd", "remote": [1, 2], "local": [0]}));
    let ticket = holder.case(&remote, &local, None);
    reader.case(&remote, &local, ticket);
    holder.fails(&json!({"op": "run", "names": ["random"], "times": 1, "verify": 0}));
    reads(&mut reader, 48);

    // As the parent does with those that are not measured.
    for peer in [&holder, &reader] {
        peer.signal(Signal::STOP);
    }
    std::thread::sleep(Duration::from_millis(50));
    for peer in [&holder, &reader] {
        peer.signal(Signal::CONT);
    }
    reads(&mut reader, 48);

    // What is checked is what the case says.
    let other: Vec<u32> = remote.iter().rev().copied().collect();
    let ticket = holder.case(&other, &local, None);
    reader.case(&other, &local, ticket);
    reads(&mut reader, 48);

    let Answer::Cpu { us } = holder.ask(&Request::Cpu) else {
        panic!("no answer to a question for processor time");
    };
    assert!(us > 0);
    assert!(matches!(reader.ask(&Request::Quit), Answer::Bye));
    reader.0.finish(LIMIT).unwrap();
    // The end of its input is enough.
    holder.0.finish(LIMIT).unwrap();
}

#[test]
fn nixl_python() {
    for transport in ["auto", "tcp"] {
        for progress_thread in [true, false] {
            let settings = json!({"transport": transport, "progress_thread": progress_thread});
            pair(Who::NixlPython, &settings);
        }
    }
}

#[test]
fn nixl_sys() {
    for transport in ["auto", "tcp"] {
        for progress_thread in [true, false] {
            let settings = json!({"transport": transport, "progress_thread": progress_thread});
            pair(Who::NixlSys, &settings);
        }
    }
}

#[test]
fn mooncake() {
    pair(Who::Mooncake, &Value::Object(Map::new()));
}

#[test]
fn this_tool_is_none_of_the_others() {
    assert!(participant(Who::KvXfer).is_err());
    assert!(participant(Who::Memcpy).is_err());
}

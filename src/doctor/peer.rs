//! `kvx doctor --peer`: reads from and writes to a node where `kvx target` runs, and says what carried that.

use std::env;
use std::fmt;
use std::process::Command;
use std::time::Duration;

use kv_xfer::fabric::{Carrier, Operation, Protocol, Requirement, UcxLanes};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::bench::control::Control;
use crate::bench::error::BenchError;
use crate::bench::fabric::UcxLog;
use crate::bench::link::{Link, Ran};
use crate::bench::proto::{Request, Role, Shape};
use crate::bench::stats::Times;
use crate::proc::Interrupt;

/// Time to reach the target.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// 64 MiB, in blocks of 1 MiB.
const SHAPE: Shape = Shape {
    regions: 1,
    blocks: 64,
    block_bytes: 1 << 20,
};
/// Times that count.
const TIMES: u32 = 8;
const SEED: u64 = 7;
const CASE: &str = "doctor";

/// What was measured one way.
#[derive(Debug, Clone, Serialize)]
pub struct Way {
    /// GB/s, the median.
    pub gbps: f64,
    /// Bytes each time.
    pub bytes: u64,
    /// Bytes that were checked, and of those wrong.
    pub checked_bytes: u64,
    /// Wrong bytes.
    pub wrong_bytes: u64,
    /// The transports, as the connection's lanes say it; `unknown` where UCX's log goes elsewhere.
    pub transports: String,
    /// What kind they are.
    pub carrier: Option<Carrier>,
    /// The same, as UCX's report of its protocols says it: lengths, how, over what.
    pub protocol: Vec<String>,
    /// Whether the operation is emulated, so that the peer's processor takes part.
    pub emulated: Option<bool>,
    /// Whether the two agree; `None` when one of them says nothing.
    pub agree: Option<bool>,
}

/// What was measured.
#[derive(Debug, Clone, Serialize)]
pub struct PeerReport {
    /// The target.
    pub address: String,
    /// Whether both ways were measured, every byte was right, and what is required carried them.
    pub ok: bool,
    /// What went wrong.
    pub problems: Vec<String>,
    /// What the target has to carry bytes with, in its own words.
    pub target: Option<String>,
    /// One-sided reads, by an engine.
    pub read: Option<Way>,
    /// One-sided writes, by a bare agent.
    pub write: Option<Way>,
}

impl PeerReport {
    /// A peer that could not be measured.
    pub fn not_measured(address: &str, problem: String) -> Self {
        Self {
            address: address.to_owned(),
            ok: false,
            problems: vec![problem],
            target: None,
            read: None,
            write: None,
        }
    }

    /// Adds what is not as it is required.
    fn judge(&mut self, required: Requirement) {
        for (name, way) in [("read", &self.read), ("write", &self.write)] {
            let Some(way) = way else { continue };
            if way.wrong_bytes > 0 {
                let problem = format!("{name}: {} bytes are wrong", way.wrong_bytes);
                self.problems.push(problem);
            }
            if let Some(carrier) = way.carrier.filter(|carrier| !required.admits(*carrier)) {
                let problem = format!(
                    "{name}: {required} is required, found {carrier} ({})",
                    way.transports
                );
                self.problems.push(problem);
            }
        }
        self.ok = self.problems.is_empty() && self.read.is_some() && self.write.is_some();
    }
}

/// Measures reads, then writes.
pub fn measure(address: &str, required: Requirement, interrupt: &Interrupt) -> PeerReport {
    let mut target = None;
    let held = hold(address, interrupt, &mut target);
    let (mut holder, card) = match held {
        Ok(held) => held,
        Err(error) => return PeerReport::not_measured(address, error.to_string()),
    };
    let mut report = PeerReport {
        address: address.to_owned(),
        ok: false,
        problems: Vec::new(),
        target,
        read: None,
        write: None,
    };
    let mut measured = |operation| way(operation, &mut holder, &card, interrupt);
    match measured(Operation::Read) {
        Ok(way) => report.read = Some(way),
        Err(error) => report.problems.push(format!("read: {error}")),
    }
    match measured(Operation::Write) {
        Ok(way) => report.write = Some(way),
        Err(error) => report.problems.push(format!("write: {error}")),
    }
    holder.quit();
    // libfabric has no log that says it; it is held to one provider.
    for way in [&mut report.read, &mut report.write].into_iter().flatten() {
        if way.carrier.is_none() && required == Requirement::Efa {
            way.carrier = Some(Carrier::Efa);
            way.transports = "efa (libfabric may use nothing else)".to_owned();
        }
    }
    report.judge(required);
    report
}

/// Has the target make its memory.
fn hold(
    address: &str,
    interrupt: &Interrupt,
    target: &mut Option<String>,
) -> Result<(Link, Option<Value>), BenchError> {
    let control = Control::connect(address, CONNECT_LIMIT, interrupt)?;
    let mut holder = Link::target(control);
    holder.send(&Request::Setup {
        role: Role::Holder,
        shape: SHAPE,
        seed: SEED,
        // Beside the engine, a bare agent serves the same memory.
        settings: settings(json!({"who": "kv-xfer", "ceiling": true})),
        card: None,
    })?;
    let (card, about) = holder.ready()?;
    let fabric = about.get("fabric").and_then(Value::as_str);
    *target = fabric.map(str::to_owned);
    Ok((holder, card))
}

fn settings(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(settings) => settings,
        _ => Map::new(),
    }
}

/// Measures one operation, in a process of its own.
fn way(
    operation: Operation,
    holder: &mut Link,
    card: &Option<Value>,
    interrupt: &Interrupt,
) -> Result<Way, BenchError> {
    let log = UcxLog::new();
    let kvx = env::current_exe().map_err(|source| BenchError::File {
        path: "kvx".into(),
        source,
    })?;
    let mut command = Command::new(kvx);
    command
        .arg("bench-worker")
        .envs(log.variables())
        .env("UCX_PROTO_INFO", "y");
    let mut link = Link::child("reader".to_owned(), command, interrupt)?;
    let ran = transfer(operation, holder, &mut link, card);
    link.quit();
    let ran = ran?;
    Ok(describe(
        operation,
        &ran,
        log.text().as_deref().unwrap_or_default(),
    ))
}

fn transfer(
    operation: Operation,
    holder: &mut Link,
    link: &mut Link,
    card: &Option<Value>,
) -> Result<Ran, BenchError> {
    let own = match operation {
        Operation::Read => json!({"who": "kv-xfer"}),
        Operation::Write => json!({"who": "one-descriptor", "write": true}),
    };
    link.send(&Request::Setup {
        role: Role::Reader,
        shape: SHAPE,
        seed: SEED,
        settings: settings(own),
        card: card.clone(),
    })?;
    link.ready()?;
    let blocks: Vec<u32> = (0..SHAPE.blocks).collect();
    let lists = || (blocks.clone(), blocks.clone());
    let ticket = match operation {
        Operation::Read => holder.case(CASE.to_owned(), lists(), None)?,
        Operation::Write => None,
    };
    link.case(CASE.to_owned(), lists(), ticket)?;
    let names = [CASE.to_owned()];
    // The first one makes the connection.
    link.run(&names, 1, 0)?;
    link.run(&names, TIMES, SHAPE.blocks)
}

fn describe(operation: Operation, ran: &Ran, log: &str) -> Way {
    let times: Times = ran
        .samples
        .iter()
        .map(|sample| Duration::from_secs_f64(sample.total_us.max(0.0) / 1e6))
        .collect();
    let bytes = ran.samples.first().map_or(0, |sample| sample.bytes);
    let lanes = UcxLanes::parse_peers(log);
    let protocols: Vec<Protocol> = Protocol::parse(log)
        .into_iter()
        .filter(|protocol| protocol.operation == operation)
        .collect();
    // The longest pieces are those that count.
    let told = protocols.last();
    let carrier = lanes.kind().or(told.and_then(Protocol::carrier));
    let agree = lanes.kind().zip(told.and_then(Protocol::carrier));
    Way {
        gbps: bytes as f64 / (times.median() * 1e-6).max(1e-9) / 1e9,
        bytes,
        checked_bytes: ran.checked_bytes,
        wrong_bytes: ran.wrong_bytes,
        transports: lanes.carrier(),
        carrier,
        protocol: protocols
            .iter()
            .map(|p| format!("{} {} {}", p.range, p.how, p.over))
            .collect(),
        emulated: told.map(Protocol::is_emulated),
        agree: agree.map(|(lanes, protocol)| lanes == protocol),
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} GB/s over {}", self.gbps, self.transports)?;
        if !self.protocol.is_empty() {
            write!(f, "; UCX's protocol: {}", self.protocol.join(", "))?;
        }
        match self.agree {
            Some(true) => f.write_str(", which agrees")?,
            Some(false) => f.write_str(", which DISAGREES")?,
            None => {}
        }
        if self.emulated == Some(true) {
            f.write_str(" (emulated: the peer's processor takes part)")?;
        }
        let right = self.checked_bytes.saturating_sub(self.wrong_bytes);
        write!(f, "; {right} of {} bytes right", self.checked_bytes)
    }
}

impl fmt::Display for PeerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "peer         {}", self.address)?;
        for (name, way) in [("READ", &self.read), ("WRITE", &self.write)] {
            if let Some(way) = way {
                writeln!(f, "{name:<12} {way}")?;
            }
        }
        for problem in &self.problems {
            writeln!(f, "FAIL         {problem}")?;
        }
        Ok(())
    }
}

//! `kvx bench` and `kvx target`: what a read costs, measured side by side with what others make of
//! the same read.

pub mod args;
pub mod bare;
pub mod cases;
pub mod compare;
pub mod contender;
pub mod control;
pub mod error;
pub mod fabric;
pub mod fixture;
pub mod foreign;
pub mod freeze;
pub mod here;
pub mod holders;
pub mod latency;
pub mod lease_trial;
pub mod link;
pub mod load;
mod losses;
pub mod machine;
pub mod models;
pub mod pair;
pub mod pattern;
pub mod plot;
pub mod probe;
pub mod proto;
pub mod provision;
pub mod read;
pub mod report;
pub mod row;
pub mod rows;
pub mod run;
pub mod scale;
pub mod stats;
pub mod table;
pub mod target;
pub mod team;
pub mod worker;

use std::env;
use std::fs;
use std::path::Path;

use nixl_sys::{Environment, EnvironmentOutcome};

use self::args::{BenchArgs, BenchKind, CommonArgs, OutputArgs, ReadArgs, TargetArgs};
use self::contender::Group;
use self::error::BenchError;
use self::fabric::FabricReport;
use self::row::BenchReport;
use self::run::Thoroughness;
use self::target::TargetError;
use self::team::Surroundings;
use self::worker::WorkerError;
use crate::cli::Exit;
use crate::proc::{Interrupt, Parent};
use crate::require;

/// The variable that names a target, `host:port`.
pub const PEER_VARIABLE: &str = "KVX_BENCH_PEER";
/// Blocks of each case that are checked.
const VERIFY: u32 = 256;
/// Most rounds of a quick bench.
const QUICK_ROUNDS: u32 = 3;

/// `kvx bench`.
#[must_use]
pub fn run(args: &BenchArgs) -> Exit {
    let environment = match &args.bench {
        BenchKind::Holders => return holders::serve(),
        // These read in this process: NIXL and UCX look at the variables, and there are no threads yet.
        BenchKind::Latency(_) | BenchKind::Scale(_) => require::opening(&args.fabric),
        BenchKind::Read(_) | BenchKind::Compare(_) => Environment::empty(),
    };
    if let Err(unmet) = require::announce(environment, &args.fabric) {
        eprintln!("{unmet}");
        return Exit::CheckFailed;
    }
    if let Err(error) = require::ready() {
        eprintln!("{error}");
        return Exit::Environment;
    }
    let interrupt = match Interrupt::install() {
        Ok(interrupt) => interrupt,
        Err(error) => {
            eprintln!("Ctrl-C cannot be handled: {error}");
            return Exit::Environment;
        }
    };
    let (output, done) = match &args.bench {
        BenchKind::Read(read) => (&read.common.output, run_read(read, &interrupt)),
        BenchKind::Compare(compare) => {
            let common = &compare.common;
            let groups = compare::groups(common.quick, common.max_bytes, common.seed);
            let done = measure("compare", groups, common, None, &interrupt);
            (&common.output, done)
        }
        BenchKind::Latency(latency) => {
            let report = latency::measure(&latency.size(), &interrupt);
            (
                &latency.output,
                report.map(Measured::of).map_err(Into::into),
            )
        }
        BenchKind::Scale(scale) => {
            let report = scale::measure(&scale.size(), &interrupt);
            (&scale.output, report.map(Measured::of).map_err(Into::into))
        }
        BenchKind::Holders => return Exit::Usage,
    };
    let done = done.and_then(|measured| publish(&measured, output).map(|()| measured));
    match done {
        Ok(measured) if measured.report.ok => Exit::Ok,
        Ok(_) => Exit::CheckFailed,
        Err(error) if error.is_interrupt() => {
            eprintln!("interrupted");
            Exit::Interrupted
        }
        Err(error) => {
            eprintln!("{error}");
            match error {
                BenchError::Nothing | BenchError::Worker(WorkerError::Setting(_)) => Exit::Usage,
                BenchError::File { .. }
                | BenchError::Memory(_)
                | BenchError::Here(fixture::BenchError::Nixl(_)) => Exit::Environment,
                _ => Exit::CheckFailed,
            }
        }
    }
}

fn run_read(args: &ReadArgs, interrupt: &Interrupt) -> Result<Measured, BenchError> {
    let memory = args.memory.resolve()?;
    let common = &args.common;
    let given = args.peer.clone();
    let peer = given.or_else(|| env::var(PEER_VARIABLE).ok().filter(|peer| !peer.is_empty()));
    let (quick, bytes, seed) = (common.quick, common.max_bytes, common.seed);
    let mut groups = match (&peer, args.full) {
        (Some(_), _) => models::groups(quick, bytes, seed)?,
        (None, true) => read::groups(read::Extent::Full, bytes, seed),
        (None, false) if quick => read::groups(read::Extent::Quick, bytes, seed),
        (None, false) => read::groups(read::Extent::Sweep, bytes, seed),
    };
    for group in &mut groups {
        group
            .settings
            .insert("memory".to_owned(), memory.to_string().into());
    }
    measure("read", groups, common, peer, interrupt)
}

/// What a bench found, and what to say before it.
struct Measured {
    /// The fabric of both nodes, where there are two.
    head: String,
    report: BenchReport,
}

impl Measured {
    fn of(report: BenchReport) -> Self {
        let head = String::new();
        Self { head, report }
    }

    /// For people.
    fn text(&self) -> String {
        let Self { head, report } = self;
        match report.bench.as_str() {
            "read" | "compare" => format!("{head}{}", table::to_text(report)),
            _ => format!("{head}{}", report::to_markdown(report)),
        }
    }
}

/// Runs what the arguments leave of some groups.
fn measure(
    bench: &str,
    groups: Vec<Group>,
    common: &CommonArgs,
    peer: Option<String>,
    interrupt: &Interrupt,
) -> Result<Measured, BenchError> {
    let kvx = env::current_exe().map_err(|source| BenchError::File {
        path: "kvx".into(),
        source,
    })?;
    let groups = chosen(groups, common);
    let machine = machine::look(peer.is_none());
    let here = match &peer {
        Some(_) => FabricReport::look().ok(),
        None => None,
    };
    let from = peer.clone().unwrap_or_default();
    let around = Surroundings {
        kvx,
        interrupt: interrupt.clone(),
        peer,
        seed: common.seed,
    };
    let rounds = match common.quick {
        true => common.rounds.min(QUICK_ROUNDS),
        false => common.rounds,
    };
    let how = Thoroughness {
        rounds,
        verify: VERIFY,
    };
    let outcome = run::run(&groups, &around, how)?;
    let head = match (here, &outcome.fabric) {
        (Some(here), Some(there)) => format!("here:\n{here}\n\n{from}:\n{there}\n\n"),
        _ => String::new(),
    };
    let report = BenchReport {
        bench: bench.to_owned(),
        machine,
        ok: outcome.is_ok(),
        rows: outcome.rows,
        absent: outcome.absent,
    };
    Ok(Measured { head, report })
}

/// What `--cases` and `--who` leave.
fn chosen(groups: Vec<Group>, common: &CommonArgs) -> Vec<Group> {
    let mut left = Vec::new();
    for mut group in groups {
        if !common.cases.is_empty() {
            let wanted = |name: &str| common.cases.iter().any(|text| name.contains(text));
            group.cases.retain(|case| wanted(&case.name));
        }
        if !common.who.is_empty() {
            group
                .contenders
                .retain(|contender| common.who.contains(&contender.who));
        }
        if !group.cases.is_empty() && !group.contenders.is_empty() {
            left.push(group);
        }
    }
    left
}

/// Prints and writes what was asked for.
fn publish(measured: &Measured, output: &OutputArgs) -> Result<(), BenchError> {
    let Measured { head, report } = measured;
    let json = serde_json::to_string_pretty(report).unwrap_or_default() + "\n";
    match &output.json {
        Some(path) if path.as_os_str() == "-" => {
            eprint!("{head}");
            print!("{json}");
        }
        Some(path) => {
            write(path, &json)?;
            print!("{}", measured.text());
        }
        None => print!("{}", measured.text()),
    }
    if let Some(folder) = &output.out {
        report::write_report(folder, report)?;
        write(&folder.join(format!("{}.json", report.bench)), &json)?;
        write(
            &folder.join(format!("{}.txt", report.bench)),
            &measured.text(),
        )?;
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<(), BenchError> {
    fs::write(path, text).map_err(|source| BenchError::File {
        path: path.to_path_buf(),
        source,
    })
}

/// `kvx target`.
#[must_use]
pub fn run_target(args: &TargetArgs) -> Exit {
    if let Err(unmet) = require::announce(Environment::empty(), &args.fabric) {
        eprintln!("{unmet}");
        return Exit::CheckFailed;
    }
    let interrupt = match Interrupt::install() {
        Ok(interrupt) => interrupt,
        Err(error) => {
            eprintln!("Ctrl-C cannot be handled: {error}");
            return Exit::Environment;
        }
    };
    match target::serve(args, &interrupt) {
        Ok(()) => Exit::Ok,
        Err(TargetError::Interrupted) => Exit::Interrupted,
        Err(error) => {
            eprintln!("{error}");
            Exit::Environment
        }
    }
}

/// `kvx bench-worker`.
#[must_use]
pub fn run_worker() -> Exit {
    let report = require::environment().apply_single_threaded();
    if report.outcome != EnvironmentOutcome::Applied {
        tracing::warn!("{report}");
    }
    let served = Parent::attach()
        .map_err(WorkerError::from)
        .and_then(|mut parent| worker::serve(&mut parent));
    match served {
        Ok(()) => Exit::Ok,
        Err(error) => {
            tracing::error!("{error}");
            Exit::CheckFailed
        }
    }
}

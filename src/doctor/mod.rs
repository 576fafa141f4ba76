//! `kvx doctor`: what this machine has to carry bytes with, whether it works, and what would help.

mod look;
mod peer;
mod probe;
mod report;
mod software;

use std::path::{Path, PathBuf};

use clap::Args;
use kv_xfer::fabric::{Backend, Requirement, Verdict};

pub use self::probe::{Probe, run_probe};
pub use self::report::DoctorReport;

use crate::cli::Exit;
use crate::proc::Interrupt;
use crate::require::{self, FabricArgs};
use nixl_sys::Environment;

/// Help of `kvx doctor`.
pub const DOCTOR_HELP: &str = "\
Verdicts: efa, rdma and nvlink are fast; shm and tcp-only have nothing fast between nodes; broken
means that nothing works, or that there are devices which are fast and cannot be used.

Exit status:
  0    what --require names is there; without it, the verdict is efa, rdma or nvlink
  1    it is not; without --require, the verdict is shm or tcp-only; or --peer could not be measured
  3    the verdict is broken, and nothing that is required is there

Examples:
  kvx doctor                          the verdict, and every check with what would help
  kvx doctor --json | jq .verdict
  kvx doctor --require efa            for a start-up script
  kvx doctor --peer node-b:7400       also reads from and writes to a node where `kvx target` runs

Variables: KVX_LIBFABRIC names the libfabric to ask, by default libfabric.so.1.";

/// Arguments of `kvx doctor`.
#[derive(Debug, Clone, Args)]
pub struct DoctorArgs {
    /// Print one JSON object to stdout, and nothing else
    #[arg(long)]
    pub json: bool,

    /// What must be there: efa, rdma, nvlink, shm, tcp, any
    #[arg(long, value_name = "CARRIER")]
    pub require: Option<Requirement>,

    /// NIXL's backend for --peer: ucx or libfabric
    #[arg(long, value_name = "NAME", requires = "peer")]
    pub backend: Option<Backend>,

    /// Measure reads from and writes to `kvx target` at this address
    #[arg(long, value_name = "HOST:PORT")]
    pub peer: Option<String>,

    /// Look at a recorded machine: a folder with its sys, proc and dev, and what its libraries said in kvx-probe.json
    #[arg(long, value_name = "DIR", hide = true, conflicts_with = "peer")]
    pub root: Option<PathBuf>,
}

/// `kvx doctor`.
#[must_use]
pub fn run(args: &DoctorArgs) -> Exit {
    // What is required of the peer's bytes, too.
    let required = args.require.unwrap_or_default();
    let fabric = FabricArgs {
        require: required,
        backend: args.backend.clone(),
    };
    let announced = match &args.peer {
        Some(_) => require::announce(Environment::empty(), &fabric),
        None => Ok(()),
    };
    let interrupt = match Interrupt::install() {
        Ok(interrupt) => interrupt,
        Err(error) => {
            eprintln!("Ctrl-C cannot be handled: {error}");
            return Exit::Environment;
        }
    };
    let root = args.root.as_deref().unwrap_or(Path::new("/"));
    let (mut report, findings) = look::look(root, &interrupt);
    if let Some(required) = args.require {
        report.required = Some(required);
        report.unmet = findings
            .check(required)
            .err()
            .map(|unmet| unmet.to_string());
    }
    if let Some(address) = &args.peer {
        let measured = match announced {
            Ok(()) => peer::measure(address, required, &interrupt),
            Err(unmet) => peer::PeerReport::not_measured(address, unmet.to_string()),
        };
        report.peer = Some(measured);
    }
    if interrupt.is_raised() {
        eprintln!("interrupted");
        return Exit::Interrupted;
    }
    if args.json {
        match serde_json::to_string_pretty(&report) {
            Ok(json) => println!("{json}"),
            Err(error) => {
                eprintln!("the report cannot be written: {error}");
                return Exit::CheckFailed;
            }
        }
    } else {
        print!("{report}");
    }
    exit(&report)
}

/// The exit status, as [`DOCTOR_HELP`] says it.
fn exit(report: &DoctorReport) -> Exit {
    if report.peer.as_ref().is_some_and(|peer| !peer.ok) {
        return Exit::CheckFailed;
    }
    match (report.required, &report.unmet, report.verdict) {
        (Some(_), None, _) => Exit::Ok,
        (_, _, Verdict::Broken) => Exit::Environment,
        (None, _, Verdict::Efa | Verdict::Rdma | Verdict::Nvlink) => Exit::Ok,
        _ => Exit::CheckFailed,
    }
}

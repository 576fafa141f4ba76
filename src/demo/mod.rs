//! The demo: a decode and a prefill process, real reads between them, every byte checked.

pub mod allocator;
pub mod baseline;
pub mod content;
mod decode;
pub mod history;
pub mod messages;
pub mod play;
mod prefill;
pub mod report;
pub mod scenario;
pub mod side;
pub mod trace;

use nixl_sys::{Environment, EnvironmentOutcome};

use self::play::PlayError;
use self::side::SideError;
use crate::cli::{DemoArgs, Exit};
use crate::proc::{Interrupt, Parent, ProcError};
use crate::require;

/// `kvx demo`.
#[must_use]
pub fn run(args: &DemoArgs) -> Exit {
    if let Err(unmet) = require::announce(Environment::empty(), &args.fabric) {
        eprintln!("{unmet}");
        return Exit::CheckFailed;
    }
    if let Err(error) = require::ready() {
        eprintln!("{error}");
        return Exit::Environment;
    }
    let played = match Interrupt::install() {
        Ok(interrupt) => play::play(args, &interrupt),
        Err(error) => {
            eprintln!("Ctrl-C cannot be handled: {error}");
            return Exit::Environment;
        }
    };
    let report = match played {
        Ok(report) => report,
        Err(PlayError::Proc(ProcError::Interrupted)) => {
            eprintln!("interrupted");
            return Exit::Interrupted;
        }
        Err(error @ (PlayError::Start { .. } | PlayError::Memory(_))) => {
            eprintln!("{error}");
            return Exit::Environment;
        }
        Err(error @ (PlayError::Open { .. } | PlayError::Trace { .. })) => {
            eprintln!("{error}");
            return Exit::Usage;
        }
        Err(error) => {
            eprintln!("{error}");
            return Exit::CheckFailed;
        }
    };
    if args.json {
        match serde_json::to_string_pretty(&report) {
            Ok(json) => println!("{json}"),
            Err(error) => {
                eprintln!("the report cannot be written: {error}");
                return Exit::CheckFailed;
            }
        }
    } else {
        print!("{}", report.to_text());
    }
    if report.ok {
        Exit::Ok
    } else {
        Exit::CheckFailed
    }
}

/// The decode process.
#[must_use]
pub fn run_decode() -> Exit {
    child(decode::serve)
}

/// The prefill process.
#[must_use]
pub fn run_prefill() -> Exit {
    child(prefill::serve)
}

/// Prepares the environment that NIXL and UCX read, before there are threads, then serves.
fn child(serve: fn(&mut Parent) -> Result<(), SideError>) -> Exit {
    let report = require::environment().apply_single_threaded();
    if report.outcome != EnvironmentOutcome::Applied {
        tracing::warn!("{report}");
    }
    tracing::debug!("{report}");
    let served = Parent::attach()
        .map_err(SideError::from)
        .and_then(|mut parent| serve(&mut parent));
    match served {
        Ok(()) => Exit::Ok,
        Err(SideError::Nixl(error)) => {
            tracing::error!("{error}");
            Exit::Environment
        }
        Err(error) => {
            tracing::error!("{error}");
            Exit::CheckFailed
        }
    }
}

//! The demo: a decode and a prefill process, real reads between them, every byte checked.

pub mod allocator;
pub mod baseline;
pub mod content;
pub mod history;
pub mod messages;
pub mod proc;
pub mod report;
pub mod scenario;
pub mod trace;

use crate::cli::{DemoArgs, Exit};
use crate::runtime;

/// `kvx demo`.
#[must_use]
pub fn run(_args: &DemoArgs) -> Exit {
    if let Err(error) = runtime::resolve() {
        eprintln!("{error}");
        return Exit::Environment;
    }
    not_here_yet()
}

/// The decode process.
#[must_use]
pub fn run_decode() -> Exit {
    not_here_yet()
}

/// The prefill process.
#[must_use]
pub fn run_prefill() -> Exit {
    not_here_yet()
}

fn not_here_yet() -> Exit {
    eprintln!("the demo cannot run yet: this build has no engine");
    Exit::CheckFailed
}

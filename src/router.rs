//! Runs the router until it is asked to end.

use kvx_router::{Ended, RouterArgs, RunError, StartError};

use crate::cli::Exit;

/// Runs it; errors go to stderr.
#[must_use]
pub fn run(args: &RouterArgs) -> Exit {
    match kvx_router::run(args) {
        Ok(Ended::Interrupted) => Exit::Interrupted,
        Ok(_) => Exit::Ok,
        Err(error) => {
            eprintln!("{error}");
            match error {
                RunError::Start(StartError::Config(_)) => Exit::Usage,
                _ => Exit::Environment,
            }
        }
    }
}

//! `--require`: what must carry the bytes, for the demo, the benches and the target alike.
//!
//! It is checked before any process is started, and told to all of them by a variable; their engines refuse to start, and
//! to read from a peer, where it is not so.

use std::sync::Arc;

use kv_xfer::fabric::{LibfabricSettings, Requirement, Surroundings, UcxSettings, Unmet};
use kv_xfer::transport::Transport;
use kv_xfer::transport::nixl::{BackendConfig, NixlTransport};
use nixl_sys::{Environment, EnvironmentOutcome};

use crate::runtime::{self, OpenError};

/// Tells child processes what is required.
pub const VARIABLE: &str = "KVX_REQUIRE";

/// What this process has been told to require.
#[must_use]
pub fn required() -> Requirement {
    let told = std::env::var(VARIABLE).ok();
    told.and_then(|name| name.parse().ok()).unwrap_or_default()
}

/// The backend that can do it.
fn backend(requirement: Requirement) -> BackendConfig {
    match requirement {
        // The UCX that comes with NIXL knows EFA too, but crashes at exit where it is used.
        Requirement::Efa => LibfabricSettings::default().backend(),
        _ => UcxSettings::default().backend(),
    }
}

/// The variables that it needs, on top of others.
fn with(mut environment: Environment, requirement: Requirement) -> Environment {
    if requirement == Requirement::Any {
        return environment;
    }
    environment = environment
        .with(VARIABLE, requirement.name(), "--require")
        .with(
            "UCX_WARN_UNUSED_ENV_VARS",
            "n",
            "what is set for transports that may not be used is no mistake",
        );
    if let (Requirement::Efa, Ok(settings)) = (
        requirement,
        LibfabricSettings::default().require(requirement),
    ) {
        for variable in settings.environment().variables() {
            environment = environment.with(&variable.name, &variable.value, &variable.reason);
        }
    }
    environment
}

/// Checks it on this machine, and has this process and its children keep to it. `environment` is what this process is to
/// have besides. To be called first thing, before there are threads.
///
/// # Errors
/// [`Unmet`] when it cannot be had.
pub fn announce(environment: Environment, requirement: Requirement) -> Result<(), Unmet> {
    let report = with(environment, requirement).apply_single_threaded();
    tracing::debug!("{report}");
    if requirement == Requirement::Any {
        return Ok(());
    }
    let told = report.outcome == EnvironmentOutcome::Applied && required() == requirement;
    if !told {
        return Err(Unmet {
            wanted: requirement,
            found: format!(
                "{VARIABLE}={}, or an environment that cannot be set: {report}",
                required()
            ),
            fix: format!("unset {VARIABLE}"),
        });
    }
    Surroundings::here(&[]).check(requirement, &backend(requirement).name)
}

/// Loads NIXL with a backend that is held to what is required.
///
/// # Errors
/// [`OpenError`].
pub fn open() -> Result<Arc<NixlTransport>, OpenError> {
    let requirement = required();
    let transport = runtime::open(backend(requirement))?;
    transport.require(requirement)?;
    Ok(transport)
}

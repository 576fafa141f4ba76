//! `--require` and `--backend`: what must carry the bytes and what NIXL is to use for it, for the demo, the benches and the
//! target alike.
//!
//! It is checked before any process is started, and told to all of them by a variable; their engines refuse to start, and
//! to read from a peer, where it is not so.

use std::sync::Arc;

use clap::Args;
use kv_xfer::fabric::{Backend, LIBFABRIC, Requirement, Surroundings, Unmet};
use kv_xfer::transport::Transport;
use kv_xfer::transport::nixl::NixlTransport;
use nixl_sys::{Environment, EnvironmentOutcome};

use crate::libfabric;
use crate::runtime::{self, OpenError};

/// Tells child processes what is required.
pub const VARIABLE: &str = "KVX_REQUIRE";
/// Tells child processes which backend to use.
pub const BACKEND_VARIABLE: &str = "KVX_BACKEND";

/// What carries the bytes.
#[derive(Debug, Clone, Default, Args)]
pub struct FabricArgs {
    /// What must carry the bytes of this tool's own processes: efa, rdma, nvlink, shm, tcp, any.
    /// If it is not there, nothing is started, and the exit status is 1
    #[arg(long, value_name = "CARRIER", default_value_t, global = true)]
    pub require: Requirement,

    /// NIXL's backend: ucx, or libfabric, which is for EFA and elsewhere goes over TCP
    /// [default: libfabric with --require efa, else ucx]
    #[arg(long, value_name = "NAME", global = true)]
    pub backend: Option<Backend>,
}

/// What this process has been told to require.
#[must_use]
pub fn required() -> Requirement {
    let told = std::env::var(VARIABLE).ok();
    told.and_then(|name| name.parse().ok()).unwrap_or_default()
}

/// What this process has been told to use.
fn told_backend() -> Option<Backend> {
    std::env::var(BACKEND_VARIABLE).ok()?.parse().ok()
}

/// The backend that was chosen, else the one that can do it.
fn backend(chosen: Option<Backend>, requirement: Requirement) -> Backend {
    chosen.unwrap_or_else(|| match requirement {
        // The UCX that comes with NIXL knows EFA too, but crashes at exit where it is used.
        Requirement::Efa => Backend::libfabric(),
        _ => Backend::ucx(),
    })
}

/// The variables that it needs, on top of others.
fn with(mut environment: Environment, args: &FabricArgs) -> Environment {
    if let Some(chosen) = &args.backend {
        environment = environment.with(BACKEND_VARIABLE, chosen.name(), "--backend");
    }
    if args.require == Requirement::Any {
        return environment;
    }
    environment = environment
        .with(VARIABLE, args.require.name(), "--require")
        .with(
            "UCX_WARN_UNUSED_ENV_VARS",
            "n",
            "what is set for transports that may not be used is no mistake",
        );
    // Where it cannot be held to it, that is said below.
    if let Ok(held @ Backend::Libfabric(_)) =
        backend(args.backend.clone(), args.require).require(args.require)
    {
        for variable in held.environment().variables() {
            environment = environment.with(&variable.name, &variable.value, &variable.reason);
        }
    }
    environment
}

/// UCX may use nothing else. By a variable: NIXL's parameter takes one transport, and there may be several.
fn restricted(mut environment: Environment, args: &FabricArgs) -> Environment {
    let backend = backend(args.backend.clone(), args.require);
    if matches!(backend, Backend::Ucx(_))
        && let Ok(Some(transports)) = Surroundings::here(&[]).transports(args.require)
    {
        environment = environment.with("UCX_TLS", &transports.join(","), "--require");
    }
    environment
}

/// The variables of a process that opens NIXL itself, for [`announce`].
pub fn opening(args: &FabricArgs) -> Environment {
    restricted(Environment::recommended(), args)
}

/// The variables of a child process that opens NIXL, which has been told what is required.
pub fn environment() -> Environment {
    opening(&FabricArgs {
        require: required(),
        backend: told_backend(),
    })
}

/// Checks it on this machine, and has this process and its children keep to it. `environment` is what this process is to
/// have besides. To be called first thing, before there are threads.
///
/// # Errors
/// [`Unmet`] when it cannot be had.
pub fn announce(environment: Environment, args: &FabricArgs) -> Result<(), Unmet> {
    let report = with(environment, args).apply_single_threaded();
    tracing::debug!("{report}");
    let name = |backend: &Backend| backend.name();
    let chosen = args.backend.as_ref().map(name);
    let told = report.outcome == EnvironmentOutcome::Applied
        && required() == args.require
        && (chosen.is_none() || told_backend().as_ref().map(name) == chosen);
    if !told && (args.require != Requirement::Any || chosen.is_some()) {
        return Err(Unmet {
            wanted: args.require,
            found: format!("an environment that says otherwise or cannot be set: {report}"),
            fix: format!("unset {VARIABLE} and {BACKEND_VARIABLE}"),
        });
    }
    if args.require == Requirement::Any {
        return Ok(());
    }
    let backend = backend(told_backend(), args.require);
    Surroundings::here(&[]).check(args.require, backend.name())
}

/// Whether there is a NIXL that can be used so, without loading it: what the processes that are started would say one by
/// one.
///
/// # Errors
/// [`OpenError`].
pub fn ready() -> Result<(), OpenError> {
    let nixl = runtime::resolve()?;
    if backend(told_backend(), required()).name() == LIBFABRIC {
        libfabric::fits(&nixl)?;
    }
    Ok(())
}

/// Loads NIXL with the backend that was chosen, held to what is required.
///
/// # Errors
/// [`OpenError`].
pub fn open() -> Result<Arc<NixlTransport>, OpenError> {
    let requirement = required();
    let transport = runtime::open(backend(told_backend(), requirement))?;
    transport.require(requirement)?;
    Ok(transport)
}

//! Safe agents over libnixl.
//!
//! Each agent is owned by one thread at a time, so NIXL's default of no locking is right for it. A
//! serving agent has a progress thread that wakes every millisecond (and on events), because peers
//! read from it while nobody polls it; a reading agent has none, because its owner polls it, and a
//! second thread would fight for the same worker. With the LIBFABRIC backend that owner is a thread of
//! the agent's own, because calls may hang.
//!
//! A process may exit while agents live: once exit has begun, their calls are refused.
#![allow(unsafe_code)]

mod agent;
mod direct;
mod fault;
mod gate;
mod params;
mod staying;

use std::ffi::CString;
use std::sync::{Arc, OnceLock};

use nixl_sys::{AgentConfig, Library, VersionFamily, c_string};

pub use agent::{NixlAgent, NixlRequest};

use self::agent::Kind;
use self::direct::Direct;
use self::params::Params;
use super::aside::Aside;
use super::{AgentRole, FailureKind, Transport, TransportError, TransportInfo};
use crate::fabric::{
    ErrorHandling, LIBFABRIC, Plugin, Requirement, Surroundings, UCX, UcxSettings, Unmet,
};
use crate::ids::AgentName;
use crate::memory::{ControlWords, HostWords};

/// Pause of a serving agent's progress thread. With 0, the default of NIXL's Python package, it
/// burns a core and halves throughput; with 1 ms it takes some 2 % of a core. Events wake it in
/// between, so that a longer pause delays nothing.
pub const SERVE_PROGRESS_DELAY_US: u64 = 5000;
/// The same with the LIBFABRIC backend, whose progress thread no event wakes: over TCP every read waits for it. It takes
/// some 3 % of a core.
pub const SERVE_LIBFABRIC_DELAY_US: u64 = 200;

/// Which backend an agent gets, and with what parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendConfig {
    /// Plugin name: `UCX` or `LIBFABRIC`.
    pub name: String,
    /// Parameters of the plugin, passed as they are.
    pub params: Vec<(String, String)>,
}

impl Default for BackendConfig {
    fn default() -> Self {
        Self {
            name: "UCX".into(),
            params: Vec::new(),
        }
    }
}

/// NIXL as a [`Transport`].
#[derive(Debug)]
pub struct NixlTransport {
    library: Arc<Library>,
    backend: BackendConfig,
    plugin: CString,
    params: Params,
    /// What it has been held to, with the parameters for that.
    held: OnceLock<(Requirement, Params)>,
}

impl NixlTransport {
    /// Uses a loaded library with a backend. UCX is told besides how to connect over TCP, unless variables or the parameter
    /// `engine_config` say otherwise: its defaults crash a process whose peer dies at the wrong moment, and wait a quarter of an hour for
    /// a cut link.
    ///
    /// # Errors
    /// [`TransportError`] of kind `Unsupported` when the installation has no such plugin (it lists those that there are), and when
    /// NIXL would not understand a parameter.
    pub fn new(
        library: Arc<Library>,
        backend: impl Into<BackendConfig>,
    ) -> Result<Self, TransportError> {
        let backend = backend.into();
        let unsupported = |cause: String| TransportError {
            operation: "select backend",
            kind: FailureKind::Unsupported,
            cause,
            raw: None,
        };
        let plugins = &library.report().plugins;
        if !plugins.contains(&backend.name) {
            return Err(unsupported(format!(
                "{} has no plugin {}; it has {}",
                library.report().plugins_dir.display(),
                backend.name,
                plugins.join(", ")
            )));
        }
        let plugin =
            c_string("backend name", &backend.name).map_err(|e| unsupported(e.to_string()))?;
        let mut params = Params::new(&backend.params).map_err(unsupported)?;
        if backend.name == UCX {
            params.connect_safely().map_err(unsupported)?;
        }
        Ok(Self {
            library,
            backend,
            plugin,
            params,
            held: OnceLock::new(),
        })
    }

    /// The parameters that hold the backend to a requirement, on top of the caller's.
    fn held_to(&self, wanted: Requirement) -> Result<Params, Unmet> {
        let mut params = self.params.clone();
        let here = Surroundings::here(&self.library.report().ucx_modules);
        here.check(wanted, &self.backend.name)?;
        if self.backend.name == LIBFABRIC {
            return Ok(params);
        }
        let unmet = |found: String, fix: String| Unmet { wanted, found, fix };
        let clash = |found| unmet(found, "leave that parameter to the requirement".to_owned());
        let settings = UcxSettings::default().require(wanted);
        if settings.error_handling == ErrorHandling::None {
            params
                .set("ucx_error_handling_mode", "none")
                .map_err(clash)?;
        }
        // Where the variable is set NIXL does not look at the parameter, and all that it allows has been found admitted.
        if here.ucx_tls.is_none() {
            match here.transports(wanted)?.as_deref() {
                None => {}
                Some([transport]) => params.set_for_ucx("TLS", transport).map_err(clash)?,
                Some(transports) => {
                    let found =
                        "no variable UCX_TLS, and NIXL's parameter takes one transport only";
                    let fix = format!(
                        "set UCX_TLS={} before NIXL is loaded, as UcxSettings::environment does",
                        transports.join(",")
                    );
                    return Err(unmet(found.to_owned(), fix));
                }
            }
        }
        Ok(params)
    }

    /// Why there is no LIBFABRIC agent: NIXL says only that there is no such backend, whatever its plugin lacks.
    fn explained(&self, error: TransportError) -> TransportError {
        match Plugin::of(self.library.report()).check() {
            Ok(()) => error,
            Err(unusable) => TransportError {
                kind: FailureKind::Unsupported,
                cause: unusable.to_string(),
                ..error
            },
        }
    }

    /// The loaded library.
    #[must_use]
    pub fn library(&self) -> &Arc<Library> {
        &self.library
    }
}

/// What an agent's own thread does once the agent is connected to its peer.
fn reached() {
    // Without RDMA what carries the bytes is TCP, or nothing.
    if !nixl_sys::has_rdma() {
        staying::no_more_connections();
    }
}

impl Transport for NixlTransport {
    type Agent = NixlAgent;

    fn open_agent(&self, name: &AgentName, role: AgentRole) -> Result<NixlAgent, TransportError> {
        let libfabric = self.backend.name == LIBFABRIC;
        let config = AgentConfig {
            progress_thread: role == AgentRole::Serve,
            progress_delay_us: if libfabric {
                SERVE_LIBFABRIC_DELAY_US
            } else {
                SERVE_PROGRESS_DELAY_US
            },
            ..AgentConfig::default()
        };
        let agent = Direct::open(
            Arc::clone(&self.library),
            name,
            &config,
            &self.plugin,
            self.held
                .get()
                .map_or(&self.params, |(_, params)| params)
                .as_slice(),
        );
        let agent = agent.map_err(|error| {
            if libfabric {
                self.explained(error)
            } else {
                error
            }
        })?;
        Ok(NixlAgent(if libfabric && role == AgentRole::Read {
            Kind::Aside(Aside::new(agent, reached)?)
        } else {
            Kind::Direct(agent)
        }))
    }

    /// A transport can be held to one requirement in its life: engines that require different things need one each.
    fn require(&self, wanted: Requirement) -> Result<(), Unmet> {
        let held = match self.held.get() {
            Some(held) => held,
            None if wanted == Requirement::Any => return Ok(()),
            None => {
                let params = self.held_to(wanted)?;
                self.held.get_or_init(|| (wanted, params))
            }
        };
        if held.0 == wanted || wanted == Requirement::Any {
            return Ok(());
        }
        Err(Unmet {
            wanted,
            found: format!("a transport that another engine has held to {}", held.0),
            fix: "give each engine a transport of its own".to_owned(),
        })
    }

    fn control_words(&self, slots: u32) -> Result<Arc<dyn ControlWords>, TransportError> {
        let words = HostWords::new(slots).map_err(|error| TransportError {
            operation: "allocate lease words",
            kind: FailureKind::Backend,
            cause: error.to_string(),
            raw: None,
        })?;
        Ok(Arc::new(words))
    }

    fn info(&self) -> TransportInfo {
        let report = self.library.report();
        let version = report
            .version
            .clone()
            .unwrap_or_else(|| match report.family {
                VersionFamily::V1_4 => "1.4".into(),
                VersionFamily::V1_5 => "1.5".into(),
                _ => "unknown".into(),
            });
        TransportInfo {
            name: "nixl",
            version,
            backend: self.backend.name.clone(),
        }
    }
}

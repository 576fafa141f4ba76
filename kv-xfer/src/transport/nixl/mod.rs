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
mod staying;

use std::ffi::CString;
use std::sync::{Arc, OnceLock};

use nixl_sys::{AgentConfig, Library, VersionFamily, c_string};

pub use agent::{NixlAgent, NixlRequest};

use self::agent::Kind;
use self::direct::Direct;
use super::aside::Aside;
use super::{AgentRole, FailureKind, Transport, TransportError, TransportInfo};
use crate::fabric::{LIBFABRIC, Plugin, Requirement, Surroundings, UcxSettings, Unmet};
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
    params: Vec<(CString, CString)>,
    /// What it has been held to, with the parameters for that.
    held: OnceLock<(Requirement, Vec<(CString, CString)>)>,
}

impl NixlTransport {
    /// Uses a loaded library with a backend.
    ///
    /// # Errors
    /// [`TransportError`] of kind `Unsupported` when the installation has no such plugin; it lists
    /// those that there are.
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
        let text =
            |what, value: &str| c_string(what, value).map_err(|e| unsupported(e.to_string()));
        let plugin = text("backend name", &backend.name)?;
        let params = backend
            .params
            .iter()
            .map(|(key, value)| Ok((text("parameter name", key)?, text("parameter", value)?)))
            .collect::<Result<_, TransportError>>()?;
        Ok(Self {
            library,
            backend,
            plugin,
            params,
            held: OnceLock::new(),
        })
    }

    /// The parameters that hold the backend to a requirement, on top of the caller's.
    fn held_to(&self, wanted: Requirement) -> Result<Vec<(CString, CString)>, Unmet> {
        let mut params = self.params.clone();
        let here = Surroundings::here(&self.library.report().ucx_modules);
        here.check(wanted, &self.backend.name)?;
        if self.backend.name == LIBFABRIC {
            return Ok(params);
        }
        let settings = UcxSettings {
            transports: here.transports(wanted)?,
            ..UcxSettings::default().require(wanted)
        };
        for (name, value) in settings.backend().params {
            let unmet = |found: String| Unmet {
                wanted,
                found,
                fix: "leave that parameter to the requirement".to_owned(),
            };
            let bad = |error: nixl_sys::CallError| unmet(error.to_string());
            let name = c_string("parameter name", &name).map_err(bad)?;
            let value = c_string("parameter", &value).map_err(bad)?;
            match params.iter().find(|(given, _)| *given == name) {
                None => params.push((name, value)),
                Some((_, given)) if *given == value => {}
                Some((_, given)) => {
                    let (name, given) = (name.to_string_lossy(), given.to_string_lossy());
                    return Err(unmet(format!("the backend's parameter {name}={given}")));
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
            self.held.get().map_or(&self.params, |(_, params)| params),
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

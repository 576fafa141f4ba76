//! Settings of NIXL's backends: the parameters and variables that matter, with their defaults and units.
//!
//! Parameters go to each backend as it is created. Variables are read once in a process, when the plugin is loaded, and
//! are the process's to set: [`UcxSettings::environment`] and [`LibfabricSettings::environment`] say which, and
//! [`Environment::apply`] sets them.

use std::str::FromStr;
use std::time::Duration;

use nixl_sys::Environment;
use thiserror::Error;

use super::requirement::{Requirement, Unmet};
use crate::transport::nixl::BackendConfig;

/// Name of NIXL's UCX backend.
pub const UCX: &str = "UCX";
/// Name of NIXL's LIBFABRIC backend.
pub const LIBFABRIC: &str = "LIBFABRIC";

/// What UCX does about peers that die.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ErrorHandling {
    /// It detects them. Needs a transport that can, among those that it may use: RDMA or TCP.
    #[default]
    Peer,
    /// It does not. Over shared memory alone nothing else can be had; a dead process is noticed there all the same. Both
    /// sides must agree.
    None,
}

/// Settings of the UCX backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UcxSettings {
    /// Transports that may be used; `None`: those that UCX chooses. Variable `UCX_TLS`; a single one also by the parameter
    /// `engine_config`, which NIXL takes apart at commas.
    pub transports: Option<Vec<String>>,
    /// Network devices that may be used, in UCX's words, such as `mlx5_0:1` or `eth0`; empty: all. Variable `UCX_NET_DEVICES`. The first ports of RDMA
    /// devices also by the parameter `device_list`: NIXL puts `:1` behind each name in it.
    pub devices: Vec<String>,
    /// What is done about peers that die. Parameter `ucx_error_handling_mode`.
    pub error_handling: ErrorHandling,
    /// Workers of an agent. Parameter `num_workers`; NIXL's default 1.
    pub workers: Option<u32>,
    /// Threads to which a request is handed, so that posting does not copy; 0 or `None`: none. Parameter `num_threads`.
    pub threads: Option<u32>,
    /// Descriptors of a request for each of those threads at a time. Parameter `split_batch_size`; NIXL's default 1024.
    pub split_batch: Option<u32>,
    /// UCX's modules for EFA. They crash a process at its end where the system's RDMA libraries are installed.
    /// Variable `UCX_MODULES`.
    pub efa_modules: bool,
    /// Whether UCX may patch libc to watch memory being unmapped, which takes 0.4 s at the start. Needed for its cache of
    /// registrations, so only with RDMA. Variable `UCX_MEM_EVENTS`.
    pub memory_events: bool,
    /// Time without an acknowledgement after which a TCP connection is given up; UCX's default is the kernel's, 15 minutes.
    /// Variable `UCX_TCP_USER_TIMEOUT`.
    pub tcp_user_timeout: Duration,
    /// Bytes of a segment over TCP, both ways; UCX's default is 8 KiB to send. Variables `UCX_TCP_TX_SEG_SIZE` and
    /// `UCX_TCP_RX_SEG_SIZE`.
    pub tcp_segment_bytes: u32,
    /// Where UCX logs to; its default is standard output. Variable `UCX_LOG_FILE`.
    pub log_file: String,
    /// What it logs; at `info` it says which lanes it uses. Variable `UCX_LOG_LEVEL`; its default `warn`.
    pub log_level: Option<String>,
}

impl UcxSettings {
    /// The defaults on this machine.
    #[must_use]
    pub fn here() -> Self {
        Self {
            memory_events: nixl_sys::has_rdma(),
            ..Self::default()
        }
    }

    /// Holds UCX to what is required.
    #[must_use]
    pub fn require(mut self, requirement: Requirement) -> Self {
        if let Some(transports) = requirement.ucx_transports() {
            self.transports = Some(transports.iter().copied().map(str::to_owned).collect());
        }
        match requirement {
            // Nothing in these lists can tell that a peer has died.
            Requirement::Shm | Requirement::Nvlink => self.error_handling = ErrorHandling::None,
            Requirement::Efa => self.efa_modules = true,
            Requirement::Rdma | Requirement::Tcp | Requirement::Any => {}
        }
        self
    }

    /// The backend with its parameters.
    #[must_use]
    pub fn backend(&self) -> BackendConfig {
        let mut params = Vec::new();
        let mut add = |name: &str, value: String| params.push((name.to_owned(), value));
        if let Some([transport]) = self.transports.as_deref() {
            add("engine_config", format!("TLS={transport}"));
        }
        let first_ports = self.devices.iter().map(|name| name.strip_suffix(":1"));
        match first_ports.collect::<Option<Vec<_>>>() {
            // NIXL parts them at a comma with a space.
            Some(names) if !names.is_empty() => add("device_list", names.join(", ")),
            _ => {}
        }
        if self.error_handling == ErrorHandling::None {
            add("ucx_error_handling_mode", "none".to_owned());
        }
        let numbers = [
            ("num_workers", self.workers),
            ("num_threads", self.threads),
            ("split_batch_size", self.split_batch),
        ];
        for (name, value) in numbers {
            if let Some(value) = value {
                add(name, value.to_string());
            }
        }
        BackendConfig {
            name: UCX.to_owned(),
            params,
        }
    }

    /// The variables, on top of those that are recommended.
    pub fn environment(&self) -> Environment {
        let mut environment = Environment::recommended_for(self.memory_events);
        if self.efa_modules {
            environment = environment.without("UCX_MODULES");
        }
        let segment = self.tcp_segment_bytes.to_string();
        let timeout = format!("{}ms", self.tcp_user_timeout.as_millis());
        environment = environment
            .with(
                "UCX_TCP_USER_TIMEOUT",
                &timeout,
                "a cut TCP connection is otherwise noticed after 15 minutes",
            )
            .with("UCX_TCP_TX_SEG_SIZE", &segment, "faster reads over TCP")
            .with("UCX_TCP_RX_SEG_SIZE", &segment, "faster reads over TCP")
            .with(
                "UCX_LOG_FILE",
                &self.log_file,
                "UCX logs to standard output otherwise",
            );
        if let Some(transports) = &self.transports {
            let allowed = transports.join(",");
            environment = environment.with("UCX_TLS", &allowed, "nothing else may carry bytes");
        }
        if !self.devices.is_empty() {
            let devices = self.devices.join(",");
            environment = environment.with("UCX_NET_DEVICES", &devices, "the devices to use");
        }
        match &self.log_level {
            Some(level) => {
                environment.with("UCX_LOG_LEVEL", level, "at info UCX says what it uses")
            }
            None => environment,
        }
    }
}

impl Default for UcxSettings {
    fn default() -> Self {
        Self {
            transports: None,
            devices: Vec::new(),
            error_handling: ErrorHandling::Peer,
            workers: None,
            threads: None,
            split_batch: None,
            efa_modules: false,
            memory_events: true,
            tcp_user_timeout: Duration::from_secs(5),
            tcp_segment_bytes: 256 << 10,
            log_file: "stderr".to_owned(),
            log_level: None,
        }
    }
}

/// Settings of the LIBFABRIC backend.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LibfabricSettings {
    /// The one provider that may be used; `None`: the first of cxi, efa, tcp and sockets that offers anything, so without
    /// EFA it quietly takes TCP. Variable `FI_PROVIDER`; the plugin has no parameter for it.
    pub provider: Option<String>,
    /// Threads to which a request is handed; NIXL's default 0. Parameter `num_threads`.
    pub threads: Option<u32>,
    /// Descriptors of a request for each of those threads at a time. Parameter `split_batch_size`; NIXL's default 1024.
    pub split_batch: Option<u32>,
    /// Bytes from which on a descriptor is cut and spread over all NICs; shorter ones take turns. Parameter
    /// `striping_threshold`; NIXL's default 128 KiB.
    pub striping_threshold: Option<u64>,
    /// Most operations posted at once to a NIC. Parameter `post_queue_size`; NIXL's default 32,768.
    pub post_queue: Option<u32>,
}

impl LibfabricSettings {
    /// Holds libfabric to what is required.
    ///
    /// # Errors
    /// [`Unmet`] when this backend cannot do it.
    pub fn require(mut self, requirement: Requirement) -> Result<Self, Unmet> {
        match requirement.provider() {
            Ok(None) => {}
            Ok(Some(provider)) => self.provider = Some(provider.to_owned()),
            Err(lacks) => {
                return Err(Unmet {
                    wanted: requirement,
                    found: format!("the backend LIBFABRIC: {lacks}"),
                    fix: "use the backend UCX".to_owned(),
                });
            }
        }
        Ok(self)
    }

    /// The backend with its parameters.
    #[must_use]
    pub fn backend(&self) -> BackendConfig {
        let numbers = [
            ("num_threads", self.threads.map(u64::from)),
            ("split_batch_size", self.split_batch.map(u64::from)),
            ("striping_threshold", self.striping_threshold),
            ("post_queue_size", self.post_queue.map(u64::from)),
        ];
        let params = numbers
            .into_iter()
            .filter_map(|(name, value)| Some((name.to_owned(), value?.to_string())));
        BackendConfig {
            name: LIBFABRIC.to_owned(),
            params: params.collect(),
        }
    }

    /// The variables.
    pub fn environment(&self) -> Environment {
        match &self.provider {
            Some(provider) => Environment::empty().with(
                "FI_PROVIDER",
                provider,
                "NIXL's LIBFABRIC plugin otherwise takes TCP without a word where there is no EFA",
            ),
            None => Environment::empty(),
        }
    }
}

/// A backend of NIXL, with its settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Backend {
    /// UCX: shared memory, TCP, InfiniBand and RoCE, NVLink.
    Ucx(UcxSettings),
    /// libfabric: EFA. Elsewhere it falls back to TCP.
    Libfabric(LibfabricSettings),
}

impl Backend {
    /// UCX with the defaults on this machine.
    #[must_use]
    pub fn ucx() -> Self {
        Self::Ucx(UcxSettings::here())
    }

    /// LIBFABRIC with its defaults.
    #[must_use]
    pub fn libfabric() -> Self {
        Self::Libfabric(LibfabricSettings::default())
    }

    /// NIXL's name of it.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Ucx(_) => UCX,
            Self::Libfabric(_) => LIBFABRIC,
        }
    }

    /// Holds it to what is required.
    ///
    /// # Errors
    /// [`Unmet`] when this backend cannot do it.
    pub fn require(self, requirement: Requirement) -> Result<Self, Unmet> {
        Ok(match self {
            Self::Ucx(settings) => Self::Ucx(settings.require(requirement)),
            Self::Libfabric(settings) => Self::Libfabric(settings.require(requirement)?),
        })
    }

    /// The variables that it needs.
    pub fn environment(&self) -> Environment {
        match self {
            Self::Ucx(settings) => settings.environment(),
            Self::Libfabric(settings) => settings.environment(),
        }
    }
}

impl From<&Backend> for BackendConfig {
    fn from(backend: &Backend) -> Self {
        match backend {
            Backend::Ucx(settings) => settings.backend(),
            Backend::Libfabric(settings) => settings.backend(),
        }
    }
}

impl From<Backend> for BackendConfig {
    fn from(backend: Backend) -> Self {
        Self::from(&backend)
    }
}

/// No backend has that name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0} is no backend; choose ucx or libfabric")]
pub struct UnknownBackend(pub String);

impl FromStr for Backend {
    type Err = UnknownBackend;

    /// By name in any case, with the defaults.
    fn from_str(name: &str) -> Result<Self, UnknownBackend> {
        match name.to_ascii_uppercase().as_str() {
            UCX => Ok(Self::ucx()),
            LIBFABRIC => Ok(Self::libfabric()),
            _ => Err(UnknownBackend(name.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_required_restricts_ucx() {
        let shm = UcxSettings::default().require(Requirement::Shm).backend();
        assert_eq!(shm.name, "UCX");
        let param = |name: &str| ("engine_config".to_owned(), name.to_owned());
        assert!(shm.params.contains(&param("TLS=sm")));
        let none = ("ucx_error_handling_mode".to_owned(), "none".to_owned());
        assert!(shm.params.contains(&none));
        let rdma = UcxSettings::default().require(Requirement::Rdma).backend();
        // NIXL would take the first and leave the others out.
        assert!(rdma.params.iter().all(|(name, _)| name != "engine_config"));
        assert!(!rdma.params.contains(&none));
        let any = UcxSettings::default().require(Requirement::Any).backend();
        assert_eq!(any, BackendConfig::default());
    }

    #[test]
    fn variables_are_those_that_are_recommended_and_what_is_set() {
        let environment = UcxSettings::default().environment();
        let value = |name: &str| {
            let found = environment.variables().iter().find(|v| v.name == name);
            found.map(|v| v.value.clone())
        };
        assert_eq!(value("UCX_TCP_USER_TIMEOUT").as_deref(), Some("5000ms"));
        assert_eq!(value("UCX_TCP_TX_SEG_SIZE").as_deref(), Some("262144"));
        assert_eq!(value("UCX_MODULES").as_deref(), Some("^efa"));
        assert_eq!(value("UCX_MEM_EVENTS"), None);
        let efa = UcxSettings::default()
            .require(Requirement::Efa)
            .environment();
        assert!(efa.variables().iter().all(|v| v.name != "UCX_MODULES"));
        let rdma = UcxSettings::default()
            .require(Requirement::Rdma)
            .environment();
        let tls = rdma.variables().iter().find(|v| v.name == "UCX_TLS");
        assert_eq!(
            tls.map(|v| v.value.as_str()),
            Some("rc,dc,ud,srd,cuda_copy")
        );
    }

    #[test]
    fn devices_are_named_as_nixl_and_ucx_take_them() {
        let settings = |devices: &[&str]| UcxSettings {
            devices: devices.iter().copied().map(str::to_owned).collect(),
            ..UcxSettings::default()
        };
        let listed = |devices: &[&str]| settings(devices).backend().params;
        let variable = |devices: &[&str]| {
            let environment = settings(devices).environment();
            let mut variables = environment.variables().iter();
            let found = variables.find(|v| v.name == "UCX_NET_DEVICES");
            found.map(|v| v.value.clone())
        };
        let two = ["mlx5_0:1", "mlx5_1:1"];
        let list = ("device_list".to_owned(), "mlx5_0, mlx5_1".to_owned());
        assert_eq!(listed(&two), [list]);
        assert_eq!(variable(&two).as_deref(), Some("mlx5_0:1,mlx5_1:1"));
        // NIXL would ask UCX for `eth0:1`.
        assert_eq!(listed(&["mlx5_0:1", "eth0"]), []);
        assert_eq!(variable(&["eth0"]).as_deref(), Some("eth0"));
        assert_eq!((listed(&[]), variable(&[])), (Vec::new(), None));
    }

    #[test]
    fn a_backend_is_chosen_by_its_name() {
        let libfabric: Backend = "libfabric".parse().unwrap();
        assert_eq!(
            (libfabric.name(), &libfabric),
            (LIBFABRIC, &Backend::libfabric())
        );
        assert_eq!(BackendConfig::from(&libfabric).name, "LIBFABRIC");
        assert_eq!("UCX".parse(), Ok(Backend::ucx()));
        assert!(
            "verbs"
                .parse::<Backend>()
                .unwrap_err()
                .to_string()
                .contains("verbs")
        );
        assert!(libfabric.require(Requirement::Shm).is_err());
    }

    #[test]
    fn libfabric_is_held_to_a_provider_or_refuses() {
        let settings = LibfabricSettings {
            striping_threshold: Some(1 << 20),
            ..LibfabricSettings::default()
        };
        let efa = settings.clone().require(Requirement::Efa).unwrap();
        let variables = efa.environment();
        assert!(
            variables
                .variables()
                .iter()
                .any(|v| v.name == "FI_PROVIDER" && v.value == "efa")
        );
        let striping = ("striping_threshold".to_owned(), "1048576".to_owned());
        assert_eq!(efa.backend().params, [striping]);
        let unmet = settings.require(Requirement::Shm).unwrap_err();
        assert!(unmet.to_string().contains("use the backend UCX"), "{unmet}");
    }
}

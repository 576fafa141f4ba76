//! Asks the libraries, each in a process of its own: some crash, hang, or do not get on with each other.

use std::env;
use std::fmt::Display;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use clap::ValueEnum;
use kv_xfer::ids::AgentName;
use kv_xfer::transport::nixl::BackendConfig;
use kv_xfer::transport::{AgentRole, Transport};
use nixl_sys::{Environment, LIBFABRIC_NAME, Library, OpenOptions, fabric_symbols, ucx_library};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::cli::Exit;
use crate::proc::{Interrupt, Parent, ProcError, Worker};
use crate::runtime;

/// Names the libfabric that is asked.
pub const LIBFABRIC_VARIABLE: &str = "KVX_LIBFABRIC";
/// Where Amazon's installer puts it.
const AMAZON: [&str; 2] = ["/opt/amazon/efa/lib64", "/opt/amazon/efa/lib"];
/// Time for one answer. Without a fault it takes half a second.
const LIMIT: Duration = Duration::from_secs(10);
/// Time for a process to end after its last answer.
const END: Duration = Duration::from_secs(2);
/// Most of what a library has said before it failed that is shown.
const LAST_WORDS: usize = 3;

/// Which libraries a process asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Probe {
    /// NIXL, and whether it can use UCX.
    Nixl,
    /// The UCX of that NIXL.
    Ucx,
    /// libfabric, and whether NIXL's plugin loads with it.
    Libfabric,
}

impl Probe {
    fn name(self) -> &'static str {
        match self {
            Self::Nixl => "nixl",
            Self::Ucx => "ucx",
            Self::Libfabric => "libfabric",
        }
    }
}

/// What a library says, or why it says nothing.
pub type Answer<T> = Result<T, String>;

/// What NIXL says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NixlFound {
    /// Its version.
    pub version: String,
    /// Its file.
    pub library: PathBuf,
    /// Its backend plugins.
    pub plugins: Vec<String>,
    /// The modules of its UCX.
    pub ucx_modules: Vec<String>,
    /// The newest symbol version of libfabric that its LIBFABRIC plugin needs.
    pub needs_fabric: Option<String>,
    /// What is wrong with it, in its own words.
    pub findings: Vec<String>,
}

/// What UCX says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UcxFound {
    /// Its version.
    pub version: String,
    /// Its file.
    pub library: PathBuf,
    /// Transports and devices, `tcp/eth0`.
    pub resources: Vec<(String, String)>,
}

/// What libfabric says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LibfabricFound {
    /// Its version.
    pub version: String,
    /// Its file, or the name by which it was found.
    pub library: PathBuf,
    /// The newest symbol version that it has.
    pub symbols: Option<String>,
    /// Providers, domains and versions.
    pub providers: Vec<(String, String, String)>,
}

/// What all of them say. Also the format of a recording.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answers {
    /// NIXL.
    pub nixl: Answer<NixlFound>,
    /// Whether NIXL can use UCX.
    pub backend: Answer<()>,
    /// UCX.
    pub ucx: Answer<UcxFound>,
    /// libfabric.
    pub libfabric: Answer<LibfabricFound>,
    /// Whether NIXL's LIBFABRIC plugin loads.
    pub plugin: Answer<()>,
}

impl Answers {
    /// Asks all of them at once.
    pub fn ask(interrupt: &Interrupt) -> Self {
        let mut nixl = Asked::start(Probe::Nixl, interrupt);
        let mut ucx = Asked::start(Probe::Ucx, interrupt);
        let mut libfabric = Asked::start(Probe::Libfabric, interrupt);
        let answers = Self {
            nixl: nixl.answer(),
            backend: nixl.answer(),
            ucx: ucx.answer(),
            libfabric: libfabric.answer(),
            plugin: libfabric.answer(),
        };
        for asked in [nixl, ucx, libfabric] {
            asked.end();
        }
        answers
    }

    /// Reads a recording.
    pub fn recorded(file: &Path) -> Result<Self, String> {
        let text =
            fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        serde_json::from_str(&text).map_err(|error| format!("{}: {error}", file.display()))
    }
}

/// A process that has been asked.
struct Asked {
    worker: Result<Worker, String>,
    /// What its libraries say on standard error.
    words: PathBuf,
}

impl Asked {
    fn start(probe: Probe, interrupt: &Interrupt) -> Self {
        let name = format!("kvx-doctor-{}-{}.log", std::process::id(), probe.name());
        let words = env::temp_dir().join(name);
        let worker = env::current_exe()
            .map_err(|error| error.to_string())
            .and_then(|kvx| {
                let mut command = Command::new(kvx);
                command.args(["fabric-probe", probe.name()]);
                let said = File::create(&words).map_or_else(|_| Stdio::null(), Stdio::from);
                command.stderr(said);
                Worker::spawn(probe.name(), command, interrupt).map_err(|error| error.to_string())
            });
        Self { worker, words }
    }

    fn answer<T: DeserializeOwned>(&mut self) -> Answer<T> {
        let worker = self.worker.as_mut().map_err(|error| error.clone())?;
        let answer = match worker.recv::<Answer<T>>(LIMIT) {
            Ok(answer) => answer,
            Err(ProcError::Ended { how, .. }) => {
                Err(format!("it brought its process down ({how})"))
            }
            Err(error) => Err(error.to_string()),
        };
        answer.map_err(|error| match self.last_words() {
            Some(words) => format!("{error}; its own words: {words}"),
            None => error,
        })
    }

    /// The last complaints.
    fn last_words(&self) -> Option<String> {
        let said = fs::read(&self.words).ok()?;
        let said = String::from_utf8_lossy(&said);
        let mut lines: Vec<&str> = said
            .lines()
            .filter_map(|line| {
                // UCX writes `… UCX  ERROR text`, NIXL `E0930 10:11:12.1 3 file.cpp:4] text`.
                let ucx = line
                    .split_once("ERROR")
                    .or_else(|| line.split_once(" WARN "));
                let nixl = line
                    .starts_with(['E', 'F'])
                    .then(|| line.split_once("] "))
                    .flatten();
                Some(ucx.or(nixl)?.1.trim())
            })
            .collect();
        lines.dedup();
        let from = lines.len().saturating_sub(LAST_WORDS);
        let last = lines.get(from..).unwrap_or_default().join(" / ");
        (!last.is_empty()).then_some(last)
    }

    fn end(self) {
        if let Ok(worker) = self.worker
            && let Err(error) = worker.finish(END)
        {
            tracing::debug!(%error, "a probe did not end well");
        }
        let _ = fs::remove_file(&self.words);
    }
}

/// `kvx fabric-probe`: asks, and tells the parent.
#[must_use]
pub fn run_probe(probe: Probe) -> Exit {
    tracing::debug!("{}", Environment::recommended().apply_single_threaded());
    let told = Parent::attach().and_then(|parent| match probe {
        Probe::Nixl => {
            parent.send(&ask_nixl())?;
            parent.send(&ask_backend())
        }
        Probe::Ucx => parent.send(&ask_ucx()),
        Probe::Libfabric => {
            parent.send(&ask_libfabric())?;
            parent.send(&ask_plugin())
        }
    });
    match told {
        Ok(()) => Exit::Ok,
        Err(error) => {
            tracing::error!("{error}");
            Exit::CheckFailed
        }
    }
}

fn words(error: impl Display) -> String {
    error.to_string()
}

fn ask_nixl() -> Answer<NixlFound> {
    let runtime = runtime::resolve().map_err(words)?;
    let library = Library::open(&runtime.library).map_err(words)?;
    let report = library.report();
    let plugin = report.plugins_dir.join("libplugin_LIBFABRIC.so");
    Ok(NixlFound {
        version: report.version.clone().unwrap_or(runtime.version),
        library: report.library.clone(),
        plugins: report.plugins.clone(),
        ucx_modules: report.ucx_modules.clone(),
        needs_fabric: fabric_symbols(&plugin).map(words),
        findings: report.findings.iter().map(words).collect(),
    })
}

fn ask_backend() -> Answer<()> {
    let transport = runtime::open(BackendConfig::default()).map_err(words)?;
    let name = AgentName::new(format!("doctor-{}", std::process::id())).map_err(words)?;
    let agent = transport
        .open_agent(&name, AgentRole::Read)
        .map_err(words)?;
    drop(agent);
    Ok(())
}

fn ask_ucx() -> Answer<UcxFound> {
    let runtime = runtime::resolve().map_err(words)?;
    // Only to find the UCX beside it; what is wrong with NIXL is found out elsewhere.
    let library = OpenOptions::new()
        .allow_missing_plugins(true)
        .allow_missing_ucx_modules(true)
        .allow_unreadable_config(true)
        .open(&runtime.library)
        .map_err(words)?;
    let modules = library.report().ucx_modules_dir.clone();
    let report = nixl_sys::ucx(&ucx_library(modules.as_deref())).map_err(words)?;
    let pair = |resource: nixl_sys::UcxResource| (resource.transport, resource.device);
    Ok(UcxFound {
        version: report.version,
        library: report.library,
        resources: report.resources.into_iter().map(pair).collect(),
    })
}

/// The libfabric that is named, else what the dynamic linker finds, else what Amazon's installer leaves.
fn libfabric_file() -> PathBuf {
    if let Some(named) = env::var_os(LIBFABRIC_VARIABLE).filter(|name| !name.is_empty()) {
        return PathBuf::from(named);
    }
    PathBuf::from(LIBFABRIC_NAME)
}

fn ask_libfabric() -> Answer<LibfabricFound> {
    let file = libfabric_file();
    let report = match nixl_sys::libfabric(&file) {
        Ok(report) => report,
        Err(error) => {
            let beside = AMAZON.iter().map(|dir| Path::new(dir).join(LIBFABRIC_NAME));
            let found = beside.into_iter().find(|path| path.exists());
            return Err(match found {
                Some(found) => format!(
                    "{error}; {} is there: add its folder to LD_LIBRARY_PATH, or name it in {LIBFABRIC_VARIABLE}",
                    found.display()
                ),
                None => error.to_string(),
            });
        }
    };
    let symbols = report.file.as_deref().and_then(fabric_symbols);
    let mut providers: Vec<(String, String, String)> = Vec::new();
    for provider in report.providers {
        let one = (
            provider.provider,
            provider.domain,
            provider.version.to_string(),
        );
        if !providers.contains(&one) {
            providers.push(one);
        }
    }
    Ok(LibfabricFound {
        version: report.version.to_string(),
        library: report.library,
        symbols: symbols.map(words),
        providers,
    })
}

fn ask_plugin() -> Answer<()> {
    let runtime = runtime::resolve().map_err(words)?;
    let library = Library::open(&runtime.library).map_err(words)?;
    let report = library.report();
    if !report.plugins.iter().any(|name| name == "LIBFABRIC") {
        return Err("this NIXL has no LIBFABRIC plugin".to_owned());
    }
    nixl_sys::plugin_loads(&report.plugins_dir.join("libplugin_LIBFABRIC.so")).map_err(words)
}

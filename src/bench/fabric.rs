//! What a node has to carry bytes with, and what did carry them.

use std::env;
use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use kv_xfer::fabric::UcxLanes;
use nixl_sys::Library;

use super::machine;
use super::row::Machine;
use crate::runtime::{self, OpenError};

/// What is known of a node before anything moves.
#[derive(Debug)]
pub struct FabricReport {
    machine: Machine,
    library: PathBuf,
    plugins: Vec<String>,
    ucx_modules: Vec<String>,
    environment: Vec<(String, String)>,
}

impl FabricReport {
    /// Looks. Loads NIXL into this process.
    ///
    /// # Errors
    /// [`OpenError`] when there is no NIXL.
    pub fn look() -> Result<Self, OpenError> {
        let library = Library::open(&runtime::resolve()?.library)?;
        let report = library.report();
        Ok(Self {
            machine: machine::look(false),
            library: report.library.clone(),
            plugins: report.plugins.clone(),
            ucx_modules: report.ucx_modules.clone(),
            environment: report.environment.clone(),
        })
    }
}

impl fmt::Display for FabricReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |names: &[String]| match names {
            [] => "none".to_owned(),
            names => names.join(", "),
        };
        writeln!(
            f,
            "NIXL         {} ({})",
            self.machine.nixl,
            self.library.display()
        )?;
        writeln!(f, "backend      UCX of {}", list(&self.plugins))?;
        writeln!(f, "UCX modules  {}", list(&self.ucx_modules))?;
        writeln!(f, "RDMA         {}", list(&self.machine.rdma))?;
        writeln!(f, "GPUs         {}", list(&self.machine.gpus))?;
        let ours: Vec<_> = self
            .environment
            .iter()
            .filter(|(name, _)| name.starts_with("UCX_"))
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        write!(f, "environment  {}", list(&ours))
    }
}

/// The file into which UCX says what it uses in one process, if the user has not said where.
#[derive(Debug)]
pub struct UcxLog {
    path: Option<PathBuf>,
}

impl UcxLog {
    /// A file that no other process has.
    #[must_use]
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let taken = ["UCX_LOG_FILE", "UCX_LOG_LEVEL"]
            .iter()
            .any(|name| env::var_os(name).is_some());
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("kvx-bench-{}-{count}.log", std::process::id());
        Self {
            path: (!taken).then(|| env::temp_dir().join(name)),
        }
    }

    /// The variables that make UCX write it.
    #[must_use]
    pub fn variables(&self) -> Vec<(String, String)> {
        match self.path.as_ref().and_then(|path| path.to_str()) {
            Some(path) => vec![
                ("UCX_LOG_FILE".to_owned(), path.to_owned()),
                ("UCX_LOG_LEVEL".to_owned(), "info".to_owned()),
            ],
            None => Vec::new(),
        }
    }

    /// What it says; to be asked when the process has ended.
    #[must_use]
    pub fn text(&self) -> Option<String> {
        let log = fs::read(self.path.as_ref()?).ok()?;
        Some(String::from_utf8_lossy(&log).into_owned())
    }

    /// What carried the bytes, if it says; to be asked when the process has ended.
    #[must_use]
    pub fn carrier(&self) -> Option<String> {
        let lanes = UcxLanes::parse(&self.text()?);
        (!lanes.is_empty()).then(|| lanes.carrier())
    }
}

impl Default for UcxLog {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for UcxLog {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = fs::remove_file(path);
        }
    }
}

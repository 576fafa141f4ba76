//! The environment variables that NIXL's plugins read when they are loaded.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use crate::process::mapped_libraries;

/// Variables to be set before NIXL is loaded.
///
/// UCX reads its variables once, when NIXL's UCX plugin is loaded, and has no other way to be told. Nothing is set until
/// [`apply`](Self::apply) is called, and what the user has set is never changed.
///
/// ```no_run
/// let environment = nixl_sys::Environment::recommended();
/// // SAFETY: first thing in `main`, no other thread exists.
/// let report = unsafe { environment.apply() };
/// eprintln!("{report}");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Environment {
    variables: Vec<Variable>,
}

/// A variable and why it is set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variable {
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: String,
    /// What it is for.
    pub reason: String,
}

/// A variable that the user had set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptVariable {
    /// Its name.
    pub name: String,
    /// The user's value, which stays.
    pub value: OsString,
    /// The value that would have been set.
    pub proposed: String,
}

/// What became of an [`Environment`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EnvironmentReport {
    /// Whether and why it was applied.
    pub outcome: EnvironmentOutcome,
    /// The variables set; with `Planned`, those that would be.
    pub set: Vec<Variable>,
    /// The variables that the user had set.
    pub kept: Vec<KeptVariable>,
}

/// Whether an [`Environment`] was applied.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EnvironmentOutcome {
    /// Nothing was changed: this tells what would be.
    Planned,
    /// The variables are set.
    Applied,
    /// An environment was applied earlier; nothing was changed.
    AlreadyApplied,
    /// The process has other threads, which may look at the environment: nothing was changed.
    OtherThreads {
        /// How many threads there are; 0 when that could not be found out.
        threads: usize,
    },
    /// NIXL or UCX is already loaded, from here: nothing was changed, for they would not see it.
    TooLate {
        /// The library that is loaded.
        loaded: PathBuf,
    },
}

impl Environment {
    /// No variables.
    pub fn empty() -> Self {
        Self::default()
    }

    /// What this crate recommends on this machine.
    pub fn recommended() -> Self {
        Self::recommended_for(has_rdma())
    }

    /// What this crate recommends on a machine with or without RDMA devices.
    pub fn recommended_for(rdma: bool) -> Self {
        let environment = Self::empty()
            .with(
                "UCX_MODULES",
                "^efa",
                "with the system's RDMA libraries installed, UCX's efa module crashes at exit",
            )
            .with(
                "UCX_LOG_FILE",
                "stderr",
                "UCX logs to standard output otherwise",
            )
            .with(
                "UCX_TCP_USER_TIMEOUT",
                "5s",
                "a cut TCP connection is otherwise noticed after 15 minutes",
            )
            .with(
                "UCX_TCP_CONN_NB",
                "y",
                "a peer that dies while it is being connected to crashes the process otherwise",
            )
            .with(
                "UCX_TCP_MAX_CONN_RETRIES",
                "1",
                "a peer that is gone is otherwise connected to 25 times",
            )
            .with("UCX_TCP_TX_SEG_SIZE", "256K", "faster reads over TCP")
            .with("UCX_TCP_RX_SEG_SIZE", "256K", "faster reads over TCP")
            .with(
                "UCX_CMA_TX_QUOTA",
                "256",
                "small reads within a machine take up to a fifth less time",
            );
        if rdma {
            return environment;
        }
        environment.with(
            "UCX_MEM_EVENTS",
            "n",
            "no RDMA here, so UCX need not patch libc, which takes 0.4 s",
        )
    }

    /// Adds a variable, or changes one that was added.
    pub fn with(mut self, name: &str, value: &str, reason: &str) -> Self {
        self = self.without(name);
        self.variables.push(Variable {
            name: name.into(),
            value: value.into(),
            reason: reason.into(),
        });
        self
    }

    /// Removes a variable.
    pub fn without(mut self, name: &str) -> Self {
        self.variables.retain(|v| v.name != name);
        self
    }

    /// The variables.
    pub fn variables(&self) -> &[Variable] {
        &self.variables
    }

    /// What [`apply`](Self::apply) would do; changes nothing.
    pub fn plan(&self) -> EnvironmentReport {
        self.report(EnvironmentOutcome::Planned)
    }

    /// [`apply`](Self::apply) for a process that has no thread but the caller's, which is checked: nobody else can look at
    /// the environment meanwhile. Call it first thing in `main`.
    pub fn apply_single_threaded(&self) -> EnvironmentReport {
        let threads = std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count);
        if threads != 1 {
            return self.refused(EnvironmentOutcome::OtherThreads { threads });
        }
        // SAFETY: this is the process's only thread, as the kernel has just said, and it starts no other until this
        // call returns. Another process's ptrace is the only way to get one in between.
        unsafe { self.apply() }
    }

    /// Sets the variables that the user has not set. Works once in a process, and only before NIXL is loaded.
    ///
    /// # Safety
    ///
    /// No other thread may read or write the environment at the same time, as for [`std::env::set_var`]. Call it at the
    /// start of `main`, before any thread is started.
    pub unsafe fn apply(&self) -> EnvironmentReport {
        static APPLIED: Mutex<bool> = Mutex::new(false);
        let mut applied = APPLIED
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        if *applied {
            return self.refused(EnvironmentOutcome::AlreadyApplied);
        }
        if let Some(loaded) = mapped_libraries(&["libnixl.so", "libnixl_capi.so", "libucs"])
            .into_iter()
            .next()
        {
            return self.refused(EnvironmentOutcome::TooLate { loaded });
        }
        let report = self.report(EnvironmentOutcome::Applied);
        for variable in &report.set {
            // SAFETY: the caller promises that no other thread touches the environment meanwhile.
            unsafe { std::env::set_var(&variable.name, &variable.value) };
        }
        *applied = true;
        report
    }

    fn report(&self, outcome: EnvironmentOutcome) -> EnvironmentReport {
        let mut report = EnvironmentReport {
            outcome,
            set: Vec::new(),
            kept: Vec::new(),
        };
        for variable in &self.variables {
            match std::env::var_os(&variable.name) {
                None => report.set.push(variable.clone()),
                Some(value) => report.kept.push(KeptVariable {
                    name: variable.name.clone(),
                    value,
                    proposed: variable.value.clone(),
                }),
            }
        }
        report
    }

    fn refused(&self, outcome: EnvironmentOutcome) -> EnvironmentReport {
        EnvironmentReport {
            set: Vec::new(),
            ..self.report(outcome)
        }
    }
}

/// Whether this machine has an RDMA device.
pub fn has_rdma() -> bool {
    has_entries(Path::new("/sys/class/infiniband"))
}

fn has_entries(dir: &Path) -> bool {
    std::fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some())
}

impl fmt::Display for EnvironmentReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.outcome {
            EnvironmentOutcome::Planned => writeln!(f, "environment not yet set")?,
            EnvironmentOutcome::Applied => writeln!(f, "environment set")?,
            EnvironmentOutcome::AlreadyApplied => {
                writeln!(f, "environment unchanged: it was set before")?
            }
            EnvironmentOutcome::OtherThreads { threads } => writeln!(
                f,
                "environment unchanged: the process has {threads} threads, set it before starting any"
            )?,
            EnvironmentOutcome::TooLate { loaded } => writeln!(
                f,
                "environment unchanged: {} is already loaded and would not see it",
                loaded.display()
            )?,
        }
        for variable in &self.set {
            writeln!(
                f,
                "  {}={} ({})",
                variable.name, variable.value, variable.reason
            )?;
        }
        for kept in &self.kept {
            let value = kept.value.to_string_lossy();
            writeln!(
                f,
                "  {}={value} was set by the user (proposed: {})",
                kept.name, kept.proposed
            )?;
        }
        Ok(())
    }
}

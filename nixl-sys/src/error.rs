//! What can go wrong when the library is loaded and when it is called.

use std::ffi::CString;
use std::path::PathBuf;

use crate::Status;

/// Why the library could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// There is no `libnixl_capi.so` in any of the places looked at.
    #[error(
        "no libnixl_capi.so found; looked at: {}. Install NIXL (for example the Python package nixl-cu12) \
         or give the path of libnixl_capi.so", list(.searched)
    )]
    NotFound {
        /// Every place looked at, in order.
        searched: Vec<PathBuf>,
    },

    /// More than one installation was found where one was expected.
    #[error("more than one NIXL found: {}. Give the path of the libnixl_capi.so that is meant", list(.candidates))]
    Ambiguous {
        /// The libraries found.
        candidates: Vec<PathBuf>,
    },

    /// The file exists but is not a shared library for this machine.
    #[error("{} is not a shared library: {reason}. Give the path of libnixl_capi.so", path.display())]
    NotALibrary {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// The dynamic linker refused the library, most often because a library beside it is missing.
    #[error(
        "cannot load {}: {reason}. The library must stay inside the installation it came with: \
         give its path there instead of a copy", path.display()
    )]
    DynamicLinker {
        /// The library.
        path: PathBuf,
        /// The dynamic linker's words.
        reason: String,
    },

    /// The library lacks functions that every supported NIXL version has.
    #[error("{} lacks {}: it is older than NIXL 1.4 or not NIXL. Install NIXL 1.4 or newer", path.display(), functions.join(", "))]
    MissingFunctions {
        /// The library.
        path: PathBuf,
        /// The functions it lacks.
        functions: Vec<&'static str>,
    },

    /// The library is a stub with no NIXL behind it.
    #[error("{} is a stub with no NIXL behind it. Give the path of a real libnixl_capi.so", path.display())]
    Stub {
        /// The library.
        path: PathBuf,
    },

    /// The folder with NIXL's backend plugins is missing or has none.
    #[error(
        "no NIXL plugins in {}: no backend could be created. Reinstall NIXL, or set NIXL_PLUGIN_DIR to the folder \
         that has libplugin_UCX.so", dir.display()
    )]
    PluginsMissing {
        /// Where they should be.
        dir: PathBuf,
    },

    /// The folder with UCX's transport modules is missing or has none: UCX would quietly fall back to TCP.
    #[error(
        "no UCX modules in {}: UCX would use TCP for everything without a word. Reinstall NIXL, or set \
         UCX_MODULE_DIR to the folder that has libuct_ib.so and libuct_cma.so", dir.display()
    )]
    UcxModulesMissing {
        /// Where they should be.
        dir: PathBuf,
    },

    /// NIXL could not look for its configuration file: every agent creation would fail without a reason.
    #[error(
        "NIXL cannot read {}: {reason}; it would refuse to create any agent. Set HOME to a folder this user can \
         read, or NIXL_CONFIG_FILE to a file that is there; it may be empty", path.display()
    )]
    UnreadableConfig {
        /// The configuration file NIXL looks for.
        path: PathBuf,
        /// Why it cannot be looked at.
        reason: String,
    },

    /// Another NIXL is already loaded in this process; the two would be mixed up.
    #[error(
        "another NIXL is already loaded in this process from {}, asked for {}. Use that one, or a process of its own",
        loaded.display(), requested.display()
    )]
    OtherLoaded {
        /// The folder of the NIXL in the process.
        loaded: PathBuf,
        /// The library asked for.
        requested: PathBuf,
    },

    /// The file system refused to let us look.
    #[error("cannot look at {}: {source}. Check the path and its permissions", path.display())]
    Io {
        /// What was looked at.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
}

/// Why a call of a NIXL function gave no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// NIXL refused or failed.
    #[error("{function} failed: {status} ({raw})")]
    Failed {
        /// The function called.
        function: &'static str,
        /// What it answered.
        status: Status,
        /// The number behind `status`, as `function` gave it.
        raw: i32,
    },

    /// The loaded NIXL does not have the function.
    #[error("the loaded NIXL has no {function}: it needs NIXL {since} or newer")]
    Unsupported {
        /// The function asked for.
        function: &'static str,
        /// The first NIXL version that has it.
        since: &'static str,
    },

    /// An argument cannot be handed to NIXL.
    #[error("bad {argument}: {reason}")]
    BadArgument {
        /// Which argument.
        argument: &'static str,
        /// What is wrong with it.
        reason: String,
    },

    /// NIXL reported success and gave nothing.
    #[error(
        "{function} reported success without a result: this is a bug in NIXL, please report it"
    )]
    NoResult {
        /// The function called.
        function: &'static str,
    },
}

impl CallError {
    /// The status NIXL answered, if it was asked.
    pub fn status(&self) -> Option<Status> {
        match self {
            Self::Failed { status, .. } => Some(*status),
            _ => None,
        }
    }

    /// The number NIXL answered, if it was asked.
    pub fn raw(&self) -> Option<i32> {
        match self {
            Self::Failed { raw, .. } => Some(*raw),
            _ => None,
        }
    }
}

/// Turns a string into one NIXL can take; `argument` names it in the error.
pub fn c_string(argument: &'static str, value: &str) -> Result<CString, CallError> {
    CString::new(value).map_err(|e| CallError::BadArgument {
        argument,
        reason: format!("it has a NUL byte at {}", e.nul_position()),
    })
}

fn list(paths: &[PathBuf]) -> String {
    let paths: Vec<_> = paths.iter().map(|p| p.display().to_string()).collect();
    paths.join(", ")
}

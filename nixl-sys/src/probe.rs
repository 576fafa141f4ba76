//! What the probes of libfabric and UCX have in common.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library as DynamicLibrary, RTLD_LOCAL, RTLD_NOW};

/// Why a library could not be asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// There is no such library.
    #[error("{} is not there: {reason}", library.display())]
    Missing {
        /// The library.
        library: PathBuf,
        /// Who says so, in their words.
        reason: String,
    },

    /// The file is something else.
    #[error("{} is not a shared library: {reason}", library.display())]
    NotALibrary {
        /// The file.
        library: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// The dynamic linker refused it, most often because a library that it needs is missing.
    #[error("{} cannot be loaded: {reason}", library.display())]
    DynamicLinker {
        /// The library.
        library: PathBuf,
        /// The dynamic linker's words.
        reason: String,
    },

    /// It lacks a function: it is something else under that name, or far too old.
    #[error("{} has no {function}: it is not what its name says, or far too old", library.display())]
    MissingFunction {
        /// The library.
        library: PathBuf,
        /// What it lacks.
        function: &'static str,
    },

    /// It is too old to be asked.
    #[error("{} is version {found}, at least {needed} is needed", library.display())]
    TooOld {
        /// The library.
        library: PathBuf,
        /// Its version.
        found: String,
        /// The oldest that will do.
        needed: String,
    },

    /// It was asked and failed.
    #[error("{function} of {} failed ({status})", library.display())]
    Failed {
        /// The library.
        library: PathBuf,
        /// What failed.
        function: &'static str,
        /// The library's status.
        status: i32,
    },
}

/// Tells a text file or a folder from a library before the dynamic linker puts it in its own words.
pub(crate) fn refuse_other_files(library: &Path) -> Result<(), ProbeError> {
    let path = library.to_path_buf();
    let not_a_library = |path, reason: &str| {
        Err(ProbeError::NotALibrary {
            library: path,
            reason: reason.to_owned(),
        })
    };
    let mut magic = [0; 4];
    match File::open(library).and_then(|mut file| file.read_exact(&mut magic)) {
        Ok(()) if magic == *b"\x7fELF" => Ok(()),
        Ok(()) => not_a_library(path, "it is not an ELF file"),
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
            not_a_library(path, "it is shorter than four bytes")
        }
        Err(e) if e.kind() == io::ErrorKind::IsADirectory => not_a_library(path, "it is a folder"),
        Err(e) => Err(ProbeError::Missing {
            library: path,
            reason: e.to_string(),
        }),
    }
}

/// The dynamic linker's refusal. It has no codes, only words.
pub(crate) fn not_loaded(library: &Path, error: &libloading::Error) -> ProbeError {
    let reason = match std::error::Error::source(error) {
        Some(source) => source.to_string(),
        None => error.to_string(),
    };
    let library = library.to_path_buf();
    // Of a library that this one needs, the linker says the same with that one's name in front.
    let itself = format!("{}: cannot open shared object file", library.display());
    if reason.starts_with(&itself) {
        ProbeError::Missing { library, reason }
    } else {
        ProbeError::DynamicLinker { library, reason }
    }
}

/// Loads a library to stay, so that whatever needs one of its name later gets this one. `library` is a file, or a bare name
/// to be searched for as the dynamic linker does.
///
/// Loading runs its initialisers, so it must be as trusted as the program.
///
/// # Errors
/// [`ProbeError`], which tells a library that is missing from one that does not load.
pub fn preload(library: &Path) -> Result<(), ProbeError> {
    if library.components().count() > 1 {
        refuse_other_files(library)?;
    }
    load_to_stay(library)
}

/// Whether the dynamic linker takes one of NIXL's plugins, with all that it needs. NIXL itself says only that there is no
/// such backend.
///
/// It stays loaded until the process ends. Loading runs its initialisers, so it must be as trusted as the program.
///
/// # Errors
/// [`ProbeError`], which names what is missing or too old.
pub fn plugin_loads(plugin: &Path) -> Result<(), ProbeError> {
    refuse_other_files(plugin)?;
    load_to_stay(plugin)
}

fn load_to_stay(library: &Path) -> Result<(), ProbeError> {
    // SAFETY: this runs the initialisers of the library and of what it needs, which touch nothing of Rust's; that the path
    // is to be trusted is what the caller answers for.
    let handle = unsafe { DynamicLibrary::open(Some(library), RTLD_NOW | RTLD_LOCAL) }
        .map_err(|error| not_loaded(library, &error))?;
    // Plugins have threads and cannot be unloaded.
    std::mem::forget(handle);
    Ok(())
}

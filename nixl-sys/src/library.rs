//! Opening the library.

use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::os::unix::{Library as DynamicLibrary, RTLD_LOCAL, RTLD_NOW};

use crate::bindings::NixlCapi;
use crate::disconnect::DetailedStatus;
use crate::discovery::{self, Layout};
use crate::error::LoadError;
use crate::process::mapped_libraries;
use crate::report::{Finding, LoadReport, VersionFamily};
use crate::symbols;

/// A loaded NIXL.
///
/// It stays loaded until the process ends, also when every `Library` is dropped: its plugins start threads and cannot
/// be unloaded.
///
/// # Safety of the calls
///
/// The methods are as unsafe as the C functions they are named after. Whoever calls one promises that
///
/// - every handle came from this library and was not destroyed, released or given to a destroying call since;
/// - what a handle was made from, above all its agent, is still there, where NIXL keeps pointing at it;
/// - no other thread uses the same handle at the same time, save an agent made with a
///   [`ThreadSync`](crate::ThreadSync) that allows it;
/// - memory that is registered, or that a posted transfer reads or writes, stays mapped, and is not otherwise used by
///   Rust code, until the transfer has ended or its agent is destroyed.
pub struct Library {
    symbols: ManuallyDrop<NixlCapi>,
    pub(crate) detailed: DetailedStatus,
    report: LoadReport,
}

impl Library {
    /// Loads the library at `path`, refusing installations that would only half work.
    ///
    /// `path` is the library itself; [`find_in`](crate::find_in) finds it in an installation. Loading runs the
    /// library's initialisers, so a path must be as trusted as the program itself.
    pub fn open(path: &Path) -> Result<Arc<Self>, LoadError> {
        OpenOptions::new().open(path)
    }

    /// What was found when it was opened.
    pub fn report(&self) -> &LoadReport {
        &self.report
    }

    pub(crate) fn symbols(&self) -> &NixlCapi {
        &self.symbols
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library")
            .field("report", &self.report)
            .finish_non_exhaustive()
    }
}

/// What an installation may lack.
#[derive(Clone, Debug)]
#[must_use]
pub struct OpenOptions {
    allow_missing_plugins: bool,
    allow_missing_ucx_modules: bool,
    allow_unreadable_config: bool,
    detailed_status: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl OpenOptions {
    /// Refuses everything that would only half work.
    pub fn new() -> Self {
        Self {
            allow_missing_plugins: false,
            allow_missing_ucx_modules: false,
            allow_unreadable_config: false,
            detailed_status: true,
        }
    }

    /// Whether plugins may be missing; then no backend can be created. A finding if so.
    pub fn allow_missing_plugins(mut self, allow: bool) -> Self {
        self.allow_missing_plugins = allow;
        self
    }

    /// Whether UCX's modules may be missing; then UCX quietly uses TCP for everything. A finding if so.
    pub fn allow_missing_ucx_modules(mut self, allow: bool) -> Self {
        self.allow_missing_ucx_modules = allow;
        self
    }

    /// Whether NIXL's configuration file may be out of reach; then no agent can be created. A finding if so.
    pub fn allow_unreadable_config(mut self, allow: bool) -> Self {
        self.allow_unreadable_config = allow;
        self
    }

    /// Whether [`Library::xfer_status_detailed`] may call the C++ agent behind the C interface. On by default.
    pub fn detailed_status(mut self, wanted: bool) -> Self {
        self.detailed_status = wanted;
        self
    }

    /// Loads the library at `path`; see [`Library::open`].
    pub fn open(&self, path: &Path) -> Result<Arc<Library>, LoadError> {
        let library = discovery::real_path(path)?;
        let mut findings = Vec::new();
        refuse_other_files(&library)?;
        refuse_second_nixl(&library)?;

        let layout = Layout::of(&library);
        let (plugins_dir, plugins) = self.check_plugins(&library, &mut findings)?;
        let (ucx_modules_dir, ucx_modules) = self.check_ucx_modules(&layout, &mut findings)?;
        self.check_config(&mut findings)?;

        let handle = dlopen(&library)?;
        let detailed = DetailedStatus::look_up(&handle, self.detailed_status);
        if self.detailed_status && !detailed.is_available() {
            findings.push(Finding::NoDetailedStatus);
        }
        let symbols = resolve(handle, &library)?;

        let missing_functions = symbols::missing_optional(&symbols);
        let report = LoadReport {
            requested: path.to_path_buf(),
            family: family(&missing_functions),
            version: layout.version(),
            layout,
            missing_functions,
            detailed_status: detailed.is_available(),
            plugins_dir,
            plugins,
            ucx_modules_dir,
            ucx_modules,
            environment: environment(),
            findings,
            library,
        };
        let library = Library {
            symbols,
            detailed,
            report,
        };
        if library.is_stub().unwrap_or(false) {
            return Err(LoadError::Stub {
                path: library.report.library,
            });
        }
        Ok(Arc::new(library))
    }

    fn check_plugins(
        &self,
        library: &Path,
        findings: &mut Vec<Finding>,
    ) -> Result<(PathBuf, Vec<String>), LoadError> {
        let dir = match std::env::var_os("NIXL_PLUGIN_DIR") {
            Some(dir) => PathBuf::from(dir),
            None => library.parent().unwrap_or(Path::new("/")).join("plugins"),
        };
        let plugins = discovery::plugins_in(&dir);
        if plugins.is_empty() {
            if !self.allow_missing_plugins {
                return Err(LoadError::PluginsMissing { dir });
            }
            findings.push(Finding::PluginsMissing(dir.clone()));
        }
        Ok((dir, plugins))
    }

    fn check_ucx_modules(
        &self,
        layout: &Layout,
        findings: &mut Vec<Finding>,
    ) -> Result<(Option<PathBuf>, Vec<String>), LoadError> {
        // UCX looks beside itself and in the folder that the variable names.
        let own = layout.ucx_modules();
        let named = std::env::var_os("UCX_MODULE_DIR").map(PathBuf::from);
        for dir in own.iter().chain(&named) {
            let modules = discovery::ucx_modules_in(dir);
            if !modules.is_empty() {
                return Ok((Some(dir.clone()), modules));
            }
        }
        let Some(dir) = own else {
            findings.push(Finding::UcxModulesUnchecked);
            return Ok((None, Vec::new()));
        };
        if !self.allow_missing_ucx_modules {
            return Err(LoadError::UcxModulesMissing { dir });
        }
        findings.push(Finding::UcxModulesMissing(dir.clone()));
        Ok((Some(dir), Vec::new()))
    }

    fn check_config(&self, findings: &mut Vec<Finding>) -> Result<(), LoadError> {
        let explicit = std::env::var_os("NIXL_CONFIG_FILE");
        let home = std::env::var_os("HOME");
        let Some((path, reason)) = unreadable_config(explicit.as_deref(), home.as_deref()) else {
            return Ok(());
        };
        if !self.allow_unreadable_config {
            return Err(LoadError::UnreadableConfig { path, reason });
        }
        findings.push(Finding::UnreadableConfig(path, reason));
        Ok(())
    }
}

/// The configuration file over which NIXL would stumble, and why.
///
/// A file that is named has to be there. Of the two usual places NIXL takes the first that has one, and an error other
/// than "not there" makes it give up.
fn unreadable_config(explicit: Option<&OsStr>, home: Option<&OsStr>) -> Option<(PathBuf, String)> {
    if let Some(explicit) = explicit {
        let path = PathBuf::from(explicit);
        let error = File::open(&path).err()?;
        return Some((path, error.to_string()));
    }
    let usual = home.map(|home| Path::new(home).join(".nixl.cfg"));
    for path in usual.into_iter().chain([PathBuf::from("/etc/nixl.cfg")]) {
        match File::open(&path) {
            Ok(_) => return None,
            Err(e) if not_there(&e) => {}
            Err(e) => return Some((path, e.to_string())),
        }
    }
    None
}

fn not_there(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}

/// The dynamic linker's own words for a text file or a truncated download help nobody.
fn refuse_other_files(library: &Path) -> Result<(), LoadError> {
    let path = library.to_path_buf();
    let mut magic = [0; 4];
    let result = File::open(library).and_then(|mut file| file.read_exact(&mut magic));
    match result {
        Ok(()) if magic == *b"\x7fELF" => Ok(()),
        Ok(()) => Err(LoadError::NotALibrary {
            path,
            reason: "it is not an ELF file".into(),
        }),
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Err(LoadError::NotALibrary {
            path,
            reason: "it is shorter than four bytes".into(),
        }),
        Err(e) if e.kind() == io::ErrorKind::IsADirectory => Err(LoadError::NotALibrary {
            path,
            reason: "it is a folder".into(),
        }),
        Err(source) => Err(LoadError::Io { path, source }),
    }
}

/// The linker takes a `libnixl.so` that is already there for any other of that name: two versions would be mixed.
fn refuse_second_nixl(library: &Path) -> Result<(), LoadError> {
    let wanted = library.parent();
    for loaded in mapped_libraries(&["libnixl.so"]) {
        let real = std::fs::canonicalize(&loaded).unwrap_or(loaded);
        if real.parent() != wanted {
            return Err(LoadError::OtherLoaded {
                loaded: real,
                requested: library.to_path_buf(),
            });
        }
    }
    Ok(())
}

fn dlopen(library: &Path) -> Result<DynamicLibrary, LoadError> {
    // SAFETY: this runs the initialisers of the library and of what it needs. `open` makes the caller answer for the
    // path, and NIXL's own initialisers touch nothing of Rust's.
    unsafe { DynamicLibrary::open(Some(library), RTLD_NOW | RTLD_LOCAL) }.map_err(|e| {
        LoadError::DynamicLinker {
            path: library.to_path_buf(),
            reason: linker_message(&e),
        }
    })
}

fn linker_message(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => source.to_string(),
        None => error.to_string(),
    }
}

fn resolve(handle: DynamicLibrary, library: &Path) -> Result<ManuallyDrop<NixlCapi>, LoadError> {
    let dynamic_linker = |e: libloading::Error| LoadError::DynamicLinker {
        path: library.to_path_buf(),
        reason: linker_message(&e),
    };
    // SAFETY: the symbols are looked up by the names that NIXL gives to the functions of the declared types. That no
    // other library uses those names is what the caller answers for.
    let symbols = unsafe { NixlCapi::from_library(handle) }.map_err(dynamic_linker)?;
    // Never closed, not even when it is refused below: see `Library`.
    let symbols = ManuallyDrop::new(symbols);
    let functions = symbols::missing_required(&symbols);
    if !functions.is_empty() {
        return Err(LoadError::MissingFunctions {
            path: library.to_path_buf(),
            functions,
        });
    }
    Ok(symbols)
}

fn family(missing: &[&'static str]) -> VersionFamily {
    if missing.is_empty() {
        VersionFamily::V1_5
    } else if missing.len() == symbols::FUNCTIONS_SINCE_1_5.len() {
        VersionFamily::V1_4
    } else {
        VersionFamily::Between
    }
}

fn environment() -> Vec<(String, String)> {
    let mut variables: Vec<(String, String)> = std::env::vars_os()
        .map(|(name, value)| {
            (
                name.to_string_lossy().into_owned(),
                value.to_string_lossy().into_owned(),
            )
        })
        .filter(|(name, _)| {
            ["NIXL_", "UCX_", "FI_"]
                .iter()
                .any(|prefix| name.starts_with(prefix))
        })
        .collect();
    variables.sort();
    variables
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_home_without_configuration_is_fine() {
        let home = tempfile::tempdir().unwrap();
        assert_eq!(unreadable_config(None, Some(home.path().as_os_str())), None);
        assert_eq!(
            unreadable_config(None, Some(OsStr::new("/does/not/exist"))),
            None
        );
        assert_eq!(unreadable_config(None, None), None);
    }

    #[test]
    fn a_home_that_cannot_be_looked_at_is_reported() {
        // A loop of links is refused also to root, unlike a folder without permissions.
        let home = tempfile::tempdir().unwrap();
        let config = home.path().join(".nixl.cfg");
        std::os::unix::fs::symlink(&config, &config).unwrap();
        let (path, reason) = unreadable_config(None, Some(home.path().as_os_str())).unwrap();
        assert_eq!(path, config);
        assert!(!reason.is_empty());
    }

    #[test]
    fn a_named_configuration_has_to_be_there() {
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join("nixl.cfg");
        assert_eq!(
            unreadable_config(Some(file.as_os_str()), None).unwrap().0,
            file
        );
        std::fs::write(&file, "").unwrap();
        assert_eq!(unreadable_config(Some(file.as_os_str()), None), None);
    }

    #[test]
    fn the_family_shows_in_what_is_missing() {
        assert_eq!(family(&[]), VersionFamily::V1_5);
        assert_eq!(family(symbols::FUNCTIONS_SINCE_1_5), VersionFamily::V1_4);
        assert_eq!(
            family(&symbols::FUNCTIONS_SINCE_1_5[..3]),
            VersionFamily::Between
        );
    }
}

//! Which NIXL library the tool loads: the one that the environment names, else the one that was found
//! when the tool was built.

use std::env;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kv_xfer::descriptor::{ClusterKey, KeyError};
use kv_xfer::fabric::{LIBFABRIC, Unmet};
use kv_xfer::transport::TransportError;
use kv_xfer::transport::nixl::{BackendConfig, NixlTransport};
use nixl_sys::{Library, LoadError};
use thiserror::Error;

use crate::libfabric::{self, ProvideError};

#[path = "../build/locate.rs"]
mod locate;

pub use locate::LIBRARY;

/// Where the library is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NixlRuntime {
    /// The library file, symbolic links resolved.
    pub library: PathBuf,
    /// Its version, as far as its package or its functions tell.
    pub version: String,
    /// What named it, for reports.
    pub named_by: &'static str,
}

/// There is no NIXL library.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("no NIXL runtime found. Looked at:\n{}\nWhat helps: {help}", list(.searched))]
pub struct NoNixl {
    /// A line for each place that was looked at.
    pub searched: Vec<String>,
    /// The command that helps.
    pub help: String,
}

fn list(searched: &[String]) -> String {
    let lines: Vec<_> = searched.iter().map(|line| format!("  - {line}")).collect();
    lines.join("\n")
}

/// What is known about places when the tool runs.
struct Places {
    kvx_nixl_dir: Option<PathBuf>,
    nixl_prefix: Option<PathBuf>,
    /// The version that `KVX_NIXL_VERSION` asks for.
    wanted: Option<String>,
    /// Found at build time; empty when there was none.
    built_with: PathBuf,
    /// What the build looked at in vain.
    build_search: Vec<String>,
    help: String,
}

/// Why NIXL cannot be used.
#[derive(Debug, Error)]
pub enum OpenError {
    /// It is not there.
    #[error(transparent)]
    Missing(#[from] NoNixl),
    /// It does not load.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// What is required to carry the bytes is not here.
    #[error(transparent)]
    Unmet(#[from] Unmet),
    /// It has no such backend.
    #[error(transparent)]
    Backend(#[from] TransportError),
    /// What the LIBFABRIC backend links is not here.
    #[error(transparent)]
    Libfabric(#[from] ProvideError),
    /// The environment's cluster key is none.
    #[error(transparent)]
    Key(#[from] KeyError),
}

/// The cluster key of every engine that the tool starts: from `KVX_CLUSTER_KEY` or the file that
/// `KVX_CLUSTER_KEY_FILE` names; never from the command line, which every user of a machine can see.
///
/// # Errors
/// [`OpenError::Key`].
pub fn cluster_key() -> Result<Option<ClusterKey>, OpenError> {
    Ok(ClusterKey::from_env()?)
}

/// Finds and loads the library, for a backend. What LIBFABRIC links is [provided](libfabric::provide) first.
///
/// # Errors
/// [`OpenError`], which says what would help.
pub fn open(backend: impl Into<BackendConfig>) -> Result<Arc<NixlTransport>, OpenError> {
    let backend = backend.into();
    let runtime = resolve()?;
    if backend.name == LIBFABRIC
        && let Err(error) = libfabric::provide()
    {
        // What is missing is said again where it is missed.
        tracing::warn!("{error}");
    }
    let library = Library::open(&runtime.library)?;
    Ok(Arc::new(NixlTransport::new(library, backend)?))
}

/// Finds the library.
///
/// # Errors
/// [`NoNixl`], with the places that were looked at and the command that helps.
pub fn resolve() -> Result<NixlRuntime, NoNixl> {
    let variable = |name| {
        env::var_os(name)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    resolve_in(&Places {
        kvx_nixl_dir: variable("KVX_NIXL_DIR"),
        nixl_prefix: variable("NIXL_PREFIX"),
        wanted: env::var("KVX_NIXL_VERSION").ok().filter(|v| !v.is_empty()),
        built_with: PathBuf::from(env!("KVX_NIXL_LIB_DIR")),
        build_search: env!("KVX_NIXL_SEARCH")
            .split('\t')
            .filter(|line| !line.is_empty())
            .map(str::to_owned)
            .collect(),
        help: format!(
            "{}, then build again; or set KVX_NIXL_DIR to the folder of {LIBRARY}",
            env!("KVX_NIXL_HELP")
        ),
    })
}

fn resolve_in(places: &Places) -> Result<NixlRuntime, NoNixl> {
    let mut searched = Vec::new();
    let mut look = |named_by: &'static str, root: &Path, wanted: Option<&str>| {
        let why = match locate::find_in(root) {
            None => format!("no {LIBRARY} there"),
            Some(found) if !found.version.is_supported() => {
                format!("NIXL {} is older than 1.4", found.version)
            }
            Some(found) => match wanted {
                Some(wanted) if !found.version.can_be(wanted) => format!(
                    "NIXL {}, but KVX_NIXL_VERSION asks for {wanted}",
                    found.version
                ),
                _ => {
                    return Some(NixlRuntime {
                        library: found.dir.join(LIBRARY),
                        version: found.version.to_string(),
                        named_by,
                    });
                }
            },
        };
        searched.push(format!("{named_by} {}: {why}", root.display()));
        None
    };
    let wanted = places.wanted.as_deref();
    if let Some(dir) = &places.kvx_nixl_dir {
        // Said in so many words: nothing else is used while it is set.
        return look("KVX_NIXL_DIR", dir, None).ok_or_else(|| NoNixl {
            searched,
            help: "set KVX_NIXL_DIR to the folder of libnixl_capi.so or unset it".to_owned(),
        });
    }
    let found = places
        .nixl_prefix
        .as_deref()
        .and_then(|prefix| look("NIXL_PREFIX", prefix, wanted))
        .or_else(|| {
            let dir = Some(places.built_with.as_path()).filter(|dir| !dir.as_os_str().is_empty());
            dir.and_then(|dir| look("found when built", dir, wanted))
        });
    found.ok_or_else(|| {
        searched.extend(
            places
                .build_search
                .iter()
                .map(|line| format!("at build: {line}")),
        );
        NoNixl {
            searched,
            help: places.help.clone(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(built_with: &Path) -> Places {
        Places {
            kvx_nixl_dir: None,
            nixl_prefix: None,
            wanted: None,
            built_with: built_with.to_path_buf(),
            build_search: vec!["install prefix /x: nothing there".into()],
            help: "do this".into(),
        }
    }

    fn library() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join(LIBRARY), b"").unwrap();
        root
    }

    #[test]
    fn the_environment_comes_before_what_the_build_found() {
        let (built, prefix, dir) = (library(), library(), library());
        let mut places = places(built.path());
        let named_by = |places: &Places| resolve_in(places).unwrap().named_by;
        assert_eq!(named_by(&places), "found when built");
        places.nixl_prefix = Some(prefix.path().into());
        assert_eq!(named_by(&places), "NIXL_PREFIX");
        places.kvx_nixl_dir = Some(dir.path().into());
        assert_eq!(named_by(&places), "KVX_NIXL_DIR");
    }

    #[test]
    fn nothing_replaces_a_folder_that_was_asked_for() {
        let built = library();
        let mut places = places(built.path());
        places.kvx_nixl_dir = Some("/nowhere/nixl".into());
        let text = resolve_in(&places).unwrap_err().to_string();
        assert!(
            text.contains("KVX_NIXL_DIR /nowhere/nixl: no libnixl_capi.so there"),
            "{text}"
        );
        assert!(text.contains("unset it"), "{text}");
    }

    #[test]
    fn a_library_of_another_version_is_passed_over() {
        let (built, prefix) = (library(), library());
        std::fs::write(
            prefix.path().join(LIBRARY),
            b"nixl_capi_prep_mem_view_local",
        )
        .unwrap();
        let mut places = places(built.path());
        places.nixl_prefix = Some(prefix.path().into());
        places.wanted = Some("1.4.1".into());
        assert_eq!(resolve_in(&places).unwrap().named_by, "found when built");
        places.wanted = Some("1.5.1".into());
        assert_eq!(resolve_in(&places).unwrap().named_by, "NIXL_PREFIX");
        places.nixl_prefix = None;
        let text = resolve_in(&places).unwrap_err().to_string();
        assert!(text.contains("KVX_NIXL_VERSION asks for 1.5.1"), "{text}");
    }

    #[test]
    fn a_miss_lists_every_place_and_the_command_that_helps() {
        let mut places = places(Path::new("/gone/nixl"));
        places.nixl_prefix = Some("/nowhere/nixl".into());
        let text = resolve_in(&places).unwrap_err().to_string();
        for part in [
            "NIXL_PREFIX /nowhere/nixl",
            "found when built /gone/nixl",
            "at build: install prefix /x",
            "What helps: do this",
        ] {
            assert!(text.contains(part), "{text}");
        }
        places.built_with = PathBuf::new();
        assert_eq!(resolve_in(&places).unwrap_err().searched.len(), 2);
    }
}

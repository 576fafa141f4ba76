//! Where NIXL lies on disk, and what lies beside it.

use std::env::consts::ARCH;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::LoadError;

/// File name of the library.
pub const LIBRARY_NAME: &str = "libnixl_capi.so";

/// Suffix of the folder in which Python wheels carry the library: `.nixl_cu12.mesonpy.libs`.
const WHEEL_SUFFIX: &str = ".mesonpy.libs";

/// Finds the library in `place`.
///
/// `place` may be the library itself, the folder it is in, a folder with Python packages, an unpacked wheel, or an
/// installation prefix. Nothing else is searched: no environment variable and no system folder.
pub fn find_in(place: &Path) -> Result<PathBuf, LoadError> {
    if is_file(place)? {
        return Ok(place.to_path_buf());
    }
    let mut folders = vec![place.to_path_buf()];
    folders.extend(wheel_folders(place)?);
    folders.push(place.join("lib").join(format!("{ARCH}-linux-gnu")));
    folders.push(place.join("lib64"));
    folders.push(place.join("lib"));

    let searched: Vec<PathBuf> = folders.iter().map(|f| f.join(LIBRARY_NAME)).collect();
    let mut found: Vec<PathBuf> = Vec::new();
    let mut real: Vec<PathBuf> = Vec::new();
    for candidate in &searched {
        if !is_file(candidate)? {
            continue;
        }
        // `lib` and `lib64` are often the same folder.
        let target = real_path(candidate)?;
        if !real.contains(&target) {
            real.push(target);
            found.push(candidate.clone());
        }
    }
    match (found.len(), found.pop()) {
        (1, Some(library)) => Ok(library),
        (_, None) => Err(LoadError::NotFound { searched }),
        (_, Some(last)) => {
            found.push(last);
            Err(LoadError::Ambiguous { candidates: found })
        }
    }
}

/// How an installation is laid out.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Layout {
    /// A Python wheel, which carries its own UCX.
    Wheel {
        /// The folder with Python packages.
        root: PathBuf,
        /// The wheel's package, such as `nixl_cu12`.
        package: String,
    },
    /// Anything else: UCX comes from elsewhere.
    Other,
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wheel { root, package } => write!(f, "wheel {package} in {}", root.display()),
            Self::Other => f.write_str("not a wheel"),
        }
    }
}

impl Layout {
    /// The layout around a library whose real path is `library`.
    pub(crate) fn of(library: &Path) -> Self {
        let wheel = || {
            let folder = library.parent()?;
            let package = folder
                .file_name()?
                .to_str()?
                .strip_prefix('.')?
                .strip_suffix(WHEEL_SUFFIX)?;
            Some(Self::Wheel {
                root: folder.parent()?.to_path_buf(),
                package: package.to_owned(),
            })
        };
        wheel().unwrap_or(Self::Other)
    }

    /// The exact version, where the installation says it.
    pub(crate) fn version(&self) -> Option<String> {
        let Self::Wheel { root, package } = self else {
            return None;
        };
        let prefix = format!("{package}-");
        names_in(root).ok()?.into_iter().find_map(|name| {
            let version = name.strip_prefix(&prefix)?.strip_suffix(".dist-info")?;
            Some(version.to_owned())
        })
    }

    /// Where the UCX of this installation keeps its modules, if it is known.
    pub(crate) fn ucx_modules(&self) -> Option<PathBuf> {
        match self {
            Self::Wheel { root, package } => Some(root.join(format!("{package}.libs")).join("ucx")),
            Self::Other => None,
        }
    }
}

/// Names of the backend plugins in a folder; none where it cannot be read.
pub(crate) fn plugins_in(dir: &Path) -> Vec<String> {
    stems_in(dir, "libplugin_")
}

/// Names of the UCX transport modules in a folder; none where it cannot be read.
pub(crate) fn ucx_modules_in(dir: &Path) -> Vec<String> {
    stems_in(dir, "libuct_")
}

/// The path with every symbolic link resolved.
pub(crate) fn real_path(path: &Path) -> Result<PathBuf, LoadError> {
    std::fs::canonicalize(path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => LoadError::NotFound {
            searched: vec![path.to_path_buf()],
        },
        _ => LoadError::Io {
            path: path.to_path_buf(),
            source,
        },
    })
}

fn wheel_folders(root: &Path) -> Result<Vec<PathBuf>, LoadError> {
    let names = match names_in(root) {
        Ok(names) => names,
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            Vec::new()
        }
        Err(source) => {
            return Err(LoadError::Io {
                path: root.to_path_buf(),
                source,
            });
        }
    };
    let wheels = names
        .into_iter()
        .filter(|n| n.starts_with(".nixl") && n.ends_with(WHEEL_SUFFIX));
    Ok(wheels.map(|n| root.join(n)).collect())
}

fn is_file(path: &Path) -> Result<bool, LoadError> {
    match std::fs::metadata(path) {
        Ok(metadata) => Ok(metadata.is_file()),
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            Ok(false)
        }
        Err(source) => Err(LoadError::Io {
            path: path.to_path_buf(),
            source,
        }),
    }
}

/// `libuct_cma.so.0.0.0` with prefix `libuct_` gives `cma`.
fn stems_in(dir: &Path, prefix: &str) -> Vec<String> {
    let mut stems: Vec<String> = names_in(dir)
        .unwrap_or_default()
        .iter()
        .filter_map(|name| {
            let (stem, _) = name.strip_prefix(prefix)?.split_once(".so")?;
            Some(stem.to_owned())
        })
        .collect();
    stems.dedup();
    stems
}

fn names_in(dir: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        if let Ok(name) = entry?.file_name().into_string() {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

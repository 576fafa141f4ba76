//! Where a NIXL runtime may lie, and which version it is. Shared by the build script, which looks at
//! build time, and by the tool, which looks again at run time.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// The library that the C interface of NIXL comes in.
pub const LIBRARY: &str = "libnixl_capi.so";

/// A function that came with 1.5: tells a library without version information apart.
const SINCE_1_5: &[u8] = b"nixl_capi_prep_mem_view_local";

/// What is known about a library's version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Version {
    /// Named by the package that it belongs to.
    Exact(String),
    /// No package says so, but it has the functions of 1.5.
    Since15,
    /// No package says so, and it lacks the functions of 1.5.
    Before15,
}

impl Version {
    /// Whether it can be `wanted`, such as "1.4.1".
    pub fn can_be(&self, wanted: &str) -> bool {
        match self {
            Self::Exact(version) => version == wanted,
            Self::Since15 => minor(wanted).is_some_and(|v| v >= (1, 5)),
            Self::Before15 => minor(wanted).is_some_and(|v| v < (1, 5)),
        }
    }

    /// Whether it is at least 1.4, the oldest that is known to work.
    pub fn is_supported(&self) -> bool {
        match self {
            Self::Exact(version) => minor(version).is_none_or(|v| v >= (1, 4)),
            Self::Since15 | Self::Before15 => true,
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exact(version) => version,
            Self::Since15 => "1.5 or newer",
            Self::Before15 => "older than 1.5",
        })
    }
}

fn minor(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// A library that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The folder that holds it, symbolic links resolved: NIXL finds its plugins relative to that.
    pub dir: PathBuf,
    /// What its version is known to be.
    pub version: Version,
}

/// Looks for the library in `root`: a folder that holds it, an install prefix, or a Python
/// site-packages folder (also an unpacked wheel).
pub fn find_in(root: &Path) -> Option<Found> {
    let dir = candidates(root)
        .into_iter()
        .find(|dir| dir.join(LIBRARY).is_file())?;
    let file = fs::canonicalize(dir.join(LIBRARY)).ok()?;
    let dir = file.parent()?.to_path_buf();
    let version = version_of(&dir, &file);
    Some(Found { dir, version })
}

/// The folders that are looked into, best first.
fn candidates(root: &Path) -> Vec<PathBuf> {
    let mut dirs = vec![root.to_path_buf()];
    dirs.extend(wheel_folders(root));
    let arch = std::env::consts::ARCH;
    for lib in [&format!("lib/{arch}-linux-gnu"), "lib64", "lib"] {
        dirs.push(root.join(lib));
    }
    dirs
}

/// Folders like `.nixl_cu12.mesonpy.libs`, in which wheels put it, in order of their names.
fn wheel_folders(root: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(root) else {
        return Vec::new();
    };
    let mut folders: Vec<_> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| wheel_name(path).is_some())
        .collect();
    folders.sort();
    folders
}

/// The package name in a folder name like `.nixl_cu12.mesonpy.libs`.
fn wheel_name(dir: &Path) -> Option<&str> {
    let name = dir.file_name()?.to_str()?;
    let package = name.strip_prefix('.')?.strip_suffix(".mesonpy.libs")?;
    package.starts_with("nixl").then_some(package)
}

fn version_of(dir: &Path, file: &Path) -> Version {
    if let Some(version) = packaged_version(dir) {
        return Version::Exact(version);
    }
    let newer = fs::read(file)
        .is_ok_and(|bytes| bytes.windows(SINCE_1_5.len()).any(|part| part == SINCE_1_5));
    if newer {
        Version::Since15
    } else {
        Version::Before15
    }
}

/// The version in the name of the `dist-info` folder beside a wheel's library folder.
fn packaged_version(dir: &Path) -> Option<String> {
    let package = wheel_name(dir)?;
    let entries = fs::read_dir(dir.parent()?).ok()?;
    entries.flatten().find_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let version = name
            .strip_prefix(package)?
            .strip_prefix('-')?
            .strip_suffix(".dist-info")?;
        Some(version.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(path: &Path, bytes: &[u8]) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    #[test]
    fn every_kind_of_root_is_understood() {
        let arch_dir = format!("lib/{}-linux-gnu", std::env::consts::ARCH);
        for place in ["", "lib", "lib64", &arch_dir, ".nixl_cu13.mesonpy.libs"] {
            let root = tempfile::tempdir().unwrap();
            put(&root.path().join(place).join(LIBRARY), b"");
            let found = find_in(root.path()).unwrap();
            let expected = fs::canonicalize(root.path().join(place)).unwrap();
            assert_eq!(found.dir, expected);
            assert_eq!(found.version, Version::Before15);
        }
    }

    #[test]
    fn a_link_is_followed_to_where_the_plugins_are() {
        let root = tempfile::tempdir().unwrap();
        put(&root.path().join("real").join(LIBRARY), b"");
        fs::create_dir(root.path().join("lib")).unwrap();
        std::os::unix::fs::symlink(
            root.path().join("real").join(LIBRARY),
            root.path().join("lib").join(LIBRARY),
        )
        .unwrap();
        let found = find_in(root.path()).unwrap();
        assert_eq!(
            found.dir,
            fs::canonicalize(root.path().join("real")).unwrap()
        );
    }

    #[test]
    fn the_version_is_that_of_the_package_or_read_off_the_functions() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join(".nixl_cu12.mesonpy.libs");
        put(&dir.join(LIBRARY), b"xx nixl_capi_prep_mem_view_local\0");
        assert_eq!(find_in(root.path()).unwrap().version, Version::Since15);
        fs::create_dir(root.path().join("nixl_cu12-1.4.1.dist-info")).unwrap();
        fs::create_dir(root.path().join("nixl_cu13-9.9.9.dist-info")).unwrap();
        let found = find_in(root.path()).unwrap();
        assert_eq!(found.version, Version::Exact("1.4.1".into()));
    }

    #[test]
    fn nonsense_holds_no_library() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(find_in(root.path()), None);
        assert_eq!(find_in(&root.path().join("missing")), None);
        fs::create_dir(root.path().join(LIBRARY)).unwrap();
        assert_eq!(find_in(root.path()), None);
    }

    #[test]
    fn versions_are_compared_as_far_as_they_are_known() {
        let exact = Version::Exact("1.4.1".into());
        assert!(exact.can_be("1.4.1") && !exact.can_be("1.5.1") && exact.is_supported());
        assert!(!Version::Exact("0.9.0".into()).is_supported());
        assert!(Version::Since15.can_be("1.5.1") && !Version::Since15.can_be("1.4.1"));
        assert!(Version::Before15.can_be("1.4.1") && !Version::Before15.can_be("1.5.1"));
    }
}

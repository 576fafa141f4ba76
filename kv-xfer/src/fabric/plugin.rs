//! Whether NIXL's LIBFABRIC plugin can be loaded here, and what helps where it cannot.
//!
//! NIXL itself says only that there is no such backend, whatever is missing or too old.

use std::path::{Path, PathBuf};

use nixl_sys::{LIBFABRIC_NAME, LoadReport, Version, fabric_symbols};
use thiserror::Error;

/// NIXL's LIBFABRIC plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plugin {
    /// Its file.
    pub file: PathBuf,
    /// The version of the NIXL that it belongs to.
    pub nixl: String,
    /// The newest version of libfabric's symbols that it needs; `None` when its file names none.
    pub needs: Option<Version>,
}

/// A libfabric, by what its file says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Libfabric {
    /// Its file, or the name by which it is found.
    pub file: PathBuf,
    /// Its version, where it was asked.
    pub version: Option<Version>,
    /// The newest version of its symbols.
    pub has: Option<Version>,
}

/// Why the plugin cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Unusable {
    /// libfabric is older than the plugin.
    #[error(
        "the LIBFABRIC plugin of NIXL {nixl} needs {oldest} (symbols FABRIC_{needs}), and this is {found} (symbols up to \
         {has}): {way_out}"
    )]
    TooOld {
        /// NIXL's version.
        nixl: String,
        /// The symbols that it needs.
        needs: Version,
        /// Which libfabric has them.
        oldest: &'static str,
        /// The libfabric that there is, in words.
        found: String,
        /// Its symbols, in words.
        has: String,
        /// What helps.
        way_out: &'static str,
    },
    /// The dynamic linker refuses it for another reason.
    #[error(
        "the LIBFABRIC plugin of NIXL {nixl} does not load: {reason}; it needs libfabric.so.1, libhwloc.so.15, \
         libcudart.so.12 and libcuda.so.1 (also where there is no GPU): install what is named, or put its folder in \
         LD_LIBRARY_PATH"
    )]
    NotLoaded {
        /// NIXL's version.
        nixl: String,
        /// The dynamic linker's words.
        reason: String,
    },
}

/// Which libfabric first had symbols of a version such as `1.10`, and how to get by with an older one.
#[must_use]
pub fn libfabric_release(symbols: &str) -> (&'static str, &'static str) {
    match symbols {
        "1.10" => (
            "one newer than libfabric 2.6.0",
            "install a libfabric newer than 2.6.0; or use NIXL 1.4.1 (pip install nixl-cu12==1.4.1, \
             KVX_NIXL_DIR), whose plugin works with libfabric 1.20 and newer; or UCX, which does not need it",
        ),
        "1.7" => (
            "libfabric 1.20 or newer",
            "install libfabric 1.20 or newer: Amazon's EFA installer has it (sudo ./efa_installer.sh -y)",
        ),
        _ => (
            "a libfabric as new as that NIXL",
            "install the libfabric that this NIXL was built for",
        ),
    }
}

impl Plugin {
    /// The plugin in an installation's folder of plugins.
    #[must_use]
    pub fn in_folder(plugins: &Path, nixl: &str) -> Self {
        let file = plugins.join("libplugin_LIBFABRIC.so");
        Self {
            needs: fabric_symbols(&file),
            nixl: nixl.to_owned(),
            file,
        }
    }

    /// The plugin of a loaded NIXL.
    #[must_use]
    pub fn of(report: &LoadReport) -> Self {
        let version = report.version.as_deref().unwrap_or("of unknown version");
        Self::in_folder(&report.plugins_dir, version)
    }

    /// Whether a libfabric is new enough for it, by the symbols in its file; it is not loaded. What is not known passes.
    ///
    /// # Errors
    /// [`Unusable::TooOld`].
    pub fn fits(&self, libfabric: &Libfabric) -> Result<(), Unusable> {
        let Some(needs) = self.needs else {
            return Ok(());
        };
        if libfabric.has.is_some_and(|has| has >= needs) {
            return Ok(());
        }
        let (oldest, way_out) = libfabric_release(&needs.to_string());
        let file = libfabric.file.display();
        Err(Unusable::TooOld {
            nixl: self.nixl.clone(),
            needs,
            oldest,
            found: match libfabric.version {
                Some(version) => format!("libfabric {version} ({file})"),
                None => file.to_string(),
            },
            has: libfabric
                .has
                .map_or_else(|| "unknown".to_owned(), |has| format!("FABRIC_{has}")),
            way_out,
        })
    }

    /// Loads it, with all that it needs, to stay.
    ///
    /// # Errors
    /// [`Unusable`], which names what is missing or too old, and what helps.
    pub fn check(&self) -> Result<(), Unusable> {
        let Err(refused) = nixl_sys::plugin_loads(&self.file) else {
            return Ok(());
        };
        if let Ok(report) = nixl_sys::libfabric(Path::new(LIBFABRIC_NAME)) {
            self.fits(&Libfabric {
                version: Some(report.version),
                has: report.file.as_deref().and_then(fabric_symbols),
                file: report.file.unwrap_or(report.library),
            })?;
        }
        Err(Unusable::NotLoaded {
            nixl: self.nixl.clone(),
            reason: refused.to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_libfabric_that_is_too_old_is_named_with_the_way_out() {
        let symbols = |minor| Some(Version { major: 1, minor });
        let plugin = |needs| Plugin {
            file: PathBuf::from("/x/libplugin_LIBFABRIC.so"),
            nixl: "1.5.1".to_owned(),
            needs,
        };
        let libfabric = Libfabric {
            file: PathBuf::from("/y/libfabric.so.1"),
            version: Some(Version { major: 2, minor: 5 }),
            has: symbols(9),
        };
        let text = plugin(symbols(10))
            .fits(&libfabric)
            .unwrap_err()
            .to_string();
        for part in [
            "NIXL 1.5.1",
            "FABRIC_1.10",
            "libfabric 2.5",
            "/y/",
            "FABRIC_1.9",
            "NIXL 1.4.1",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        plugin(symbols(7)).fits(&libfabric).unwrap();
        plugin(None).fits(&libfabric).unwrap();
        let unknown = Libfabric {
            has: None,
            ..libfabric
        };
        assert!(plugin(symbols(7)).fits(&unknown).is_err());
    }
}

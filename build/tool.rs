//! Runs other tools, each with an end and its words kept, and keeps processes that want to make the
//! same thing apart. Shared by the build script and by the tool.

use std::fmt;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Longest quotation of a tool, characters.
const MAX_WORDS: usize = 600;

/// Why a tool did not do what it was run for.
#[derive(Debug)]
pub enum Failure {
    /// It could not be run.
    Start {
        /// Which.
        program: String,
        /// Why.
        source: io::Error,
    },
    /// It was stopped.
    TimedOut {
        /// Which.
        program: String,
        /// How long it had.
        limit: Duration,
    },
    /// It said so itself.
    Failed {
        /// In its own words.
        words: String,
    },
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start { program, source } => write!(f, "cannot run {program}: {source}"),
            Self::TimedOut { program, limit } => {
                write!(f, "{program} did not end within {limit:?}")
            }
            Self::Failed { words } => f.write_str(words),
        }
    }
}

/// Runs a command that must end within `limit`; what it writes goes to the file `log`.
pub fn run(mut command: Command, limit: Duration, log: &Path) -> Result<(), Failure> {
    let program = command.get_program().to_string_lossy().into_owned();
    let start = |source| Failure::Start {
        program: program.clone(),
        source,
    };
    let file = File::create(log).map_err(start)?;
    let copy = file.try_clone().map_err(start)?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(file)
        .stderr(copy)
        .spawn()
        .map_err(start)?;
    let end = Instant::now() + limit;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < end => sleep(Duration::from_millis(50)),
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(Failure::TimedOut { program, limit });
            }
            Err(error) => return Err(start(error)),
        }
    };
    if status.success() {
        return Ok(());
    }
    let text = fs::read(log).unwrap_or_default();
    let words = last_words(&String::from_utf8_lossy(&text))
        .unwrap_or_else(|| format!("{program}: {status}"));
    Err(Failure::Failed { words })
}

/// The lines from the first that tells of an error, else the last line, cut to a length that fits a
/// message.
fn last_words(text: &str) -> Option<String> {
    let lines: Vec<_> = text
        .lines()
        .map(str::trim)
        .filter(|l| !l.is_empty())
        .collect();
    let is_error = |line: &&str| {
        line.get(..5)
            .is_some_and(|s| s.eq_ignore_ascii_case("error"))
    };
    let from = match lines.iter().position(is_error) {
        Some(from) => from,
        None => lines.len().checked_sub(1)?,
    };
    let words = lines[from..].join("\n");
    Some(words.chars().take(MAX_WORDS).collect())
}

/// Holds `path` locked until the file is dropped.
pub fn lock(path: &Path, limit: Duration) -> Result<File, String> {
    let file = File::options()
        .create(true)
        .append(true)
        .open(path)
        .map_err(|e| format!("cannot open {}: {e}", path.display()))?;
    let end = Instant::now() + limit;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if Instant::now() < end => {
                sleep(Duration::from_millis(200));
            }
            Err(error) => return Err(format!("cannot lock {}: {error}", path.display())),
        }
    }
}

/// Removes a folder that may be missing.
pub fn remove(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

//! The cache folder, and steps that fill it: each made once, by tools that must end.

use std::env;
use std::fs;
use std::io::{self, IsTerminal, Write, stderr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use indicatif::ProgressBar;

use super::ProvisionError;
use super::tool::{self, Failure};

/// Names the cache folder.
pub const CACHE_VARIABLE: &str = "KVX_BENCH_PEERS";
/// How long another process may be at the same.
const LOCK_LIMIT: Duration = Duration::from_secs(1200);
/// How long a tool may take that does next to nothing.
pub const QUICK_LIMIT: Duration = Duration::from_secs(60);
/// Written last: what a folder was made from.
const MARKER: &str = ".complete";

/// Runs a step of provisioning.
pub fn run(
    what: &'static str,
    command: Command,
    limit: Duration,
    log: &Path,
) -> Result<(), ProvisionError> {
    tool::run(command, limit, log).map_err(|failure| match failure {
        Failure::Start { program, source } if source.kind() == io::ErrorKind::NotFound => {
            let help = help_for(&program);
            ProvisionError::MissingTool {
                tool: program,
                help,
            }
        }
        other => ProvisionError::Tool {
            what,
            words: other.to_string(),
        },
    })
}

fn help_for(program: &str) -> &'static str {
    match program {
        "python3" => "install Python 3.10 or newer with pip",
        "cc" => "install a C compiler, such as Debian's package gcc",
        "g++" => "install a C++20 compiler, such as Debian's package g++",
        "cargo" => "install Rust",
        _ => "install it, or put it on PATH",
    }
}

/// Shown on standard error while something takes long.
struct Progress(ProgressBar);

impl Progress {
    fn new(text: String) -> Self {
        if !stderr().is_terminal() {
            // A line of a log. It does no harm if it cannot be written.
            let _ = writeln!(stderr(), "{text}");
        }
        let bar = ProgressBar::new_spinner().with_message(text);
        bar.enable_steady_tick(Duration::from_millis(120));
        Self(bar)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// The cache folder.
pub struct Cache {
    /// Its path.
    pub root: PathBuf,
}

impl Cache {
    /// That of the other participants of a comparison.
    pub fn find() -> Result<Self, ProvisionError> {
        Self::of(CACHE_VARIABLE, "bench-peers")
    }

    /// The folder that a variable names, else one of that name in the target folder or among the user's caches. Makes it.
    pub fn of(named_by: &'static str, name: &str) -> Result<Self, ProvisionError> {
        let variable = |name| env::var_os(name).filter(|value| !value.is_empty());
        let none = || ProvisionError::NoCache { named_by };
        let folder = variable(named_by)
            .map(PathBuf::from)
            .or_else(|| Some(target_folder(&env::current_exe().ok()?)?.join(name)))
            .or_else(|| {
                let caches = variable("XDG_CACHE_HOME").map(PathBuf::from);
                let caches =
                    caches.or_else(|| Some(PathBuf::from(variable("HOME")?).join(".cache")))?;
                Some(caches.join("kvx").join(name))
            })
            .ok_or_else(none)?;
        let root = std::path::absolute(folder).map_err(|_| none())?;
        let cache = Self { root };
        cache.files(fs::create_dir_all(&cache.root))?;
        Ok(cache)
    }

    /// An error of writing there.
    pub fn files<T>(&self, result: io::Result<T>) -> Result<T, ProvisionError> {
        result.map_err(|source| ProvisionError::Files {
            path: self.root.clone(),
            source,
        })
    }

    /// The last line that a command prints.
    pub fn asked(&self, what: &'static str, command: Command) -> Result<String, ProvisionError> {
        static ASKED: AtomicU32 = AtomicU32::new(0);
        let number = ASKED.fetch_add(1, Ordering::Relaxed);
        let log = self.log(&format!(".asked-{}-{number}", std::process::id()));
        run(what, command, QUICK_LIMIT, &log)?;
        let text = self.files(fs::read_to_string(&log))?;
        self.files(fs::remove_file(&log))?;
        Ok(text.trim().lines().last().unwrap_or_default().to_owned())
    }

    /// Where a step's tools write what they say.
    pub fn log(&self, name: &str) -> PathBuf {
        self.root.join(format!("{name}.log"))
    }

    /// The folder `name`, made by `make` unless it is there, made from the same `recipe`.
    pub fn made(
        &self,
        name: &str,
        recipe: &str,
        make: impl FnOnce(&Path) -> Result<(), ProvisionError>,
    ) -> Result<PathBuf, ProvisionError> {
        let folder = self.root.join(name);
        let marker = folder.join(MARKER);
        let is_made = || fs::read_to_string(&marker).is_ok_and(|text| text == recipe);
        if is_made() {
            return Ok(folder);
        }
        let lock = self.root.join(format!(".{name}.lock"));
        let _lock = tool::lock(&lock, LOCK_LIMIT).map_err(|why| ProvisionError::Busy { why })?;
        if is_made() {
            return Ok(folder);
        }
        let progress = Progress::new(format!(
            "preparing {name} in {} (once; some minutes at most)",
            self.root.display()
        ));
        self.files(fs::create_dir_all(&folder))?;
        make(&folder)?;
        self.files(fs::write(&marker, recipe))?;
        drop(progress);
        Ok(folder)
    }
}

/// The target folder that a program was built in: the one that Cargo tags as a cache.
fn target_folder(program: &Path) -> Option<PathBuf> {
    let mut folders = program.ancestors();
    let folder = folders.find(|folder| folder.join("CACHEDIR.TAG").is_file())?;
    Some(folder.to_path_buf())
}

/// Writes files below a folder, each in one step: another process may be reading them.
pub fn write_all(folder: &Path, files: &[(&str, &str)]) -> io::Result<()> {
    for (name, text) in files {
        let path = folder.join(name);
        if fs::read_to_string(&path).is_ok_and(|there| there == *text) {
            continue;
        }
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        let new = path.with_added_extension(format!("{}.new", std::process::id()));
        fs::write(&new, text)?;
        fs::rename(&new, &path)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_folder_is_made_once_for_a_recipe_and_again_after_a_failure() {
        let root = tempfile::tempdir().unwrap();
        let cache = Cache {
            root: root.path().to_path_buf(),
        };
        let made = |recipe: &str, script: &'static str| {
            cache.made("thing", recipe, |folder| {
                let mut command = shell(script);
                command.current_dir(folder);
                run("make a thing", command, QUICK_LIMIT, &cache.log("thing"))
            })
        };
        let count = || fs::read_to_string(root.path().join("thing/count")).unwrap_or_default();
        let words = made(
            "1",
            "echo noise; echo ERROR: no thing; echo of that kind; exit 3",
        )
        .unwrap_err()
        .to_string();
        assert_eq!(words, "cannot make a thing: ERROR: no thing\nof that kind");
        for (recipe, expected) in [("1", "x"), ("1", "x"), ("2", "xx"), ("2", "xx")] {
            made(recipe, "printf x >> count").unwrap();
            assert_eq!(count(), expected);
        }
    }

    #[test]
    fn a_missing_tool_is_named() {
        let root = tempfile::tempdir().unwrap();
        let log = root.path().join("log");
        let none = Command::new("no-such-tool-anywhere");
        let error = run("do it", none, QUICK_LIMIT, &log).unwrap_err();
        assert!(
            matches!(&error, ProvisionError::MissingTool { tool, .. } if tool == "no-such-tool-anywhere"),
            "{error}"
        );
    }

    #[test]
    fn a_tool_that_does_not_end_is_stopped() {
        let root = tempfile::tempdir().unwrap();
        let log = root.path().join("log");
        let error = run(
            "wait",
            shell("exec sleep 60"),
            Duration::from_millis(100),
            &log,
        );
        let text = error.unwrap_err().to_string();
        assert!(text.contains("did not end within 100ms"), "{text}");
    }
}

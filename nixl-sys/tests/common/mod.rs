//! What the tests share: where the real NIXL is, and how to run a test in a process of its own.

#![allow(dead_code, reason = "each test file uses its own part")]

pub mod fake;
pub mod peer;

use std::ffi::OsStr;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

/// The place of a real NIXL, or a line on stderr that says why the test is skipped.
pub fn real_runtime() -> Option<PathBuf> {
    let place = std::env::var_os("NIXL_SYS_TEST_RUNTIME")
        .map(PathBuf::from)
        .or_else(built);
    if place.is_none() {
        // Not `eprintln!`, which the test harness swallows.
        let _ = writeln!(
            std::io::stderr(),
            "skipped: NIXL_SYS_TEST_RUNTIME names no NIXL, and the tool was not built with one"
        );
    }
    place
}

/// The NIXL that the tool's build keeps in the target folder which this test lies in.
fn built() -> Option<PathBuf> {
    let test = std::env::current_exe().ok()?;
    let folder = test
        .ancestors()
        .map(|dir| dir.join("nixl"))
        .find(|dir| dir.is_dir())?;
    let version = std::env::var("KVX_NIXL_VERSION").unwrap_or_else(|_| "1.5.1".to_owned());
    Some(folder.join(version)).filter(|dir| dir.is_dir())
}

/// Runs the ignored test `name` of this file in a process of its own, and returns what it wrote to stdout and stderr.
///
/// Panics unless it ran and the process ended normally.
pub fn in_child<V: AsRef<OsStr>>(name: &str, environment: &[(&str, V)]) -> (String, String) {
    let output = child(name, environment).output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.success(),
        "{name}: {}\n{stdout}\n{stderr}",
        output.status
    );
    assert!(stdout.contains("1 passed"), "{name} did not run\n{stdout}");
    (stdout, stderr)
}

/// The command that runs the ignored test `name` of this file.
///
/// Without the variables that NIXL and UCX would read from the surroundings.
pub fn child<V: AsRef<OsStr>>(name: &str, environment: &[(&str, V)]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([
        name,
        "--exact",
        "--ignored",
        "--nocapture",
        "--test-threads=1",
    ]);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["NIXL_", "UCX_", "FI_"].iter().any(|p| text.starts_with(p))
            && text != "NIXL_SYS_TEST_RUNTIME"
        {
            command.env_remove(&name);
        }
    }
    for (name, value) in environment {
        command.env(name, value);
    }
    command
}

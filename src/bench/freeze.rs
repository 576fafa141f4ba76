//! Stops the processes that are not being measured, so that none of their threads takes processor
//! time from the one that is.

use std::fs;
use std::io;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::error::BenchError;

/// Time for all threads of a process to stop.
const LIMIT: Duration = Duration::from_secs(5);

/// Stops a process that leads a group of its own, with the group, and waits until all of its
/// threads stand still.
///
/// # Errors
/// [`BenchError::NotFrozen`].
pub fn freeze(pid: u32) -> Result<(), BenchError> {
    let fail = |_| BenchError::NotFrozen { pid };
    signal(pid, Signal::STOP).map_err(fail)?;
    let end = Instant::now() + LIMIT;
    while !is_still(pid).map_err(fail)? {
        if Instant::now() >= end {
            return Err(BenchError::NotFrozen { pid });
        }
        sleep(Duration::from_micros(200));
    }
    Ok(())
}

/// Lets it go on.
///
/// # Errors
/// [`BenchError::NotFrozen`] when it is gone.
pub fn thaw(pid: u32) -> Result<(), BenchError> {
    signal(pid, Signal::CONT).map_err(|_| BenchError::NotFrozen { pid })
}

fn signal(pid: u32, signal: Signal) -> io::Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or(io::ErrorKind::NotFound)?;
    Ok(kill_process_group(pid, signal)?)
}

fn is_still(pid: u32) -> io::Result<bool> {
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread that has just ended stands still, too.
        let stat = fs::read_to_string(thread?.path().join("stat")).unwrap_or_default();
        let state = stat.rsplit_once(") ").map(|(_, rest)| rest);
        if state.is_some_and(|rest| !rest.starts_with(['T', 't', 'Z', 'X'])) {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    use super::*;

    #[test]
    fn a_busy_process_stands_still_until_it_is_thawed() {
        let mut child = Command::new("/bin/sh")
            .args(["-c", "while :; do :; done"])
            .process_group(0)
            .spawn()
            .unwrap();
        let busy = |pid: u32| -> u64 {
            let stat = fs::read_to_string(format!("/proc/{pid}/schedstat")).unwrap();
            stat.split_whitespace().next().unwrap().parse().unwrap()
        };
        freeze(child.id()).unwrap();
        let before = busy(child.id());
        sleep(Duration::from_millis(50));
        assert_eq!(busy(child.id()), before);
        thaw(child.id()).unwrap();
        let end = Instant::now() + LIMIT;
        while busy(child.id()) == before {
            assert!(Instant::now() < end, "it does not go on");
            sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(freeze(child.id()).is_err());
    }
}

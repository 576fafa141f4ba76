//! What this process uses.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Processor time of this process so far: all threads, user and system.
#[must_use]
pub fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

/// Resident memory of this process, bytes; 0 when it cannot be found out.
#[must_use]
pub fn resident() -> u64 {
    let pages: u64 = fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| text.split(' ').nth(1)?.parse().ok())
        .unwrap_or(0);
    pages.saturating_mul(rustix::param::page_size() as u64)
}

/// Open file descriptors of this process.
#[must_use]
pub fn open_files() -> u64 {
    // The listing itself holds one.
    fs::read_dir("/proc/self/fd").map_or(0, |entries| (entries.count() as u64).saturating_sub(1))
}

/// Threads of this process.
#[must_use]
pub fn threads() -> u64 {
    fs::read_dir("/proc/self/task").map_or(0, |entries| entries.count() as u64)
}

/// How long threads of this process have been ready to run and not let: the calling one, and those whose name
/// this is. Zero where the kernel does not say.
#[derive(Debug)]
pub struct Waits {
    files: Vec<PathBuf>,
}

impl Waits {
    /// Of the calling thread and those of this name.
    #[must_use]
    pub fn with(name: &str) -> Self {
        let mut files = vec![PathBuf::from("/proc/thread-self/schedstat")];
        let tasks = fs::read_dir("/proc/self/task").into_iter().flatten();
        for task in tasks.flatten().map(|entry| entry.path()) {
            let comm = fs::read_to_string(task.join("comm")).unwrap_or_default();
            if comm.trim_end() == name {
                files.push(task.join("schedstat"));
            }
        }
        Self { files }
    }

    /// All of it so far.
    #[must_use]
    pub fn so_far(&self) -> Duration {
        Duration::from_nanos(self.files.iter().filter_map(waited).sum())
    }
}

/// Nanoseconds: of a thread's time on a processor, time waiting for one, and turns, the second.
fn waiting(text: &str) -> Option<u64> {
    text.split(' ').nth(1)?.parse().ok()
}

fn waited(file: &PathBuf) -> Option<u64> {
    waiting(&fs::read_to_string(file).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_uses_something() {
        assert!(resident() > 1 << 16);
        assert!(open_files() >= 3);
        assert!(threads() >= 1);
        let before = cpu();
        let spun: u64 = (0..2_000_000_u64).fold(0, |a, b| std::hint::black_box(a ^ b));
        std::hint::black_box(spun);
        assert!(cpu() > before);
    }

    #[test]
    fn threads_are_found_by_name_and_their_waiting_is_read() {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let (named, name_set) = std::sync::mpsc::channel();
        let thread = std::thread::Builder::new().name("here-waits".to_owned());
        let thread = thread.spawn(move || {
            named.send(()).unwrap();
            let _ = stopped.recv();
        });
        name_set.recv().unwrap();
        let waits = Waits::with("here-waits");
        assert_eq!(waits.files.len(), 2, "the caller's and that thread's");
        assert_eq!(Waits::with("no thread").files.len(), 1);
        assert_eq!(waiting("120 2844909 1\n"), Some(2_844_909));
        assert_eq!(waiting("120"), None);
        drop(stop);
        thread.unwrap().join().unwrap();
    }
}

//! What this process uses.

use std::fs;
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
}

//! This machine, and what this process uses of it.

use std::fs;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::row::Machine;

/// Describes this machine; what cannot be found out is empty or zero.
#[must_use]
pub fn machine(nixl: &str) -> Machine {
    let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name))
            .map(|rest| rest.trim_start_matches([' ', '\t', ':']).trim().to_owned())
            .unwrap_or_default()
    };
    let kib: u64 = field(&text("/proc/meminfo"), "MemTotal")
        .trim_end_matches(" kB")
        .parse()
        .unwrap_or(0);
    Machine {
        cpu: field(&text("/proc/cpuinfo"), "model name"),
        cores: std::thread::available_parallelism()
            .map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(u32::MAX)),
        memory_bytes: kib.saturating_mul(1024),
        kernel: text("/proc/sys/kernel/osrelease").trim().to_owned(),
        nixl: nixl.to_owned(),
        gpus: gpus(),
        rdma: names("/sys/class/infiniband"),
        load: text("/proc/loadavg")
            .split(' ')
            .next()
            .and_then(|load| load.parse().ok())
            .unwrap_or(0.0),
        one_machine: true,
    }
}

fn gpus() -> Vec<String> {
    const GPUS: &str = "/proc/driver/nvidia/gpus";
    let model = |gpu: &String| {
        let text = fs::read_to_string(format!("{GPUS}/{gpu}/information")).ok()?;
        let model = text.lines().find_map(|line| line.strip_prefix("Model:"))?;
        Some(model.trim().to_owned())
    };
    names(GPUS).iter().filter_map(model).collect()
}

fn names(folder: &str) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut names: Vec<_> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

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
    fn the_machine_has_a_processor_and_memory() {
        let machine = machine("1");
        assert!(machine.cores >= 1);
        assert!(machine.memory_bytes > 1 << 20);
        assert_eq!(machine.nixl, "1");
    }

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

//! Where it is measured: this machine, as far as it says.

use std::fs;
use std::path::Path;
use std::thread::available_parallelism;

use super::row::Machine;
use crate::runtime;

/// Looks at this machine.
#[must_use]
pub fn look(one_machine: bool) -> Machine {
    let cpu_info = text("/proc/cpuinfo");
    let memory = text("/proc/meminfo");
    let kib: u64 = field(&memory, "MemTotal")
        .and_then(|value| value.split_whitespace().next()?.parse().ok())
        .unwrap_or(0);
    let load = text("/proc/loadavg");
    Machine {
        cpu: field(&cpu_info, "model name")
            .unwrap_or("unknown")
            .to_owned(),
        cores: available_parallelism()
            .ok()
            .and_then(|cores| u32::try_from(cores.get()).ok())
            .unwrap_or(0),
        memory_bytes: kib.saturating_mul(1024),
        kernel: text("/proc/sys/kernel/osrelease").trim().to_owned(),
        nixl: runtime::resolve().map_or_else(|_| "none".to_owned(), |nixl| nixl.version),
        gpus: gpus(),
        rdma: names("/sys/class/infiniband"),
        load: load
            .split_whitespace()
            .next()
            .and_then(|load| load.parse().ok())
            .unwrap_or(0.0),
        one_machine,
    }
}

fn text(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The value of the first line `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

/// What is in a folder, sorted.
fn names(folder: &str) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

fn gpus() -> Vec<String> {
    let folder = "/proc/driver/nvidia/gpus";
    names(folder)
        .iter()
        .map(|name| {
            let about = text(format!("{folder}/{name}/information"));
            field(&about, "Model").unwrap_or(name).to_owned()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_described() {
        let machine = look(true);
        assert!(machine.cores > 0 && machine.memory_bytes > 0);
        assert!(!machine.kernel.is_empty() && machine.one_machine);
    }

    #[test]
    fn fields_are_found_by_name() {
        let text = "processor\t: 0\nmodel name\t: A CPU @ 2 GHz\nmodel name\t: B\n";
        assert_eq!(field(text, "model name"), Some("A CPU @ 2 GHz"));
        assert_eq!(field(text, "model"), None);
    }
}

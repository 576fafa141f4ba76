//! What keeps the devices of a machine from being used, each with the command that helps.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::devices::{Devices, RdmaDevice, text};

/// Locked memory that will do: the pools of a node, with room.
const ENOUGH_LOCKED: u64 = 16 << 30;
/// The kernel's default, and what many registrations beside CUDA's mappings need.
const MAPS: u64 = 65_530;
const MAPS_WITH_DEVICES: u64 = 262_144;
/// Shared segments of UCX and libfabric take some MB for each process; containers come with 64 MiB in all.
const ENOUGH_SHM: u64 = 1 << 30;

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// What.
    pub name: String,
    /// What there is.
    pub found: String,
    /// What there has to be.
    pub needed: String,
    /// What would help; empty where nothing has to.
    pub fix: String,
    /// Whether it is as it must be.
    pub ok: bool,
}

impl Check {
    /// A check and how it went. The fix is kept only where it is needed.
    #[must_use]
    pub fn new(name: &str, found: String, needed: &str, fix: &str, ok: bool) -> Self {
        Self {
            name: name.to_owned(),
            found,
            needed: needed.to_owned(),
            fix: if ok { String::new() } else { fix.to_owned() },
            ok,
        }
    }
}

/// Looks at everything below a root folder, `/` for this machine. What the devices there do not need is fine as it is.
#[must_use]
pub fn preflight(root: &Path, devices: &Devices) -> Vec<Check> {
    vec![
        locked_memory(root, devices),
        mappings(root, devices),
        huge_pages(root, devices),
        gpu_registration(root, devices),
        efa_driver(root, devices),
        device_files(devices),
        shared_memory(root),
        copies_between_processes(root),
        loopback(root),
    ]
}

fn locked_memory(root: &Path, devices: &Devices) -> Check {
    let limits = text(root, "proc/self/limits").unwrap_or_default();
    let soft = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max locked memory"))
        .and_then(|rest| rest.split_whitespace().next());
    let bytes = soft.and_then(|soft| soft.parse::<u64>().ok());
    let found = match (soft, bytes) {
        (None, _) => "unknown".to_owned(),
        (Some(_), Some(bytes)) => size(bytes),
        (Some(words), None) => words.to_owned(),
    };
    let (needed, ok) = match devices.rdma.is_empty() {
        true => ("any (only RDMA locks what it registers)", true),
        false => (
            "unlimited, or the size of all pools",
            soft.is_some() && bytes.is_none_or(|bytes| bytes >= ENOUGH_LOCKED),
        ),
    };
    let fix = "ulimit -l unlimited; for good: '* - memlock unlimited' in \
               /etc/security/limits.conf, LimitMEMLOCK=infinity in the unit, or docker run \
               --ulimit memlock=-1";
    Check::new("memlock", found, needed, fix, ok)
}

fn mappings(root: &Path, devices: &Devices) -> Check {
    let found: Option<u64> =
        text(root, "proc/sys/vm/max_map_count").and_then(|text| text.parse().ok());
    let needed = match devices.rdma.is_empty() && devices.gpus.is_empty() {
        true => MAPS,
        false => MAPS_WITH_DEVICES,
    };
    Check::new(
        "vm.max_map_count",
        found.map_or_else(|| "unknown".to_owned(), |count| count.to_string()),
        &format!("at least {needed}"),
        &format!("sysctl -w vm.max_map_count={MAPS_WITH_DEVICES}"),
        found.is_none_or(|count| count >= needed),
    )
}

fn huge_pages(root: &Path, devices: &Devices) -> Check {
    let info = text(root, "proc/meminfo").unwrap_or_default();
    let field = |name: &str| -> Option<u64> {
        let line = info.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':')
            .split_whitespace()
            .next()?
            .parse()
            .ok()
    };
    let free = field("HugePages_Free").unwrap_or(0);
    let total = field("HugePages_Total").unwrap_or(0);
    let transparent = text(root, "sys/kernel/mm/transparent_hugepage/enabled");
    let mode = transparent
        .as_deref()
        .and_then(|text| text.split_once('[')?.1.split_once(']'))
        .map_or("unknown", |(mode, _)| mode);
    let found = format!("{free} of {total} reserved pages free, transparent: {mode}");
    let (needed, ok) = match devices.efa().next() {
        Some(_) => (
            "some reserved pages free: the EFA provider takes its buffers there",
            free > 0,
        ),
        None => (
            "transparent: madvise or always, for pools with fewer misses",
            mode != "never",
        ),
    };
    let fix = match devices.efa().next() {
        Some(_) => "sysctl -w vm.nr_hugepages=5128",
        None => "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    };
    Check::new("huge pages", found, needed, fix, ok)
}

fn gpu_registration(root: &Path, devices: &Devices) -> Check {
    const NAME: &str = "GPU memory for RDMA";
    if devices.gpus.is_empty() || devices.rdma.is_empty() {
        let found = match devices.gpus.is_empty() {
            true => "no GPU",
            false => "no RDMA device",
        };
        return Check::new(NAME, found.to_owned(), "nothing", "", true);
    }
    let module = ["nvidia_peermem", "efa_nv_peermem", "nv_peer_mem"]
        .into_iter()
        .find(|module| root.join("sys/module").join(module).exists());
    // dma-buf needs the open kernel modules of the driver and a kernel that knows how.
    let open = text(root, "proc/driver/nvidia/version")
        .is_some_and(|version| version.contains("Open Kernel Module"));
    let kernel = text(root, "proc/sys/kernel/osrelease").unwrap_or_default();
    let dma_buf = open && at_least(&kernel, (5, 12));
    let found = match (module, dma_buf) {
        (Some(module), _) => format!("module {module}"),
        (None, true) => format!("dma-buf (open driver, kernel {kernel})"),
        (None, false) => "neither nvidia_peermem nor dma-buf".to_owned(),
    };
    Check::new(
        NAME,
        found,
        "the module nvidia_peermem (or efa_nv_peermem), or dma-buf: the open NVIDIA driver and Linux 5.12",
        "modprobe nvidia_peermem; or install the open kernel modules of the NVIDIA driver",
        module.is_some() || dma_buf,
    )
}

fn at_least(release: &str, (major, minor): (u32, u32)) -> bool {
    let mut numbers = release.split(['.', '-']).map(|n| n.parse::<u32>().ok());
    match (numbers.next().flatten(), numbers.next().flatten()) {
        (Some(a), Some(b)) => (a, b) >= (major, minor),
        _ => false,
    }
}

fn efa_driver(root: &Path, devices: &Devices) -> Check {
    const NAME: &str = "EFA driver";
    let count = devices.efa().count();
    let without = &devices.efa_without_driver;
    if count == 0 && without.is_empty() {
        return Check::new(NAME, "no EFA device".to_owned(), "nothing", "", true);
    }
    let found = match text(root, "sys/module/efa/version") {
        Some(version) => format!("efa {version}"),
        None if root.join("sys/module/efa").exists() => "efa, part of the kernel".to_owned(),
        None => "not loaded".to_owned(),
    };
    let found = match without.as_slice() {
        [] => format!("{found}, {count} devices"),
        [first, ..] => format!(
            "{found}, {count} devices; {} without it, such as {first}",
            without.len()
        ),
    };
    Check::new(
        NAME,
        found,
        "the module efa, for every EFA device on PCI",
        "modprobe efa; or install it: curl -O https://efa-installer.amazonaws.com/\
         aws-efa-installer-latest.tar.gz && tar xf aws-efa-installer-latest.tar.gz && \
         cd aws-efa-installer && sudo ./efa_installer.sh -y",
        without.is_empty(),
    )
}

fn device_files(devices: &Devices) -> Check {
    const NAME: &str = "device files";
    if devices.rdma.is_empty() {
        return Check::new(NAME, "no RDMA device".to_owned(), "nothing", "", true);
    }
    let troubles: Vec<String> = devices
        .rdma
        .iter()
        .filter_map(RdmaDevice::trouble)
        .collect();
    let usable = devices.rdma.iter().filter(|nic| nic.is_usable()).count();
    let mut found = format!(
        "{usable} of {} RDMA devices can be used",
        devices.rdma.len()
    );
    for trouble in troubles.iter().take(3) {
        found.push_str("; ");
        found.push_str(trouble);
    }
    if let Some(more) = troubles.len().checked_sub(3).filter(|more| *more > 0) {
        found.push_str(&format!("; and {more} more"));
    }
    Check::new(
        NAME,
        found,
        "every /dev/infiniband/uverbs* opens and its port is active",
        "docker run --device=/dev/infiniband (or the EFA device plugin in Kubernetes); \
         otherwise chmod 666 /dev/infiniband/uverbs*; ip link set up for ports that are down",
        troubles.is_empty(),
    )
}

fn shared_memory(root: &Path) -> Check {
    let mounts = text(root, "proc/self/mounts")
        .or_else(|| text(root, "proc/mounts"))
        .unwrap_or_default();
    // The last one is on top.
    let options = mounts.lines().rev().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.nth(1) == Some("/dev/shm")).then(|| words.nth(1).unwrap_or_default())
    });
    let given = options.and_then(|options| {
        let size = options.split(',').find_map(|o| o.strip_prefix("size="))?;
        let digits = size.trim_end_matches(['k', 'K']);
        let unit = if digits.len() == size.len() { 1 } else { 1024 };
        digits.parse::<u64>().ok()?.checked_mul(unit)
    });
    // Where no size is named, half of the memory.
    let memory = || {
        let info = fs::read_to_string(root.join("proc/meminfo")).ok()?;
        let line = info
            .lines()
            .find_map(|line| line.strip_prefix("MemTotal:"))?;
        line.split_whitespace()
            .next()?
            .parse::<u64>()
            .ok()?
            .checked_mul(512)
    };
    let bytes = options.and_then(|_| given.or_else(memory));
    Check::new(
        "/dev/shm",
        match (options, bytes) {
            (None, _) => "not mounted".to_owned(),
            (Some(_), None) => "of unknown size".to_owned(),
            (Some(_), Some(bytes)) => size(bytes),
        },
        &format!("at least {}", size(ENOUGH_SHM)),
        "docker run --shm-size=8g (or --ipc=host); otherwise mount -o remount,size=8G /dev/shm",
        options.is_some() && bytes.is_none_or(|bytes| bytes >= ENOUGH_SHM),
    )
}

fn copies_between_processes(root: &Path) -> Check {
    let scope = text(root, "proc/sys/kernel/yama/ptrace_scope");
    let ok = scope.as_deref().is_none_or(|scope| scope == "0");
    Check::new(
        "copies between processes",
        match &scope {
            Some(scope) => format!("kernel.yama.ptrace_scope = {scope}"),
            None => "not restricted".to_owned(),
        },
        "kernel.yama.ptrace_scope = 0, and one PID namespace for both processes, for cma",
        "sysctl -w kernel.yama.ptrace_scope=0; docker run --pid=host --cap-add=SYS_PTRACE",
        ok,
    )
}

fn loopback(root: &Path) -> Check {
    let flags = text(root, "sys/class/net/lo/flags");
    let up = flags
        .as_deref()
        .and_then(|flags| u32::from_str_radix(flags.trim_start_matches("0x"), 16).ok())
        .map(|flags| flags & 1 == 1);
    Check::new(
        "loopback interface",
        match up {
            Some(true) => "up".to_owned(),
            Some(false) => "down".to_owned(),
            None => "unknown".to_owned(),
        },
        "up: UCX has nothing else to notice dead peers with, unless there is RDMA or another interface",
        "ip link set lo up",
        up != Some(false),
    )
}

fn size(bytes: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    for (shift, unit) in units {
        if bytes >= 1 << shift {
            let whole = bytes >> shift;
            return format!("{whole} {unit}");
        }
    }
    format!("{bytes} bytes")
}

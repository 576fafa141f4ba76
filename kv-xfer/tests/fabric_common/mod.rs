//! Trees of other machines' `/sys`, `/proc` and `/dev`.
#![allow(dead_code, clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// A machine of files.
pub struct Machine {
    root: TempDir,
}

/// What a p5en has, by PCI address: each GPU, and the two NICs below the same switch.
pub const GPUS: u32 = 8;
pub const NICS_PER_GPU: u32 = 2;

pub fn gpu_bus(gpu: u32) -> String {
    format!("0000:{:02x}:00.0", 0x53 + 0x10 * gpu)
}

pub fn nic_bus(nic: u32) -> String {
    let switch = 0x50 + 0x10 * (nic / NICS_PER_GPU);
    format!("0000:{:02x}:00.0", switch + 4 + nic % NICS_PER_GPU)
}

impl Machine {
    /// A machine with nothing fast: enough limits, loopback.
    pub fn plain() -> Self {
        let machine = Self {
            root: tempfile::tempdir_in("/dev/shm")
                .or_else(|_| tempfile::tempdir())
                .unwrap(),
        };
        machine.put("proc/self/limits", &limits("unlimited"));
        machine.put(
            "proc/self/mounts",
            "tmpfs /dev/shm tmpfs rw,relatime,size=67108864k 0 0\n",
        );
        machine.put("proc/sys/vm/max_map_count", "1048576\n");
        machine.put("proc/sys/kernel/osrelease", "6.8.0-1021-aws\n");
        machine.put(
            "proc/meminfo",
            "MemTotal: 2097152000 kB\nHugePages_Total: 5128\nHugePages_Free: 5000\n",
        );
        let thp = "sys/kernel/mm/transparent_hugepage/enabled";
        machine.put(thp, "always [madvise] never\n");
        machine.put("sys/class/net/lo/flags", "0x9\n");
        machine
    }

    /// A p5en: 8 GPUs, 16 EFA devices, 2 NUMA nodes.
    pub fn p5en() -> Self {
        let identity = |n: u32| (0..n).collect::<Vec<_>>();
        Self::p5en_numbered(&identity(GPUS * NICS_PER_GPU), &identity(GPUS))
    }

    /// The same, with NICs and GPUs counted in another order.
    pub fn p5en_numbered(nic_numbers: &[u32], gpu_numbers: &[u32]) -> Self {
        let machine = Self::plain();
        machine.put("sys/module/efa/version", "2.13.0\n");
        machine.put(
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15\n",
        );
        for (gpu, number) in (0..).zip(gpu_numbers) {
            machine.gpu(gpu, *number);
        }
        for (nic, number) in (0..).zip(nic_numbers) {
            machine.nic(nic, *number);
        }
        machine
    }

    pub fn root(&self) -> &Path {
        self.root.path()
    }

    pub fn put(&self, path: &str, text: &str) {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub fn remove(&self, path: &str) {
        let path = self.root().join(path);
        if path.is_dir() {
            fs::remove_dir_all(path).unwrap();
        } else {
            fs::remove_file(path).unwrap();
        }
    }

    fn link(&self, path: &str, to: &Path) {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(to, path).unwrap();
    }

    /// A device on PCI below the switch of a GPU.
    fn device(&self, switch: u32, slot: u32, bus: &str, ids: (&str, &str, &str)) -> PathBuf {
        let base = 0x50 + 0x10 * switch;
        let numa = u32::from(switch >= GPUS / 2);
        let folder = format!(
            "sys/devices/pci0000:{base:02x}/0000:{base:02x}:01.0/0000:{:02x}:00.0/\
             0000:{:02x}:{slot:02x}.0/{bus}",
            base + 1,
            base + 2
        );
        let (vendor, device, class) = ids;
        self.put(&format!("{folder}/vendor"), &format!("{vendor}\n"));
        self.put(&format!("{folder}/device"), &format!("{device}\n"));
        self.put(&format!("{folder}/class"), &format!("{class}\n"));
        self.put(&format!("{folder}/numa_node"), &format!("{numa}\n"));
        let real = self.root().join(folder);
        self.link(&format!("sys/bus/pci/devices/{bus}"), &real);
        real
    }

    fn gpu(&self, gpu: u32, number: u32) {
        let bus = gpu_bus(gpu);
        self.device(gpu, 0, &bus, ("0x10de", "0x2335", "0x030200"));
        self.put(
            &format!("proc/driver/nvidia/gpus/{bus}/information"),
            &format!("Model: \t\t NVIDIA H200\nDevice Minor: \t {number}\n"),
        );
        self.put(&format!("dev/nvidia{number}"), "");
    }

    fn nic(&self, nic: u32, number: u32) {
        let (switch, bus) = (nic / NICS_PER_GPU, nic_bus(nic));
        let slot = 1 + nic % NICS_PER_GPU;
        let real = self.device(switch, slot, &bus, ("0x1d0f", "0xefa3", "0x020000"));
        self.put("sys/bus/pci/drivers/efa/bind", "");
        symlink(
            self.root().join("sys/bus/pci/drivers/efa"),
            real.join("driver"),
        )
        .unwrap();
        let name = nic_name(number);
        let class = format!("sys/class/infiniband/{name}");
        self.link(&format!("{class}/device"), &real);
        self.put(&format!("{class}/ports/1/state"), "4: ACTIVE\n");
        self.put(&format!("{class}/ports/1/rate"), "200 Gb/sec (4X HDR)\n");
        self.count(&name, 0, 0);
        let verbs = format!("sys/class/infiniband_verbs/uverbs{number}/ibdev");
        self.put(&verbs, &format!("{name}\n"));
        self.put(&format!("dev/infiniband/uverbs{number}"), "");
    }

    /// Sets the counters of a NIC.
    pub fn count(&self, name: &str, received: u64, read: u64) {
        let counters = format!("sys/class/infiniband/{name}/ports/1/hw_counters");
        for (counter, bytes) in [
            ("rx_bytes", received),
            ("tx_bytes", 0),
            ("rdma_read_bytes", read),
            ("rdma_write_bytes", 0),
        ] {
            self.put(&format!("{counters}/{counter}"), &format!("{bytes}\n"));
        }
    }

    /// The NIC's file is there and cannot be opened: a loop of links is refused also to root.
    pub fn refuse(&self, number: u32) {
        let file = format!("dev/infiniband/uverbs{number}");
        self.remove(&file);
        self.link(&file, &self.root().join(&file));
    }

    /// The NIC's link to its PCI device leads nowhere.
    pub fn dangle(&self, number: u32) {
        let link = format!("sys/class/infiniband/{}/device", nic_name(number));
        fs::remove_file(self.root().join(&link)).unwrap();
        self.link(&link, &self.root().join("sys/devices/gone"));
    }
}

pub fn nic_name(number: u32) -> String {
    format!("rdmap{number}s0")
}

/// `/proc/self/limits` with a limit of locked memory.
pub fn limits(locked: &str) -> String {
    format!(
        "Limit                     Soft Limit           Hard Limit           Units     \n\
         Max locked memory         {locked}             {locked}             bytes     \n\
         Max file locks            unlimited            unlimited            locks     \n"
    )
}

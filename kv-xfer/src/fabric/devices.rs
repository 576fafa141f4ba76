//! The GPUs and RDMA devices of a machine, from sysfs. Every function takes the root folder to look below, `/` for this
//! machine. What cannot be read of one device is a fault of that device and hides no other.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::pci::{BusId, Place};

/// PCI vendor of EFA devices.
const AMAZON: u32 = 0x1d0f;
/// PCI vendor of the GPUs that are known here.
const NVIDIA: u32 = 0x10de;

/// Whether a device's file can be opened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    /// It can.
    Open,
    /// There is no such file: in a container it was not passed in.
    Missing,
    /// It may not be, in the system's words.
    Refused(String),
}

impl Access {
    /// Tries a device's file, for reading and writing.
    fn open(file: &Path) -> Self {
        match OpenOptions::new().read(true).write(true).open(file) {
            Ok(_) => Self::Open,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::Missing,
            Err(error) => Self::Refused(error.to_string()),
        }
    }

    /// Looks whether it is there. Opening a GPU's file may wake the device, which takes seconds.
    fn present(file: &Path) -> Self {
        match fs::metadata(file) {
            Ok(_) => Self::Open,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::Missing,
            Err(error) => Self::Refused(error.to_string()),
        }
    }
}

/// An RDMA device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RdmaDevice {
    /// Its name under `/sys/class/infiniband`.
    pub name: String,
    /// Its PCI address.
    pub bus: Option<BusId>,
    /// Its place.
    pub place: Place,
    /// Its driver: `efa`, `mlx5_core`, …
    pub driver: String,
    /// PCI vendor and device.
    pub ids: Option<(u32, u32)>,
    /// Speed of its first port, as the kernel says it.
    pub rate: String,
    /// Whether its first port is active.
    pub active: bool,
    /// Its file under `/dev/infiniband`.
    pub file: Option<PathBuf>,
    /// Whether that can be opened.
    pub access: Access,
    /// What could not be found out about it.
    pub faults: Vec<String>,
}

impl RdmaDevice {
    /// Whether it is an EFA device.
    #[must_use]
    pub fn is_efa(&self) -> bool {
        self.driver == "efa"
            || matches!(self.ids, Some((AMAZON, device)) if (0xefa0..=0xefaf).contains(&device))
    }

    /// Whether it can carry anything.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.active && self.access == Access::Open
    }

    /// What keeps it from carrying anything.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        let file = match &self.file {
            Some(file) => file.display().to_string(),
            None => "its file under /dev/infiniband".to_owned(),
        };
        match &self.access {
            Access::Missing => Some(format!("{}: {file} is missing", self.name)),
            Access::Refused(why) => Some(format!("{}: {file}: {why}", self.name)),
            Access::Open if !self.active => Some(format!("{}: its port is not active", self.name)),
            Access::Open => None,
        }
    }
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Gpu {
    /// Its PCI address.
    pub bus: BusId,
    /// Its place.
    pub place: Place,
    /// Its model, where the driver says it.
    pub model: String,
    /// Number of its file `/dev/nvidiaN`, where the driver says it. Not an ordinal of CUDA.
    pub minor: Option<u32>,
    /// Whether that file is there: if not, this process cannot use the GPU.
    pub access: Access,
}

/// What a machine has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Devices {
    /// GPUs, by PCI address.
    pub gpus: Vec<Gpu>,
    /// RDMA devices, by PCI address, then by name.
    pub rdma: Vec<RdmaDevice>,
    /// EFA devices on PCI that have no driver.
    pub efa_without_driver: Vec<BusId>,
}

impl Devices {
    /// Looks below a root folder.
    #[must_use]
    pub fn look(root: &Path) -> Self {
        let rdma = rdma(root);
        let mut efa_without_driver = Vec::new();
        let mut gpus = Vec::new();
        let pci = root.join("sys/bus/pci/devices");
        for name in names(&pci) {
            let Ok(bus) = name.parse::<BusId>() else {
                continue;
            };
            let folder = pci.join(&name);
            let (vendor, device) = (number(&folder, "vendor"), number(&folder, "device"));
            match (vendor, device) {
                (Some(AMAZON), Some(0xefa0..=0xefaf))
                    if fs::metadata(folder.join("driver")).is_err() =>
                {
                    efa_without_driver.push(bus);
                }
                // Display and 3D controllers; a GPU has an audio function and bridges, too.
                (Some(NVIDIA), _) if matches!(number(&folder, "class"), Some(class) if class >> 16 == 3) =>
                {
                    gpus.push(gpu(root, bus, &folder));
                }
                _ => {}
            }
        }
        gpus.sort_by_key(|gpu| gpu.bus);
        efa_without_driver.sort();
        Self {
            gpus,
            rdma,
            efa_without_driver,
        }
    }

    /// EFA devices.
    pub fn efa(&self) -> impl Iterator<Item = &RdmaDevice> {
        self.rdma.iter().filter(|nic| nic.is_efa())
    }

    /// GPUs that this process can use.
    pub fn visible_gpus(&self) -> impl Iterator<Item = &Gpu> {
        self.gpus.iter().filter(|gpu| gpu.access == Access::Open)
    }

    /// In a line.
    #[must_use]
    pub fn summary(&self) -> String {
        let (efa, rdma) = (self.efa().count(), self.rdma.len());
        let visible = self.visible_gpus().count();
        let others = rdma.saturating_sub(efa);
        let mut parts = vec![
            match efa {
                0 => "no EFA device".to_owned(),
                n => format!("{n} EFA devices"),
            },
            match others {
                0 if efa == 0 => "no RDMA device".to_owned(),
                0 => "no other RDMA device".to_owned(),
                n => format!("{n} RDMA devices"),
            },
        ];
        if !self.efa_without_driver.is_empty() {
            let count = self.efa_without_driver.len();
            parts.push(format!("{count} EFA devices without a driver"));
        }
        parts.push(match (self.gpus.len(), visible) {
            (0, _) => "no GPU".to_owned(),
            (all, visible) if all == visible => format!("{all} GPUs"),
            (all, visible) => format!("{all} GPUs, of which {visible} can be used here"),
        });
        let troubles: Vec<String> = self.rdma.iter().filter_map(RdmaDevice::trouble).collect();
        parts.extend(troubles);
        parts.join(", ")
    }
}

fn rdma(root: &Path) -> Vec<RdmaDevice> {
    let class = root.join("sys/class/infiniband");
    let verbs = root.join("sys/class/infiniband_verbs");
    // Which file under /dev belongs to which device.
    let files: Vec<(String, String)> = names(&verbs)
        .into_iter()
        .filter_map(|file| Some((text(&verbs.join(&file), "ibdev")?, file)))
        .collect();
    let mut devices: Vec<RdmaDevice> = names(&class)
        .into_iter()
        .map(|name| rdma_device(root, &class, name, &files))
        .collect();
    devices
        .sort_by(|a, b| (a.bus.is_none(), a.bus, &a.name).cmp(&(b.bus.is_none(), b.bus, &b.name)));
    devices
}

fn rdma_device(root: &Path, class: &Path, name: String, files: &[(String, String)]) -> RdmaDevice {
    let folder = class.join(&name);
    let device = folder.join("device");
    let mut faults = Vec::new();
    let real = fs::canonicalize(&device);
    if let Err(error) = &real {
        faults.push(format!("{}: {error}", device.display()));
    }
    let last = |path: PathBuf| path.file_name()?.to_str().map(str::to_owned);
    // A virtual device has no address of its own; its parent's is somebody else's.
    let bus = real.ok().and_then(last).and_then(|name| name.parse().ok());
    let driver = fs::canonicalize(device.join("driver")).ok().and_then(last);
    if driver.is_none() {
        faults.push("its driver is not known".to_owned());
    }
    let port = folder.join("ports/1");
    let state = text(&port, "state");
    if state.is_none() {
        faults.push(format!("{}/state cannot be read", port.display()));
    }
    let file = files
        .iter()
        .find(|(device, _)| *device == name)
        .map(|(_, file)| root.join("dev/infiniband").join(file));
    let access = file.as_deref().map_or(Access::Missing, Access::open);
    RdmaDevice {
        bus,
        place: Place::of(&device),
        driver: driver.unwrap_or_default(),
        ids: number(&device, "vendor").zip(number(&device, "device")),
        rate: text(&port, "rate").unwrap_or_default(),
        active: state.is_some_and(|state| state.contains("ACTIVE")),
        file,
        access,
        faults,
        name,
    }
}

fn gpu(root: &Path, bus: BusId, folder: &Path) -> Gpu {
    let about = root.join("proc/driver/nvidia/gpus").join(bus.to_string());
    let about = fs::read_to_string(about.join("information")).unwrap_or_default();
    let field = |name: &str| {
        about.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == name).then(|| value.trim().to_owned())
        })
    };
    let minor = field("Device Minor").and_then(|minor| minor.parse().ok());
    let access = match minor {
        Some(minor) => Access::present(&root.join(format!("dev/nvidia{minor}"))),
        None => Access::Refused("the NVIDIA driver does not know it".to_owned()),
    };
    Gpu {
        bus,
        place: Place::of(folder),
        model: field("Model").unwrap_or_default(),
        minor,
        access,
    }
}

/// What is in a folder, sorted.
pub(super) fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

/// What a file says, without blanks around it.
pub(super) fn text(folder: &Path, name: &str) -> Option<String> {
    let text = fs::read_to_string(folder.join(name)).ok()?;
    Some(text.trim().to_owned())
}

/// A number in hexadecimal, `0x1d0f`.
fn number(folder: &Path, name: &str) -> Option<u32> {
    let text = text(folder, name)?;
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

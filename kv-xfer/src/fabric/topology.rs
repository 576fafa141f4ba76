//! Which NICs are near which GPU.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::devices::Devices;
use super::pci::{BusId, Distance};

/// A NIC as a GPU sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Near {
    /// Its name under `/sys/class/infiniband`.
    pub nic: String,
    /// Its PCI address.
    pub bus: Option<BusId>,
    /// How far it is.
    pub distance: Distance,
    /// Whether it can carry anything.
    pub usable: bool,
}

/// The NICs of each GPU, nearest first. GPUs are named by PCI address, so it does not matter which of them a process sees
/// and in which order CUDA counts them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    gpus: BTreeMap<BusId, Vec<Near>>,
}

impl Topology {
    /// Works it out. Every NIC is in every GPU's list, also those that are broken.
    #[must_use]
    pub fn of(devices: &Devices) -> Self {
        let gpus = devices.gpus.iter().map(|gpu| {
            let mut nics: Vec<Near> = devices
                .rdma
                .iter()
                .map(|nic| Near {
                    nic: nic.name.clone(),
                    bus: nic.bus,
                    distance: gpu.place.distance(&nic.place),
                    usable: nic.is_usable(),
                })
                .collect();
            // Among equals by address: names may differ from boot to boot.
            nics.sort_by(|a, b| {
                (a.distance, a.bus.is_none(), a.bus, &a.nic).cmp(&(
                    b.distance,
                    b.bus.is_none(),
                    b.bus,
                    &b.nic,
                ))
            });
            (gpu.bus, nics)
        });
        Self {
            gpus: gpus.collect(),
        }
    }

    /// The GPUs, by address.
    pub fn gpus(&self) -> impl Iterator<Item = BusId> + '_ {
        self.gpus.keys().copied()
    }

    /// All NICs, as a GPU sees them; empty for one that is not there.
    #[must_use]
    pub fn nics(&self, gpu: BusId) -> &[Near] {
        self.gpus.get(&gpu).map_or(&[], Vec::as_slice)
    }

    /// The usable NICs that are nearest to a GPU: those over which its bytes should go.
    pub fn nearest(&self, gpu: BusId) -> impl Iterator<Item = &Near> {
        let nics = self.nics(gpu);
        let first = nics.iter().find(|nic| nic.usable).map(|nic| nic.distance);
        nics.iter()
            .filter(move |nic| nic.usable && same(Some(nic.distance), first))
    }
}

/// Whether two distances are as good as each other: below one bridge the number of links does not count.
fn same(a: Option<Distance>, b: Option<Distance>) -> bool {
    match (a, b) {
        (Some(Distance::SameBridge(_)), Some(Distance::SameBridge(_)))
        | (Some(Distance::SameRoot(_)), Some(Distance::SameRoot(_))) => true,
        (a, b) => a == b,
    }
}

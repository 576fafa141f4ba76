//! What all that was found amounts to.

use std::collections::BTreeSet;
use std::fmt;

use nixl_sys::UcxResource;
use serde::{Deserialize, Serialize};

use super::devices::Devices;
use super::preflight::Check;
use super::requirement::{Carrier, Requirement, Unmet};

/// The best that a machine can do for bytes between engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Verdict {
    /// EFA between nodes.
    Efa,
    /// InfiniBand or RoCE between nodes.
    Rdma,
    /// GPU to GPU within the node; nothing fast between nodes.
    Nvlink,
    /// Shared memory within the node; nothing fast between nodes.
    Shm,
    /// Sockets for everything.
    TcpOnly,
    /// Nothing works, or something fast is there that does not.
    Broken,
}

impl Verdict {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Efa => "efa",
            Self::Rdma => "rdma",
            Self::Nvlink => "nvlink",
            Self::Shm => "shm",
            Self::TcpOnly => "tcp-only",
            Self::Broken => "broken",
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// All that was found out about a machine.
#[derive(Debug, Clone, Default)]
pub struct Findings {
    /// Its devices.
    pub devices: Devices,
    /// What was looked at.
    pub checks: Vec<Check>,
    /// What UCX can use; `None` when UCX could not be asked.
    pub ucx: Option<Vec<UcxResource>>,
    /// Whether NIXL can use UCX.
    pub ucx_works: bool,
    /// The providers that libfabric offers; `None` when it could not be asked.
    pub libfabric: Option<Vec<String>>,
    /// Whether NIXL's LIBFABRIC plugin loads.
    pub libfabric_works: bool,
}

impl Findings {
    /// The transports that UCX would use within the node, and between nodes.
    fn ucx(&self, carrier: Carrier) -> impl Iterator<Item = &UcxResource> {
        let resources = self.ucx.iter().flatten().filter(|_| self.ucx_works);
        resources.filter(move |resource| Carrier::of_ucx(&resource.transport) == Some(carrier))
    }

    fn libfabric(&self, carrier: Carrier) -> impl Iterator<Item = &String> {
        let providers = self.libfabric.iter().flatten();
        providers
            .filter(|_| self.libfabric_works)
            .filter(move |provider| Carrier::of_provider(provider) == Some(carrier))
    }

    /// What can carry bytes here: the software has a way, and the devices for it can be used.
    #[must_use]
    pub fn carriers(&self) -> BTreeSet<Carrier> {
        let efa = self.devices.efa().any(super::RdmaDevice::is_usable);
        let rdma = self
            .devices
            .rdma
            .iter()
            .any(|n| !n.is_efa() && n.is_usable());
        let gpus = self.devices.visible_gpus().count();
        let locked = !self.failed("memlock");
        Carrier::ALL
            .into_iter()
            .filter(|carrier| {
                let ucx = self.ucx(*carrier).next().is_some();
                // NIXL's plugin takes no other provider than these.
                let libfabric = matches!(carrier, Carrier::Efa | Carrier::Tcp)
                    && self.libfabric(*carrier).next().is_some();
                match carrier {
                    Carrier::Efa => efa && locked && (ucx || libfabric),
                    Carrier::Rdma => rdma && locked && ucx,
                    Carrier::Nvlink => gpus > 1 && ucx,
                    Carrier::Shm => ucx,
                    Carrier::Tcp => ucx || libfabric,
                }
            })
            .collect()
    }

    fn failed(&self, name: &str) -> bool {
        self.checks
            .iter()
            .any(|check| check.name == name && !check.ok)
    }

    /// What it amounts to.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        let carriers = self.carriers();
        let has = |carrier| carriers.contains(&carrier);
        if has(Carrier::Efa) {
            return Verdict::Efa;
        }
        let efa =
            self.devices.efa().next().is_some() || !self.devices.efa_without_driver.is_empty();
        let other = self.devices.rdma.iter().any(|nic| !nic.is_efa());
        if has(Carrier::Rdma) {
            return Verdict::Rdma;
        }
        // Devices for it are there: bytes would go another way without a word.
        if efa || other {
            return Verdict::Broken;
        }
        match carriers.first() {
            Some(Carrier::Nvlink) => Verdict::Nvlink,
            Some(Carrier::Shm) => Verdict::Shm,
            Some(Carrier::Tcp) => Verdict::TcpOnly,
            _ => Verdict::Broken,
        }
    }

    /// What NIXL will use for the peers of this node, in words.
    #[must_use]
    pub fn local(&self) -> String {
        if self.ucx.is_none() || !self.ucx_works {
            return "nothing: UCX does not work".to_owned();
        }
        let mut ways = Vec::new();
        if self.devices.visible_gpus().count() > 1 && self.ucx(Carrier::Nvlink).next().is_some() {
            ways.push("nvlink (cuda_ipc) between GPUs".to_owned());
        }
        let shm: BTreeSet<&str> = self
            .ucx(Carrier::Shm)
            .map(|r| r.transport.as_str())
            .collect();
        let direct = ["xpmem", "knem", "cma"]
            .into_iter()
            .find(|name| shm.contains(name));
        match direct {
            Some(name) => ways.push(format!(
                "shm ({name}: one copy by the kernel) for host memory"
            )),
            None if shm.is_empty() => {}
            None => ways.push(format!(
                "shm ({}: through a shared segment) for host memory",
                shm.into_iter().collect::<Vec<_>>().join(", ")
            )),
        }
        if ways.is_empty() {
            return self.remote_way(true);
        }
        ways.join(", ")
    }

    /// What NIXL will use for peers on other nodes, in words.
    #[must_use]
    pub fn remote(&self) -> String {
        self.remote_way(false)
    }

    fn remote_way(&self, local: bool) -> String {
        let devices = |carrier| {
            let devices: BTreeSet<&str> = self
                .ucx(carrier)
                .map(|resource| resource.device.as_str())
                .filter(|device| local || *device != "lo")
                .collect();
            devices.into_iter().collect::<Vec<_>>().join(", ")
        };
        let carriers = self.carriers();
        if carriers.contains(&Carrier::Efa) {
            let with = if self.libfabric(Carrier::Efa).next().is_some() {
                "LIBFABRIC, with FI_PROVIDER=efa"
            } else {
                "UCX, srd"
            };
            return format!("efa ({with})");
        }
        if carriers.contains(&Carrier::Rdma) {
            return format!("rdma (UCX, {})", devices(Carrier::Rdma));
        }
        match devices(Carrier::Tcp).as_str() {
            "" => "nothing".to_owned(),
            devices => {
                format!("tcp over {devices} (reads are emulated: the peer's processor takes part)")
            }
        }
    }

    /// Whether what is required is here.
    ///
    /// # Errors
    /// [`Unmet`], with what there is and what would help.
    pub fn check(&self, requirement: Requirement) -> Result<(), Unmet> {
        let carriers = self.carriers();
        let met = match requirement {
            Requirement::Any => self.verdict() != Verdict::Broken,
            Requirement::Nvlink => carriers.contains(&Carrier::Nvlink),
            _ => carriers.iter().any(|carrier| requirement.admits(*carrier)),
        };
        if met {
            return Ok(());
        }
        let names: Vec<&str> = carriers.iter().map(|carrier| carrier.name()).collect();
        let carried = match names.as_slice() {
            [] => "nothing that could carry bytes".to_owned(),
            names => format!("only {}", names.join(", ")),
        };
        let fixes: Vec<&str> = self
            .checks
            .iter()
            .filter(|check| !check.ok && !check.fix.is_empty())
            .map(|check| check.fix.as_str())
            .collect();
        Err(Unmet {
            wanted: requirement,
            found: format!("{carried}; {}", self.devices.summary()),
            fix: match fixes.as_slice() {
                [] => "run on a machine that has it, or require something else".to_owned(),
                fixes => fixes.join("; "),
            },
        })
    }
}

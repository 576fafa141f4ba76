//! What must carry the bytes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// What carries bytes between two processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Carrier {
    /// EFA devices, over SRD.
    Efa,
    /// Other RDMA devices: InfiniBand or RoCE.
    Rdma,
    /// GPU to GPU within a node.
    Nvlink,
    /// Memory of the same node: copies by the kernel (`cma`) or through shared segments.
    Shm,
    /// Sockets. One-sided reads are emulated: the other side's processor takes part.
    Tcp,
}

impl Carrier {
    /// Every carrier, the fastest first.
    pub const ALL: [Self; 5] = [Self::Efa, Self::Rdma, Self::Nvlink, Self::Shm, Self::Tcp];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Efa => "efa",
            Self::Rdma => "rdma",
            Self::Nvlink => "nvlink",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        }
    }

    /// What a transport of UCX is. `None` for those that carry nothing between processes (`self`, `cuda_copy`) and
    /// for names that are not known.
    #[must_use]
    pub fn of_ucx(transport: &str) -> Option<Self> {
        match transport {
            "srd" | "srd_verbs" => Some(Self::Efa),
            "cuda_ipc" => Some(Self::Nvlink),
            "cma" | "knem" | "xpmem" | "sysv" | "posix" | "sm" | "shm" | "mm" => Some(Self::Shm),
            "tcp" => Some(Self::Tcp),
            "ib" | "rc" | "ud" | "dc" | "rc_x" | "ud_x" | "dc_x" | "gga" | "gga_mlx5" => {
                Some(Self::Rdma)
            }
            name if ["rc_", "ud_", "dc_"].iter().any(|p| name.starts_with(p)) => Some(Self::Rdma),
            _ => None,
        }
    }

    /// What a provider of libfabric is, with or without a utility layer (`tcp;ofi_rxm`).
    #[must_use]
    pub fn of_provider(provider: &str) -> Option<Self> {
        match provider.split(';').next().unwrap_or_default() {
            "efa" => Some(Self::Efa),
            "verbs" | "cxi" | "psm2" | "psm3" | "opx" => Some(Self::Rdma),
            "shm" | "sm2" => Some(Self::Shm),
            "tcp" | "sockets" | "udp" | "net" => Some(Self::Tcp),
            _ => None,
        }
    }
}

impl fmt::Display for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What must carry the bytes of every peer. Anything else is refused, before traffic where that is possible.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Requirement {
    /// EFA devices only.
    Efa,
    /// RDMA devices: InfiniBand, RoCE or EFA.
    Rdma,
    /// GPU to GPU within a node. Lease words, in host memory, go through shared memory.
    Nvlink,
    /// Memory of the same node only.
    Shm,
    /// Sockets only.
    Tcp,
    /// Whatever NIXL chooses.
    #[default]
    Any,
}

impl Requirement {
    /// Every requirement.
    pub const ALL: [Self; 6] = [
        Self::Efa,
        Self::Rdma,
        Self::Nvlink,
        Self::Shm,
        Self::Tcp,
        Self::Any,
    ];

    /// The carrier that it is named after.
    #[must_use]
    pub fn carrier(self) -> Option<Carrier> {
        match self {
            Self::Efa => Some(Carrier::Efa),
            Self::Rdma => Some(Carrier::Rdma),
            Self::Nvlink => Some(Carrier::Nvlink),
            Self::Shm => Some(Carrier::Shm),
            Self::Tcp => Some(Carrier::Tcp),
            Self::Any => None,
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.carrier().map_or("any", Carrier::name)
    }

    /// Whether bytes may go that way.
    #[must_use]
    pub fn admits(self, carrier: Carrier) -> bool {
        match self {
            Self::Any => true,
            Self::Efa => carrier == Carrier::Efa,
            Self::Rdma => matches!(carrier, Carrier::Efa | Carrier::Rdma),
            Self::Nvlink => matches!(carrier, Carrier::Nvlink | Carrier::Shm),
            Self::Shm => carrier == Carrier::Shm,
            Self::Tcp => carrier == Carrier::Tcp,
        }
    }

    /// The transports that UCX may use; `None`: those that it chooses. [`Surroundings::transports`](super::Surroundings::transports)
    /// says which of them a machine has devices for.
    ///
    /// What UCX is not allowed it does not fall back to: without a device for one of these, the backend cannot be created.
    #[must_use]
    pub fn ucx_transports(self) -> Option<&'static [&'static str]> {
        match self {
            Self::Any => None,
            Self::Efa => Some(&["srd", "cuda_copy"]),
            Self::Rdma => Some(&["rc", "dc", "ud", "srd", "cuda_copy"]),
            Self::Nvlink => Some(&["cuda_ipc", "cuda_copy", "sm", "self"]),
            Self::Shm => Some(&["sm"]),
            Self::Tcp => Some(&["tcp", "cuda_copy"]),
        }
    }

    /// The provider of libfabric that NIXL's LIBFABRIC plugin must be held to with `FI_PROVIDER`; an error in words when
    /// that plugin cannot do what is required.
    ///
    /// # Errors
    /// What the plugin lacks.
    pub fn provider(self) -> Result<Option<&'static str>, &'static str> {
        match self {
            Self::Any => Ok(None),
            Self::Efa | Self::Rdma => Ok(Some("efa")),
            Self::Tcp => Ok(Some("tcp")),
            Self::Nvlink | Self::Shm => {
                Err("the LIBFABRIC plugin knows the providers cxi, efa, tcp and sockets only")
            }
        }
    }

    /// What reads of a peer must reach at least, GB/s, unless the caller says otherwise: far below what such a link does,
    /// far above what a link does that has fallen back. Emulated reads over TCP do 0.4 to 1.
    #[must_use]
    pub fn default_floor_gbps(self) -> f64 {
        match self {
            Self::Efa | Self::Rdma => 1.5,
            Self::Nvlink | Self::Shm => 0.25,
            Self::Tcp | Self::Any => 0.0,
        }
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Not the name of a requirement.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0} is no carrier; choose one of efa, rdma, nvlink, shm, tcp, any")]
pub struct UnknownRequirement(pub String);

impl FromStr for Requirement {
    type Err = UnknownRequirement;

    fn from_str(name: &str) -> Result<Self, UnknownRequirement> {
        Self::ALL
            .into_iter()
            .find(|requirement| requirement.name() == name)
            .ok_or_else(|| UnknownRequirement(name.to_owned()))
    }
}

/// What is required is not there.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{wanted} is required to carry the bytes. Found: {found}. What helps: {fix}")]
pub struct Unmet {
    /// What is required.
    pub wanted: Requirement,
    /// What there is instead.
    pub found: String,
    /// What would help.
    pub fix: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_there_and_back() {
        for requirement in Requirement::ALL {
            assert_eq!(requirement.to_string().parse(), Ok(requirement));
        }
        let error = "infiniband".parse::<Requirement>().unwrap_err();
        assert!(error.to_string().contains("efa, rdma"), "{error}");
    }

    #[test]
    fn what_is_allowed_is_what_is_required() {
        for requirement in Requirement::ALL {
            for transport in requirement.ucx_transports().unwrap_or_default() {
                if let Some(carrier) = Carrier::of_ucx(transport) {
                    assert!(requirement.admits(carrier), "{requirement}: {transport}");
                }
            }
        }
        assert!(!Requirement::Rdma.admits(Carrier::Tcp));
        assert!(!Requirement::Efa.admits(Carrier::Rdma));
        assert_eq!(Carrier::of_ucx("rc_mlx5"), Some(Carrier::Rdma));
        assert_eq!(Carrier::of_ucx("self"), None);
        assert_eq!(Carrier::of_provider("tcp;ofi_rxm"), Some(Carrier::Tcp));
    }
}

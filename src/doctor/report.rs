//! What the doctor says, for people and for programs.

use std::collections::BTreeMap;
use std::fmt;

use kv_xfer::fabric::{Carrier, Check, RdmaDevice, Requirement, Verdict};
use serde::Serialize;

use super::peer::PeerReport;
use super::probe::{LibfabricFound, NixlFound, UcxFound};

/// NICs that are named in a line.
const NAMED: usize = 4;

/// A GPU and the NICs over which its bytes should go.
#[derive(Debug, Clone, Serialize)]
pub struct GpuNics {
    /// Its model.
    pub model: String,
    /// Its NUMA node.
    pub numa: Option<u32>,
    /// Whether this process can use it.
    pub usable: bool,
    /// The usable NICs that are nearest.
    pub nics: Vec<String>,
    /// How far those are.
    pub distance: String,
}

/// Everything.
#[derive(Debug, Clone, Serialize)]
pub struct DoctorReport {
    /// What it amounts to.
    pub verdict: Verdict,
    /// What `--require` names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub required: Option<Requirement>,
    /// Why that is not met.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unmet: Option<String>,
    /// What NIXL will use for peers of this node.
    pub local: String,
    /// What NIXL will use for peers on other nodes.
    pub remote: String,
    /// What can carry bytes here, the fastest first.
    pub carriers: Vec<Carrier>,
    /// The devices, in a line.
    pub found: String,
    /// What was looked at.
    pub checks: Vec<Check>,
    /// What NIXL says.
    pub nixl: Option<NixlFound>,
    /// What UCX says.
    pub ucx: Option<UcxFound>,
    /// What libfabric says.
    pub libfabric: Option<LibfabricFound>,
    /// GPUs by PCI address.
    pub gpus: BTreeMap<String, GpuNics>,
    /// RDMA devices.
    pub rdma: Vec<RdmaDevice>,
    /// What `--peer` measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<PeerReport>,
}

impl DoctorReport {
    fn explained(&self) -> &'static str {
        match self.verdict {
            Verdict::Efa => "EFA between nodes",
            Verdict::Rdma => "InfiniBand or RoCE between nodes",
            Verdict::Nvlink => "GPU to GPU within the node, nothing fast between nodes: no RDMA",
            Verdict::Shm => "shared memory within the node, nothing fast between nodes: no RDMA",
            Verdict::TcpOnly => "sockets for everything: no RDMA, no shared memory",
            _ => "see the checks that failed",
        }
    }
}

impl fmt::Display for DoctorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "verdict      {}: {}", self.verdict, self.explained())?;
        if let Some(required) = self.required {
            match &self.unmet {
                None => writeln!(f, "required     {required}: it is there")?,
                Some(unmet) => writeln!(f, "required     {unmet}")?,
            }
        }
        writeln!(f, "this node    {}", self.local)?;
        writeln!(f, "other nodes  {}", self.remote)?;
        writeln!(f, "devices      {}", self.found)?;
        for (bus, gpu) in &self.gpus {
            let named = gpu
                .nics
                .iter()
                .take(NAMED)
                .cloned()
                .collect::<Vec<_>>()
                .join(", ");
            let more = match gpu.nics.len().checked_sub(NAMED) {
                Some(more) if more > 0 => format!(" and {more} more"),
                _ => String::new(),
            };
            let nics = match gpu.nics.is_empty() {
                true => "no NIC".to_owned(),
                false => format!("{named}{more} ({})", gpu.distance),
            };
            let usable = if gpu.usable { "" } else { ", not usable here" };
            writeln!(f, "GPU          {bus} {}{usable}: {nics}", gpu.model)?;
        }
        writeln!(f)?;
        for check in &self.checks {
            let mark = if check.ok { "ok  " } else { "FAIL" };
            writeln!(f, "{mark} {:<24} {}", check.name, check.found)?;
            if !check.ok {
                writeln!(f, "       needed: {}", check.needed)?;
                writeln!(f, "       what helps: {}", check.fix)?;
            }
        }
        match &self.peer {
            Some(peer) => write!(f, "\n{peer}"),
            None => Ok(()),
        }
    }
}

//! The result of `kvx bench ... --json`: one object with the machine and one row for every case and
//! participant.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Who did the read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Who {
    /// This project's engine.
    #[serde(rename = "kv-xfer")]
    KvXfer,
    /// NIXL's Python package, driven as vLLM's connector drives it.
    #[serde(rename = "nixl-python")]
    NixlPython,
    /// The `nixl-sys` crate of NIXL's authors.
    #[serde(rename = "nixl-sys")]
    NixlSys,
    /// Mooncake's transfer engine.
    #[serde(rename = "mooncake")]
    Mooncake,
    /// The bytes copied within one process.
    #[serde(rename = "memcpy")]
    Memcpy,
    /// The same pieces by the system call alone.
    #[serde(rename = "process_vm_readv")]
    ProcessVmReadv,
    /// One descriptor of as many bytes: the transport's ceiling.
    #[serde(rename = "one-descriptor")]
    OneDescriptor,
}

/// One case by one participant.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Which read, such as `random-16384x8KiB`.
    pub case: String,
    /// Who did it.
    pub who: Who,
    /// How it was set, where that differs between rows of one participant, such as
    /// `progress-thread`, `no-progress-thread`, `1 lane`; empty for its default.
    pub setting: String,
    /// What carried the bytes, as far as the participant knows: `shm`, `tcp`, ...
    pub transport: String,
    /// Rounds that it was measured in.
    pub rounds: u32,
    /// Total time of a read, milliseconds: the median over the rounds.
    pub median_ms: f64,
    /// The shortest.
    pub min_ms: f64,
    /// The longest.
    pub max_ms: f64,
    /// Median time that submitting kept the caller, microseconds.
    pub submit_us: f64,
    /// Longest of those, microseconds.
    pub submit_max_us: f64,
    /// Median time until the first layer, milliseconds, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_layer_ms: Option<f64>,
    /// Processor seconds for each GiB, reader and holder together: the median.
    pub cpu_s_per_gib: f64,
    /// Descriptors that went to the transport.
    pub descriptors: u64,
    /// Bytes of a read.
    pub bytes: u64,
    /// Bytes each second at the median, in units of 10^9.
    pub gbps: f64,
    /// Whether bytes were checked and all were right.
    pub verified: bool,
    /// Percentiles, counters and whatever else a bench has to tell.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub more: Map<String, Value>,
}

/// A participant that could not take part, in its own words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Absent {
    /// Who.
    pub who: Who,
    /// How it was set.
    pub setting: String,
    /// Its own error.
    pub why: String,
}

/// Where it was measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Processor model.
    pub cpu: String,
    /// Processors that this process may use.
    pub cores: u32,
    /// Memory, bytes.
    pub memory_bytes: u64,
    /// Kernel release.
    pub kernel: String,
    /// NIXL's version.
    pub nixl: String,
    /// GPUs, by name.
    pub gpus: Vec<String>,
    /// RDMA devices, by name.
    pub rdma: Vec<String>,
    /// Load average over one minute when the bench began.
    pub load: f64,
    /// Whether the readers and holders were on one machine.
    pub one_machine: bool,
}

/// Everything that a bench prints.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchReport {
    /// `read`, `latency`, `compare` or `scale`.
    pub bench: String,
    /// Where.
    pub machine: Machine,
    /// The results.
    pub rows: Vec<Row>,
    /// Who could not take part.
    #[serde(default)]
    pub absent: Vec<Absent>,
    /// Whether every checked byte was right and nothing failed.
    pub ok: bool,
}

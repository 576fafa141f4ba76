//! What carries one peer's bytes, and how that is known.

use std::fmt;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::time::Duration;

use super::requirement::{Carrier, Requirement, Unmet};
use super::ucx_log::UcxLanes;

/// Longest part of UCX's log that is looked at for one meeting.
const MOST_LOG: u64 = 1 << 20;

/// How it is known what carries the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Evidence {
    /// UCX has said it in its log, when the connection was made.
    UcxLog,
    /// The transport may use nothing else.
    Restricted,
    /// It is not known.
    None,
}

/// What carries the bytes that are read from a peer.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct PeerFabric {
    /// The carrier; `None` when it is not known, or there are several kinds.
    pub carrier: Option<Carrier>,
    /// The transports by the names that they have in UCX or libfabric: `cma`, `rc_mlx5`, `tcp (emulated)`; or `unknown`.
    pub transports: String,
    /// One-sided operations that the transport emulates, so that the peer's processor takes part in each: `read`,
    /// `atomic`.
    pub emulated: Vec<&'static str>,
    /// How it is known.
    pub evidence: Evidence,
    /// What a probe of a few MB reached when the peer was met, GB/s, if there was one.
    pub probed_gbps: Option<f64>,
}

impl Default for PeerFabric {
    fn default() -> Self {
        Self {
            carrier: None,
            transports: "unknown".to_owned(),
            emulated: Vec::new(),
            evidence: Evidence::None,
            probed_gbps: None,
        }
    }
}

impl fmt::Display for PeerFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.transports)?;
        if let Some(gbps) = self.probed_gbps {
            write!(f, ", {gbps:.2} GB/s")?;
        }
        if !self.emulated.is_empty() {
            write!(f, ", emulated: {}", self.emulated.join(", "))?;
        }
        Ok(())
    }
}

impl PeerFabric {
    /// What follows from a requirement that holds the transport to one carrier.
    #[must_use]
    pub fn restricted(requirement: Requirement) -> Self {
        // Under `nvlink`, GPU memory goes one way and host memory another.
        let one = requirement != Requirement::Nvlink;
        match requirement.carrier().filter(|_| one) {
            Some(carrier) => Self {
                carrier: Some(carrier),
                transports: carrier.name().to_owned(),
                evidence: Evidence::Restricted,
                ..Self::default()
            },
            None => Self::default(),
        }
    }

    /// What UCX's lanes say.
    #[must_use]
    pub fn of_lanes(lanes: &UcxLanes) -> Self {
        if lanes.is_empty() {
            return Self::default();
        }
        Self {
            carrier: lanes.kind(),
            transports: lanes.carrier(),
            emulated: lanes.emulated(),
            evidence: Evidence::UcxLog,
            probed_gbps: None,
        }
    }

    /// Whether it is what is required. What is not known passes: the transport may not use anything else.
    ///
    /// # Errors
    /// [`Unmet`].
    pub fn check(&self, requirement: Requirement, floor_gbps: f64) -> Result<(), Unmet> {
        if let Some(carrier) = self.carrier.filter(|carrier| !requirement.admits(*carrier)) {
            return Err(Unmet {
                wanted: requirement,
                found: format!("{carrier} ({})", self.transports),
                fix: "run `kvx doctor --peer` against it, and align both sides' transports and devices"
                    .to_owned(),
            });
        }
        match self.probed_gbps {
            Some(gbps) if gbps < floor_gbps => Err(Unmet {
                wanted: requirement,
                found: format!(
                    "{} at {gbps:.3} GB/s, less than the {floor_gbps} GB/s that it must reach",
                    self.transports
                ),
                fix: "see what else uses the link, or lower FabricConfig::floor_gbps".to_owned(),
            }),
            _ => Ok(()),
        }
    }
}

/// Reads what UCX adds to its log while a peer is met. UCX logs at level `info` which lanes a connection has, if the
/// process has set `UCX_LOG_LEVEL` and `UCX_LOG_FILE` before it was loaded.
#[derive(Debug)]
pub struct LogWatch {
    file: File,
    from: u64,
}

impl LogWatch {
    /// Begins to watch the log that the variables name; `None` when there is none that says it.
    #[must_use]
    pub fn begin() -> Option<Self> {
        let level = std::env::var("UCX_LOG_LEVEL").ok()?.to_lowercase();
        if ![
            "info", "debug", "trace", "req", "data", "async", "func", "poll",
        ]
        .iter()
        .any(|known| level.starts_with(known))
        {
            return None;
        }
        Self::of(&std::env::var("UCX_LOG_FILE").ok()?)
    }

    /// Begins to watch a file, by the name that UCX is given: `%p` stands for the process, `file:` may precede it.
    #[must_use]
    pub fn of(name: &str) -> Option<Self> {
        let name = name.strip_prefix("file:").unwrap_or(name);
        if matches!(name, "stderr" | "stdout") {
            return None;
        }
        let path = PathBuf::from(name.replace("%p", &std::process::id().to_string()));
        let file = File::open(path).ok()?;
        let from = file
            .metadata()
            .ok()
            .filter(std::fs::Metadata::is_file)?
            .len();
        Some(Self { file, from })
    }

    /// What was added since, about connections to other agents.
    #[must_use]
    pub fn lanes(&mut self) -> UcxLanes {
        let mut text = Vec::new();
        let read = self
            .file
            .seek(SeekFrom::Start(self.from))
            .and_then(|_| (&self.file).take(MOST_LOG).read_to_end(&mut text));
        match read {
            Ok(_) => UcxLanes::parse_peers(&String::from_utf8_lossy(&text)),
            Err(_) => UcxLanes::default(),
        }
    }
}

/// How an engine makes sure of what carries the bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct FabricConfig {
    /// Whether a peer that is met is read from for measure. `None`: if something is required.
    pub probe: Option<bool>,
    /// What that must reach, GB/s; `None`: [`Requirement::default_floor_gbps`].
    pub floor_gbps: Option<f64>,
    /// Bytes that are read, at most; a round may take less.
    pub probe_bytes: u64,
    /// Time for it. Less is reached by then than this took is measured all the same.
    pub probe_limit: Duration,
}

impl Default for FabricConfig {
    fn default() -> Self {
        Self {
            probe: None,
            floor_gbps: None,
            probe_bytes: 8 << 20,
            probe_limit: Duration::from_secs(1),
        }
    }
}

impl FabricConfig {
    /// Whether a peer is probed under a requirement.
    #[must_use]
    pub fn probes(&self, requirement: Requirement) -> bool {
        self.probe.unwrap_or(requirement != Requirement::Any)
    }

    /// The floor under a requirement.
    #[must_use]
    pub fn floor(&self, requirement: Requirement) -> f64 {
        self.floor_gbps
            .unwrap_or_else(|| requirement.default_floor_gbps())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn what_is_slow_or_goes_another_way_is_refused() {
        let mut peer = PeerFabric::of_lanes(&UcxLanes::parse(
            "x inter-node cfg#1 rma_am(tcp/eth0) amo_am(tcp/eth0) am(tcp/eth0)",
        ));
        assert_eq!(peer.carrier, Some(Carrier::Tcp));
        assert_eq!(peer.emulated, ["read", "write", "atomic"]);
        let unmet = peer.check(Requirement::Rdma, 0.0).unwrap_err();
        assert!(unmet.to_string().contains("tcp (emulated)"), "{unmet}");
        peer.check(Requirement::Tcp, 0.0).unwrap();
        peer.probed_gbps = Some(0.2);
        assert!(peer.check(Requirement::Tcp, 0.3).is_err());
        assert_eq!(
            peer.to_string(),
            "tcp (emulated), 0.20 GB/s, emulated: read, write, atomic"
        );
        PeerFabric::default().check(Requirement::Efa, 1.0).unwrap();
    }

    #[test]
    fn only_what_the_log_adds_counts() {
        let mut log = tempfile::NamedTempFile::new().unwrap();
        let line = |carrier: &str| format!("a intra-node cfg#1 rma({carrier}) am(tcp/lo)\n");
        log.write_all(line("tcp/lo").as_bytes()).unwrap();
        let mut watch = LogWatch::of(log.path().to_str().unwrap()).unwrap();
        assert!(watch.lanes().is_empty());
        log.write_all(b"b self cfg#0 rma(sysv/memory)\n").unwrap();
        log.write_all(line("rc_mlx5/mlx5_0:1").as_bytes()).unwrap();
        let peer = PeerFabric::of_lanes(&watch.lanes());
        assert_eq!(peer.transports, "rc_mlx5");
        assert!(LogWatch::of("stderr").is_none() && LogWatch::of("/not/there").is_none());
    }
}

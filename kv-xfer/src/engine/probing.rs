//! Makes sure of what carries a peer's bytes, when it is met: by what UCX says of the connection, by a read for measure
//! and by the NICs' own counters.
#![forbid(unsafe_code)]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::connect::ConnectError;
use crate::fabric::{
    Counters, FabricConfig, LogWatch, Moved, PeerFabric, Requirement, UcxLanes, Unmet,
};
use crate::ids::AgentName;
use crate::layout::RegionGeometry;
use crate::memory::ControlWords;
use crate::transport::{Agent, Descriptor, Ends, FailureKind, Progress, TransportError};

/// Words into which is read for measure: 1 MiB.
const SCRATCH_WORDS: u32 = 131_072;
/// Descriptors of one round.
const PIECES: u64 = 8;
/// What less than this says about a link is mostly its latency.
const LEAST_ROUND: u64 = 64 << 10;
/// The kernel renews the counters of NICs this often, and a margin.
const COUNTERS_RENEW: Duration = Duration::from_millis(20);

/// Makes sure of what carries each peer's bytes.
#[derive(Debug)]
pub(crate) struct Prober {
    require: Requirement,
    config: FabricConfig,
    /// Where reads for measure go; they take turns.
    scratch: Option<(Arc<dyn ControlWords>, Mutex<()>)>,
}

/// Watches a meeting.
#[derive(Debug)]
pub(crate) struct Watch(Option<LogWatch>);

impl Prober {
    /// One that is content with everything.
    pub(crate) fn new(
        require: Requirement,
        config: FabricConfig,
        words: impl FnOnce(u32) -> Result<Arc<dyn ControlWords>, TransportError>,
    ) -> Result<Self, TransportError> {
        let scratch = match config.probes(require) {
            true => Some((words(SCRATCH_WORDS)?, Mutex::new(()))),
            false => None,
        };
        Ok(Self {
            require,
            config,
            scratch,
        })
    }

    /// Memory that every agent which is to probe must have registered.
    pub(crate) fn scratch(&self) -> Option<&Arc<dyn ControlWords>> {
        self.scratch.as_ref().map(|(words, _)| words)
    }

    /// To be called before the connection is made.
    pub(crate) fn watch(&self) -> Watch {
        Watch(LogWatch::begin())
    }

    /// What carries the bytes of a peer whose connection has just been made. After an error the agent is to be destroyed.
    pub(crate) fn prove<A: Agent>(
        &self,
        mut watch: Watch,
        agent: &mut A,
        peer: &AgentName,
        remote: &RegionGeometry,
        limit: Duration,
    ) -> Result<PeerFabric, ConnectError> {
        let before = self.counters();
        let measured = match &self.scratch {
            Some((words, turn)) => {
                let _turn = turn.lock();
                let limit = limit.min(self.config.probe_limit);
                let bytes = self.config.probe_bytes;
                measure(agent, peer, (&words.region(), remote), bytes, limit)
                    .map_err(ConnectError::Transport)?
            }
            None => None,
        };
        let lanes = watch
            .0
            .as_mut()
            .map_or_else(UcxLanes::default, LogWatch::lanes);
        let mut fabric = PeerFabric::of_lanes(&lanes);
        if lanes.is_empty() {
            fabric = PeerFabric::restricted(self.require);
        }
        fabric.probed_gbps = measured.map(|(_, gbps)| gbps);
        fabric
            .check(self.require, self.config.floor(self.require))
            .map_err(ConnectError::Fabric)?;
        if let (Some((bytes, _)), Some(before)) = (measured, before) {
            std::thread::sleep(COUNTERS_RENEW);
            Counters::read(Path::new("/"))
                .witness(&before, Moved::Read, bytes)
                .map_err(|error| {
                    ConnectError::Fabric(Unmet {
                        wanted: self.require,
                        found: error.to_string(),
                        fix: "run `kvx doctor --peer` against it".to_owned(),
                    })
                })?;
        }
        Ok(fabric)
    }

    /// The NICs' counters, where the bytes must go over NICs that have any.
    fn counters(&self) -> Option<Counters> {
        if !matches!(self.require, Requirement::Efa | Requirement::Rdma) {
            return None;
        }
        Some(Counters::read(Path::new("/"))).filter(|counters| !counters.is_empty())
    }
}

/// Reads the beginning of a peer's region again and again: bytes in all, and the best rate of a round in GB/s. `None` when
/// the region is too small to say anything.
fn measure<A: Agent>(
    agent: &mut A,
    peer: &AgentName,
    (local, remote): (&RegionGeometry, &RegionGeometry),
    bytes: u64,
    limit: Duration,
) -> Result<Option<(u64, f64)>, TransportError> {
    let len = |region: &RegionGeometry| region.byte_len().unwrap_or(0);
    let round = len(local).min(len(remote)).min(bytes);
    if round < LEAST_ROUND {
        return Ok(None);
    }
    // Whole words, so that each piece is aligned.
    let piece = (round / PIECES) & !7;
    let pieces: Vec<Descriptor> = (0..PIECES)
        .map(|n| {
            let offset = n.saturating_mul(piece);
            Descriptor {
                remote: remote.base.saturating_add(offset),
                local: local.base.saturating_add(offset),
                len: piece,
            }
        })
        .collect();
    let round = piece.saturating_mul(PIECES);
    let ends = Ends {
        remote_mem: remote.mem,
        remote_device: remote.device,
        local_mem: local.mem,
        local_device: local.device,
    };
    let begin = Instant::now();
    let (mut moved, mut best) = (0_u64, 0.0_f64);
    while moved < bytes && (moved == 0 || begin.elapsed() < limit) {
        let start = Instant::now();
        let (mut request, mut progress) = agent
            .post_read(peer, ends, &pieces)
            .map_err(|fault| fault.error)?;
        while progress == Progress::Pending {
            if begin.elapsed() >= limit {
                agent.discard(request);
                return Err(TransportError {
                    operation: "probe peer",
                    kind: FailureKind::PeerLost,
                    cause: format!("{round} bytes of {peer} did not arrive within {limit:?}"),
                    raw: None,
                });
            }
            std::thread::yield_now();
            progress = agent.poll(&mut request).map_err(|fault| fault.error)?;
        }
        let took = start.elapsed().as_secs_f64();
        agent.discard(request);
        moved = moved.saturating_add(round);
        best = best.max(round as f64 / took.max(1e-9) / 1e9);
    }
    Ok(Some((moved, best)))
}

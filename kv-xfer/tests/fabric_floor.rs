//! What an engine makes of a peer whose bytes are not carried as required, over the scripted fabric.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::Arc;

use common::*;
use kv_xfer::engine::{Advice, ConnectError, EngineConfig, ReadError, StartError};
use kv_xfer::fabric::{Carrier, Evidence, Requirement, Unmet};
use kv_xfer::ids::AgentName;
use kv_xfer::layout::PoolOrder;
use kv_xfer::memory::ControlWords;
use kv_xfer::transport::sim::{SimAgent, SimFabric};
use kv_xfer::transport::{AgentRole, Transport, TransportError, TransportInfo};

/// A holder with enough lease words to measure with, and a reader.
fn pair_of(tune: impl FnOnce(&mut EngineConfig)) -> Pair {
    let fabric = Arc::new(SimFabric::new());
    let pool = || sim_pool(&fabric, layout(PoolOrder::LayerFirst), POOL_BLOCKS);
    let mut holder = config("decode");
    holder.holder.max_leases = 131_072;
    let mut reader = config("prefill");
    reader.holder.bind = None;
    tune(&mut reader);
    let (holder, reader) = (
        engine(holder, &pool(), &fabric),
        engine(reader, &pool(), &fabric),
    );
    Pair {
        fabric,
        holder,
        reader,
    }
}

#[test]
fn a_peer_below_the_floor_is_not_read_from() {
    let pair = pair_of(|config| {
        config.require = Requirement::Rdma;
        config.fabric.floor_gbps = Some(1e6);
    });
    let (_, offer) = pair.offer("r", &ids(0..4));
    let failure = pair.read(&offer, 0..4).wait().unwrap_err();
    let ReadError::Connect {
        cause: ConnectError::Fabric(unmet),
        ..
    } = &failure.error
    else {
        panic!("{failure}")
    };
    assert_eq!(unmet.wanted, Requirement::Rdma);
    assert!(
        unmet.found.contains("less than the 1000000 GB/s"),
        "{unmet}"
    );
    assert_eq!(failure.error.advice(), Advice::FixConfiguration);
    assert_eq!(pair.reader.stats().bytes, 0);
}

#[test]
fn what_carried_the_bytes_is_in_the_report_and_in_the_counters() {
    let pair = pair_of(|config| {
        config.require = Requirement::Shm;
        config.fabric.floor_gbps = Some(1e-6);
    });
    let (_, offer) = pair.offer("r", &ids(0..4));
    let landed = pair.read(&offer, 0..4).wait().unwrap();
    let fabric = landed.report.fabric.as_ref().unwrap();
    assert_eq!(fabric.carrier, Some(Carrier::Shm));
    assert_eq!(fabric.evidence, Evidence::Restricted);
    assert!(fabric.probed_gbps.is_some_and(|gbps| gbps > 0.0));
    let stats = pair.reader.stats();
    assert_eq!(
        (stats.bytes_shm, stats.bytes_unknown),
        (landed.report.bytes, 0)
    );
    assert_eq!(stats.bytes, landed.report.bytes);
    drop(landed);
    pair.assert_clean();
}

#[test]
fn without_a_requirement_nothing_is_measured() {
    let pair = pair_of(|_| {});
    let (_, offer) = pair.offer("r", &ids(0..4));
    let landed = pair.read(&offer, 0..4).wait().unwrap();
    let fabric = landed.report.fabric.as_ref().unwrap();
    assert_eq!((fabric.carrier, fabric.probed_gbps), (None, None));
    assert_eq!(fabric.transports, "unknown");
    assert_eq!(pair.reader.stats().bytes_unknown, landed.report.bytes);
}

/// A transport that cannot be held to anything.
struct Free(SimFabric);

impl Transport for Free {
    type Agent = SimAgent;

    fn open_agent(&self, name: &AgentName, role: AgentRole) -> Result<SimAgent, TransportError> {
        self.0.open_agent(name, role)
    }

    fn control_words(&self, slots: u32) -> Result<Arc<dyn ControlWords>, TransportError> {
        self.0.control_words(slots)
    }

    fn info(&self) -> TransportInfo {
        self.0.info()
    }
}

#[test]
fn a_transport_that_cannot_be_held_to_it_starts_no_engine() {
    let fabric = SimFabric::new();
    let pool = sim_pool(&fabric, layout(PoolOrder::LayerFirst), POOL_BLOCKS);
    let mut wanted = config("decode");
    wanted.require = Requirement::Efa;
    let started = kv_xfer::engine::Engine::start(wanted, pool, Arc::new(Free(fabric)));
    assert!(matches!(
        started,
        Err(StartError::Fabric(Unmet {
            wanted: Requirement::Efa,
            ..
        }))
    ));
}

//! A met peer: its card, and the one agent that reads from it.
#![forbid(unsafe_code)]

use std::sync::Arc;

use crate::clock::MonoTime;
use crate::ids::{AgentName, EngineId, Incarnation};
use crate::layout::{RegionGeometry, RegionPair};
use crate::transport::Agent;

/// Everything that reading from one life of one peer needs. The agent is this link's alone, so
/// destroying it ends every doubt about reads from this peer and touches no other peer's.
#[derive(Debug)]
pub(crate) struct Link<A: Agent> {
    /// Unique within the engine; a peer that is met again gets another.
    pub id: u64,
    pub engine: EngineId,
    pub incarnation: Incarnation,
    /// The peer's serving agent.
    pub peer: AgentName,
    pub agent: A,
    pub pairs: Arc<[RegionPair]>,
    pub remote_blocks: u32,
    /// The peer's lease words.
    pub words: RegionGeometry,
    /// When a read or a notice last used it.
    pub used: MonoTime,
    /// Until when it is polled without a pause although nothing is in flight, so that a sent notice
    /// can leave.
    pub flush_until: MonoTime,
    /// When it was polled last although nothing was in flight.
    pub tended: MonoTime,
}

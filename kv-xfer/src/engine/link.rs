//! A met peer: its card, and the one agent that reads from it.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use crate::clock::MonoTime;
use crate::fabric::PeerFabric;
use crate::ids::{AgentName, EngineId, Incarnation};
use crate::layout::{RegionGeometry, RegionPair};
use crate::transport::Agent;

/// A notice leaves within this on a quiet machine.
const NOTICE_LEAVES: Duration = Duration::from_millis(20);
/// A connection's set-up and whatever else takes several round trips is over by then.
pub(super) const SETTLES: Duration = Duration::from_secs(2);
const TEND_OFTEN: Duration = Duration::from_micros(500);
pub(super) const TEND_SOON: Duration = Duration::from_millis(5);
pub(super) const TEND_SELDOM: Duration = Duration::from_millis(100);

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
    /// When something last came of its reads, or since when it has had any in flight.
    pub heard: MonoTime,
    /// Since when it is thought to be silent: it has this thread's next rounds to disprove it.
    pub suspected: Option<MonoTime>,
    /// When the agent was last let make progress although it had nothing in flight.
    pub tended: MonoTime,
    /// The card's metadata, to load into further agents.
    pub metadata: Arc<[u8]>,
    /// What carries its bytes.
    pub fabric: Arc<PeerFabric>,
    pub width: Width,
    /// Whether posting moves the bytes within the call. Only then does posting from several threads
    /// gain anything.
    pub copies: bool,
}

/// How many agents read from a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Width {
    /// The link's own.
    Narrow,
    /// One for each helper lane is being made.
    Widening,
    /// One for each of the first so many helper lanes, too.
    Wide(usize),
}

impl<A: Agent> Link<A> {
    /// Something has come of its reads, or nothing is in flight from it.
    pub(crate) fn hears(&mut self, now: MonoTime) {
        self.heard = now;
        self.suspected = None;
    }

    /// When the agent is to be let make progress next although it has nothing in flight: often while
    /// a notice may be leaving, and now and then for as long as the link lives. A connection whose
    /// set-up is left half done keeps the holder's progress thread spinning.
    pub(crate) fn tend_at(&self) -> MonoTime {
        let idle = self.tended.saturating_since(self.used);
        let pause = if idle < NOTICE_LEAVES {
            TEND_OFTEN
        } else if idle < SETTLES {
            TEND_SOON
        } else {
            TEND_SELDOM
        };
        self.tended.max(self.used) + pause
    }
}

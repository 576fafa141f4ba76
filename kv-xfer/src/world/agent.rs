//! The transport of one life of an engine in the world.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::fabric::{End, Fabric, FabricMemory, State, Use};
use crate::ids::AgentName;
use crate::layout::RegionGeometry;
use crate::memory::ControlWords;
use crate::transport::{
    AfterError, Agent, AgentRole, Descriptor, Ends, FailureKind, Progress, ReadFault, Transport,
    TransportError, TransportInfo,
};

/// Longest call that posts a window.
const SLOW_POST: Duration = Duration::from_secs(2);

/// What one life of an engine sees of the fabric.
#[derive(Debug)]
pub(super) struct LifeTransport {
    fabric: Fabric,
    life: usize,
    /// The lease words have been made: the next ones are landing places.
    words: AtomicBool,
}

impl LifeTransport {
    pub(super) fn new(fabric: Fabric, life: usize) -> Self {
        Self {
            fabric,
            life,
            words: AtomicBool::new(false),
        }
    }
}

fn error(operation: &'static str, kind: FailureKind) -> TransportError {
    TransportError {
        operation,
        kind,
        cause: "the world's choice".into(),
        raw: None,
    }
}

impl Transport for LifeTransport {
    type Agent = LifeAgent;

    fn open_agent(&self, name: &AgentName, _: AgentRole) -> Result<LifeAgent, TransportError> {
        let mut state = self.fabric.state();
        let Some(at) = state.add_agent(self.life, name) else {
            state.misuse = Some("two agents were given one name");
            return Err(error("open agent", FailureKind::Rejected));
        };
        drop(state);
        Ok(LifeAgent {
            fabric: self.fabric.clone(),
            at,
            life: self.life,
            peers: Vec::new(),
            keep: Vec::new(),
            destroyed: false,
        })
    }

    fn control_words(&self, slots: u32) -> Result<Arc<dyn ControlWords>, TransportError> {
        let of = if self.words.swap(true, Ordering::Relaxed) {
            Use::Landing
        } else {
            Use::LeaseWords
        };
        let len = usize::try_from(slots).unwrap_or(0).saturating_mul(8);
        let words: FabricMemory = self.fabric.memory(len, self.life, of);
        Ok(Arc::new(words))
    }

    fn info(&self) -> TransportInfo {
        TransportInfo {
            name: "world",
            version: "1".into(),
            backend: "memory".into(),
        }
    }
}

/// An agent of one life.
#[derive(Debug)]
pub(super) struct LifeAgent {
    fabric: Fabric,
    at: usize,
    life: usize,
    /// Loaded peers: their names and numbers.
    peers: Vec<(AgentName, usize)>,
    keep: Vec<Arc<dyn Any + Send + Sync>>,
    destroyed: bool,
}

fn covers(regions: &[RegionGeometry], addr: u64, len: u64) -> bool {
    regions.iter().any(|r| {
        r.byte_len().is_ok_and(|size| {
            addr >= r.base
                && addr
                    .checked_add(len)
                    .is_some_and(|end| end <= r.base.saturating_add(size))
        })
    })
}

impl LifeAgent {
    fn peer(&self, name: &AgentName) -> Option<usize> {
        let known = self.peers.iter().find(|(known, _)| known == name);
        known.map(|(_, at)| *at)
    }

    /// Refuses what NIXL would refuse: memory that is not registered at either end.
    fn check(
        &self,
        state: &State,
        peer: usize,
        descriptors: &[Descriptor],
    ) -> Result<(), TransportError> {
        let registered = |at: usize| state.agents.get(at).map_or(&[][..], |a| &a.registered[..]);
        let (local, remote) = (registered(self.at), registered(peer));
        let fits =
            |d: &Descriptor| covers(remote, d.remote, d.len) && covers(local, d.local, d.len);
        if !descriptors.is_empty() && descriptors.iter().all(fits) {
            Ok(())
        } else {
            Err(error("post read", FailureKind::Rejected))
        }
    }
}

fn quiet(error: TransportError) -> ReadFault {
    let after = AfterError::Quiet;
    ReadFault { error, after }
}

impl Agent for LifeAgent {
    type Request = u64;

    fn register(
        &mut self,
        regions: &[RegionGeometry],
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<(), TransportError> {
        self.keep.push(keep);
        if let Some(agent) = self.fabric.state().agents.get_mut(self.at) {
            agent.registered.extend_from_slice(regions);
        }
        Ok(())
    }

    fn metadata(&mut self) -> Result<Vec<u8>, TransportError> {
        Ok((self.at as u64).to_le_bytes().to_vec())
    }

    fn load_peer(&mut self, metadata: &[u8], expected: &AgentName) -> Result<(), TransportError> {
        let mut state = self.fabric.state();
        let Some(at) = state.agent_named(expected) else {
            return Err(error("load peer", FailureKind::Rejected));
        };
        if metadata != (at as u64).to_le_bytes() {
            // A damaged blob crashes the real library: it must not get here.
            state.misuse = Some("damaged metadata was loaded");
            return Err(error("load peer", FailureKind::Rejected));
        }
        self.peers.push((expected.clone(), at));
        Ok(())
    }

    fn reach(
        &mut self,
        peer: &AgentName,
        probe: Descriptor,
        limit: Duration,
    ) -> Result<(), TransportError> {
        let Some(at) = self.peer(peer) else {
            return Err(error("reach", FailureKind::Rejected));
        };
        let mut state = self.fabric.state();
        let from = state.agents.get(at).map_or(usize::MAX, |agent| agent.life);
        let gone = state.agents.get(at).is_none_or(|agent| agent.gone);
        let faults = state.faults;
        let unreachable = state.roll(faults.unreachable);
        if gone || unreachable || !state.connected(self.life, from) {
            // It may still land.
            state.launch(self.at, self.life, from, &[probe], End::Running);
            state.passed = state.passed.saturating_add(limit);
            return Err(error("reach", FailureKind::PeerLost));
        }
        let bytes = state.look(probe);
        state.land(probe, &bytes, self.life);
        Ok(())
    }

    fn forget_peer(&mut self, peer: &AgentName) {
        self.peers.retain(|(known, _)| known != peer);
    }

    fn post_read(
        &mut self,
        peer: &AgentName,
        _: Ends,
        descriptors: &[Descriptor],
    ) -> Result<(u64, Progress), ReadFault> {
        let lost = || error("post read", FailureKind::PeerLost);
        let Some(at) = self.peer(peer) else {
            return Err(quiet(error("post read", FailureKind::Rejected)));
        };
        let mut state = self.fabric.state();
        self.check(&state, at, descriptors).map_err(quiet)?;
        let from = state.agents.get(at).map_or(usize::MAX, |agent| agent.life);
        let gone = state.agents.get(at).is_none_or(|agent| agent.gone);
        state.windows = state.windows.saturating_add(1);
        let faults = state.faults;
        if state.roll(faults.slow_post)
            && let Some(dice) = state.dice.as_mut()
        {
            let took = dice.time(Duration::from_micros(10), SLOW_POST);
            state.passed = state.passed.saturating_add(took);
        }
        if gone && state.roll(700) {
            return Err(quiet(lost()));
        }
        if state.roll(faults.refuse) {
            let kinds = [
                FailureKind::PeerLost,
                FailureKind::Backend,
                FailureKind::Rejected,
            ];
            let kind = state
                .dice
                .as_mut()
                .and_then(|dice| dice.pick(&kinds).copied());
            return Err(quiet(error(
                "post read",
                kind.unwrap_or(FailureKind::Backend),
            )));
        }
        if state.roll(faults.doubtful_post) {
            let end = End::Failed(FailureKind::Backend, AfterError::InDoubt);
            let id = state.launch(self.at, self.life, from, descriptors, end);
            // The engine never gets its number, so it is never asked about.
            let _ = state.ask(id);
            return Err(ReadFault {
                error: error("post read", FailureKind::Backend),
                after: AfterError::InDoubt,
            });
        }
        if !gone && state.connected(self.life, from) && state.roll(faults.at_once) {
            for d in descriptors {
                let bytes = state.look(*d);
                state.land(*d, &bytes, self.life);
            }
            return Ok((0, Progress::Done));
        }
        let id = state.launch(self.at, self.life, from, descriptors, End::Running);
        Ok((id, Progress::Pending))
    }

    fn poll(&mut self, request: &mut u64) -> Result<Progress, ReadFault> {
        let mut state = self.fabric.state();
        match state.ask(*request) {
            Some(End::Running) => Ok(Progress::Pending),
            Some(End::Done) => Ok(Progress::Done),
            Some(End::Failed(kind, after)) => Err(ReadFault {
                error: error("read", kind),
                after,
            }),
            None => {
                if !state.is_dead(self.life) {
                    state.misuse = Some("a window was polled after it was over");
                }
                Ok(Progress::Done)
            }
        }
    }

    fn discard(&mut self, _: u64) {
        // It reports success, and the window goes on writing.
    }

    fn notify(&mut self, peer: &AgentName, message: &[u8]) -> Result<(), TransportError> {
        let lost = || error("notify", FailureKind::PeerLost);
        let to = self.peer(peer).ok_or_else(lost)?;
        let mut state = self.fabric.state();
        let gone = state.agents.get(to).is_none_or(|agent| agent.gone);
        // Sometimes a peer that is gone takes messages all the same.
        if gone && state.roll(700) {
            return Err(lost());
        }
        let sender = state.agents.get(self.at).map(|agent| agent.name.clone());
        let sender = sender.ok_or_else(lost)?;
        state.letters.push(super::fabric::Letter {
            from: self.life,
            sender,
            to,
            bytes: message.to_vec(),
        });
        Ok(())
    }

    fn notifications(
        &mut self,
        into: &mut Vec<(AgentName, Vec<u8>)>,
    ) -> Result<(), TransportError> {
        if let Some(agent) = self.fabric.state().agents.get_mut(self.at) {
            into.append(&mut agent.inbox);
        }
        Ok(())
    }

    fn destroy(mut self) -> Result<(), TransportError> {
        self.destroyed = true;
        if self.fabric.state().end_agent(self.at) {
            Ok(())
        } else {
            Err(error("destroy agent", FailureKind::Backend))
        }
    }
}

impl Drop for LifeAgent {
    fn drop(&mut self) {
        if !self.destroyed {
            self.fabric.state().end_agent(self.at);
        }
    }
}

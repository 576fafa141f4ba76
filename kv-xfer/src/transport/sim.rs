//! An in-memory fabric that does what a script says: delay, reorder, fail on descriptor `k`, never
//! complete, or land bytes late. It shows the orders of events that real hardware rarely shows.
//!
//! All agents of a [`SimFabric`] live in one process and one virtual address space; addresses are
//! numbers, nothing is dereferenced. By default a window is copied when it is posted and is done at
//! the first poll. [`SimFabric::script`] changes that for the next windows.
#![forbid(unsafe_code)]

mod memory;

use std::any::Any;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

pub use self::memory::SimMemory;
use self::memory::SimWords;

use super::{
    AfterError, Agent, AgentRole, Descriptor, Ends, FailureKind, Progress, ReadFault, Transport,
    TransportError, TransportInfo,
};
use crate::fabric::{Requirement, Unmet};
use crate::ids::AgentName;
use crate::layout::{MemKind, RegionGeometry};
use crate::memory::{ControlWords, Memory, MemoryError};

/// Called when a window reaches a point; gets the number of descriptors copied so far.
pub type Hook = Box<dyn FnMut(usize) + Send>;

/// Called with every descriptor, before its bytes are written.
pub type Watch = Arc<dyn Fn(&Descriptor) + Send + Sync>;

/// What one posted window does.
#[derive(Default)]
pub struct Behaviour {
    /// Copy at most this many descriptors per poll; `None` copies all when posted.
    pub per_poll: Option<usize>,
    /// Polls that report `Pending` after the last byte has landed.
    pub extra_polls: u32,
    /// Copy from the last descriptor to the first.
    pub reversed: bool,
    /// Refuse the post.
    pub refuse_post: Option<FailureKind>,
    /// Fail once this many descriptors have been copied.
    pub fail_at: Option<(usize, AfterError)>,
    /// Never report an end.
    pub never_ends: bool,
    /// Called before each descriptor is copied, and once after the last.
    pub hook: Option<Hook>,
}

impl fmt::Debug for Behaviour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Behaviour")
            .field("per_poll", &self.per_poll)
            .field("extra_polls", &self.extra_polls)
            .field("reversed", &self.reversed)
            .field("refuse_post", &self.refuse_post)
            .field("fail_at", &self.fail_at)
            .field("never_ends", &self.never_ends)
            .finish_non_exhaustive()
    }
}

/// A posted window on the fabric.
#[derive(Debug)]
struct Operation {
    owner: AgentName,
    descriptors: Vec<Descriptor>,
    next: usize,
    polls_left: u32,
    behaviour: Behaviour,
}

#[derive(Default)]
struct AgentState {
    registered: Vec<RegionGeometry>,
    inbox: VecDeque<(AgentName, Vec<u8>)>,
    dead: bool,
}

#[derive(Default)]
struct State {
    memories: BTreeMap<u64, Arc<dyn Memory>>,
    agents: HashMap<AgentName, AgentState>,
    operations: HashMap<u64, Operation>,
    script: VecDeque<Behaviour>,
    next_operation: u64,
    windows_posted: u64,
    indestructible: bool,
    registers_before_refusal: Option<u32>,
    at_once: bool,
    watch: Option<Watch>,
}

/// The fabric: memories, agents and what is in flight between them. Clones share it.
#[derive(Clone, Default)]
pub struct SimFabric {
    state: Arc<Mutex<State>>,
    next_base: Arc<AtomicU64>,
}

impl fmt::Debug for SimFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SimFabric")
    }
}

impl SimFabric {
    /// An empty fabric.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Zeroed virtual memory of `len` bytes, at an address no other memory of this fabric has.
    #[must_use]
    pub fn memory(&self, len: usize) -> Arc<SimMemory> {
        // A guard gap after each memory, so that a read over its end hits nothing.
        let span = (len as u64).saturating_add(0x2_0000) & !0xfff;
        let base = self
            .next_base
            .fetch_add(span, Ordering::Relaxed)
            .saturating_add(0x10_0000);
        let memory = Arc::new(SimMemory::new(base, len));
        self.adopt(base, Arc::clone(&memory) as Arc<dyn Memory>);
        memory
    }

    /// Takes memory of another kind into the fabric, by its first address: bytes are copied from and to it through
    /// [`Memory`]. Its addresses must not be those of any other memory of this fabric.
    pub fn adopt(&self, base: u64, memory: Arc<dyn Memory>) {
        self.state.lock().memories.insert(base, memory);
    }

    /// Scripts the next windows posted by any agent; the front of the queue goes first.
    pub fn script(&self, behaviours: impl IntoIterator<Item = Behaviour>) {
        self.state.lock().script.extend(behaviours);
    }

    /// Kills an agent as a crashed process would: reads from it fail, messages to it are refused.
    pub fn kill(&self, agent: &AgentName) {
        if let Some(state) = self.state.lock().agents.get_mut(agent) {
            state.dead = true;
        }
    }

    /// From now on agents cannot be destroyed, as when a library refuses: what they have posted can
    /// still write after they are gone.
    pub fn refuse_destruction(&self) {
        self.state.lock().indestructible = true;
    }

    /// After `calls` more registrations one is refused, as when memory may not be locked.
    pub fn refuse_registration_after(&self, calls: u32) {
        self.state.lock().registers_before_refusal = Some(calls);
    }

    /// From now on windows are over when they are posted, unless their script says otherwise: posting
    /// moves the bytes within the call, as it does over shared memory.
    pub fn move_when_posted(&self) {
        self.state.lock().at_once = true;
    }

    /// Has a look at every write from now on.
    pub fn watch(&self, watch: impl Fn(&Descriptor) + Send + Sync + 'static) {
        self.state.lock().watch = Some(Arc::new(watch));
    }

    /// How many windows have been posted so far, over all agents.
    #[must_use]
    pub fn windows_posted(&self) -> u64 {
        self.state.lock().windows_posted
    }

    /// How many windows could still write: posted by agents that are not destroyed, and not over.
    #[must_use]
    pub fn windows_in_flight(&self) -> usize {
        self.state.lock().operations.len()
    }

    /// Names of the agents that exist.
    #[must_use]
    pub fn agents(&self) -> Vec<AgentName> {
        self.state.lock().agents.keys().cloned().collect()
    }

    /// Lands every byte that is still in flight, as hardware does after a release that was no
    /// cancellation. Returns how many descriptors were copied.
    pub fn land_late_bytes(&self) -> usize {
        let mut copied = 0;
        let mut operations: Vec<Operation> = {
            let mut state = self.state.lock();
            let ids: Vec<u64> = state.operations.keys().copied().collect();
            ids.into_iter()
                .filter_map(|id| state.operations.remove(&id))
                .collect()
        };
        for operation in &mut operations {
            let left = operation.descriptors.len().saturating_sub(operation.next);
            for _ in 0..left {
                copied += usize::from(self.copy_next(operation).is_ok());
            }
        }
        copied
    }

    fn find(&self, addr: u64) -> Option<Arc<dyn Memory>> {
        let state = self.state.lock();
        state
            .memories
            .range(..=addr)
            .next_back()
            .map(|(_, memory)| Arc::clone(memory))
    }

    /// Copies the next descriptor of an operation. The lock is not held, so hooks may use the
    /// engine that posted it.
    fn copy_next(&self, operation: &mut Operation) -> Result<(), MemoryError> {
        let count = operation.descriptors.len();
        let index = if operation.behaviour.reversed {
            count.saturating_sub(1).saturating_sub(operation.next)
        } else {
            operation.next
        };
        if let Some(hook) = &mut operation.behaviour.hook {
            hook(operation.next);
        }
        let Some(d) = operation.descriptors.get(index).copied() else {
            return Ok(());
        };
        operation.next = operation.next.saturating_add(1);
        let out = MemoryError::OutOfRange {
            addr: d.remote,
            len: d.len,
        };
        let mut bytes = vec![0; usize::try_from(d.len).map_err(|_| out)?];
        self.find(d.remote).ok_or(out)?.read(d.remote, &mut bytes)?;
        let watch = self.state.lock().watch.clone();
        if let Some(watch) = watch {
            watch(&d);
        }
        self.find(d.local).ok_or(out)?.write(d.local, &bytes)?;
        if operation.next == count
            && let Some(hook) = &mut operation.behaviour.hook
        {
            hook(count);
        }
        Ok(())
    }
}

fn error(operation: &'static str, kind: FailureKind, cause: impl Into<String>) -> TransportError {
    TransportError {
        operation,
        kind,
        cause: cause.into(),
        raw: None,
    }
}

impl Transport for SimFabric {
    type Agent = SimAgent;

    fn open_agent(&self, name: &AgentName, _role: AgentRole) -> Result<SimAgent, TransportError> {
        let mut state = self.state.lock();
        if state.agents.contains_key(name) {
            return Err(error(
                "open agent",
                FailureKind::Rejected,
                format!("{name} exists"),
            ));
        }
        state.agents.insert(name.clone(), AgentState::default());
        Ok(SimAgent {
            fabric: self.clone(),
            name: name.clone(),
            peers: Vec::new(),
            local: Vec::new(),
            keep: Vec::new(),
        })
    }

    fn control_words(&self, slots: u32) -> Result<Arc<dyn ControlWords>, TransportError> {
        let len = usize::try_from(slots)
            .unwrap_or(usize::MAX)
            .saturating_mul(8);
        Ok(Arc::new(SimWords::new(self.memory(len), slots)))
    }

    /// It has no devices, and is content with everything.
    fn require(&self, _: Requirement) -> Result<(), Unmet> {
        Ok(())
    }

    fn info(&self) -> TransportInfo {
        TransportInfo {
            name: "sim",
            version: "1".into(),
            backend: "memory".into(),
        }
    }
}

/// An agent of a [`SimFabric`].
#[derive(Debug)]
pub struct SimAgent {
    fabric: SimFabric,
    name: AgentName,
    peers: Vec<AgentName>,
    local: Vec<RegionGeometry>,
    keep: Vec<Arc<dyn Any + Send + Sync>>,
}

/// Whether one region of this kind and device holds the range.
fn covers(regions: &[RegionGeometry], (mem, device): (MemKind, u32), addr: u64, len: u64) -> bool {
    let mut alike = regions
        .iter()
        .filter(|r| r.mem == mem && r.device == device);
    alike.any(|r| {
        r.byte_len().is_ok_and(|size| {
            addr >= r.base
                && addr
                    .checked_add(len)
                    .is_some_and(|end| end <= r.base.saturating_add(size))
        })
    })
}

impl SimAgent {
    fn check(
        &self,
        peer: &AgentName,
        ends: Ends,
        descriptors: &[Descriptor],
    ) -> Result<(), TransportError> {
        let there = (ends.remote_mem, ends.remote_device);
        let here = (ends.local_mem, ends.local_device);
        let reject = |cause: String| error("post read", FailureKind::Rejected, cause);
        if !self.peers.contains(peer) {
            return Err(reject(format!("peer {peer} is not loaded")));
        }
        let state = self.fabric.state.lock();
        let Some(remote) = state.agents.get(peer).filter(|agent| !agent.dead) else {
            return Err(error(
                "post read",
                FailureKind::PeerLost,
                format!("{peer} is gone"),
            ));
        };
        for d in descriptors {
            if d.len == 0 || !covers(&remote.registered, there, d.remote, d.len) {
                return Err(reject(format!("{d:?}: remote range is not registered")));
            }
            if !covers(&self.local, here, d.local, d.len) {
                return Err(reject(format!("{d:?}: local range is not registered")));
            }
        }
        Ok(())
    }
}

impl Agent for SimAgent {
    type Request = u64;

    fn register(
        &mut self,
        regions: &[RegionGeometry],
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<(), TransportError> {
        for region in regions {
            region
                .validate()
                .map_err(|e| error("register", FailureKind::Rejected, e.to_string()))?;
        }
        let mut state = self.fabric.state.lock();
        if let Some(before) = state.registers_before_refusal.take() {
            let Some(left) = before.checked_sub(1) else {
                return Err(error(
                    "register",
                    FailureKind::Backend,
                    "refused".to_owned(),
                ));
            };
            state.registers_before_refusal = Some(left);
        }
        self.local.extend_from_slice(regions);
        self.keep.push(keep);
        if let Some(agent) = state.agents.get_mut(&self.name) {
            agent.registered.extend_from_slice(regions);
        }
        Ok(())
    }

    fn metadata(&mut self) -> Result<Vec<u8>, TransportError> {
        Ok(format!("sim:{}", self.name).into_bytes())
    }

    fn load_peer(&mut self, metadata: &[u8], expected: &AgentName) -> Result<(), TransportError> {
        if metadata != format!("sim:{expected}").as_bytes() {
            let cause = format!("the metadata does not name {expected}");
            return Err(error("load peer", FailureKind::Rejected, cause));
        }
        let state = self.fabric.state.lock();
        if state.agents.get(expected).is_none_or(|agent| agent.dead) {
            return Err(error(
                "load peer",
                FailureKind::PeerLost,
                format!("{expected} is gone"),
            ));
        }
        drop(state);
        self.peers.push(expected.clone());
        Ok(())
    }

    fn forget_peer(&mut self, peer: &AgentName) {
        self.peers.retain(|known| known != peer);
    }

    fn post_read(
        &mut self,
        peer: &AgentName,
        ends: Ends,
        descriptors: &[Descriptor],
    ) -> Result<(u64, Progress), ReadFault> {
        let quiet = |error| ReadFault {
            error,
            after: AfterError::Quiet,
        };
        self.check(peer, ends, descriptors).map_err(quiet)?;
        let mut state = self.fabric.state.lock();
        let behaviour = state.script.pop_front().unwrap_or_default();
        if let Some(kind) = behaviour.refuse_post {
            return Err(quiet(error(
                "post read",
                kind,
                "the script refuses this post",
            )));
        }
        let id = state.next_operation;
        state.next_operation = id.saturating_add(1);
        state.windows_posted = state.windows_posted.saturating_add(1);
        let at_once = state.at_once && behaviour.extra_polls == 0;
        drop(state);
        let copy_now =
            behaviour.per_poll.is_none() && behaviour.fail_at.is_none() && !behaviour.never_ends;
        let mut operation = Operation {
            owner: self.name.clone(),
            descriptors: descriptors.to_vec(),
            next: 0,
            polls_left: behaviour.extra_polls,
            behaviour,
        };
        if copy_now {
            for _ in 0..descriptors.len() {
                self.fabric
                    .copy_next(&mut operation)
                    .map_err(|e| quiet(error("post read", FailureKind::Backend, e.to_string())))?;
            }
        }
        if copy_now && at_once {
            return Ok((id, Progress::Done));
        }
        self.fabric.state.lock().operations.insert(id, operation);
        Ok((id, Progress::Pending))
    }

    fn poll(&mut self, request: &mut u64) -> Result<Progress, ReadFault> {
        let Some(mut operation) = self.fabric.state.lock().operations.remove(request) else {
            return Ok(Progress::Done);
        };
        let budget = operation.behaviour.per_poll.unwrap_or(usize::MAX);
        let mut result = Ok(Progress::Pending);
        for _ in 0..budget.min(operation.descriptors.len()) {
            if let Some((at, after)) = operation.behaviour.fail_at
                && operation.next >= at
            {
                let error = error("read", FailureKind::PeerLost, format!("scripted at {at}"));
                result = Err(ReadFault { error, after });
                break;
            }
            if operation.next >= operation.descriptors.len() || operation.behaviour.never_ends {
                break;
            }
            if let Err(e) = self.fabric.copy_next(&mut operation) {
                let error = error("read", FailureKind::Backend, e.to_string());
                result = Err(ReadFault {
                    error,
                    after: AfterError::Quiet,
                });
                break;
            }
        }
        let over = operation.next >= operation.descriptors.len() && !operation.behaviour.never_ends;
        if over && result.is_ok() {
            if operation.polls_left == 0 {
                return Ok(Progress::Done);
            }
            operation.polls_left = operation.polls_left.saturating_sub(1);
        }
        if !matches!(&result, Err(fault) if fault.after == AfterError::Quiet) {
            self.fabric
                .state
                .lock()
                .operations
                .insert(*request, operation);
        }
        result
    }

    fn discard(&mut self, _request: u64) {}

    fn notify(&mut self, peer: &AgentName, message: &[u8]) -> Result<(), TransportError> {
        let mut state = self.fabric.state.lock();
        match state.agents.get_mut(peer).filter(|agent| !agent.dead) {
            Some(agent) if self.peers.contains(peer) => {
                agent.inbox.push_back((self.name.clone(), message.to_vec()));
                Ok(())
            }
            _ => Err(error(
                "notify",
                FailureKind::PeerLost,
                format!("{peer} is not there"),
            )),
        }
    }

    fn notifications(
        &mut self,
        into: &mut Vec<(AgentName, Vec<u8>)>,
    ) -> Result<(), TransportError> {
        if let Some(agent) = self.fabric.state.lock().agents.get_mut(&self.name) {
            into.extend(agent.inbox.drain(..));
        }
        Ok(())
    }

    fn destroy(self) -> Result<(), TransportError> {
        if self.fabric.state.lock().indestructible {
            let cause = "the script refuses to destroy agents";
            return Err(error("destroy agent", FailureKind::Backend, cause));
        }
        Ok(())
    }
}

impl Drop for SimAgent {
    fn drop(&mut self) {
        let mut state = self.fabric.state.lock();
        if state.indestructible {
            return;
        }
        state.agents.remove(&self.name);
        state
            .operations
            .retain(|_, operation| operation.owner != self.name);
    }
}

//! The seam between the engine and what moves bytes. Two implementations: `nixl` over libnixl
//! and `sim`, an in-memory fabric that does what a script says.

pub(crate) mod aside;
pub mod nixl;
pub mod sim;

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use crate::fabric::{Requirement, Unmet};
use crate::ids::AgentName;
use crate::layout::{MemKind, RegionGeometry};
use crate::memory::ControlWords;

/// One contiguous move: `len` bytes from `remote` (an address at the peer) to `local`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Descriptor {
    /// Address at the peer.
    pub remote: u64,
    /// Address here.
    pub local: u64,
    /// Bytes.
    pub len: u64,
}

/// Where the two ends of a window's descriptors lie. All descriptors of a window share it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ends {
    /// Kind of the remote memory.
    pub remote_mem: MemKind,
    /// Remote device index.
    pub remote_device: u32,
    /// Kind of the local memory.
    pub local_mem: MemKind,
    /// Local device index.
    pub local_device: u32,
}

impl Ends {
    /// Host memory on both sides.
    pub const HOST: Self = Self {
        remote_mem: MemKind::Dram,
        remote_device: 0,
        local_mem: MemKind::Dram,
        local_device: 0,
    };
}

/// How far a posted request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Bytes may still be written.
    Pending,
    /// Every byte has landed; nothing more will be written.
    Done,
}

/// What a failure means for the peer and for the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailureKind {
    /// The peer is gone or the connection to it broke: load it again before the next read.
    PeerLost,
    /// The transport refused the arguments: a fault of the caller or of the peer's card.
    Rejected,
    /// The backend failed in a way that says nothing more.
    Backend,
    /// This build or this machine cannot do it.
    Unsupported,
}

/// A failure of the transport, with the raw cause beside our reading of it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{operation} failed ({kind:?}): {cause}")]
pub struct TransportError {
    /// What was being done.
    pub operation: &'static str,
    /// What it means.
    pub kind: FailureKind,
    /// The cause, with the transport's own status name and number.
    pub cause: String,
    /// The transport's own status code, where there is one.
    pub raw: Option<i32>,
}

impl TransportError {
    /// Whether the connection to the peer is not to be used again. What the transport refused as an
    /// argument says nothing about the connection.
    pub(crate) fn breaks_link(&self) -> bool {
        matches!(self.kind, FailureKind::PeerLost | FailureKind::Backend)
    }
}

/// What a transport is, for reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransportInfo {
    /// "nixl" or "sim".
    pub name: &'static str,
    /// Version of the library behind it.
    pub version: String,
    /// Backend within it, such as `UCX`.
    pub backend: String,
}

/// Makes agents. Shared by the threads of an engine; agents themselves are not.
pub trait Transport: Send + Sync + 'static {
    /// The agents it makes.
    type Agent: Agent;

    /// Creates an agent under a name that no other agent of the cluster has. May take tens of
    /// milliseconds.
    ///
    /// # Errors
    /// [`TransportError`] when the backend cannot be created.
    fn open_agent(&self, name: &AgentName, role: AgentRole) -> Result<Self::Agent, TransportError>;

    /// Holds the agents that are opened from now on to what must carry the bytes, so that anything else fails. Says at once
    /// if there is nothing of the kind.
    ///
    /// # Errors
    /// [`Unmet`]; by default for everything but [`Requirement::Any`].
    fn require(&self, requirement: Requirement) -> Result<(), Unmet> {
        match requirement {
            Requirement::Any => Ok(()),
            wanted => Err(Unmet {
                wanted,
                found: format!(
                    "the transport {}, which cannot be held to it",
                    self.info().name
                ),
                fix: "use NIXL, or require nothing".to_owned(),
            }),
        }
    }

    /// Memory for `slots` words that its agents can register.
    ///
    /// # Errors
    /// [`TransportError`] when memory cannot be had.
    fn control_words(&self, slots: u32) -> Result<Arc<dyn ControlWords>, TransportError>;

    /// What this is.
    fn info(&self) -> TransportInfo;
}

/// What an agent is for; decides about its progress thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AgentRole {
    /// Registers memory, is read from and receives notifications. Must make progress by itself.
    Serve,
    /// Posts reads; progresses when polled.
    Read,
}

/// One endpoint. Owned by one thread at a time; dropping it destroys it.
///
/// **The fence.** Destroying an agent is the only thing that stops its posted reads from writing.
/// After [`destroy`](Agent::destroy) has succeeded, no byte of local memory changes on this agent's
/// behalf. Dropping it does the same, without saying whether it worked.
pub trait Agent: Send + 'static {
    /// A posted window. Nothing cancels it: the engine keeps it until [`poll`](Agent::poll) has
    /// reported its end, or destroys the agent.
    type Request: Send + 'static;

    /// Registers local regions. `keep` is held until the regions are deregistered, so that memory
    /// outlives its registration.
    ///
    /// # Errors
    /// [`TransportError`]; then nothing of this call stays registered.
    fn register(
        &mut self,
        regions: &[RegionGeometry],
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<(), TransportError>;

    /// The blob that lets others read what is registered here. Opaque, and fatal to its loader when
    /// damaged: it travels under a checksum.
    ///
    /// # Errors
    /// [`TransportError`] when the backend gives none.
    fn metadata(&mut self) -> Result<Vec<u8>, TransportError>;

    /// Loads a peer's (verified) blob and checks that it names `expected`.
    ///
    /// # Errors
    /// [`TransportError`]; the peer is not loaded then.
    fn load_peer(&mut self, metadata: &[u8], expected: &AgentName) -> Result<(), TransportError>;

    /// Makes the connection to a loaded peer by one small read, so that the next one finds it made:
    /// transports make it when it is first used, in several round trips that need this side to poll.
    /// After an error the agent must be destroyed: the probe may still land.
    ///
    /// # Errors
    /// [`TransportError`] when the peer does not answer within `limit`.
    fn reach(
        &mut self,
        peer: &AgentName,
        probe: Descriptor,
        limit: Duration,
    ) -> Result<(), TransportError> {
        let _ = (peer, probe, limit);
        Ok(())
    }

    /// Forgets a peer. Does not stop reads in flight.
    fn forget_peer(&mut self, peer: &AgentName);

    /// Posts one window of reads. May copy inside the call (shared memory does), so windows bound
    /// how long it takes.
    ///
    /// # Errors
    /// [`ReadFault`], which tells whether bytes may still land although the call failed.
    fn post_read(
        &mut self,
        peer: &AgentName,
        ends: Ends,
        descriptors: &[Descriptor],
    ) -> Result<(Self::Request, Progress), ReadFault>;

    /// Asks how far a request is, and lets the transport make progress. After `Done` or an error
    /// it must not be polled again, only [discarded](Agent::discard).
    ///
    /// # Errors
    /// [`ReadFault`], which tells whether bytes may still land.
    fn poll(&mut self, request: &mut Self::Request) -> Result<Progress, ReadFault>;

    /// Gives back what a request holds in the library. Not a cancellation: for a request that is
    /// not over, the agent must be destroyed right afterwards.
    fn discard(&mut self, request: Self::Request);

    /// Sends a short message to a loaded peer.
    ///
    /// # Errors
    /// [`TransportError`] when the peer is not reachable; it may or may not have arrived.
    fn notify(&mut self, peer: &AgentName, message: &[u8]) -> Result<(), TransportError>;

    /// Takes the messages that have arrived, appended to `into`, and lets the transport make
    /// progress (a message that was sent may need it to leave).
    ///
    /// # Errors
    /// [`TransportError`] when the backend fails.
    fn notifications(&mut self, into: &mut Vec<(AgentName, Vec<u8>)>)
    -> Result<(), TransportError>;

    /// Destroys the agent, and says whether that has ended its writes.
    ///
    /// # Errors
    /// [`TransportError`] when the library refuses: its posted reads may then write for as long as
    /// the process lives, and what was registered stays mapped.
    fn destroy(self) -> Result<(), TransportError>;

    /// Whether calls that its owner has made may still be under way on a thread of the agent's own, so that its end may
    /// take for ever: whoever waits for it by [`destroy_patiently`](Agent::destroy_patiently) does nothing else meanwhile.
    fn may_hang(&self) -> bool {
        false
    }

    /// Like [`destroy`](Agent::destroy), however long that takes.
    ///
    /// # Errors
    /// As for [`destroy`](Agent::destroy).
    fn destroy_patiently(self) -> Result<(), TransportError>
    where
        Self: Sized,
    {
        self.destroy()
    }
}

/// Whether bytes may still land after a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AfterError {
    /// The request is terminal: nothing more is written on its behalf.
    Quiet,
    /// Not known: only destroying the agent ends the doubt.
    InDoubt,
}

/// A failed window of reads, and whether its bytes may still land.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{error}")]
pub struct ReadFault {
    /// The failure.
    #[source]
    pub error: TransportError,
    /// Whether bytes may still land.
    pub after: AfterError,
}

//! An agent of either kind: called where it is used, or on a thread of its own.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use super::direct::{Direct, DirectRequest};
use crate::ids::AgentName;
use crate::layout::RegionGeometry;
use crate::transport::aside::{Aside, AsideRequest};
use crate::transport::{
    AfterError, Agent, Descriptor, Ends, FailureKind, Progress, ReadFault, TransportError,
};

/// One NIXL agent. It is used by one thread at a time (`&mut self`), and destroyed when dropped.
///
/// With the UCX backend its calls are NIXL's, made at once. With LIBFABRIC, where calls may hang, a reading agent lives on
/// a thread of its own: windows are handed over, and no call holds up the caller.
#[derive(Debug)]
pub struct NixlAgent(pub(super) Kind);

#[derive(Debug)]
pub(super) enum Kind {
    /// Called where it is used.
    Direct(Direct),
    /// On a thread of its own.
    Aside(Aside<Direct>),
}

/// A posted NIXL request.
#[derive(Debug)]
pub struct NixlRequest(Posted);

#[derive(Debug)]
enum Posted {
    Direct(DirectRequest),
    Aside(AsideRequest),
}

impl NixlAgent {
    /// Posts one window of writes: from `local` of each descriptor to `remote`. For measuring: the engine never writes. It
    /// is polled and discarded like a window of reads, and its source must stay as it is until it is over.
    ///
    /// # Errors
    /// [`ReadFault`], which tells whether bytes may still be moved.
    pub fn post_write(
        &mut self,
        peer: &AgentName,
        ends: Ends,
        descriptors: &[Descriptor],
    ) -> Result<(NixlRequest, Progress), ReadFault> {
        match &mut self.0 {
            Kind::Direct(agent) => agent.post_write(peer, ends, descriptors).map(direct),
            Kind::Aside(agent) => {
                let (request, progress) = agent.post(Direct::post_write, peer, ends, descriptors);
                Ok((NixlRequest(Posted::Aside(request)), progress))
            }
        }
    }
}

fn direct((request, progress): (DirectRequest, Progress)) -> (NixlRequest, Progress) {
    (NixlRequest(Posted::Direct(request)), progress)
}

impl Agent for NixlAgent {
    type Request = NixlRequest;

    fn register(
        &mut self,
        regions: &[RegionGeometry],
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<(), TransportError> {
        match &mut self.0 {
            Kind::Direct(agent) => agent.register(regions, keep),
            Kind::Aside(agent) => agent.register(regions, keep),
        }
    }

    fn metadata(&mut self) -> Result<Vec<u8>, TransportError> {
        match &mut self.0 {
            Kind::Direct(agent) => agent.metadata(),
            Kind::Aside(agent) => agent.metadata(),
        }
    }

    fn load_peer(&mut self, metadata: &[u8], expected: &AgentName) -> Result<(), TransportError> {
        match &mut self.0 {
            Kind::Direct(agent) => agent.load_peer(metadata, expected),
            Kind::Aside(agent) => agent.load_peer(metadata, expected),
        }
    }

    fn reach(
        &mut self,
        peer: &AgentName,
        probe: Descriptor,
        limit: Duration,
    ) -> Result<(), TransportError> {
        match &mut self.0 {
            Kind::Direct(agent) => agent.reach(peer, probe, limit),
            Kind::Aside(agent) => agent.reach(peer, probe, limit),
        }
    }

    fn forget_peer(&mut self, peer: &AgentName) {
        match &mut self.0 {
            Kind::Direct(agent) => agent.forget_peer(peer),
            Kind::Aside(agent) => agent.forget_peer(peer),
        }
    }

    fn post_read(
        &mut self,
        peer: &AgentName,
        ends: Ends,
        descriptors: &[Descriptor],
    ) -> Result<(NixlRequest, Progress), ReadFault> {
        match &mut self.0 {
            Kind::Direct(agent) => agent.post_read(peer, ends, descriptors).map(direct),
            Kind::Aside(agent) => {
                let (request, progress) = agent.post_read(peer, ends, descriptors)?;
                Ok((NixlRequest(Posted::Aside(request)), progress))
            }
        }
    }

    fn poll(&mut self, request: &mut NixlRequest) -> Result<Progress, ReadFault> {
        match (&mut self.0, &mut request.0) {
            (Kind::Direct(agent), Posted::Direct(request)) => agent.poll(request),
            (Kind::Aside(agent), Posted::Aside(request)) => agent.poll(request),
            _ => Err(ReadFault {
                error: TransportError {
                    operation: "read",
                    kind: FailureKind::Rejected,
                    cause: "the request is another agent's".into(),
                    raw: None,
                },
                after: AfterError::InDoubt,
            }),
        }
    }

    fn discard(&mut self, request: NixlRequest) {
        match (&mut self.0, request.0) {
            (Kind::Direct(agent), Posted::Direct(request)) => agent.discard(request),
            (Kind::Aside(agent), Posted::Aside(request)) => agent.discard(request),
            // Another agent's, which releases it when it is destroyed.
            _ => {}
        }
    }

    fn notify(&mut self, peer: &AgentName, message: &[u8]) -> Result<(), TransportError> {
        match &mut self.0 {
            Kind::Direct(agent) => agent.notify(peer, message),
            Kind::Aside(agent) => agent.notify(peer, message),
        }
    }

    fn notifications(
        &mut self,
        into: &mut Vec<(AgentName, Vec<u8>)>,
    ) -> Result<(), TransportError> {
        match &mut self.0 {
            Kind::Direct(agent) => agent.notifications(into),
            Kind::Aside(agent) => agent.notifications(into),
        }
    }

    fn destroy(self) -> Result<(), TransportError> {
        match self.0 {
            Kind::Direct(agent) => agent.destroy(),
            Kind::Aside(agent) => agent.destroy(),
        }
    }

    fn may_hang(&self) -> bool {
        match &self.0 {
            Kind::Direct(agent) => agent.may_hang(),
            Kind::Aside(agent) => agent.may_hang(),
        }
    }

    fn destroy_patiently(self) -> Result<(), TransportError> {
        match self.0 {
            Kind::Direct(agent) => agent.destroy_patiently(),
            Kind::Aside(agent) => agent.destroy_patiently(),
        }
    }
}

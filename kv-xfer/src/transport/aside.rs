//! An agent on a thread of its own, for backends whose calls may hang.
//!
//! Some backends wait within a call for as long as it takes: NIXL's LIBFABRIC tries a post, a message and the first
//! contact with a peer again and again while libfabric says "later", which it says of a dead peer for ever. On the driver's
//! thread that would stop the reads of every peer. So the agent lives on its own thread: its owner hands calls over and
//! looks at what has become of them. A call that hangs holds up this one agent, whose reads end by their deadlines and
//! whose blocks stay in quarantine until the call returns, if ever, and the agent can be destroyed.
#![forbid(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, bounded, unbounded};
use parking_lot::Mutex;

use super::{
    AfterError, Agent, Descriptor, Ends, FailureKind, Progress, ReadFault, TransportError,
};
use crate::ids::AgentName;
use crate::layout::RegionGeometry;
use crate::memory::{ThreadBinding, bind_thread_to};

/// Time for a call that no peer takes part in.
const CALL_LIMIT: Duration = Duration::from_secs(30);
/// Time to load a peer, with which LIBFABRIC already talks then.
const LOAD_LIMIT: Duration = Duration::from_secs(5);
/// Longest wait for an agent's end where something else waits meanwhile.
const DESTROY_LIMIT: Duration = Duration::from_secs(2);
/// How long the thread looks for the next call, or for an end, before it sleeps.
const SPIN: Duration = Duration::from_micros(100);
/// Longest sleep between polls while something is in flight.
const MAX_NAP: Duration = Duration::from_micros(200);
/// How often an agent that has nothing to do is let make progress.
const TEND: Duration = Duration::from_millis(100);

const PENDING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;

/// What has become of a window.
#[derive(Debug, Default)]
struct Cell {
    state: AtomicU8,
    fault: Mutex<Option<ReadFault>>,
}

impl Cell {
    fn end(&self, result: Result<(), ReadFault>) {
        let state = match result {
            Ok(()) => DONE,
            Err(fault) => {
                *self.fault.lock() = Some(fault);
                FAILED
            }
        };
        self.state.store(state, Ordering::Release);
    }
}

/// A window that was handed over.
#[derive(Debug)]
pub struct AsideRequest(Arc<Cell>);

/// How a window is posted: [`Agent::post_read`], or another method of the agent.
pub(crate) type Posting<A> = fn(
    &mut A,
    &AgentName,
    Ends,
    &[Descriptor],
) -> Result<(<A as Agent>::Request, Progress), ReadFault>;

type Reply<T> = Sender<Result<T, TransportError>>;

enum Call<A: Agent> {
    Register {
        regions: Vec<RegionGeometry>,
        keep: Arc<dyn Any + Send + Sync>,
        reply: Reply<()>,
    },
    Metadata {
        reply: Reply<Vec<u8>>,
    },
    Load {
        metadata: Vec<u8>,
        expected: AgentName,
        reply: Reply<()>,
    },
    Reach {
        peer: AgentName,
        probe: Descriptor,
        limit: Duration,
        reply: Reply<()>,
    },
    Forget {
        peer: AgentName,
    },
    Post {
        how: Posting<A>,
        peer: AgentName,
        ends: Ends,
        batch: Vec<Descriptor>,
        cell: Arc<Cell>,
    },
    Destroy {
        reply: Reply<()>,
    },
}

/// An agent on a thread of its own.
pub(crate) struct Aside<A: Agent> {
    calls: Sender<Call<A>>,
    /// What is still to be called is not to be called any more.
    closing: Arc<AtomicBool>,
}

impl<A: Agent> fmt::Debug for Aside<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Aside").finish_non_exhaustive()
    }
}

fn hangs(operation: &'static str, limit: Duration) -> TransportError {
    TransportError {
        operation,
        kind: FailureKind::PeerLost,
        cause: format!("the backend's call did not return within {limit:?}"),
        raw: None,
    }
}

impl<A: Agent> Aside<A> {
    /// Moves an agent to a thread of its own. `reached` is called on that thread when the agent has reached its peer.
    ///
    /// # Errors
    /// [`TransportError`] when there can be no more threads; the agent is destroyed then.
    pub(crate) fn new(agent: A, reached: fn()) -> Result<Self, TransportError> {
        let (calls, inbox) = unbounded();
        let closing = Arc::new(AtomicBool::new(false));
        let here = Thread {
            agent,
            reached,
            calls: inbox,
            closing: Arc::clone(&closing),
            posted: Vec::new(),
            doubtful: Vec::new(),
        };
        let thread = std::thread::Builder::new().name("kvx-agent".into());
        thread
            .spawn(move || here.run())
            .map_err(|error| TransportError {
                operation: "open agent",
                kind: FailureKind::Backend,
                cause: format!("no thread for it: {error}"),
                raw: None,
            })?;
        Ok(Self { calls, closing })
    }

    /// Makes a call and waits for its result.
    fn ask<R>(
        &self,
        operation: &'static str,
        limit: Duration,
        call: impl FnOnce(Reply<R>) -> Call<A>,
    ) -> Result<R, TransportError> {
        let (reply, result) = bounded(1);
        let _ = self.calls.send(call(reply));
        result
            .recv_timeout(limit)
            .map_err(|_| hangs(operation, limit))?
    }

    /// Hands a window over, to be posted in a way of its own.
    pub(crate) fn post(
        &self,
        how: Posting<A>,
        peer: &AgentName,
        ends: Ends,
        batch: &[Descriptor],
    ) -> (AsideRequest, Progress) {
        let cell = Arc::new(Cell::default());
        let call = Call::Post {
            how,
            peer: peer.clone(),
            ends,
            batch: batch.to_vec(),
            cell: Arc::clone(&cell),
        };
        if self.calls.send(call).is_err() {
            cell.end(Err(ReadFault {
                error: hangs("post", Duration::ZERO),
                after: AfterError::InDoubt,
            }));
        }
        (AsideRequest(cell), Progress::Pending)
    }

    fn close(&self) -> Receiver<Result<(), TransportError>> {
        self.closing.store(true, Ordering::Release);
        let (reply, result) = bounded(1);
        let _ = self.calls.send(Call::Destroy { reply });
        result
    }
}

impl<A: Agent> Agent for Aside<A> {
    type Request = AsideRequest;

    fn register(
        &mut self,
        regions: &[RegionGeometry],
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<(), TransportError> {
        let regions = regions.to_vec();
        self.ask("register", CALL_LIMIT, |reply| Call::Register {
            regions,
            keep,
            reply,
        })
    }

    fn metadata(&mut self) -> Result<Vec<u8>, TransportError> {
        self.ask("get metadata", CALL_LIMIT, |reply| Call::Metadata { reply })
    }

    fn load_peer(&mut self, metadata: &[u8], expected: &AgentName) -> Result<(), TransportError> {
        let (metadata, expected) = (metadata.to_vec(), expected.clone());
        self.ask("load peer", LOAD_LIMIT, |reply| Call::Load {
            metadata,
            expected,
            reply,
        })
    }

    fn reach(
        &mut self,
        peer: &AgentName,
        probe: Descriptor,
        limit: Duration,
    ) -> Result<(), TransportError> {
        let peer = peer.clone();
        self.ask("reach peer", limit, |reply| Call::Reach {
            peer,
            probe,
            limit,
            reply,
        })
    }

    fn forget_peer(&mut self, peer: &AgentName) {
        let _ = self.calls.send(Call::Forget { peer: peer.clone() });
    }

    fn post_read(
        &mut self,
        peer: &AgentName,
        ends: Ends,
        descriptors: &[Descriptor],
    ) -> Result<(AsideRequest, Progress), ReadFault> {
        Ok(self.post(A::post_read, peer, ends, descriptors))
    }

    fn poll(&mut self, request: &mut AsideRequest) -> Result<Progress, ReadFault> {
        match request.0.state.load(Ordering::Acquire) {
            PENDING => Ok(Progress::Pending),
            DONE => Ok(Progress::Done),
            _ => {
                let fault = request.0.fault.lock().take();
                Err(fault.unwrap_or_else(|| ReadFault {
                    error: hangs("read", Duration::ZERO),
                    after: AfterError::InDoubt,
                }))
            }
        }
    }

    /// The thread discards what is over.
    fn discard(&mut self, _: AsideRequest) {}

    /// Not at all: a message to a peer that is gone would hang. Whoever has something to say says it over the side
    /// channel.
    fn notify(&mut self, _: &AgentName, _: &[u8]) -> Result<(), TransportError> {
        Err(TransportError {
            operation: "notify",
            kind: FailureKind::Unsupported,
            cause: "with this backend a message to a peer that is gone hangs, so none is sent"
                .into(),
            raw: None,
        })
    }

    /// None: its thread lets the agent make progress.
    fn notifications(&mut self, _: &mut Vec<(AgentName, Vec<u8>)>) -> Result<(), TransportError> {
        Ok(())
    }

    fn destroy(self) -> Result<(), TransportError> {
        match self.close().recv_timeout(DESTROY_LIMIT) {
            Ok(result) => result,
            Err(_) => Err(hangs("destroy agent", DESTROY_LIMIT)),
        }
    }

    fn may_hang(&self) -> bool {
        true
    }

    fn destroy_patiently(self) -> Result<(), TransportError> {
        match self.close().recv() {
            Ok(result) => result,
            // The thread has unwound, and dropped the agent.
            Err(_) => Err(hangs("destroy agent", Duration::ZERO)),
        }
    }
}

impl<A: Agent> Drop for Aside<A> {
    fn drop(&mut self) {
        self.closing.store(true, Ordering::Release);
    }
}

struct Posted<R> {
    cell: Arc<Cell>,
    request: R,
}

/// The thread's end.
struct Thread<A: Agent> {
    agent: A,
    reached: fn(),
    calls: Receiver<Call<A>>,
    closing: Arc<AtomicBool>,
    posted: Vec<Posted<A::Request>>,
    /// Failed, while bytes may still land: kept until the agent is destroyed.
    doubtful: Vec<A::Request>,
}

impl<A: Agent> Thread<A> {
    /// Runs until the agent is to be destroyed, or nobody can call it any more.
    fn run(mut self) {
        let mut moved = Instant::now();
        // Of the thread, so that it is dropped here.
        let mut bound = None;
        loop {
            let quiet = moved.elapsed();
            let call = if quiet < SPIN {
                match self.calls.try_recv() {
                    Ok(call) => Some(call),
                    Err(TryRecvError::Empty) => None,
                    Err(TryRecvError::Disconnected) => break,
                }
            } else {
                let nap = if self.posted.is_empty() {
                    TEND
                } else {
                    (quiet / 8).min(MAX_NAP)
                };
                match self.calls.recv_timeout(nap) {
                    Ok(call) => Some(call),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => break,
                }
            };
            let called = call.is_some();
            match call {
                Some(Call::Destroy { reply }) => {
                    let _ = reply.send(self.destroy());
                    return;
                }
                Some(call) => self.carry_out(call, &mut bound),
                None if self.posted.is_empty() && quiet >= SPIN => {
                    // A reader is sent no messages; taking them is what lets the agent progress.
                    let _ = self.agent.notifications(&mut Vec::new());
                }
                None => {}
            }
            if self.poll() || called {
                moved = Instant::now();
            } else if quiet < SPIN {
                std::hint::spin_loop();
            }
        }
        if let Err(error) = self.destroy() {
            tracing::error!(%error, "an agent could not be destroyed");
        }
    }

    fn carry_out(&mut self, call: Call<A>, bound: &mut Option<ThreadBinding>) {
        if self.closing.load(Ordering::Acquire) {
            // It may hang, and nobody waits for it. What was to be posted never was.
            return;
        }
        // Whoever asked may have given up.
        match call {
            Call::Register {
                regions,
                keep,
                reply,
            } => drop(reply.send(self.register(&regions, keep, bound))),
            Call::Metadata { reply } => drop(reply.send(self.agent.metadata())),
            Call::Load {
                metadata,
                expected,
                reply,
            } => drop(reply.send(self.agent.load_peer(&metadata, &expected))),
            Call::Reach {
                peer,
                probe,
                limit,
                reply,
            } => {
                let reached = self.agent.reach(&peer, probe, limit);
                if reached.is_ok() {
                    (self.reached)();
                }
                let _ = reply.send(reached);
            }
            Call::Forget { peer } => self.agent.forget_peer(&peer),
            Call::Post {
                how,
                peer,
                ends,
                batch,
                cell,
            } => match how(&mut self.agent, &peer, ends, &batch) {
                Ok((request, Progress::Pending)) => self.posted.push(Posted { cell, request }),
                Ok((request, Progress::Done)) => {
                    self.agent.discard(request);
                    cell.end(Ok(()));
                }
                Err(fault) => cell.end(Err(fault)),
            },
            Call::Destroy { .. } => {}
        }
    }

    /// What is registered says which GPU's context this thread needs from then on, if any.
    fn register(
        &mut self,
        regions: &[RegionGeometry],
        keep: Arc<dyn Any + Send + Sync>,
        bound: &mut Option<ThreadBinding>,
    ) -> Result<(), TransportError> {
        if bound.is_none() {
            *bound = bind_thread_to(regions).map_err(|error| TransportError {
                operation: "register",
                kind: FailureKind::Backend,
                cause: format!("the agent's thread cannot use the memory's device: {error}"),
                raw: None,
            })?;
        }
        self.agent.register(regions, keep)
    }

    /// Polls what is in flight; whether anything has ended.
    fn poll(&mut self) -> bool {
        let mut ended = false;
        let mut at = 0;
        while let Some(posted) = self.posted.get_mut(at) {
            let result = match self.agent.poll(&mut posted.request) {
                Ok(Progress::Pending) => {
                    at = at.saturating_add(1);
                    continue;
                }
                Ok(Progress::Done) => Ok(()),
                Err(fault) => Err(fault),
            };
            ended = true;
            let Posted { cell, request } = self.posted.swap_remove(at);
            if matches!(&result, Err(fault) if fault.after == AfterError::InDoubt) {
                self.doubtful.push(request);
            } else {
                self.agent.discard(request);
            }
            cell.end(result);
        }
        ended
    }

    fn destroy(self) -> Result<(), TransportError> {
        let Self {
            mut agent,
            posted,
            doubtful,
            ..
        } = self;
        let posted = posted.into_iter().map(|posted| posted.request);
        for request in posted.chain(doubtful) {
            agent.discard(request);
        }
        agent.destroy()
    }
}

#[cfg(test)]
mod tests;

//! The listening side: one thread, any number of addresses, and nothing that a client does ends it.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use thiserror::Error;
use tokio::sync::Notify;

use super::connection::{Connections, serve};
use super::wire::{ReleaseOutcome, ReleaseRequest, RenewOutcome, RenewRequest};
use crate::clock::{Clock, SystemClock};
use crate::descriptor::ClusterKey;
use crate::ids::{EngineId, Incarnation, Rank};
use crate::telemetry::Storm;

/// Pause after a failed `accept`, so that a lack of file descriptors does not burn a core.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);
/// How long dropping a server waits for its thread.
const DROP_WAIT: Duration = Duration::from_secs(2);

/// What the engine answers with. Called on the server's thread, one call at a time: answer from
/// memory, without waiting for anything. A call that panics costs its connection and is counted.
pub trait Handler: Send + Sync + 'static {
    /// The encoded card of a rank ([`encode_reply`](crate::peer::encode_reply)); `None` when there
    /// is no such rank.
    fn card(&self, rank: Rank) -> Option<Bytes>;

    /// Who answers.
    fn ping(&self) -> PingInfo;

    /// Extends a lease.
    fn renew(&self, request: &RenewRequest) -> RenewOutcome;

    /// Ends a lease.
    fn release(&self, request: &ReleaseRequest) -> ReleaseOutcome;
}

/// Who answers a ping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PingInfo {
    /// The engine.
    pub engine_id: EngineId,
    /// Which life of it.
    pub incarnation: Incarnation,
}

/// How much clients may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerLimits {
    /// Most connections. When one more comes in, one is closed: the oldest that is overdue with its
    /// handshake, else the one that has been silent for longest. So a crowd of silent clients cannot
    /// keep others out. Default 512: a reader rank needs one, for milliseconds.
    pub max_connections: usize,
    /// Longest request, in bytes. Default 4,096; the longest that is served has under 100.
    pub max_request: u64,
    /// By when greeting and READY must be exchanged. Default 2 s.
    pub handshake: Duration,
    /// By when a request that has begun must be complete, and a reply taken. Default 5 s, vLLM's
    /// receive timeout.
    pub io: Duration,
    /// How long a connection may stay silent between requests. Default 60 s.
    pub idle: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            max_connections: 512,
            max_request: 4096,
            handshake: Duration::from_secs(2),
            io: Duration::from_secs(5),
            idle: Duration::from_secs(60),
        }
    }
}

/// What a [`Server`] is started with.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Where to listen. Port 0 takes a free one; advertise what [`Server::addrs`] says.
    pub bind: Vec<SocketAddr>,
    /// How much clients may use.
    pub limits: ServerLimits,
    /// When set, requests for cards and those that change something must carry a MAC made with it.
    pub key: Option<ClusterKey>,
    /// The clock that replies are stamped with: the one that leases are stamped with.
    pub clock: Arc<dyn Clock>,
}

impl ServerConfig {
    /// Listens at one address, with default limits and the system's clock.
    #[must_use]
    pub fn at(addr: SocketAddr) -> Self {
        Self {
            bind: vec![addr],
            limits: ServerLimits::default(),
            key: None,
            clock: Arc::new(SystemClock),
        }
    }
}

/// Addresses that are taken, but not served yet: whoever connects waits. Bind before anything else takes ports by itself,
/// as NIXL's backends do.
#[derive(Debug)]
pub struct Listeners(Vec<(TcpListener, SocketAddr)>);

impl Listeners {
    /// Binds; port 0 takes a free one.
    ///
    /// # Errors
    /// [`ServerError::NoAddress`], [`ServerError::AddressTaken`], or [`ServerError::Bind`].
    pub fn bind(addrs: &[SocketAddr]) -> Result<Self, ServerError> {
        if addrs.is_empty() {
            return Err(ServerError::NoAddress);
        }
        let bind = |addr: &SocketAddr| {
            let failed = |source: io::Error| match source.kind() {
                io::ErrorKind::AddrInUse => ServerError::AddressTaken { addr: *addr },
                _ => ServerError::Bind {
                    addr: *addr,
                    source,
                },
            };
            let listener = TcpListener::bind(addr).map_err(failed)?;
            listener.set_nonblocking(true).map_err(failed)?;
            let taken = listener.local_addr().map_err(failed)?;
            Ok((listener, taken))
        };
        addrs.iter().map(bind).collect::<Result<_, _>>().map(Self)
    }
}

/// Why a server did not start or stop.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServerError {
    /// No address was given.
    #[error("no address to listen at was given; give at least one, such as 0.0.0.0:0")]
    NoAddress,
    /// Another process, or another server of this one, listens there.
    #[error(
        "{addr} is taken; stop what listens there, or choose another port (0 takes a free one)"
    )]
    AddressTaken {
        /// The address.
        addr: SocketAddr,
    },
    /// The address cannot be listened at.
    #[error("cannot listen at {addr}: {source}; choose an address of this machine")]
    Bind {
        /// The address.
        addr: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// The system gave no thread, or no event queue.
    #[error("cannot start the side channel's thread: {0}; free some of the system's resources")]
    Thread(#[source] io::Error),
    /// The thread did not end in time.
    #[error("the side channel's thread did not end within {after:?}: a handler call hangs")]
    StillRunning {
        /// How long was waited.
        after: Duration,
    },
    /// The thread panicked.
    #[error("the side channel's thread panicked; report a bug")]
    Panicked,
}

/// Counts since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ServerStats {
    /// Connections accepted.
    pub accepted: u64,
    /// Connections open now.
    pub open: u64,
    /// Requests answered as asked.
    pub requests: u64,
    /// Connections or requests dropped because they made no sense: another protocol, broken frames,
    /// no MessagePack.
    pub malformed: u64,
    /// Requests of an unknown kind, answered by a refusal.
    pub unknown: u64,
    /// Known requests answered by a refusal: no such rank, no valid MAC.
    pub refused: u64,
    /// Connections closed because a deadline passed.
    pub timed_out: u64,
    /// Connections closed to make room for newer ones.
    pub shed: u64,
    /// Failures of `accept`.
    pub accept_failures: u64,
    /// Handler calls that panicked.
    pub handler_panics: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) accepted: AtomicU64,
    pub(super) requests: AtomicU64,
    pub(super) malformed: AtomicU64,
    pub(super) unknown: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) timed_out: AtomicU64,
    pub(super) shed: AtomicU64,
    pub(super) accept_failures: AtomicU64,
    pub(super) handler_panics: AtomicU64,
}

pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// What all connections share.
pub(super) struct Shared {
    pub(super) handler: Arc<dyn Handler>,
    pub(super) limits: ServerLimits,
    pub(super) key: Option<ClusterKey>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) counters: Counters,
    pub(super) connections: Connections,
}

/// A listening side channel. Dropping it stops it.
pub struct Server {
    addrs: Vec<SocketAddr>,
    shared: Arc<Shared>,
    stop: Arc<Notify>,
    /// Locked by nobody but `join`; makes the server `Sync`.
    done: Mutex<mpsc::Receiver<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Binds every address, then starts the thread. When this returns, clients can connect.
    ///
    /// # Errors
    /// [`ServerError`]; then nothing listens.
    pub fn start(config: ServerConfig, handler: Arc<dyn Handler>) -> Result<Self, ServerError> {
        let bound = Listeners::bind(&config.bind)?;
        Self::serve(bound, config, handler)
    }

    /// Serves at addresses that are bound already; `config.bind` is not looked at.
    ///
    /// # Errors
    /// [`ServerError::Thread`] when the thread cannot be started, [`ServerError::Bind`] when the listeners cannot be watched.
    pub fn serve(
        bound: Listeners,
        config: ServerConfig,
        handler: Arc<dyn Handler>,
    ) -> Result<Self, ServerError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(ServerError::Thread)?;
        let mut listeners = Vec::with_capacity(bound.0.len());
        let mut addrs = Vec::with_capacity(bound.0.len());
        for (listener, addr) in bound.0 {
            let _context = runtime.enter();
            let listener = tokio::net::TcpListener::from_std(listener)
                .map_err(|source| ServerError::Bind { addr, source })?;
            listeners.push(listener);
            addrs.push(addr);
        }
        let shared = Arc::new(Shared {
            handler,
            connections: Connections::new(config.limits.max_connections),
            limits: config.limits,
            key: config.key,
            clock: config.clock,
            counters: Counters::default(),
        });
        let stop = Arc::new(Notify::new());
        let (ended, done) = mpsc::sync_channel(1);
        let thread = {
            let (shared, stop) = (Arc::clone(&shared), Arc::clone(&stop));
            std::thread::Builder::new()
                .name("kv-xfer-side".to_owned())
                .spawn(move || {
                    // Told by being dropped, also when this thread panics.
                    let _ended = ended;
                    runtime.block_on(async {
                        for listener in listeners {
                            tokio::spawn(accept(listener, Arc::clone(&shared)));
                        }
                        stop.notified().await;
                    });
                    // Dropping the runtime drops every listener and connection.
                    drop(runtime);
                })
                .map_err(ServerError::Thread)?
        };
        Ok(Self {
            addrs,
            shared,
            stop,
            done: Mutex::new(done),
            thread: Some(thread),
        })
    }

    /// The addresses that are listened at, in the order of the configuration, with real ports.
    #[must_use]
    pub fn addrs(&self) -> &[SocketAddr] {
        &self.addrs
    }

    /// The counts.
    #[must_use]
    pub fn stats(&self) -> ServerStats {
        let counters = &self.shared.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ServerStats {
            accepted: read(&counters.accepted),
            open: self.shared.connections.len() as u64,
            requests: read(&counters.requests),
            malformed: read(&counters.malformed),
            unknown: read(&counters.unknown),
            refused: read(&counters.refused),
            timed_out: read(&counters.timed_out),
            shed: read(&counters.shed),
            accept_failures: read(&counters.accept_failures),
            handler_panics: read(&counters.handler_panics),
        }
    }

    /// Stops listening, closes every connection and waits for the thread, at most `bound`.
    ///
    /// # Errors
    /// [`ServerError::StillRunning`] when a handler call hangs: the thread is left behind and ends
    /// after that call. [`ServerError::Panicked`] when it had died.
    pub fn shutdown(mut self, bound: Duration) -> Result<(), ServerError> {
        self.join(bound)
    }

    fn join(&mut self, bound: Duration) -> Result<(), ServerError> {
        let Some(thread) = self.thread.take() else {
            return Ok(());
        };
        self.stop.notify_one();
        match self.done.get_mut().recv_timeout(bound) {
            Err(mpsc::RecvTimeoutError::Timeout) => Err(ServerError::StillRunning { after: bound }),
            Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => {
                thread.join().map_err(|_| ServerError::Panicked)
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(error) = self.join(DROP_WAIT) {
            tracing::warn!(%error, "side channel dropped");
        }
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("addrs", &self.addrs)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

static ACCEPT_FAILURES: Storm = Storm::new();

async fn accept(listener: tokio::net::TcpListener, shared: Arc<Shared>) {
    loop {
        match listener.accept().await {
            Ok((stream, remote)) => {
                count(&shared.counters.accepted);
                shared.connections.make_room(&shared.counters);
                let slot = shared.connections.open();
                let id = slot.id();
                let task = tokio::spawn(serve(stream, remote, slot, Arc::clone(&shared)));
                shared.connections.set_abort(id, task.abort_handle());
            }
            Err(error) => {
                count(&shared.counters.accept_failures);
                if let Some(failures) = ACCEPT_FAILURES.line() {
                    tracing::warn!(%error, failures, "side channel cannot accept a connection");
                }
                // Most likely no file descriptor is left: give one back.
                shared.connections.shed_one(&shared.counters);
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

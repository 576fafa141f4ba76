//! One request on one connection, from any thread, over by its deadline.
//!
//! Plain blocking sockets with a timeout set anew before every call: no runtime is needed, and none
//! is disturbed. Only looking up a name cannot be given a timeout, so that happens on a thread of its own
//! that is left behind when the deadline passes; the system's resolver ends it.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};

use super::dial::Dialable;
use super::error::{SideChannelError, Step};
use super::seal::{Challenge, Seal};
use super::wire::{
    self, ReleaseOutcome, ReleaseRequest, RenewOutcome, RenewRequest, Request, WireError,
};
use super::zmtp::{self, Command, Decoder, Event, Limits, ZmtpError};
use crate::clock::{Clock, MonoTime, SystemClock};
use crate::descriptor::ClusterKey;
use crate::ids::{EngineId, Incarnation, Rank};
use crate::peer::{CardLimits, ClockOffset, Feature, Features, PeerAddr};

/// Longest deadline; a longer one is cut to it.
const MAX_DEADLINE: Duration = Duration::from_secs(3600);
/// Most lookups that may hang at a time.
const MAX_LOOKUPS: usize = 16;
/// Most that a reply may hold besides the card: envelope, clock, or a reply to a request of our own.
const REPLY_OVERHEAD: u64 = 1024;
/// A card reply has a delimiter, the card and the clock.
const MAX_REPLY_PARTS: usize = 4;
const READ_CHUNK: usize = 64 * 1024;

/// What a [`Client`] is made with.
#[derive(Debug, Clone)]
pub struct ClientConfig {
    /// Longest reply accepted, in bytes. The default is that of [`CardLimits`].
    pub max_reply: usize,
    /// Signs requests for cards and those that change something.
    pub key: Option<ClusterKey>,
    /// What stamps requests, for the clock offset.
    pub clock: Arc<dyn Clock>,
}

impl Default for ClientConfig {
    fn default() -> Self {
        Self {
            max_reply: CardLimits::default().max_bytes,
            key: None,
            clock: Arc::new(SystemClock),
        }
    }
}

/// A card as it came in, not yet decoded; see [`decode_reply`](crate::peer::decode_reply).
#[derive(Debug, Clone, PartialEq)]
pub struct FetchedCard {
    /// The card map.
    pub bytes: Bytes,
    /// The server's clock when it sent the reply, in seconds.
    pub server_clock_secs: f64,
    /// Own clock when the request was sent.
    pub sent_at: MonoTime,
    /// Own clock when the reply had been received.
    pub received_at: MonoTime,
    /// The address that answered.
    pub remote: SocketAddr,
}

impl FetchedCard {
    /// Time from request to reply, without connecting.
    #[must_use]
    pub fn rtt(&self) -> Duration {
        self.received_at.saturating_since(self.sent_at)
    }

    /// How far the server's clock is from ours; `None` when its clock is implausible.
    #[must_use]
    pub fn clock_offset(&self) -> Option<ClockOffset> {
        ClockOffset::sample(self.sent_at, self.received_at, self.server_clock_secs)
    }
}

/// The reply to a ping.
#[derive(Debug, Clone, PartialEq)]
pub struct Pong {
    /// The engine.
    pub engine_id: EngineId,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// How far its clock is from ours; `None` when its clock is implausible.
    pub clock_offset: Option<ClockOffset>,
    /// Time from request to reply, without connecting.
    pub rtt: Duration,
}

/// Makes requests. Cheap to clone; each request uses a connection of its own.
#[derive(Debug, Clone, Default)]
pub struct Client {
    config: ClientConfig,
}

impl Client {
    /// A client.
    #[must_use]
    pub fn new(config: ClientConfig) -> Self {
        Self { config }
    }

    /// Fetches the card of one rank. Any vLLM or kv-xfer engine answers this.
    ///
    /// # Errors
    /// [`SideChannelError`], at the latest when `deadline` has passed.
    pub fn fetch_card(
        &self,
        peer: &Dialable,
        rank: Rank,
        deadline: Duration,
    ) -> Result<FetchedCard, SideChannelError> {
        let answer = self.ask(peer, &Request::Card(rank), deadline)?;
        let (card, clock) = match answer.parts.as_slice() {
            [card, clock] => (card, clock),
            [refusal] => return Err(answer.refused(peer, refusal, 2)),
            parts => return Err(bad_parts(peer, 2, parts.len())),
        };
        let server_clock_secs = wire::decode_clock(clock).map_err(|why| bad_reply(peer, why))?;
        Ok(FetchedCard {
            bytes: card.clone(),
            server_clock_secs,
            sent_at: answer.sent_at,
            received_at: answer.received_at,
            remote: answer.remote,
        })
    }

    /// Asks for a sign of life.
    ///
    /// # Errors
    /// [`SideChannelError`], at the latest when `deadline` has passed.
    pub fn ping(
        &self,
        peer: &Dialable,
        advertised: Features,
        deadline: Duration,
    ) -> Result<Pong, SideChannelError> {
        let (answer, reply) =
            self.own(peer, advertised, Feature::Ping, &Request::Ping, deadline)?;
        let (engine_id, incarnation, secs) =
            wire::decode_pong(&reply).map_err(|why| bad_reply(peer, why))?;
        Ok(Pong {
            engine_id,
            incarnation,
            clock_offset: ClockOffset::sample(answer.sent_at, answer.received_at, secs),
            rtt: answer.received_at.saturating_since(answer.sent_at),
        })
    }

    /// Asks the holder to extend a lease.
    ///
    /// # Errors
    /// [`SideChannelError`], at the latest when `deadline` has passed; the holder may have extended
    /// the lease all the same.
    pub fn renew(
        &self,
        peer: &Dialable,
        advertised: Features,
        request: RenewRequest,
        deadline: Duration,
    ) -> Result<RenewOutcome, SideChannelError> {
        let request = Request::Renew(request);
        let (_, reply) = self.own(peer, advertised, Feature::Renew, &request, deadline)?;
        wire::decode_renewed(&reply).map_err(|why| bad_reply(peer, why))
    }

    /// Tells the holder that a lease is no longer needed, where a notification cannot be sent.
    ///
    /// # Errors
    /// [`SideChannelError`], at the latest when `deadline` has passed; the holder may have released
    /// the lease all the same, and asking again does no harm.
    pub fn release(
        &self,
        peer: &Dialable,
        advertised: Features,
        request: ReleaseRequest,
        deadline: Duration,
    ) -> Result<ReleaseOutcome, SideChannelError> {
        let request = Request::Release(request);
        let (_, reply) = self.own(peer, advertised, Feature::Release, &request, deadline)?;
        wire::decode_released(&reply).map_err(|why| bad_reply(peer, why))
    }

    /// A request of our own, whose reply has one part.
    fn own(
        &self,
        peer: &Dialable,
        advertised: Features,
        feature: Feature,
        request: &Request,
        deadline: Duration,
    ) -> Result<(Answer, Bytes), SideChannelError> {
        if !advertised.has(feature) {
            return Err(SideChannelError::NotAdvertised {
                peer: peer.addr().clone(),
                feature,
            });
        }
        let answer = self.ask(peer, request, deadline)?;
        let [reply] = answer.parts.as_slice() else {
            return Err(bad_parts(peer, 1, answer.parts.len()));
        };
        if wire::decode_refusal(reply).is_some() {
            return Err(answer.refused(peer, reply, 1));
        }
        let reply = reply.clone();
        Ok((answer, reply))
    }

    fn ask(
        &self,
        peer: &Dialable,
        request: &Request,
        deadline: Duration,
    ) -> Result<Answer, SideChannelError> {
        let until = Deadline::after(deadline);
        let max_message = (self.config.max_reply as u64).saturating_add(REPLY_OVERHEAD);
        let mut connection = Connection::open(peer, until, max_message)?;
        let seal = match &self.config.key {
            Some(key) if !matches!(request, Request::Ping) => {
                let challenge = connection.challenge(peer)?;
                Some(Seal { key, challenge })
            }
            _ => None,
        };
        let payload = request.encode(seal.as_ref());
        let sent_at = self.config.clock.now();
        let parts = connection.request(peer, &payload)?;
        let received_at = self.config.clock.now();
        Ok(Answer {
            parts,
            sent_at,
            received_at,
            remote: connection.remote,
        })
    }
}

struct Answer {
    parts: Vec<Bytes>,
    sent_at: MonoTime,
    received_at: MonoTime,
    remote: SocketAddr,
}

impl Answer {
    /// The error of a reply that is a refusal, or else of one with too few parts.
    fn refused(&self, peer: &Dialable, part: &[u8], expected: usize) -> SideChannelError {
        match wire::decode_refusal(part) {
            Some((reason, detail)) => SideChannelError::PeerRefused {
                peer: peer.addr().clone(),
                reason,
                detail,
            },
            None => bad_parts(peer, expected, self.parts.len()),
        }
    }
}

fn bad_reply(peer: &Dialable, why: WireError) -> SideChannelError {
    SideChannelError::BadReply {
        peer: peer.addr().clone(),
        why,
    }
}

fn bad_parts(peer: &Dialable, expected: usize, found: usize) -> SideChannelError {
    bad_reply(peer, WireError::Parts { expected, found })
}

/// When a request is over.
#[derive(Debug, Clone, Copy)]
struct Deadline {
    at: Instant,
    after: Duration,
}

impl Deadline {
    fn after(after: Duration) -> Self {
        let now = Instant::now();
        let at = now.checked_add(after.min(MAX_DEADLINE)).unwrap_or(now);
        Self { at, after }
    }

    /// What is left; an error when nothing is.
    fn left(&self, peer: &PeerAddr, step: Step) -> Result<Duration, SideChannelError> {
        let left = self.at.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(self.passed(peer, step));
        }
        Ok(left)
    }

    fn passed(&self, peer: &PeerAddr, step: Step) -> SideChannelError {
        SideChannelError::Timeout {
            peer: peer.clone(),
            step,
            after: self.after,
        }
    }
}

/// A REQ connection to a peer.
struct Connection {
    peer: PeerAddr,
    remote: SocketAddr,
    stream: TcpStream,
    until: Deadline,
    decoder: Decoder,
    buf: BytesMut,
    chunk: Vec<u8>,
}

impl Connection {
    /// Connects and exchanges greetings and READY.
    fn open(
        dialable: &Dialable,
        until: Deadline,
        max_message: u64,
    ) -> Result<Self, SideChannelError> {
        let peer = dialable.addr().clone();
        let (stream, remote) = connect(dialable, until)?;
        let mut connection = Self {
            peer,
            remote,
            stream,
            until,
            decoder: Decoder::new(Limits {
                max_message,
                max_parts: MAX_REPLY_PARTS,
            }),
            buf: BytesMut::new(),
            chunk: vec![0; READ_CHUNK],
        };
        connection.send(Step::Greeting, &zmtp::greeting())?;
        match connection.event(Step::Greeting)? {
            Event::Greeting => {}
            _ => return Err(connection.mismatch(ZmtpError::NotReady)),
        }
        connection.send(Step::Ready, &zmtp::ready("REQ"))?;
        match connection.event(Step::Ready)? {
            Event::Command(Command::Ready { socket_type }) => match socket_type.as_str() {
                "ROUTER" | "REP" => Ok(connection),
                _ => Err(connection.mismatch(ZmtpError::SocketType(socket_type))),
            },
            Event::Command(Command::Error { reason }) => {
                Err(connection.mismatch(ZmtpError::Refused(reason)))
            }
            _ => Err(connection.mismatch(ZmtpError::NotReady)),
        }
    }

    /// Asks for what the next request is signed with.
    fn challenge(&mut self, peer: &Dialable) -> Result<Challenge, SideChannelError> {
        let parts = self.request(peer, &Request::Hello.encode(None))?;
        let [reply] = parts.as_slice() else {
            return Err(bad_parts(peer, 1, parts.len()));
        };
        match wire::decode_refusal(reply) {
            Some((reason, detail)) => Err(SideChannelError::PeerRefused {
                peer: peer.addr().clone(),
                reason,
                detail,
            }),
            None => Challenge::decode(reply).map_err(|why| bad_reply(peer, why)),
        }
    }

    /// Sends a request and waits for what the peer says to it.
    fn request(&mut self, peer: &Dialable, payload: &[u8]) -> Result<Vec<Bytes>, SideChannelError> {
        self.send(Step::Send, &zmtp::message(&[b"", payload]))?;
        let mut parts = self.receive()?;
        // REQ: an empty delimiter, then what the peer said.
        if parts.first().is_none_or(|part| !part.is_empty()) {
            return Err(bad_parts(peer, 2, parts.len()));
        }
        parts.remove(0);
        Ok(parts)
    }

    fn send(&mut self, step: Step, mut bytes: &[u8]) -> Result<(), SideChannelError> {
        while !bytes.is_empty() {
            let left = self.until.left(&self.peer, step)?;
            let written = self
                .stream
                .set_write_timeout(Some(left))
                .and_then(|()| self.stream.write(bytes));
            match written {
                Ok(0) => return Err(self.closed(step)),
                Ok(n) => bytes = bytes.get(n..).unwrap_or_default(),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(self.failed(step, e)),
            }
        }
        Ok(())
    }

    /// The next message; commands in between are answered or skipped.
    fn receive(&mut self) -> Result<Vec<Bytes>, SideChannelError> {
        loop {
            match self.event(Step::Reply)? {
                Event::Message(parts) => return Ok(parts),
                Event::Command(Command::Ping { context }) => {
                    self.send(Step::Reply, &zmtp::pong(&context))?;
                }
                Event::Command(Command::Error { reason }) => {
                    return Err(self.mismatch(ZmtpError::Refused(reason)));
                }
                Event::Command(_) | Event::Greeting => {}
            }
        }
    }

    fn event(&mut self, step: Step) -> Result<Event, SideChannelError> {
        loop {
            match self.decoder.decode(&mut self.buf) {
                Ok(Some(event)) => return Ok(event),
                Ok(None) => {}
                Err(ZmtpError::TooLarge { len, limit }) => {
                    return Err(SideChannelError::TooLarge {
                        peer: self.peer.clone(),
                        len,
                        limit,
                    });
                }
                Err(why) => return Err(self.mismatch(why)),
            }
            let left = self.until.left(&self.peer, step)?;
            let read = self
                .stream
                .set_read_timeout(Some(left))
                .and_then(|()| self.stream.read(&mut self.chunk));
            match read {
                Ok(0) => return Err(self.closed(step)),
                Ok(n) => self
                    .buf
                    .extend_from_slice(self.chunk.get(..n).unwrap_or_default()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(self.failed(step, e)),
            }
        }
    }

    fn mismatch(&self, why: ZmtpError) -> SideChannelError {
        SideChannelError::ProtocolMismatch {
            peer: self.peer.clone(),
            why,
        }
    }

    fn closed(&self, step: Step) -> SideChannelError {
        SideChannelError::Closed {
            peer: self.peer.clone(),
            step,
        }
    }

    fn failed(&self, step: Step, error: io::Error) -> SideChannelError {
        io_failure(&self.peer, step, self.until, error)
    }
}

fn io_failure(peer: &PeerAddr, step: Step, until: Deadline, error: io::Error) -> SideChannelError {
    use io::ErrorKind::{
        BrokenPipe, ConnectionAborted, ConnectionRefused, ConnectionReset, TimedOut, WouldBlock,
    };
    let peer = peer.clone();
    match error.kind() {
        WouldBlock | TimedOut => until.passed(&peer, step),
        ConnectionReset | ConnectionAborted | BrokenPipe => SideChannelError::Closed { peer, step },
        ConnectionRefused => SideChannelError::ConnectionRefused { peer },
        _ => SideChannelError::Io {
            peer,
            step,
            source: error,
        },
    }
}

/// Opens a connection to the first of the peer's addresses that accepts.
fn connect(
    dialable: &Dialable,
    until: Deadline,
) -> Result<(TcpStream, SocketAddr), SideChannelError> {
    let peer = dialable.addr();
    let addrs = resolve(peer, until)?;
    for addr in &addrs {
        dialable.check_resolved(*addr)?;
    }
    let mut last = None;
    let mut untried = addrs.len();
    for addr in addrs {
        let left = until.left(peer, Step::Connect)?;
        // Each address gets its share, so that a dead first one leaves time for the second.
        let share = u32::try_from(untried)
            .ok()
            .and_then(|n| left.checked_div(n))
            .unwrap_or(left)
            .max(Duration::from_micros(1));
        untried = untried.saturating_sub(1);
        match TcpStream::connect_timeout(&addr, share) {
            Ok(stream) => {
                stream
                    .set_nodelay(true)
                    .map_err(|e| io_failure(peer, Step::Connect, until, e))?;
                return Ok((stream, addr));
            }
            Err(e) => last = Some(e),
        }
    }
    let error = last.unwrap_or_else(|| io::ErrorKind::AddrNotAvailable.into());
    Err(io_failure(peer, Step::Connect, until, error))
}

fn resolve(peer: &PeerAddr, until: Deadline) -> Result<Vec<SocketAddr>, SideChannelError> {
    if let Some(addr) = peer.literal() {
        return Ok(vec![addr]);
    }
    static HANGING: AtomicUsize = AtomicUsize::new(0);
    let failed = |source| SideChannelError::Resolve {
        peer: peer.clone(),
        source,
    };
    let left = until.left(peer, Step::Resolve)?;
    if HANGING.fetch_add(1, Ordering::Relaxed) >= MAX_LOOKUPS {
        HANGING.fetch_sub(1, Ordering::Relaxed);
        return Err(failed(io::Error::other("too many lookups hang already")));
    }
    let (send, receive) = mpsc::sync_channel(1);
    let (host, port) = (peer.host(), peer.port());
    let lookup = std::thread::Builder::new()
        .name("kv-xfer-lookup".to_owned())
        .spawn(move || {
            let found = (host.as_str(), port)
                .to_socket_addrs()
                .map(|addrs| addrs.collect::<Vec<_>>());
            HANGING.fetch_sub(1, Ordering::Relaxed);
            // Nobody waits any more when the deadline has passed.
            let _ = send.send(found);
        });
    if let Err(e) = lookup {
        HANGING.fetch_sub(1, Ordering::Relaxed);
        return Err(failed(e));
    }
    match receive.recv_timeout(left) {
        Ok(Ok(addrs)) if addrs.is_empty() => Err(failed(io::ErrorKind::NotFound.into())),
        Ok(found) => found.map_err(failed),
        Err(_) => Err(until.passed(peer, Step::Resolve)),
    }
}

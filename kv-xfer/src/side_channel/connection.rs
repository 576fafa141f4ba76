//! One accepted connection, and the book of all of them.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use parking_lot::Mutex;
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout_at};

use super::seal::{Challenge, Demand};
use super::server::{Counters, Shared, count};
use super::wire::{self, Request, WireError};
use super::zmtp::{self, Command, Decoder, Event, Limits, ZmtpError};

/// A request has a delimiter and the request; proxies in between may add a few identities.
const MAX_REQUEST_PARTS: usize = 8;
const READ_CHUNK: usize = 4096;
/// Commands that a client may send between two requests, such as PING.
const MAX_COMMANDS: u32 = 1000;

/// A handshake takes a few round trips; one that has taken this long is the first to be shed.
const USUAL_HANDSHAKE: Duration = Duration::from_millis(100);

/// Open connections, with what is needed to choose one to close.
pub(super) struct Connections {
    max: usize,
    book: Arc<Mutex<Book>>,
}

#[derive(Default)]
struct Book {
    next: u64,
    open: HashMap<u64, Entry>,
}

struct Entry {
    ready: bool,
    last: Instant,
    abort: Option<AbortHandle>,
}

impl Connections {
    pub(super) fn new(max: usize) -> Self {
        Self {
            max: max.max(1),
            book: Arc::default(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.book.lock().open.len()
    }

    pub(super) fn open(&self) -> Slot {
        let mut book = self.book.lock();
        let id = book.next;
        book.next = id.wrapping_add(1);
        let entry = Entry {
            ready: false,
            last: Instant::now(),
            abort: None,
        };
        book.open.insert(id, entry);
        Slot {
            id,
            book: Arc::clone(&self.book),
        }
    }

    pub(super) fn set_abort(&self, id: u64, abort: AbortHandle) {
        if let Some(entry) = self.book.lock().open.get_mut(&id) {
            entry.abort = Some(abort);
        }
    }

    /// Closes connections until there is room for one more.
    pub(super) fn make_room(&self, counters: &Counters) {
        while self.len() >= self.max {
            self.shed_one(counters);
        }
    }

    /// Closes one connection: of those that are overdue with their handshake the oldest, else the one
    /// that has been silent for longest. A newcomer is last in line either way, so that a flood
    /// cannot push it out before it has said what it wants.
    pub(super) fn shed_one(&self, counters: &Counters) {
        let mut book = self.book.lock();
        let now = Instant::now();
        let overdue = |entry: &Entry| {
            !entry.ready && now.saturating_duration_since(entry.last) > USUAL_HANDSHAKE
        };
        let oldest = book
            .open
            .iter()
            .min_by_key(|(_, entry)| (!overdue(entry), entry.last))
            .map(|(id, _)| *id);
        if let Some(entry) = oldest.and_then(|id| book.open.remove(&id)) {
            count(&counters.shed);
            if let Some(abort) = entry.abort {
                abort.abort();
            }
        }
    }
}

/// A connection's line in the book, struck out when it is dropped.
pub(super) struct Slot {
    id: u64,
    book: Arc<Mutex<Book>>,
}

impl Slot {
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Notes that a handshake or a request was completed.
    fn touch(&self) {
        if let Some(entry) = self.book.lock().open.get_mut(&self.id) {
            entry.ready = true;
            entry.last = Instant::now();
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.book.lock().open.remove(&self.id);
    }
}

/// Why a connection ended.
#[derive(Debug, Error)]
enum End {
    #[error("the client closed it")]
    Closed,
    #[error("the client was silent for too long")]
    TimedOut,
    #[error("{0}")]
    Protocol(#[from] ZmtpError),
    #[error("{0}")]
    Request(WireError),
    #[error("{0}")]
    Io(io::Error),
}

/// Counts a panic of the handler while it unwinds.
struct CountPanic<'a>(&'a Counters);

impl Drop for CountPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            count(&self.0.handler_panics);
        }
    }
}

/// Serves one connection until it ends. Every wait has a deadline.
pub(super) async fn serve(stream: TcpStream, remote: SocketAddr, slot: Slot, shared: Arc<Shared>) {
    let _panics = CountPanic(&shared.counters);
    let mut connection = Connection {
        stream,
        decoder: Decoder::new(Limits {
            max_message: shared.limits.max_request,
            max_parts: MAX_REQUEST_PARTS,
        }),
        buf: BytesMut::new(),
    };
    let Err(end) = run(&mut connection, &slot, &shared).await;
    match end {
        End::Closed | End::Io(_) => {}
        End::TimedOut => count(&shared.counters.timed_out),
        End::Protocol(_) | End::Request(_) => count(&shared.counters.malformed),
    }
    tracing::debug!(%remote, %end, "side channel connection ended");
}

async fn run(
    connection: &mut Connection,
    slot: &Slot,
    shared: &Shared,
) -> Result<std::convert::Infallible, End> {
    let limits = &shared.limits;
    connection.handshake(after(limits.handshake)).await?;
    slot.touch();
    let mut challenge = None;
    loop {
        let parts = connection.request(limits.idle, limits.io).await?;
        slot.touch();
        let by = after(limits.io);
        // Everything up to the empty delimiter is the way back.
        let delimiter = parts.iter().position(|part| part.is_empty());
        let split = delimiter.and_then(|at| {
            let (envelope, payload) = parts.split_at_checked(at.checked_add(1)?)?;
            match payload {
                [payload] => Some((envelope, payload)),
                _ => None,
            }
        });
        let (envelope, payload) = split.ok_or(End::Request(WireError::NotARequest))?;
        let reply = answer(payload, shared, &mut challenge).map_err(End::Request)?;
        connection.reply(envelope, reply, shared, by).await?;
    }
}

enum Reply {
    /// A card, followed by the clock at the time of sending.
    Card(Bytes),
    One(Vec<u8>),
}

/// Answers one request; an error when it makes no sense and is dropped. Whatever it is, it uses up the
/// connection's challenge.
fn answer(
    payload: &[u8],
    shared: &Shared,
    challenge: &mut Option<Challenge>,
) -> Result<Reply, WireError> {
    let counters = &shared.counters;
    let refusal = |counter, reason, detail: &str| {
        count(counter);
        Ok(Reply::One(wire::encode_refusal(reason, detail)))
    };
    let demand = Demand {
        key: shared.key.as_ref(),
        challenge: challenge.take(),
    };
    let request = match Request::decode(payload, &demand) {
        Ok(request) => request,
        Err(why @ WireError::Unknown(_)) => {
            return refusal(&counters.unknown, "unknown_request", &why.to_string());
        }
        Err(why @ WireError::Mac { .. }) => {
            return refusal(&counters.refused, "mac", &why.to_string());
        }
        Err(why) => return Err(why),
    };
    let handler = &shared.handler;
    let reply = match request {
        Request::Hello => match Challenge::random() {
            Ok(fresh) => {
                *challenge = Some(fresh);
                Reply::One(fresh.encode())
            }
            Err(error) => return refusal(&counters.refused, "no_challenge", &error.to_string()),
        },
        Request::Card(rank) => match handler.card(rank) {
            Some(card) => Reply::Card(card),
            None => {
                let detail = format!("no rank {rank} here");
                return refusal(&counters.refused, "unknown_rank", &detail);
            }
        },
        Request::Ping => {
            let info = handler.ping();
            let now = shared.clock.now().as_secs_f64();
            Reply::One(wire::encode_pong(&info.engine_id, info.incarnation, now))
        }
        Request::Renew(request) => Reply::One(wire::encode_renewed(&handler.renew(&request))),
        Request::Release(request) => Reply::One(wire::encode_released(&handler.release(&request))),
    };
    count(&counters.requests);
    Ok(reply)
}

struct Connection {
    stream: TcpStream,
    decoder: Decoder,
    buf: BytesMut,
}

impl Connection {
    async fn handshake(&mut self, by: Instant) -> Result<(), End> {
        self.stream.set_nodelay(true).map_err(End::Io)?;
        self.write(&zmtp::greeting(), by).await?;
        match self.event(by).await? {
            Event::Greeting => {}
            _ => return Err(ZmtpError::NotReady.into()),
        }
        self.write(&zmtp::ready("ROUTER"), by).await?;
        match self.event(by).await? {
            Event::Command(Command::Ready { socket_type }) => match socket_type.as_str() {
                "REQ" | "DEALER" | "ROUTER" => Ok(()),
                _ => {
                    let refusal = zmtp::error("Invalid socket type");
                    self.write(&refusal, by).await?;
                    Err(ZmtpError::SocketType(socket_type).into())
                }
            },
            _ => Err(ZmtpError::NotReady.into()),
        }
    }

    /// The next message: may take `idle` to begin and `io` from its first byte to its end.
    async fn request(&mut self, idle: Duration, io: Duration) -> Result<Vec<Bytes>, End> {
        let idle_by = after(idle);
        for _ in 0..MAX_COMMANDS {
            let by = if self.buf.is_empty() && !self.decoder.within_message() {
                self.fill(idle_by).await?;
                after(io)
            } else {
                after(io).min(idle_by)
            };
            match self.event(by).await? {
                Event::Message(parts) => return Ok(parts),
                Event::Command(Command::Ping { context }) => {
                    self.write(&zmtp::pong(&context), after(io)).await?;
                }
                Event::Command(Command::Error { .. }) => return Err(End::Closed),
                Event::Command(_) | Event::Greeting => {}
            }
        }
        Err(ZmtpError::BadCommand.into())
    }

    async fn event(&mut self, by: Instant) -> Result<Event, End> {
        loop {
            if let Some(event) = self.decoder.decode(&mut self.buf)? {
                return Ok(event);
            }
            self.fill(by).await?;
        }
    }

    async fn fill(&mut self, by: Instant) -> Result<(), End> {
        // What is read ahead of the decoder stays small, whatever the buffer has grown to.
        let mut chunk = (&mut self.buf).limit(READ_CHUNK);
        match timeout_at(by, self.stream.read_buf(&mut chunk)).await {
            Err(_) => Err(End::TimedOut),
            Ok(Err(error)) => Err(End::Io(error)),
            Ok(Ok(0)) => Err(End::Closed),
            Ok(Ok(_)) => Ok(()),
        }
    }

    async fn write(&mut self, bytes: &[u8], by: Instant) -> Result<(), End> {
        match timeout_at(by, self.stream.write_all(bytes)).await {
            Err(_) => Err(End::TimedOut),
            Ok(written) => written.map_err(End::Io),
        }
    }

    /// Sends a reply back the way the request came. The card is not copied: many slow readers of a
    /// large card cost no memory.
    async fn reply(
        &mut self,
        envelope: &[Bytes],
        reply: Reply,
        shared: &Shared,
        by: Instant,
    ) -> Result<(), End> {
        let mut head = BytesMut::new();
        for part in envelope {
            head.extend_from_slice(&zmtp::frame_header(part.len(), true));
            head.extend_from_slice(part);
        }
        match reply {
            Reply::One(part) => {
                head.extend_from_slice(&zmtp::message(&[&part]));
                self.write(&head, by).await
            }
            Reply::Card(card) => {
                head.extend_from_slice(&zmtp::frame_header(card.len(), true));
                let clock = wire::encode_clock(shared.clock.now().as_secs_f64());
                self.write(&head, by).await?;
                self.write(&card, by).await?;
                self.write(&zmtp::message(&[&clock]), by).await
            }
        }
    }
}

fn after(duration: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(duration).unwrap_or(now)
}

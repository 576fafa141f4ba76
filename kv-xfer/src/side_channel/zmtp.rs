//! The part of ZMTP 3.0 that the side channel needs, without I/O: greeting, NULL mechanism, frames.
//!
//! Written after RFC 23 (<https://rfc.zeromq.org/spec/23/>). Lengths are checked against
//! [`Limits`] before a byte of the frame is waited for.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use thiserror::Error;

/// Bytes of a greeting (RFC 23).
pub const GREETING_BYTES: usize = 64;
/// Longest command accepted, in bytes. READY with a socket type and a full identity has 300.
const MAX_COMMAND_BYTES: u64 = 2048;

const FLAG_MORE: u8 = 1;
const FLAG_LONG: u8 = 2;
const FLAG_COMMAND: u8 = 4;

/// How much the other side may send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Longest message, all parts together, in bytes.
    pub max_message: u64,
    /// Most parts of a message.
    pub max_parts: usize,
}

/// What was wrong with what the other side sent.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ZmtpError {
    /// Not a ZMTP greeting.
    #[error("it does not greet as ZeroMQ does, but begins with {start:02x?}")]
    NotZmtp {
        /// What it began with.
        start: Vec<u8>,
    },
    /// An older protocol.
    #[error("it speaks ZMTP {major}, at least 3 is needed")]
    Version {
        /// Its major version.
        major: u8,
    },
    /// It wants authentication that is not spoken here.
    #[error("it uses the security mechanism {0:?}, NULL is needed")]
    Mechanism(String),
    /// A frame has flags that mean nothing.
    #[error("a frame has the flags {0:#04x}, which mean nothing")]
    Flags(u8),
    /// A message is longer than allowed.
    #[error("a message of {len} bytes or more exceeds the limit of {limit}")]
    TooLarge {
        /// Bytes announced so far.
        len: u64,
        /// The limit, bytes.
        limit: u64,
    },
    /// A message has more parts than allowed.
    #[error("a message has more than {limit} parts")]
    TooManyParts {
        /// The limit.
        limit: usize,
    },
    /// A command is malformed.
    #[error("a command is malformed")]
    BadCommand,
    /// Something else came where READY must come.
    #[error("it did not send READY after the greeting")]
    NotReady,
    /// The other side's socket type does not go with ours.
    #[error("it is a socket of type {0:?}, which does not go with this one")]
    SocketType(String),
    /// The other side reported an error.
    #[error("it refused the connection: {0}")]
    Refused(String),
}

/// A command of the connection itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// The handshake is over on the other side.
    Ready {
        /// Its socket type.
        socket_type: String,
    },
    /// The other side asks for a sign of life.
    Ping {
        /// To be sent back.
        context: Bytes,
    },
    /// The other side ends the connection.
    Error {
        /// Why.
        reason: String,
    },
    /// One that is of no concern here.
    Other,
}

/// What was received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The other side's greeting.
    Greeting,
    /// A command.
    Command(Command),
    /// A complete message.
    Message(Vec<Bytes>),
}

/// Turns received bytes into events.
#[derive(Debug)]
pub struct Decoder {
    limits: Limits,
    greeted: bool,
    parts: Vec<Bytes>,
    part_bytes: u64,
}

impl Decoder {
    /// A decoder at the start of a connection.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            greeted: false,
            parts: Vec::new(),
            part_bytes: 0,
        }
    }

    /// Whether a message has begun and not ended.
    #[must_use]
    pub fn within_message(&self) -> bool {
        !self.parts.is_empty()
    }

    /// Takes the next event off the front of `buf`; `None` when more bytes are needed. After an
    /// error the connection is of no use.
    ///
    /// # Errors
    /// [`ZmtpError`] when the bytes break the protocol or the limits.
    pub fn decode(&mut self, buf: &mut BytesMut) -> Result<Option<Event>, ZmtpError> {
        if !self.greeted {
            check_greeting_start(buf)?;
            if buf.len() < GREETING_BYTES {
                return Ok(None);
            }
            check_greeting(&buf.split_to(GREETING_BYTES))?;
            self.greeted = true;
            return Ok(Some(Event::Greeting));
        }
        while let Some((flags, payload)) = self.frame(buf)? {
            if flags & FLAG_COMMAND != 0 {
                return parse_command(payload).map(|command| Some(Event::Command(command)));
            }
            self.part_bytes = self.part_bytes.saturating_add(payload.len() as u64);
            self.parts.push(payload);
            if flags & FLAG_MORE == 0 {
                self.part_bytes = 0;
                return Ok(Some(Event::Message(std::mem::take(&mut self.parts))));
            }
            if self.parts.len() >= self.limits.max_parts {
                return Err(ZmtpError::TooManyParts {
                    limit: self.limits.max_parts,
                });
            }
        }
        Ok(None)
    }

    /// Takes one frame, if it is all there. Its length is judged as soon as its header is there.
    fn frame(&self, buf: &mut BytesMut) -> Result<Option<(u8, Bytes)>, ZmtpError> {
        let mut head: &[u8] = buf;
        let Ok(flags) = head.try_get_u8() else {
            return Ok(None);
        };
        let command = flags & FLAG_COMMAND != 0;
        if flags & !(FLAG_MORE | FLAG_LONG | FLAG_COMMAND) != 0
            || (command && (flags & FLAG_MORE != 0 || self.within_message()))
        {
            return Err(ZmtpError::Flags(flags));
        }
        let len = if flags & FLAG_LONG == 0 {
            head.try_get_u8().map(u64::from)
        } else {
            head.try_get_u64()
        };
        let Ok(len) = len else { return Ok(None) };
        let (so_far, limit) = if command {
            (len, MAX_COMMAND_BYTES)
        } else {
            (self.part_bytes.saturating_add(len), self.limits.max_message)
        };
        if so_far > limit {
            return Err(ZmtpError::TooLarge { len: so_far, limit });
        }
        if (head.len() as u64) < len {
            return Ok(None);
        }
        let header = buf.len().saturating_sub(head.len());
        buf.advance(header);
        // In range: `len` is at most the length of what is left.
        let payload = buf.split_to(usize::try_from(len).unwrap_or(0));
        Ok(Some((flags, payload.freeze())))
    }
}

/// The greeting: signature, version 3.0, mechanism NULL.
#[must_use]
pub fn greeting() -> Bytes {
    let mut out = BytesMut::with_capacity(GREETING_BYTES);
    out.put_slice(&[0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0]);
    out.put_slice(b"NULL");
    out.resize(GREETING_BYTES, 0);
    out.freeze()
}

/// The READY command of a socket of this type.
#[must_use]
pub fn ready(socket_type: &str) -> Bytes {
    let mut body = BytesMut::new();
    put_short(&mut body, b"READY");
    put_short(&mut body, b"Socket-Type");
    put_long(&mut body, socket_type.as_bytes());
    if socket_type == "REQ" {
        // libzmq sends an identity, empty, with REQ.
        put_short(&mut body, b"Identity");
        put_long(&mut body, b"");
    }
    command(&body)
}

/// The answer to PING.
#[must_use]
pub fn pong(context: &[u8]) -> Bytes {
    let mut body = BytesMut::new();
    put_short(&mut body, b"PONG");
    body.put_slice(context);
    command(&body)
}

/// The ERROR command, sent before closing on a peer that cannot be served.
#[must_use]
pub fn error(reason: &str) -> Bytes {
    let mut body = BytesMut::new();
    put_short(&mut body, b"ERROR");
    put_short(&mut body, reason.as_bytes());
    command(&body)
}

/// The header of a message frame of `len` bytes.
#[must_use]
pub fn frame_header(len: usize, more: bool) -> Bytes {
    let mut out = BytesMut::with_capacity(9);
    put_header(&mut out, if more { FLAG_MORE } else { 0 }, len);
    out.freeze()
}

/// A whole message.
#[must_use]
pub fn message(parts: &[&[u8]]) -> Bytes {
    let mut out = BytesMut::new();
    let last = parts.len().saturating_sub(1);
    for (i, part) in parts.iter().enumerate() {
        put_header(&mut out, if i < last { FLAG_MORE } else { 0 }, part.len());
        out.put_slice(part);
    }
    out.freeze()
}

fn put_header(out: &mut BytesMut, flags: u8, len: usize) {
    if let Ok(short) = u8::try_from(len) {
        out.put_u8(flags);
        out.put_u8(short);
    } else {
        out.put_u8(flags | FLAG_LONG);
        out.put_u64(len as u64);
    }
}

fn put_short(out: &mut BytesMut, text: &[u8]) {
    let len = u8::try_from(text.len()).unwrap_or(u8::MAX);
    out.put_u8(len);
    out.put_slice(text.get(..usize::from(len)).unwrap_or(text));
}

fn put_long(out: &mut BytesMut, value: &[u8]) {
    out.put_u32(u32::try_from(value.len()).unwrap_or(0));
    out.put_slice(value);
}

fn command(body: &[u8]) -> Bytes {
    let mut out = BytesMut::new();
    put_header(&mut out, FLAG_COMMAND, body.len());
    out.put_slice(body);
    out.freeze()
}

/// Refuses what is no greeting as early as its first wrong byte, since another protocol's peer may
/// never send 64 bytes.
fn check_greeting_start(buf: &[u8]) -> Result<(), ZmtpError> {
    let wrong = |at: usize, want: u8| buf.get(at).is_some_and(|byte| *byte != want);
    if wrong(0, 0xff) || wrong(9, 0x7f) {
        return Err(ZmtpError::NotZmtp {
            start: buf.iter().take(16).copied().collect(),
        });
    }
    match buf.get(10) {
        Some(&major) if major < 3 => Err(ZmtpError::Version { major }),
        _ => Ok(()),
    }
}

fn check_greeting(greeting: &[u8]) -> Result<(), ZmtpError> {
    let mechanism = greeting.get(12..32).unwrap_or_default();
    let end = mechanism.iter().position(|b| *b == 0);
    let name = mechanism
        .get(..end.unwrap_or(mechanism.len()))
        .unwrap_or_default();
    if name == b"NULL" {
        Ok(())
    } else {
        Err(ZmtpError::Mechanism(lossy(name)))
    }
}

fn parse_command(mut body: Bytes) -> Result<Command, ZmtpError> {
    let name = take_short(&mut body)?;
    match &name[..] {
        b"READY" => {
            let mut socket_type = None;
            while !body.is_empty() {
                let property = take_short(&mut body)?;
                let len = body.try_get_u32().map_err(|_| ZmtpError::BadCommand)?;
                let value = take(&mut body, len as usize)?;
                if property.eq_ignore_ascii_case(b"socket-type") {
                    socket_type = Some(lossy(&value));
                }
            }
            let socket_type = socket_type.ok_or(ZmtpError::BadCommand)?;
            Ok(Command::Ready { socket_type })
        }
        b"PING" => {
            let _ttl = body.try_get_u16().map_err(|_| ZmtpError::BadCommand)?;
            // RFC 37: at most 16 bytes of context.
            let len = body.len().min(16);
            let context = take(&mut body, len)?;
            Ok(Command::Ping { context })
        }
        b"ERROR" => {
            let reason = take_short(&mut body)?;
            Ok(Command::Error {
                reason: lossy(&reason),
            })
        }
        _ => Ok(Command::Other),
    }
}

fn take_short(body: &mut Bytes) -> Result<Bytes, ZmtpError> {
    let len = body.try_get_u8().map_err(|_| ZmtpError::BadCommand)?;
    take(body, usize::from(len))
}

fn take(body: &mut Bytes, len: usize) -> Result<Bytes, ZmtpError> {
    if len > body.len() {
        return Err(ZmtpError::BadCommand);
    }
    Ok(body.split_to(len))
}

/// Text of the other side, fit to be shown.
fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes)
        .chars()
        .filter(|c| !c.is_control())
        .take(128)
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits = Limits {
        max_message: 1000,
        max_parts: 4,
    };

    fn events(bytes: &[u8], chunk: usize) -> Result<Vec<Event>, ZmtpError> {
        let mut decoder = Decoder::new(LIMITS);
        let mut buf = BytesMut::new();
        let mut events = Vec::new();
        for piece in bytes.chunks(chunk) {
            buf.extend_from_slice(piece);
            while let Some(event) = decoder.decode(&mut buf)? {
                events.push(event);
            }
        }
        Ok(events)
    }

    fn after_greeting(rest: &[u8]) -> Result<Vec<Event>, ZmtpError> {
        events(&[&greeting()[..], rest].concat(), usize::MAX)
    }

    #[test]
    fn a_conversation_is_understood_however_it_is_cut() {
        let long = [7; 300];
        let bytes = [
            &greeting()[..],
            &ready("REQ"),
            &message(&[b"", b"abc"]),
            &message(&[b"", &long]),
            b"\x04\x08\x04PING\x00\x00c",
            &error("over"),
        ]
        .concat();
        let want = vec![
            Event::Greeting,
            Event::Command(Command::Ready {
                socket_type: "REQ".into(),
            }),
            Event::Message(vec![Bytes::new(), Bytes::from_static(b"abc")]),
            Event::Message(vec![Bytes::new(), Bytes::copy_from_slice(&long)]),
            Event::Command(Command::Ping {
                context: Bytes::from_static(b"c"),
            }),
            Event::Command(Command::Error {
                reason: "over".into(),
            }),
        ];
        for chunk in [1, 2, 3, 7, 64, 65, 1000] {
            assert_eq!(events(&bytes, chunk).as_ref(), Ok(&want), "{chunk}");
        }
    }

    #[test]
    fn our_bytes_are_those_of_the_specification() {
        assert_eq!(greeting().len(), GREETING_BYTES);
        assert_eq!(
            &ready("ROUTER")[..],
            b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER"
        );
        assert_eq!(&message(&[b"", b"x"])[..], b"\x01\x00\x00\x01x");
        assert_eq!(&frame_header(255, false)[..], b"\x00\xff");
        assert_eq!(&frame_header(256, true)[..], b"\x03\0\0\0\0\0\0\x01\0");
    }

    #[test]
    fn limits_hold_before_the_bytes_arrive() {
        let too_large = |len| ZmtpError::TooLarge { len, limit: 1000 };
        let long = |len: u64| [&[2][..], &len.to_be_bytes()].concat();
        assert_eq!(after_greeting(&long(1001)), Err(too_large(1001)));
        assert_eq!(after_greeting(&long(u64::MAX)), Err(too_large(u64::MAX)));
        // Parts count together.
        let first = message(&[&[0; 600], &[0; 401]]);
        assert_eq!(after_greeting(&first), Err(too_large(1001)));
        assert_eq!(
            after_greeting(&[1, 0].repeat(5)),
            Err(ZmtpError::TooManyParts { limit: 4 })
        );
        assert_eq!(
            after_greeting(&[6, 0, 0, 0, 0, 0, 1, 0, 0]),
            Err(ZmtpError::TooLarge {
                len: 1 << 16,
                limit: MAX_COMMAND_BYTES
            })
        );
        for flags in [8_u8, 0x80, 5, 7] {
            assert_eq!(after_greeting(&[flags, 0]), Err(ZmtpError::Flags(flags)));
        }
        // A command inside a message.
        assert_eq!(after_greeting(&[1, 0, 4, 0]), Err(ZmtpError::Flags(4)));
    }

    #[test]
    fn broken_commands_are_refused() {
        for body in [
            &b""[..],
            b"\x05REA",
            b"\x05READY",
            b"\x05READY\x0bSocket-Type",
            b"\x05READY\x0bSocket-Type\xff\xff\xff\xffREQ",
            b"\x05READY\x09Some-Type\x00\x00\x00\x03REQ",
            b"\x04PING\x00",
            b"\x05ERROR\x09abc",
        ] {
            let frame = command(body);
            assert_eq!(
                after_greeting(&frame),
                Err(ZmtpError::BadCommand),
                "{body:?}"
            );
        }
        let other = after_greeting(&command(b"\x09SUBSCRIBE"));
        assert_eq!(other.unwrap().last(), Some(&Event::Command(Command::Other)));
    }

    #[test]
    fn other_greetings_are_refused_at_their_first_wrong_byte() {
        assert!(matches!(events(b"H", 1), Err(ZmtpError::NotZmtp { .. })));
        assert_eq!(events(&[0xff; 9], 1), Ok(vec![]));
        assert!(matches!(
            events(&[0xff; 10], 1),
            Err(ZmtpError::NotZmtp { .. })
        ));
        let mut later = greeting().to_vec();
        later[10..12].copy_from_slice(&[3, 1]);
        assert_eq!(events(&later, 64), Ok(vec![Event::Greeting]));
        later[10] = 2;
        assert_eq!(events(&later, 64), Err(ZmtpError::Version { major: 2 }));
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_error_or_events(
            rest in proptest::collection::vec(any::<u8>(), 0..400), chunk in 1_usize..80
        ) {
            let bytes = [&greeting()[..], &rest].concat();
            let cut = events(&bytes, chunk);
            prop_assert_eq!(cut, events(&bytes, 1));
            let _ = events(&rest, chunk);
        }
    }
}

//! One JSON object a line over TCP: how a bench talks to a holder on another node. Whatever comes
//! in is bounded in length and in time.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::proc::Interrupt;

/// Longest accepted line, bytes.
pub const MAX_LINE_BYTES: usize = 16 << 20;
/// How often a wait looks whether it was interrupted.
const SLICE: Duration = Duration::from_millis(200);
/// Time to send a line to a peer that does not read.
const SEND_LIMIT: Duration = Duration::from_secs(30);
const CHUNK: usize = 64 * 1024;

/// Why a control connection failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ControlError {
    /// It could not be opened.
    #[error("{peer} cannot be reached: {source}; is `kvx target` running there?")]
    Connect {
        /// Who.
        peer: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It broke.
    #[error("the connection to {peer} broke: {source}")]
    Broken {
        /// To whom.
        peer: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The other side closed it.
    #[error("{peer} closed the connection")]
    Closed {
        /// Who.
        peer: String,
    },
    /// Nothing came in time.
    #[error("{peer} did not say anything within {waited:?}; it may be serving another bench")]
    Silent {
        /// Who.
        peer: String,
        /// How long was waited.
        waited: Duration,
    },
    /// A line is too long.
    #[error("{peer} sent a line of more than {MAX_LINE_BYTES} bytes")]
    TooLong {
        /// Who.
        peer: String,
    },
    /// A line says something else than was expected.
    #[error("{peer} said something that is not understood: {why}")]
    Nonsense {
        /// Who.
        peer: String,
        /// What is wrong with it.
        why: String,
    },
    /// Ctrl-C.
    #[error("interrupted")]
    Interrupted,
}

/// One end of a control connection.
#[derive(Debug)]
pub struct Control {
    stream: TcpStream,
    peer: String,
    /// What has come in and is not a whole line yet; how much of it has no line end.
    buffer: Vec<u8>,
    searched: usize,
    interrupt: Interrupt,
}

impl Control {
    /// Connects to `host:port`.
    ///
    /// # Errors
    /// [`ControlError::Connect`].
    pub fn connect(
        peer: &str,
        limit: Duration,
        interrupt: &Interrupt,
    ) -> Result<Self, ControlError> {
        let fail = |source| ControlError::Connect {
            peer: peer.to_owned(),
            source,
        };
        let mut last = io::Error::new(io::ErrorKind::NotFound, "it has no address");
        for address in peer.to_socket_addrs().map_err(fail)? {
            match TcpStream::connect_timeout(&address, limit) {
                Ok(stream) => return Self::new(stream, address, interrupt).map_err(fail),
                Err(error) => last = error,
            }
        }
        Err(fail(last))
    }

    /// Takes a connection that was accepted.
    ///
    /// # Errors
    /// [`io::Error`] when the socket is gone already.
    pub fn new(
        stream: TcpStream,
        peer: SocketAddr,
        interrupt: &Interrupt,
    ) -> Result<Self, io::Error> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SLICE))?;
        stream.set_write_timeout(Some(SEND_LIMIT))?;
        Ok(Self {
            stream,
            peer: peer.to_string(),
            buffer: Vec::new(),
            searched: 0,
            interrupt: interrupt.clone(),
        })
    }

    /// The own address of the connection: where the other side found this one.
    ///
    /// # Errors
    /// [`io::Error`] when the socket is gone.
    pub fn local_addr(&self) -> Result<SocketAddr, io::Error> {
        self.stream.local_addr()
    }

    /// Sends a message.
    ///
    /// # Errors
    /// [`ControlError::Broken`].
    pub fn send(&mut self, message: &impl Serialize) -> Result<(), ControlError> {
        let broken = |source| ControlError::Broken {
            peer: self.peer.clone(),
            source,
        };
        let mut line = serde_json::to_vec(message).map_err(|error| broken(error.into()))?;
        line.push(b'\n');
        (&self.stream).write_all(&line).map_err(broken)
    }

    /// Waits for a message, `limit` at most.
    ///
    /// # Errors
    /// [`ControlError`]; after [`ControlError::Nonsense`] the connection can still be used.
    pub fn recv<T: DeserializeOwned>(&mut self, limit: Duration) -> Result<T, ControlError> {
        let line = self.line(limit)?;
        serde_json::from_slice(&line).map_err(|error| ControlError::Nonsense {
            peer: self.peer.clone(),
            why: error.to_string(),
        })
    }

    fn line(&mut self, limit: Duration) -> Result<Vec<u8>, ControlError> {
        let end = Instant::now() + limit;
        let mut chunk = vec![0; CHUNK];
        loop {
            let fresh = self.buffer.get(self.searched..).unwrap_or_default();
            if let Some(at) = fresh.iter().position(|byte| *byte == b'\n') {
                let rest = self.buffer.split_off(self.searched + at + 1);
                let mut line = std::mem::replace(&mut self.buffer, rest);
                line.pop();
                self.searched = 0;
                return Ok(line);
            }
            self.searched = self.buffer.len();
            let peer = || self.peer.clone();
            if self.searched > MAX_LINE_BYTES {
                return Err(ControlError::TooLong { peer: peer() });
            }
            if self.interrupt.is_raised() {
                return Err(ControlError::Interrupted);
            }
            if Instant::now() >= end {
                return Err(ControlError::Silent {
                    peer: peer(),
                    waited: limit,
                });
            }
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(ControlError::Closed { peer: peer() }),
                Ok(n) => self.buffer.extend(chunk.iter().take(n)),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock
                    | io::ErrorKind::TimedOut
                    | io::ErrorKind::Interrupted => {}
                    _ => {
                        return Err(ControlError::Broken {
                            peer: peer(),
                            source: error,
                        });
                    }
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn pair() -> (Control, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let control = Control::connect(&address, SECOND, &Interrupt::default()).unwrap();
        (control, listener.accept().unwrap().0)
    }

    #[test]
    fn lines_come_whole_however_they_are_cut() {
        let (mut control, mut other) = pair();
        let writer = thread::spawn(move || {
            for piece in ["[1", ",2]", "\n[3", "]\n{\"nonsense\"}\n[4]\n", "[5"] {
                other.write_all(piece.as_bytes()).unwrap();
                thread::sleep(Duration::from_millis(20));
            }
        });
        assert_eq!(control.recv::<Vec<u32>>(SECOND).unwrap(), [1, 2]);
        assert_eq!(control.recv::<Vec<u32>>(SECOND).unwrap(), [3]);
        let nonsense = control.recv::<Vec<u32>>(SECOND);
        assert!(matches!(nonsense, Err(ControlError::Nonsense { .. })));
        assert_eq!(control.recv::<Vec<u32>>(SECOND).unwrap(), [4]);
        let half = control.recv::<Vec<u32>>(SECOND);
        assert!(matches!(half, Err(ControlError::Closed { .. })));
        writer.join().unwrap();
    }

    #[test]
    fn silence_and_endless_lines_end() {
        let (mut control, mut other) = pair();
        let silent = control.recv::<u32>(Duration::from_millis(50));
        assert!(matches!(silent, Err(ControlError::Silent { .. })));
        let writer = thread::spawn(move || {
            let chunk = vec![b'x'; 1 << 20];
            while other.write_all(&chunk).is_ok() {}
        });
        let endless = control.recv::<u32>(20 * SECOND);
        assert!(matches!(endless, Err(ControlError::TooLong { .. })));
        drop(control);
        writer.join().unwrap();
    }

    #[test]
    fn nobody_there_is_an_error_that_says_what_to_do() {
        let error = Control::connect("127.0.0.1:1", SECOND, &Interrupt::default()).unwrap_err();
        assert!(error.to_string().contains("kvx target"), "{error}");
    }
}

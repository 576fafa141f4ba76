//! Where clients connect.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use axum::serve::Listener;
use tokio::net::{TcpListener, TcpStream};
use tokio_io_timeout::TimeoutStream;

/// Takes connections that end when their client stops reading. Without that, one which neither reads
/// nor leaves would hold its answer, and with it the node's, for ever.
#[derive(Debug)]
pub(crate) struct Clients {
    listener: TcpListener,
    stall: Duration,
}

impl Clients {
    /// Connections through `listener` that end when nothing of an answer could be written for `stall`.
    pub fn new(listener: TcpListener, stall: Duration) -> Self {
        Self { listener, stall }
    }
}

impl Listener for Clients {
    type Io = Pin<Box<TimeoutStream<TcpStream>>>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let (stream, addr) = Listener::accept(&mut self.listener).await;
        // Small writes are the rule, and none is to wait for another.
        let _ = stream.set_nodelay(true);
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(self.stall));
        (Box::pin(stream), addr)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

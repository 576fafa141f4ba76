//! Where clients connect: what any HTTP server of a cluster asks of them, the router's and the nodes'.
//!
//! A client that neither sends, nor reads, nor leaves would hold a connection, a request or an answer for ever. All
//! of these are waited for with [`Patience`].

use std::error::Error;
use std::pin::pin;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, header};
use axum::serve::Listener;
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio_io_timeout::TimeoutStream;

/// How long a server waits for its clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// For a request's headers, from the connection or from the end of the answer before: a connection that is
    /// kept open and not used ends then, too. Bodies are [`read_body`]'s.
    pub request: Duration,
    /// For a client that reads nothing of an answer that waits for it.
    pub stall: Duration,
}

/// Serves HTTP/1 until `stop` is done, and returns when the answers under way have ended.
pub async fn serve(
    mut listener: TcpListener,
    app: Router,
    patience: Patience,
    stop: impl Future<Output = ()>,
) {
    let graceful = GracefulShutdown::new();
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(patience.request);
    let mut stop = pin!(stop);
    loop {
        // Waits, and goes on, when there are no more file descriptors.
        let accepted = tokio::select! {
            accepted = Listener::accept(&mut listener) => accepted,
            () = &mut stop => break,
        };
        let stream = accepted.0;
        // Small writes are the rule, and none is to wait for another.
        let _ = stream.set_nodelay(true);
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(patience.stall));
        let service = TowerToHyperService::new(app.clone());
        let connection = http.serve_connection(TokioIo::new(Box::pin(stream)), service);
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                let cause = error.source().map(ToString::to_string);
                tracing::debug!(%error, cause, "a client's connection broke off");
            }
        });
    }
    drop(listener);
    graceful.shutdown().await;
}

/// Why a request's body was not read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BodyError {
    /// It is too long. It was not read, or not to its end.
    #[error("the body is larger than {limit} bytes, the most that is taken here")]
    TooLarge {
        /// The most bytes.
        limit: usize,
    },
    /// It was not there in time.
    #[error("the body did not come within {0:?}")]
    Late(Duration),
    /// It broke off.
    #[error("the body broke off: {0}")]
    Broken(#[source] axum::Error),
}

/// Reads a request's body, of `limit` bytes at most, that comes within `time`.
///
/// # Errors
/// [`BodyError`].
pub async fn read_body(
    headers: &HeaderMap,
    body: Body,
    limit: usize,
    time: Duration,
) -> Result<Bytes, BodyError> {
    let announced = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|length| length > limit) {
        return Err(BodyError::TooLarge { limit });
    }
    let read = async {
        let mut stream = body.into_data_stream();
        let mut whole = BytesMut::new();
        while let Some(part) = stream.next().await {
            let part = part.map_err(BodyError::Broken)?;
            if whole.len().saturating_add(part.len()) > limit {
                return Err(BodyError::TooLarge { limit });
            }
            whole.extend_from_slice(&part);
        }
        Ok(whole.freeze())
    };
    tokio::time::timeout(time, read)
        .await
        .unwrap_or(Err(BodyError::Late(time)))
}

//! Relays a stream, event by event as it comes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::StatusCode;
use bytes::Bytes;
use futures_util::stream;
use reqwest::Response;
use tokio::sync::watch;

use crate::error::ApiError;
use crate::metrics::Outcome;
use crate::nodes::Busy;
use crate::record::Recorder;
use crate::server::Shared;
use crate::sse::{Piece, Scanner, data, with_data};

/// Counts how a request ended: as it says, or, if it never gets to say, because the client went away.
pub(crate) struct Ending {
    shared: Arc<Shared>,
    outcome: Outcome,
}

impl Ending {
    pub fn new(shared: &Arc<Shared>) -> Self {
        Self {
            shared: Arc::clone(shared),
            outcome: Outcome::ClientGone,
        }
    }

    pub fn set(&mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.shared.metrics.ended(self.outcome);
    }
}

/// A stream on its way from a node to a client. Dropped when the client goes away, and with it the
/// connection to the node.
pub(crate) struct Relay {
    upstream: Response,
    scanner: Scanner,
    recorder: Recorder,
    idle: Duration,
    closing: watch::Receiver<bool>,
    /// The node says where its answer ends, so that an end is not mistaken for a break.
    framed: bool,
    ending: Ending,
    _busy: Busy,
    done: bool,
}

impl Relay {
    /// The body that begins with `first`, which was read from `upstream` already.
    pub fn body(
        upstream: Response,
        first: Bytes,
        recorder: Recorder,
        busy: Busy,
        mut ending: Ending,
        framed: bool,
    ) -> Body {
        let shared = Arc::clone(&recorder.shared);
        // Counted so until it is known better; a client that goes away is told by the drop.
        ending.set(Outcome::ClientGone);
        let mut relay = Self {
            upstream,
            scanner: Scanner::new(shared.config.max_event_bytes),
            recorder,
            idle: shared.config.idle_timeout,
            closing: shared.closing.subscribe(),
            framed,
            ending,
            _busy: busy,
            done: false,
        };
        let first = relay.pass(&first);
        let start = (relay, (!first.is_empty()).then_some(first));
        Body::from_stream(stream::unfold(start, |(mut relay, ready)| async move {
            let bytes = match ready {
                Some(bytes) => bytes,
                None => relay.next().await?,
            };
            Some((Ok::<_, std::convert::Infallible>(bytes), (relay, None)))
        }))
    }

    /// What is to be relayed next; `None` at the end.
    async fn next(&mut self) -> Option<Bytes> {
        while !self.done {
            let since = Instant::now();
            let closing = async {
                // The sender lives as long as the router.
                let _ = self.closing.wait_for(|closing| *closing).await;
            };
            let part = tokio::select! {
                part = tokio::time::timeout(self.idle, self.upstream.chunk()) => part,
                () = closing => return Some(self.cut("router_closing", "the router is shutting down".to_owned())),
            };
            let node = self.recorder.holder;
            let out = match part {
                Ok(Ok(Some(bytes))) => self.pass(&bytes),
                Ok(Ok(None)) => return self.close(),
                Ok(Err(error)) => {
                    tracing::warn!(?node, %error, "a node broke off its answer");
                    self.wake_check();
                    self.cut(
                        "node_lost",
                        "the node that was answering went away".to_owned(),
                    )
                }
                Err(_) => {
                    tracing::warn!(?node, silent = ?since.elapsed(), "a node fell silent");
                    self.cut(
                        "node_silent",
                        "the node that was answering fell silent".to_owned(),
                    )
                }
            };
            if !out.is_empty() {
                return Some(out);
            }
        }
        None
    }

    /// What of `bytes`, and of what was held back, can go out.
    fn pass(&mut self, bytes: &[u8]) -> Bytes {
        let mut pieces = Vec::new();
        self.scanner.push(bytes, &mut pieces);
        self.recorder
            .shared
            .metrics
            .oversized_events
            .inc_by(self.scanner.take_oversized());
        let mut edited: Vec<Bytes> = pieces.into_iter().map(|piece| self.edit(piece)).collect();
        // Clients may leave as soon as they have seen the end, so that counts as one.
        if self.recorder.has_ended() {
            self.ending.set(Outcome::Ok);
        }
        match edited.pop() {
            // Mostly a node sends one event at a time: nothing is copied.
            Some(only) if edited.is_empty() => only,
            Some(last) => {
                edited.push(last);
                edited.concat().into()
            }
            None => Bytes::new(),
        }
    }

    fn edit(&mut self, piece: Piece) -> Bytes {
        match piece {
            Piece::Plain(bytes) => bytes,
            Piece::Event(bytes) => {
                let changed = data(&bytes).and_then(|data| self.recorder.event(&data));
                match changed {
                    Some(changed) => with_data(&bytes, &changed).into(),
                    None => bytes,
                }
            }
        }
    }

    /// The node ended its answer.
    fn close(&mut self) -> Option<Bytes> {
        self.done = true;
        if !self.framed && !self.recorder.has_ended() {
            self.wake_check();
            return Some(self.cut(
                "node_lost",
                "the node that was answering went away".to_owned(),
            ));
        }
        let rest = self.scanner.finish().map(|piece| self.edit(piece));
        self.recorder.end();
        self.ending.set(Outcome::Ok);
        rest
    }

    /// The answer ends here, too early, and the client is told so instead of being left with a part that
    /// looks whole.
    fn cut(&mut self, code: &'static str, message: String) -> Bytes {
        self.done = true;
        if self.recorder.has_ended() {
            self.ending.set(Outcome::Ok);
            return Bytes::new();
        }
        self.ending.set(Outcome::Cut);
        let error = ApiError::upstream(StatusCode::BAD_GATEWAY, code, message);
        // What is held back is part of an event, and of no use to anybody.
        let start = if self.scanner.is_within_event() {
            "\n\n"
        } else {
            ""
        };
        format!("{start}data: {}\n\n", error.body()).into()
    }

    fn wake_check(&self) {
        if let Some(node) = self.recorder.shared.node(self.recorder.holder) {
            node.check.notify_one();
        }
    }
}

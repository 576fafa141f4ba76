//! Answers in pieces, as server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::Value;
use tokio::sync::mpsc::UnboundedReceiver;

use super::answer::{Shape, Usage};
use super::error::ApiError;
use crate::node::Event;

/// How often a comment is sent while there is nothing to say.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The pieces to come.
struct Pieces {
    shape: Shape,
    events: UnboundedReceiver<Event>,
    ready: VecDeque<String>,
    begun: Vec<bool>,
    left: u32,
    usage: Usage,
    include_usage: bool,
    done: bool,
}

/// Streams the answers. Waits for the first event, so that a request which fails at once is answered
/// with an error's status.
///
/// # Errors
/// [`ApiError`] when it fails before its first piece.
pub(super) async fn respond(
    shape: Shape,
    mut events: UnboundedReceiver<Event>,
    include_usage: bool,
) -> Result<Response, ApiError> {
    let first = match events.recv().await {
        Some(Event::Failed(failure)) => return Err(failure.into()),
        Some(event) => event,
        None => return Err(ApiError::internal("the engine thread has ended")),
    };
    let mut pieces = Pieces {
        begun: vec![false; shape.choices as usize],
        left: shape.choices,
        shape,
        events,
        ready: VecDeque::new(),
        usage: Usage::default(),
        include_usage,
        done: false,
    };
    pieces.take(Some(first));
    let pieces = stream::unfold(pieces, |mut pieces| async move {
        let piece = pieces.next().await?;
        Some((
            Ok::<_, Infallible>(sse::Event::default().data(piece)),
            pieces,
        ))
    });
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE);
    Ok(Sse::new(pieces).keep_alive(keep_alive).into_response())
}

impl Pieces {
    async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Some(piece);
            }
            if self.done {
                return None;
            }
            let event = self.events.recv().await;
            self.take(event);
        }
    }

    fn take(&mut self, event: Option<Event>) {
        match event {
            Some(Event::Text { choice, text }) => {
                self.begin(choice);
                let piece = self.shape.text(choice, &text);
                self.push(&piece);
            }
            Some(Event::Finished { choice, mut end }) => {
                self.begin(choice);
                self.usage.add(choice, &end);
                let piece = self.shape.end(choice, &mut end);
                self.push(&piece);
                self.left = self.left.saturating_sub(1);
                if self.left == 0 {
                    if self.include_usage {
                        let piece = self.shape.usage(self.usage);
                        self.push(&piece);
                    }
                    self.close();
                }
            }
            Some(Event::Failed(failure)) => self.fail(&failure.into()),
            None => self.fail(&ApiError::internal("the engine thread has ended")),
        }
    }

    fn begin(&mut self, choice: u32) {
        let Some(begun) = self.begun.get_mut(choice as usize) else {
            return;
        };
        if !std::mem::replace(begun, true)
            && let Some(piece) = self.shape.begin(choice)
        {
            self.push(&piece);
        }
    }

    /// An error after the first piece can only be said in the stream.
    fn fail(&mut self, error: &ApiError) {
        self.push(&error.body());
        self.close();
    }

    fn close(&mut self) {
        self.ready.push_back("[DONE]".to_owned());
        self.done = true;
    }

    fn push(&mut self, piece: &Value) {
        self.ready.push_back(piece.to_string());
    }
}

//! Looks into answers as they pass: takes out the handle, and learns what was said.
//!
//! Whatever an answer brings is stored before the bytes that brought it are relayed, so that a client's
//! next turn finds it, however fast it comes.

use std::borrow::Cow;
use std::sync::Arc;

use memchr::memmem;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::conversation::ConversationId;
use crate::history::{History, Message};
use crate::json::{Fields, is_object, raw};
use crate::nodes::NodeId;
use crate::report::Report;
use crate::request::PARAMS;
use crate::server::Shared;
use crate::store::{Handle, Homes, Place, Turn};

/// An answer of more bytes is not remembered as part of a history.
const MAX_REMEMBERED_ANSWER: usize = 16 << 20;

/// What is known of a turn while its answer passes.
pub(crate) struct Recorder {
    pub shared: Arc<Shared>,
    /// Under way until the answer has ended.
    pub turn: Option<Turn>,
    pub place: Place,
    pub id: ConversationId,
    /// Whether a handle is of use to a next turn.
    pub keep: bool,
    /// Who answers, and so holds the blocks.
    pub holder: NodeId,
    pub homes: Homes,
    /// Present if the conversation is recognised by what is said in it.
    pub history: Option<History>,
    pub report: Option<Report>,
    state: State,
}

#[derive(Default)]
struct State {
    answer: Option<Message>,
    stored: bool,
    ended: bool,
}

/// What the router needs to know of a choice.
#[derive(Debug, Default, Deserialize)]
struct Choice {
    index: Option<u64>,
    delta: Option<Message>,
    message: Option<Message>,
    text: Option<String>,
    finish_reason: Option<String>,
}

impl Recorder {
    pub fn new(
        shared: Arc<Shared>,
        turn: Turn,
        keep: bool,
        id: ConversationId,
        holder: NodeId,
        homes: Homes,
        history: Option<History>,
        report: Option<Report>,
    ) -> Self {
        let state = State {
            answer: history.is_some().then(Message::answer),
            ..State::default()
        };
        let place = *turn.place();
        let turn = Some(turn);
        Self {
            shared,
            turn,
            place,
            keep,
            id,
            holder,
            homes,
            history,
            report,
            state,
        }
    }

    /// A whole answer that is not streamed. Gives back what to relay in its place, if it is to change.
    pub fn object(&mut self, text: &str) -> Option<String> {
        let changed = self.look(text);
        self.end();
        changed
    }

    /// The data of a stream's event. Gives back what to relay in its place, if it is to change.
    pub fn event(&mut self, data: &str) -> Option<String> {
        if data.trim() == "[DONE]" {
            self.end();
            return None;
        }
        self.look(data)
    }

    /// The answer has ended well.
    pub fn end(&mut self) {
        if std::mem::replace(&mut self.state.ended, true) {
            return;
        }
        if !self.state.stored && self.keep {
            self.shared.store.put_nothing(&self.place, self.homes);
        }
        self.remember();
        self.turn = None;
    }

    /// Whether the answer has ended well.
    pub fn has_ended(&self) -> bool {
        self.state.ended
    }

    fn look(&mut self, text: &str) -> Option<String> {
        let has_params = memmem::find(text.as_bytes(), b"\"kv_transfer_params\"").is_some();
        if !has_params && self.state.answer.is_none() && self.report.is_none() {
            return None;
        }
        let mut fields = Fields::parse(text).ok()?;
        let choices: Vec<Choice> = fields.read("choices").ok().flatten().unwrap_or_default();
        let finished = choices.iter().any(|choice| choice.finish_reason.is_some());
        if let Some(choice) = choices.iter().find(|choice| choice.index.unwrap_or(0) == 0) {
            self.listen(choice);
        }
        let mut changed = false;
        if has_params {
            // With several choices each has blocks of its own. A next turn goes on with the first.
            let first = choices
                .first()
                .is_none_or(|choice| choice.index.unwrap_or(0) == 0);
            changed = self.catch(&mut fields, first);
        }
        if let Some(report) = &self.report
            && (finished || fields.get("kvx").is_some())
        {
            let report = report.with_decode(fields.get("kvx"));
            fields.set("kvx", report);
            changed = true;
        }
        changed.then(|| fields.to_text())
    }

    /// Adds to what the answer says.
    fn listen(&mut self, choice: &Choice) {
        let Some(answer) = &mut self.state.answer else {
            return;
        };
        for message in [&choice.delta, &choice.message].into_iter().flatten() {
            answer.push(message);
        }
        if let Some(text) = &choice.text {
            answer.push_text(text);
        }
        if answer.size() > MAX_REMEMBERED_ANSWER {
            self.state.answer = None;
        }
    }

    /// Stores the handle in `fields` and takes it out. Says whether `fields` changed.
    fn catch(&mut self, fields: &mut Fields<'_>, first_choice: bool) -> bool {
        let (mut params, mut changed) = (None, false);
        if let Some(value) = fields.get(PARAMS).filter(|value| *value != "null") {
            params = Some(value.to_owned());
        }
        let strip = !self.shared.config.return_kv_params;
        if params.is_some() && strip {
            fields.remove(PARAMS);
            changed = true;
        }
        if let Some((choices, of_first)) = without_params(fields) {
            params = params.or(of_first);
            if strip {
                fields.set("choices", choices);
                changed = true;
            }
        }
        if let Some(params) = params.filter(|params| first_choice && is_object(params)) {
            self.store(&params);
        }
        changed
    }

    fn store(&mut self, params: &str) {
        if !self.keep {
            return;
        }
        self.shared
            .metrics
            .handle_bytes
            .observe(params.len() as f64);
        let handle = Handle::new(params, self.holder);
        if !self.shared.store.put(&self.place, handle, self.homes) {
            tracing::warn!(bytes = params.len(), "a handle is too large to be kept");
        }
        self.state.stored = true;
        self.remember();
    }

    fn remember(&self) {
        if let Some(history) = &self.history
            && let Some(answer) = &self.state.answer
            && let Some(beginning) = history.with_answer(answer)
        {
            self.shared.store.remember(beginning, &self.id);
        }
    }
}

/// The choices without handles, and the handle of the first, if a choice has one.
fn without_params(fields: &Fields<'_>) -> Option<(Box<RawValue>, Option<String>)> {
    let choices: Vec<Cow<'_, RawValue>> = serde_json::from_str(fields.get("choices")?).ok()?;
    let (mut of_first, mut found) = (None, false);
    let kept: Vec<Cow<'_, RawValue>> = choices
        .iter()
        .map(|choice| {
            let parsed = Fields::parse(choice.get()).ok();
            let Some(mut inner) = parsed.filter(|f| f.get(PARAMS).is_some_and(|v| v != "null"))
            else {
                return choice.clone();
            };
            found = true;
            let first = inner.get("index").is_none_or(|index| index == "0");
            let params = inner.remove(PARAMS);
            if first {
                of_first = params;
            }
            Cow::Owned(raw(&inner))
        })
        .collect();
    found.then(|| (raw(&kept), of_first))
}

//! Recognises a conversation by what was said in it.
//!
//! A client that gives no id sends the whole history with every turn. After each answer the router
//! remembers a hash of history and answer; a later request that begins with the same messages goes on
//! with the same conversation. Nothing but hashes is kept, and a wrong guess costs a recomputation at
//! most: engines compare the tokens of the blocks themselves.
//!
//! Chat histories are hashed message by message, prompts of `/v1/completions` in strides of
//! [`STRIDE`] bytes, so that each costs time in proportion to its length.

use serde::Deserialize;
use serde_json::Value;

use crate::conversation::{Key, Tenant, key};
use crate::json::Fields;
use crate::request::Api;

/// Bytes of a prompt between two hashes. What is said after the last whole stride is left out.
const STRIDE: usize = 64;

/// Longer prompts are recognised by their first so many bytes.
const MAX_TEXT: usize = 4 << 20;

/// Longer histories are recognised by their first so many messages.
const MAX_MESSAGES: usize = 16_384;

/// What was said before the answer, as hashes of ever longer beginnings.
#[derive(Debug, Clone)]
pub(crate) enum History {
    Chat {
        /// After each message.
        after: Vec<Key>,
        /// Which of these a remembered answer can have ended.
        ends: Vec<usize>,
        start: Key,
    },
    Text(Strides),
}

impl History {
    /// The history in a request; `None` where it cannot be told, as for several prompts at once.
    pub fn of(api: Api, fields: &Fields<'_>, tenant: &Tenant, model: &str) -> Option<Self> {
        let start = key(
            match api {
                Api::Chat => "chat history",
                Api::Completions => "text history",
            },
            &[tenant.as_bytes(), model.as_bytes()],
        );
        match api {
            Api::Chat => {
                let messages: Vec<Message> = fields.read("messages").ok()??;
                let mut after = Vec::with_capacity(messages.len().min(MAX_MESSAGES));
                let mut ends = Vec::new();
                let mut last = start;
                for (i, message) in messages.iter().take(MAX_MESSAGES).enumerate() {
                    last = message.chain(&last);
                    after.push(last);
                    if message.role.as_deref() == Some(ASSISTANT) {
                        ends.push(i);
                    }
                }
                Some(Self::Chat { after, ends, start })
            }
            Api::Completions => {
                let prompt = match fields.read::<Value>("prompt").ok()?? {
                    Value::String(text) => text,
                    Value::Array(texts) => match <[Value; 1]>::try_from(texts) {
                        Ok([Value::String(text)]) => text,
                        _ => return None,
                    },
                    _ => return None,
                };
                let mut strides = Strides::new(start);
                strides.push(prompt.as_bytes());
                Some(Self::Text(strides))
            }
        }
    }

    /// Hashes of the beginnings that may be remembered, longest first.
    pub fn beginnings(&self) -> Vec<Key> {
        match self {
            Self::Chat { after, ends, .. } => ends
                .iter()
                .rev()
                .filter_map(|&i| after.get(i).copied())
                .collect(),
            Self::Text(strides) => strides.whole.iter().rev().copied().collect(),
        }
    }

    /// The hash under which history and `answer` are remembered.
    pub fn with_answer(&self, answer: &Message) -> Option<Key> {
        match self {
            Self::Chat { after, start, .. } => Some(answer.chain(after.last().unwrap_or(start))),
            Self::Text(strides) => {
                let mut strides = strides.clone();
                strides.push(answer.text().as_bytes());
                strides.whole.last().copied()
            }
        }
    }
}

/// Hashes of a text after every [`STRIDE`] bytes.
#[derive(Debug, Clone)]
pub(crate) struct Strides {
    last: Key,
    whole: Vec<Key>,
    rest: Vec<u8>,
    seen: usize,
}

impl Strides {
    fn new(start: Key) -> Self {
        Self {
            last: start,
            whole: Vec::new(),
            rest: Vec::with_capacity(STRIDE),
            seen: 0,
        }
    }

    fn push(&mut self, bytes: &[u8]) {
        let room = MAX_TEXT.saturating_sub(self.seen);
        let bytes = bytes.get(..room).unwrap_or(bytes);
        self.seen = self.seen.saturating_add(bytes.len());
        for piece in bytes.chunks(STRIDE) {
            let missing = STRIDE.saturating_sub(self.rest.len());
            let (head, tail) = piece.split_at(missing.min(piece.len()));
            self.rest.extend_from_slice(head);
            if self.rest.len() == STRIDE {
                self.last = key("stride", &[&self.last, &self.rest]);
                self.whole.push(self.last);
                self.rest.clear();
            }
            self.rest.extend_from_slice(tail);
        }
    }
}

const ASSISTANT: &str = "assistant";

/// A message, as far as it tells one history from another. Reasoning is left out: clients do not send
/// it back.
#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct Message {
    role: Option<String>,
    name: Option<String>,
    tool_call_id: Option<String>,
    content: Option<Value>,
    tool_calls: Option<Vec<ToolCall>>,
}

#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct ToolCall {
    index: Option<usize>,
    id: Option<String>,
    function: Option<Function>,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct Function {
    name: Option<String>,
    arguments: Option<String>,
}

impl Message {
    /// An empty answer, to which a stream's pieces are added.
    pub fn answer() -> Self {
        Self {
            role: Some(ASSISTANT.to_owned()),
            content: Some(Value::String(String::new())),
            ..Self::default()
        }
    }

    /// Adds text.
    pub fn push_text(&mut self, text: &str) {
        match &mut self.content {
            Some(Value::String(content)) => content.push_str(text),
            other => *other = Some(Value::String(text.to_owned())),
        }
    }

    /// Adds what a piece of a stream brings.
    pub fn push(&mut self, delta: &Self) {
        self.push_text(&delta.text());
        for piece in delta.tool_calls.iter().flatten() {
            let calls = self.tool_calls.get_or_insert_default();
            let place = piece.index.unwrap_or(calls.len());
            let at = calls.iter().position(|call| call.index == Some(place));
            let call = match at {
                Some(at) => calls.get_mut(at),
                None => {
                    calls.push(ToolCall {
                        index: Some(place),
                        ..ToolCall::default()
                    });
                    calls.last_mut()
                }
            };
            let Some(call) = call else { continue };
            if piece.id.is_some() {
                call.id.clone_from(&piece.id);
            }
            let Some(function) = &piece.function else {
                continue;
            };
            let whole = call.function.get_or_insert_default();
            for (piece, whole) in [
                (&function.name, &mut whole.name),
                (&function.arguments, &mut whole.arguments),
            ] {
                if let Some(piece) = piece {
                    whole.get_or_insert_default().push_str(piece);
                }
            }
        }
    }

    /// Bytes that it holds, about.
    pub fn size(&self) -> usize {
        let calls = self.tool_calls.iter().flatten().map(|call| {
            let arguments = call.function.as_ref().and_then(|f| f.arguments.as_ref());
            arguments.map_or(64, |text| text.len().saturating_add(64))
        });
        let text = match &self.content {
            Some(Value::String(text)) => text.len(),
            _ => 0,
        };
        calls.fold(text, usize::saturating_add)
    }

    /// The text of it. A list of text parts says the same as the text in one piece; other parts count
    /// by their JSON.
    fn text(&self) -> String {
        match &self.content {
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => text.clone(),
            Some(Value::Array(parts)) => parts
                .iter()
                .map(|part| match part.get("text") {
                    Some(Value::String(text)) => text.clone(),
                    _ => format!("\0{part}\0"),
                })
                .collect(),
            Some(other) => format!("\0{other}\0"),
        }
    }

    /// The hash of all messages up to this one, of which `before` is that of those before it.
    fn chain(&self, before: &Key) -> Key {
        let role = self.role.as_deref().unwrap_or_default();
        let text = self.text();
        // Clients tend to trim what they show and send back.
        let text = if role == ASSISTANT {
            text.trim()
        } else {
            &text
        };
        let option = |text: &Option<String>| text.clone().unwrap_or_default();
        let mut parts = vec![
            before.to_vec(),
            role.as_bytes().to_vec(),
            option(&self.name).into_bytes(),
            option(&self.tool_call_id).into_bytes(),
            text.as_bytes().to_vec(),
        ];
        for call in self.tool_calls.iter().flatten() {
            let function = call.function.clone().unwrap_or_default();
            parts.push(option(&call.id).into_bytes());
            parts.push(option(&function.name).into_bytes());
            parts.push(option(&function.arguments).into_bytes());
        }
        let parts: Vec<_> = parts.iter().map(Vec::as_slice).collect();
        key("message", &parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(api: Api, body: &str) -> Option<History> {
        let tenant = Tenant::of(&axum::http::HeaderMap::new());
        History::of(api, &Fields::parse(body).unwrap(), &tenant, "m")
    }

    fn chat(messages: &str) -> History {
        history(Api::Chat, &format!("{{\"messages\":[{messages}]}}")).unwrap()
    }

    fn message(text: &str) -> Message {
        serde_json::from_str(text).unwrap()
    }

    const USER: &str = r#"{"role":"user","content":"hi"}"#;

    #[test]
    fn the_next_turn_begins_with_history_and_answer() {
        let mut answer = Message::answer();
        answer.push(&message(r#"{"role":"assistant","content":" Hel"}"#));
        answer.push(&message(r#"{"content":"lo"}"#));
        let remembered = chat(USER).with_answer(&answer).unwrap();
        for said in [
            r#"{"role":"assistant","content":" Hello"}"#,
            r#"{"role":"assistant","content":"Hello","refusal":null,"tool_calls":null}"#,
            r#"{"content":[{"type":"text","text":"Hel"},{"type":"text","text":"lo"}],"role":"assistant","tool_calls":[]}"#,
        ] {
            let next = chat(&format!("{USER},{said},{USER}"));
            assert_eq!(next.beginnings(), [remembered], "{said}");
        }
        for said in [
            r#"{"role":"assistant","content":"Hello!"}"#,
            r#"{"role":"assistant","content":"Hello","name":"x"}"#,
            r#"{"role":"user","content":"Hello"}"#,
        ] {
            let next = chat(&format!("{USER},{said},{USER}"));
            assert!(!next.beginnings().contains(&remembered), "{said}");
        }
    }

    #[test]
    fn tool_calls_are_put_together_from_their_pieces() {
        let mut answer = Message::answer();
        for delta in [
            r#"{"role":"assistant","content":null,"tool_calls":[{"index":0,"id":"c1","function":{"name":"f","arguments":""}}]}"#,
            r#"{"tool_calls":[{"index":0,"function":{"arguments":"{\"a\""}}]}"#,
            r#"{"tool_calls":[{"index":1,"id":"c2","function":{"name":"g","arguments":"{}"}}]}"#,
            r#"{"tool_calls":[{"index":0,"function":{"arguments":":1}"}}]}"#,
        ] {
            answer.push(&message(delta));
        }
        let whole = message(
            r#"{"role":"assistant","content":null,"tool_calls":[
                {"id":"c1","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}},
                {"id":"c2","type":"function","function":{"name":"g","arguments":"{}"}}]}"#,
        );
        assert_eq!(
            chat(USER).with_answer(&answer),
            chat(USER).with_answer(&whole)
        );
        assert_ne!(
            chat(USER).with_answer(&answer),
            chat(USER).with_answer(&Message::answer())
        );
    }

    #[test]
    fn the_longest_beginning_comes_first() {
        let a = r#"{"role":"assistant","content":"a"}"#;
        let long = chat(&format!("{USER},{a},{USER},{a},{USER}"));
        let short = chat(&format!("{USER},{a}"));
        assert_eq!(long.beginnings().len(), 2);
        assert_eq!(long.beginnings()[1], short.beginnings()[0]);
    }

    #[test]
    fn prompts_are_recognised_by_whole_strides() {
        let prompt =
            |text: &str| history(Api::Completions, &format!("{{\"prompt\":\"{text}\"}}")).unwrap();
        let first = "x".repeat(100);
        let answer = {
            let mut answer = Message::answer();
            answer.push_text(&"y".repeat(40));
            answer
        };
        let remembered = prompt(&first).with_answer(&answer).unwrap();
        let next = prompt(&format!("{first}{}{}", "y".repeat(40), "z".repeat(300)));
        assert!(next.beginnings().contains(&remembered));
        let other = prompt(&format!("{first}{}{}", "n".repeat(40), "z".repeat(300)));
        assert!(!other.beginnings().contains(&remembered));
        // However it was cut.
        let whole = prompt(&format!("{first}{}", "y".repeat(40)));
        assert_eq!(whole.beginnings()[0], remembered);
        assert!(prompt("short").with_answer(&Message::answer()).is_none());
    }

    #[test]
    fn what_has_no_single_history_is_left_alone() {
        for body in [
            r#"{"prompt":["a","b"]}"#,
            r#"{"prompt":[1,2,3]}"#,
            r#"{"prompt":null}"#,
            "{}",
            r#"{"prompt":[]}"#,
        ] {
            assert!(history(Api::Completions, body).is_none(), "{body}");
        }
        assert!(history(Api::Completions, r#"{"prompt":["a"]}"#).is_some());
        assert!(history(Api::Chat, r#"{"messages":"x"}"#).is_none());
    }
}

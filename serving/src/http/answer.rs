//! Answers in OpenAI's form, whole and in pieces.

use serde_json::{Value, json};

use super::body::Api;
use crate::node::{FinishReason, Finished};

/// What all objects of one response share.
#[derive(Debug, Clone)]
pub struct Shape {
    /// Which API.
    pub api: Api,
    /// The response's id.
    pub id: String,
    /// Unix time.
    pub created: u64,
    /// The model's name.
    pub model: String,
    /// Whether the client wants to know where time and tokens went.
    pub report: bool,
    /// How many answers.
    pub choices: u32,
}

/// One answer, complete.
#[derive(Debug, Default)]
pub struct Answer {
    /// Its text.
    pub text: String,
    /// How it ended.
    pub end: Option<Box<Finished>>,
}

/// Tokens of all answers together.
#[derive(Debug, Clone, Copy, Default)]
pub struct Usage {
    prompt: usize,
    completion: usize,
    cached: usize,
}

impl Usage {
    /// Counts an answer. The prompt counts once.
    pub fn add(&mut self, choice: u32, end: &Finished) {
        self.completion = self.completion.saturating_add(end.completion_tokens);
        if choice == 0 {
            self.prompt = end.report.prompt_tokens;
            self.cached = end.report.cached_tokens;
        }
    }

    fn json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt.saturating_add(self.completion),
            "prompt_tokens_details": {"cached_tokens": self.cached},
        })
    }
}

impl Shape {
    /// The whole response.
    #[must_use]
    pub fn whole(&self, answers: &mut [Answer]) -> Value {
        let mut usage = Usage::default();
        let mut choices = Vec::with_capacity(answers.len());
        let several = answers.len() > 1;
        let (mut params, mut report) = (None, None);
        for (index, answer) in (0_u32..).zip(answers.iter_mut()) {
            let Some(end) = &mut answer.end else { continue };
            usage.add(index, end);
            let mut choice = match self.api {
                Api::Chat => json!({"message": {"role": "assistant", "content": answer.text}}),
                Api::Completions => json!({"text": answer.text}),
            };
            choice["index"] = index.into();
            choice["logprobs"] = Value::Null;
            choice["finish_reason"] = reason(end.reason);
            let own = end.kv_transfer_params.take();
            if index == 0 {
                report = self.report_of(end);
                params.clone_from(&own);
            }
            if let (true, Some(own)) = (several, own) {
                choice["kv_transfer_params"] = own;
            }
            choices.push(choice);
        }
        let mut body = self.object(match self.api {
            Api::Chat => "chat.completion",
            Api::Completions => "text_completion",
        });
        body["choices"] = choices.into();
        body["usage"] = usage.json();
        if let Some(params) = params {
            body["kv_transfer_params"] = params;
        }
        if let Some(report) = report {
            body["kvx"] = report;
        }
        body
    }

    /// The piece that begins an answer; the completions API has none.
    #[must_use]
    pub fn begin(&self, choice: u32) -> Option<Value> {
        (self.api == Api::Chat).then(|| {
            let delta = json!({"delta": {"role": "assistant", "content": ""}});
            self.piece(choice, delta, Value::Null)
        })
    }

    /// A piece of text.
    #[must_use]
    pub fn text(&self, choice: u32, text: &str) -> Value {
        let piece = match self.api {
            Api::Chat => json!({"delta": {"content": text}}),
            Api::Completions => json!({"text": text}),
        };
        self.piece(choice, piece, Value::Null)
    }

    /// The piece that ends an answer.
    #[must_use]
    pub fn end(&self, choice: u32, end: &mut Finished) -> Value {
        let piece = match self.api {
            Api::Chat => json!({"delta": {}}),
            Api::Completions => json!({"text": ""}),
        };
        let mut body = self.piece(choice, piece, reason(end.reason));
        if let Some(params) = end.kv_transfer_params.take() {
            body["kv_transfer_params"] = params;
        }
        if let Some(report) = self.report_of(end) {
            body["kvx"] = report;
        }
        body
    }

    /// The piece that says how many tokens it were.
    #[must_use]
    pub fn usage(&self, usage: Usage) -> Value {
        let mut body = self.object(self.piece_name());
        body["choices"] = json!([]);
        body["usage"] = usage.json();
        body
    }

    fn report_of(&self, end: &Finished) -> Option<Value> {
        self.report
            .then(|| serde_json::to_value(&end.report).unwrap_or_default())
    }

    fn piece(&self, index: u32, mut choice: Value, reason: Value) -> Value {
        choice["index"] = index.into();
        choice["logprobs"] = Value::Null;
        choice["finish_reason"] = reason;
        let mut body = self.object(self.piece_name());
        body["choices"] = json!([choice]);
        body
    }

    fn piece_name(&self) -> &'static str {
        match self.api {
            Api::Chat => "chat.completion.chunk",
            Api::Completions => "text_completion",
        }
    }

    fn object(&self, object: &str) -> Value {
        json!({"id": self.id, "object": object, "created": self.created, "model": self.model})
    }
}

fn reason(reason: FinishReason) -> Value {
    serde_json::to_value(reason).unwrap_or_default()
}

//! What a request body asks for, whichever API it came by.

use serde_json::{Map, Value};

use super::error::ApiError;
use super::fields::Fields;
use crate::model::SamplingParams;
use crate::node::{Limits, Transfer};

/// Most answers to one request.
const MAX_CHOICES: i64 = 64;
/// Most stop strings.
const MAX_STOPS: usize = 4;
/// Longest stop string, bytes: each is looked for after every token.
const MAX_STOP_BYTES: usize = 1024;

/// Which API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

/// Where the prompt comes from.
#[derive(Debug, Clone, PartialEq)]
pub enum Source {
    /// Messages and tools, to be rendered by the chat template.
    Messages {
        /// The messages.
        messages: Vec<Value>,
        /// The tools.
        tools: Option<Value>,
        /// Whether the assistant is to begin.
        add_generation_prompt: bool,
    },
    /// A text.
    Text(String),
    /// Tokens.
    Tokens(Vec<u32>),
}

/// A request body, understood.
#[derive(Debug)]
pub struct Asked {
    /// The model's name, if given.
    pub model: Option<String>,
    /// The prompt.
    pub source: Source,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// When an answer ends; `max_tokens` is still unlimited if the client said nothing.
    pub limits: Limits,
    /// Answers.
    pub choices: u32,
    /// Whether the answer comes in pieces.
    pub stream: bool,
    /// Whether the last piece says how many tokens it were.
    pub include_usage: bool,
    /// Keeps prefixes apart.
    pub cache_salt: Option<String>,
    /// What is said about blocks elsewhere.
    pub transfer: Transfer,
}

impl Asked {
    /// Reads a body. Unknown fields are ignored.
    ///
    /// # Errors
    /// [`ApiError`] naming the field that is wrong.
    pub fn read(api: Api, body: &[u8]) -> Result<Self, ApiError> {
        let body: Value = serde_json::from_slice(body)
            .map_err(|error| ApiError::invalid(format!("the body is not JSON: {error}")))?;
        let Value::Object(mut body) = body else {
            return Err(ApiError::invalid("the body must be a JSON object"));
        };
        let transfer = transfer(body.remove("kv_transfer_params"))?;
        let fields = Fields(&body);
        if let Some(logprobs) = fields.get("logprobs")
            && *logprobs != Value::Bool(false)
        {
            return Err(ApiError::field(
                "logprobs",
                "logprobs are not supported by this engine; leave them out",
            ));
        }
        let source = match api {
            Api::Chat => chat(fields)?,
            Api::Completions => completion(fields)?,
        };
        let mut max_tokens = fields.count("max_tokens", 1)?;
        if api == Api::Chat {
            max_tokens = fields.count("max_completion_tokens", 1)?.or(max_tokens);
        } else {
            max_tokens = max_tokens.or(Some(16));
        }
        let limits = Limits {
            max_tokens: max_tokens.unwrap_or(usize::MAX),
            min_tokens: fields.count("min_tokens", 0)?.unwrap_or(0),
            stop: stops(fields)?,
            ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
        };
        if limits.min_tokens > limits.max_tokens {
            return Err(ApiError::field(
                "min_tokens",
                "min_tokens must not exceed max_tokens",
            ));
        }
        let choices = fields.whole("n", 1, MAX_CHOICES)?.unwrap_or(1);
        Ok(Self {
            model: fields.text("model")?.map(str::to_owned),
            source,
            sampling: sampling(fields)?,
            limits,
            choices: u32::try_from(choices).unwrap_or(1),
            stream: fields.flag("stream")?.unwrap_or(false),
            include_usage: include_usage(fields)?,
            cache_salt: fields.text("cache_salt")?.map(str::to_owned),
            transfer,
        })
    }
}

fn transfer(params: Option<Value>) -> Result<Transfer, ApiError> {
    match params {
        None | Some(Value::Null) => Ok(Transfer::default()),
        Some(Value::Object(params)) => Ok(Transfer::parse(params)),
        Some(_) => Err(ApiError::field(
            "kv_transfer_params",
            "kv_transfer_params must be an object or null",
        )),
    }
}

fn chat(fields: Fields<'_>) -> Result<Source, ApiError> {
    let messages = fields.get("messages").and_then(Value::as_array);
    let messages = messages.filter(|messages| !messages.is_empty());
    let Some(messages) = messages else {
        return Err(ApiError::field(
            "messages",
            "messages must be a list of at least one message",
        ));
    };
    let tools = fields.get("tools");
    if tools.is_some_and(|tools| !tools.is_array()) {
        return Err(ApiError::field("tools", "tools must be a list"));
    }
    Ok(Source::Messages {
        messages: messages.clone(),
        tools: tools.cloned(),
        add_generation_prompt: fields.flag("add_generation_prompt")?.unwrap_or(true),
    })
}

fn completion(fields: Fields<'_>) -> Result<Source, ApiError> {
    for (name, plain) in [("echo", Value::Bool(false)), ("best_of", Value::from(1))] {
        if fields.get(name).is_some_and(|value| *value != plain) {
            return Err(ApiError::field(
                name,
                format!("{name} is not supported by this engine; leave it out"),
            ));
        }
    }
    if fields.get("suffix").is_some() {
        return Err(ApiError::field(
            "suffix",
            "suffix is not supported by this engine",
        ));
    }
    let wrong = || ApiError::field("prompt", "prompt must be a string or a list of token ids");
    prompt(fields.get("prompt").ok_or_else(wrong)?, true).ok_or_else(wrong)?
}

/// A prompt, or a list of one prompt.
fn prompt(value: &Value, may_nest: bool) -> Option<Result<Source, ApiError>> {
    if let Some(text) = value.as_str() {
        return Some(Ok(Source::Text(text.to_owned())));
    }
    let list = value.as_array()?;
    match list.first()? {
        Value::Number(_) => {
            let tokens: Option<Vec<u32>> = list
                .iter()
                .map(|token| u32::try_from(token.as_u64()?).ok())
                .collect();
            tokens.map(|tokens| Ok(Source::Tokens(tokens)))
        }
        first if may_nest && list.len() == 1 => prompt(first, false),
        _ if may_nest => Some(Err(ApiError::field(
            "prompt",
            "several prompts in one request are not supported by this engine; send one request each",
        ))),
        _ => None,
    }
}

fn stops(fields: Fields<'_>) -> Result<Vec<String>, ApiError> {
    let wrong = || {
        ApiError::field(
            "stop",
            format!(
                "stop must be a string or a list of up to {MAX_STOPS} strings, of at most {MAX_STOP_BYTES} bytes each"
            ),
        )
    };
    match fields.get("stop") {
        None => Ok(Vec::new()),
        Some(Value::String(stop)) if stop.len() <= MAX_STOP_BYTES => Ok(vec![stop.clone()]),
        Some(Value::Array(stops)) if stops.len() <= MAX_STOPS => stops
            .iter()
            .map(|stop| {
                let stop = stop.as_str().filter(|stop| stop.len() <= MAX_STOP_BYTES);
                stop.map(str::to_owned).ok_or_else(wrong)
            })
            .collect(),
        Some(_) => Err(wrong()),
    }
}

fn sampling(fields: Fields<'_>) -> Result<SamplingParams, ApiError> {
    let default = SamplingParams::default();
    // vLLM's -1 means the same as 0: all.
    let top_k = fields.whole("top_k", -1, i64::from(i32::MAX))?.unwrap_or(0);
    let seed = fields.whole("seed", i64::MIN, i64::MAX)?;
    Ok(SamplingParams {
        temperature: fields
            .number("temperature", 0.0, 2.0)?
            .unwrap_or(default.temperature),
        top_p: fields.number("top_p", 0.0, 1.0)?.unwrap_or(default.top_p),
        top_k: usize::try_from(top_k).unwrap_or(0),
        seed: seed.map(i64::cast_unsigned),
        presence_penalty: fields.number("presence_penalty", -2.0, 2.0)?.unwrap_or(0.0),
        frequency_penalty: fields
            .number("frequency_penalty", -2.0, 2.0)?
            .unwrap_or(0.0),
    })
}

fn include_usage(fields: Fields<'_>) -> Result<bool, ApiError> {
    let none = Map::new();
    let options = match fields.get("stream_options") {
        None => &none,
        Some(Value::Object(options)) => options,
        Some(_) => {
            return Err(ApiError::field(
                "stream_options",
                "stream_options must be an object",
            ));
        }
    };
    Ok(Fields(options).flag("include_usage")?.unwrap_or(false))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn chat_with(extra: Value) -> Result<Asked, ApiError> {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
        if let (Value::Object(body), Value::Object(extra)) = (&mut body, extra) {
            body.extend(extra);
        }
        Asked::read(Api::Chat, body.to_string().as_bytes())
    }

    #[test]
    fn wrong_fields_are_named() {
        for (field, value) in [
            ("messages", json!("hi")),
            ("messages", json!([])),
            ("temperature", json!("hot")),
            ("temperature", json!(-1)),
            ("max_tokens", json!(0)),
            ("max_tokens", json!(-3)),
            ("max_tokens", json!(1.5)),
            ("n", json!(0)),
            ("stop", json!(7)),
            ("stop", json!(["a", "b", "c", "d", "e"])),
            ("stop", json!("x".repeat(MAX_STOP_BYTES + 1))),
            ("stop", json!(["a", "x".repeat(MAX_STOP_BYTES + 1)])),
            ("stream", json!("yes")),
            ("stream_options", json!(true)),
            ("logprobs", json!(true)),
            ("tools", json!({})),
            ("kv_transfer_params", json!("x")),
            ("kv_transfer_params", json!([1])),
        ] {
            let error = chat_with(json!({field: value})).unwrap_err().body();
            assert_eq!(error["error"]["param"], field, "{error}");
        }
        assert!(Asked::read(Api::Chat, b"{").is_err());
        assert!(Asked::read(Api::Chat, b"[]").is_err());
    }

    #[test]
    fn nulls_and_unknown_fields_are_ignored() {
        let asked = chat_with(json!({
            "temperature": null, "stop": null, "logprobs": false, "user": "u", "store": {"a": 1},
            "kv_transfer_params": null, "max_completion_tokens": 5, "max_tokens": 9, "top_k": -1,
        }));
        let asked = asked.unwrap();
        assert_eq!(asked.limits.max_tokens, 5);
        assert_eq!(asked.sampling, SamplingParams::default());
        assert!(!asked.transfer.asked);
    }

    #[test]
    fn prompts_are_texts_or_tokens() {
        let source = |prompt: Value| {
            let body = json!({"prompt": prompt}).to_string();
            Asked::read(Api::Completions, body.as_bytes()).map(|asked| asked.source)
        };
        assert_eq!(source(json!("a")), Ok(Source::Text("a".into())));
        assert_eq!(source(json!(["a"])), Ok(Source::Text("a".into())));
        assert_eq!(source(json!([1, 2])), Ok(Source::Tokens(vec![1, 2])));
        assert_eq!(source(json!([[1, 2]])), Ok(Source::Tokens(vec![1, 2])));
        for bad in [
            json!(["a", "b"]),
            json!([]),
            json!([1, -2]),
            json!(3),
            json!([[["a"]]]),
        ] {
            assert!(source(bad.clone()).is_err(), "{bad}");
        }
    }
}

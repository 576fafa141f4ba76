//! Conversations to prompts, by the template that comes with the model.

use candle_core::quantized::gguf_file::Content;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind};
use serde_json::{Map, Value, json};

use super::config::text;
use super::{ModelError, Tokenizer};

/// The template's name in its environment.
const NAME: &str = "chat";
/// Encloses the number of a message in place of its content.
const MARK: char = '\u{f8ff}';

/// A chat template.
///
/// A message is an object with a `role` and a `content`: text, a list of text parts, or null beside
/// `tool_calls`, which become text as the model writes them itself.
pub struct ChatTemplate {
    environment: Environment<'static>,
}

/// A message as the template sees it.
struct Message {
    fields: Map<String, Value>,
    content: String,
}

impl ChatTemplate {
    pub(super) fn from_gguf(content: &Content) -> Result<Self, ModelError> {
        Self::new(text(content, "tokenizer.chat_template")?)
    }

    /// Compiles a template.
    ///
    /// # Errors
    /// [`ModelError::Template`] when its syntax is wrong.
    pub fn new(source: &str) -> Result<Self, ModelError> {
        let mut environment = Environment::new();
        // As the field's chat templates expect it.
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(wrong)?;
        environment.set_syntax(syntax);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |why: String| {
            Err::<String, _>(minijinja::Error::new(ErrorKind::InvalidOperation, why))
        });
        environment
            .add_template_owned(NAME, source.to_owned())
            .map_err(wrong)?;
        Ok(Self { environment })
    }

    /// The text of a prompt.
    ///
    /// # Errors
    /// [`ModelError::Message`] for messages that are none, [`ModelError::Template`] when the template
    /// refuses them.
    pub fn render(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<String, ModelError> {
        let messages: Vec<Value> = parse(messages)?.into_iter().map(Message::whole).collect();
        self.fill(&messages, tools, add_generation_prompt)
    }

    /// The tokens of a prompt. Special tokens come from the template alone: their names in a
    /// message's content are text. Each content is encoded by itself, so a prompt begins with the
    /// tokens of the prompt and the answer before it, if the answer's tokens were those that its
    /// text is encoded to.
    ///
    /// The template sees marks in place of the contents, so it cannot look into them.
    ///
    /// # Errors
    /// As for [`render`](Self::render), and [`ModelError::Tokenizer`].
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<Vec<u32>, ModelError> {
        let messages = parse(messages)?;
        let marked: Vec<Value> = messages
            .iter()
            .enumerate()
            .map(|(index, message)| message.with_content(format!("{MARK}{index}{MARK}")))
            .collect();
        let text = self.fill(&marked, tools, add_generation_prompt)?;
        let mut tokens = Vec::new();
        // Every other piece is what a pair of marks encloses.
        for (at, piece) in text.split(MARK).enumerate() {
            let content = piece
                .parse()
                .ok()
                .and_then(|index: usize| messages.get(index));
            match content.filter(|_| at % 2 == 1) {
                Some(message) => tokens.extend(tokenizer.encode_plain(&message.content)?),
                None => tokens.extend(tokenizer.encode(piece)?),
            }
        }
        Ok(tokens)
    }

    fn fill(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<String, ModelError> {
        let template = self.environment.get_template(NAME).map_err(wrong)?;
        let values = json!({
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        });
        template.render(Serde(values)).map_err(wrong)
    }
}

fn wrong(error: minijinja::Error) -> ModelError {
    ModelError::Template {
        why: error.to_string(),
    }
}

impl Message {
    fn with_content(&self, content: String) -> Value {
        let mut fields = self.fields.clone();
        fields.insert("content".to_owned(), content.into());
        Value::Object(fields)
    }

    fn whole(self) -> Value {
        self.with_content(self.content.clone())
    }
}

fn parse(messages: &[Value]) -> Result<Vec<Message>, ModelError> {
    let parsed = messages.iter().enumerate().map(|(index, message)| {
        Message::parse(message).map_err(|why| ModelError::Message {
            index,
            why: why.to_owned(),
        })
    });
    parsed.collect()
}

impl Message {
    fn parse(message: &Value) -> Result<Self, &'static str> {
        let fields = message.as_object().ok_or("it is no object")?;
        let role = fields.get("role").and_then(Value::as_str);
        let role = role.ok_or("it has no role")?;
        // The role stands in the template's own part of the prompt.
        let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
        if role.is_empty() || role.len() > 64 || !role.chars().all(is_word) {
            return Err("its role is no word");
        }
        let mut content = content(fields.get("content"))?;
        if let Some(calls) = fields.get("tool_calls").filter(|calls| !calls.is_null()) {
            let calls = calls.as_array().ok_or("its tool calls are no list")?;
            if !calls.is_empty() {
                content.push_str(&tool_calls(calls)?);
            }
        }
        // Only what cannot carry names of special tokens into the template's part.
        let mut fields = Map::new();
        fields.insert("role".to_owned(), role.into());
        Ok(Self { fields, content })
    }
}

/// A content as text.
fn content(value: Option<&Value>) -> Result<String, &'static str> {
    match value {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let texts: Option<Vec<&str>> = parts.iter().map(part).collect();
            let texts = texts.ok_or("its content has a part that is no text")?;
            Ok(texts.join("\n"))
        }
        Some(_) => Err("its content is neither text nor a list of parts"),
    }
}

fn part(part: &Value) -> Option<&str> {
    match part {
        Value::String(text) => Some(text),
        Value::Object(_) => {
            let kind = part.get("type").and_then(Value::as_str);
            let is_text = matches!(kind, None | Some("text" | "input_text" | "output_text"));
            part.get("text").and_then(Value::as_str).filter(|_| is_text)
        }
        _ => None,
    }
}

/// Tool calls as the model was taught to write them.
fn tool_calls(calls: &[Value]) -> Result<String, &'static str> {
    let call = |call: &Value| {
        let function = call.get("function")?;
        let name = function.get("name")?.as_str()?;
        let arguments = match function.get("arguments") {
            // OpenAI's API has arguments as JSON within a string.
            Some(Value::String(text)) => {
                serde_json::from_str(text).unwrap_or_else(|_| Value::from(text.as_str()))
            }
            Some(other) => other.clone(),
            None => json!({}),
        };
        Some(json!({ "name": name, "arguments": arguments }))
    };
    let calls: Option<Vec<Value>> = calls.iter().map(call).collect();
    let calls = calls.ok_or("it has a tool call without a function's name")?;
    Ok(format!("<tool_call>{}</tool_call>", Value::from(calls)))
}

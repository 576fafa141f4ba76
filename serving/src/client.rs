//! A client of the chat endpoint that sees what a person sees: when the first text arrives, and the text.

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use serde_json::{Value, json};
use thiserror::Error;

/// Longest answer that is read, bytes.
const MAX_ANSWER: usize = 64 << 20;

/// Why a turn has no answer.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The connection failed.
    #[error("{url}: {source}")]
    Http {
        /// What was asked.
        url: String,
        /// Why.
        #[source]
        source: reqwest::Error,
    },
    /// The server refused.
    #[error("{url} answered {status}: {body}")]
    Status {
        /// What was asked.
        url: String,
        /// HTTP status.
        status: u16,
        /// What it said.
        body: String,
    },
    /// An error event in the stream.
    #[error("the answer broke off: {0}")]
    BrokeOff(String),
    /// Not what an OpenAI-compatible server sends.
    #[error("the answer is malformed: {0}")]
    Malformed(String),
}

/// One turn of a conversation, as its client saw it.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The text.
    pub text: String,
    /// `stop` or `length`.
    pub finish_reason: String,
    /// From sending the request until the first text arrived.
    pub ttft: Duration,
    /// Until the end.
    pub total: Duration,
    /// `usage.prompt_tokens`.
    pub prompt_tokens: u64,
    /// `usage.completion_tokens`.
    pub completion_tokens: u64,
    /// What router and nodes report of it; null when they were not asked.
    pub report: Value,
}

/// A client with its key.
#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    base: String,
    key: String,
}

/// What is asked in a turn.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// The conversation, if it has a name.
    pub conversation: Option<&'a str>,
    /// Everything said so far.
    pub messages: &'a [Value],
    /// Most tokens of the answer.
    pub max_tokens: u64,
    /// Goes on to `max_tokens`, whatever the model says.
    pub ignore_eos: bool,
}

impl Client {
    /// A client of the server at `base`, which is known there by `key`.
    ///
    /// # Errors
    /// [`ClientError::Http`] when no HTTP client can be made.
    pub fn new(base: &str, key: &str) -> Result<Self, ClientError> {
        let http = reqwest::Client::builder()
            .connect_timeout(Duration::from_secs(5))
            .read_timeout(Duration::from_secs(300))
            .no_proxy()
            .build()
            .map_err(|source| ClientError::Http {
                url: base.to_owned(),
                source,
            })?;
        Ok(Self {
            http,
            base: base.trim_end_matches('/').to_owned(),
            key: key.to_owned(),
        })
    }

    /// Asks, and reads the streamed answer; `seen` gets each piece of text as it arrives.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn chat(
        &self,
        ask: Ask<'_>,
        mut seen: impl FnMut(&str),
    ) -> Result<Answer, ClientError> {
        let url = format!("{}/v1/chat/completions", self.base);
        let mut body = json!({
            "messages": ask.messages,
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "stream": true,
            "stream_options": {"include_usage": true},
            "ignore_eos": ask.ignore_eos,
        });
        if let (Some(id), Some(fields)) = (ask.conversation, body.as_object_mut()) {
            fields.insert("conversation_id".into(), id.into());
        }
        let http = |source| ClientError::Http {
            url: url.clone(),
            source,
        };
        let begin = Instant::now();
        let response = self
            .http
            .post(&url)
            .bearer_auth(&self.key)
            .header("X-KVX-Report", "1")
            .json(&body)
            .send()
            .await
            .map_err(http)?;
        let status = response.status();
        if !status.is_success() {
            let body = response.text().await.unwrap_or_default();
            return Err(ClientError::Status {
                url,
                status: status.as_u16(),
                body,
            });
        }
        let mut reading = Reading::default();
        let mut stream = response.bytes_stream();
        while let Some(piece) = stream.next().await {
            reading.take(&piece.map_err(http)?, begin, &mut seen)?;
        }
        reading.finish(begin)
    }

    /// Asks a node to forget the blocks that nobody holds.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn reset_prefix_cache(&self, node: &str) -> Result<(), ClientError> {
        let url = format!("{node}/reset_prefix_cache");
        let response = self.http.post(&url).send().await;
        let response = response.map_err(|source| ClientError::Http {
            url: url.clone(),
            source,
        })?;
        if response.status().is_success() {
            return Ok(());
        }
        Err(ClientError::Status {
            url,
            status: response.status().as_u16(),
            body: response.text().await.unwrap_or_default(),
        })
    }

    /// The name of the model that is served.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn model(&self) -> Result<String, ClientError> {
        let url = format!("{}/v1/models", self.base);
        let list = async {
            let asked = self.http.get(&url).bearer_auth(&self.key);
            asked.send().await?.json::<Value>().await
        }
        .await;
        let list = list.map_err(|source| ClientError::Http { url, source })?;
        list.pointer("/data/0/id")
            .and_then(Value::as_str)
            .map(str::to_owned)
            .ok_or_else(|| ClientError::Malformed("no model is listed".into()))
    }

    /// A node's or the router's metrics, as text.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn metrics(&self, of: &str) -> Result<String, ClientError> {
        let url = format!("{of}/metrics");
        let text = async { self.http.get(&url).send().await?.text().await }.await;
        text.map_err(|source| ClientError::Http { url, source })
    }
}

/// The sum of a metric's samples whose line contains `labels`, from a text in Prometheus' format.
#[must_use]
pub fn metric(text: &str, name: &str, labels: &str) -> f64 {
    text.lines()
        .filter(|line| {
            line.strip_prefix(name)
                .is_some_and(|rest| rest.starts_with(['{', ' ']))
                && line.contains(labels)
        })
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .sum()
}

/// A streamed answer on its way.
#[derive(Debug, Default)]
struct Reading {
    pending: Vec<u8>,
    text: String,
    finish_reason: Option<String>,
    first: Option<Duration>,
    usage: Value,
    report: Value,
    size: usize,
}

impl Reading {
    fn take(
        &mut self,
        bytes: &[u8],
        begin: Instant,
        seen: &mut impl FnMut(&str),
    ) -> Result<(), ClientError> {
        self.size = self.size.saturating_add(bytes.len());
        if self.size > MAX_ANSWER {
            return Err(ClientError::Malformed(format!(
                "more than {MAX_ANSWER} bytes"
            )));
        }
        self.pending.extend_from_slice(bytes);
        while let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.pending.drain(..=end).collect();
            let line = String::from_utf8(line)
                .map_err(|error| ClientError::Malformed(error.to_string()))?;
            let Some(data) = line.trim_end().strip_prefix("data:") else {
                continue;
            };
            let data = data.trim_start();
            if data != "[DONE]" {
                self.event(data, begin, seen)?;
            }
        }
        Ok(())
    }

    fn event(
        &mut self,
        data: &str,
        begin: Instant,
        seen: &mut impl FnMut(&str),
    ) -> Result<(), ClientError> {
        let event: Value = serde_json::from_str(data)
            .map_err(|error| ClientError::Malformed(format!("{error}: {data}")))?;
        if let Some(error) = event.get("error").filter(|error| !error.is_null()) {
            return Err(ClientError::BrokeOff(error.to_string()));
        }
        for (name, place) in [("usage", &mut self.usage), ("kvx", &mut self.report)] {
            if let Some(value) = event.get(name).filter(|value| !value.is_null()) {
                *place = value.clone();
            }
        }
        let Some(choice) = event.get("choices").and_then(|choices| choices.get(0)) else {
            return Ok(());
        };
        if let Some(text) = choice.pointer("/delta/content").and_then(Value::as_str)
            && !text.is_empty()
        {
            self.first.get_or_insert_with(|| begin.elapsed());
            self.text.push_str(text);
            seen(text);
        }
        if let Some(reason) = choice.get("finish_reason").and_then(Value::as_str) {
            // An answer without any text has its first token here.
            self.first.get_or_insert_with(|| begin.elapsed());
            self.finish_reason = Some(reason.to_owned());
        }
        Ok(())
    }

    fn finish(self, begin: Instant) -> Result<Answer, ClientError> {
        let (Some(ttft), Some(finish_reason)) = (self.first, self.finish_reason) else {
            return Err(ClientError::BrokeOff("it ended without an end".into()));
        };
        let count = |name| self.usage.get(name).and_then(Value::as_u64).unwrap_or(0);
        Ok(Answer {
            ttft,
            finish_reason,
            total: begin.elapsed(),
            prompt_tokens: count("prompt_tokens"),
            completion_tokens: count("completion_tokens"),
            text: self.text,
            report: self.report,
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn read(pieces: &[&[u8]]) -> Result<Answer, ClientError> {
        let begin = Instant::now();
        let mut reading = Reading::default();
        for piece in pieces {
            reading.take(piece, begin, &mut |_| {})?;
        }
        reading.finish(begin)
    }

    #[test]
    fn text_split_anywhere_is_put_together() {
        let stream = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\"}}]}\n\n: comment\r\n\
            data: {\"choices\":[{\"delta\":{\"content\":\"gr\u{fc}n\"},\"finish_reason\":null}]}\n\n\
            data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}],\"kvx\":{\"a\":1}}\n\n\
            data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n";
        for at in 0..stream.len() {
            let (a, b) = stream.as_bytes().split_at(at);
            let answer = read(&[a, b]).unwrap();
            assert_eq!(answer.text, "grün");
            assert_eq!((answer.prompt_tokens, answer.completion_tokens), (7, 2));
            assert_eq!(answer.finish_reason, "stop");
            assert_eq!(answer.report, json!({"a": 1}));
        }
    }

    #[test]
    fn an_answer_that_breaks_off_is_an_error() {
        let error = read(&[b"data: {\"error\":{\"message\":\"gone\"}}\n\n"]).unwrap_err();
        assert!(error.to_string().contains("gone"));
        let error = read(&[b"data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n"]);
        assert!(matches!(error, Err(ClientError::BrokeOff(_))));
    }

    #[test]
    fn samples_of_a_metric_are_summed_by_label() {
        let text = "# TYPE a gauge\na{state=\"x\"} 2\na{state=\"y\"} 3\nab 9\na_total 4\n";
        assert!((metric(text, "a", "") - 5.0).abs() < 1e-9);
        assert!((metric(text, "a", "state=\"y\"") - 3.0).abs() < 1e-9);
    }
}

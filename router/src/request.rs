//! What a client asks for, and the bodies that are sent on.

use std::sync::LazyLock;

use axum::http::header::{self, HeaderName};
use axum::http::{HeaderMap, HeaderValue};
use bytes::Bytes;

use crate::conversation::{CONVERSATION_FIELD, CONVERSATION_HEADER};
use crate::error::ApiError;
use crate::json::{Fields, is_object, raw};

/// The endpoints that are routed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Api {
    Chat,
    Completions,
}

impl Api {
    pub fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
        }
    }
}

/// The field in which nodes say where blocks are.
pub(crate) const PARAMS: &str = "kv_transfer_params";
/// The header by which a client asks for a report on how its answer was made.
pub(crate) const REPORT_HEADER: &str = "x-kvx-report";
/// Names a request, the same on both legs.
pub(crate) const REQUEST_ID: &str = "x-request-id";

/// A request's body, of which the router's own field and what clients must not send is gone.
#[derive(Debug)]
pub(crate) struct ClientBody<'a> {
    fields: Fields<'a>,
    /// As the client wrote it.
    pub conversation: Option<String>,
    /// The client's own `kv_transfer_params`.
    pub params: Option<String>,
    pub model: String,
    /// Tokens of the prompt, by its length, and tokens to generate at most.
    pub prompt_tokens: u64,
    pub answer_tokens: u64,
    streams: bool,
    /// There are several prompts in it.
    pub many_prompts: bool,
}

/// Bytes of JSON that make up a token, about. Only loads are compared by it.
const BYTES_PER_TOKEN: u64 = 4;

/// What an answer of unlimited length counts for.
const USUAL_ANSWER_TOKENS: u64 = 256;

impl<'a> ClientBody<'a> {
    pub fn parse(bytes: &'a [u8], api: Api) -> Result<Self, ApiError> {
        let mut fields = Fields::parse_bytes(bytes).map_err(|error| {
            ApiError::bad_request(format!("the body is no JSON object: {error}"))
        })?;
        let model = fields
            .read::<String>("model")
            .map_err(|_| ApiError::bad_field("model", "model must be a string"))?
            .unwrap_or_default();
        let tokens = |name| fields.read::<u64>(name).ok().flatten();
        let answer_tokens = tokens("max_completion_tokens")
            .or_else(|| tokens("max_tokens"))
            .unwrap_or(USUAL_ANSWER_TOKENS);
        let many_prompts = api == Api::Completions && has_many(fields.get("prompt"));
        let length = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        Ok(Self {
            conversation: fields.remove(CONVERSATION_FIELD),
            params: fields.remove(PARAMS).filter(|params| is_object(params)),
            model,
            prompt_tokens: length / BYTES_PER_TOKEN,
            answer_tokens: answer_tokens.min(1 << 20),
            streams: fields.get("stream") == Some("true"),
            many_prompts,
            fields,
        })
    }

    /// Whether the answer is to come as a stream.
    pub fn streams(&self) -> bool {
        self.streams
    }

    pub fn fields(&self) -> &Fields<'a> {
        &self.fields
    }

    /// The body for prefill: one token, not streamed, and `handle` or the word that there is none.
    pub fn for_prefill(&self, handle: Option<&str>) -> Bytes {
        let mut fields = self.fields.clone();
        // A stop string would make an engine abort, and give no params.
        for name in [
            "max_completion_tokens",
            "min_tokens",
            "stream_options",
            "n",
            "best_of",
            "stop",
        ] {
            fields.remove(name);
        }
        fields.set("stream", raw(&false));
        fields.set("max_tokens", raw(&1));
        let mut params = handle
            .and_then(|handle| Fields::parse(handle).ok())
            .unwrap_or_else(|| NO_HANDLE.clone());
        params.set("do_remote_decode", raw(&true));
        params.set("do_remote_prefill", raw(&false));
        fields.set(PARAMS, raw(&params));
        fields.to_text().into()
    }

    /// The body for decode: the client's, with what prefill said. Where that is nothing, and the blocks
    /// are to be kept for a next turn, it is asked to describe them.
    pub fn for_decode(&self, params: Option<&str>, keep: bool) -> Bytes {
        let mut fields = self.fields.clone();
        if let Some(params) = params.and_then(|params| Fields::parse(params).ok()) {
            fields.set(PARAMS, raw(&params));
        } else if keep {
            fields.set(PARAMS, raw(&*NO_BLOCKS));
        }
        fields.to_text().into()
    }
}

/// What prefill is told where nothing is known: the fields are there, so that engines keep the blocks.
static NO_HANDLE: LazyLock<Fields<'static>> = LazyLock::new(|| {
    Fields::parse(
        r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#,
    )
    .unwrap_or_default()
});

/// What decode is told where no blocks are offered and its own are to be described.
static NO_BLOCKS: LazyLock<Fields<'static>> = LazyLock::new(|| {
    Fields::parse(
        r#"{"do_remote_decode":false,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#,
    )
    .unwrap_or_default()
});

/// Whether `prompt` is a list of several prompts, or of one that is itself a list of tokens.
fn has_many(prompt: Option<&str>) -> bool {
    let Some(prompt) = prompt else { return false };
    match serde_json::from_str::<Vec<&serde_json::value::RawValue>>(prompt) {
        Ok(list) if list.len() > 1 => !list
            .iter()
            .all(|item| item.get().bytes().all(|b| b.is_ascii_digit())),
        _ => false,
    }
}

/// Headers that speak of one connection only.
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Takes out headers that speak of one connection only, and the length, which may change.
pub(crate) fn end_to_end(headers: &HeaderMap) -> HeaderMap {
    let listed: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    let mut kept = headers.clone();
    for name in HOP_BY_HOP.iter().chain(&listed) {
        kept.remove(name);
    }
    kept.remove(header::CONTENT_LENGTH);
    kept
}

/// The headers for nodes: the client's, with the router's own.
pub(crate) fn for_nodes(
    headers: &HeaderMap,
    conversation: HeaderValue,
    request: &str,
) -> HeaderMap {
    let mut sent = end_to_end(headers);
    // Answers are looked into, so they must not come compressed.
    for name in [header::HOST, header::EXPECT, header::ACCEPT_ENCODING] {
        sent.remove(name);
    }
    sent.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    sent.insert(HeaderName::from_static(CONVERSATION_HEADER), conversation);
    if let Ok(value) = HeaderValue::from_str(request) {
        sent.insert(HeaderName::from_static(REQUEST_ID), value);
    }
    sent
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: &str) -> ClientBody<'_> {
        ClientBody::parse(body.as_bytes(), Api::Completions).unwrap()
    }

    #[test]
    fn prefill_gets_one_token_and_the_handle() {
        let body = parse(
            r#"{"model":"m","stream":true,"stream_options":{"a":1},"max_completion_tokens":9,"min_tokens":2,"n":3,"stop":["x"],"conversation_id":"c","kv_transfer_params":{"remote_host":"evil"},"tools":[{"z":1.0,"a":2}]}"#,
        );
        assert_eq!(body.conversation.as_deref(), Some("\"c\""));
        let sent = body.for_prefill(Some(
            r#"{"remote_host":"h","do_remote_decode":false,"x":{"y":1}}"#,
        ));
        assert_eq!(
            sent,
            r#"{"model":"m","stream":false,"tools":[{"z":1.0,"a":2}],"max_tokens":1,"kv_transfer_params":{"remote_host":"h","do_remote_decode":true,"x":{"y":1},"do_remote_prefill":false}}"#
        );
        let sent = body.for_prefill(None);
        let sent: serde_json::Value = serde_json::from_slice(&sent).unwrap();
        assert_eq!(
            sent["kv_transfer_params"],
            serde_json::json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
                "remote_block_ids": null, "remote_host": null, "remote_port": null})
        );
    }

    #[test]
    fn decode_gets_the_clients_body_and_prefills_params() {
        let body = parse(r#"{"n":2,"conversation_id":"c","stream":true,"seed":1e3}"#);
        assert_eq!(
            body.for_decode(None, false),
            r#"{"n":2,"stream":true,"seed":1e3}"#
        );
        let asked = body.for_decode(None, true);
        let asked: serde_json::Value = serde_json::from_slice(&asked).unwrap();
        assert_eq!(asked["kv_transfer_params"]["do_remote_prefill"], false);
        assert_eq!(asked["kv_transfer_params"]["do_remote_decode"], false);
        assert_eq!(
            body.for_decode(Some(r#"{"remote_host":"p","n":[ 1 ]}"#), true),
            r#"{"n":2,"stream":true,"seed":1e3,"kv_transfer_params":{"remote_host":"p","n":[ 1 ]}}"#
        );
    }

    #[test]
    fn several_prompts_are_told_from_one() {
        for (prompt, many) in [
            ("\"a\"", false),
            ("[\"a\"]", false),
            ("[1,2,3]", false),
            ("[\"a\",\"b\"]", true),
            ("[[1],[2]]", true),
            ("null", false),
        ] {
            assert_eq!(
                parse(&format!("{{\"prompt\":{prompt}}}")).many_prompts,
                many,
                "{prompt}"
            );
        }
    }

    #[test]
    fn what_is_no_request_is_refused() {
        for body in ["", "[]", "{", "{\"model\":1}", "null"] {
            let error = ClientBody::parse(body.as_bytes(), Api::Chat).unwrap_err();
            assert_eq!(error.status, 400, "{body}");
        }
    }

    #[test]
    fn headers_of_one_connection_stay_there() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, x-mine"),
            ("x-mine", "1"),
            ("keep-alive", "1"),
            ("transfer-encoding", "chunked"),
            ("content-length", "3"),
            ("host", "router"),
            ("accept-encoding", "gzip"),
            ("authorization", "Bearer k"),
            ("x-other", "2"),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        let sent = for_nodes(&headers, HeaderValue::from_static("c"), "r");
        let mut names: Vec<_> = sent.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            [
                "authorization",
                "content-type",
                "x-conversation-id",
                "x-other",
                "x-request-id"
            ]
        );
    }
}

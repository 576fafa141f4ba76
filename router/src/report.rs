//! The report on how an answer was made, for clients that ask for it with `X-KVX-Report: 1`.

use std::sync::Arc;

use axum::http::HeaderMap;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::json::raw;
use crate::request::REPORT_HEADER;

/// Whether the client asks for a report.
pub(crate) fn wanted(headers: &HeaderMap) -> bool {
    headers
        .get(REPORT_HEADER)
        .is_some_and(|value| value.as_bytes().trim_ascii() == b"1")
}

/// What the router has to say before the answer comes.
#[derive(Debug, Clone)]
pub(crate) struct Report {
    /// The prefill node's own report, as JSON.
    pub prefill: Option<Arc<str>>,
    pub router: RouterReport,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct RouterReport {
    pub hit: bool,
    pub miss_reason: Option<&'static str>,
    pub prefill_node: Option<String>,
    pub decode_node: Option<String>,
    pub prefill_ms: Option<f64>,
    /// The way taken where the usual one was not open.
    pub fallback: Option<&'static str>,
}

impl Report {
    /// The whole report, with what the answering node said.
    pub fn with_decode(&self, decode: Option<&str>) -> Box<RawValue> {
        #[derive(Serialize)]
        struct Whole<'a> {
            prefill: Option<Box<RawValue>>,
            decode: Option<Box<RawValue>>,
            router: &'a RouterReport,
        }
        let parse = |text: &str| RawValue::from_string(text.to_owned()).ok();
        raw(&Whole {
            prefill: self.prefill.as_deref().and_then(parse),
            decode: decode.and_then(parse),
            router: &self.router,
        })
    }
}

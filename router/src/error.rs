//! Errors in the form in which OpenAI's API has them.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::http::BodyError;

/// What a client is told when it gets no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub status: StatusCode,
    pub kind: &'static str,
    pub code: Option<&'static str>,
    pub param: Option<&'static str>,
    pub message: String,
}

impl ApiError {
    /// The request is wrong, and would be again.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "invalid_request_error",
            code: None,
            param: None,
            message: message.into(),
        }
    }

    /// The same, because of one field.
    pub fn bad_field(param: &'static str, message: impl Into<String>) -> Self {
        Self {
            param: Some(param),
            ..Self::bad_request(message)
        }
    }

    /// The request is wrong in a way that has a status of its own.
    pub fn refused(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            code: Some(code),
            ..Self::bad_request(message)
        }
    }

    /// The nodes are at fault.
    pub fn upstream(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            kind: "upstream_error",
            ..Self::refused(status, code, message)
        }
    }

    /// No node is able to serve at the moment.
    pub fn no_node() -> Self {
        Self::upstream(
            StatusCode::SERVICE_UNAVAILABLE,
            "no_node",
            "no node is able to serve at the moment",
        )
    }

    /// The JSON of it.
    pub fn body(&self) -> String {
        #[derive(Serialize)]
        struct Body<'a> {
            error: Inner<'a>,
        }
        #[derive(Serialize)]
        struct Inner<'a> {
            message: &'a str,
            r#type: &'a str,
            param: Option<&'a str>,
            code: Option<&'a str>,
        }
        let error = Inner {
            message: &self.message,
            r#type: self.kind,
            param: self.param,
            code: self.code,
        };
        serde_json::to_string(&Body { error }).unwrap_or_default()
    }
}

impl From<BodyError> for ApiError {
    fn from(error: BodyError) -> Self {
        let message = error.to_string();
        match error {
            BodyError::TooLarge { .. } => {
                Self::refused(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
            }
            BodyError::Late(_) => {
                Self::refused(StatusCode::REQUEST_TIMEOUT, "request_timeout", message)
            }
            BodyError::Broken(_) => Self::bad_request(message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let json = (header::CONTENT_TYPE, "application/json");
        let mut response = (self.status, [json], self.body()).into_response();
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_has_openais_form() {
        let error = ApiError::bad_field("model", "no \"such\" model");
        assert_eq!(
            error.body(),
            r#"{"error":{"message":"no \"such\" model","type":"invalid_request_error","param":"model","code":null}}"#
        );
        let response = ApiError::no_node().into_response();
        assert_eq!(response.status(), 503);
        assert_eq!(response.headers()["retry-after"], "1");
    }
}

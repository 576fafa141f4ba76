//! Errors in OpenAI's form.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use kvx_router::http::BodyError;
use serde_json::{Value, json};

use crate::node::{Failure, Refused};

/// Seconds after which a node that has too much to do is to be asked again: some answers end in that
/// time.
const RETRY_AFTER: u16 = 10;

/// An error that a client is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    status: StatusCode,
    kind: &'static str,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
    retry_after: Option<u16>,
}

impl ApiError {
    /// The request is wrong.
    #[must_use]
    pub fn invalid(message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "invalid_request_error",
            message: message.into(),
            param: None,
            code: None,
            retry_after: None,
        }
    }

    /// A field of the request is wrong.
    #[must_use]
    pub fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            param: Some(param.into()),
            ..Self::invalid(message)
        }
    }

    /// There is no such thing.
    #[must_use]
    pub fn not_found(message: impl Into<String>, code: Option<&'static str>) -> Self {
        Self {
            status: StatusCode::NOT_FOUND,
            code,
            ..Self::invalid(message)
        }
    }

    /// The node cannot serve it now.
    #[must_use]
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::SERVICE_UNAVAILABLE,
            kind: "server_error",
            ..Self::invalid(message)
        }
    }

    /// The node has too much to do now.
    #[must_use]
    pub fn busy(message: impl Into<String>) -> Self {
        Self {
            code: Some("node_busy"),
            retry_after: Some(RETRY_AFTER),
            ..Self::unavailable(message)
        }
    }

    /// Something failed that should not.
    #[must_use]
    pub fn internal(message: impl Into<String>) -> Self {
        Self {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            kind: "server_error",
            ..Self::invalid(message)
        }
    }

    /// With another status.
    #[must_use]
    pub fn status(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }

    /// With a code for programs.
    #[must_use]
    pub fn code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// The body.
    #[must_use]
    pub fn body(&self) -> Value {
        json!({"error": {
            "message": self.message, "type": self.kind, "param": self.param, "code": self.code,
        }})
    }
}

impl From<BodyError> for ApiError {
    fn from(error: BodyError) -> Self {
        let refused = Self::invalid(error.to_string());
        match error {
            BodyError::TooLarge { .. } => refused.status(StatusCode::PAYLOAD_TOO_LARGE),
            BodyError::Late(_) => refused.status(StatusCode::REQUEST_TIMEOUT),
            _ => refused,
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after {
            let headers = response.headers_mut();
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::ShuttingDown => Self::unavailable(failure.to_string()),
            Failure::Overdue { .. } => Self::busy(failure.to_string()),
            Failure::Model(_) | Failure::Internal(_) => Self::internal(failure.to_string()),
        }
    }
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Busy => Self::busy(refused.to_string()),
            Refused::ShuttingDown => Self::unavailable(refused.to_string()),
        }
    }
}

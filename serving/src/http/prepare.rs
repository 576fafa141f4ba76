//! From headers and body to a request for the engine thread.

use std::sync::Arc;
use std::time::Instant;

use axum::http::HeaderMap;
use tokio::sync::mpsc::UnboundedReceiver;

use super::body::{Asked, Source};
use super::error::ApiError;
use crate::model::ModelError;
use crate::node::{Event, Node, Owner, Request, salt_of, tenant_of};

/// Longest request id that is taken over from a header: longer ones would not fit a descriptor's
/// names.
const MAX_REQUEST_ID: usize = 128;

/// What the headers say.
#[derive(Debug, Clone, Default)]
pub struct Caller {
    /// Name of the request.
    pub request_id: String,
    /// Whose blocks it may use.
    pub owner: Owner,
    /// Whether the answer should say where time and tokens went.
    pub report: bool,
}

impl Caller {
    /// Reads the headers.
    #[must_use]
    pub fn of(headers: &HeaderMap) -> Self {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let key = kvx_router::api_key(headers);
        let given = text("x-request-id").filter(|id| {
            let visible = |byte: u8| byte.is_ascii_graphic();
            (1..=MAX_REQUEST_ID).contains(&id.len()) && id.bytes().all(visible)
        });
        let request_id = match given {
            Some(id) => id.to_owned(),
            None => format!("{:032x}", rand::random::<u128>()),
        };
        let conversation = headers.get("x-conversation-id");
        Self {
            request_id,
            owner: Owner {
                tenant: key.map(tenant_of),
                conversation: conversation
                    .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned()),
            },
            report: text("x-kvx-report").is_some_and(|value| value.trim() == "1"),
        }
    }
}

/// A request, ready for the engine thread, and where its answers will come.
pub struct Prepared {
    /// The request.
    pub request: Request,
    /// The answers.
    pub events: UnboundedReceiver<Event>,
}

/// Makes a request: tokens, hashes, limits. Takes some milliseconds for a long prompt.
///
/// # Errors
/// [`ApiError`] when the prompt cannot be rendered or does not fit.
pub fn prepare(
    node: &Arc<Node>,
    caller: &Caller,
    prefix: &str,
    asked: Asked,
    arrived: Instant,
) -> Result<Prepared, ApiError> {
    let tokens = tokens(node, &asked.source)?;
    if tokens.is_empty() {
        return Err(ApiError::invalid(
            "the prompt is empty; give it at least one token",
        ));
    }
    let vocab = node.loaded().tokenizer.vocab();
    if let Some(token) = tokens.iter().find(|token| **token as usize >= vocab) {
        return Err(ApiError::field(
            "prompt",
            format!("token {token} is outside the vocabulary of {vocab} tokens"),
        ));
    }
    let room = room(node, tokens.len())?;
    let mut limits = asked.limits;
    limits.max_tokens = limits.max_tokens.min(room);
    limits.min_tokens = limits.min_tokens.min(limits.max_tokens);
    let salt = salt_of(caller.owner.tenant.as_deref(), asked.cache_salt.as_deref());
    let mut chain = node
        .chain(&salt)
        .map_err(|error| ApiError::internal(error.to_string()))?;
    let hashes = chain.extend(&tokens);
    let (output, events) = tokio::sync::mpsc::unbounded_channel();
    Ok(Prepared {
        request: Request {
            id: format!("{prefix}{}", caller.request_id),
            tokens,
            chain,
            hashes,
            owner: caller.owner.clone(),
            transfer: asked.transfer,
            sampling: asked.sampling,
            limits,
            choices: asked.choices,
            output,
            arrived,
        },
        events,
    })
}

/// Tokens that an answer to a prompt may have.
fn room(node: &Node, prompt: usize) -> Result<usize, ApiError> {
    let context = node.max_tokens();
    if prompt >= context {
        let message = format!(
            "this model's maximum context length is {context} tokens, your prompt has {prompt}; \
             shorten it"
        );
        return Err(ApiError::invalid(message).code("context_length_exceeded"));
    }
    let pool = node.pool_tokens();
    if prompt >= pool {
        let message = format!(
            "the prompt has {prompt} tokens, this node's KV cache holds {pool}; shorten it, or raise \
             --kv-cache-mib"
        );
        return Err(ApiError::invalid(message).code("context_length_exceeded"));
    }
    Ok(context.min(pool).saturating_sub(prompt))
}

fn tokens(node: &Node, source: &Source) -> Result<Vec<u32>, ApiError> {
    let loaded = node.loaded();
    let tokens = match source {
        Source::Messages {
            messages,
            tools,
            add_generation_prompt,
        } => loaded.template.encode(
            &loaded.tokenizer,
            messages,
            tools.as_ref(),
            *add_generation_prompt,
        ),
        Source::Text(text) => loaded.tokenizer.encode(text),
        Source::Tokens(tokens) => Ok(tokens.clone()),
    };
    tokens.map_err(|error| match error {
        ModelError::Message { .. } | ModelError::Template { .. } => {
            ApiError::field("messages", error.to_string())
        }
        other => ApiError::invalid(other.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(headers: &[(&'static str, &str)]) -> Caller {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, value.parse().unwrap());
        }
        Caller::of(&map)
    }

    #[test]
    fn a_key_makes_a_tenant() {
        let tenant = |value| caller(&[("authorization", value)]).owner.tenant;
        assert_eq!(tenant("Bearer k"), Some(tenant_of(b"k")));
        assert_eq!(tenant("bearer  k "), Some(tenant_of(b"k")));
        assert_eq!(tenant("Bearer "), None);
        // Other schemes have tenants, too, as at the router.
        assert_eq!(tenant("Basic k"), Some(tenant_of(b"Basic k")));
        assert_ne!(tenant("Basic k"), tenant("Basic l"));
        assert_eq!(caller(&[]).owner.tenant, None);
    }

    #[test]
    fn only_sensible_request_ids_are_taken_over() {
        let id = |value: &str| caller(&[("x-request-id", value)]).request_id;
        assert_eq!(id("abc-1"), "abc-1");
        assert_eq!(id("a b").len(), 32);
        assert_eq!(id(&"x".repeat(500)).len(), 32);
    }
}

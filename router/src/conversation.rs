//! Who talks, and about what: tenants, conversation ids, and the keys made of them.

use std::sync::Arc;

use axum::http::{HeaderMap, HeaderValue, header};

use crate::error::ApiError;

/// The header in which a client may name its conversation, and in which nodes are told of it.
pub(crate) const CONVERSATION_HEADER: &str = "x-conversation-id";
/// The field in which a client may name its conversation.
pub(crate) const CONVERSATION_FIELD: &str = "conversation_id";

/// Longer names are refused: they are kept for each conversation.
const MAX_ID_BYTES: usize = 256;

/// Names something within the router. Made by hashing, so that all keys have the same small size.
pub(crate) type Key = [u8; 32];

/// Hashes parts so that no two lists of parts give the same bytes.
pub(crate) fn key(domain: &str, parts: &[&[u8]]) -> Key {
    let mut hasher = blake3::Hasher::new();
    for part in std::iter::once(domain.as_bytes()).chain(parts.iter().copied()) {
        // Lengths are far below 2^64.
        hasher.update(&u64::try_from(part.len()).unwrap_or(u64::MAX).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize().into()
}

/// Whose request it is: named as the engines name it, by a hash of the API key, so that the key itself
/// is not kept. All requests without a key are one tenant's.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Tenant(String);

impl Tenant {
    pub fn of(headers: &HeaderMap) -> Self {
        match api_key(headers) {
            Some(key) => {
                let hash = blake3::hash(key).to_hex();
                Self(hash.as_str().chars().take(32).collect())
            }
            None => Self(String::new()),
        }
    }

    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// The API key of a request: that of `Authorization: Bearer KEY`; of another scheme the whole value. Engines
/// that keep tenants apart use the same, so that router and engines mean the same tenant.
#[must_use]
pub fn api_key(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let key = match value.split_at_checked(7) {
        Some((scheme, key)) if scheme.eq_ignore_ascii_case(b"bearer ") => key,
        _ => value,
    };
    let key = key.trim_ascii();
    (!key.is_empty()).then_some(key)
}

/// The name of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ConversationId(Arc<str>);

impl ConversationId {
    /// What the client calls it, if it does: the body's field, else the header.
    pub fn given(field: Option<&str>, headers: &HeaderMap) -> Result<Option<Self>, ApiError> {
        if let Some(raw) = field.filter(|raw| raw.trim() != "null") {
            let name: String = serde_json::from_str(raw).map_err(|_| {
                ApiError::bad_field(CONVERSATION_FIELD, "conversation_id must be a string")
            })?;
            return Self::checked(&name, "conversation_id").map(Some);
        }
        let Some(value) = headers.get(CONVERSATION_HEADER) else {
            return Ok(None);
        };
        let name = std::str::from_utf8(value.as_bytes()).map_err(|_| {
            ApiError::bad_field(CONVERSATION_FIELD, "X-Conversation-ID must be UTF-8")
        })?;
        Self::checked(name, "X-Conversation-ID").map(Some)
    }

    fn checked(name: &str, place: &str) -> Result<Self, ApiError> {
        let wrong = |what: String| {
            Err(ApiError::bad_field(
                CONVERSATION_FIELD,
                format!("{place} {what}"),
            ))
        };
        if name.trim().is_empty() {
            return wrong("must not be empty; leave it out to have the conversation recognised by its messages".to_owned());
        }
        if name.len() > MAX_ID_BYTES {
            return wrong(format!(
                "has {} bytes; at most {MAX_ID_BYTES} are allowed",
                name.len()
            ));
        }
        if name.chars().any(char::is_control) {
            return wrong("must not contain control characters".to_owned());
        }
        Ok(Self(name.into()))
    }

    /// A new name, for a conversation to which the client gives none.
    pub fn generated() -> Self {
        Self(format!("kvx-{:032x}", rand::random::<u128>()).into())
    }

    /// A name that [`generated`](Self::generated) gave.
    pub fn again(name: Arc<str>) -> Self {
        Self(name)
    }

    pub fn name(&self) -> &Arc<str> {
        &self.0
    }

    /// What nodes are told. They bind blocks to it, so it is the same in every turn; what a header
    /// would not carry as it is goes as a hash.
    pub fn header_value(&self) -> HeaderValue {
        let plain = self.0.trim() == &*self.0 && self.0.bytes().all(|b| matches!(b, b' '..=b'~'));
        let value = if plain {
            HeaderValue::from_str(&self.0).ok()
        } else {
            None
        };
        value.unwrap_or_else(|| {
            let hash = blake3::hash(self.0.as_bytes()).to_hex();
            HeaderValue::from_str(&format!("kvx-h-{hash}"))
                .unwrap_or_else(|_| HeaderValue::from_static("kvx-h"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &'static str, value: &[u8]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(name, HeaderValue::from_bytes(value).unwrap());
        headers
    }

    #[test]
    fn the_field_comes_before_the_header() {
        let by_header = headers(CONVERSATION_HEADER, b"from-header");
        let given = |field| ConversationId::given(field, &by_header).unwrap().unwrap();
        assert_eq!(&**given(Some("\"from-field\"")).name(), "from-field");
        assert_eq!(&**given(None).name(), "from-header");
        assert_eq!(&**given(Some("null")).name(), "from-header");
        assert_eq!(
            ConversationId::given(None, &HeaderMap::new()).unwrap(),
            None
        );
    }

    #[test]
    fn bad_names_are_refused_with_the_place_they_stood_in() {
        let none = HeaderMap::new();
        let long = format!("\"{}\"", "x".repeat(257));
        for field in [
            "\"\"",
            "\" \"",
            &long,
            "\"a\\nb\"",
            "\"a\\u0000\"",
            "\"\\u0085\"",
            "7",
            "[]",
            "true",
        ] {
            let error = ConversationId::given(Some(field), &none).unwrap_err();
            assert_eq!(error.status, 400, "{field}");
            assert!(error.message.starts_with("conversation_id"), "{error:?}");
        }
        for value in [&b""[..], b"a\tb", b"\xff", "x".repeat(257).as_bytes()] {
            let error =
                ConversationId::given(None, &headers(CONVERSATION_HEADER, value)).unwrap_err();
            assert!(error.message.starts_with("X-Conversation-ID"), "{error:?}");
        }
        let most = format!("\"{}\"", "x".repeat(256));
        assert!(ConversationId::given(Some(&most), &none).is_ok());
    }

    #[test]
    fn nodes_are_told_plain_names_as_they_are_and_others_by_hash() {
        let value = |name: &str| ConversationId::checked(name, "").unwrap().header_value();
        assert_eq!(value("chat 7/a"), "chat 7/a");
        for name in ["größe", " a", "a ", "日本"] {
            let hash = value(name);
            assert!(hash.to_str().unwrap().starts_with("kvx-h-"));
            assert_eq!(hash, value(name));
        }
        assert_ne!(value("ä"), value("ö"));
    }

    #[test]
    fn tenants_are_told_apart_by_key_alone() {
        let tenant = |value: &[u8]| Tenant::of(&headers("authorization", value));
        assert_eq!(tenant(b"Bearer a"), tenant(b"bearer  a "));
        assert_ne!(tenant(b"Bearer a"), tenant(b"Bearer b"));
        assert_eq!(tenant(b"Bearer "), Tenant::of(&HeaderMap::new()));
        assert_eq!(tenant(b"Bearer a").0, blake3::hash(b"a").to_hex()[..32]);
    }

    #[test]
    fn keys_depend_on_where_parts_end() {
        assert_ne!(key("d", &[b"ab", b"c"]), key("d", &[b"a", b"bc"]));
        assert_ne!(key("d", &[b"a"]), key("e", &[b"a"]));
    }
}

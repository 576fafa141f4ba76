//! The names that travel between engines, one type each, so that none is mistaken for another.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Longest accepted name, in bytes. NIXL agent names and vLLM engine ids are UUID-sized; the limit
/// leaves room for suffixes and keeps a hostile descriptor from carrying a megabyte here.
pub const MAX_NAME_BYTES: usize = 256;

/// Why a name was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NameError {
    /// The name is empty.
    #[error("the {what} is empty; give it at least one byte")]
    Empty {
        /// Which kind of name.
        what: &'static str,
    },
    /// The name is longer than [`MAX_NAME_BYTES`].
    #[error("the {what} has {len} bytes; at most {MAX_NAME_BYTES} are accepted")]
    TooLong {
        /// Which kind of name.
        what: &'static str,
        /// Its length in bytes.
        len: usize,
    },
    /// The name holds a control character (NUL would end a C string early).
    #[error("the {what} holds a control character at byte {at}; use printable characters only")]
    Control {
        /// Which kind of name.
        what: &'static str,
        /// Byte offset of the character.
        at: usize,
    },
}

macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            /// Checks and wraps a name.
            ///
            /// # Errors
            /// [`NameError`] when it is empty, longer than [`MAX_NAME_BYTES`] or holds a control
            /// character.
            pub fn new(name: impl AsRef<str>) -> Result<Self, NameError> {
                let name = name.as_ref();
                if name.is_empty() {
                    return Err(NameError::Empty { what: $what });
                }
                if name.len() > MAX_NAME_BYTES {
                    return Err(NameError::TooLong { what: $what, len: name.len() });
                }
                if let Some((at, _)) = name.char_indices().find(|(_, c)| c.is_control()) {
                    return Err(NameError::Control { what: $what, at });
                }
                Ok(Self(Arc::from(name)))
            }

            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = NameError;
            fn try_from(name: String) -> Result<Self, NameError> {
                Self::new(name)
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.as_str().to_owned()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:?})"), self.as_str())
            }
        }
    };
}

name_type!(
    /// One serving process, as routers and peers name it (`remote_engine_id`).
    EngineId,
    "engine id"
);
name_type!(
    /// One NIXL agent. An engine has one that serves, and one per peer that it reads from.
    AgentName,
    "agent name"
);
name_type!(
    /// The holder's name of the request whose blocks are described (`remote_request_id`).
    RequestId,
    "request id"
);

/// One life of an engine: drawn at random at every start, never zero, so that a restarted engine is
/// never taken for its predecessor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Incarnation(pub u64);

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The index of a block within its pool. Not a token index and not a byte offset.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct BlockId(pub u32);

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A lease of one holder incarnation; never reused within it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseId(pub u64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Which word of the holder's word table belongs to a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WordSlot(pub u32);

/// The value of a lease word while the lease holds. Any other value means that the lease has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseWord(pub u64);

/// The place of a rank in its engine's parallel group.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
pub struct Rank {
    /// Pipeline-parallel index.
    pub pp: u32,
    /// Tensor-parallel index.
    pub tp: u32,
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pp{}/tp{}", self.pp, self.tp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        assert!(EngineId::new("decode-0").is_ok());
        assert!(EngineId::new("é\u{1F600}").is_ok());
        assert_eq!(
            EngineId::new(""),
            Err(NameError::Empty { what: "engine id" })
        );
        assert_eq!(
            AgentName::new("a\0b"),
            Err(NameError::Control {
                what: "agent name",
                at: 1
            })
        );
        assert!(matches!(
            RequestId::new("x".repeat(MAX_NAME_BYTES + 1)),
            Err(NameError::TooLong { len: 257, .. })
        ));
    }

    #[test]
    fn names_are_checked_when_deserialised() {
        assert!(serde_json::from_str::<EngineId>("\"a\\u0000\"").is_err());
        let id: EngineId = serde_json::from_str("\"a\"").unwrap();
        assert_eq!(serde_json::to_string(&id).unwrap(), "\"a\"");
    }
}

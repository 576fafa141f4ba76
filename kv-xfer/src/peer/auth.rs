//! The key that engines of one cluster share, and the tags made with it.

use std::fmt;

/// Context string of the key derivation; a different purpose needs a different string.
const DERIVE_CONTEXT: &str = "kv-xfer 2026 cluster key: cards and side-channel requests";

/// A secret shared by all engines of a cluster. Its `Debug` form does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct ClusterKey([u8; 32]);

impl ClusterKey {
    /// Derives the key from a secret of any length (BLAKE3 key derivation).
    #[must_use]
    pub fn derive(secret: &[u8]) -> Self {
        Self(blake3::derive_key(DERIVE_CONTEXT, secret))
    }

    /// The tag of `parts` for `purpose`. Lengths are part of what is tagged, so that no two lists of
    /// parts share a tag.
    pub(crate) fn tag(&self, purpose: &'static str, parts: &[&[u8]]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        for part in std::iter::once(&purpose.as_bytes()).chain(parts) {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        hasher.finalize()
    }

    /// Whether `tag` is the tag of `parts` for `purpose`; compares in constant time.
    pub(crate) fn verify(&self, purpose: &'static str, parts: &[&[u8]], tag: &[u8]) -> bool {
        // `blake3::Hash` compares with byte slices of its length in constant time.
        <[u8; 32]>::try_from(tag).is_ok_and(|tag| self.tag(purpose, parts) == tag)
    }
}

impl fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_depend_on_key_purpose_and_cut() {
        let key = ClusterKey::derive(b"secret");
        let tag = key.tag("a", &[b"xy", b"z"]);
        assert!(key.verify("a", &[b"xy", b"z"], tag.as_bytes()));
        assert!(!key.verify("b", &[b"xy", b"z"], tag.as_bytes()));
        assert!(!key.verify("a", &[b"x", b"yz"], tag.as_bytes()));
        assert!(!key.verify("a", &[b"xy", b"z"], &tag.as_bytes()[..31]));
        assert!(!ClusterKey::derive(b"other").verify("a", &[b"xy", b"z"], tag.as_bytes()));
        assert_eq!(format!("{key:?}"), "ClusterKey(..)");
    }
}

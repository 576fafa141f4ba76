//! The secret that the engines of a cluster share.

use std::fmt;

use thiserror::Error;

/// Fewest bytes of a secret, without surrounding whitespace: 128 bits.
pub const MIN_SECRET_BYTES: usize = 16;

/// Separates cluster keys from every other use of BLAKE3.
const KEY_CONTEXT: &str = "kv-xfer 2026 cluster key v1";

/// Why a secret was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The secret is too short to be one.
    #[error(
        "the cluster secret has {len} bytes, at least {MIN_SECRET_BYTES} are needed; make one with \
         `openssl rand -hex 32`"
    )]
    TooShort {
        /// Its length in bytes, without surrounding whitespace.
        len: usize,
    },
}

/// The key of a cluster: engines that have it believe each other. Never shown.
#[derive(Clone)]
pub struct ClusterKey([u8; 32]);

impl ClusterKey {
    /// Derives the key from a secret, such as the contents of a file. ASCII whitespace around the
    /// secret does not count, so that a final newline makes no difference.
    ///
    /// # Errors
    /// [`KeyError::TooShort`].
    pub fn from_secret(secret: &[u8]) -> Result<Self, KeyError> {
        let secret = secret.trim_ascii();
        if secret.len() < MIN_SECRET_BYTES {
            return Err(KeyError::TooShort { len: secret.len() });
        }
        Ok(Self(blake3::derive_key(KEY_CONTEXT, secret)))
    }

    /// The authentication tag of `parts` for one purpose. Parts are hashed behind their lengths:
    /// `["ab", "c"]` and `["a", "bc"]` have different tags. Purposes are constants of the program.
    #[must_use]
    pub fn tag(&self, purpose: &str, parts: &[&[u8]]) -> [u8; 32] {
        *self.hash(purpose, parts).as_bytes()
    }

    /// Whether `tag` is the tag of `parts`, in constant time.
    #[must_use]
    pub fn verify(&self, purpose: &str, parts: &[&[u8]], tag: &[u8; 32]) -> bool {
        // Comparing `blake3::Hash`es takes constant time.
        self.hash(purpose, parts) == blake3::Hash::from_bytes(*tag)
    }

    /// Like [`verify`](Self::verify), for a tag of any length; only one of 32 bytes can match.
    #[must_use]
    pub fn verify_bytes(&self, purpose: &str, parts: &[&[u8]], tag: &[u8]) -> bool {
        <&[u8; 32]>::try_from(tag).is_ok_and(|tag| self.verify(purpose, parts, tag))
    }

    fn hash(&self, purpose: &str, parts: &[&[u8]]) -> blake3::Hash {
        let key = blake3::derive_key(purpose, &self.0);
        digest(blake3::Hasher::new_keyed(&key), parts)
    }
}

impl fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterKey(…)")
    }
}

/// Hashes parts behind their lengths.
pub(super) fn digest(mut hasher: blake3::Hasher, parts: &[&[u8]]) -> blake3::Hash {
    for part in parts {
        hasher.update(&u64::try_from(part.len()).unwrap_or(u64::MAX).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(secret: &str) -> ClusterKey {
        ClusterKey::from_secret(secret.as_bytes()).unwrap()
    }

    #[test]
    fn a_final_newline_makes_no_difference() {
        let (a, b) = (key("0123456789abcdef"), key("0123456789abcdef\n"));
        assert_eq!(a.tag("p", &[b"x"]), b.tag("p", &[b"x"]));
        assert_eq!(
            ClusterKey::from_secret(b"short \n").unwrap_err(),
            KeyError::TooShort { len: 5 }
        );
    }

    #[test]
    fn tags_depend_on_key_purpose_and_split() {
        let a = key("0123456789abcdef");
        let tag = a.tag("p", &[b"ab", b"c"]);
        assert!(a.verify("p", &[b"ab", b"c"], &tag));
        assert!(!a.verify("q", &[b"ab", b"c"], &tag));
        assert!(!a.verify("p", &[b"a", b"bc"], &tag));
        assert!(!key("0123456789abcdeg").verify("p", &[b"ab", b"c"], &tag));
    }

    #[test]
    fn keys_are_never_shown() {
        assert_eq!(format!("{:?}", key("0123456789abcdef")), "ClusterKey(…)");
    }
}

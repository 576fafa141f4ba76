//! The secret that the engines of a cluster share.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Fewest bytes of a secret, without surrounding whitespace: 128 bits.
pub const MIN_SECRET_BYTES: usize = 16;

/// Most bytes of a secret's file.
const MAX_SECRET_BYTES: u64 = 4096;
/// Names the file of the secret.
pub const KEY_FILE_VARIABLE: &str = "KVX_CLUSTER_KEY_FILE";
/// Holds the secret itself.
pub const KEY_VARIABLE: &str = "KVX_CLUSTER_KEY";

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
    /// The file of the secret cannot be read.
    #[error("the cluster secret's file {}: {why}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// Two secrets are given.
    #[error("both {KEY_VARIABLE} and {KEY_FILE_VARIABLE} are set; set one of them")]
    Both,
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

    /// Derives the key from the contents of a file of at most 4 KiB. A file that others may read or
    /// write is used with a warning in the log.
    ///
    /// # Errors
    /// [`KeyError`] when it cannot be read, or holds no secret.
    pub fn from_file(path: &Path) -> Result<Self, KeyError> {
        let failed = |why: String| KeyError::File {
            path: path.to_owned(),
            why,
        };
        let read = || -> io::Result<(Vec<u8>, u32)> {
            use std::os::unix::fs::PermissionsExt;
            let file = File::open(path)?;
            let mode = file.metadata()?.permissions().mode();
            let mut secret = Vec::new();
            file.take(MAX_SECRET_BYTES.saturating_add(1))
                .read_to_end(&mut secret)?;
            Ok((secret, mode))
        };
        let (secret, mode) = read().map_err(|error| failed(error.to_string()))?;
        if u64::try_from(secret.len()).is_ok_and(|bytes| bytes > MAX_SECRET_BYTES) {
            return Err(failed(format!("has more than {MAX_SECRET_BYTES} bytes")));
        }
        if mode & 0o066 != 0 {
            tracing::warn!(path = %path.display(), mode = format!("{:o}", mode & 0o777),
                "others can read or write the cluster secret; chmod 600 it");
        }
        Self::from_secret(&secret)
    }

    /// The key that the environment gives: the secret in `KVX_CLUSTER_KEY`, or the name of its file in
    /// `KVX_CLUSTER_KEY_FILE`. `None` when neither is set. An empty one is an error, so that a key
    /// that was to be set is not missing in silence.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn from_env() -> Result<Option<Self>, KeyError> {
        Self::of_environment(
            std::env::var_os(KEY_VARIABLE),
            std::env::var_os(KEY_FILE_VARIABLE),
        )
    }

    fn of_environment(
        secret: Option<OsString>,
        file: Option<OsString>,
    ) -> Result<Option<Self>, KeyError> {
        match (secret, file) {
            (Some(_), Some(_)) => Err(KeyError::Both),
            (Some(secret), None) => Self::from_secret(secret.as_encoded_bytes()).map(Some),
            (None, Some(file)) => Self::from_file(Path::new(&file)).map(Some),
            (None, None) => Ok(None),
        }
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
    fn a_key_comes_from_the_environment_or_a_file_and_from_nowhere_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        std::fs::write(&path, "0123456789abcdef\n").unwrap();
        let same = |key: Result<Option<ClusterKey>, KeyError>| {
            let tag = key.unwrap().unwrap().tag("p", &[b"x"]);
            assert_eq!(tag, self::key("0123456789abcdef").tag("p", &[b"x"]));
        };
        let file = || Some(path.clone().into_os_string());
        same(ClusterKey::of_environment(
            Some("0123456789abcdef".into()),
            None,
        ));
        same(ClusterKey::of_environment(None, file()));
        assert!(ClusterKey::of_environment(None, None).unwrap().is_none());
        let refused = |secret: Option<&str>, file| {
            ClusterKey::of_environment(secret.map(Into::into), file).unwrap_err()
        };
        assert_eq!(refused(Some("0123456789abcdef"), file()), KeyError::Both);
        assert_eq!(refused(Some(""), None), KeyError::TooShort { len: 0 });
        std::fs::write(&path, [b'a'; 5000]).unwrap();
        let error = refused(None, file());
        assert!(error.to_string().contains("more than 4096"), "{error}");
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(refused(None, file()), KeyError::File { .. }));
    }

    #[test]
    fn keys_are_never_shown() {
        assert_eq!(format!("{:?}", key("0123456789abcdef")), "ClusterKey(…)");
    }
}

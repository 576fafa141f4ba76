//! The short messages that a reader sends to a holder on the data plane.
//!
//! Ours name lease and word, so that a late or doubled release can never end another lease: to say it
//! again does nothing, so no replay has to be kept out. vLLM's (`{request}:{count}` and
//! `HB:{request},…`) are understood as well. Where a cluster key is set, a release carries a MAC, and
//! vLLM's, which anybody could write, are refused.
#![forbid(unsafe_code)]

use thiserror::Error;

use crate::descriptor::ClusterKey;
use crate::ids::{Incarnation, LeaseId, LeaseWord, RequestId};

/// Longest message that is looked at. vLLM's heartbeats list request ids; 64 KiB are some 900 of them.
pub const MAX_NOTICE_BYTES: usize = 64 << 10;

const MAC_PURPOSE: &str = "kv-xfer 2026 release notice v1";

const RELEASE: &str = "KVX1:release:";
const HEARTBEAT: &str = "HB:";

/// A message from a reader.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notice {
    /// The reader is done with a lease.
    Release {
        /// The life of the holder that granted it.
        incarnation: Incarnation,
        /// The lease.
        lease: LeaseId,
        /// Its word.
        word: LeaseWord,
    },
    /// vLLM: a reader rank is done with a request's blocks; `ranks` ranks will say so.
    RequestDone {
        /// The holder's request.
        request: RequestId,
        /// How many ranks notify in all.
        ranks: u32,
    },
    /// vLLM: these requests' blocks are still wanted.
    Heartbeat {
        /// The holder's requests.
        requests: Vec<RequestId>,
    },
}

/// Why a message was not understood. It is counted and ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NoticeError {
    /// Longer than [`MAX_NOTICE_BYTES`].
    #[error("the notice has {0} bytes, at most {MAX_NOTICE_BYTES} are read")]
    TooLong(usize),
    /// Not UTF-8.
    #[error("the notice is not text")]
    NotText,
    /// None of the known forms.
    #[error("the notice has no known form")]
    Unknown,
    /// A known form with a part that does not parse.
    #[error("the notice's {0} is malformed")]
    Malformed(&'static str),
    /// A cluster key is set, and the notice was not made with it.
    #[error("the notice carries no valid MAC; set the same cluster key on both engines")]
    Mac,
}

impl Notice {
    /// The bytes that travel. With a key, a release is signed.
    #[must_use]
    pub fn encode(&self, key: Option<&ClusterKey>) -> Vec<u8> {
        match self {
            Self::Release {
                incarnation,
                lease,
                word,
            } => {
                let text = format!("{RELEASE}{incarnation}:{}:{:016x}", lease.0, word.0);
                match key {
                    Some(key) => {
                        let tag =
                            blake3::Hash::from_bytes(key.tag(MAC_PURPOSE, &[text.as_bytes()]));
                        format!("{text}:{tag}").into_bytes()
                    }
                    None => text.into_bytes(),
                }
            }
            Self::RequestDone { request, ranks } => format!("{request}:{ranks}").into_bytes(),
            Self::Heartbeat { requests } => {
                let ids: Vec<&str> = requests.iter().map(RequestId::as_str).collect();
                format!("{HEARTBEAT}{}", ids.join(",")).into_bytes()
            }
        }
    }

    /// Reads a message; any bytes give a value or an error. With a key, only what was signed with it
    /// is a value; without one, a signature is not looked at.
    ///
    /// # Errors
    /// [`NoticeError`].
    pub fn decode(bytes: &[u8], key: Option<&ClusterKey>) -> Result<Self, NoticeError> {
        if bytes.len() > MAX_NOTICE_BYTES {
            return Err(NoticeError::TooLong(bytes.len()));
        }
        let text = std::str::from_utf8(bytes).map_err(|_| NoticeError::NotText)?;
        if let Some(rest) = text.strip_prefix(RELEASE) {
            return Self::decode_release(rest, key);
        }
        if key.is_some() {
            return Err(NoticeError::Mac);
        }
        if let Some(rest) = text.strip_prefix(HEARTBEAT) {
            let requests = rest
                .split(',')
                .filter(|id| !id.is_empty())
                .map(|id| RequestId::new(id).map_err(|_| NoticeError::Malformed("request id")))
                .collect::<Result<_, _>>()?;
            return Ok(Self::Heartbeat { requests });
        }
        let (request, ranks) = text.rsplit_once(':').ok_or(NoticeError::Unknown)?;
        let request = RequestId::new(request).map_err(|_| NoticeError::Malformed("request id"))?;
        let ranks = decimal(ranks)
            .and_then(|n| u32::try_from(n).ok())
            .filter(|n| *n > 0)
            .ok_or(NoticeError::Malformed("rank count"))?;
        Ok(Self::RequestDone { request, ranks })
    }

    fn decode_release(rest: &str, key: Option<&ClusterKey>) -> Result<Self, NoticeError> {
        let mut parts = rest.split(':');
        let incarnation = parts
            .next()
            .and_then(hex)
            .ok_or(NoticeError::Malformed("incarnation"))?;
        let lease = parts
            .next()
            .and_then(decimal)
            .ok_or(NoticeError::Malformed("lease id"))?;
        let word = parts
            .next()
            .and_then(hex)
            .ok_or(NoticeError::Malformed("lease word"))?;
        let tag = match parts.next() {
            Some(tag) => Some(tag_of(tag).ok_or(NoticeError::Malformed("MAC"))?),
            None => None,
        };
        if parts.next().is_some() {
            return Err(NoticeError::Malformed("end"));
        }
        let release = Self::Release {
            incarnation: Incarnation(incarnation),
            lease: LeaseId(lease),
            word: LeaseWord(word),
        };
        if let Some(key) = key {
            // What is signed is the text without the tag, which has one form only.
            let text = release.encode(None);
            if !tag.is_some_and(|tag| key.verify(MAC_PURPOSE, &[&text], &tag)) {
                return Err(NoticeError::Mac);
            }
        }
        Ok(release)
    }
}

/// Exactly 64 hex digits.
fn tag_of(text: &str) -> Option<[u8; 32]> {
    blake3::Hash::from_hex(text).ok().map(Into::into)
}

/// Exactly sixteen lower-case hex digits: one text per number.
fn hex(text: &str) -> Option<u64> {
    let canonical = text.len() == 16
        && text
            .bytes()
            .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    if canonical {
        u64::from_str_radix(text, 16).ok()
    } else {
        None
    }
}

fn decimal(text: &str) -> Option<u64> {
    // One text per number.
    let canonical =
        text.bytes().all(|b| b.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    if canonical { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_form_survives_a_round_trip() {
        let notices = [
            Notice::Release {
                incarnation: Incarnation(u64::MAX),
                lease: LeaseId(7),
                word: LeaseWord(0),
            },
            Notice::RequestDone {
                request: RequestId::new("chatcmpl-a:b:c").unwrap(),
                ranks: 8,
            },
            Notice::Heartbeat {
                requests: vec![RequestId::new("a").unwrap(), RequestId::new("b").unwrap()],
            },
        ];
        for notice in notices {
            assert_eq!(Notice::decode(&notice.encode(None), None), Ok(notice));
        }
    }

    #[test]
    fn with_a_key_only_signed_releases_count() {
        let key = ClusterKey::from_secret(b"0123456789abcdef").unwrap();
        let other = ClusterKey::from_secret(b"0123456789abcdeg").unwrap();
        let release = |lease| Notice::Release {
            incarnation: Incarnation(1),
            lease: LeaseId(lease),
            word: LeaseWord(9),
        };
        let signed = release(7).encode(Some(&key));
        assert_eq!(Notice::decode(&signed, Some(&key)), Ok(release(7)));
        assert_eq!(Notice::decode(&signed, None), Ok(release(7)));
        for forged in [
            release(7).encode(None),
            release(7).encode(Some(&other)),
            b"chatcmpl-x:1".to_vec(),
            b"HB:chatcmpl-x".to_vec(),
        ] {
            assert_eq!(Notice::decode(&forged, Some(&key)), Err(NoticeError::Mac));
        }
        for at in 0..signed.len() {
            let mut bad = signed.clone();
            bad[at] ^= 1;
            assert!(Notice::decode(&bad, Some(&key)).is_err(), "byte {at}");
        }
    }

    #[test]
    fn vllm_text_is_split_at_the_last_colon() {
        assert_eq!(
            Notice::decode(b"chatcmpl-x:y:2", None),
            Ok(Notice::RequestDone {
                request: RequestId::new("chatcmpl-x:y").unwrap(),
                ranks: 2
            })
        );
    }

    #[test]
    fn malformed_notices_are_errors() {
        for bad in [
            &b"\xff\xfe"[..],
            b"",
            b"nothing",
            b":1",
            b"r:0",
            b"r:-1",
            b"r:99999999999",
            b"r:+1",
            b"KVX1:release:",
            b"KVX1:release:1:2:3",
            b"KVX1:release:0000000000000001:2:0000000000000003:4",
            b"HB:\x01",
        ] {
            assert!(Notice::decode(bad, None).is_err(), "{bad:?}");
        }
        assert!(Notice::decode(&vec![b'a'; MAX_NOTICE_BYTES + 1], None).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_value_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(notice) = Notice::decode(&bytes, None) {
                prop_assert_eq!(Notice::decode(&notice.encode(None), None), Ok(notice));
            }
        }
    }
}

//! The short messages that a reader sends to a holder on the data plane.
//!
//! Ours name lease and word, so that a late or doubled release can never end another lease. vLLM's
//! (`{request}:{count}` and `HB:{request},…`) are understood as well.
#![forbid(unsafe_code)]

use thiserror::Error;

use crate::ids::{Incarnation, LeaseId, LeaseWord, RequestId};

/// Longest message that is looked at. vLLM's heartbeats list request ids; 64 KiB are some 900 of them.
pub const MAX_NOTICE_BYTES: usize = 64 << 10;

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
}

impl Notice {
    /// The bytes that travel.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Release {
                incarnation,
                lease,
                word,
            } => format!("{RELEASE}{incarnation}:{}:{:016x}", lease.0, word.0).into_bytes(),
            Self::RequestDone { request, ranks } => format!("{request}:{ranks}").into_bytes(),
            Self::Heartbeat { requests } => {
                let ids: Vec<&str> = requests.iter().map(RequestId::as_str).collect();
                format!("{HEARTBEAT}{}", ids.join(",")).into_bytes()
            }
        }
    }

    /// Reads a message; any bytes give a value or an error.
    ///
    /// # Errors
    /// [`NoticeError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, NoticeError> {
        if bytes.len() > MAX_NOTICE_BYTES {
            return Err(NoticeError::TooLong(bytes.len()));
        }
        let text = std::str::from_utf8(bytes).map_err(|_| NoticeError::NotText)?;
        if let Some(rest) = text.strip_prefix(RELEASE) {
            return Self::decode_release(rest);
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

    fn decode_release(rest: &str) -> Result<Self, NoticeError> {
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
        if parts.next().is_some() {
            return Err(NoticeError::Malformed("end"));
        }
        Ok(Self::Release {
            incarnation: Incarnation(incarnation),
            lease: LeaseId(lease),
            word: LeaseWord(word),
        })
    }
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
    if text.bytes().all(|b| b.is_ascii_digit()) {
        text.parse().ok()
    } else {
        None
    }
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
            assert_eq!(Notice::decode(&notice.encode()), Ok(notice));
        }
    }

    #[test]
    fn vllm_text_is_split_at_the_last_colon() {
        assert_eq!(
            Notice::decode(b"chatcmpl-x:y:2"),
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
            assert!(Notice::decode(bad).is_err(), "{bad:?}");
        }
        assert!(Notice::decode(&vec![b'a'; MAX_NOTICE_BYTES + 1]).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_value_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(notice) = Notice::decode(&bytes) {
                prop_assert_eq!(Notice::decode(&notice.encode()), Ok(notice));
            }
        }
    }
}

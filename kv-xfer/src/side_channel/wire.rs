//! Requests and replies as bytes.
//!
//! | request | MessagePack | reply |
//! |---|---|---|
//! | card (vLLM's) | `[bin "get_meta_msg", pp, tp]` | two parts: card map, float64 clock in seconds |
//! | hello | `[bin "kvx_hello"]` | `{challenge}`, for the next request on this connection |
//! | card, signed | `[bin "kvx_card", pp, tp, mac]` | as above |
//! | ping | `[bin "kvx_ping"]` | `{engine_id, incarnation, clock}` |
//! | renew | `[bin "kvx_renew", incarnation, lease, extension_ms, mac]` | `{outcome, ..}` |
//! | release | `[bin "kvx_release", incarnation, lease, mac]` | `{outcome, ..}` |
//!
//! `mac` is nil where no cluster key is set; where one is, it covers the challenge, and vLLM's card
//! request is refused. A request that is refused is answered by one part,
//! `{kv_xfer_error: reason, detail: text}`.

use std::time::Duration;

use rmpv::{Value, ValueRef};
use thiserror::Error;

use super::seal::{Demand, Seal};
use crate::ids::{EngineId, Incarnation, LeaseId, NameError, Rank};
use crate::peer::Malformed;
use crate::peer::msgpack::{self, Fields, as_bin, as_text, as_u32, map};

const GET_META: &str = "get_meta_msg";
const HELLO: &str = "kvx_hello";
const CARD: &str = "kvx_card";
const PING: &str = "kvx_ping";
const RENEW: &str = "kvx_renew";
const RELEASE: &str = "kvx_release";

/// Why bytes are not a request or a reply.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WireError {
    /// Not the MessagePack expected.
    #[error("{0}")]
    Malformed(#[from] Malformed),
    /// Not an array that begins with a name.
    #[error("not an array that begins with a name")]
    NotARequest,
    /// A request of a kind that is not known here.
    #[error("unknown request {0:?}")]
    Unknown(String),
    /// A known request with the wrong fields.
    #[error("{request} needs {expected}")]
    Fields {
        /// Which request.
        request: &'static str,
        /// What it needs.
        expected: &'static str,
    },
    /// The MAC is absent or wrong.
    #[error("{request} carries no valid MAC; set the same cluster key on both engines")]
    Mac {
        /// Which request.
        request: &'static str,
    },
    /// A reply has the wrong number of parts.
    #[error("a reply of {found} parts where {expected} are expected")]
    Parts {
        /// Number expected.
        expected: usize,
        /// Number found.
        found: usize,
    },
    /// A name is not acceptable.
    #[error("{0}")]
    Name(#[from] NameError),
    /// The server's clock is no number.
    #[error("the server's clock is not a 64-bit float")]
    Clock,
    /// A challenge that is not sixteen bytes.
    #[error("the challenge is not sixteen bytes")]
    Challenge,
    /// An outcome that is not known here.
    #[error("unknown outcome {0:?}")]
    Outcome(String),
}

/// Asks the holder to keep blocks for longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RenewRequest {
    /// The holder's incarnation that granted the lease.
    pub incarnation: Incarnation,
    /// The lease.
    pub lease: LeaseId,
    /// For how much longer, from now. Whole milliseconds travel.
    pub extension: Duration,
}

/// What came of a [`RenewRequest`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RenewOutcome {
    /// The lease holds for this much longer, from when the holder answered.
    Renewed {
        /// Remaining time.
        remaining: Duration,
    },
    /// The lease is over or was never granted: recompute.
    UnknownLease,
    /// The engine has restarted; the lease died with its predecessor.
    Restarted {
        /// The incarnation that answers.
        incarnation: Incarnation,
    },
    /// The lease still holds, but the holder does not extend it.
    Refused {
        /// Remaining time.
        remaining: Duration,
    },
}

/// Tells the holder that blocks are no longer needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReleaseRequest {
    /// The holder's incarnation that granted the lease.
    pub incarnation: Incarnation,
    /// The lease.
    pub lease: LeaseId,
}

/// What came of a [`ReleaseRequest`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseOutcome {
    /// Released, now or by an earlier request.
    Released,
    /// The lease is over or was never granted.
    UnknownLease,
    /// The engine has restarted; the lease died with its predecessor.
    Restarted {
        /// The incarnation that answers.
        incarnation: Incarnation,
    },
}

/// A request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Request {
    /// For a challenge to sign the next request with.
    Hello,
    /// For the card of a rank.
    Card(Rank),
    /// For a sign of life.
    Ping,
    /// To keep a lease.
    Renew(RenewRequest),
    /// To give a lease up.
    Release(ReleaseRequest),
}

impl Request {
    /// The request as bytes. [`Request::Card`] without a seal is byte for byte what vLLM sends.
    #[must_use]
    pub fn encode(&self, seal: Option<&Seal<'_>>) -> Vec<u8> {
        let named = |name: &str, numbers: &[u64], mac: Option<Value>| {
            let mut items = vec![Value::Binary(name.as_bytes().to_vec())];
            items.extend(numbers.iter().map(|n| Value::from(*n)));
            items.extend(mac);
            msgpack::write(&Value::Array(items))
        };
        let signed = |name: &'static str, numbers: &[u64]| {
            let mac = seal.map_or(Value::Nil, |seal| {
                Value::Binary(seal.mac(name, numbers).to_vec())
            });
            named(name, numbers, Some(mac))
        };
        match self {
            Self::Hello => named(HELLO, &[], None),
            Self::Card(rank) if seal.is_some() => signed(CARD, &[rank.pp.into(), rank.tp.into()]),
            Self::Card(rank) => named(GET_META, &[rank.pp.into(), rank.tp.into()], None),
            Self::Ping => named(PING, &[], None),
            Self::Renew(r) => signed(RENEW, &[r.incarnation.0, r.lease.0, millis(r.extension)]),
            Self::Release(r) => signed(RELEASE, &[r.incarnation.0, r.lease.0]),
        }
    }

    /// Reads a request. With a key, only hello and ping need no valid MAC.
    ///
    /// # Errors
    /// [`WireError`] naming the fault; [`WireError::Unknown`] for a kind not known here.
    pub fn decode(bytes: &[u8], demand: &Demand<'_>) -> Result<Self, WireError> {
        let value = msgpack::parse(bytes)?;
        let ValueRef::Array(items) = &value else {
            return Err(WireError::NotARequest);
        };
        let (name, fields) = items.split_first().ok_or(WireError::NotARequest)?;
        let name = as_bin(name)
            .and_then(|name| std::str::from_utf8(name).ok())
            .or_else(|| as_text(name))
            .ok_or(WireError::NotARequest)?;
        match name {
            HELLO => Ok(Self::Hello),
            CARD => {
                let [pp, tp] = demand.open(CARD, fields)?;
                u32::try_from(pp)
                    .ok()
                    .zip(u32::try_from(tp).ok())
                    .map(|(pp, tp)| Self::Card(Rank { pp, tp }))
                    .ok_or(WireError::Fields {
                        request: CARD,
                        expected: "two rank numbers",
                    })
            }
            GET_META if demand.key.is_some() => Err(WireError::Mac { request: GET_META }),
            GET_META => match fields {
                [pp, tp] => as_u32(pp)
                    .zip(as_u32(tp))
                    .map(|(pp, tp)| Self::Card(Rank { pp, tp })),
                _ => None,
            }
            .ok_or(WireError::Fields {
                request: GET_META,
                expected: "two rank numbers",
            }),
            PING => Ok(Self::Ping),
            RENEW => {
                let [incarnation, lease, extension] = demand.open(RENEW, fields)?;
                Ok(Self::Renew(RenewRequest {
                    incarnation: Incarnation(incarnation),
                    lease: LeaseId(lease),
                    extension: Duration::from_millis(extension),
                }))
            }
            RELEASE => {
                let [incarnation, lease] = demand.open(RELEASE, fields)?;
                Ok(Self::Release(ReleaseRequest {
                    incarnation: Incarnation(incarnation),
                    lease: LeaseId(lease),
                }))
            }
            other => Err(WireError::Unknown(show(other))),
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn show(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(64).collect()
}

/// The clock part of a card reply.
#[must_use]
pub fn encode_clock(secs: f64) -> Vec<u8> {
    msgpack::write(&Value::F64(secs))
}

/// Reads the clock part of a card reply.
///
/// # Errors
/// [`WireError::Clock`] when it is not a finite 64-bit float.
pub fn decode_clock(bytes: &[u8]) -> Result<f64, WireError> {
    match msgpack::parse(bytes)? {
        ValueRef::F64(secs) if secs.is_finite() => Ok(secs),
        _ => Err(WireError::Clock),
    }
}

/// The reply to a request that is refused. `reason` is one word: `unknown_request`, `unknown_rank`,
/// `mac`, `malformed`.
#[must_use]
pub fn encode_refusal(reason: &str, detail: &str) -> Vec<u8> {
    msgpack::write(&map([
        ("kv_xfer_error", reason.into()),
        ("detail", detail.into()),
    ]))
}

/// Reads a refusal; `None` when the bytes are something else.
#[must_use]
pub fn decode_refusal(bytes: &[u8]) -> Option<(String, String)> {
    let value = msgpack::parse(bytes).ok()?;
    let fields = Fields::of(&value).ok()?;
    let reason = fields.text("kv_xfer_error").ok()?;
    let detail = fields.text("detail").unwrap_or_default();
    let cut =
        |text: &str| -> String { text.chars().filter(|c| !c.is_control()).take(256).collect() };
    Some((cut(reason), cut(detail)))
}

/// The reply to a ping.
#[must_use]
pub fn encode_pong(engine: &EngineId, incarnation: Incarnation, clock_secs: f64) -> Vec<u8> {
    msgpack::write(&map([
        ("engine_id", engine.as_str().into()),
        ("incarnation", incarnation.0.into()),
        ("clock", Value::F64(clock_secs)),
    ]))
}

/// Reads the reply to a ping: engine, incarnation and the server's clock in seconds.
///
/// # Errors
/// [`WireError`] naming the fault.
pub fn decode_pong(bytes: &[u8]) -> Result<(EngineId, Incarnation, f64), WireError> {
    let value = msgpack::parse(bytes)?;
    let fields = Fields::of(&value)?;
    let engine = EngineId::new(fields.text("engine_id")?)?;
    let clock = match fields.get("clock")? {
        ValueRef::F64(secs) if secs.is_finite() => *secs,
        _ => return Err(WireError::Clock),
    };
    Ok((engine, Incarnation(fields.u64("incarnation")?), clock))
}

/// The reply to a renewal.
#[must_use]
pub fn encode_renewed(outcome: &RenewOutcome) -> Vec<u8> {
    let value = match outcome {
        RenewOutcome::Renewed { remaining } => map([
            ("outcome", "renewed".into()),
            ("remaining_ms", millis(*remaining).into()),
        ]),
        RenewOutcome::Refused { remaining } => map([
            ("outcome", "refused".into()),
            ("remaining_ms", millis(*remaining).into()),
        ]),
        RenewOutcome::UnknownLease => map([("outcome", "unknown_lease".into())]),
        RenewOutcome::Restarted { incarnation } => restarted(*incarnation),
    };
    msgpack::write(&value)
}

/// Reads the reply to a renewal.
///
/// # Errors
/// [`WireError`] naming the fault.
pub fn decode_renewed(bytes: &[u8]) -> Result<RenewOutcome, WireError> {
    let value = msgpack::parse(bytes)?;
    let fields = Fields::of(&value)?;
    let remaining = || fields.u64("remaining_ms").map(Duration::from_millis);
    match fields.text("outcome")? {
        "renewed" => Ok(RenewOutcome::Renewed {
            remaining: remaining()?,
        }),
        "refused" => Ok(RenewOutcome::Refused {
            remaining: remaining()?,
        }),
        "unknown_lease" => Ok(RenewOutcome::UnknownLease),
        "restarted" => Ok(RenewOutcome::Restarted {
            incarnation: Incarnation(fields.u64("incarnation")?),
        }),
        other => Err(WireError::Outcome(show(other))),
    }
}

/// The reply to a release.
#[must_use]
pub fn encode_released(outcome: &ReleaseOutcome) -> Vec<u8> {
    let value = match outcome {
        ReleaseOutcome::Released => map([("outcome", "released".into())]),
        ReleaseOutcome::UnknownLease => map([("outcome", "unknown_lease".into())]),
        ReleaseOutcome::Restarted { incarnation } => restarted(*incarnation),
    };
    msgpack::write(&value)
}

/// Reads the reply to a release.
///
/// # Errors
/// [`WireError`] naming the fault.
pub fn decode_released(bytes: &[u8]) -> Result<ReleaseOutcome, WireError> {
    let value = msgpack::parse(bytes)?;
    let fields = Fields::of(&value)?;
    match fields.text("outcome")? {
        "released" => Ok(ReleaseOutcome::Released),
        "unknown_lease" => Ok(ReleaseOutcome::UnknownLease),
        "restarted" => Ok(ReleaseOutcome::Restarted {
            incarnation: Incarnation(fields.u64("incarnation")?),
        }),
        other => Err(WireError::Outcome(show(other))),
    }
}

fn restarted(incarnation: Incarnation) -> Value {
    map([
        ("outcome", "restarted".into()),
        ("incarnation", incarnation.0.into()),
    ])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::seal::Challenge;
    use super::*;
    use crate::descriptor::ClusterKey;

    const CHALLENGE: Challenge = Challenge([3; 16]);

    fn key() -> ClusterKey {
        ClusterKey::from_secret(b"0123456789abcdef").unwrap()
    }

    fn seal(key: &ClusterKey) -> Seal<'_> {
        Seal {
            key,
            challenge: CHALLENGE,
        }
    }

    fn demand(key: &ClusterKey) -> Demand<'_> {
        Demand {
            key: Some(key),
            challenge: Some(CHALLENGE),
        }
    }

    fn requests() -> Vec<Request> {
        vec![
            Request::Hello,
            Request::Card(Rank { pp: 1, tp: 300 }),
            Request::Ping,
            Request::Renew(RenewRequest {
                incarnation: Incarnation(u64::MAX),
                lease: LeaseId(7),
                extension: Duration::from_millis(20_000),
            }),
            Request::Release(ReleaseRequest {
                incarnation: Incarnation(1),
                lease: LeaseId(u64::MAX),
            }),
        ]
    }

    #[test]
    fn the_card_request_is_vllms() {
        let bytes = Request::Card(Rank { pp: 0, tp: 3 }).encode(None);
        assert_eq!(bytes, b"\x93\xc4\x0cget_meta_msg\x00\x03");
    }

    #[test]
    fn requests_come_back_with_and_without_a_key() {
        let key = key();
        for request in requests() {
            for (seal, demand) in [
                (None, Demand::default()),
                (Some(seal(&key)), demand(&key)),
                // Signed for who does not ask for it.
                (Some(seal(&key)), Demand::default()),
            ] {
                let bytes = request.encode(seal.as_ref());
                assert_eq!(Request::decode(&bytes, &demand), Ok(request));
                for cut in 0..bytes.len() {
                    assert!(Request::decode(&bytes[..cut], &demand).is_err());
                }
            }
        }
    }

    fn signed() -> impl Iterator<Item = Request> {
        let open = |request: &Request| matches!(request, Request::Hello | Request::Ping);
        requests().into_iter().filter(move |request| !open(request))
    }

    #[test]
    fn a_mac_covers_every_bit() {
        let key = key();
        for request in signed() {
            let bytes = request.encode(Some(&seal(&key)));
            for at in 0..bytes.len() {
                for bit in 0..8 {
                    let mut bad = bytes.clone();
                    bad[at] ^= 1 << bit;
                    if let Ok(got) = Request::decode(&bad, &demand(&key)) {
                        // Bytes or text: the name says the same.
                        assert_eq!(got, request, "bit {bit} of byte {at}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_request_is_good_for_its_own_challenge_only() {
        let key = key();
        for request in signed() {
            let refused = |bytes: &[u8], challenge| {
                let demand = Demand {
                    key: Some(&key),
                    challenge,
                };
                let refused = Request::decode(bytes, &demand);
                assert!(matches!(refused, Err(WireError::Mac { .. })), "{refused:?}");
            };
            refused(&request.encode(None), Some(CHALLENGE));
            let bytes = request.encode(Some(&seal(&key)));
            refused(&bytes, Some(Challenge([4; 16])));
            refused(&bytes, None);
        }
    }

    #[test]
    fn what_is_no_request_is_told_apart() {
        let decode = |bytes: &[u8]| Request::decode(bytes, &Demand::default()).unwrap_err();
        assert!(matches!(decode(b""), WireError::Malformed(_)));
        for bytes in [
            &b"\x90"[..],
            b"\x80",
            b"\x91\x01",
            b"\xa1x",
            b"\x91\xc4\x01\xff",
        ] {
            assert_eq!(decode(bytes), WireError::NotARequest, "{bytes:x?}");
        }
        assert_eq!(decode(b"\x91\xc4\x03foo"), WireError::Unknown("foo".into()));
        for bytes in [
            &b"\x91\xc4\x0cget_meta_msg"[..],
            b"\x92\xc4\x0cget_meta_msg\x00",
            b"\x93\xc4\x0cget_meta_msg\x00\xff",
            b"\x93\xc4\x0cget_meta_msg\x00\xa1x",
            b"\x94\xc4\x0cget_meta_msg\x00\x00\x00",
            b"\x91\xc4\x09kvx_renew",
            b"\x94\xc4\x0bkvx_release\x01\x02\x03",
        ] {
            assert!(
                matches!(decode(bytes), WireError::Fields { .. }),
                "{bytes:x?}"
            );
        }
    }

    #[test]
    fn replies_come_back() {
        let remaining = Duration::from_millis(1234);
        for outcome in [
            RenewOutcome::Renewed { remaining },
            RenewOutcome::Refused { remaining },
            RenewOutcome::UnknownLease,
            RenewOutcome::Restarted {
                incarnation: Incarnation(5),
            },
        ] {
            assert_eq!(decode_renewed(&encode_renewed(&outcome)), Ok(outcome));
        }
        for outcome in [
            ReleaseOutcome::Released,
            ReleaseOutcome::UnknownLease,
            ReleaseOutcome::Restarted {
                incarnation: Incarnation(5),
            },
        ] {
            assert_eq!(decode_released(&encode_released(&outcome)), Ok(outcome));
        }
        let engine = EngineId::new("e").unwrap();
        let pong = encode_pong(&engine, Incarnation(3), 1.5);
        assert_eq!(
            decode_pong(&pong),
            Ok((engine.clone(), Incarnation(3), 1.5))
        );
        assert!(decode_pong(&encode_pong(&engine, Incarnation(3), f64::NAN)).is_err());
        assert_eq!(encode_clock(1.5), b"\xcb\x3f\xf8\0\0\0\0\0\0");
        assert_eq!(decode_clock(&encode_clock(1.5)), Ok(1.5));
        assert_eq!(
            decode_clock(&encode_clock(f64::INFINITY)),
            Err(WireError::Clock)
        );
        let refusal = encode_refusal("mac", "a\nb");
        assert_eq!(decode_refusal(&refusal), Some(("mac".into(), "ab".into())));
        assert_eq!(decode_refusal(&pong), None);
        assert!(matches!(
            decode_renewed(b"\x81\xa7outcome\xa1x"),
            Err(WireError::Outcome(_))
        ));
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_error_or_a_value(
            bytes in proptest::collection::vec(any::<u8>(), 0..200)
        ) {
            let key = key();
            let _ = Request::decode(&bytes, &Demand::default());
            prop_assert!(!matches!(
                Request::decode(&bytes, &demand(&key)),
                Ok(Request::Card(_) | Request::Renew(_) | Request::Release(_))
            ));
            let _ = decode_pong(&bytes);
            let _ = decode_renewed(&bytes);
            let _ = decode_released(&bytes);
            let _ = decode_clock(&bytes);
            let _ = decode_refusal(&bytes);
        }
    }
}

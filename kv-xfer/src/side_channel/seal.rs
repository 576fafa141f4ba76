//! How requests are authenticated where a cluster key is set.
//!
//! The server gives every connection a random [`Challenge`] when asked (`kvx_hello`), good for the
//! one request that follows. That request's MAC covers it, so a request that was overheard is worth
//! nothing: no other connection has its challenge, and this one has used it up. No clocks have to
//! agree for this, and the server remembers sixteen bytes a connection.

use std::io;

use rmpv::{Value, ValueRef};

use super::wire::WireError;
use crate::descriptor::ClusterKey;
use crate::peer::msgpack::{self, Fields, as_bin, as_u64, map};

/// Requests of before there were challenges had `v1`.
const MAC_PURPOSE: &str = "kv-xfer 2026 side-channel request v2";

/// Sixteen random bytes that one request on one connection is signed with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Challenge(pub [u8; 16]);

impl Challenge {
    /// One that nobody can foretell.
    ///
    /// # Errors
    /// When the system has no random bytes.
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; 16];
        let mut filled = 0;
        while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            let got = rustix::rand::getrandom(rest, rustix::rand::GetRandomFlags::empty())?;
            filled = filled.saturating_add(got);
        }
        Ok(Self(bytes))
    }

    /// The reply that carries it.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        msgpack::write(&map([("challenge", Value::Binary(self.0.to_vec()))]))
    }

    /// Reads the reply.
    ///
    /// # Errors
    /// [`WireError`] naming the fault.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let value = msgpack::parse(bytes)?;
        let fields = Fields::of(&value)?;
        as_bin(fields.get("challenge")?)
            .and_then(|bytes| bytes.try_into().ok())
            .map(Self)
            .ok_or(WireError::Challenge)
    }
}

/// What a request is signed with.
#[derive(Debug, Clone, Copy)]
pub struct Seal<'a> {
    /// The cluster's key.
    pub key: &'a ClusterKey,
    /// The server's challenge.
    pub challenge: Challenge,
}

impl Seal<'_> {
    pub(super) fn mac(&self, request: &'static str, numbers: &[u64]) -> [u8; 32] {
        let bytes = mac_bytes(numbers);
        self.key.tag(
            MAC_PURPOSE,
            &[&self.challenge.0, request.as_bytes(), &bytes],
        )
    }
}

/// What a server demands of requests.
#[derive(Debug, Clone, Copy, Default)]
pub struct Demand<'a> {
    /// With a key, cards are given and leases changed only on a valid MAC.
    pub key: Option<&'a ClusterKey>,
    /// The challenge that this connection was given and has not used.
    pub challenge: Option<Challenge>,
}

impl Demand<'_> {
    /// Reads `N` numbers and a MAC, and checks the MAC when there is a key.
    pub(super) fn open<const N: usize>(
        &self,
        request: &'static str,
        fields: &[ValueRef<'_>],
    ) -> Result<[u64; N], WireError> {
        let bad = || WireError::Fields {
            request,
            expected: "its numbers and a MAC or nil",
        };
        let (tag, numbers) = fields.split_last().ok_or_else(bad)?;
        let numbers: Vec<u64> = numbers
            .iter()
            .map(as_u64)
            .collect::<Option<_>>()
            .ok_or_else(bad)?;
        let numbers: [u64; N] = numbers.try_into().map_err(|_| bad())?;
        match (self.key, as_bin(tag)) {
            (None, Some(_)) => {}
            (None, None) if matches!(tag, ValueRef::Nil) => {}
            (None, None) => return Err(bad()),
            (Some(key), tag) => {
                let bytes = mac_bytes(&numbers);
                let valid = tag.zip(self.challenge).is_some_and(|(tag, challenge)| {
                    let parts: [&[u8]; 3] = [&challenge.0, request.as_bytes(), &bytes];
                    key.verify_bytes(MAC_PURPOSE, &parts, tag)
                });
                if !valid {
                    return Err(WireError::Mac { request });
                }
            }
        }
        Ok(numbers)
    }
}

fn mac_bytes(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_come_back_and_differ() {
        let (a, b) = (Challenge::random().unwrap(), Challenge::random().unwrap());
        assert_ne!(a, b);
        assert_eq!(Challenge::decode(&a.encode()), Ok(a));
        for bad in [
            &b"\x81\xa9challenge\xc4\x01x"[..],
            b"\x81\xa9challenge\xc0",
            b"\x80",
            b"",
        ] {
            assert!(Challenge::decode(bad).is_err());
        }
    }
}

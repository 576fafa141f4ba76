//! The host of a descriptor: a name or an address, checked for form only.

use std::fmt;
use std::net::Ipv6Addr;
use std::sync::Arc;

use thiserror::Error;

/// Longest host accepted, in bytes: DNS allows 253 (RFC 1035), an IPv6 address with a zone is shorter.
const MAX_HOST_BYTES: usize = 255;

/// Why a host was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum HostError {
    /// The host is empty.
    #[error("the host is empty; give a host name or an IP address")]
    Empty,
    /// The host is longer than any host name.
    #[error("the host has {len} bytes; at most {MAX_HOST_BYTES} are accepted")]
    TooLong {
        /// Its length in bytes.
        len: usize,
    },
    /// The host holds something that neither host names nor addresses hold.
    #[error("{host:?} is neither a host name nor an IP address; give one without port or scheme")]
    NotAHost {
        /// What was given.
        host: String,
    },
}

/// A host name, an IPv4 address, or an IPv6 address with or without brackets and zone. Only its form
/// is checked: whether to dial it is for the engine's peer list to say.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Host(Arc<str>);

impl Host {
    /// Checks and wraps a host.
    ///
    /// # Errors
    /// [`HostError`] when the text is no host.
    pub fn new(host: impl AsRef<str>) -> Result<Self, HostError> {
        let host = host.as_ref();
        if host.is_empty() {
            return Err(HostError::Empty);
        }
        if host.len() > MAX_HOST_BYTES {
            return Err(HostError::TooLong { len: host.len() });
        }
        if !is_name(host) && !is_ipv6(strip_brackets(host)) {
            return Err(HostError::NotAHost {
                host: host.to_owned(),
            });
        }
        Ok(Self(Arc::from(host)))
    }

    /// The host as written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The host as a resolver takes it: an IPv6 address without its brackets.
    #[must_use]
    pub fn unbracketed(&self) -> &str {
        strip_brackets(&self.0)
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Host({:?})", &*self.0)
    }
}

/// Letters, digits, dots, dashes; and underscores, which container networks use.
fn is_name(host: &str) -> bool {
    let mut bytes = host.bytes();
    bytes.next().is_some_and(|b| b.is_ascii_alphanumeric())
        && bytes.all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_'))
}

fn is_ipv6(host: &str) -> bool {
    let (address, zone) = match host.split_once('%') {
        Some((address, zone)) => (address, Some(zone)),
        None => (host, None),
    };
    address.parse::<Ipv6Addr>().is_ok() && zone.is_none_or(is_name)
}

fn strip_brackets(host: &str) -> &str {
    host.strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
        .unwrap_or(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_addresses_are_accepted() {
        for host in [
            "localhost",
            "10.0.0.7",
            "decode-0.decode_svc.ns",
            "::1",
            "[2001:db8::1]",
            "fe80::1%eth0",
        ] {
            assert_eq!(Host::new(host).unwrap().as_str(), host);
        }
        assert_eq!(Host::new("[::1]").unwrap().unbracketed(), "::1");
    }

    #[test]
    fn everything_else_is_refused() {
        for host in [
            "", "a b", "a:1", "http://a", "a/b", "-x", "a\n", "[::1", "::1%", "::1%a b", "é", "[]",
            "a\0",
        ] {
            assert!(Host::new(host).is_err(), "{host:?}");
        }
        assert_eq!(
            Host::new("x".repeat(256)),
            Err(HostError::TooLong { len: 256 })
        );
    }
}

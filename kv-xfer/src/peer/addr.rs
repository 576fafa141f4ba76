//! Where a peer listens: host and port, with the brackets that IPv6 needs.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::str::FromStr;

use thiserror::Error;

/// Longest accepted host, in bytes: the limit of a DNS name (RFC 1035, 255 octets on the wire, 253
/// as text); an IPv6 address with a scope is far shorter.
pub const MAX_HOST_BYTES: usize = 253;

/// Longest accepted IPv6 scope, in bytes: an interface name (`IFNAMSIZ` is 16) or a number.
const MAX_SCOPE_BYTES: usize = 32;

/// Why an address was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AddrError {
    /// There is no host.
    #[error("the address has no host; write host:port, 192.0.2.1:5600 or [2001:db8::1]:5600")]
    NoHost,
    /// The host is too long.
    #[error("the host has {len} bytes; at most {MAX_HOST_BYTES} are accepted")]
    HostTooLong {
        /// Its length in bytes.
        len: usize,
    },
    /// The host holds a character that no host name has.
    #[error("the host {host:?} is neither a name nor an IPv4 or IPv6 address")]
    BadHost {
        /// The host given.
        host: String,
    },
    /// The port is missing, zero or not a number up to 65535.
    #[error("the address {text:?} needs a port from 1 to 65535; write IPv6 as [address]:port")]
    BadPort {
        /// The text given, cut to a sensible length.
        text: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Host {
    Name(String),
    V4(Ipv4Addr),
    V6(Ipv6Addr, Option<String>),
}

/// Host and port of a side channel. Two texts of one address are equal: names are lower-cased, IPv6
/// is kept as a number, its scope as written.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerAddr {
    host: Host,
    port: u16,
}

impl PeerAddr {
    /// From a host, with or without brackets, and a port, as `kv_transfer_params` carries them.
    ///
    /// # Errors
    /// [`AddrError`] naming the fault.
    pub fn new(host: &str, port: u16) -> Result<Self, AddrError> {
        if port == 0 {
            return Err(AddrError::BadPort {
                text: format!("{}:0", shorten(host)),
            });
        }
        Ok(Self {
            host: parse_host(host)?,
            port,
        })
    }

    /// The host without brackets, as `remote_host` carries it.
    #[must_use]
    pub fn host(&self) -> String {
        match &self.host {
            Host::Name(name) => name.clone(),
            Host::V4(ip) => ip.to_string(),
            Host::V6(ip, None) => ip.to_string(),
            Host::V6(ip, Some(scope)) => format!("{ip}%{scope}"),
        }
    }

    /// The port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The address, when the host is written as one. IPv4-mapped IPv6 is given as IPv4, so that a
    /// rule for one form holds for the other.
    #[must_use]
    pub fn ip(&self) -> Option<IpAddr> {
        match &self.host {
            Host::Name(_) => None,
            Host::V4(ip) => Some(IpAddr::V4(*ip)),
            Host::V6(ip, _) => Some(IpAddr::V6(*ip).to_canonical()),
        }
    }

    /// The socket address, when the host is written as an address whose scope, if any, is a number.
    #[must_use]
    pub fn literal(&self) -> Option<SocketAddr> {
        match &self.host {
            Host::Name(_) => None,
            Host::V4(ip) => Some(SocketAddr::new(IpAddr::V4(*ip), self.port)),
            Host::V6(ip, None) => Some(SocketAddr::new(IpAddr::V6(*ip), self.port)),
            Host::V6(ip, Some(scope)) => {
                let scope = scope.parse().ok()?;
                Some(SocketAddrV6::new(*ip, self.port, 0, scope).into())
            }
        }
    }

    /// Whether the host is a name that has to be looked up.
    #[must_use]
    pub fn is_name(&self) -> bool {
        matches!(self.host, Host::Name(_))
    }
}

impl From<SocketAddr> for PeerAddr {
    fn from(addr: SocketAddr) -> Self {
        let host = match addr {
            SocketAddr::V4(v4) => Host::V4(*v4.ip()),
            SocketAddr::V6(v6) => Host::V6(
                *v6.ip(),
                (v6.scope_id() != 0).then(|| v6.scope_id().to_string()),
            ),
        };
        Self {
            host,
            port: addr.port(),
        }
    }
}

impl fmt::Display for PeerAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Name(name) => write!(f, "{name}:{}", self.port),
            Host::V4(ip) => write!(f, "{ip}:{}", self.port),
            Host::V6(ip, None) => write!(f, "[{ip}]:{}", self.port),
            Host::V6(ip, Some(scope)) => write!(f, "[{ip}%{scope}]:{}", self.port),
        }
    }
}

impl FromStr for PeerAddr {
    type Err = AddrError;

    /// Reads `host:port`, `192.0.2.1:5600`, `[2001:db8::1]:5600`, `[fe80::1%eth0]:5600`, each also
    /// with `tcp://` in front.
    fn from_str(text: &str) -> Result<Self, AddrError> {
        let bad_port = || AddrError::BadPort {
            text: shorten(text),
        };
        let rest = text.strip_prefix("tcp://").unwrap_or(text);
        let (host, port) = rest.rsplit_once(':').ok_or_else(bad_port)?;
        if host.contains(':') && !(host.starts_with('[') && host.ends_with(']')) {
            // `fe80::1:5600` could mean either of two addresses.
            return Err(bad_port());
        }
        if port.is_empty() || !port.bytes().all(|b| b.is_ascii_digit()) {
            return Err(bad_port());
        }
        Self::new(host, port.parse().map_err(|_| bad_port())?)
    }
}

fn parse_host(text: &str) -> Result<Host, AddrError> {
    let bad = || AddrError::BadHost {
        host: shorten(text),
    };
    let (bare, bracketed) = match text.strip_prefix('[') {
        Some(rest) => (rest.strip_suffix(']').ok_or_else(bad)?, true),
        None => (text, false),
    };
    if bare.is_empty() {
        return Err(AddrError::NoHost);
    }
    if bare.len() > MAX_HOST_BYTES {
        return Err(AddrError::HostTooLong { len: bare.len() });
    }
    if bracketed || bare.contains(':') {
        let (ip, scope) = match bare.split_once('%') {
            Some((ip, scope)) => (ip, Some(scope)),
            None => (bare, None),
        };
        let scope_ok = |s: &str| {
            !s.is_empty()
                && s.len() <= MAX_SCOPE_BYTES
                && s.bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        };
        if !scope.is_none_or(scope_ok) {
            return Err(bad());
        }
        let ip = ip.parse().map_err(|_| bad())?;
        return Ok(Host::V6(ip, scope.map(str::to_owned)));
    }
    if let Ok(ip) = bare.parse() {
        return Ok(Host::V4(ip));
    }
    let name_ok = bare
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    // A name of digits and dots only would be read by the system as an odd form of IPv4
    // (`127.1`, `2130706433`), behind the back of the dialling rule.
    let odd_ipv4 = bare.split('.').all(|label| {
        let hex = label
            .strip_prefix("0x")
            .or_else(|| label.strip_prefix("0X"))
            .is_some_and(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
        hex || label.bytes().all(|b| b.is_ascii_digit())
    });
    if !name_ok || odd_ipv4 {
        return Err(bad());
    }
    Ok(Host::Name(bare.to_ascii_lowercase()))
}

fn shorten(text: &str) -> String {
    text.chars().take(64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_forms_come_back() {
        for (text, shown) in [
            ("localhost:5600", "localhost:5600"),
            ("Decode-0.pool:1", "decode-0.pool:1"),
            ("a_b:65535", "a_b:65535"),
            ("192.0.2.1:5600", "192.0.2.1:5600"),
            ("127.0.0.1:80", "127.0.0.1:80"),
            ("0.0.0.0:80", "0.0.0.0:80"),
            ("[::1]:5600", "[::1]:5600"),
            ("[::]:5600", "[::]:5600"),
            ("[2001:db8::1]:5600", "[2001:db8::1]:5600"),
            ("[2001:DB8:0:0:0:0:0:1]:5600", "[2001:db8::1]:5600"),
            ("[fe80::1%eth0]:5600", "[fe80::1%eth0]:5600"),
            ("[fe80::1%3]:5600", "[fe80::1%3]:5600"),
            ("[fe80::1%en-0.7_x]:5600", "[fe80::1%en-0.7_x]:5600"),
            ("[::ffff:192.0.2.1]:5600", "[::ffff:192.0.2.1]:5600"),
            ("[64:ff9b::192.0.2.1]:1", "[64:ff9b::c000:201]:1"),
            ("tcp://localhost:5600", "localhost:5600"),
            ("tcp://[::1]:5600", "[::1]:5600"),
            ("host1:05600", "host1:5600"),
            ("xn--bcher-kva.example:99", "xn--bcher-kva.example:99"),
            ("10.0.0.255:65535", "10.0.0.255:65535"),
        ] {
            let addr: PeerAddr = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(addr.to_string(), shown);
            assert_eq!(shown.parse(), Ok(addr.clone()));
            assert_eq!(PeerAddr::new(&addr.host(), addr.port()), Ok(addr.clone()));
            if let Some(literal) = addr.literal() {
                assert_eq!(PeerAddr::from(literal), addr);
            }
        }
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for text in [
            "",
            ":",
            ":5600",
            "localhost",
            "localhost:",
            "localhost:0",
            "localhost:65536",
            "localhost:+1",
            "localhost:-1",
            "::1:5600",
            "::1",
            "[::1]",
            "[::1",
            "[::1]x:5600",
            "[]:5600",
            "[fe80::1%]:5600",
            "[fe80::1%a b]:1",
            "[localhost]:1",
            "a b:1",
            "a/b:1",
            "a\0b:1",
            "user@host:1",
            "127.1:80",
            "2130706433:80",
            "0x7f.1:80",
            "tcp://",
            "é:1",
        ] {
            assert!(text.parse::<PeerAddr>().is_err(), "{text:?}");
        }
        let long = format!("{}:1", "a".repeat(MAX_HOST_BYTES + 1));
        assert!(matches!(
            long.parse::<PeerAddr>(),
            Err(AddrError::HostTooLong { .. })
        ));
        assert_eq!(PeerAddr::new("", 1), Err(AddrError::NoHost));
    }

    #[test]
    fn mapped_addresses_are_seen_as_ipv4() {
        let mapped: PeerAddr = "[::ffff:127.0.0.1]:1".parse().unwrap();
        assert_eq!(mapped.ip(), Some(IpAddr::V4(Ipv4Addr::LOCALHOST)));
    }
}

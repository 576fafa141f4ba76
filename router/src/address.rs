//! Addresses of nodes: `http://host:port`, with IPv6 in brackets, scope ids included.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::str::FromStr;

/// Where a node's HTTP server is.
///
/// ```
/// # use kvx_router::NodeUrl;
/// let node: NodeUrl = "[::1]:8100".parse()?;
/// assert_eq!(node.to_string(), "http://[::1]:8100");
/// let node: NodeUrl = "http://[fe80::2%25eth0]:8100/".parse()?;
/// assert_eq!(node.to_string(), "http://[fe80::2%eth0]:8100");
/// # Ok::<(), kvx_router::NodeUrlError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NodeUrl {
    host: Host,
    port: u16,
    path: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Host {
    Name(String),
    V4(Ipv4Addr),
    V6(Ipv6Addr, Option<String>),
}

/// Why a text is no address of a node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NodeUrlError {
    /// Nodes are reached over plain HTTP.
    #[error("{0:?}: nodes are reached over http, not {1}")]
    Scheme(String, String),
    /// There is no host, or it is not one.
    #[error(
        "{0:?} has no valid host; write http://name:port, http://192.0.2.1:port or http://[2001:db8::1]:port"
    )]
    Host(String),
    /// An IPv6 address without brackets does not say where it ends and the port begins.
    #[error("{0:?}: put the IPv6 address into brackets, as in [::1]:8000")]
    Brackets(String),
    /// The port is not one.
    #[error("{0:?} has no valid port (1 to 65535)")]
    Port(String),
    /// User names, queries and fragments have no place here.
    #[error("{0:?}: only host, port and path can be given")]
    Extra(String),
}

impl NodeUrl {
    /// The URL to which a request for `path` goes. A scoped address has no form in a URL: `alias` then
    /// stands for the host, and whoever connects has to know [`scoped`](Self::scoped).
    pub(crate) fn request_url(&self, alias: &str, path: &str) -> String {
        match &self.host {
            Host::V6(_, Some(_)) => format!("http://{alias}:{}{}{path}", self.port, self.path),
            _ => format!("{self}{path}"),
        }
    }

    /// The socket address, where the host is an IPv6 address with a scope id.
    pub(crate) fn scoped(&self) -> Option<io::Result<SocketAddr>> {
        match &self.host {
            Host::V6(address, Some(scope)) => {
                Some(resolve(&format!("{address}%{scope}"), self.port))
            }
            _ => None,
        }
    }

    /// What a `Host` header says.
    pub(crate) fn authority(&self) -> String {
        match &self.host {
            Host::V6(address, _) => format!("[{address}]:{}", self.port),
            host => format!("{host}:{}", self.port),
        }
    }
}

/// The first socket address of `host`, which may be an IPv6 address with a scope id, in brackets or not.
pub(crate) fn resolve(host: &str, port: u16) -> io::Result<SocketAddr> {
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host);
    (bare, port)
        .to_socket_addrs()?
        .next()
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("{host} has no address")))
}

impl FromStr for NodeUrl {
    type Err = NodeUrlError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let whole = text.to_owned();
        let rest = match text.split_once("://") {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => rest,
            Some((scheme, _)) => return Err(NodeUrlError::Scheme(whole, scheme.to_owned())),
            None => text,
        };
        if rest.contains(['@', '?', '#']) || rest.contains(|c: char| c.is_whitespace()) {
            return Err(NodeUrlError::Extra(whole));
        }
        let (authority, path) = match rest.find('/') {
            Some(at) => rest.split_at(at),
            None => (rest, ""),
        };
        let (host, port) = if let Some(inner) = authority.strip_prefix('[') {
            let (address, port) = inner
                .split_once(']')
                .ok_or_else(|| NodeUrlError::Host(whole.clone()))?;
            (
                v6(address).ok_or_else(|| NodeUrlError::Host(whole.clone()))?,
                port,
            )
        } else {
            let (name, port) = match authority.find(':') {
                Some(at) => authority.split_at(at),
                None => (authority, ""),
            };
            if port.matches(':').count() > 1 {
                return Err(NodeUrlError::Brackets(whole));
            }
            (
                named(name).ok_or_else(|| NodeUrlError::Host(whole.clone()))?,
                port,
            )
        };
        let port = match port.strip_prefix(':') {
            // `u16::from_str` would take a sign.
            Some(digits) if digits.bytes().all(|b| b.is_ascii_digit()) => digits.parse().ok(),
            Some(_) => None,
            None if port.is_empty() => Some(80),
            None => None,
        };
        let port = port
            .filter(|port| *port != 0)
            .ok_or(NodeUrlError::Port(whole))?;
        // Requests bring `/v1` along; many write it into the address, too.
        let path = path.trim_end_matches('/');
        let path = path.strip_suffix("/v1").unwrap_or(path);
        Ok(Self {
            host,
            port,
            path: path.to_owned(),
        })
    }
}

fn v6(text: &str) -> Option<Host> {
    let (address, scope) = match text.split_once('%') {
        // In a URL the sign itself is escaped (RFC 6874).
        Some((address, scope)) => (
            address,
            Some(
                scope
                    .strip_prefix("25")
                    .filter(|s| !s.is_empty())
                    .unwrap_or(scope),
            ),
        ),
        None => (text, None),
    };
    if scope
        .is_some_and(|s| s.is_empty() || s.contains(|c: char| !c.is_ascii_graphic() || c == '%'))
    {
        return None;
    }
    Some(Host::V6(address.parse().ok()?, scope.map(str::to_owned)))
}

fn named(text: &str) -> Option<Host> {
    if let Ok(address) = text.parse() {
        return Some(Host::V4(address));
    }
    let valid = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    // What ends in a number is taken for an address by URL parsers, and is not one.
    let numeric = text
        .rsplit('.')
        .next()
        .is_some_and(|last| last.bytes().all(|b| b.is_ascii_digit()));
    (!text.is_empty() && text.len() <= 253 && text.chars().all(valid) && !numeric)
        .then(|| Host::Name(text.to_ascii_lowercase()))
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::V4(address) => address.fmt(f),
            Self::V6(address, None) => write!(f, "[{address}]"),
            Self::V6(address, Some(scope)) => write!(f, "[{address}%{scope}]"),
        }
    }
}

impl fmt::Display for NodeUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}:{}{}", self.host, self.port, self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_every_form_come_back_as_they_are_meant() {
        for (text, meant) in [
            ("http://localhost:8000", "http://localhost:8000"),
            ("localhost:8000", "http://localhost:8000"),
            ("http://localhost", "http://localhost:80"),
            ("HTTP://LocalHost:1", "http://localhost:1"),
            (
                "http://node-7.example.org:8100/",
                "http://node-7.example.org:8100",
            ),
            ("node_7:65535", "http://node_7:65535"),
            ("10.0.0.1:8000", "http://10.0.0.1:8000"),
            ("http://10.0.0.1:8000/v1", "http://10.0.0.1:8000"),
            ("http://10.0.0.1:8000/v1/", "http://10.0.0.1:8000"),
            ("http://gateway:80/models/a", "http://gateway:80/models/a"),
            ("[::1]:8000", "http://[::1]:8000"),
            ("http://[::1]", "http://[::1]:80"),
            ("http://[::1]:8000/", "http://[::1]:8000"),
            ("http://[2001:DB8:0:0::1]:8000", "http://[2001:db8::1]:8000"),
            (
                "http://[::ffff:10.0.0.1]:8000",
                "http://[::ffff:10.0.0.1]:8000",
            ),
            ("http://[fe80::1%eth0]:8000", "http://[fe80::1%eth0]:8000"),
            ("http://[fe80::1%25eth0]:8000", "http://[fe80::1%eth0]:8000"),
            ("[fe80::1%3]:8000", "http://[fe80::1%3]:8000"),
            ("[fe80::1%25]:8000", "http://[fe80::1%25]:8000"),
            (
                "http://[fe80::1%25en0.5]:8000/v1",
                "http://[fe80::1%en0.5]:8000",
            ),
            ("http://[::]:9", "http://[::]:9"),
        ] {
            let parsed: NodeUrl = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(parsed.to_string(), meant, "{text}");
            let again: NodeUrl = meant.parse().unwrap();
            assert_eq!(again, parsed, "{text}");
        }
    }

    #[test]
    fn what_is_no_address_is_refused() {
        use NodeUrlError as E;
        let refused = |text: &str| text.parse::<NodeUrl>().unwrap_err();
        assert!(matches!(refused("https://a:1"), E::Scheme(..)));
        for text in [
            "",
            "http://",
            ":8000",
            "[::1",
            "[]:1",
            "[1.2.3.4]:1",
            "[::1%]:1",
            "a b:1",
            "1.2.3:1",
            "ä:1",
        ] {
            assert!(matches!(refused(text), E::Host(_) | E::Extra(_)), "{text}");
        }
        for text in ["::1:8000", "fe80::1", "a:1:2"] {
            assert!(matches!(refused(text), E::Brackets(_)), "{text}");
        }
        for text in ["a:", "a:0", "a:65536", "a:+1", "a:x", "[::1]8000"] {
            assert!(matches!(refused(text), E::Port(_)), "{text}");
        }
        for text in ["http://u@a:1", "a:1?x", "a:1#x"] {
            assert!(matches!(refused(text), E::Extra(_)), "{text}");
        }
    }

    #[test]
    fn scope_ids_reach_the_socket_address() {
        let node: NodeUrl = "[fe80::1%7]:8000".parse().unwrap();
        let Some(Ok(SocketAddr::V6(address))) = node.scoped() else {
            panic!("not resolved");
        };
        assert_eq!((address.scope_id(), address.port()), (7, 8000));
        assert_eq!(
            node.request_url("node-0", "/health"),
            "http://node-0:8000/health"
        );
        assert_eq!(node.authority(), "[fe80::1]:8000");
        let plain: NodeUrl = "[::1]:8000".parse().unwrap();
        assert!(plain.scoped().is_none());
        assert_eq!(
            plain.request_url("node-0", "/health"),
            "http://[::1]:8000/health"
        );
    }
}

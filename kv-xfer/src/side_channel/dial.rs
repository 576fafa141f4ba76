//! Which addresses may be dialled. Addresses come in with requests, from anyone who can reach the
//! router, so none is dialled unchecked.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use thiserror::Error;

use crate::peer::PeerAddr;

/// A network in CIDR form, such as `10.0.0.0/8` or `2001:db8::/32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Network {
    addr: IpAddr,
    prefix: u8,
}

impl Network {
    /// The network of the first `prefix` bits of `addr`; `None` when there are not so many bits.
    #[must_use]
    pub fn new(addr: IpAddr, prefix: u8) -> Option<Self> {
        let bits = if addr.is_ipv4() { 32 } else { 128 };
        (prefix <= bits).then_some(Self { addr, prefix })
    }

    /// Whether `ip` lies in it. An IPv4-mapped IPv6 address counts as IPv4.
    #[must_use]
    pub fn contains(&self, ip: IpAddr) -> bool {
        match (self.addr, ip.to_canonical()) {
            (IpAddr::V4(net), IpAddr::V4(ip)) => {
                let differ = net.to_bits() ^ ip.to_bits();
                differ.leading_zeros() >= u32::from(self.prefix)
            }
            (IpAddr::V6(net), IpAddr::V6(ip)) => {
                let differ = net.to_bits() ^ ip.to_bits();
                differ.leading_zeros() >= u32::from(self.prefix)
            }
            _ => false,
        }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.addr, self.prefix)
    }
}

/// A text that is no network.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} is not a network; write it like 10.0.0.0/8 or 2001:db8::/32")]
pub struct NetworkError(String);

impl FromStr for Network {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, NetworkError> {
        let parsed = text
            .split_once('/')
            .and_then(|(addr, prefix)| Self::new(addr.parse().ok()?, prefix.parse().ok()?));
        parsed.ok_or_else(|| NetworkError(text.chars().take(64).collect()))
    }
}

/// Why an address is not dialled.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DialRefused {
    /// It is neither a configured peer nor in an allowed network.
    #[error(
        "{addr} is neither a configured peer nor in an allowed network, not dialled; add it to the \
         peers, or its network to the allowed ones, if it is one of this cluster"
    )]
    NotAllowed {
        /// The address.
        addr: PeerAddr,
    },
    /// It stands for no single machine.
    #[error("{addr} is an unspecified, multicast or broadcast address, never dialled")]
    NotAHost {
        /// The address.
        addr: PeerAddr,
    },
    /// A name led to an address that it must not lead to.
    #[error("{addr} leads to {resolved}, not dialled; check the name service")]
    LeadsElsewhere {
        /// The address.
        addr: PeerAddr,
        /// Where it leads.
        resolved: SocketAddr,
    },
}

/// The rule. The default allows this machine's loopback addresses and nothing else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DialPolicy {
    loopback: bool,
    peers: BTreeSet<PeerAddr>,
    networks: Vec<Network>,
}

impl Default for DialPolicy {
    fn default() -> Self {
        Self {
            loopback: true,
            peers: BTreeSet::new(),
            networks: Vec::new(),
        }
    }
}

impl DialPolicy {
    /// Configured peers only, loopback not among them.
    #[must_use]
    pub fn configured_only(peers: impl IntoIterator<Item = PeerAddr>) -> Self {
        Self {
            loopback: false,
            peers: peers.into_iter().collect(),
            networks: Vec::new(),
        }
    }

    /// Allows one more peer: exactly this host and port. Only such a host may be a name.
    #[must_use]
    pub fn with_peer(mut self, peer: PeerAddr) -> Self {
        self.peers.insert(peer);
        self
    }

    /// Allows every port of every address of a network.
    #[must_use]
    pub fn with_network(mut self, network: Network) -> Self {
        self.networks.push(network);
        self
    }

    /// Checks an address before anything is looked up or opened.
    ///
    /// # Errors
    /// [`DialRefused`] when the rule does not allow it.
    pub fn check(&self, addr: &PeerAddr) -> Result<Dialable, DialRefused> {
        let ip = addr.ip();
        if ip.is_some_and(is_no_host) {
            return Err(DialRefused::NotAHost { addr: addr.clone() });
        }
        let configured = self.peers.contains(addr);
        let loopback =
            self.loopback && ip.map_or(addr.host() == "localhost", |ip| ip.is_loopback());
        let in_network = ip.is_some_and(|ip| self.networks.iter().any(|net| net.contains(ip)));
        if !(configured || loopback || in_network) {
            return Err(DialRefused::NotAllowed { addr: addr.clone() });
        }
        Ok(Dialable {
            addr: addr.clone(),
            only_loopback: loopback && !configured,
        })
    }
}

fn is_no_host(ip: IpAddr) -> bool {
    let broadcast = matches!(ip, IpAddr::V4(v4) if v4.is_broadcast());
    ip.is_unspecified() || ip.is_multicast() || broadcast
}

/// An address that a [`DialPolicy`] has allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dialable {
    addr: PeerAddr,
    only_loopback: bool,
}

impl Dialable {
    /// The address.
    #[must_use]
    pub fn addr(&self) -> &PeerAddr {
        &self.addr
    }

    /// Checks where a name led.
    pub(super) fn check_resolved(&self, resolved: SocketAddr) -> Result<(), DialRefused> {
        let ip = resolved.ip().to_canonical();
        if is_no_host(ip) || (self.only_loopback && !ip.is_loopback()) {
            return Err(DialRefused::LeadsElsewhere {
                addr: self.addr.clone(),
                resolved,
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(text: &str) -> PeerAddr {
        text.parse().unwrap()
    }

    #[test]
    fn the_default_is_loopback_only() {
        let policy = DialPolicy::default();
        for ok in [
            "127.0.0.1:1",
            "127.9.9.9:1",
            "[::1]:1",
            "localhost:1",
            "[::ffff:127.0.0.1]:1",
        ] {
            assert!(policy.check(&addr(ok)).is_ok(), "{ok}");
        }
        for bad in [
            "10.0.0.1:1",
            "decode-0:1",
            "[2001:db8::1]:1",
            "169.254.169.254:80",
        ] {
            assert!(
                matches!(
                    policy.check(&addr(bad)),
                    Err(DialRefused::NotAllowed { .. })
                ),
                "{bad}"
            );
        }
        for never in [
            "0.0.0.0:1",
            "[::]:1",
            "224.0.0.1:1",
            "[ff02::1]:1",
            "255.255.255.255:1",
        ] {
            let open = DialPolicy::default().with_network("0.0.0.0/0".parse().unwrap());
            assert!(matches!(
                open.check(&addr(never)),
                Err(DialRefused::NotAHost { .. })
            ));
        }
    }

    #[test]
    fn configured_peers_are_exact() {
        let policy = DialPolicy::configured_only([addr("decode-0:5600"), addr("[2001:db8::1]:5")]);
        assert!(policy.check(&addr("DECODE-0:5600")).is_ok());
        assert!(policy.check(&addr("[2001:DB8:0::1]:5")).is_ok());
        for bad in [
            "decode-0:5601",
            "decode-1:5600",
            "127.0.0.1:5600",
            "localhost:5600",
        ] {
            assert!(policy.check(&addr(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn networks_hold_addresses_not_names() {
        let policy = DialPolicy::configured_only([])
            .with_network("10.1.0.0/16".parse().unwrap())
            .with_network("2001:db8::/33".parse().unwrap());
        for ok in [
            "10.1.255.255:9",
            "[2001:db8:7fff::1]:9",
            "[::ffff:10.1.2.3]:9",
        ] {
            assert!(policy.check(&addr(ok)).is_ok(), "{ok}");
        }
        for bad in ["10.2.0.0:9", "[2001:db8:8000::1]:9", "name:9"] {
            assert!(policy.check(&addr(bad)).is_err(), "{bad}");
        }
        for text in [
            "10.0.0.0/33",
            "::/129",
            "10.0.0.0",
            "x/8",
            "10.0.0.0/",
            "/8",
            "1.1.1.1/-1",
        ] {
            assert!(text.parse::<Network>().is_err(), "{text}");
        }
        let all: Network = "0.0.0.0/0".parse().unwrap();
        assert!(all.contains("1.2.3.4".parse().unwrap()));
        assert!(!all.contains("::1".parse().unwrap()));
    }

    #[test]
    fn localhost_must_lead_to_this_machine() {
        let localhost = DialPolicy::default().check(&addr("localhost:1")).unwrap();
        assert!(localhost.check_resolved("[::1]:1".parse().unwrap()).is_ok());
        assert!(
            localhost
                .check_resolved("10.0.0.1:1".parse().unwrap())
                .is_err()
        );
        let named = DialPolicy::default()
            .with_peer(addr("d:1"))
            .check(&addr("d:1"))
            .unwrap();
        assert!(named.check_resolved("10.0.0.1:1".parse().unwrap()).is_ok());
        assert!(named.check_resolved("0.0.0.0:1".parse().unwrap()).is_err());
    }
}

//! What a cluster key keeps out, and what a descriptor that has been used is worth.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

mod common;
mod side_channel_common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use common::*;
use kv_xfer::clock::SystemClock;
use kv_xfer::descriptor::{ClusterKey, Host};
use kv_xfer::engine::{
    CardSource, ConnectError, Engine, EngineConfig, OfferError, ReadError, SideChannelCards,
};
use kv_xfer::ids::Rank;
use kv_xfer::layout::PoolOrder;
use kv_xfer::peer::{Features, PeerAddr};
use kv_xfer::side_channel::seal::{Challenge, Seal};
use kv_xfer::side_channel::wire::{self, Request};
use kv_xfer::side_channel::zmtp::{self, Decoder, Event, Limits};
use kv_xfer::side_channel::{
    Client, ClientConfig, DialPolicy, ReleaseRequest, RenewRequest, SideChannelError,
};
use kv_xfer::transport::sim::SimFabric;
use side_channel_common::{as_req, dial};

const SECOND: Duration = Duration::from_secs(1);

fn key(secret: &str) -> ClusterKey {
    ClusterKey::from_secret(secret.as_bytes()).unwrap()
}

fn cluster() -> ClusterKey {
    key("of-the-cluster-0123456789")
}

fn with_key(config: &mut EngineConfig, key: Option<ClusterKey>) {
    config.cluster_key = key;
}

/// A holder with the cluster's key, and a reader with another or none over the same fabric.
fn holder_and_reader(readers: Option<ClusterKey>) -> (Engine, Engine) {
    let fabric = Arc::new(SimFabric::new());
    let pool = || sim_pool(&fabric, layout(PoolOrder::LayerFirst), POOL_BLOCKS);
    let mut holders = config("decode");
    with_key(&mut holders, Some(cluster()));
    let mut reader = config("prefill");
    with_key(&mut reader, readers);
    (
        engine(holders, &pool(), &fabric),
        engine(reader, &pool(), &fabric),
    )
}

#[test]
fn engines_of_one_key_read_from_each_other_and_release() {
    let (holder, reader) = holder_and_reader(Some(cluster()));
    let blocks = ids(0..4);
    fill(holder.pool(), &blocks, 1);
    let leased = lease(&holder, "r", &blocks, None);
    let offer = reader.accept(&leased.remote, None, None).unwrap();
    let claimed = reader.pool().claim(ids(0..4)).unwrap();
    let landed = reader.read(request(&offer, claimed)).unwrap().wait();
    assert_eq!(wrong_bytes(&landed.unwrap().blocks, &blocks, 1), 0);
    // By a signed notice.
    eventually("the lease is released", || holder.stats().leases == 0);
    assert_eq!(holder.stats().notices_malformed, 0);

    // A descriptor that has been used is worth nothing: whoever says it again reads no blocks.
    fill(holder.pool(), &blocks, 2);
    let again = reader.accept(&leased.remote, None, None).unwrap();
    let claimed = reader.pool().claim(ids(8..12)).unwrap();
    let failure = reader.read(request(&again, claimed)).unwrap().wait();
    let failure = failure.unwrap_err();
    assert!(
        matches!(failure.error, ReadError::LeaseLost { .. }),
        "{failure}"
    );
    // Nor can its lease be brought back.
    assert!(reader.keep(&again, 100 * SECOND));
    eventually("the reader hears that it is over", || {
        reader.lease_remaining(&again).is_zero()
    });
    assert_eq!(holder.stats().leases, 0);
}

#[test]
fn strangers_get_no_card() {
    let (holder, _reader) = holder_and_reader(None);
    let address = holder.side_channel().unwrap().clone();
    let pool_layout = layout(PoolOrder::LayerFirst);
    for stranger in [None, Some(key("of-another-cluster-01234"))] {
        let mut config = config("stranger");
        with_key(&mut config, stranger.clone());
        let cards = SideChannelCards::new(&config, &pool_layout, Arc::new(SystemClock));
        let error = cards
            .fetch(&address, Rank::default(), 5 * SECOND)
            .unwrap_err();
        let ConnectError::SideChannel { cause, .. } = &error else {
            panic!("{error}");
        };
        let SideChannelError::PeerRefused { reason, .. } = &**cause else {
            panic!("{error}");
        };
        assert_eq!(reason, "mac", "{error}");
        assert!(error.to_string().contains("cluster key"), "{error}");
    }
    let mut friend = config("friend");
    with_key(&mut friend, Some(cluster()));
    let cards = SideChannelCards::new(&friend, &pool_layout, Arc::new(SystemClock));
    assert!(cards.fetch(&address, Rank::default(), 5 * SECOND).is_ok());
}

/// Sends a request over a connection and gives the parts of the reply.
fn exchange(stream: &mut TcpStream, payload: &[u8]) -> Vec<Vec<u8>> {
    stream.write_all(&zmtp::message(&[b"", payload])).unwrap();
    let mut decoder = Decoder::new(Limits {
        max_message: 1 << 20,
        max_parts: 8,
    });
    // What is decoded here comes after the handshake.
    let mut buf = BytesMut::from(&zmtp::greeting()[..]);
    let mut chunk = [0; 4096];
    loop {
        match decoder.decode(&mut buf).unwrap() {
            Some(Event::Message(parts)) => {
                return parts[1..].iter().map(|part| part.to_vec()).collect();
            }
            Some(_) => {}
            None => {
                let count = stream.read(&mut chunk).unwrap();
                assert!(count > 0, "closed");
                buf.extend_from_slice(&chunk[..count]);
            }
        }
    }
}

fn challenge(stream: &mut TcpStream) -> Challenge {
    let reply = exchange(stream, &Request::Hello.encode(None));
    Challenge::decode(&reply[0]).unwrap()
}

fn refused(reply: &[Vec<u8>]) -> String {
    wire::decode_refusal(&reply[0]).unwrap().0
}

#[test]
fn what_was_overheard_cannot_be_said_again() {
    let (holder, reader) = holder_and_reader(Some(cluster()));
    let address = holder.side_channel().unwrap();
    let socket = (address.ip().unwrap(), address.port()).into();
    let leased = lease(&holder, "r", &ids(0..4), Some(30 * SECOND));
    let offer = reader.accept(&leased.remote, None, None).unwrap();
    let (incarnation, lease) = (offer.ticket().incarnation, leased.lease);
    let secret = cluster();
    let renew = Request::Renew(RenewRequest {
        incarnation,
        lease,
        extension: 60 * SECOND,
    });
    let release = Request::Release(ReleaseRequest { incarnation, lease });
    let mut heard = Vec::new();
    let mut stream = as_req(socket);
    for request in [Request::Card(Rank::default()), renew] {
        let challenge = challenge(&mut stream);
        let seal = Seal {
            key: &secret,
            challenge,
        };
        let bytes = request.encode(Some(&seal));
        let reply = exchange(&mut stream, &bytes);
        assert!(wire::decode_refusal(&reply[0]).is_none(), "{request:?}");
        // On the same connection, which has used up its challenge.
        assert_eq!(refused(&exchange(&mut stream, &bytes)), "mac");
        heard.push(bytes);
    }
    for bytes in &heard {
        // On another one, before and after it has a challenge of its own.
        let mut stream = as_req(socket);
        assert_eq!(refused(&exchange(&mut stream, bytes)), "mac");
        let _unused = challenge(&mut stream);
        assert_eq!(refused(&exchange(&mut stream, bytes)), "mac");
        // Which that attempt has used up.
        let seal = Seal {
            key: &secret,
            challenge: _unused,
        };
        let late = release.encode(Some(&seal));
        assert_eq!(refused(&exchange(&mut stream, &late)), "mac");
    }
    assert_eq!(
        holder.stats().leases,
        1,
        "nothing of it has ended the lease"
    );
    let client = Client::new(ClientConfig {
        key: Some(secret),
        ..ClientConfig::default()
    });
    let request = ReleaseRequest { incarnation, lease };
    client
        .release(&dial(socket), Features::all(), request, 5 * SECOND)
        .unwrap();
    assert_eq!(holder.stats().leases, 0);
}

#[test]
fn a_descriptor_leads_nowhere_that_is_not_allowed() {
    let fabric = Arc::new(SimFabric::new());
    let pool = || sim_pool(&fabric, layout(PoolOrder::LayerFirst), POOL_BLOCKS);
    let holder = engine(config("decode"), &pool(), &fabric);
    let leased = lease(&holder, "r", &ids(0..4), None);
    let only = |policy: DialPolicy| {
        let mut config = config("prefill");
        config.dial = policy;
        engine(config, &pool(), &fabric)
    };
    let networks = DialPolicy::configured_only([PeerAddr::new("10.1.2.3", 7000).unwrap()])
        .with_network("10.7.0.0/16".parse().unwrap());
    for (policy, hosts) in [
        (
            DialPolicy::default(),
            vec![
                "169.254.169.254",
                "10.0.0.1",
                "192.168.0.1",
                "example.com",
                "0.0.0.0",
            ],
        ),
        (
            networks,
            // A configured host at another port, loopback in all its forms, names.
            vec![
                "10.1.2.3",
                "127.0.0.1",
                "::1",
                "::ffff:127.0.0.1",
                "localhost",
                "10.8.0.1",
                "metadata",
            ],
        ),
    ] {
        let reader = only(policy);
        for host in hosts {
            let mut forged = leased.remote.clone();
            forged.remote_host = Host::new(host).unwrap();
            // Refused at once, or when it is to be dialled; nothing is ever sent there.
            let offer = match reader.accept(&forged, None, None) {
                Ok(offer) => offer,
                Err(OfferError::Address(_)) => continue,
                Err(error) => panic!("{host}: {error}"),
            };
            let claimed = reader.pool().claim(ids(0..4)).unwrap();
            let failure = reader.read(request(&offer, claimed)).unwrap().wait();
            let failure = failure.unwrap_err();
            let refused = matches!(
                &failure.error,
                ReadError::Connect { cause: ConnectError::SideChannel { cause, .. }, .. }
                    if matches!(**cause, SideChannelError::Refused(_))
            );
            assert!(refused, "{host}: {failure}");
        }
    }
}

//! Client and server over real loopback sockets, and every way in which a server can fail a client.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod side_channel_common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kv_xfer::descriptor::ClusterKey;
use kv_xfer::ids::{Incarnation, LeaseId, Rank};
use kv_xfer::peer::{Feature, Features, PeerAddr};
use kv_xfer::side_channel::zmtp::{self, ZmtpError};
use kv_xfer::side_channel::{
    Client, ClientConfig, DialPolicy, DialRefused, ReleaseOutcome, ReleaseRequest, RenewOutcome,
    RenewRequest, Server, ServerConfig, ServerError, ServerLimits, SideChannelError, Step,
};
use side_channel_common::*;

const SECOND: Duration = Duration::from_secs(1);
const TP0: Rank = Rank { pp: 0, tp: 0 };

fn fetch(addr: SocketAddr, deadline: Duration) -> Result<(), SideChannelError> {
    Client::default()
        .fetch_card(&dial(addr), TP0, deadline)
        .map(|_| ())
}

/// Fetches with a deadline of 300 ms and checks that the error comes by then.
fn fetch_briefly(addr: SocketAddr) -> SideChannelError {
    let deadline = Duration::from_millis(300);
    let start = Instant::now();
    let error = fetch(addr, deadline).unwrap_err();
    // The limit and a tenth, and what a loaded machine needs to wake a thread.
    let limit = deadline.mul_f64(1.1) + Duration::from_millis(150);
    assert!(start.elapsed() < limit, "{:?}: {error}", start.elapsed());
    assert!(error.to_string().contains(&addr.to_string()), "{error}");
    error
}

#[test]
fn cards_are_served_over_ipv4_and_ipv6() {
    for bind in ["127.0.0.1:0", "[::1]:0"] {
        let server = start_at(bind, ServerLimits::default());
        let addr = server.addrs()[0];
        assert_ne!(addr.port(), 0);
        let client = Client::default();
        let card = client.fetch_card(&dial(addr), TP0, SECOND).unwrap();
        assert_eq!(&card.bytes[..], CARD);
        assert!(card.rtt() < SECOND);
        assert_eq!(card.remote, addr);
        // One machine, one clock: the offset is within half the round trip.
        let offset = card.clock_offset().unwrap();
        assert!(offset.as_secs_f64().abs() <= card.rtt().as_secs_f64() / 2.0 + 1e-6);
        let large = client
            .fetch_card(&dial(addr), Rank { pp: 0, tp: 1 }, SECOND)
            .unwrap();
        assert_eq!(large.bytes.len(), 900_000);
        assert_eq!(server.stats().requests, 2);
        server.shutdown(SECOND).unwrap();
        assert!(matches!(
            fetch(addr, SECOND),
            Err(SideChannelError::ConnectionRefused { .. })
        ));
    }
}

#[test]
fn one_server_listens_at_several_addresses() {
    let config = ServerConfig {
        bind: vec!["127.0.0.1:0".parse().unwrap(), "[::1]:0".parse().unwrap()],
        ..ServerConfig::at("127.0.0.1:0".parse().unwrap())
    };
    let server = Server::start(config, Arc::new(TestHandler::default())).unwrap();
    for addr in server.addrs() {
        fetch(*addr, SECOND).unwrap();
    }
    assert_eq!(server.addrs().len(), 2);
}

#[test]
fn localhost_is_looked_up_and_dialled() {
    let server = start(ServerLimits::default());
    let addr = PeerAddr::new("localhost", server.addrs()[0].port()).unwrap();
    let dialable = DialPolicy::default().check(&addr).unwrap();
    let card = Client::default().fetch_card(&dialable, TP0, SECOND);
    assert_eq!(&card.unwrap().bytes[..], CARD);
}

#[test]
fn a_taken_port_is_named() {
    let first = start(ServerLimits::default());
    let addr = first.addrs()[0];
    let again = Server::start(ServerConfig::at(addr), Arc::new(TestHandler::default()));
    match again {
        Err(ServerError::AddressTaken { addr: named }) => assert_eq!(named, addr),
        other => panic!("{other:?}"),
    }
    // The first one is not disturbed, and the port is free again after it.
    fetch(addr, SECOND).unwrap();
    drop(first);
    let second = Server::start(ServerConfig::at(addr), Arc::new(TestHandler::default())).unwrap();
    fetch(second.addrs()[0], SECOND).unwrap();
    let foreign = Server::start(
        ServerConfig::at("192.0.2.77:0".parse().unwrap()),
        Arc::new(TestHandler::default()),
    );
    assert!(matches!(foreign, Err(ServerError::Bind { .. })));
}

#[test]
fn own_requests_are_answered() {
    let server = start(ServerLimits::default());
    let peer = dial(server.addrs()[0]);
    let client = Client::default();
    let pong = client.ping(&peer, Features::all(), SECOND).unwrap();
    assert_eq!(pong.engine_id.as_str(), "decode-0");
    assert_eq!(pong.incarnation, INCARNATION);
    assert!(pong.clock_offset.is_some());
    let renew = |incarnation, lease| {
        let request = RenewRequest {
            incarnation,
            lease: LeaseId(lease),
            extension: Duration::from_millis(20_000),
        };
        client
            .renew(&peer, Features::all(), request, SECOND)
            .unwrap()
    };
    assert_eq!(
        renew(INCARNATION, 1),
        RenewOutcome::Renewed {
            remaining: Duration::from_secs(20)
        }
    );
    assert_eq!(
        renew(INCARNATION, 2),
        RenewOutcome::Refused {
            remaining: Duration::from_millis(5)
        }
    );
    assert_eq!(renew(INCARNATION, 3), RenewOutcome::UnknownLease);
    let restarted = RenewOutcome::Restarted {
        incarnation: INCARNATION,
    };
    assert_eq!(renew(Incarnation(1), 1), restarted);
    let release = |incarnation, lease| {
        let request = ReleaseRequest {
            incarnation,
            lease: LeaseId(lease),
        };
        client
            .release(&peer, Features::all(), request, SECOND)
            .unwrap()
    };
    assert_eq!(release(INCARNATION, 1), ReleaseOutcome::Released);
    assert_eq!(release(INCARNATION, 2), ReleaseOutcome::UnknownLease);
    assert_eq!(
        release(Incarnation(1), 1),
        ReleaseOutcome::Restarted {
            incarnation: INCARNATION
        }
    );
}

#[test]
fn changes_need_the_cluster_key_where_one_is_set() {
    let key = cluster_key(b"cluster-0123456789abcdef");
    let config = ServerConfig {
        key: Some(key.clone()),
        ..ServerConfig::at("127.0.0.1:0".parse().unwrap())
    };
    let handler = Arc::new(TestHandler::default());
    let server = Server::start(config, Arc::clone(&handler) as _).unwrap();
    let peer = dial(server.addrs()[0]);
    let request = ReleaseRequest {
        incarnation: INCARNATION,
        lease: LeaseId(1),
    };
    let release = |key: Option<ClusterKey>| {
        let client = Client::new(ClientConfig {
            key,
            ..ClientConfig::default()
        });
        client.release(&peer, Features::all(), request, SECOND)
    };
    for bad in [None, Some(cluster_key(b"other-0123456789abcdef"))] {
        match release(bad) {
            Err(SideChannelError::PeerRefused { reason, .. }) => assert_eq!(reason, "mac"),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(handler.released.load(Ordering::SeqCst), 0);
    assert_eq!(release(Some(key)).unwrap(), ReleaseOutcome::Released);
    assert_eq!(server.stats().refused, 2);
}

#[test]
fn nothing_is_sent_to_who_did_not_advertise_it() {
    let connections = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&connections);
    let addr = fake_server(move |_| {
        seen.fetch_add(1, Ordering::SeqCst);
    });
    let only_ping: Features = [Feature::Ping].into_iter().collect();
    let request = RenewRequest {
        incarnation: INCARNATION,
        lease: LeaseId(1),
        extension: SECOND,
    };
    let got = Client::default().renew(&dial(addr), only_ping, request, SECOND);
    assert!(matches!(
        got,
        Err(SideChannelError::NotAdvertised {
            feature: Feature::Renew,
            ..
        })
    ));
    let got = Client::default().ping(&dial(addr), Features::NONE, SECOND);
    assert!(matches!(got, Err(SideChannelError::NotAdvertised { .. })));
    // Nor is an address dialled that the rule does not allow.
    let only = DialPolicy::configured_only([]);
    assert!(matches!(
        only.check(&addr.into()),
        Err(DialRefused::NotAllowed { .. })
    ));
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(connections.load(Ordering::SeqCst), 0);
}

#[test]
fn unknown_ranks_are_refused_and_the_server_lives() {
    let server = start(ServerLimits::default());
    let addr = server.addrs()[0];
    for rank in [
        Rank { pp: 0, tp: 2 },
        Rank {
            pp: u32::MAX,
            tp: u32::MAX,
        },
    ] {
        match Client::default().fetch_card(&dial(addr), rank, SECOND) {
            Err(SideChannelError::PeerRefused { reason, detail, .. }) => {
                assert_eq!(reason, "unknown_rank");
                assert!(detail.contains(&rank.to_string()), "{detail}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(server.stats().refused, 2);
    // A handler that panics costs its connection and nothing else.
    let bug = Client::default().fetch_card(&dial(addr), Rank { pp: 9, tp: 9 }, SECOND);
    assert!(matches!(
        bug,
        Err(SideChannelError::Closed {
            step: Step::Reply,
            ..
        })
    ));
    wait_for(&server, "panic counted", |s| s.handler_panics == 1);
    fetch(addr, SECOND).unwrap();
}

#[test]
fn a_refused_connection_is_reported_at_once() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    drop(listener);
    let start = Instant::now();
    assert!(matches!(
        fetch(addr, Duration::from_secs(30)),
        Err(SideChannelError::ConnectionRefused { .. })
    ));
    assert!(start.elapsed() < SECOND);
}

#[test]
fn a_silent_server_times_out_in_the_step_it_is_silent_in() {
    let hold = |_: TcpStream| std::thread::sleep(Duration::from_secs(2));
    let cases: [(Step, SocketAddr); 4] = [
        (Step::Greeting, fake_server(hold)),
        (
            Step::Greeting,
            fake_server(move |mut s| {
                s.write_all(&greeting()[..11]).unwrap();
                hold(s);
            }),
        ),
        (
            Step::Ready,
            fake_server(move |mut s| {
                s.write_all(&greeting()).unwrap();
                hold(s);
            }),
        ),
        (
            Step::Reply,
            fake_server(move |mut s| {
                as_router(&mut s);
                hold(s);
            }),
        ),
    ];
    for (wanted, addr) in cases {
        match fetch_briefly(addr) {
            SideChannelError::Timeout { step, .. } => assert_eq!(step, wanted),
            other => panic!("{wanted:?}: {other}"),
        }
    }
    // A listener that never accepts: the system completes the connection, nobody greets.
    let never = TcpListener::bind("127.0.0.1:0").unwrap();
    assert!(matches!(
        fetch_briefly(never.local_addr().unwrap()),
        SideChannelError::Timeout {
            step: Step::Greeting,
            ..
        }
    ));
    assert!(matches!(
        fetch(never.local_addr().unwrap(), Duration::ZERO),
        Err(SideChannelError::Timeout { .. })
    ));
}

#[test]
fn a_server_that_drips_times_out() {
    let addr = fake_server(|mut s| {
        as_router(&mut s);
        let reply = zmtp::message(&[b"", &[7; 200]]);
        for byte in reply.iter() {
            if s.write_all(&[*byte]).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    assert!(matches!(
        fetch_briefly(addr),
        SideChannelError::Timeout {
            step: Step::Reply,
            ..
        }
    ));
}

#[test]
fn another_protocol_is_told_from_a_hang() {
    for banner in [
        &b"SSH-2.0-OpenSSH_9.2p1\r\n"[..],
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x15\x03\x01\x00\x02\x02\x0a",
        b"\x00",
        &[0xff; 64],
    ] {
        let banner = banner.to_vec();
        let addr = fake_server(move |mut s| {
            s.write_all(&banner).unwrap();
            std::thread::sleep(SECOND);
        });
        assert!(matches!(
            fetch_briefly(addr),
            SideChannelError::ProtocolMismatch {
                why: ZmtpError::NotZmtp { .. },
                ..
            }
        ));
    }
    let old = fake_server(|mut s| {
        s.write_all(&[0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 1, 5])
            .unwrap();
        std::thread::sleep(SECOND);
    });
    assert!(matches!(
        fetch_briefly(old),
        SideChannelError::ProtocolMismatch {
            why: ZmtpError::Version { major: 1 },
            ..
        }
    ));
    let curve = fake_server(|mut s| {
        let mut g = greeting();
        g[12..17].copy_from_slice(b"CURVE");
        s.write_all(&g).unwrap();
        std::thread::sleep(SECOND);
    });
    assert!(matches!(
        fetch_briefly(curve),
        SideChannelError::ProtocolMismatch {
            why: ZmtpError::Mechanism(m),
            ..
        } if m == "CURVE"
    ));
    for kind in ["PUB", "REQ", ""] {
        let other = fake_server(move |mut s| {
            s.write_all(&greeting()).unwrap();
            s.write_all(&zmtp::ready(kind)).unwrap();
            std::thread::sleep(SECOND);
        });
        assert!(matches!(
            fetch_briefly(other),
            SideChannelError::ProtocolMismatch {
                why: ZmtpError::SocketType(_),
                ..
            }
        ));
    }
    let refusing = fake_server(|mut s| {
        s.write_all(&greeting()).unwrap();
        s.write_all(&zmtp::error("not today")).unwrap();
        std::thread::sleep(SECOND);
    });
    assert!(matches!(
        fetch_briefly(refusing),
        SideChannelError::ProtocolMismatch {
            why: ZmtpError::Refused(why),
            ..
        } if why == "not today"
    ));
}

#[test]
fn a_server_that_closes_half_way_is_reported() {
    let at_once = fake_server(drop);
    let in_greeting = fake_server(|mut s| {
        let mut sink = [0; 64];
        s.read_exact(&mut sink).unwrap();
        s.write_all(&greeting()[..30]).unwrap();
    });
    let in_reply = fake_server(|mut s| {
        as_router(&mut s);
        let reply = zmtp::message(&[b"", &[7; 5000]]);
        s.write_all(&reply[..1000]).unwrap();
    });
    for (addr, wanted) in [
        (at_once, Step::Greeting),
        (in_greeting, Step::Greeting),
        (in_reply, Step::Reply),
    ] {
        match fetch_briefly(addr) {
            SideChannelError::Closed { step, .. } => {
                // Seen while sending when the close arrives first.
                assert!(step == wanted || step == Step::Ready, "{step:?}");
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn replies_that_are_too_long_are_not_waited_for() {
    for announced in [2_u64 << 20, 1 << 40, u64::MAX] {
        let addr = fake_server(move |mut s| {
            as_router(&mut s);
            s.write_all(&[1, 0, 3]).unwrap();
            s.write_all(&announced.to_be_bytes()).unwrap();
            std::thread::sleep(SECOND);
        });
        assert!(matches!(
            fetch_briefly(addr),
            SideChannelError::TooLarge { len, .. } if len == announced
        ));
    }
    // In many small parts, or in parts that are each within the limit.
    let many = fake_server(|mut s| {
        as_router(&mut s);
        let _ = s.write_all(&zmtp::message(&[&[][..]; 1000]));
        std::thread::sleep(SECOND);
    });
    assert!(matches!(
        fetch_briefly(many),
        SideChannelError::ProtocolMismatch {
            why: ZmtpError::TooManyParts { .. },
            ..
        }
    ));
}

#[test]
fn replies_that_make_no_sense_are_refused() {
    let clock = [0xcb, 0x3f, 0xf0, 0, 0, 0, 0, 0, 0];
    let nan = [0xcb, 0x7f, 0xf8, 0, 0, 0, 0, 0, 0];
    let cases: [&[&[u8]]; 8] = [
        &[b"x"],
        &[b""],
        &[b"", b"card"],
        &[b"", b"card", b""],
        &[b"", b"card", b"\xc3"],
        &[b"", b"card", &nan],
        &[b"", b"card", &clock, b"more"],
        &[b"id", b"card", &clock],
    ];
    for parts in cases {
        let reply = zmtp::message(parts);
        let addr = fake_server(move |mut s| {
            as_router(&mut s);
            s.write_all(&reply).unwrap();
            std::thread::sleep(SECOND);
        });
        let error = fetch_briefly(addr);
        assert!(
            matches!(error, SideChannelError::BadReply { .. }),
            "{parts:?}: {error}"
        );
    }
    // A PING in between is answered and does not disturb.
    let polite = fake_server(move |mut s| {
        as_router(&mut s);
        s.write_all(&[4, 7, 4, b'P', b'I', b'N', b'G', 0, 0])
            .unwrap();
        // The request may or may not have been read with the handshake.
        let mut heard = Vec::new();
        while !heard.ends_with(b"\x04\x05\x04PONG") {
            let mut byte = [0];
            s.read_exact(&mut byte).unwrap();
            heard.push(byte[0]);
        }
        s.write_all(&zmtp::message(&[b"", b"card", &clock]))
            .unwrap();
        std::thread::sleep(SECOND);
    });
    fetch(polite, SECOND).unwrap();
}

#[test]
fn clients_work_from_many_threads_and_inside_a_runtime() {
    let server = start(ServerLimits::default());
    let addr = server.addrs()[0];
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..20 {
                    fetch(addr, Duration::from_secs(5)).unwrap();
                }
            });
        }
    });
    assert_eq!(server.stats().requests, 160);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(async { fetch(addr, SECOND).unwrap() });
    wait_for(&server, "closed connections", |s| s.open == 0);
}

fn cluster_key(secret: &[u8]) -> ClusterKey {
    ClusterKey::from_secret(secret).unwrap()
}

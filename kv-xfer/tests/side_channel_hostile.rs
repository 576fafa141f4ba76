//! A crowd of hostile clients. The only test of its binary: it counts the process's descriptors.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod side_channel_common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use kv_xfer::ids::Rank;
use kv_xfer::side_channel::zmtp;
use kv_xfer::side_channel::{Client, ServerLimits};
use side_channel_common::*;

const CROWD: usize = 1000;
const SECOND: Duration = Duration::from_secs(1);

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    setrlimit(Resource::Nofile, raised).unwrap();
}

fn good_handshake(addr: SocketAddr) {
    let start = Instant::now();
    let card = Client::default()
        .fetch_card(&dial(addr), Rank { pp: 0, tp: 0 }, 5 * SECOND)
        .unwrap();
    assert_eq!(&card.bytes[..], CARD);
    assert!(start.elapsed() < SECOND, "{:?}", start.elapsed());
}

/// Something hostile, by number; the connection is returned where the client just sits there.
fn misbehave(addr: SocketAddr, kind: usize, noise: &[u8]) -> Option<TcpStream> {
    // Anything may fail: the server is free to close at any time.
    let mut stream = TcpStream::connect(addr).ok()?;
    let request = |stream: &mut TcpStream, payload: &[u8]| {
        let _ = stream.write_all(&greeting());
        let _ = stream.write_all(&zmtp::ready("REQ"));
        let _ = stream.write_all(&zmtp::message(&[b"", payload]));
        // Greeting, READY and the first byte of an answer, or the end.
        let _ = stream.set_read_timeout(Some(SECOND));
        let _ = stream.read_exact(&mut [0; 64 + 30 + 1]);
    };
    match kind % 12 {
        // Silence.
        0 => return Some(stream),
        // Half a greeting, then silence.
        1 => {
            let _ = stream.write_all(&greeting()[..30]);
            return Some(stream);
        }
        // A mebibyte of noise.
        2 => {
            let _ = stream.write_all(noise);
        }
        // The greeting, then noise.
        3 => {
            let _ = stream.write_all(&greeting());
            let _ = stream.write_all(noise);
        }
        // Closing with the server's greeting unread resets the connection.
        4 => {
            let _ = stream.write_all(&greeting());
            let mut first = [0; 1];
            let _ = stream.read(&mut first);
        }
        // A frame that claims to be as long as the address space, then silence.
        5 => {
            let _ = stream.write_all(&greeting());
            let _ = stream.write_all(&zmtp::ready("REQ"));
            let _ = stream.write_all(&[2, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
            return Some(stream);
        }
        // Parts without end.
        6 => {
            let _ = stream.write_all(&greeting());
            let _ = stream.write_all(&zmtp::ready("REQ"));
            let _ = stream.write_all(&[1, 0].repeat(100_000));
        }
        // Requests that are no MessagePack, or nested deeply.
        7 => request(&mut stream, &[0xc1]),
        8 => request(&mut stream, &[0x91; 4000]),
        // A rank that is not there; a request that nobody knows.
        9 => request(&mut stream, b"\x93\xc4\x0cget_meta_msg\xcc\xff\xcc\xff"),
        10 => request(&mut stream, b"\x91\xc4\x08kvx_nope"),
        // Another protocol.
        _ => {
            let _ = stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n");
        }
    }
    None
}

#[test]
fn a_hostile_crowd_neither_stops_service_nor_leaks() {
    raise_descriptor_limit();
    // Descriptors beyond 1024 must not matter.
    let ballast: Vec<_> = (0..1500)
        .map(|_| std::fs::File::open("/dev/null").unwrap())
        .collect();
    let limits = ServerLimits {
        handshake: 4 * SECOND,
        idle: 2 * SECOND,
        ..ServerLimits::default()
    };
    let server = start(limits);
    let addr = server.addrs()[0];
    good_handshake(addr);
    wait_for(&server, "closed connections", |s| s.open == 0);
    let base = descriptors();

    let noise: Vec<u8> = (0..1 << 20).map(|i: u32| (i * 31 % 251) as u8).collect();
    let sitting: Vec<_> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4)
            .map(|worker| {
                let noise = &noise;
                scope.spawn(move || {
                    (worker..CROWD)
                        .step_by(4)
                        .filter_map(|i| misbehave(addr, i / 4, noise))
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        workers
            .into_iter()
            .flat_map(|worker| worker.join().unwrap())
            .collect()
    });
    // While some of the crowd still sits there, others are served.
    good_handshake(addr);
    wait_for(&server, "whole crowd", |s| s.accepted >= CROWD as u64 + 2);
    assert!(server.stats().open <= limits.max_connections as u64);

    // More silent clients than there is room for: the newest is served nevertheless.
    let silent: Vec<_> = (0..CROWD)
        .map(|_| TcpStream::connect(addr).unwrap())
        .collect();
    good_handshake(addr);
    let stats = server.stats();
    assert!(stats.open <= limits.max_connections as u64, "{stats:?}");
    assert!(stats.shed > 0, "{stats:?}");

    // Those that just sit there are closed when their time is over, though they stay.
    wait_for(&server, "end of silence", |s| s.open == 0);
    drop((silent, sitting));
    let mut now = descriptors();
    for _ in 0..100 {
        if now <= base {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
        now = descriptors();
    }
    assert_eq!(now, base);
    good_handshake(addr);
    let stats = server.stats();
    assert!(stats.malformed >= 100, "{stats:?}");
    assert!(stats.unknown >= 10, "{stats:?}");
    assert!(stats.refused >= 10, "{stats:?}");
    assert!(stats.timed_out >= 100, "{stats:?}");
    assert_eq!(stats.handler_panics, 0);
    server.shutdown(SECOND).unwrap();
    drop(ballast);
}

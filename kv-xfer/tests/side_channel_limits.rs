//! The server's deadlines and manners, one connection at a time.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod side_channel_common;

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_xfer::ids::Rank;
use kv_xfer::side_channel::zmtp;
use kv_xfer::side_channel::{
    Client, Handler, PingInfo, ReleaseOutcome, ReleaseRequest, RenewOutcome, RenewRequest, Server,
    ServerConfig, ServerError, ServerLimits,
};
use side_channel_common::*;

const GET_TP0: &[u8] = b"\x93\xc4\x0cget_meta_msg\x00\x00";

fn brief() -> ServerLimits {
    ServerLimits {
        handshake: Duration::from_millis(200),
        io: Duration::from_millis(200),
        idle: Duration::from_millis(400),
        ..ServerLimits::default()
    }
}

/// Reads until the server closes; how long that took.
fn until_closed(stream: &mut std::net::TcpStream) -> Duration {
    let start = Instant::now();
    let mut sink = Vec::new();
    let _ = stream.read_to_end(&mut sink);
    start.elapsed()
}

#[test]
fn an_idle_connection_is_closed_and_a_busy_one_kept() {
    let server = start(brief());
    let addr = server.addrs()[0];
    let mut busy = as_req(addr);
    // Longer than any limit, with a request every 100 ms.
    for _ in 0..10 {
        busy.write_all(&zmtp::message(&[b"", GET_TP0])).unwrap();
        let mut reply = [0; 2 + 2 + 14 + 2 + 9];
        busy.read_exact(&mut reply).unwrap();
        assert_eq!(&reply[4..18], CARD);
        std::thread::sleep(Duration::from_millis(100));
    }
    let idle = until_closed(&mut busy);
    assert!(idle < Duration::from_secs(2), "{idle:?}");
    wait_for(&server, "timeout", |s| s.timed_out == 1 && s.open == 0);
}

#[test]
fn a_request_that_drips_is_cut_off() {
    let server = start(brief());
    let mut slow = as_req(server.addrs()[0]);
    slow.set_read_timeout(Some(Duration::from_millis(20)))
        .unwrap();
    let start = Instant::now();
    for byte in zmtp::message(&[b"", GET_TP0]).iter() {
        let mut sink = [0; 1];
        if slow.write_all(&[*byte]).is_err() || matches!(slow.read(&mut sink), Ok(0)) {
            break;
        }
    }
    assert!(start.elapsed() < Duration::from_secs(1));
    wait_for(&server, "timeout", |s| s.timed_out == 1 && s.open == 0);
}

#[test]
fn a_reader_that_does_not_take_its_reply_is_cut_off() {
    let server = start(brief());
    let mut stream = as_req(server.addrs()[0]);
    // Cards of 900 KB, more than the socket buffers hold, none of them taken.
    let request = zmtp::message(&[b"", b"\x93\xc4\x0cget_meta_msg\x00\x01"]);
    for _ in 0..50 {
        if stream.write_all(&request).is_err() {
            break;
        }
    }
    wait_for(&server, "timeout", |s| s.timed_out == 1 && s.open == 0);
    Client::default()
        .fetch_card(
            &dial(server.addrs()[0]),
            Rank { pp: 0, tp: 0 },
            Duration::from_secs(1),
        )
        .unwrap();
}

#[test]
fn the_way_back_is_kept_and_pings_are_answered() {
    let server = start(ServerLimits::default());
    let mut stream = as_req(server.addrs()[0]);
    // As REQ with a request number does, or a proxy in between.
    stream
        .write_all(&zmtp::message(&[b"hop", b"", GET_TP0]))
        .unwrap();
    let mut head = [0; 5 + 2];
    stream.read_exact(&mut head).unwrap();
    assert_eq!(&head, b"\x01\x03hop\x01\x00");
    let mut rest = vec![0; 2 + CARD.len() + 2 + 9];
    stream.read_exact(&mut rest).unwrap();
    assert_eq!(rest[CARD.len() + 4], 0xcb);
    stream.write_all(b"\x04\x09\x04PING\x00\x01xy").unwrap();
    let mut pong = [0; 9];
    stream.read_exact(&mut pong).unwrap();
    assert_eq!(&pong, b"\x04\x07\x04PONGxy");
    // No delimiter: dropped and counted.
    stream.write_all(&zmtp::message(&[GET_TP0])).unwrap();
    until_closed(&mut stream);
    wait_for(&server, "malformed", |s| s.malformed == 1 && s.open == 0);
}

#[test]
fn a_socket_that_does_not_fit_is_told_so() {
    let server = start(ServerLimits::default());
    let mut stream = std::net::TcpStream::connect(server.addrs()[0]).unwrap();
    stream.write_all(&greeting()).unwrap();
    stream.write_all(&zmtp::ready("SUB")).unwrap();
    let mut all = Vec::new();
    let _ = stream.read_to_end(&mut all);
    let tail = zmtp::error("Invalid socket type");
    assert!(all.ends_with(&tail), "{all:x?}");
}

#[test]
fn clients_in_use_outlive_silent_ones() {
    let server = start(ServerLimits {
        max_connections: 8,
        ..ServerLimits::default()
    });
    let addr = server.addrs()[0];
    let silent = || std::net::TcpStream::connect(addr).unwrap();
    let mut ask = {
        let mut stream = as_req(addr);
        move || {
            stream.write_all(&zmtp::message(&[b"", GET_TP0])).unwrap();
            stream.read_exact(&mut [0; 29]).unwrap();
        }
    };
    ask();
    let early: Vec<_> = (0..7).map(|_| silent()).collect();
    wait_for(&server, "full house", |s| s.open == 8);
    std::thread::sleep(Duration::from_millis(150));
    // Older than all of them, and yet it stays.
    let late: Vec<_> = (0..7).map(|_| silent()).collect();
    wait_for(&server, "room made", |s| s.shed == 7);
    ask();
    assert_eq!(server.stats().open, 8);
    drop((early, late));
}

struct Stuck(mpsc::SyncSender<()>);

impl Handler for Stuck {
    fn card(&self, _: Rank) -> Option<Bytes> {
        let _ = self.0.send(());
        std::thread::sleep(Duration::from_millis(600));
        None
    }
    fn ping(&self) -> PingInfo {
        TestHandler::default().ping()
    }
    fn renew(&self, _: &RenewRequest) -> RenewOutcome {
        RenewOutcome::UnknownLease
    }
    fn release(&self, _: &ReleaseRequest) -> ReleaseOutcome {
        ReleaseOutcome::UnknownLease
    }
}

#[test]
fn shutdown_is_bounded() {
    let server = start(ServerLimits::default());
    let mut open = as_req(server.addrs()[0]);
    let start = Instant::now();
    server.shutdown(Duration::from_secs(5)).unwrap();
    until_closed(&mut open);
    assert!(start.elapsed() < Duration::from_secs(1));

    let (entered, wait) = mpsc::sync_channel(1);
    let config = ServerConfig::at("127.0.0.1:0".parse().unwrap());
    let stuck = Server::start(config, Arc::new(Stuck(entered))).unwrap();
    let mut stream = as_req(stuck.addrs()[0]);
    stream.write_all(&zmtp::message(&[b"", GET_TP0])).unwrap();
    wait.recv().unwrap();
    let start = Instant::now();
    assert!(matches!(
        stuck.shutdown(Duration::from_millis(100)),
        Err(ServerError::StillRunning { .. })
    ));
    assert!(start.elapsed() < Duration::from_millis(400));
}

#[test]
fn no_address_is_an_error() {
    let config = ServerConfig {
        bind: Vec::new(),
        ..ServerConfig::at("127.0.0.1:0".parse().unwrap())
    };
    assert!(matches!(
        Server::start(config, Arc::new(TestHandler::default())),
        Err(ServerError::NoAddress)
    ));
}

//! What the side-channel tests share.
#![allow(dead_code)]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use kv_xfer::ids::{EngineId, Incarnation, LeaseId, Rank};
use kv_xfer::side_channel::{
    DialPolicy, Dialable, Handler, PingInfo, ReleaseOutcome, ReleaseRequest, RenewOutcome,
    RenewRequest, Server, ServerConfig, ServerLimits, ServerStats,
};

pub const INCARNATION: Incarnation = Incarnation(77);
pub const CARD: &[u8] = b"\x81\xa1acard of tp0";

/// Serves tp0 (a small card) and tp1 (900 KB), renews lease 1, knows no other lease.
#[derive(Default)]
pub struct TestHandler {
    pub released: AtomicU64,
}

impl Handler for TestHandler {
    fn card(&self, rank: Rank) -> Option<Bytes> {
        match rank {
            Rank { pp: 0, tp: 0 } => Some(Bytes::from_static(CARD)),
            Rank { pp: 0, tp: 1 } => Some(Bytes::from(vec![7; 900_000])),
            Rank { pp: 9, tp: 9 } => panic!("the handler has a bug"),
            _ => None,
        }
    }

    fn ping(&self) -> PingInfo {
        PingInfo {
            engine_id: EngineId::new("decode-0").unwrap(),
            incarnation: INCARNATION,
        }
    }

    fn renew(&self, request: &RenewRequest) -> RenewOutcome {
        if request.incarnation != INCARNATION {
            return RenewOutcome::Restarted {
                incarnation: INCARNATION,
            };
        }
        match request.lease {
            LeaseId(1) => RenewOutcome::Renewed {
                remaining: request.extension,
            },
            LeaseId(2) => RenewOutcome::Refused {
                remaining: Duration::from_millis(5),
            },
            _ => RenewOutcome::UnknownLease,
        }
    }

    fn release(&self, request: &ReleaseRequest) -> ReleaseOutcome {
        if request.incarnation != INCARNATION {
            return ReleaseOutcome::Restarted {
                incarnation: INCARNATION,
            };
        }
        if request.lease != LeaseId(1) {
            return ReleaseOutcome::UnknownLease;
        }
        self.released.fetch_add(1, Ordering::SeqCst);
        ReleaseOutcome::Released
    }
}

pub fn start(limits: ServerLimits) -> Server {
    start_at("127.0.0.1:0", limits)
}

pub fn start_at(addr: &str, limits: ServerLimits) -> Server {
    let config = ServerConfig {
        limits,
        ..ServerConfig::at(addr.parse().unwrap())
    };
    Server::start(config, Arc::new(TestHandler::default())).unwrap()
}

pub fn dial(addr: SocketAddr) -> Dialable {
    DialPolicy::default().check(&addr.into()).unwrap()
}

/// Waits until the server's counts are as wanted.
pub fn wait_for(server: &Server, what: &str, wanted: impl Fn(&ServerStats) -> bool) {
    for _ in 0..2000 {
        if wanted(&server.stats()) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("no {what}: {:?}", server.stats());
}

/// Greeting of ZMTP 3.0 with NULL.
pub fn greeting() -> Vec<u8> {
    kv_xfer::side_channel::zmtp::greeting().to_vec()
}

/// A listener that hands every connection to `serve`, which may keep it open by keeping it.
pub fn fake_server(serve: impl Fn(TcpStream) + Send + Sync + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let serve = Arc::new(serve);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let serve = Arc::clone(&serve);
            std::thread::spawn(move || serve(stream));
        }
    });
    addr
}

/// Does the ZMTP handshake as a ROUTER and reads the first request.
pub fn as_router(stream: &mut TcpStream) {
    stream.write_all(&greeting()).unwrap();
    let mut buf = [0; 64];
    stream.read_exact(&mut buf).unwrap();
    stream
        .write_all(&kv_xfer::side_channel::zmtp::ready("ROUTER"))
        .unwrap();
    let mut chunk = [0; 512];
    let _ = stream.read(&mut chunk);
}

/// Does the ZMTP handshake as a REQ.
pub fn as_req(addr: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    stream.write_all(&greeting()).unwrap();
    let mut buf = [0; 64];
    stream.read_exact(&mut buf).unwrap();
    stream
        .write_all(&kv_xfer::side_channel::zmtp::ready("REQ"))
        .unwrap();
    let mut ready = vec![0; kv_xfer::side_channel::zmtp::ready("ROUTER").len()];
    stream.read_exact(&mut ready).unwrap();
    stream
}

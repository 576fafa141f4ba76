//! Against other implementations of ZeroMQ: libzmq, through Python's `pyzmq`, doing what vLLM does, and
//! the `zeromq` crate.
//!
//! The Python tests install `pyzmq` and `msgspec` into a folder of the build directory. Where that is
//! not possible they say `skipped: reason`; with `KV_XFER_REQUIRE_PYZMQ=1` they fail instead.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod side_channel_common;

use std::io::Write as _;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use kv_xfer::ids::{AgentName, EngineId, Incarnation, LeaseId, Rank};
use kv_xfer::layout::{MemKind, RegionGeometry};
use kv_xfer::peer::{
    Card, CardLimits, CardPolicy, CompatFactors, Features, PROTOCOL_VERSION, PeerCard, VllmFields,
    decode_reply, encode_reply,
};
use kv_xfer::side_channel::{
    Client, Handler, PingInfo, ReleaseOutcome, ReleaseRequest, RenewOutcome, RenewRequest, Server,
    ServerConfig, ServerLimits,
};
use side_channel_common::*;

const SECOND: Duration = Duration::from_secs(1);

/// Where `pyzmq` and `msgspec` are, or why they are not.
static PACKAGES: LazyLock<Result<PathBuf, String>> = LazyLock::new(|| {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("python");
    let works = |dir: &Path| {
        python(dir)
            .args(["-c", "import zmq, msgspec"])
            .output()
            .is_ok_and(|o| o.status.success())
    };
    if works(&target) {
        return Ok(target);
    }
    let output = Command::new("python3")
        .args(["-m", "pip", "install", "--quiet", "--upgrade", "--target"])
        .arg(&target)
        .args(["pyzmq==27.3.0", "msgspec==0.23.0"])
        .output()
        .map_err(|e| format!("python3 cannot be run: {e}"))?;
    if works(&target) {
        return Ok(target);
    }
    Err(format!(
        "pyzmq and msgspec cannot be installed: {}",
        String::from_utf8_lossy(&output.stderr)
    ))
});

fn python(packages: &Path) -> Command {
    let mut command = Command::new("python3");
    command.env("PYTHONPATH", packages);
    command
}

/// The packages; `None`, said aloud, where they cannot be had.
fn packages() -> Option<&'static Path> {
    match &*PACKAGES {
        Ok(dir) => Some(dir),
        Err(reason) => {
            assert!(
                std::env::var_os("KV_XFER_REQUIRE_PYZMQ").is_none(),
                "{reason}"
            );
            let _ = writeln!(std::io::stderr(), "skipped: {reason}");
            None
        }
    }
}

fn run(packages: &Path, script: &str, args: &[&str]) -> Output {
    let output = python(packages)
        .args(["-c", script])
        .args(args)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// Serves a real card for tp0.
struct CardHandler(Bytes);

impl Handler for CardHandler {
    fn card(&self, rank: Rank) -> Option<Bytes> {
        (rank == Rank::default()).then(|| self.0.clone())
    }
    fn ping(&self) -> PingInfo {
        TestHandler::default().ping()
    }
    fn renew(&self, request: &RenewRequest) -> RenewOutcome {
        TestHandler::default().renew(request)
    }
    fn release(&self, request: &ReleaseRequest) -> ReleaseOutcome {
        TestHandler::default().release(request)
    }
}

fn card() -> Card {
    let region = |i: u64| RegionGeometry {
        base: 0x7f00_0000_0000 + (i << 30),
        block_len: 32_768,
        block_stride: 32_768,
        block_count: 1000,
        mem: MemKind::Vram,
        device: 3,
    };
    Card {
        engine_id: EngineId::new("decode-0").unwrap(),
        incarnation: Incarnation(u64::MAX),
        rank: Rank::default(),
        agent: AgentName::new("decode-0/0").unwrap(),
        nixl_metadata: vec![0xfe; 456],
        regions: (0..64).map(region).collect(),
        layout: vec![1, 2, 3],
        lease_words: RegionGeometry {
            block_len: 8,
            block_stride: 8,
            mem: MemKind::Dram,
            device: 0,
            ..region(100)
        },
        compat: CompatFactors {
            protocol: PROTOCOL_VERSION,
            model: "org/model".into(),
            dtype: "bfloat16".into(),
            block_tokens: 16,
            layout_fingerprint: [1; 32],
            extra: std::collections::BTreeMap::new(),
        },
        compat_hash: Some("ab".repeat(32)),
        features: Features::all(),
        vllm: VllmFields::default(),
    }
}

/// What a vLLM reader does, with the exact types that its decoder insists on.
const VLLM_CLIENT: &str = r#"
import sys, time, msgspec, zmq
from typing import Optional

class Payload(msgspec.Struct):
    compatibility_hash: str
    agent_metadata_bytes: bytes

class Metadata(msgspec.Struct):
    engine_id: str
    agent_metadata: bytes
    kv_caches_base_addr: list[int]
    device_id: int
    num_blocks: int
    block_lens: list[int]
    block_strides: list[int]
    kv_cache_layout: str
    block_size: int
    ssm_sizes: tuple[int, int]
    attn_backend_name: str
    physical_blocks_per_logical_kv_block: int
    region_num_blocks: Optional[list[int]] = None
    region_group_ids: Optional[list[int]] = None
    region_names: Optional[list[str]] = None
    region_mem_types: Optional[list[str]] = None
    dcp_size: int = 1
    pcp_size: int = 1
    ple_block_len: Optional[int] = None

addr = sys.argv[1]
context = zmq.Context()
sock = context.socket(zmq.REQ)
sock.setsockopt(zmq.RCVTIMEO, 5000)
sock.setsockopt(zmq.LINGER, 0)
sock.setsockopt(zmq.IPV6, 1)
sock.connect(addr)
request = msgspec.msgpack.encode((b"get_meta_msg", 0, 0))
assert request == bytes.fromhex("93c40c6765745f6d6574615f6d73670000")
for _ in range(3):
    before = time.perf_counter()
    sock.send(request)
    parts = sock.recv_multipart()
    after = time.perf_counter()
    assert len(parts) == 2, parts
    payload = msgspec.msgpack.Decoder(Payload).decode(parts[0])
    assert payload.compatibility_hash == "ab" * 32
    clock = msgspec.msgpack.Decoder(float).decode(parts[1])
    assert before <= clock <= after, (before, clock, after)
    m = msgspec.msgpack.Decoder(Metadata).decode(payload.agent_metadata_bytes)
    assert m.engine_id == "decode-0" and m.agent_metadata == b"\xfe" * 456
    assert m.kv_caches_base_addr == [0x7f0000000000 + (i << 30) for i in range(64)]
    assert (m.device_id, m.num_blocks, m.block_size) == (3, 1000, 16)
    assert m.block_lens == [32768] * 64 == m.block_strides
    assert m.ssm_sizes == (0, 0) and m.physical_blocks_per_logical_kv_block == 1
    assert m.region_num_blocks is None and m.region_mem_types == ["VRAM"] * 64
# A rank that is not there: one part, at once, instead of a timeout.
sock.send(msgspec.msgpack.encode((b"get_meta_msg", 0, 9)))
assert len(sock.recv_multipart()) == 1
# DEALER with its own delimiter, REQ with correlation and relaxed order, with heartbeats.
dealer = context.socket(zmq.DEALER)
dealer.setsockopt(zmq.RCVTIMEO, 5000)
dealer.setsockopt(zmq.IPV6, 1)
dealer.setsockopt(zmq.HEARTBEAT_IVL, 100)
dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1000)
dealer.setsockopt(zmq.ROUTING_ID, b"me")
dealer.connect(addr)
for _ in range(2):
    dealer.send_multipart([b"", request])
    parts = dealer.recv_multipart()
    assert parts[0] == b"" and len(parts) == 3
    time.sleep(0.5)
req = context.socket(zmq.REQ)
req.setsockopt(zmq.RCVTIMEO, 5000)
req.setsockopt(zmq.IPV6, 1)
req.setsockopt(zmq.REQ_CORRELATE, 1)
req.setsockopt(zmq.REQ_RELAXED, 1)
req.connect(addr)
req.send(request)
assert len(req.recv_multipart()) == 2
context.destroy(linger=0)
"#;

#[test]
fn a_vllm_reader_is_served() {
    let Some(packages) = packages() else { return };
    for bind in ["127.0.0.1:0", "[::1]:0"] {
        let reply = encode_reply(&card(), None, &CardLimits::default()).unwrap();
        let server = Server::start(
            ServerConfig::at(bind.parse().unwrap()),
            Arc::new(CardHandler(reply.into())),
        )
        .unwrap();
        run(
            packages,
            VLLM_CLIENT,
            &[&format!("tcp://{}", server.addrs()[0])],
        );
        let stats = server.stats();
        assert_eq!((stats.requests, stats.refused), (6, 1), "{stats:?}");
        assert_eq!(stats.malformed, 0);
    }
}

/// vLLM's listener: serves what it is given as hex, once per rank, then ends with the request count.
const VLLM_SERVER: &str = r#"
import sys, time, msgspec, zmq
metadata = msgspec.msgpack.encode({
    "engine_id": "vllm-0", "agent_metadata": b"nixl" * 100, "kv_caches_base_addr": [4096, 1 << 45],
    "device_id": 1, "num_blocks": 10, "block_lens": [64, 64], "block_strides": [64, 128],
    "kv_cache_layout": "LBHNC", "block_size": 16, "ssm_sizes": (0, 0),
    "attn_backend_name": "FLASH_ATTN", "physical_blocks_per_logical_kv_block": 1,
    "dcp_size": 1, "pcp_size": 1})
payload = msgspec.msgpack.encode(
    {"compatibility_hash": "cd" * 32, "agent_metadata_bytes": metadata})
sock = zmq.Context().socket(zmq.ROUTER)
sock.setsockopt(zmq.LINGER, 1000)
port = sock.bind_to_random_port("tcp://127.0.0.1")
print(port, flush=True)
for _ in range(2):
    identity, empty, request = sock.recv_multipart()
    assert empty == b""
    name, pp, tp = msgspec.msgpack.decode(request)
    assert (name, pp, tp) == (b"get_meta_msg", 0, 300)
    clock = msgspec.msgpack.encode(time.perf_counter())
    sock.send_multipart((identity, b"", payload, clock))
"#;

#[test]
fn a_vllm_listener_is_read() {
    let Some(packages) = packages() else { return };
    let mut child = python(packages)
        .args(["-c", VLLM_SERVER])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut port = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut port)
        .unwrap();
    let addr = format!("127.0.0.1:{}", port.trim()).parse().unwrap();
    for _ in 0..2 {
        let rank = Rank { pp: 0, tp: 300 };
        let got = Client::default()
            .fetch_card(&dial(addr), rank, 5 * SECOND)
            .unwrap();
        // The same machine's clock: perf_counter and ours are one.
        let offset = got.clock_offset().unwrap();
        assert!(offset.as_secs_f64().abs() <= got.rtt().as_secs_f64() / 2.0 + 1e-6);
        let open = CardPolicy {
            allow_unchecked: true,
            vllm_hash: Some("cd".repeat(32)),
            ..CardPolicy::default()
        };
        match decode_reply(&addr.into(), &got.bytes, &open).unwrap() {
            PeerCard::Vllm(card) => assert_eq!(card.regions[1].base, 1 << 45),
            other => panic!("{other:?}"),
        }
    }
    assert!(child.wait().unwrap().success());
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

#[test]
fn the_zeromq_crate_is_served() {
    use zeromq::{Socket, SocketRecv, SocketSend};
    let server = start(ServerLimits::default());
    let addr = server.addrs()[0];
    runtime().block_on(async {
        let mut req = zeromq::ReqSocket::new();
        req.connect(&format!("tcp://{addr}")).await.unwrap();
        for _ in 0..3 {
            let request = b"\x93\xc4\x0cget_meta_msg\x00\x00".to_vec();
            req.send(request.into()).await.unwrap();
            let reply = req.recv().await.unwrap();
            assert_eq!(reply.len(), 2);
            assert_eq!(&reply.get(0).unwrap()[..], CARD);
        }
    });
}

#[test]
fn the_zeromq_crate_is_read() {
    use zeromq::{Socket, SocketRecv, SocketSend};
    let (send, receive) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        runtime().block_on(async {
            let mut router = zeromq::RouterSocket::new();
            let bound = router.bind("tcp://127.0.0.1:0").await.unwrap();
            send.send(bound.to_string()).unwrap();
            let mut parts = router.recv().await.unwrap().into_vecdeque();
            assert_eq!(parts.len(), 3);
            parts.pop_back();
            let reply = kv_xfer::side_channel::wire::encode_renewed(&RenewOutcome::UnknownLease);
            parts.push_back(reply.into());
            let message = zeromq::ZmqMessage::try_from(parts).unwrap();
            router.send(message).await.unwrap();
            // Until the client has read it.
            let _ = tokio::time::timeout(SECOND, router.recv()).await;
        });
    });
    let bound = receive.recv().unwrap();
    let addr = bound.strip_prefix("tcp://").unwrap().parse().unwrap();
    let request = RenewRequest {
        incarnation: Incarnation(1),
        lease: LeaseId(1),
        extension: SECOND,
    };
    let got = Client::default().renew(&dial(addr), Features::all(), request, SECOND);
    assert_eq!(got.unwrap(), RenewOutcome::UnknownLease);
    thread.join().unwrap();
}

//! The engine when what it stands on fails: agents that cannot be destroyed, connections that break
//! quietly, peers that never answer, calls that hang, callbacks that panic.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

mod common;

use std::future::Future;
use std::num::NonZeroU16;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use common::*;
use kv_xfer::clock::{Clock, MonoTime, SystemClock};
use kv_xfer::descriptor::LeaseRef;
use kv_xfer::engine::{
    CardSource, ConnectError, Direction, Engine, EngineConfig, FailedBlocks, FetchedPeer,
    LeaseError, LeaseSpec, Offer, ReadHandle, ReadRequest, ReleasePolicy, SideChannelCards,
    StartError,
};
use kv_xfer::ids::{AgentName, Incarnation, Rank, RequestId};
use kv_xfer::layout::PoolOrder;
use kv_xfer::peer::PeerAddr;
use kv_xfer::transport::FailureKind;
use kv_xfer::transport::sim::{Behaviour, SimFabric};

fn stuck() -> Behaviour {
    Behaviour {
        never_ends: true,
        ..Behaviour::default()
    }
}

fn panics() -> Behaviour {
    Behaviour {
        hook: Some(Box::new(|_| panic!("scripted"))),
        ..Behaviour::default()
    }
}

#[test]
fn blocks_of_an_agent_that_cannot_be_destroyed_never_come_back() {
    let pair = pair_with(|config| config.reader.abandon_after = Duration::from_millis(50));
    let (_, offer) = pair.offer("r", &ids(0..4));
    pair.fabric.script([stuck()]);
    pair.fabric.refuse_destruction();
    let timeout = Duration::from_millis(50);
    let handle = pair.reader.read(ReadRequest {
        timeout,
        ..request(&offer, pair.claim(0..4))
    });
    let failure = handle.unwrap().wait().unwrap_err();
    assert!(matches!(
        failure.blocks,
        FailedBlocks::Quarantined { blocks: 4 }
    ));
    eventually("the agent is given up", || {
        pair.reader.stats().partings == 1
    });
    let returned = pair.reader.returned();
    assert!(returned.recv_timeout(Duration::from_millis(300)).is_err());
    assert_eq!(pair.reader.pool().claimed_blocks(), 4);
    // Others are read from as before.
    let (_, offer) = pair.offer("r2", &ids(4..8));
    assert!(pair.read(&offer, 8..12).wait().is_ok());
    let pool = Arc::clone(pair.reader.pool());
    let report = pair.reader.shutdown(Duration::from_secs(5));
    assert_eq!(report.quarantined, 4);
    assert_eq!(pool.claimed_blocks(), 4);
}

#[test]
fn a_driver_that_dies_keeps_the_blocks_of_agents_that_it_cannot_destroy() {
    let pair = pair();
    let (_, offer) = pair.offer("r", &ids(0..4));
    pair.fabric.script([stuck()]);
    let first = pair.read(&offer, 0..4);
    eventually("it is posted", || pair.fabric.windows_posted() == 1);
    pair.fabric.refuse_destruction();
    pair.fabric.script([panics()]);
    let second = pair.read(&offer, 4..8);
    for handle in [first, second] {
        let failure = handle.wait().unwrap_err();
        assert!(
            matches!(failure.blocks, FailedBlocks::Quarantined { blocks: 4 }),
            "{failure:?}"
        );
    }
    assert_eq!(pair.reader.pool().claimed_blocks(), 8);
}

#[test]
fn an_engine_that_cannot_register_does_not_start_and_keeps_nothing() {
    let fabric = Arc::new(SimFabric::new());
    let pool = sim_pool(&fabric, layout(PoolOrder::LayerFirst), POOL_BLOCKS);
    let mut config = config("decode");
    // A port that the last attempt must find free.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    config.holder.bind = Some(port.local_addr().unwrap());
    drop(port);
    // The pool, then the lease words.
    for registered in 0..2 {
        fabric.refuse_registration_after(registered);
        let refused = Engine::start(config.clone(), Arc::clone(&pool), Arc::clone(&fabric));
        assert!(
            matches!(refused, Err(StartError::Transport(_))),
            "{refused:?}"
        );
        assert!(fabric.agents().is_empty());
        assert_eq!(Arc::strong_count(&pool), 1);
    }
    drop(engine(config, &pool, &fabric));
}

#[test]
fn a_reader_that_cannot_register_fails_its_reads_and_tries_again() {
    // The pool, then the words that land beside the blocks.
    for registered in 0..2 {
        // Nobody else registers anything, now or later.
        let no_spares = |config: &mut EngineConfig| config.reader.spare_agents = 0;
        let pair = pair_of(no_spares, no_spares);
        let (_, offer) = pair.offer("r", &ids(0..4));
        let agents = pair.fabric.agents().len();
        pair.fabric.refuse_registration_after(registered);
        let read = || {
            let keep = ReadRequest {
                release: ReleasePolicy::Never,
                ..request(&offer, pair.claim(0..4))
            };
            pair.reader.read(keep).unwrap().wait()
        };
        let failure = read().unwrap_err();
        assert!(
            matches!(failure.blocks, FailedBlocks::Returned(_)),
            "{failure:?}"
        );
        assert_eq!(pair.fabric.agents().len(), agents);
        drop(failure);
        eventually("the peer is met", || read().is_ok());
    }
}

#[test]
fn a_connection_that_broke_quietly_is_made_anew() {
    for (kind, meetings) in [
        (FailureKind::PeerLost, 2),
        (FailureKind::Backend, 2),
        (FailureKind::Rejected, 1),
    ] {
        let pair = pair();
        let (_, offer) = pair.offer("r", &ids(0..4));
        pair.fabric.script([Behaviour {
            refuse_post: Some(kind),
            ..Behaviour::default()
        }]);
        let keep = |offer| ReadRequest {
            release: ReleasePolicy::Never,
            ..request(offer, pair.claim(0..4))
        };
        let failure = pair.reader.read(keep(&offer)).unwrap().wait().unwrap_err();
        assert!(matches!(failure.blocks, FailedBlocks::Returned(_)));
        drop(failure);
        assert!(pair.reader.read(keep(&offer)).unwrap().wait().is_ok());
        assert_eq!(pair.reader.stats().meetings, meetings, "{kind:?}");
    }
}

#[test]
fn a_release_that_finds_the_connection_broken_has_it_made_anew() {
    let pair = pair();
    let (_, offer) = pair.offer("r", &ids(0..4));
    let keep = |offer| ReadRequest {
        release: ReleasePolicy::Never,
        ..request(offer, pair.claim(0..4))
    };
    drop(pair.reader.read(keep(&offer)).unwrap().wait().unwrap());
    let agents = pair.fabric.agents();
    let serves = |name: &&AgentName| {
        name.as_str().starts_with("decode/") && name.as_str().ends_with("/serve")
    };
    pair.fabric.kill(agents.iter().find(serves).unwrap());
    assert!(pair.reader.release(&offer));
    eventually("it is released by the side channel", || {
        pair.holder.stats().leases == 0
    });
    assert_eq!(pair.reader.stats().partings, 1);
}

/// Cards over the side channel, but not from everywhere: some addresses never answer, and one is
/// held up until it is let through.
#[derive(Debug)]
struct Gate {
    cards: SideChannelCards,
    dead_below: u16,
    held: Mutex<Option<u16>>,
    asked: AtomicBool,
}

impl Gate {
    fn new(config: &EngineConfig, dead_below: u16) -> Arc<Self> {
        let layout = layout(PoolOrder::LayerFirst);
        Arc::new(Self {
            cards: SideChannelCards::new(config, &layout, Arc::new(SystemClock)),
            dead_below,
            held: Mutex::new(None),
            asked: AtomicBool::new(false),
        })
    }
}

impl CardSource for Gate {
    fn fetch(
        &self,
        address: &PeerAddr,
        rank: Rank,
        limit: Duration,
    ) -> Result<FetchedPeer, ConnectError> {
        while *self.held.lock().unwrap() == Some(address.port()) {
            self.asked.store(true, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(1));
        }
        if address.port() < self.dead_below {
            std::thread::sleep(limit);
            return Err(ConnectError::TookTooLong { limit });
        }
        self.cards.fetch(address, rank, limit)
    }

    fn release(
        &self,
        address: &PeerAddr,
        incarnation: Incarnation,
        lease: LeaseRef,
        limit: Duration,
    ) -> Result<(), ConnectError> {
        if address.port() < self.dead_below {
            return Err(ConnectError::TookTooLong { limit });
        }
        self.cards.release(address, incarnation, lease, limit)
    }

    fn renew(
        &self,
        address: &PeerAddr,
        incarnation: Incarnation,
        lease: LeaseRef,
        extension: Duration,
        limit: Duration,
    ) -> Result<Option<Duration>, ConnectError> {
        self.cards
            .renew(address, incarnation, lease, extension, limit)
    }
}

fn gated(
    fabric: &Arc<SimFabric>,
    dead_below: u16,
    tune: impl FnOnce(&mut EngineConfig),
) -> (Engine, Arc<Gate>) {
    let mut config = config("reader");
    config.holder.bind = None;
    tune(&mut config);
    let gate = Gate::new(&config, dead_below);
    let pool = sim_pool(fabric, layout(PoolOrder::LayerFirst), POOL_BLOCKS);
    let cards = Arc::clone(&gate) as Arc<dyn CardSource>;
    let clock = Arc::new(SystemClock);
    let reader = Engine::start_with(config, pool, Arc::clone(fabric), clock, cards).unwrap();
    (reader, gate)
}

fn read(reader: &Engine, offer: &Offer, blocks: impl IntoIterator<Item = u32>) -> ReadHandle {
    let blocks = reader.pool().claim(ids(blocks)).unwrap();
    reader.read(request(offer, blocks)).unwrap()
}

#[test]
fn a_peer_that_is_being_met_again_is_not_forgotten_for_want_of_room() {
    let fabric = Arc::new(SimFabric::new());
    let (reader, gate) = gated(&fabric, 0, |config| config.reader.max_peers = 1);
    let pool = |n| sim_pool(&fabric, layout(PoolOrder::LayerFirst), n);
    let (a_pool, b_pool) = (pool(16), pool(16));
    let a = engine(config("a"), &a_pool, &fabric);
    let b = engine(config("b"), &b_pool, &fabric);
    let offer = |holder: &Engine, name: &str| {
        let leased = lease(holder, name, &ids(0..4), None);
        reader.accept(&leased.remote, None, None).unwrap()
    };
    assert!(read(&reader, &offer(&a, "first"), 0..4).wait().is_ok());

    // It restarts; its new life is being met while another peer takes the only place.
    let port = a.side_channel().unwrap().port();
    drop(a);
    let mut again = config("a");
    again.holder.bind = Some(format!("127.0.0.1:{port}").parse().unwrap());
    let a = engine(again, &a_pool, &fabric);
    *gate.held.lock().unwrap() = Some(port);
    std::thread::sleep(Duration::from_millis(150));
    let mut waits = read(&reader, &offer(&a, "second"), 4..8);
    eventually("it is asked", || gate.asked.load(Ordering::SeqCst));
    assert!(read(&reader, &offer(&b, "other"), 8..12).wait().is_ok());
    *gate.held.lock().unwrap() = None;
    let outcome = waits.wait_timeout(Duration::from_secs(4));
    assert!(matches!(outcome, Some(Ok(_))), "{outcome:?}");
}

#[test]
fn peers_that_never_answer_do_not_hold_up_the_meeting_of_others() {
    let fabric = Arc::new(SimFabric::new());
    let (reader, gate) = gated(&fabric, 100, |config| {
        config.reader.connect_threads = 1;
        config.reader.connect_timeout = Duration::from_secs(1);
    });
    let holder = engine(
        config("a"),
        &sim_pool(&fabric, layout(PoolOrder::LayerFirst), 16),
        &fabric,
    );
    let leased = lease(&holder, "r", &ids(0..1), None);
    let mut remote = leased.remote.clone();
    remote.remote_port = NonZeroU16::MIN;
    let silent = reader.accept(&remote, None, None).unwrap();
    assert!(read(&reader, &silent, 0..1).wait().is_err());
    // From now on asking it keeps a thread until the test ends.
    *gate.held.lock().unwrap() = Some(1);
    eventually("it is asked again", || {
        drop(read(&reader, &silent, 0..1).wait());
        gate.asked.load(Ordering::SeqCst)
    });
    let offer = reader.accept(&leased.remote, None, None).unwrap();
    let outcome = read(&reader, &offer, 32..33).wait();
    *gate.held.lock().unwrap() = None;
    assert!(outcome.is_ok(), "{outcome:?}");
}

#[test]
fn shutdown_is_bounded_although_a_transport_call_hangs() {
    let pair = pair();
    let (_, offer) = pair.offer("r", &ids(0..4));
    let (go, gone) = mpsc::channel::<()>();
    pair.fabric.script([Behaviour {
        hook: Some(Box::new(move |_| {
            let _ = gone.recv();
        })),
        ..Behaviour::default()
    }]);
    let mut handle = pair.read(&offer, 0..4);
    eventually("it is posted", || pair.fabric.windows_posted() == 1);
    let pool = Arc::clone(pair.reader.pool());
    let began = Instant::now();
    let report = pair.reader.shutdown(Duration::from_millis(200));
    let took = began.elapsed();
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert_eq!(report.quarantined, 4);
    assert_eq!(pool.claimed_blocks(), 4);
    drop(go);
    // Once the call returns, the read ends as every read does.
    let outcome = handle.wait_timeout(LIMIT).unwrap();
    assert!(outcome.is_err());
    eventually("its agent is destroyed", || {
        pair.fabric.windows_in_flight() == 0
    });
}

struct OnWake<F>(F);

impl<F: Fn() + Send + Sync> Wake for OnWake<F> {
    fn wake(self: Arc<Self>) {
        (self.0)();
    }
}

fn poll_with(handle: &mut ReadHandle, on_wake: impl Fn() + Send + Sync + 'static) -> bool {
    let waker = Waker::from(Arc::new(OnWake(on_wake)));
    Pin::new(handle)
        .poll(&mut Context::from_waker(&waker))
        .is_ready()
}

#[test]
fn a_waker_that_panics_harms_nobody_else() {
    let pair = pair_with(|config| config.reader.abandon_after = Duration::from_millis(20));
    let (_, offer) = pair.offer("r", &ids(0..4));
    pair.fabric.script([stuck(), stuck()]);
    let keep = |blocks| ReadRequest {
        release: ReleasePolicy::Never,
        timeout: Duration::from_millis(200),
        ..request(&offer, blocks)
    };
    let mut first = pair.reader.read(keep(pair.claim(0..4))).unwrap();
    let mut second = pair.reader.read(keep(pair.claim(4..8))).unwrap();
    assert!(!poll_with(&mut first, || panic!("scripted")));
    assert!(!poll_with(&mut second, || panic!("scripted")));
    assert!(first.wait().is_err());
    assert!(second.wait().is_err());
    let landed = pair.reader.read(ReadRequest {
        timeout: LIMIT,
        ..keep(pair.claim(8..12))
    });
    assert!(landed.unwrap().wait().is_ok());
    for _ in 0..2 {
        pair.reader.returned().recv_timeout(LIMIT).unwrap();
    }
}

#[test]
fn a_read_submitted_while_the_driver_dies_ends_too() {
    let pair = Arc::new(pair());
    let (_, offer) = pair.offer("r", &ids(0..4));
    pair.fabric.script([stuck()]);
    let mut first = pair.read(&offer, 0..4);
    eventually("it is posted", || pair.fabric.windows_posted() == 1);
    let late: Arc<Mutex<Option<ReadHandle>>> = Arc::default();
    let submit = {
        let (pair, offer, late) = (Arc::clone(&pair), offer.clone(), Arc::clone(&late));
        move || {
            let blocks = pair.reader.pool().claim(ids(8..12)).unwrap();
            *late.lock().unwrap() = pair.reader.read(request(&offer, blocks)).ok();
        }
    };
    assert!(!poll_with(&mut first, submit));
    pair.fabric.script([panics()]);
    let second = pair.read(&offer, 4..8);
    assert!(second.wait().is_err());
    assert!(first.wait().is_err());
    if let Some(mut late) = late.lock().unwrap().take() {
        let outcome = late.wait_timeout(Duration::from_secs(3));
        assert!(matches!(outcome, Some(Err(_))), "{outcome:?}");
    }
    eventually("every block is free", || {
        pair.reader.returned().try_iter().for_each(drop);
        pair.reader.pool().claimed_blocks() == 0
    });
}

/// A clock that takes its time when the test's own thread asks.
#[derive(Debug)]
struct SlowHere(std::thread::ThreadId);

impl Clock for SlowHere {
    fn now(&self) -> MonoTime {
        let now = SystemClock.now();
        if std::thread::current().id() == self.0 {
            std::thread::sleep(Duration::from_millis(60));
        }
        now
    }
}

#[test]
fn blocks_of_a_lease_that_cannot_be_described_come_back_once() {
    let fabric = Arc::new(SimFabric::new());
    let pool = sim_pool(&fabric, layout(PoolOrder::LayerFirst), 16);
    let config = config("a");
    let gate = Gate::new(&config, 0);
    let clock = Arc::new(SlowHere(std::thread::current().id()));
    let holder = Engine::start_with(config, pool, fabric, clock, gate).unwrap();
    // One hash too few, and a lease that is over before it could be described.
    let refused = holder
        .lease(LeaseSpec {
            request: RequestId::new("r").unwrap(),
            blocks: ids(0..4),
            tokens: 4 * u64::from(BLOCK_TOKENS),
            hashes: hashes(3),
            ttl: Some(Duration::from_nanos(1)),
            direction: Direction::DecodeToPrefill,
            tenant: None,
            conversation: None,
        })
        .unwrap_err();
    assert!(matches!(refused.error, LeaseError::Describe(_)));
    assert_eq!(refused.blocks, ids(0..4));
    assert!(
        holder
            .freed()
            .recv_timeout(Duration::from_millis(100))
            .is_err(),
        "the blocks are the caller's: they must not come a second time"
    );
}

#[test]
fn settings_that_cannot_work_are_refused_at_the_start() {
    let fabric = Arc::new(SimFabric::new());
    let pool = sim_pool(&fabric, layout(PoolOrder::LayerFirst), 16);
    let mut windows = config("a");
    windows.reader.windows_in_flight = 0;
    // Neither what the layout is cut for, nor a rank of such a group.
    let (mut tp, mut rank) = (config("a"), config("a"));
    tp.tp_size = 2;
    rank.rank.tp = 1;
    for config in [windows, tp, rank] {
        let refused = Engine::start(config, Arc::clone(&pool), Arc::clone(&fabric));
        assert!(matches!(refused, Err(StartError::Config(_))));
    }
}

//! The engine and its peers over the scripted fabric: several of them, restarted ones, wrong ones.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::*;
use kv_xfer::descriptor::{Binding, BlockRuns, Ticket};
use kv_xfer::engine::{Advice, FailedBlocks, OfferError, ReadError, ReadRequest, ReleasePolicy};
use kv_xfer::layout::{KvLayout, KvSplit, PoolOrder, Preset};
use kv_xfer::transport::sim::{Behaviour, SimFabric};

#[test]
fn another_peers_reads_do_not_suffer_from_a_stuck_one() {
    let fabric = Arc::new(SimFabric::new());
    let pool = |n| sim_pool(&fabric, layout(PoolOrder::LayerFirst), n);
    let (a, b) = (
        engine(config("a"), &pool(64), &fabric),
        engine(config("b"), &pool(64), &fabric),
    );
    let mut reader_config = config("reader");
    reader_config.holder.bind = None;
    reader_config.reader.abandon_after = Duration::from_millis(100);
    let reader = engine(reader_config, &pool(64), &fabric);
    fill(a.pool(), &ids(0..4), 1);
    fill(b.pool(), &ids(0..4), 1);
    let stuck = lease(&a, "r", &ids(0..4), None);
    let stuck = reader.accept(&stuck.remote, None, None).unwrap();
    fabric.script([Behaviour {
        never_ends: true,
        ..Behaviour::default()
    }]);
    let claimed = reader.pool().claim(ids(0..4)).unwrap();
    let timeout = Duration::from_millis(500);
    let handle = reader
        .read(ReadRequest {
            timeout,
            ..request(&stuck, claimed)
        })
        .unwrap();
    eventually("the window is posted", || fabric.windows_posted() == 1);
    for n in 0..20 {
        let leased = lease(&b, &format!("r{n}"), &ids(0..4), None);
        let offer = reader.accept(&leased.remote, None, None).unwrap();
        let landed = reader
            .read(request(&offer, reader.pool().claim(ids(4..8)).unwrap()))
            .unwrap()
            .wait();
        assert_eq!(wrong_bytes(&landed.unwrap().blocks, &ids(0..4), 1), 0);
    }
    assert!(handle.wait().is_err());
    let returned = reader.returned().recv_timeout(LIMIT).unwrap();
    assert_eq!(returned.blocks.len(), 4);
}

#[test]
fn a_silent_peer_is_given_up_long_before_its_reads_deadlines() {
    let pair = pair_with(|config| config.reader.silent_after = Duration::from_millis(50));
    let (_, offer) = pair.offer("r", &ids(0..4));
    let stuck = || Behaviour {
        never_ends: true,
        ..Behaviour::default()
    };
    pair.fabric.script([stuck(), stuck()]);
    let patient = |blocks| ReadRequest {
        timeout: Duration::from_secs(3600),
        release: ReleasePolicy::Never,
        ..request(&offer, pair.claim(blocks))
    };
    let reads = [0..4, 4..8].map(|blocks| pair.reader.read(patient(blocks)).unwrap());
    for mut read in reads {
        let failure = read.wait_timeout(LIMIT).unwrap().unwrap_err();
        assert!(
            matches!(&failure.error, ReadError::PeerSilent { engine, .. } if engine.to_string() == "decode"),
            "{failure:?}"
        );
        assert_eq!(failure.error.advice(), Advice::RetryLater);
    }
    // Out of doubt with the agent, and the peer is met again.
    for _ in 0..2 {
        let back = pair.reader.returned().recv_timeout(LIMIT).unwrap();
        assert_eq!(back.blocks.len(), 4);
    }
    let landed = pair.reader.read(patient(0..4)).unwrap().wait().unwrap();
    assert_eq!(wrong_bytes(&landed.blocks, &ids(0..4), 1), 0);
    assert_eq!(pair.reader.stats().failed_peer, 2);
}

#[test]
fn a_peer_that_is_slow_but_not_silent_is_not_given_up() {
    let silent_after = Duration::from_millis(40);
    let pair = pair_with(|config| {
        config.reader.silent_after = silent_after;
        config.reader.window_descriptors = 1;
        config.reader.windows_in_flight = 2;
        config.reader.lanes = 1;
    });
    let (_, offer) = pair.offer("r", &ids([0, 2, 4, 6]));
    pair.fabric.script((0..32).map(|_| Behaviour {
        per_poll: Some(1),
        extra_polls: 1,
        hook: Some(Box::new(|_| std::thread::sleep(Duration::from_millis(15)))),
        ..Behaviour::default()
    }));
    let begin = Instant::now();
    let landed = pair.read(&offer, [1, 3, 5, 7]).wait().unwrap();
    assert!(begin.elapsed() > silent_after);
    assert_eq!(wrong_bytes(&landed.blocks, &ids([0, 2, 4, 6]), 1), 0);
}

#[test]
fn a_restarted_holder_is_told_from_its_predecessor() {
    let fabric = Arc::new(SimFabric::new());
    let holder_pool = sim_pool(&fabric, layout(PoolOrder::LayerFirst), 64);
    let reader_pool = sim_pool(&fabric, layout(PoolOrder::LayerFirst), 64);
    let holder = engine(config("decode"), &holder_pool, &fabric);
    let port = holder.side_channel().unwrap().port();
    let mut reader_config = config("prefill");
    reader_config.holder.bind = None;
    let reader = engine(reader_config, &reader_pool, &fabric);
    fill(&holder_pool, &ids(0..4), 1);
    let old = lease(&holder, "old", &ids(0..4), None);
    let first = reader.accept(&old.remote, None, None).unwrap();
    let keep = |offer| ReadRequest {
        release: ReleasePolicy::Never,
        ..request(offer, reader.pool().claim(ids(0..4)).unwrap())
    };
    reader.read(keep(&first)).unwrap().wait().unwrap();

    drop(holder);
    let mut again = config("decode");
    again.holder.bind = Some(format!("127.0.0.1:{port}").parse().unwrap());
    let holder = engine(again, &holder_pool, &fabric);
    let failure = reader.read(keep(&first)).unwrap().wait().unwrap_err();
    assert!(
        matches!(
            failure.error,
            ReadError::PeerRestarted { .. } | ReadError::Transport { .. }
        ),
        "{failure}"
    );
    drop(failure);
    let new = lease(&holder, "new", &ids(0..4), None);
    let second = reader.accept(&new.remote, None, None).unwrap();
    eventually("the new life is read from", || {
        match reader.read(keep(&second)).unwrap().wait() {
            Ok(landed) => wrong_bytes(&landed.blocks, &ids(0..4), 1) == 0,
            Err(_) => false,
        }
    });
    // And the old descriptor stays refused, without harm to the new one.
    let failure = reader.read(keep(&first)).unwrap().wait().unwrap_err();
    assert!(
        matches!(failure.error, ReadError::PeerRestarted { .. }),
        "{failure}"
    );
    drop(failure);
    assert!(reader.read(keep(&second)).unwrap().wait().is_ok());
}

#[test]
fn a_peer_that_is_not_there_fails_the_read_and_is_left_alone_for_a_while() {
    let pair = pair();
    let (_, offer) = pair.offer("r", &ids(0..4));
    let Pair {
        fabric,
        holder,
        reader,
    } = pair;
    drop(holder);
    let failure = reader
        .read(request(&offer, reader.pool().claim(ids(0..4)).unwrap()))
        .unwrap()
        .wait();
    let failure = failure.unwrap_err();
    assert!(
        matches!(failure.error, ReadError::Connect { .. }),
        "{failure}"
    );
    assert_eq!(failure.error.advice(), Advice::RetryLater);
    assert!(matches!(failure.blocks, FailedBlocks::Returned(_)));
    drop(fabric);
}

#[test]
fn shutdown_ends_every_read_and_destroys_every_agent() {
    let pair = pair_with(|config| config.reader.active = 4);
    let blocks = ids(0..1);
    let (_, offer) = pair.offer("r", &blocks);
    pair.fabric.script((0..4).map(|_| Behaviour {
        never_ends: true,
        ..Behaviour::default()
    }));
    let handles: Vec<_> = (0..40).map(|n| pair.read(&offer, [n])).collect();
    eventually("some run", || pair.fabric.windows_posted() == 4);
    let Pair {
        fabric,
        holder,
        reader,
    } = pair;
    let pool = Arc::clone(reader.pool());
    let report = reader.shutdown(Duration::from_secs(5));
    assert_eq!(report.quarantined, 0);
    for handle in handles {
        assert!(handle.wait().is_err());
    }
    assert_eq!(fabric.windows_in_flight(), 0);
    let agents = fabric.agents();
    assert!(
        agents
            .iter()
            .all(|name| name.as_str().starts_with("decode/")),
        "only the holder's own are left: {agents:?}"
    );
    assert_eq!(pool.claimed_blocks(), 0);
    drop(holder);
    assert!(fabric.agents().is_empty());
}

#[test]
fn pools_of_either_order_read_each_other() {
    use PoolOrder::{BlockFirst, LayerFirst};
    let fabric = Arc::new(SimFabric::new());
    // Four blocks; eight chunks a block, which only equal block-first pools move as one.
    let orders = [
        (BlockFirst, BlockFirst, 4),
        (LayerFirst, LayerFirst, 32),
        (BlockFirst, LayerFirst, 32),
        (LayerFirst, BlockFirst, 32),
    ];
    for (n, (from, to, unmerged)) in orders.into_iter().enumerate() {
        let holder = engine(
            config(&format!("d{n}")),
            &sim_pool(&fabric, layout(from), 16),
            &fabric,
        );
        let reader = engine(
            config(&format!("p{n}")),
            &sim_pool(&fabric, layout(to), 16),
            &fabric,
        );
        let blocks = ids([1, 3, 5, 7]);
        fill(holder.pool(), &blocks, 1);
        let leased = lease(&holder, "r", &blocks, None);
        let offer = reader.accept(&leased.remote, None, None).unwrap();
        let claimed = reader.pool().claim(ids(0..4)).unwrap();
        let landed = reader
            .read(request(&offer, claimed))
            .unwrap()
            .wait()
            .unwrap();
        assert_eq!(
            landed.report.descriptors_unmerged, unmerged,
            "{from:?} to {to:?}"
        );
        assert_eq!(
            wrong_bytes(&landed.blocks, &blocks, 1),
            0,
            "{from:?} to {to:?}"
        );
    }
}

#[test]
fn a_descriptor_of_a_larger_pool_is_refused_before_anything_is_posted() {
    // Same engine id and incarnation, but the ticket names a block that the card's pool lacks: a
    // holder's fault or a forgery.
    let pair = pair();
    let (_, offer) = pair.offer("r", &ids(0..4));
    let ticket = Ticket {
        runs: BlockRuns::from_ids(&ids([0, 1, 2, 64])),
        ..offer.ticket().clone()
    };
    let binding = Binding {
        engine: offer.engine(),
        request: offer.request(),
        tenant: None,
        conversation: None,
    };
    let sealed = ticket.seal(None, &binding).unwrap();
    let (leased, _) = pair.offer("r2", &ids(8..12));
    let mut forged = leased.remote.clone();
    forged.remote_request_id = offer.request().clone();
    forged.ticket = Some(sealed);
    let forged = pair.reader.accept(&forged, None, None).unwrap();
    let failure = pair.read(&forged, 0..4).wait().unwrap_err();
    assert!(
        matches!(failure.error, ReadError::BadDescriptor { .. }),
        "{failure}"
    );
    assert!(matches!(failure.blocks, FailedBlocks::Returned(_)));
    assert_eq!(pair.fabric.windows_posted(), 0);
}

#[test]
fn blocks_of_another_layout_are_refused_before_the_peer_is_met() {
    let fabric = Arc::new(SimFabric::new());
    let other = KvLayout::new(
        &Preset::SmolLM2_135M.geometry(),
        1,
        BLOCK_TOKENS,
        PoolOrder::LayerFirst,
        KvSplit::Fused,
    )
    .unwrap();
    let holder = engine(config("decode"), &sim_pool(&fabric, other, 8), &fabric);
    let own = layout(PoolOrder::LayerFirst);
    let reader = engine(config("prefill"), &sim_pool(&fabric, own, 8), &fabric);
    let leased = lease(&holder, "r", &ids(0..4), None);
    let refused = reader.accept(&leased.remote, None, None).unwrap_err();
    assert!(matches!(refused, OfferError::Layout { .. }), "{refused}");
    assert_eq!(reader.stats().meetings, 0);
}

#[test]
fn blocks_of_another_model_of_the_same_layout_are_not_read() {
    let fabric = Arc::new(SimFabric::new());
    let pool = || sim_pool(&fabric, layout(PoolOrder::LayerFirst), 8);
    let mut other = config("decode");
    other.model = "another".into();
    let holder = engine(other, &pool(), &fabric);
    let reader = engine(config("prefill"), &pool(), &fabric);
    let leased = lease(&holder, "r", &ids(0..4), None);
    let offer = reader.accept(&leased.remote, None, None).unwrap();
    let claimed = reader.pool().claim(ids(0..4)).unwrap();
    let failure = reader
        .read(request(&offer, claimed))
        .unwrap()
        .wait()
        .unwrap_err();
    // The peer's card names the difference, and nothing of it is loaded.
    assert!(failure.to_string().contains("another"), "{failure}");
    assert_eq!(failure.error.advice(), Advice::FixConfiguration);
    assert!(matches!(failure.blocks, FailedBlocks::Returned(_)));
    assert_eq!(fabric.windows_posted(), 0);
}

//! Lanes: large reads through several agents, with the guarantees of one.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{
    LIMIT, Pair, config, engine, eventually, fill, ids, layout, lease, pair_with, request,
    sim_pool, wrong_bytes,
};
use kv_xfer::engine::{FailedBlocks, ReadError, ReadRequest};
use kv_xfer::ids::AgentName;
use kv_xfer::layout::PoolOrder;
use kv_xfer::transport::AfterError;
use kv_xfer::transport::sim::{Behaviour, SimFabric};

/// A reader with `lanes` lanes over a fabric where posting moves the bytes, with small windows.
fn lanes(lanes: usize) -> Pair {
    let pair = pair_with(|config| {
        config.reader.lanes = lanes;
        config.reader.spare_agents = 0;
        config.reader.window_descriptors = 2;
        config.reader.max_descriptor_bytes = 1;
        config.reader.abandon_after = Duration::from_millis(20);
    });
    pair.fabric.move_when_posted();
    pair
}

/// The agents that read in helper lanes.
fn helpers(pair: &Pair) -> Vec<AgentName> {
    let mut agents = pair.fabric.agents();
    let number = |name: &AgentName| name.as_str().split("/read-").nth(1).map(str::to_owned);
    agents.retain(|name| {
        number(name).is_some_and(|n| n.starts_with(|c: char| c.is_ascii_digit()) && n.contains('-'))
    });
    agents
}

/// Reads once, so that the lanes get their agents.
fn widen(pair: &Pair, count: usize) {
    let blocks = ids(0..16);
    let (_, offer) = pair.offer("widen", &blocks);
    let claimed = pair.reader.pool().claim(ids(40..56)).unwrap();
    let landed = pair.reader.read(request(&offer, claimed)).unwrap().wait();
    drop(landed.unwrap());
    eventually("the lanes have agents", || helpers(pair).len() == count);
}

#[test]
fn a_large_read_is_right_whatever_the_number_of_lanes() {
    for count in 1..=4 {
        let pair = lanes(count);
        widen(&pair, count - 1);
        for round in 0..20 {
            let blocks = ids((0..24).map(|b| (b * 7 + round) % 48));
            let (_, offer) = pair.offer(&format!("r{round}"), &blocks);
            let claimed = pair
                .reader
                .pool()
                .claim(ids((0..24).map(|b| b * 2)))
                .unwrap();
            let landed = pair
                .reader
                .read(request(&offer, claimed))
                .unwrap()
                .wait()
                .unwrap();
            assert_eq!(wrong_bytes(&landed.blocks, &blocks, 1), 0);
            assert_eq!(
                landed.report.descriptors,
                landed.report.descriptors_unmerged
            );
        }
    }
}

#[test]
fn small_reads_need_no_further_agents() {
    let pair = pair_with(|config| config.reader.lanes = 3);
    pair.fabric.move_when_posted();
    let blocks = ids(0..1);
    let (_, offer) = pair.offer("small", &blocks);
    let claimed = pair.reader.pool().claim(ids(9..10)).unwrap();
    let landed = pair
        .reader
        .read(request(&offer, claimed))
        .unwrap()
        .wait()
        .unwrap();
    assert_eq!(wrong_bytes(&landed.blocks, &blocks, 1), 0);
    assert_eq!(helpers(&pair), vec![]);
}

#[test]
fn a_window_in_doubt_keeps_all_blocks_until_every_agent_is_gone() {
    for after in 0..12 {
        let pair = lanes(3);
        widen(&pair, 2);
        let blocks = ids(0..24);
        let (_, offer) = pair.offer("doubt", &blocks);
        let mut script: Vec<Behaviour> = (0..after).map(|_| Behaviour::default()).collect();
        script.push(Behaviour {
            fail_at: Some((1, AfterError::InDoubt)),
            ..Behaviour::default()
        });
        pair.fabric.script(script);
        let claimed = pair.reader.pool().claim(ids(24..48)).unwrap();
        let failure = pair
            .reader
            .read(request(&offer, claimed))
            .unwrap()
            .wait()
            .unwrap_err();
        assert!(
            matches!(failure.error, ReadError::Transport { .. }),
            "{failure}"
        );
        assert!(matches!(
            failure.blocks,
            FailedBlocks::Quarantined { blocks: 24 }
        ));
        let returned = pair.reader.returned().recv_timeout(LIMIT).unwrap();
        // Every agent that could have written is gone.
        assert_eq!(helpers(&pair), vec![]);
        assert_eq!(pair.fabric.windows_in_flight(), 0);
        assert_eq!(returned.blocks.len(), 24);
        drop(returned);
        assert_eq!(pair.reader.pool().claimed_blocks(), 0);
        assert!(pair.reader.returned().try_recv().is_err());
        eventually("the peer is met again and read from", || {
            let (_, offer) = pair.offer("again", &blocks);
            let claimed = pair.reader.pool().claim(ids(24..48)).unwrap();
            pair.reader
                .read(request(&offer, claimed))
                .unwrap()
                .wait()
                .is_ok()
        });
    }
}

#[test]
fn a_dropped_handle_gives_the_blocks_back_once_no_lane_writes() {
    for _ in 0..50 {
        let pair = lanes(3);
        widen(&pair, 2);
        let blocks = ids(0..24);
        let (_, offer) = pair.offer("dropped", &blocks);
        let claimed = pair.reader.pool().claim(ids(24..48)).unwrap();
        drop(pair.reader.read(request(&offer, claimed)).unwrap());
        let returned = pair.reader.returned().recv_timeout(LIMIT).unwrap();
        assert_eq!(pair.fabric.windows_in_flight(), 0);
        assert_eq!(returned.blocks.len(), 24);
    }
}

#[test]
fn a_lane_that_never_ends_is_fenced_with_the_rest() {
    let pair = lanes(2);
    widen(&pair, 1);
    let blocks = ids(0..24);
    let (_, offer) = pair.offer("stuck", &blocks);
    let stuck = || Behaviour {
        never_ends: true,
        ..Behaviour::default()
    };
    pair.fabric.script((0..48).map(|_| stuck()));
    let claimed = pair.reader.pool().claim(ids(24..48)).unwrap();
    let failure = pair
        .reader
        .read(ReadRequest {
            timeout: Duration::from_millis(20),
            ..request(&offer, claimed)
        })
        .unwrap()
        .wait()
        .unwrap_err();
    assert!(
        matches!(failure.error, ReadError::Deadline { .. }),
        "{failure}"
    );
    let returned = pair.reader.returned().recv_timeout(LIMIT).unwrap();
    assert_eq!(returned.blocks.len(), 24);
    assert_eq!(pair.fabric.windows_in_flight(), 0);
    assert_eq!(helpers(&pair), vec![]);
}

#[test]
fn shutting_down_ends_reads_in_every_lane() {
    let pair = lanes(3);
    widen(&pair, 2);
    let blocks = ids(0..24);
    let (_, offer) = pair.offer("shutdown", &blocks);
    pair.fabric.script((0..20).map(|_| Behaviour {
        never_ends: true,
        ..Behaviour::default()
    }));
    let claimed = pair.reader.pool().claim(ids(24..48)).unwrap();
    let handle = pair.reader.read(request(&offer, claimed)).unwrap();
    eventually("windows are in flight", || {
        pair.fabric.windows_in_flight() > 2
    });
    let Pair { fabric, reader, .. } = pair;
    let pool = std::sync::Arc::clone(reader.pool());
    let returned = reader.returned().clone();
    reader.shutdown(LIMIT);
    assert!(handle.wait().is_err());
    drop(returned.try_iter().collect::<Vec<_>>());
    assert_eq!(pool.claimed_blocks(), 0);
    assert_eq!(fabric.windows_in_flight(), 0);
}

#[test]
fn a_peer_gets_new_lane_agents_while_its_old_ones_are_being_destroyed() {
    let fabric = Arc::new(SimFabric::new());
    let pool = || sim_pool(&fabric, layout(PoolOrder::LayerFirst), 64);
    let holders = [
        engine(config("a"), &pool(), &fabric),
        engine(config("b"), &pool(), &fabric),
    ];
    let mut reader_config = config("reader");
    reader_config.holder.bind = None;
    reader_config.reader.spare_agents = 0;
    reader_config.reader.wide_peers = 1;
    reader_config.reader.window_descriptors = 2;
    reader_config.reader.max_descriptor_bytes = 1;
    let reader = engine(reader_config, &pool(), &fabric);
    fabric.move_when_posted();
    // The agents of a peer that is narrowed stay.
    fabric.refuse_destruction();
    let helpers = || {
        let names = fabric.agents();
        let of_lanes = names.iter().filter(|name| {
            let number = name.as_str().split("/read-").nth(1);
            number.is_some_and(|n| n.contains('-') && !n.starts_with("ahead"))
        });
        of_lanes.count()
    };
    for (round, holder) in holders.iter().cycle().take(4).enumerate() {
        let blocks = ids(0..16);
        fill(holder.pool(), &blocks, 1);
        let leased = lease(holder, &format!("r{round}"), &blocks, None);
        let offer = reader.accept(&leased.remote, None, None).unwrap();
        let claimed = reader.pool().claim(ids(0..16)).unwrap();
        drop(
            reader
                .read(request(&offer, claimed))
                .unwrap()
                .wait()
                .unwrap(),
        );
        eventually("the peer has an agent in the lane", || {
            helpers() == round + 1
        });
    }
}

#[test]
fn no_more_agents_are_opened_ahead_than_asked_for() {
    let pair = pair_with(|config| config.reader.spare_agents = 2);
    let ahead = || {
        let agents = pair.fabric.agents();
        let of = |name: &&AgentName| {
            name.as_str().starts_with("prefill/") && name.as_str().contains("/read-ahead-")
        };
        agents.iter().filter(of).count()
    };
    eventually("both are open", || ahead() == 2);
    let blocks = ids(0..1);
    let (_, offer) = pair.offer("r", &blocks);
    let landed = pair.read(&offer, [3]).wait().unwrap();
    assert_eq!(wrong_bytes(&landed.blocks, &blocks, 1), 0);
    // One is in use now, and another has been opened in its stead.
    eventually("both are open again", || ahead() == 3);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(ahead(), 3);
}

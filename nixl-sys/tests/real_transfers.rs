//! Transfers with the real NIXL, where one is there, each in a process of its own.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests"
)]

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::Duration;

use common::peer::{Peer, open, serving, until};
use common::{child, in_child, real_runtime};
use nixl_sys::*;

#[test]
fn two_agents_move_bytes_and_notify() {
    if real_runtime().is_some() {
        in_child::<&str>("child_reads_between_two_agents", &[]);
    }
}

#[test]
#[ignore = "run in a process of its own"]
fn child_reads_between_two_agents() {
    const BLOCK: usize = 16 << 10;
    let library = open();
    let config = AgentConfig {
        capture_telemetry: true,
        ..AgentConfig::default()
    };
    let source: Vec<u8> = (0..64 * BLOCK).map(|i| (i / BLOCK) as u8 + 1).collect();
    let holder = Peer::new(&library, "holder", &serving(), source);
    let reader = Peer::new(&library, "reader", &config, vec![0; 64 * BLOCK]);

    // SAFETY: one thread uses the handles; the memory of both lives until they are destroyed; nothing reads it while
    // a transfer runs.
    unsafe {
        assert_eq!(
            library
                .load_remote_md(reader.agent, &holder.metadata())
                .unwrap()
                .as_c_str(),
            c"holder"
        );
        library
            .check_remote_md(reader.agent, c"holder", None)
            .unwrap();
        assert!(
            library
                .check_remote_md(reader.agent, c"nobody", None)
                .is_err()
        );

        let descriptors = |memory: &[u8]| {
            let list = library.create_xfer_dlist(MemoryType::Dram).unwrap();
            for block in 0..64 {
                library
                    .xfer_dlist_add_desc(list, memory.as_ptr().addr() + block * BLOCK, BLOCK, 0)
                    .unwrap();
            }
            assert_eq!(library.xfer_dlist_desc_count(list), Ok(64));
            list
        };
        let (local, remote) = (descriptors(&reader.memory), descriptors(&holder.memory));
        let local_prepared = library
            .prep_xfer_dlist(reader.agent, c"", local, None)
            .unwrap();
        let remote_prepared = library
            .prep_xfer_dlist(reader.agent, c"holder", remote, None)
            .unwrap();

        let args = library.create_opt_args().unwrap();
        library.opt_args_set_notif_msg(args, b"read").unwrap();
        library.opt_args_set_has_notif(args, true).unwrap();
        let forward: Vec<i32> = (0..64).collect();
        let backward: Vec<i32> = (0..64).rev().collect();
        let req = library
            .make_xfer_req(
                reader.agent,
                XferOp::Read,
                local_prepared,
                &forward,
                remote_prepared,
                &backward,
                Some(args),
            )
            .unwrap();
        let backend = library.query_xfer_backend(reader.agent, req).unwrap();
        library.destroy_backend(backend).unwrap();
        assert!(
            library
                .estimate_xfer_cost(reader.agent, req, None)
                .unwrap()
                .duration_us
                > 0
        );

        let never_posted = library.xfer_status_detailed(reader.agent, req).unwrap_err();
        assert_eq!(
            never_posted.status(),
            Some(Status::NotPosted),
            "{never_posted}"
        );

        library.post_xfer_req(reader.agent, req, None).unwrap();
        until(|| library.xfer_status_detailed(reader.agent, req).unwrap() == Progress::Done);
        assert!(library.has_detailed_status());
        for block in 0..64 {
            assert!(
                reader.memory[block * BLOCK..][..BLOCK]
                    .iter()
                    .all(|b| *b == 64 - block as u8)
            );
        }
        let telemetry = library.get_xfer_telemetry(reader.agent, req).unwrap();
        assert_eq!(
            (telemetry.bytes, telemetry.descriptors),
            (64 * BLOCK as u64, 64)
        );

        library
            .gen_notif(reader.agent, c"holder", b"hello", None)
            .unwrap();
        let map = library.create_notif_map().unwrap();
        until(|| {
            // The reader has no thread of its own: each call moves it on.
            let own = library.create_notif_map().unwrap();
            library.get_notifs(reader.agent, own, None).unwrap();
            library.destroy_notif_map(own).unwrap();
            library.get_notifs(holder.agent, map, None).unwrap();
            library.notif_map_size(map) == Ok(1)
                && library.notif_map_get_notifs_size(map, c"reader") == Ok(2)
        });
        assert_eq!(
            library.notif_map_get_agent_at(map, 0).unwrap().as_c_str(),
            c"reader"
        );
        let mut messages: Vec<Vec<u8>> = (0..2)
            .map(|i| library.notif_map_get_notif(map, c"reader", i).unwrap())
            .collect();
        messages.sort();
        assert_eq!(messages, [b"hello".to_vec(), b"read".to_vec()]);
        assert!(library.notif_map_get_notif(map, c"reader", 2).is_err());
        library.notif_map_clear(map).unwrap();
        library.destroy_notif_map(map).unwrap();

        assert_eq!(
            library.destroy_xfer_req(req).unwrap_err().status(),
            Some(Status::InvalidState)
        );
        library.release_xfer_req(reader.agent, req).unwrap();
        library.destroy_xfer_req(req).unwrap();

        let req = library
            .create_xfer_req(reader.agent, XferOp::Write, local, remote, c"holder", None)
            .unwrap();
        library.post_xfer_req(reader.agent, req, None).unwrap();
        until(|| library.get_xfer_status(reader.agent, req).unwrap() == Progress::Done);
        assert_eq!(holder.memory, reader.memory);
        library.release_xfer_req(reader.agent, req).unwrap();
        library.destroy_xfer_req(req).unwrap();

        library
            .release_xfer_dlist_handle(reader.agent, local_prepared)
            .unwrap();
        library
            .release_xfer_dlist_handle(reader.agent, remote_prepared)
            .unwrap();
        library.destroy_xfer_dlist(local).unwrap();
        library.destroy_xfer_dlist(remote).unwrap();
        library.destroy_opt_args(args).unwrap();
        library
            .invalidate_remote_md(reader.agent, c"holder")
            .unwrap();
    }
    reader.destroy();
    holder.destroy();
}

const LARGE: usize = 256 << 20;
const OVER_TCP: &[(&str, &str)] = &[("UCX_TLS", "tcp")];

#[test]
fn a_killed_peer_is_told_from_other_failures() {
    if real_runtime().is_some() {
        in_child("child_reads_from_a_peer_that_is_killed", OVER_TCP);
    }
}

#[test]
#[ignore = "run in a process of its own"]
fn child_reads_from_a_peer_that_is_killed() {
    let mut holder = child("child_holds_memory", OVER_TCP)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (metadata, address) = announcement(&mut holder);

    let library = open();
    let reader = Peer::new(&library, "reader", &AgentConfig::default(), vec![0; LARGE]);
    // SAFETY: one thread uses the handles, and the memory lives until the agent is destroyed.
    unsafe {
        library.load_remote_md(reader.agent, &metadata).unwrap();
        let list = |address| {
            let list = library.create_xfer_dlist(MemoryType::Dram).unwrap();
            library
                .xfer_dlist_add_desc(list, address, LARGE, 0)
                .unwrap();
            list
        };
        let (local, remote) = (list(reader.memory.as_ptr().addr()), list(address));
        let req = library
            .create_xfer_req(reader.agent, XferOp::Read, local, remote, c"holder", None)
            .unwrap();
        assert_eq!(
            library.post_xfer_req(reader.agent, req, None),
            Ok(Progress::InProgress)
        );
        holder.kill().unwrap();
        holder.wait().unwrap();

        let mut result = Ok(Progress::InProgress);
        until(|| {
            result = library.xfer_status_detailed(reader.agent, req);
            result != Ok(Progress::InProgress)
        });
        println!("{result:?}");
        let error = result.unwrap_err();
        assert_eq!(
            (error.status(), error.raw()),
            (Some(Status::RemoteDisconnect), Some(-10))
        );
        let plain = library.get_xfer_status(reader.agent, req).unwrap_err();
        assert_eq!(
            (plain.status(), plain.raw()),
            (Some(Status::Backend), Some(-2))
        );
        assert!(library.has_detailed_status());

        library.release_xfer_req(reader.agent, req).unwrap();
        library.destroy_xfer_req(req).unwrap();
        library.destroy_xfer_dlist(local).unwrap();
        library.destroy_xfer_dlist(remote).unwrap();
    }
    reader.destroy();
}

#[test]
#[ignore = "run in a process of its own"]
fn child_holds_memory() {
    let library = open();
    let peer = Peer::new(&library, "holder", &serving(), vec![0; LARGE]);
    let metadata: String = peer.metadata().iter().map(|b| format!("{b:02x}")).collect();
    println!("holding {metadata} {}", peer.memory.as_ptr().addr());
    // Until it is killed, or its parent is gone for long.
    std::thread::sleep(Duration::from_secs(60));
}

fn announcement(holder: &mut Child) -> (Vec<u8>, usize) {
    for line in BufReader::new(holder.stdout.take().unwrap()).lines() {
        // The harness may have begun the line.
        let line = line.unwrap();
        let Some((_, rest)) = line.split_once("holding ") else {
            continue;
        };
        let (metadata, address) = rest.split_once(' ').unwrap();
        let byte = |i| u8::from_str_radix(&metadata[i..i + 2], 16).unwrap();
        return (
            (0..metadata.len()).step_by(2).map(byte).collect(),
            address.parse().unwrap(),
        );
    }
    panic!("the holder announced nothing");
}

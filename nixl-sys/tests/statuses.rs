//! Statuses: what each number means, and how a lost peer is told from other failures.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests"
)]

mod common;

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use common::fake::{Fake, Installation};
use nixl_sys::*;

const CAPI: &[(i32, Status)] = &[
    (1, Status::InProgress),
    (0, Status::Success),
    (-1, Status::InvalidParam),
    (-2, Status::Backend),
    (-3, Status::InvalidState),
    (-4, Status::Exception),
    (-5, Status::NoTelemetry),
    (-6, Status::NotFound),
    (-7, Status::Other(-7)),
    (2, Status::Other(2)),
];

const AGENT: &[(i32, Status)] = &[
    (1, Status::InProgress),
    (0, Status::Success),
    (-1, Status::NotPosted),
    (-2, Status::InvalidParam),
    (-3, Status::Backend),
    (-4, Status::NotFound),
    (-5, Status::Mismatch),
    (-6, Status::NotAllowed),
    (-7, Status::RepostActive),
    (-8, Status::Unknown),
    (-9, Status::NotSupported),
    (-10, Status::RemoteDisconnect),
    (-11, Status::Canceled),
    (-12, Status::NoTelemetry),
    (-13, Status::Other(-13)),
];

/// A library whose requests answer what the name of their peer says: "C interface,agent".
fn scripted(agent_method: bool) -> (Installation, Arc<Library>) {
    let fake = Fake::complete()
        .with(
            "nixl_capi_create_xfer_req",
            r#"
            #include <stdio.h>
            static int asked;
            struct script { int capi, agent; };
            struct nixl_capi_xfer_req_s { struct script *inner; };
            struct nixl_capi_agent_s { void *inner; };
            int fake_asked(void) { return asked; }
            nixl_capi_status_t nixl_capi_create_xfer_req(nixl_capi_agent_t agent, nixl_capi_xfer_op_t operation,
                nixl_capi_xfer_dlist_t local_descs, nixl_capi_xfer_dlist_t remote_descs, const char *remote_agent,
                nixl_capi_xfer_req_t *req, nixl_capi_opt_args_t opt_args) {
                *req = malloc(sizeof **req);
                (*req)->inner = malloc(sizeof(struct script));
                sscanf(remote_agent, "%d,%d", &(*req)->inner->capi, &(*req)->inner->agent);
                agent->inner = &asked;
                return 0;
            }"#,
        )
        .with(
            "nixl_capi_get_xfer_status",
            "nixl_capi_status_t nixl_capi_get_xfer_status(nixl_capi_agent_t agent, nixl_capi_xfer_req_t req) {
                return req->inner->capi;
            }",
        )
        .with(
            "nixl_capi_post_xfer_req",
            "nixl_capi_status_t nixl_capi_post_xfer_req(
                nixl_capi_agent_t agent, nixl_capi_xfer_req_t req, nixl_capi_opt_args_t opt_args) {
                return req->inner->capi;
            }",
        )
        .with(
            "nixl_capi_release_xfer_req",
            "nixl_capi_status_t nixl_capi_release_xfer_req(nixl_capi_agent_t agent, nixl_capi_xfer_req_t req) {
                return req->inner->capi;
            }",
        )
        .adding(if agent_method {
            "int _ZNK9nixlAgent13getXferStatusEP12nixlXferReqH(void *agent, struct script *req) {
                if (agent == &asked) asked++;
                return req->agent;
            }"
        } else {
            ""
        })
        .install();
    let library = Library::open(&fake.library()).unwrap();
    (fake, library)
}

fn request(library: &Library, script: &str) -> (AgentHandle, XferReqHandle) {
    let script = c_string("script", script).unwrap();
    // SAFETY: the scripted library reads only what it made itself.
    unsafe {
        let agent = library.create_agent(c"a").unwrap();
        let list = library.create_xfer_dlist(MemoryType::Dram).unwrap();
        (
            agent,
            library
                .create_xfer_req(agent, XferOp::Read, list, list, &script, None)
                .unwrap(),
        )
    }
}

fn asked(fake: &Installation) -> i32 {
    // SAFETY: the library is loaded already, and the fake has this function of this type.
    unsafe {
        let library = libloading::Library::new(fake.library()).unwrap();
        library
            .get::<unsafe extern "C" fn() -> i32>(b"fake_asked\0")
            .unwrap()()
    }
}

#[test]
fn every_status_is_told_apart_and_keeps_its_number() {
    let (_fake, library) = scripted(false);
    for &(raw, status) in CAPI {
        assert_eq!(Status::from_capi(raw), status);
        let (agent, req) = request(&library, &format!("{raw},0"));
        let failed = |function| {
            Err(CallError::Failed {
                function,
                status,
                raw,
            })
        };
        // SAFETY: the handles are live.
        let (posted, released) = unsafe {
            (
                library.post_xfer_req(agent, req, None),
                library.release_xfer_req(agent, req),
            )
        };
        match status {
            Status::Success => assert_eq!((posted, released), (Ok(Progress::Done), Ok(()))),
            Status::InProgress => {
                assert_eq!(posted, Ok(Progress::InProgress));
                assert_eq!(released, failed("nixl_capi_release_xfer_req"));
            }
            _ => {
                assert_eq!(
                    posted,
                    failed("nixl_capi_post_xfer_req").map(|()| Progress::Done)
                );
                assert_eq!(released, failed("nixl_capi_release_xfer_req"));
                assert!(
                    released
                        .unwrap_err()
                        .to_string()
                        .ends_with(&format!("({raw})"))
                );
            }
        }
    }
    for &(raw, status) in AGENT {
        assert_eq!(Status::from_agent(raw), status);
        assert_eq!(status.is_failure(), raw != 0 && raw != 1);
    }
    let names: BTreeSet<String> = CAPI
        .iter()
        .chain(AGENT)
        .map(|(_, status)| status.to_string())
        .collect();
    let statuses: HashSet<Status> = CAPI.iter().chain(AGENT).map(|(_, s)| *s).collect();
    assert_eq!(names.len(), statuses.len());
}

#[test]
fn a_failed_transfer_is_explained_by_the_agent() {
    let (fake, library) = scripted(true);
    assert!(library.has_detailed_status() && library.report().detailed_status);
    for &(raw, status) in AGENT.iter().filter(|(_, status)| status.is_failure()) {
        let (agent, req) = request(&library, &format!("-2,{raw}"));
        // SAFETY: the handles are live.
        let result = unsafe { library.xfer_status_detailed(agent, req) };
        assert_eq!(
            result,
            Err(CallError::Failed {
                function: "nixlAgent::getXferStatus",
                status,
                raw
            })
        );
    }
    assert_eq!(asked(&fake), 13);
}

#[test]
fn polling_a_running_transfer_does_not_ask_the_agent() {
    let (fake, library) = scripted(true);
    let (agent, req) = request(&library, "1,-10");
    for _ in 0..3 {
        // SAFETY: the handles are live.
        let status = unsafe { library.xfer_status_detailed(agent, req) };
        assert_eq!(status, Ok(Progress::InProgress));
    }
    assert_eq!(asked(&fake), 0);

    let (agent, req) = request(&library, "0,0");
    for _ in 0..3 {
        // SAFETY: the handles are live.
        let status = unsafe { library.xfer_status_detailed(agent, req) };
        assert_eq!(status, Ok(Progress::Done));
    }
    assert_eq!(asked(&fake), 1, "one success confirms the method");
}

#[test]
fn an_agent_that_contradicts_the_c_interface_is_not_asked_again() {
    for contradiction in ["0,-10", "0,1", "-2,0", "-2,1"] {
        let (fake, library) = scripted(true);
        let (agent, req) = request(&library, contradiction);
        // SAFETY: the handles are live.
        let (detailed, plain) = unsafe {
            (
                library.xfer_status_detailed(agent, req),
                library.get_xfer_status(agent, req),
            )
        };
        assert_eq!(detailed, plain, "{contradiction}");
        assert!(!library.has_detailed_status());

        let (agent, req) = request(&library, "-2,-10");
        // SAFETY: the handles are live.
        let later = unsafe { library.xfer_status_detailed(agent, req) };
        assert_eq!(later.unwrap_err().status(), Some(Status::Backend));
        assert_eq!(asked(&fake), 1);
    }
}

#[test]
fn without_the_agents_method_the_c_interface_answers() {
    let (_fake, library) = scripted(false);
    assert!(
        library
            .report()
            .findings
            .contains(&Finding::NoDetailedStatus)
    );
    let (fake, unwanted) = scripted(true);
    drop(unwanted);
    let unwanted = OpenOptions::new()
        .detailed_status(false)
        .open(&fake.library())
        .unwrap();
    assert!(unwanted.report().findings.is_empty());

    for library in [library, unwanted] {
        assert!(!library.has_detailed_status());
        let (agent, req) = request(&library, "-2,-10");
        // SAFETY: the handles are live.
        let result = unsafe { library.xfer_status_detailed(agent, req) };
        assert_eq!(
            result,
            Err(CallError::Failed {
                function: "nixl_capi_get_xfer_status",
                status: Status::Backend,
                raw: -2
            })
        );
    }
}

//! The real NIXL, where one is there. What could harm this process runs in one of its own.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests"
)]

mod common;

use std::collections::BTreeSet;
use std::ffi::CString;

use common::peer::{Peer, open};
use common::{in_child, real_runtime};
use nixl_sys::*;

#[test]
fn the_library_exports_what_the_header_declares() {
    let Some(place) = real_runtime() else { return };
    let library = find_in(&place).unwrap();
    let report = Library::open(&library).unwrap().report().clone();

    let expected: BTreeSet<&str> = match report.family {
        VersionFamily::V1_4 => REQUIRED_FUNCTIONS.iter().copied().collect(),
        _ => REQUIRED_FUNCTIONS
            .iter()
            .chain(FUNCTIONS_SINCE_1_5)
            .copied()
            .collect(),
    };
    // The names of dynamic symbols stand in one table, each ended by NUL.
    let bytes = std::fs::read(library).unwrap();
    let exported: BTreeSet<&str> = bytes
        .split(|b| *b == 0)
        .filter_map(|s| std::str::from_utf8(s).ok())
        .filter(|s| {
            s.starts_with("nixl_capi_") && s.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
        })
        .collect();
    assert_eq!(
        exported, expected,
        "a new NIXL version? see the upgrade checklist in README.md"
    );
}

#[test]
fn the_agents_statuses_have_the_numbers_we_think() {
    if real_runtime().is_some() {
        in_child::<&str>("child_names_the_agents_statuses", &[]);
    }
}

#[test]
#[ignore = "run in a process of its own"]
fn child_names_the_agents_statuses() {
    // `std::string nixlEnumStrings::statusStr(const nixl_status_t &)`: the string is written to where the first
    // argument points.
    type StatusStr = unsafe extern "C" fn(*mut [usize; 4], *const i32);
    let library = find_in(&real_runtime().unwrap())
        .unwrap()
        .with_file_name("libnixl.so");
    // SAFETY: the real library, and the mangled name fixes the type.
    let name = |raw: i32| unsafe {
        let library = libloading::Library::new(&library).unwrap();
        let status_str = library
            .get::<StatusStr>(b"_ZN15nixlEnumStrings9statusStrB5cxx11ERK13nixl_status_t\0")
            .unwrap();
        let mut string = [0_usize; 4];
        status_str(&mut string, &raw);
        let text = std::slice::from_raw_parts(string[0] as *const u8, string[1]);
        let text = String::from_utf8_lossy(text).into_owned();
        std::mem::forget(library);
        text
    };
    for (status, text) in [
        (Status::InProgress, "NIXL_IN_PROG"),
        (Status::Success, "NIXL_SUCCESS"),
        (Status::NotPosted, "NIXL_ERR_NOT_POSTED"),
        (Status::InvalidParam, "NIXL_ERR_INVALID_PARAM"),
        (Status::Backend, "NIXL_ERR_BACKEND"),
        (Status::NotFound, "NIXL_ERR_NOT_FOUND"),
        (Status::Mismatch, "NIXL_ERR_MISMATCH"),
        (Status::NotAllowed, "NIXL_ERR_NOT_ALLOWED"),
        (Status::RepostActive, "NIXL_ERR_REPOST_ACTIVE"),
        (Status::Unknown, "NIXL_ERR_UNKNOWN"),
        (Status::NotSupported, "NIXL_ERR_NOT_SUPPORTED"),
        (Status::RemoteDisconnect, "NIXL_ERR_REMOTE_DISCONNECT"),
        (Status::Canceled, "NIXL_ERR_CANCELED"),
        (Status::NoTelemetry, "NIXL_ERR_NO_TELEMETRY"),
        (Status::Other(-13), "BAD_STATUS"),
    ] {
        let raw: Vec<i32> = (-20..5)
            .filter(|raw| Status::from_agent(*raw) == status)
            .collect();
        let [raw] = raw[..] else {
            panic!("{status:?} has the numbers {raw:?}")
        };
        assert_eq!(name(raw), text);
    }
}

#[test]
fn the_first_steps_succeed_and_the_process_ends_cleanly() {
    if real_runtime().is_some() {
        let (stdout, stderr) =
            in_child("child_takes_the_first_steps", &[("UCX_LOG_LEVEL", "info")]);
        let log = "UCX  INFO";
        assert!(
            !stdout.contains(log) && stderr.contains(log),
            "UCX logs to stderr\n{stdout}\n{stderr}"
        );
    }
}

#[test]
fn a_link_to_the_library_works_and_a_copy_is_refused() {
    if real_runtime().is_some() {
        in_child::<&str>("child_opens_a_copy_and_a_link", &[]);
    }
}

#[test]
#[ignore = "run in a process of its own"]
fn child_opens_a_copy_and_a_link() {
    let original = find_in(&real_runtime().unwrap()).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let copy = elsewhere.path().join("copy.so");
    std::fs::copy(&original, &copy).unwrap();
    assert!(matches!(
        Library::open(&copy),
        Err(LoadError::PluginsMissing { .. })
    ));
    match OpenOptions::new().allow_missing_plugins(true).open(&copy) {
        Err(LoadError::DynamicLinker { reason, .. }) => {
            assert!(reason.contains("libnixl"), "{reason}")
        }
        other => panic!("{other:?}"),
    }
    let link = elsewhere.path().join("link.so");
    std::os::unix::fs::symlink(&original, &link).unwrap();
    let library = Library::open(&link).unwrap();
    assert_eq!(library.report().library, original.canonicalize().unwrap());
}

#[test]
fn without_a_readable_configuration_no_agent_is_made() {
    if real_runtime().is_some() {
        let home = tempfile::tempdir().unwrap();
        let config = home.path().join(".nixl.cfg");
        std::os::unix::fs::symlink(&config, &config).unwrap();
        in_child("child_makes_no_agent", &[("HOME", home.path())]);
        in_child("child_makes_no_agent", &[("NIXL_CONFIG_FILE", config)]);
    }
}

#[test]
#[ignore = "run in a process of its own"]
fn child_makes_no_agent() {
    let path = find_in(&real_runtime().unwrap()).unwrap();
    assert!(matches!(
        Library::open(&path),
        Err(LoadError::UnreadableConfig { .. })
    ));
    let library = OpenOptions::new()
        .allow_unreadable_config(true)
        .open(&path)
        .unwrap();
    // SAFETY: no handle is used.
    let error = unsafe { library.create_agent(c"agent") }.unwrap_err();
    assert_eq!(error.status(), Some(Status::Backend));
}

#[test]
#[ignore = "run in a process of its own"]
fn child_takes_the_first_steps() {
    let library = open();
    let report = library.report();
    println!("{report}");
    assert!(report.detailed_status && report.findings.is_empty());
    assert!(
        report.plugins.iter().any(|p| p == "UCX") && report.ucx_modules.iter().any(|m| m == "cma")
    );
    if let Some(version) = &report.version {
        let family = if version.starts_with("1.4.") {
            VersionFamily::V1_4
        } else {
            VersionFamily::V1_5
        };
        assert_eq!(report.family, family);
    }

    let peer = Peer::new(&library, "first", &AgentConfig::default(), vec![0; 1 << 20]);
    assert!(peer.metadata().len() > 100);
    // SAFETY: one thread uses the handles, and none after it was destroyed.
    unsafe {
        let plugins = library.get_available_plugins(peer.agent).unwrap();
        let names: Vec<CString> = (0..library.string_list_size(plugins).unwrap())
            .map(|i| library.string_list_get(plugins, i).unwrap())
            .collect();
        assert!(names.contains(&CString::from(c"UCX")));
        assert!(library.string_list_get(plugins, names.len()).is_err());
        library.destroy_string_list(plugins).unwrap();

        let (mems, params) = library.get_plugin_params(peer.agent, c"UCX").unwrap();
        let types: Vec<MemoryType> = (0..library.mem_list_size(mems).unwrap())
            .map(|i| library.mem_list_get(mems, i).unwrap())
            .collect();
        assert!(types.contains(&MemoryType::Dram));
        let iter = library.params_create_iterator(params).unwrap();
        let mut keys = Vec::new();
        while let Some((key, _)) = library.params_iterator_next(iter).unwrap() {
            keys.push(key);
        }
        assert!(keys.contains(&CString::from(c"num_workers")), "{keys:?}");
        library.params_destroy_iterator(iter).unwrap();
        library.destroy_params(params).unwrap();
        library.destroy_mem_list(mems).unwrap();

        for (mem_type, name) in [(MemoryType::Dram, c"DRAM"), (MemoryType::Vram, c"VRAM")] {
            assert_eq!(
                library.mem_type_to_string(mem_type).unwrap().as_c_str(),
                name
            );
        }
        let list = library.create_reg_dlist(MemoryType::Vram).unwrap();
        assert_eq!(library.reg_dlist_get_type(list), Ok(MemoryType::Vram));
        library.destroy_reg_dlist(list).unwrap();

        let empty = library.create_params().unwrap();
        let iter = library.params_create_iterator(empty).unwrap();
        assert_eq!(library.params_iterator_next(iter), Ok(None));
        library.params_destroy_iterator(iter).unwrap();
        let unknown = library
            .create_backend(peer.agent, c"NO_SUCH_PLUGIN", empty)
            .unwrap_err();
        assert_eq!(unknown.status(), Some(Status::Backend));
        library.destroy_params(empty).unwrap();

        let args = library.create_opt_args().unwrap();
        assert!(library.opt_args_get_notif_msg(args).unwrap().is_none());
        library.opt_args_set_notif_msg(args, b"done\0!").unwrap();
        library.opt_args_set_has_notif(args, true).unwrap();
        library.opt_args_set_skip_desc_merge(args, true).unwrap();
        assert_eq!(
            &library.opt_args_get_notif_msg(args).unwrap().unwrap()[..],
            b"done\0!"
        );
        assert_eq!(library.opt_args_get_has_notif(args), Ok(true));
        assert_eq!(library.opt_args_get_skip_desc_merge(args), Ok(true));
        match report.family {
            VersionFamily::V1_4 => {
                let error = library.opt_args_set_custom_param(args, b"p").unwrap_err();
                assert!(matches!(error, CallError::Unsupported { since: "1.5", .. }));
            }
            _ => {
                library.opt_args_set_custom_param(args, b"p").unwrap();
                assert_eq!(
                    &library.opt_args_get_custom_param(args).unwrap().unwrap()[..],
                    b"p"
                );
            }
        }
        library.destroy_opt_args(args).unwrap();
    }
    peer.destroy();
}

//! Opening libraries that are right, wrong, elsewhere or incomplete.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests"
)]

mod common;

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use common::fake::{Fake, compile};
use common::in_child;
use nixl_sys::{
    FUNCTIONS_SINCE_1_5, Finding, Layout, Library, LoadError, OpenOptions, REQUIRED_FUNCTIONS,
    VersionFamily, find_in,
};

#[test]
fn a_complete_library_is_reported() {
    let fake = Fake::complete().install();
    let library = Library::open(&fake.library()).unwrap();
    let report = library.report();
    assert_eq!(report.library, fake.library());
    assert_eq!(
        report.layout,
        Layout::Wheel {
            root: fake.root.clone(),
            package: "nixl_cu12".into()
        }
    );
    assert_eq!(report.family, VersionFamily::V1_5);
    assert_eq!(report.version.as_deref(), Some("9.8.7"));
    assert_eq!(report.plugins, ["UCX"]);
    assert_eq!(report.ucx_modules, ["cma"]);
    assert!(report.missing_functions.is_empty());

    let text = report.to_string();
    for part in ["NIXL 9.8.7", "libnixl_capi.so", "UCX", "cma"] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn a_library_of_1_4_is_told_by_what_it_lacks() {
    let fake = Fake::complete().without(FUNCTIONS_SINCE_1_5).install();
    let library = Library::open(&fake.library()).unwrap();
    assert_eq!(library.report().family, VersionFamily::V1_4);
    assert_eq!(library.report().missing_functions, FUNCTIONS_SINCE_1_5);
}

#[test]
fn required_functions_that_are_missing_are_named() {
    for missing in [
        &["nixl_capi_create_agent"][..],
        &["nixl_capi_post_xfer_req", "nixl_capi_is_stub"],
    ] {
        let fake = Fake::complete().without(missing).install();
        match Library::open(&fake.library()) {
            Err(LoadError::MissingFunctions {
                path,
                mut functions,
            }) => {
                assert_eq!(path, fake.library());
                functions.sort_unstable();
                let mut missing = missing.to_vec();
                missing.sort_unstable();
                assert_eq!(functions, missing);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn some_other_library_is_refused() {
    let fake = Fake::complete().without(REQUIRED_FUNCTIONS).install();
    match Library::open(&fake.library()) {
        Err(LoadError::MissingFunctions { functions, .. }) => {
            assert_eq!(functions, REQUIRED_FUNCTIONS)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_stub_is_refused() {
    let fake = Fake::complete()
        .with(
            "nixl_capi_is_stub",
            "bool nixl_capi_is_stub(void) { return true; }",
        )
        .install();
    assert!(matches!(
        Library::open(&fake.library()),
        Err(LoadError::Stub { .. })
    ));
}

#[test]
fn a_missing_file_is_not_found() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("libnixl_capi.so");
    match Library::open(&path) {
        Err(LoadError::NotFound { searched }) => assert_eq!(searched, [path]),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_no_library_is_refused_without_asking_the_linker() {
    let fake = Fake::complete().install();
    for content in ["not a library, a text\n", "x", ""] {
        std::fs::write(fake.library(), content).unwrap();
        let error = Library::open(&fake.library()).unwrap_err();
        assert!(matches!(error, LoadError::NotALibrary { .. }), "{error:?}");
    }
    let error = Library::open(&fake.plugins()).unwrap_err();
    assert!(matches!(error, LoadError::NotALibrary { .. }), "{error:?}");
}

#[test]
fn a_broken_library_gives_the_linkers_words() {
    let fake = Fake::complete().install();
    std::fs::write(fake.library(), b"\x7fELF and nothing more").unwrap();
    match Library::open(&fake.library()) {
        Err(LoadError::DynamicLinker { reason, .. }) => {
            assert!(reason.contains("libnixl_capi.so"), "{reason}")
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_link_is_followed_to_the_installation() {
    let fake = Fake::complete().install();
    let elsewhere = tempfile::tempdir().unwrap();
    let link = elsewhere.path().join("libnixl_capi.so");
    symlink(fake.library(), &link).unwrap();
    let library = Library::open(&link).unwrap();
    assert_eq!(library.report().requested, link);
    assert_eq!(library.report().library, fake.library());
    assert_eq!(library.report().plugins, ["UCX"]);
    assert!(
        library
            .report()
            .to_string()
            .contains(link.to_str().unwrap())
    );
}

#[test]
fn a_copy_elsewhere_is_refused_for_its_missing_plugins() {
    let fake = Fake::complete().install();
    let elsewhere = tempfile::tempdir().unwrap();
    let copy = elsewhere.path().join("libnixl_capi.so");
    std::fs::copy(fake.library(), &copy).unwrap();
    assert!(matches!(
        Library::open(&copy),
        Err(LoadError::PluginsMissing { .. })
    ));
}

#[test]
fn missing_plugins_are_an_error_or_a_finding() {
    let fake = Fake::complete().install();
    std::fs::remove_dir_all(fake.plugins()).unwrap();
    match Library::open(&fake.library()) {
        Err(LoadError::PluginsMissing { dir }) => assert_eq!(dir, fake.plugins()),
        other => panic!("{other:?}"),
    }
    let library = OpenOptions::new()
        .allow_missing_plugins(true)
        .open(&fake.library())
        .unwrap();
    assert!(
        library
            .report()
            .findings
            .contains(&Finding::PluginsMissing(fake.plugins()))
    );
}

#[test]
fn missing_ucx_modules_are_an_error_or_a_finding() {
    let fake = Fake::complete().install();
    for damage in [std::fs::remove_file::<PathBuf> as fn(PathBuf) -> _, |_| {
        Ok(())
    }] {
        damage(fake.ucx_modules().join("libuct_cma.so.0")).unwrap();
        match Library::open(&fake.library()) {
            Err(LoadError::UcxModulesMissing { dir }) => assert_eq!(dir, fake.ucx_modules()),
            other => panic!("{other:?}"),
        }
        let library = OpenOptions::new()
            .allow_missing_ucx_modules(true)
            .open(&fake.library())
            .unwrap();
        let report = library.report();
        assert!(
            report
                .findings
                .contains(&Finding::UcxModulesMissing(fake.ucx_modules()))
        );
        assert!(report.to_string().contains("TCP for everything"));
        let _ = std::fs::remove_dir(fake.ucx_modules());
    }
}

#[test]
fn outside_a_wheel_the_ucx_modules_are_reported_as_unchecked() {
    let fake = Fake::complete().install();
    let prefix = tempfile::tempdir().unwrap();
    let lib = prefix.path().join("lib");
    std::fs::create_dir_all(lib.join("plugins")).unwrap();
    std::fs::copy(fake.library(), lib.join("libnixl_capi.so")).unwrap();
    std::fs::write(lib.join("plugins/libplugin_UCX.so"), "").unwrap();

    let library = Library::open(&find_in(prefix.path()).unwrap()).unwrap();
    let report = library.report();
    assert_eq!((&report.layout, &report.version), (&Layout::Other, &None));
    assert!(report.findings.contains(&Finding::UcxModulesUnchecked));
}

#[test]
fn every_kind_of_place_is_searched() {
    let fake = Fake::complete().install();
    for place in [fake.root.clone(), fake.library_dir(), fake.library()] {
        assert_eq!(find_in(&place).unwrap(), fake.library());
    }
    let arch = format!("lib/{}-linux-gnu", std::env::consts::ARCH);
    for folder in ["lib", "lib64", &arch] {
        let prefix = tempfile::tempdir().unwrap();
        let lib = prefix.path().join(folder);
        std::fs::create_dir_all(&lib).unwrap();
        std::fs::copy(fake.library(), lib.join("libnixl_capi.so")).unwrap();
        assert_eq!(find_in(prefix.path()).unwrap(), lib.join("libnixl_capi.so"));
    }
}

#[test]
fn a_place_without_nixl_tells_where_it_looked() {
    for place in [
        tempfile::tempdir().unwrap().path(),
        Path::new("/does/not/exist"),
    ] {
        let error = find_in(place).unwrap_err();
        let LoadError::NotFound { searched } = &error else {
            panic!("{error:?}")
        };
        assert!(searched.contains(&place.join("lib64/libnixl_capi.so")));
        assert!(error.to_string().contains("lib64"));
    }
}

#[test]
fn two_installations_in_one_place_are_ambiguous_but_a_link_is_not() {
    let fake = Fake::complete().install();
    let lib = fake.root.join("lib");
    symlink(fake.library_dir(), &lib).unwrap();
    assert_eq!(find_in(&fake.root).unwrap(), fake.library());

    std::fs::remove_file(&lib).unwrap();
    std::fs::create_dir(&lib).unwrap();
    std::fs::copy(fake.library(), lib.join("libnixl_capi.so")).unwrap();
    match find_in(&fake.root) {
        Err(LoadError::Ambiguous { candidates }) => assert_eq!(candidates.len(), 2),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_second_nixl_in_one_process_is_refused() {
    in_child::<&str>("child_opens_two_installations", &[]);
}

#[test]
#[ignore = "run in a process of its own"]
fn child_opens_two_installations() {
    let [first, second] = [Fake::complete().install(), Fake::complete().install()];
    let inner = first.library_dir().join("libnixl.so");
    compile("int inner;", &inner);
    // SAFETY: it has no initialisers.
    let inner = unsafe { libloading::Library::new(inner) }.unwrap();
    assert!(Library::open(&first.library()).is_ok());
    assert!(Library::open(&first.library()).is_ok());
    match Library::open(&second.library()) {
        Err(LoadError::OtherLoaded { loaded, requested }) => {
            assert!(loaded.starts_with(first.library_dir()));
            assert_eq!(requested, second.library());
        }
        other => panic!("{other:?}"),
    }
    drop(inner);
}

#[test]
fn folders_named_by_the_environment_are_the_ones_checked() {
    let elsewhere = tempfile::tempdir().unwrap();
    std::fs::write(elsewhere.path().join("libplugin_OTHER.so"), "").unwrap();
    std::fs::write(elsewhere.path().join("libuct_other.so"), "").unwrap();
    let dir = elsewhere.path().as_os_str();
    in_child(
        "child_reports_other_folders",
        &[("NIXL_PLUGIN_DIR", dir), ("UCX_MODULE_DIR", dir)],
    );
}

#[test]
#[ignore = "run in a process of its own"]
fn child_reports_other_folders() {
    let fake = Fake::complete().install();
    let library = Library::open(&fake.library()).unwrap();
    assert_eq!(
        library.report().ucx_modules,
        ["cma"],
        "UCX looks beside itself first"
    );
    std::fs::remove_dir_all(fake.root.join("nixl_cu12.libs")).unwrap();
    let library = Library::open(&fake.library()).unwrap();
    let report = library.report();
    assert_eq!(
        (&report.plugins[..], &report.ucx_modules[..]),
        (&["OTHER".into()][..], &["other".into()][..])
    );
    assert!(
        report
            .environment
            .iter()
            .any(|(name, _)| name == "UCX_MODULE_DIR")
    );
}

#[test]
fn a_configuration_out_of_reach_is_an_error_or_a_finding() {
    in_child(
        "child_cannot_read_the_configuration",
        &[("NIXL_CONFIG_FILE", "/does/not/exist")],
    );
}

#[test]
#[ignore = "run in a process of its own"]
fn child_cannot_read_the_configuration() {
    let fake = Fake::complete().install();
    match Library::open(&fake.library()) {
        Err(LoadError::UnreadableConfig { path, .. }) => {
            assert_eq!(path, Path::new("/does/not/exist"))
        }
        other => panic!("{other:?}"),
    }
    let library = OpenOptions::new()
        .allow_unreadable_config(true)
        .open(&fake.library())
        .unwrap();
    assert!(matches!(
        library.report().findings[..],
        [Finding::UnreadableConfig(..), ..]
    ));
}

#[test]
fn every_error_says_what_to_do() {
    let path = || PathBuf::from("/some/where");
    let errors = [
        LoadError::NotFound {
            searched: vec![path()],
        },
        LoadError::Ambiguous {
            candidates: vec![path()],
        },
        LoadError::NotALibrary {
            path: path(),
            reason: "r".into(),
        },
        LoadError::DynamicLinker {
            path: path(),
            reason: "r".into(),
        },
        LoadError::MissingFunctions {
            path: path(),
            functions: vec!["f"],
        },
        LoadError::Stub { path: path() },
        LoadError::PluginsMissing { dir: path() },
        LoadError::UcxModulesMissing { dir: path() },
        LoadError::UnreadableConfig {
            path: path(),
            reason: "r".into(),
        },
        LoadError::OtherLoaded {
            loaded: path(),
            requested: path(),
        },
        LoadError::Io {
            path: path(),
            source: std::io::Error::other("r"),
        },
    ];
    let advice = ["Install", "install", "Give", "give", "Set", "Use", "Check"];
    for error in errors {
        let text = error.to_string();
        assert!(text.contains("/some/where"), "{text}");
        assert!(advice.iter().any(|a| text.contains(a)), "{text}");
    }
}

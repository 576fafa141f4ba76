//! Setting the variables that NIXL's plugins read, once and in time.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests"
)]

mod common;

use common::fake::{Fake, compile};
use common::in_child;
use nixl_sys::{Environment, EnvironmentOutcome, Library};

fn value(environment: &Environment, name: &str) -> Option<String> {
    environment
        .variables()
        .iter()
        .find(|v| v.name == name)
        .map(|v| v.value.clone())
}

#[test]
fn the_recommendation_depends_on_rdma_only_where_it_must() {
    let without = Environment::recommended_for(false);
    let with = Environment::recommended_for(true);
    assert_eq!(value(&without, "UCX_MEM_EVENTS").as_deref(), Some("n"));
    assert_eq!(value(&with, "UCX_MEM_EVENTS"), None);
    for (name, expected) in [
        ("UCX_MODULES", "^efa"),
        ("UCX_LOG_FILE", "stderr"),
        ("UCX_TCP_USER_TIMEOUT", "5s"),
        ("UCX_TCP_CONN_NB", "y"),
        ("UCX_TCP_MAX_CONN_RETRIES", "1"),
        ("UCX_TCP_TX_SEG_SIZE", "256K"),
        ("UCX_TCP_RX_SEG_SIZE", "256K"),
        ("UCX_CMA_TX_QUOTA", "256"),
    ] {
        assert_eq!(value(&with, name).as_deref(), Some(expected));
        assert_eq!(value(&without, name).as_deref(), Some(expected));
    }
    let own = with
        .clone()
        .with("UCX_MODULES", "all", "EFA wanted")
        .without("UCX_LOG_FILE");
    assert_eq!(value(&own, "UCX_MODULES").as_deref(), Some("all"));
    assert_eq!(value(&own, "UCX_LOG_FILE"), None);
    assert_eq!(own.variables().len(), with.variables().len() - 1);
}

#[test]
fn what_the_user_set_stays_and_is_reported() {
    in_child(
        "child_applies_once",
        &[("UCX_MODULES", "^ib"), ("UCX_LOG_FILE", "")],
    );
}

#[test]
#[ignore = "run in a process of its own"]
fn child_applies_once() {
    let environment = Environment::recommended_for(false);
    let plan = environment.plan();
    assert_eq!(plan.outcome, EnvironmentOutcome::Planned);
    assert!(
        std::env::var_os("UCX_MEM_EVENTS").is_none(),
        "a plan changes nothing"
    );

    // SAFETY: the other thread of this process waits for this one.
    let report = unsafe { environment.apply() };
    assert_eq!(report.outcome, EnvironmentOutcome::Applied);
    assert_eq!((&report.set, &report.kept), (&plan.set, &plan.kept));
    assert_eq!(std::env::var("UCX_MEM_EVENTS").as_deref(), Ok("n"));
    assert_eq!(std::env::var("UCX_MODULES").as_deref(), Ok("^ib"));
    let kept: Vec<_> = report
        .kept
        .iter()
        .map(|k| (k.name.as_str(), k.value.to_str().unwrap()))
        .collect();
    assert_eq!(kept, [("UCX_MODULES", "^ib"), ("UCX_LOG_FILE", "")]);
    let text = report.to_string();
    assert!(
        text.contains("UCX_MODULES=^ib was set by the user (proposed: ^efa)"),
        "{text}"
    );

    // SAFETY: as above.
    let second = unsafe { Environment::empty().with("UCX_OTHER", "1", "").apply() };
    assert_eq!(second.outcome, EnvironmentOutcome::AlreadyApplied);
    assert!(second.set.is_empty() && std::env::var_os("UCX_OTHER").is_none());
}

#[test]
fn after_nixl_is_loaded_nothing_is_set() {
    in_child::<&str>("child_applies_too_late", &[]);
}

#[test]
#[ignore = "run in a process of its own"]
fn child_applies_too_late() {
    let fake = Fake::complete().install();
    compile("int inner;", &fake.library_dir().join("libnixl.so"));
    let _library = Library::open(&fake.library()).unwrap();
    // SAFETY: as above.
    let report = unsafe { Environment::recommended().apply() };
    assert_eq!(
        report.outcome,
        EnvironmentOutcome::TooLate {
            loaded: fake.library()
        }
    );
    assert!(report.set.is_empty() && std::env::var_os("UCX_MODULES").is_none());
    assert!(report.to_string().contains("already loaded"));
}

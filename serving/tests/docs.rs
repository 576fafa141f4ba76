//! What the documentation says of the code is there: excerpts are verbatim, and tests exist.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::fs;
use std::path::{Path, PathBuf};

fn lines(text: &str) -> Vec<&str> {
    text.lines().map(str::trim).collect()
}

#[test]
fn every_excerpt_is_in_the_file_that_is_named() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = fs::read_to_string(root.join("docs/integrating.md")).unwrap();
    let mut file = None;
    let mut excerpt: Option<Vec<&str>> = None;
    let mut count = 0;
    for line in page.lines() {
        match (&mut excerpt, line.trim()) {
            (None, "```rust") => excerpt = Some(Vec::new()),
            (Some(_), "```") => {
                let wanted = excerpt.take().unwrap();
                let name: &str = file.expect("a file is named first");
                let source = fs::read_to_string(root.join(name)).unwrap();
                let found = lines(&source)
                    .windows(wanted.len())
                    .any(|window| window == wanted);
                assert!(found, "not in {name}:\n{}", wanted.join("\n"));
                count += 1;
            }
            (Some(excerpt), line) => excerpt.push(line),
            (None, line) if line.starts_with("`serving/") && line.ends_with('`') => {
                file = Some(line.trim_matches('`'));
            }
            (None, _) => {}
        }
    }
    assert!(count >= 15, "{count} excerpts");
}

/// Every file of Rust below these folders.
fn sources(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("target") {
            sources(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push(path);
        }
    }
}

/// The file and the test that a span of code names, as in ``file: a_test_of_something`` or
/// ``a_test_of…``.
fn named(span: &str) -> Option<(Option<&str>, &str)> {
    let (file, name) = match span.rsplit_once(": ") {
        Some((file, name)) => (Some(file), name),
        None => (None, span),
    };
    let shortened = name.trim_end_matches(['…', '_']);
    // Settings and rules have names of few words.
    let words = if file.is_some() { 3 } else { 4 };
    let test = shortened.split('_').count() >= words
        && shortened
            .bytes()
            .all(|byte| byte == b'_' || byte.is_ascii_lowercase() || byte.is_ascii_digit());
    test.then_some((file, shortened))
}

#[test]
fn every_test_that_is_named_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    for folder in [
        "tests", "src", "kv-xfer", "nixl-sys", "router", "serving", "models",
    ] {
        sources(&root.join(folder), &mut files);
    }
    let texts: Vec<(PathBuf, String)> = files
        .into_iter()
        .map(|path| {
            let text = fs::read_to_string(&path).unwrap();
            (path, text)
        })
        .collect();
    let mut count = 0;
    for page in ["docs/reliability.md", "docs/faults.md", "SECURITY.md"] {
        let text = fs::read_to_string(root.join(page)).unwrap();
        for span in text.split('`').skip(1).step_by(2) {
            let Some((file, name)) = named(span) else {
                continue;
            };
            let wanted = format!("fn {name}");
            let of_file = |path: &Path| {
                file.is_none_or(|file| {
                    let stem = file.rsplit('/').next().unwrap().trim_end_matches(".rs");
                    path.components()
                        .any(|part| Path::new(part.as_os_str()).file_stem() == Some(stem.as_ref()))
                })
            };
            let found = texts
                .iter()
                .any(|(path, text)| of_file(path) && text.contains(&wanted));
            assert!(found, "{page} names {span}, which is nowhere");
            count += 1;
        }
    }
    assert!(count >= 100, "{count} tests");
}

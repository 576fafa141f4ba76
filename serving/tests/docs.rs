//! The excerpts in `docs/integrating.md` are verbatim.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::fs;
use std::path::Path;

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

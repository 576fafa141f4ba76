//! The fuzz targets of the tool's decoders as ordinary tests.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../kv-xfer/tests/fuzz_common/mod.rs"]
mod fuzz_common;
#[path = "../fuzz/src/tool.rs"]
mod tool;

use std::path::Path;

#[test]
fn decoders_keep_their_word_over_corpus_and_mutations() {
    let fuzz = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz"));
    for target in tool::TARGETS {
        fuzz_common::run(fuzz, *target);
    }
}

//! What the tests of the model share.
#![allow(dead_code)]

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use kv_xfer::ids::BlockId;
use kv_xfer::memory::{HostOptions, KvPool};
use serving::model::{Loaded, Model};

/// The model's file, fetched if need be; none, said on standard error, where it cannot be had.
pub fn model_path() -> Option<PathBuf> {
    match serving::provision::model() {
        Ok(path) => Some(path),
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "skipped: {error}");
            None
        }
    }
}

static LOADED: LazyLock<Option<Loaded>> =
    LazyLock::new(|| model_path().map(|path| Loaded::open(&path).expect("the model loads")));

/// The model, loaded once.
pub fn loaded() -> Option<&'static Loaded> {
    LOADED.as_ref()
}

/// A pool of `blocks` blocks for a model.
pub fn pool(model: &Model, block_tokens: u32, blocks: u32) -> Arc<KvPool> {
    let layout = model.layout(block_tokens).expect("a layout");
    let (pool, _) = KvPool::host(layout, blocks, &HostOptions::default()).expect("a pool");
    pool
}

/// Consecutive blocks.
pub fn blocks(range: std::ops::Range<u32>) -> Vec<BlockId> {
    range.map(BlockId).collect()
}

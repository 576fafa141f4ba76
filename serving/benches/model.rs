//! How fast the model is: loading, prompts by length, decoding by batch.
//!
//! Prompts are computed as an engine does, in chunks of 256 tokens.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput};
use kv_xfer::ids::BlockId;
use kv_xfer::memory::{HostOptions, KvPool};
use serving::model::{Chunk, Model};

const BLOCK_TOKENS: usize = 16;
const CHUNK: usize = 256;
const CONTEXT: usize = 512;

fn blocks(from: usize, tokens: usize) -> Vec<BlockId> {
    let first = from as u32;
    (first..first + tokens.div_ceil(BLOCK_TOKENS) as u32)
        .map(BlockId)
        .collect()
}

fn prompt(len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| 100 + i * 7919 % 40_000).collect()
}

fn prefill(model: &Model, pool: &KvPool, tokens: &[u32], blocks: &[BlockId]) {
    for (index, part) in tokens.chunks(CHUNK).enumerate() {
        let chunk = Chunk {
            tokens: part,
            start: index * CHUNK,
            blocks,
            logits: (index + 1) * CHUNK >= tokens.len(),
        };
        model.forward(pool, &[chunk]).expect("a prompt is computed");
    }
}

fn main() {
    let path = match serving::provision::model() {
        Ok(path) => path,
        Err(error) => {
            eprintln!("skipped: {error}");
            return;
        }
    };
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(500))
        .configure_from_args();
    criterion.bench_function("load", |b| {
        b.iter(|| Model::load(&path).expect("the model loads"));
    });

    let model = Model::load(&path).expect("the model loads");
    let layout = model.layout(BLOCK_TOKENS as u32).expect("a layout");
    let (pool, _) = KvPool::host(layout, 1024, &HostOptions::default()).expect("a pool");

    let mut group = criterion.benchmark_group("prefill");
    for len in [512, 2048, 4096] {
        let (tokens, blocks) = (prompt(len), blocks(0, len));
        group.throughput(Throughput::Elements(len as u64));
        group.bench_function(BenchmarkId::from_parameter(len), |b| {
            b.iter(|| prefill(&model, &pool, &tokens, &blocks));
        });
    }
    group.finish();

    let mut group = criterion.benchmark_group("decode");
    for batch in [1, 8] {
        let tables: Vec<Vec<BlockId>> = (0..batch)
            .map(|i| blocks(i * 64, 64 * BLOCK_TOKENS))
            .collect();
        for table in &tables {
            prefill(&model, &pool, &prompt(CONTEXT), table);
        }
        group.throughput(Throughput::Elements(batch as u64));
        group.bench_function(BenchmarkId::from_parameter(batch), |b| {
            b.iter_custom(|steps| {
                let start = Instant::now();
                for step in 0..steps as usize {
                    let chunk = |blocks| Chunk {
                        tokens: &[1234],
                        start: CONTEXT + step % CONTEXT,
                        blocks,
                        logits: true,
                    };
                    let chunks: Vec<Chunk<'_>> = tables.iter().map(|t| chunk(t)).collect();
                    model.forward(&pool, &chunks).expect("a step is computed");
                }
                start.elapsed()
            });
        });
    }
    group.finish();
    criterion.final_summary();
}

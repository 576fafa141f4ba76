//! The bits of KV and logits do not depend on how the work is cut.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "common/model.rs"]
mod common;

use kv_xfer::ids::BlockId;
use kv_xfer::memory::KvPool;
use serving::model::{Chunk, Model, ModelConfig};

const TOKENS: usize = 300;

fn prompt(seed: u32, len: usize, vocab: usize) -> Vec<u32> {
    (0..len as u32)
        .map(|i| (i * 7919 + seed * 104_729) % (vocab as u32 - 20) + 17)
        .collect()
}

/// Runs a prompt in chunks, beside others; returns its KV, token by token, and the last logits.
fn run(model: &Model, block_tokens: u32, cut: usize, others: &[usize]) -> (Vec<Vec<u8>>, Vec<u32>) {
    let vocab = model.config().vocab;
    let per_sequence = (TOKENS as u32 * 2).div_ceil(block_tokens);
    let pool = common::pool(
        model,
        block_tokens,
        per_sequence * (others.len() as u32 + 1),
    );
    // What is not the sequence's own must not matter, even if it is no number.
    let whole = usize::try_from(pool.layout().block_bytes()).unwrap();
    for block in 0..pool.block_count() {
        pool.write_block(0, BlockId(block), 0, &vec![0xff; whole])
            .unwrap();
    }
    let mut tables: Vec<Vec<BlockId>> = (0..=others.len() as u32)
        .map(|i| common::blocks(i * per_sequence..(i + 1) * per_sequence))
        .collect();
    tables[0].reverse();
    let tokens = prompt(1, TOKENS, vocab);
    let other_tokens: Vec<Vec<u32>> = (2..)
        .zip(others)
        .map(|(s, _)| prompt(s, 2 * TOKENS, vocab))
        .collect();
    let mut logits = None;
    let mut done = vec![0; others.len()];
    for start in (0..TOKENS).step_by(cut) {
        let end = TOKENS.min(start + cut);
        let mut chunks = Vec::new();
        let chunk = |tokens, start, blocks| Chunk {
            tokens,
            start,
            blocks,
            logits: true,
        };
        for (i, len) in others.iter().enumerate() {
            let len = (*len).min(2 * TOKENS - done[i]);
            if len > 0 {
                chunks.push(chunk(
                    &other_tokens[i][done[i]..done[i] + len],
                    done[i],
                    &tables[i + 1],
                ));
                done[i] += len;
            }
        }
        let own = chunks.len() / 2;
        chunks.insert(own, chunk(&tokens[start..end], start, &tables[0]));
        logits = model.forward(&pool, &chunks).unwrap().remove(own);
    }
    let logits = logits
        .unwrap()
        .iter()
        .map(|logit| logit.to_bits())
        .collect();
    (kv(&pool, &tables[0]), logits)
}

/// The bytes of each token, whatever the block size.
fn kv(pool: &KvPool, table: &[BlockId]) -> Vec<Vec<u8>> {
    let layout = pool.layout();
    let block_tokens = layout.block_tokens() as usize;
    let row = 2 * match layout.model().attention() {
        kv_xfer::layout::Attention::Gqa { head_dim_k, .. } => head_dim_k as usize,
        _ => unreachable!("the model has KV heads"),
    };
    (0..TOKENS)
        .map(|token| {
            let (block, slot) = (table[token / block_tokens], token % block_tokens);
            let mut bytes = Vec::new();
            for part in layout.chunks() {
                let heads = part.len as usize / (block_tokens * row);
                for head in 0..heads {
                    let mut out = vec![0; row];
                    let offset = part.offset + ((head * block_tokens + slot) * row) as u64;
                    pool.read_block(part.region as usize, block, offset, &mut out)
                        .unwrap();
                    bytes.extend(out);
                }
            }
            bytes
        })
        .collect()
}

/// Block size, cut, and the lengths of the chunks beside it.
type Case<'a> = (u32, usize, &'a [usize]);

fn check(model: &Model, cuts: &[usize], cases: &[Case<'_>]) {
    let (kv, logits) = run(model, 16, TOKENS, &[]);
    assert!(logits.iter().all(|bits| f32::from_bits(*bits).is_finite()));
    let same = |block_tokens, cut, others: &[usize]| {
        let (other_kv, other_logits) = run(model, block_tokens, cut, others);
        let differs = kv.iter().zip(&other_kv).position(|(a, b)| a != b);
        assert_eq!(
            differs, None,
            "first token whose KV differs: cut {cut}, beside {others:?}"
        );
        assert_eq!(logits, other_logits, "cut {cut}, beside {others:?}");
    };
    for cut in cuts {
        same(16, *cut, &[]);
    }
    for (block_tokens, cut, others) in cases {
        same(*block_tokens, *cut, others);
    }
}

#[test]
fn a_small_model_computes_the_same_bits_however_the_work_is_cut() {
    let model = Model::seeded(ModelConfig::tiny(), 7).unwrap();
    let cases: &[Case<'_>] = &[
        (32, 100, &[]),
        (5, TOKENS, &[]),
        (16, TOKENS, &[1]),
        (16, 64, &[1, 1, 37, 256]),
        (16, 255, &[1]),
        (16, 33, &[100, 3]),
    ];
    check(&model, &[1, 2, 7, 16, 64, 129, 256, 299], cases);
}

#[test]
fn the_real_model_computes_the_same_bits_however_the_work_is_cut() {
    if let Some(loaded) = common::loaded() {
        let cases: &[Case<'_>] = &[(32, 255, &[1]), (16, 64, &[1, 37, 7])];
        check(&loaded.model, &[1, 7, 16, 64, 256], cases);
    }
}

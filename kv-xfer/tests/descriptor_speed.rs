//! Prints what encoding and decoding cost, least/median. Asserts nothing: run with `--release -- --nocapture`.
#![allow(clippy::unwrap_used)]

mod descriptor_common;

use std::hint::black_box;
use std::time::Instant;

use descriptor_common::{key, names, open, remote, ticket};
use kv_xfer::descriptor::{BlockIdsJson, DescriptorLimits, Params, SealedTicket};
use kv_xfer::identity::{HashChain, ModelIdentity, Salt};
use rand::SeedableRng;
use rand::seq::SliceRandom;

/// The least and the median of many runs, in microseconds.
fn median<T>(mut work: impl FnMut() -> T) -> String {
    let mut times: Vec<f64> = (0..401)
        .map(|_| {
            let start = Instant::now();
            black_box(work());
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    format!("{:.1}/{:.1}", times[0], times[times.len() / 2])
}

#[test]
fn costs_of_1500_blocks() {
    let mut scattered: Vec<u32> = (0..100_000).collect();
    scattered.shuffle(&mut rand_chacha::ChaCha8Rng::seed_from_u64(1));
    scattered.truncate(1500);
    let contiguous: Vec<u32> = (0..1500).rev().collect();
    let names = names();
    let limits = DescriptorLimits::default();
    let key = key("a secret of the cluster");
    for (what, ids) in [("scattered", &scattered), ("contiguous", &contiguous)] {
        for key in [None, Some(&key)] {
            let made = ticket(ids, 16);
            let mut made = (0..401).map(|_| made.clone()).collect::<Vec<_>>();
            let seal = median(|| {
                made.pop()
                    .unwrap()
                    .seal(key, &names.binding())
                    .unwrap()
                    .to_text()
            });
            let sealed = ticket(ids, 16).seal(key, &names.binding()).unwrap();
            let text = sealed.to_text();
            let parse = median(|| SealedTicket::parse(&text, &limits).unwrap());
            let both = median(|| open(&text, key, &names.binding()).unwrap());
            println!(
                "{what}, key {}: text {} B, seal {seal} µs, parse {parse} µs, \
                 parse+verify(+copy) {both} µs",
                key.is_some(),
                text.len()
            );
            let blocks = remote(Some(sealed), ids, 1500 * 16);
            for ids in [BlockIdsJson::Expanded, BlockIdsJson::Omitted] {
                let to = median(|| blocks.to_json_string(ids));
                let json = blocks.to_json_string(ids);
                let from = median(|| Params::from_json_str(&json, &limits).unwrap());
                println!(
                    "  JSON {ids:?}: {} B, write {to} µs, read {from} µs",
                    json.len()
                );
            }
        }
    }
    let model = ModelIdentity::new("m", "r").unwrap();
    let chain = HashChain::new(&model, &Salt::none(), 16).unwrap();
    let tokens: Vec<u32> = (0..24_000).collect();
    println!(
        "hash 1500 blocks: {} µs",
        median(|| chain.hash_blocks(&tokens))
    );
}

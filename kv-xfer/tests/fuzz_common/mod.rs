//! Runs fuzz targets as ordinary tests: over their corpus, and over seeded mutations of it.
#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::panic)]

use std::path::{Path, PathBuf};

use rand::seq::IndexedRandom;
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Mutations of each target, and in the long mode, `KVX_LONG=1`.
const MUTATIONS: (u64, u64) = (20_000, 400_000);
/// Bytes that decoders look at.
const TELLING: &[u8] = &[
    0, 1, 0x7f, 0x80, 0xff, b'"', b'{', b'[', b':', b',', 0xc4, 0xc6, 0xdd, 0xdf,
];

pub fn corpus(fuzz: &Path, target: &str) -> Vec<Vec<u8>> {
    let folder = fuzz.join("corpus").join(target);
    let mut files: Vec<PathBuf> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    assert!(!files.is_empty(), "no corpus of {target}");
    files
        .iter()
        .map(|file| std::fs::read(file).unwrap())
        .collect()
}

fn mutate(seeds: &[Vec<u8>], random: &mut ChaCha8Rng) -> Vec<u8> {
    let mut bytes = seeds.choose(random).unwrap().clone();
    for _ in 0..random.random_range(1..6) {
        let at = random.random_range(0..=bytes.len());
        match random.random_range(0..7) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, *TELLING.choose(random).unwrap()),
            2 if at < bytes.len() => bytes[at] ^= 1 << random.random_range(0..8),
            3 if at < bytes.len() => bytes[at] = *TELLING.choose(random).unwrap(),
            4 => {
                let end = random.random_range(at..=bytes.len()).min(at + 64);
                let piece = bytes[at..end].to_vec();
                bytes.splice(at..at, piece);
            }
            5 => {
                let end = random.random_range(at..=bytes.len());
                bytes.drain(at..end);
            }
            _ => {
                let other = seeds.choose(random).unwrap();
                let from = random.random_range(0..=other.len());
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from..]);
            }
        }
    }
    bytes
}

/// Runs one target; what made it panic is shown as text and hex.
pub fn run(fuzz: &Path, (name, target): (&str, fn(&[u8]))) {
    let long = std::env::var("KVX_LONG").is_ok_and(|value| value == "1");
    let seeds = corpus(fuzz, name);
    let check = |bytes: &[u8]| {
        let kept = bytes.to_vec();
        if let Err(panic) = std::panic::catch_unwind(|| target(&kept)) {
            let hex: String = kept.iter().map(|byte| format!("{byte:02x}")).collect();
            eprintln!("{name}: {:?} = {hex}", String::from_utf8_lossy(&kept));
            std::panic::resume_unwind(panic);
        }
    };
    seeds.iter().for_each(|seed| check(seed));
    let mut random = ChaCha8Rng::seed_from_u64(0x6b76);
    let count = if long { MUTATIONS.1 } else { MUTATIONS.0 };
    for _ in 0..count {
        let mut bytes = mutate(&seeds, &mut random);
        bytes.truncate(1 << 16);
        check(&bytes);
    }
    // And what has nothing to do with any of it.
    for _ in 0..count / 10 {
        let mut bytes = vec![0; random.random_range(0..200)];
        random.fill_bytes(&mut bytes);
        check(&bytes);
    }
}

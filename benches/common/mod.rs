//! Budgets beside what was measured: criterion says what changed, this says what it may cost.
#![allow(dead_code, missing_docs, clippy::unwrap_used)]

use std::time::{Duration, Instant};

use kv_xfer::ids::BlockId;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

/// Time that one measurement is given.
const FOR: Duration = Duration::from_millis(300);
/// Most samples of one measurement.
const SAMPLES: usize = 301;

/// Whether this is `-- --test`: everything runs once, nothing is measured.
pub fn is_test() -> bool {
    std::env::args().any(|argument| argument == "--test")
}

/// The rows of the table that a bench prints after its run.
#[derive(Default)]
pub struct Budgets(Vec<(String, f64, f64, &'static str)>);

impl Budgets {
    /// Measures `work` and holds its median against a budget.
    pub fn time<T>(&mut self, name: &str, budget: Duration, mut work: impl FnMut() -> T) {
        self.spent(name, budget, || {
            let start = Instant::now();
            std::hint::black_box(work());
            start.elapsed()
        });
    }

    /// Like [`time`](Self::time), where `work` says what counts.
    pub fn spent(&mut self, name: &str, budget: Duration, mut work: impl FnMut() -> Duration) {
        let end = Instant::now() + FOR;
        let mut times = vec![work()];
        while !is_test() && Instant::now() < end && times.len() < SAMPLES {
            times.push(work());
        }
        times.sort();
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        let median = us(times[times.len() / 2]);
        self.0.push((name.to_owned(), median, us(budget), "us"));
    }

    /// Holds any number against a budget.
    pub fn number(&mut self, name: &str, budget: f64, measured: f64, unit: &'static str) {
        self.0.push((name.to_owned(), measured, budget, unit));
    }

    /// Prints a line for each budget.
    pub fn print(self, bench: &str) {
        if is_test() {
            println!("{bench}: {} budgets were run, not measured", self.0.len());
            return;
        }
        println!("\nbudgets: {bench}");
        for (name, measured, budget, unit) in self.0 {
            let verdict = if measured <= budget { "ok" } else { "OVER" };
            println!("  {name:<58} {measured:>10.3} {unit:<2} of {budget:>8} {unit:<2} {verdict}");
        }
    }
}

/// Blocks `0..blocks`, shuffled.
pub fn shuffled(blocks: u32, seed: u64) -> Vec<BlockId> {
    let mut ids: Vec<_> = (0..blocks).map(BlockId).collect();
    ids.shuffle(&mut ChaCha8Rng::seed_from_u64(seed));
    ids
}

pub const US: Duration = Duration::from_micros(1);

/// What the benches over NIXL do first. In a process of holders, which is this program again, it
/// serves and ends; without NIXL it says so and ends.
pub fn prepare() {
    let arguments: Vec<_> = std::env::args().skip(1).take(2).collect();
    if arguments == ["bench", kvx::bench::holders::COMMAND] {
        std::process::exit(kvx::bench::holders::serve() as i32);
    }
    let _ = nixl_sys::Environment::recommended().apply_single_threaded();
    if let Err(error) = kvx::runtime::resolve() {
        println!("skipped: {error}");
        std::process::exit(0);
    }
}

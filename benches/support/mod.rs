//! Criterion over the processes of `kvx bench`: what a sample takes is what the reader measured.

use std::env;
use std::path::PathBuf;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput};
use kvx::bench::PEER_VARIABLE;
use kvx::bench::contender::{Contender, Group};
use kvx::bench::team::{Surroundings, Team};
use kvx::proc::Interrupt;

/// Most times of one request.
const CHUNK: u64 = 1000;
/// Blocks of each case that are checked.
const VERIFY: u32 = 256;
/// Seed of block lists and contents.
pub const SEED: u64 = 1;

/// Whether criterion only wants to see that everything runs.
pub fn is_smoke() -> bool {
    env::args().any(|argument| argument == "--test") || !env::args().any(|a| a == "--bench")
}

/// The target on another node, if one is named.
pub fn peer() -> Option<String> {
    env::var(PEER_VARIABLE).ok().filter(|peer| !peer.is_empty())
}

/// Measures every case of some groups by every participant that can run here.
pub fn run(criterion: &mut Criterion, bench: &str, groups: &[Group], peer: Option<String>) {
    if let Err(error) = kvx::runtime::resolve() {
        eprintln!("skipped: {error}");
        return;
    }
    let around = Surroundings {
        kvx: PathBuf::from(env!("CARGO_BIN_EXE_kvx")),
        interrupt: Interrupt::default(),
        peer,
        seed: SEED,
    };
    let mut absent = Vec::new();
    for group in groups {
        let mut team = Team::gather(group, &around).unwrap();
        for missing in team.take_absent() {
            let ours = group
                .contenders
                .iter()
                .any(|contender| contender.who == missing.who && contender.is_ours());
            assert!(!ours, "{missing:?}");
            if !absent.contains(&missing) {
                absent.push(missing);
            }
        }
        for case in &group.cases {
            let mut of_case = criterion.benchmark_group(format!("{bench}/{}", case.name));
            of_case
                .sample_size(10)
                .warm_up_time(Duration::from_millis(200))
                .measurement_time(Duration::from_secs(1));
            for index in 0..team.pairs().len() {
                let name = team.pairs()[index].contender.name();
                team.tell(index, case).unwrap();
                let checked = team.measure(index, case, 1, VERIFY).unwrap().ran;
                assert!(checked.checked_bytes > 0, "{name}");
                assert_eq!(checked.wrong_bytes, 0, "{} by {name}", case.name);
                let bytes = checked.samples[0].bytes;
                of_case.throughput(Throughput::Bytes(bytes));
                of_case.bench_function(BenchmarkId::from_parameter(name), |bencher| {
                    bencher.iter_custom(|mut times| {
                        let mut total_us = 0.0;
                        while times > 0 {
                            let now = times.min(CHUNK);
                            let ran = team.measure(index, case, now as u32, 0).unwrap().ran;
                            total_us += ran.samples.iter().map(|s| s.total_us).sum::<f64>();
                            times -= now;
                        }
                        Duration::from_secs_f64(total_us / 1e6)
                    });
                });
            }
            of_case.finish();
        }
        let _ = team.part();
    }
    for missing in absent {
        let name = Contender::new(missing.who, &missing.setting).name();
        eprintln!("absent: {name}: {}", missing.why);
    }
}

//! `kvx sim`: many histories of the virtual world.

use std::io::{IsTerminal, Write, stderr, stdout};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use kv_xfer::world::{Scenario, Tally, Violation, World};
use serde_json::{Value, json};

use crate::cli::Exit;

/// Histories that a thread takes at once.
const BATCH: u64 = 64;
/// Violations that are printed: the first ones are enough to begin with.
const SHOWN: usize = 20;

/// Examples and the like, below the options.
pub const HELP: &str = "\
A history is a few engines over a simulated fabric and clock, with everything that can go wrong
between them. Its seed decides every choice, so that a failing one replays exactly.

Examples:
  kvx sim                             a thousand histories
  kvx sim --seed 1 --count 1000000    a million, on all processors
  kvx sim --seed 4711 --count 1 --trace
                                      what happens in one, event by event
  kvx sim --json | jq .violations     one JSON object";

/// Arguments of `kvx sim`.
#[derive(Debug, Clone, Args)]
pub struct SimArgs {
    /// Seed of the first history; the others have those after it
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// How many histories
    #[arg(long, value_name = "M", default_value_t = 1000,
          value_parser = clap::value_parser!(u64).range(1..))]
    pub count: u64,

    /// Steps of a history before trouble ends and everything must come to its end
    #[arg(long, value_name = "S", default_value_t = Scenario::default().steps,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub steps: u32,

    /// Print one JSON object to stdout, and nothing else
    #[arg(long)]
    pub json: bool,

    /// Print the events of the history; with a count of 1
    #[arg(long, conflicts_with = "json")]
    pub trace: bool,
}

/// What came of the histories.
#[derive(Debug, Default)]
struct Sum {
    histories: u64,
    events: u64,
    tally: Tally,
    /// The histories' numbers added up, so that two runs can be compared.
    hash: u64,
    violations: Vec<(u64, Violation)>,
}

impl Sum {
    fn add(&mut self, other: Self) {
        self.histories += other.histories;
        self.events += other.events;
        self.tally.add(&other.tally);
        self.hash = self.hash.wrapping_add(other.hash);
        self.violations.extend(other.violations);
    }
}

/// Runs histories, and says what came of them.
#[must_use]
pub fn run(args: &SimArgs) -> Exit {
    if args.trace && args.count != 1 {
        eprintln!("--trace prints one history: add --count 1 and the seed");
        return Exit::Usage;
    }
    let begin = Instant::now();
    let mut sum = simulate(args);
    sum.violations
        .sort_by_key(|(seed, violation)| (*seed, violation.event));
    let took = begin.elapsed();
    let text = if args.json {
        report_json(args, &sum, took).to_string()
    } else {
        report(args, &sum, took)
    };
    // Whoever reads it may have gone.
    let _ = writeln!(stdout(), "{text}");
    if sum.violations.is_empty() {
        Exit::Ok
    } else {
        Exit::CheckFailed
    }
}

/// Runs all histories, on all processors.
fn simulate(args: &SimArgs) -> Sum {
    let bar = if args.json || args.trace || !stderr().is_terminal() {
        ProgressBar::hidden()
    } else {
        ProgressBar::new(args.count)
    };
    if let Ok(style) =
        ProgressStyle::with_template("{bar:30} {pos}/{len} histories, {elapsed}, {eta} left  {msg}")
    {
        bar.set_style(style);
    }
    let (next, all) = (AtomicU64::new(0), Mutex::new(Sum::default()));
    let processors = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    std::thread::scope(|scope| {
        for _ in 0..processors.min(args.count.div_ceil(BATCH)) {
            scope.spawn(|| {
                loop {
                    let first = next.fetch_add(BATCH, Ordering::Relaxed);
                    if first >= args.count {
                        break;
                    }
                    let last = first.saturating_add(BATCH).min(args.count);
                    let mut sum = Sum::default();
                    for n in first..last {
                        one(args, args.seed.wrapping_add(n), &mut sum);
                    }
                    bar.inc(last - first);
                    if let Ok(mut all) = all.lock() {
                        all.add(sum);
                        if !all.violations.is_empty() {
                            bar.set_message(format!("{} violations", all.violations.len()));
                        }
                    }
                }
            });
        }
    });
    bar.finish_and_clear();
    all.into_inner().unwrap_or_default()
}

fn one(args: &SimArgs, seed: u64, sum: &mut Sum) {
    let scenario = Scenario {
        steps: args.steps,
        trace: args.trace,
    };
    let outcome = World::run(seed, &scenario);
    let mut out = stdout().lock();
    for line in &outcome.trace {
        if writeln!(out, "{line}").is_err() {
            break;
        }
    }
    sum.histories += 1;
    sum.events += outcome.events;
    sum.tally.add(&outcome.tally);
    sum.hash = sum.hash.wrapping_add(outcome.hash);
    sum.violations.extend(
        outcome
            .violations
            .into_iter()
            .map(|violation| (seed, violation)),
    );
}

fn replay(args: &SimArgs, seed: u64) -> String {
    let steps = if args.steps == Scenario::default().steps {
        String::new()
    } else {
        format!(" --steps {}", args.steps)
    };
    format!("kvx sim --seed {seed} --count 1{steps} --trace")
}

fn report(args: &SimArgs, sum: &Sum, took: Duration) -> String {
    let mut lines: Vec<String> = Vec::new();
    for (seed, violation) in sum.violations.iter().take(SHOWN) {
        lines.push(format!("seed {seed}: {violation}"));
        lines.push(format!("    replay: {}", replay(args, *seed)));
    }
    if let Some(more) = sum
        .violations
        .len()
        .checked_sub(SHOWN)
        .filter(|more| *more > 0)
    {
        lines.push(format!("and {more} more"));
    }
    let tally = &sum.tally;
    lines.push(format!(
        "{} histories, {} events, {} violations in {took:.1?} (sum {:016x})",
        sum.histories,
        sum.events,
        sum.violations.len(),
        sum.hash,
    ));
    lines.push(format!(
        "{} reads: {} landed, {} failed with their blocks, {} in quarantine; {} leases, {} windows, {} engines ended early",
        tally.reads,
        tally.landed,
        tally.returned,
        tally.quarantined,
        tally.leases,
        tally.windows,
        tally.ended,
    ));
    lines.join("\n")
}

fn report_json(args: &SimArgs, sum: &Sum, took: Duration) -> Value {
    let violations: Vec<Value> = sum
        .violations
        .iter()
        .map(|(seed, violation)| {
            json!({
                "seed": seed,
                "rule": violation.rule.to_string(),
                "event": violation.event,
                "what": violation.what,
                "replay": replay(args, *seed),
            })
        })
        .collect();
    let tally = &sum.tally;
    json!({
        "first_seed": args.seed,
        "steps": args.steps,
        "histories": sum.histories,
        "events": sum.events,
        "violations": violations,
        "hash": format!("{:016x}", sum.hash),
        "reads": {
            "submitted": tally.reads,
            "landed": tally.landed,
            "returned": tally.returned,
            "quarantined": tally.quarantined,
        },
        "leases": tally.leases,
        "windows": tally.windows,
        "engines_ended_early": tally.ended,
        "seconds": took.as_secs_f64(),
    })
}

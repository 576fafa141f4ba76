//! `serving replay`: the conversations of a production trace, shortened and sped up.

use std::fs::File;
use std::future::Future;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use kvx::bench::plot::PlotError;
use kvx::cli::Exit;
use kvx::demo::trace::{Conversation, TraceError, read_conversations, select};
use thiserror::Error;
use tokio::time::Instant;

use super::bench::LoadArgs;
use super::hold::{HoldError, Load, Sample, Talk, TalkTurn, hold};
use super::report::{LoadReport, Mode, different_texts, groups};
use super::text::Filler;
use crate::client::{Client, ClientError};
use crate::cluster::{Cluster, ClusterError, ClusterSpec, this_program};
use crate::demo::{leftover, progress};
use crate::model::{Loaded, ModelError};
use crate::provision::{self, ProvisionError};

/// Help after the arguments.
pub const REPLAY_HELP: &str = "\
Examples:
  serving replay --trace conversation_trace.jsonl
                                      some conversations of the trace, lengths divided by 16, gaps by 100
  serving replay --trace conversation_trace.jsonl --divide 8 --speed 50 --max-turns 100 --out results

The file comes with Mooncake (github.com/kvcache-ai/Mooncake, FAST25-release/traces).

Exit status: 0 all is well; 1 a turn had no answer, or another one off than on, or blocks leaked; 2 usage;
3 something is missing on this machine; 130 interrupted";

/// Arguments of `serving replay`.
#[derive(Debug, Clone, Args)]
pub struct ReplayArgs {
    /// A trace in Mooncake's format
    #[arg(long, value_name = "FILE")]
    pub trace: PathBuf,

    /// Lengths are divided by this
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub divide: u64,

    /// Times are divided by this
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub speed: u32,

    /// Turns to replay at most
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = clap::value_parser!(u32).range(2..=10_000))]
    pub max_turns: u32,

    /// Turns under way at once
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub clients: u32,

    /// Clear the prefill nodes' own prefix caches after each turn
    #[arg(long)]
    pub clear_prefix_cache: bool,

    /// What bench and replay have in common
    #[command(flatten)]
    pub common: LoadArgs,
}

/// Why nothing was measured.
#[derive(Debug, Error)]
enum MeasureError {
    #[error(transparent)]
    Provision(#[from] ProvisionError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Hold(#[from] HoldError),
    #[error(transparent)]
    Plot(#[from] PlotError),
    #[error("cannot write into {folder}: {source}")]
    Write {
        folder: String,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot start: {0}")]
    Runtime(#[source] std::io::Error),
    #[error("interrupted")]
    Interrupted,
}

/// Runs the replay.
#[must_use]
pub fn run(args: &ReplayArgs) -> Exit {
    let chosen = match conversations(&args.trace, args) {
        Ok(chosen) => chosen,
        Err(error) => {
            eprintln!("serving: {}: {error}", args.trace.display());
            return Exit::Usage;
        }
    };
    measure("replay", &args.common, |model| load(args, model, &chosen))
}

/// Conversations whose prompts, divided, fit the model.
fn conversations(path: &Path, args: &ReplayArgs) -> Result<Vec<Conversation>, TraceError> {
    /// Tokens that a divided prompt may have: the model takes 8,192, of which the template needs some.
    const MOST: u64 = 7000;
    let file = File::open(path).map_err(TraceError::Open)?;
    let all = read_conversations(BufReader::new(file))?;
    Ok(select(
        &all,
        args.max_turns as usize,
        MOST.saturating_mul(args.divide),
    ))
}

fn load(args: &ReplayArgs, model: &Loaded, conversations: &[Conversation]) -> Load {
    let filler = Filler::new(&model.tokenizer);
    let first = conversations
        .iter()
        .filter_map(|one| one.turns.first().map(|turn| turn.at_ms))
        .min()
        .unwrap_or(0);
    let shorter = |ms: u64| Duration::from_millis(ms) / args.speed;
    let talks = conversations.iter().zip(0_u64..).map(|(one, number)| {
        let mut known = 0;
        let mut turns = Vec::new();
        for (turn, n) in one.turns.iter().zip(0_u64..) {
            // What is new in the prompt; the least is a short question.
            let new = (turn.input_tokens / args.divide)
                .saturating_sub(known)
                .max(8);
            let answer = (turn.output_tokens / args.divide).max(1);
            known += new + answer;
            turns.push(TalkTurn {
                gap: if n == 0 {
                    Duration::ZERO
                } else {
                    shorter(turn.gap_ms)
                },
                question: filler.text(
                    args.common.seed ^ (number << 20) ^ n,
                    usize::try_from(new).unwrap_or(usize::MAX),
                ),
                answer_tokens: answer,
            });
        }
        Talk {
            group: None,
            begin: shorter(one.turns.first().map_or(0, |turn| turn.at_ms - first)),
            turns,
        }
    });
    Load {
        talks: talks.collect(),
        clients: args.clients as usize,
        clear_prefix_cache: args.clear_prefix_cache,
    }
}

/// Holds a load off and on, reports, and says how to end.
pub(super) fn measure(name: &str, args: &LoadArgs, load: impl FnOnce(&Loaded) -> Load) -> Exit {
    let outcome = until_interrupted(async {
        let model = Loaded::open(&provision::model()?)?;
        let load = load(&model);
        let bytes_per_token = model.model.geometry().bytes_per_token();
        // Its memory is needed by the nodes.
        drop(model);
        both(args, &load, bytes_per_token).await
    });
    let report = match outcome.and_then(|report| write(name, args, &report).map(|()| report)) {
        Ok(report) => report,
        Err(error) => {
            eprintln!("serving: {error}");
            return match error {
                MeasureError::Interrupted => Exit::Interrupted,
                MeasureError::Hold(_) | MeasureError::Client(_) => Exit::CheckFailed,
                _ => Exit::Environment,
            };
        }
    };
    if args.json {
        println!(
            "{}",
            serde_json::to_string_pretty(&report).unwrap_or_default()
        );
    } else {
        print!("{}", report.to_text());
    }
    if report.ok {
        Exit::Ok
    } else {
        Exit::CheckFailed
    }
}

fn until_interrupted<T>(
    work: impl Future<Output = Result<T, MeasureError>>,
) -> Result<T, MeasureError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(MeasureError::Runtime)?;
    runtime.block_on(async {
        tokio::select! {
            done = work => done,
            _ = tokio::signal::ctrl_c() => Err(MeasureError::Interrupted),
        }
    })
}

async fn both(
    args: &LoadArgs,
    load: &Load,
    bytes_per_token: u64,
) -> Result<LoadReport, MeasureError> {
    let turns: usize = load.talks.iter().map(|talk| talk.turns.len()).sum();
    let bar = progress(2 * turns as u64, args.json);
    let machine = kvx::bench::machine::look(true);
    let mut report = LoadReport {
        ok: false,
        problems: Vec::new(),
        model: String::new(),
        machine: format!("{}, {} cores", machine.cpu, machine.cores),
        rows: Vec::new(),
        pinned: Vec::new(),
        seconds: [0.0; 2],
        texts_equal: false,
        leaked_blocks: 0,
    };
    let mut held: Vec<Vec<Sample>> = Vec::new();
    for (mode, seconds) in [Mode::Off, Mode::On].into_iter().zip(0..) {
        let name = format!("transfer {mode:?}").to_lowercase();
        bar.set_message(format!("{name}: starting"));
        let cluster = Cluster::start(&ClusterSpec {
            program: this_program()?,
            prefill: args.prefill_nodes as usize,
            decode: args.decode_nodes as usize,
            bidirectional: mode == Mode::On,
            kv_cache_mib: args.kv_cache_mib,
            node_arguments: Vec::new(),
            router_arguments: Vec::new(),
        })?;
        bar.set_message(name);
        let begin = Instant::now();
        let (samples, pinned) = hold(load, mode, &cluster, "load", &bar).await?;
        if let Some(place) = report.seconds.get_mut(seconds) {
            *place = begin.elapsed().as_secs_f64();
        }
        for failed in samples
            .iter()
            .filter_map(|sample| sample.answer.as_ref().err())
        {
            report.problems.push(failed.clone());
        }
        report.rows.extend(groups(mode, &samples, bytes_per_token));
        held.push(samples);
        report.pinned.extend(pinned);
        let client = Client::new(&cluster.router.url(), "load")?;
        report.model = client.model().await?;
        report.leaked_blocks += leftover(&cluster, &client).await?;
    }
    bar.finish_and_clear();
    report.sort();
    let different = match held.as_slice() {
        [off, on] => different_texts(off, on),
        _ => 0,
    };
    report.texts_equal = different == 0;
    if different > 0 {
        report
            .problems
            .push(format!("{different} answers differ between off and on"));
    }
    if report.leaked_blocks > 0 {
        let leaked = report.leaked_blocks;
        report
            .problems
            .push(format!("{leaked} blocks were not given back"));
    }
    report.ok = report.problems.is_empty();
    Ok(report)
}

fn write(name: &str, args: &LoadArgs, report: &LoadReport) -> Result<(), MeasureError> {
    let Some(out) = &args.out else {
        return Ok(());
    };
    let failed = |source| MeasureError::Write {
        folder: out.display().to_string(),
        source,
    };
    std::fs::create_dir_all(out).map_err(failed)?;
    let json = serde_json::to_string_pretty(report).unwrap_or_default();
    std::fs::write(out.join(format!("{name}.json")), json).map_err(failed)?;
    for (file, svg) in report.plots()? {
        std::fs::write(out.join(file.replace("load", name)), svg).map_err(failed)?;
    }
    Ok(())
}

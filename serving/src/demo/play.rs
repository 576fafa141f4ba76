//! Holds the conversation, off and on, and reports.

use std::fs;
use std::io::{IsTerminal, stderr};
use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvx::bench::plot::PlotError;
use kvx::cli::Exit;
use serde_json::Value;
use thiserror::Error;

use super::report::{DemoReport, PassReport, TurnReport};
use super::{DemoArgs, chart, script};
use crate::client::{Answer, Ask, Client, ClientError, metric};
use crate::cluster::{Cluster, ClusterError, ClusterSpec, this_program};
use crate::provision::{self, ProvisionError};

/// Tokens of a block; the nodes' default.
pub(super) const BLOCK_TOKENS: u64 = 16;
/// Time for blocks to come back at the end.
const COME_BACK: Duration = Duration::from_secs(10);

/// Why the demo could not be held.
#[derive(Debug, Error)]
pub(super) enum DemoError {
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Provision(#[from] ProvisionError),
    #[error(transparent)]
    Plot(#[from] PlotError),
    #[error("cannot write {path}: {source}")]
    Write {
        path: String,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot start: {0}")]
    Runtime(#[source] std::io::Error),
    #[error("interrupted")]
    Interrupted,
}

/// Runs something that is ended by Ctrl-C.
pub(super) fn until_interrupted<T>(
    work: impl Future<Output = Result<T, DemoError>>,
) -> Result<T, DemoError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(DemoError::Runtime)?;
    runtime.block_on(async {
        tokio::select! {
            done = work => done,
            _ = tokio::signal::ctrl_c() => Err(DemoError::Interrupted),
        }
    })
}

/// How a failure ends the program, after it has been said.
pub(super) fn fail(error: &DemoError) -> Exit {
    eprintln!("serving: {error}");
    match error {
        DemoError::Interrupted => Exit::Interrupted,
        DemoError::Client(_) => Exit::CheckFailed,
        _ => Exit::Environment,
    }
}

pub(super) fn run(args: &DemoArgs) -> Exit {
    let report = match until_interrupted(play(args)) {
        Ok(report) => report,
        Err(error) => return fail(&error),
    };
    let json = serde_json::to_string_pretty(&report).unwrap_or_default();
    if let Some(out) = &args.out
        && let Err(error) = write(out, &report, &json)
    {
        return fail(&error);
    }
    if args.json {
        println!("{json}");
    } else {
        print!("{}", report.to_text());
    }
    if report.ok {
        Exit::Ok
    } else {
        Exit::CheckFailed
    }
}

fn write(out: &Path, report: &DemoReport, json: &str) -> Result<(), DemoError> {
    let put = |name: &str, text: &str| {
        let path = out.join(name);
        fs::write(&path, text).map_err(|source| DemoError::Write {
            path: path.display().to_string(),
            source,
        })
    };
    fs::create_dir_all(out).map_err(|source| DemoError::Write {
        path: out.display().to_string(),
        source,
    })?;
    put("demo.json", json)?;
    let under = format!("{}; {}", report.model, report.machine);
    put("ttft.svg", &chart::ttft(&report.turns, &under)?)
}

/// A line on stderr that says what is going on; nothing where nobody looks.
pub(crate) fn progress(steps: u64, quiet: bool) -> ProgressBar {
    let bar = ProgressBar::new(steps);
    if quiet || !stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    if let Ok(style) = ProgressStyle::with_template("{elapsed_precise} {bar:30} {pos}/{len} {msg}")
    {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

async fn play(args: &DemoArgs) -> Result<DemoReport, DemoError> {
    provision::model()?;
    let caches: &[bool] = if args.cleared_only {
        &[true]
    } else {
        &[true, false]
    };
    let bar = progress(u64::from(args.turns) * 2 * caches.len() as u64, args.json);
    let mut passes: Vec<Vec<Seen>> = Vec::new();
    let mut leaked = 0;
    let mut model = String::new();
    for bidirectional in [false, true] {
        let mode = if bidirectional { "on" } else { "off" };
        bar.set_message(format!(
            "transfer {mode}: starting router, prefill and decode"
        ));
        let cluster = Cluster::start(&ClusterSpec {
            program: this_program()?,
            prefill: 1,
            decode: 1,
            bidirectional,
            kv_cache_mib: args.kv_cache_mib,
            node_arguments: Vec::new(),
            router_arguments: Vec::new(),
        })?;
        for cleared in caches {
            // A key of its own: no block of another pass can be a hit.
            let key = format!("demo-{mode}-{cleared}");
            let client = Client::new(&cluster.router.url(), &key)?;
            passes.push(hold(args, &cluster, &client, *cleared, mode, &bar).await?);
        }
        let client = Client::new(&cluster.router.url(), "demo")?;
        model = client.model().await?;
        leaked += leftover(&cluster, &client).await?;
    }
    bar.finish_and_clear();
    let (off, on) = passes.split_at(caches.len());
    let passes = caches
        .iter()
        .zip(off.iter().zip(on))
        .map(|(cleared, (off, on))| PassReport::new(*cleared, together(off, on)))
        .collect();
    let mut report = DemoReport::judge(passes, leaked, BLOCK_TOKENS);
    report.model = model;
    report.carried_by = kvx::runtime::resolve().map_or_else(
        |_| String::new(),
        |nixl| format!("Carried by NIXL {} / UCX", nixl.version),
    );
    let machine = kvx::bench::machine::look(true);
    report.machine = format!("{}, {} cores", machine.cpu, machine.cores);
    Ok(report)
}

/// A turn as its client saw it.
struct Seen {
    answer: Answer,
    new_tokens: u64,
}

async fn hold(
    args: &DemoArgs,
    cluster: &Cluster,
    client: &Client,
    cleared: bool,
    mode: &str,
    bar: &ProgressBar,
) -> Result<Vec<Seen>, DemoError> {
    let kept = if cleared { "cleared" } else { "kept" };
    let mut messages = vec![script::system()];
    let mut seen = Vec::new();
    let mut known = 0;
    for turn in 0..args.turns as usize {
        bar.set_message(format!(
            "transfer {mode}, prefix cache {kept}: turn {}",
            turn + 1
        ));
        messages.extend(script::turn(args.seed, turn, args.rows as usize));
        let ask = Ask {
            conversation: Some("demo"),
            messages: &messages,
            max_tokens: args.max_tokens,
            ignore_eos: false,
        };
        let answer = client.chat(ask, |_| {}).await?;
        messages.push(serde_json::json!({"role": "assistant", "content": answer.text}));
        let new_tokens = answer.prompt_tokens.saturating_sub(known);
        known = answer.prompt_tokens + answer.completion_tokens;
        seen.push(Seen { answer, new_tokens });
        if cleared {
            for node in &cluster.prefill {
                client.reset_prefix_cache(&node.url()).await?;
            }
        }
        bar.inc(1);
    }
    Ok(seen)
}

/// The same conversation off and on, turn by turn.
fn together(off: &[Seen], on: &[Seen]) -> Vec<TurnReport> {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let turns = off.iter().zip(on).zip(1..);
    turns
        .map(|((off, on), turn)| {
            let part = |name: &str| on.answer.report.pointer(name);
            let count = |name| part(name).and_then(Value::as_u64).unwrap_or(0);
            let word = |name| {
                part(name)
                    .and_then(Value::as_str)
                    .unwrap_or("none")
                    .to_owned()
            };
            TurnReport {
                turn,
                prompt_tokens: on.answer.prompt_tokens,
                new_tokens: on.new_tokens,
                ttft_off_ms: ms(off.answer.ttft),
                ttft_on_ms: ms(on.answer.ttft),
                read_tokens: count("/prefill/read_tokens"),
                local_tokens: count("/prefill/local_hit_tokens"),
                computed_tokens: count("/prefill/computed_tokens"),
                computed_off_tokens: off
                    .answer
                    .report
                    .pointer("/prefill/computed_tokens")
                    .and_then(Value::as_u64)
                    .unwrap_or(0),
                transfer_ms: part("/prefill/transfer_ms")
                    .and_then(Value::as_f64)
                    .unwrap_or(0.0),
                decision: word("/prefill/decision"),
                reason: word("/prefill/reason"),
                hit: part("/router/hit")
                    .and_then(Value::as_bool)
                    .unwrap_or(false),
                text_on: on.answer.text.clone(),
                text_off: off.answer.text.clone(),
            }
        })
        .collect()
}

/// Blocks that requests or reads still hold on any node, once there has been time to give them back.
pub(crate) async fn leftover(cluster: &Cluster, client: &Client) -> Result<u64, ClientError> {
    let end = tokio::time::Instant::now() + COME_BACK;
    loop {
        let mut held = 0.0;
        for node in cluster.prefill.iter().chain(&cluster.decode) {
            let text = client.metrics(&node.url()).await?;
            for state in ["active", "claimed", "quarantined"] {
                held += metric(&text, "kvx_pool_blocks", &format!("state=\"{state}\""));
            }
        }
        if held < 0.5 || tokio::time::Instant::now() > end {
            return Ok(held as u64);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

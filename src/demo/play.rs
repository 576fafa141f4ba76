//! The demo's parent process: it plays the router between a decode and a prefill process, turn by
//! turn, and judges what came of each.

use std::env;
use std::fs::{self, File};
use std::io::BufReader;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use kv_xfer::engine::ReaderConfig;
use kv_xfer::fabric::{LIBFABRIC, PeerFabric, UcxLanes};
use kv_xfer::memory::cuda::CudaError;
use thiserror::Error;

use super::allocator::FreeOrder;
use super::messages::{FromDecode, FromPrefill, Setup, ToDecode, ToPrefill};
use super::report::{DemoReport, LargestRead, NixlReport, TurnReport, percentile};
use super::scenario::{self, Expect, Special, Step};
use super::side::{self, SideError};
use super::trace::{self, TraceError};
use crate::cli::DemoArgs;
use crate::proc::{Interrupt, ProcError, Worker};
use crate::require;

/// Ranks that the model's KV heads are divided among; the demo plays one of them.
const TP: u32 = 8;
/// Longest prompt of a trace that is replayed: what the built-in play reaches, with room.
const TRACE_TOKENS: u64 = 32_768;
/// Gaps between a trace's turns pass so many times faster, and last this long at most. Leases are
/// held against the real gaps: one of more than 480 s finds its lease over.
const SPEED_UP: u32 = 2000;
const LONGEST_GAP: Duration = Duration::from_millis(250);
/// A read may land before its lease is revoked; so often it is tried again.
const REVOKE_TRIES: u32 = 8;
/// Time for a child to end by itself.
const END: Duration = Duration::from_secs(10);

/// Why the demo could not be played to its end.
#[derive(Debug, Error)]
pub enum PlayError {
    /// A child process.
    #[error(transparent)]
    Proc(#[from] ProcError),
    /// A child could not start its engine.
    #[error("the {role} process cannot start: {why}")]
    Start {
        /// Which.
        role: &'static str,
        /// What it said.
        why: String,
    },
    /// A child gave up.
    #[error("the {role} process gave up: {why}")]
    GaveUp {
        /// Which.
        role: &'static str,
        /// What it said.
        why: String,
    },
    /// A child answered something else than was asked.
    #[error("the {role} process answered out of turn")]
    OutOfTurn {
        /// Which.
        role: &'static str,
    },
    /// The trace.
    #[error("{path}: {source}")]
    Trace {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: TraceError,
    },
    /// The trace cannot be opened.
    #[error("{path}: {source}; give the path of a trace in Mooncake's format")]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The trace has nothing to replay.
    #[error(
        "{path} has no conversation of two turns of at most {TRACE_TOKENS} tokens within --max-turns"
    )]
    NothingToReplay {
        /// The file.
        path: PathBuf,
    },
    /// The model cannot be cut so.
    #[error(transparent)]
    Side(#[from] SideError),
    /// There is no such GPU.
    #[error(transparent)]
    Memory(#[from] CudaError),
    /// `--timeout` has passed.
    #[error("the demo did not end within {limit:?}; give it more with --timeout")]
    Timeout {
        /// The limit.
        limit: Duration,
    },
}

/// Plays the demo.
///
/// # Errors
/// [`PlayError`] when it could not be played to its end. That a turn went wrong is in the report.
pub fn play(args: &DemoArgs, interrupt: &Interrupt) -> Result<DemoReport, PlayError> {
    let steps = steps(args)?;
    let largest = steps
        .iter()
        .flat_map(|step| [step.remote.len(), step.prompt.len()])
        .max()
        .unwrap_or(1);
    // One block in 32 is somebody else's under one of the orders.
    let blocks = largest.div_ceil(args.block_tokens);
    let setup = Setup {
        model: args.model.name().to_owned(),
        tp: TP,
        block_tokens: args.block_tokens,
        blocks: blocks.saturating_add(blocks / 16).saturating_add(16),
        seed: args.seed,
        memory: args.memory.resolve()?,
    };
    let log = UcxLog::new();
    let mut stage = Stage::set(setup, interrupt, &log, Duration::from_secs(args.timeout))?;
    let mut report = stage.play(&steps)?;
    stage.strike(&mut report)?;
    report.nixl.transport = match report.nixl.backend.as_str() {
        LIBFABRIC => PeerFabric::restricted(require::required()).transports,
        _ => log.carrier(),
    };
    report.judge();
    Ok(report)
}

fn steps(args: &DemoArgs) -> Result<Vec<Step>, PlayError> {
    let Some(path) = &args.trace else {
        return Ok(scenario::built_in(args.turns, args.block_tokens, args.seed));
    };
    let file = File::open(path).map_err(|source| PlayError::Open {
        path: path.clone(),
        source,
    })?;
    let conversations =
        trace::read_conversations(BufReader::new(file)).map_err(|source| PlayError::Trace {
            path: path.clone(),
            source,
        })?;
    let max_turns = usize::try_from(args.max_turns).unwrap_or(usize::MAX);
    let selected = trace::select(&conversations, max_turns, TRACE_TOKENS);
    let steps = scenario::of_trace(&selected, args.block_tokens, args.seed);
    if steps.is_empty() {
        return Err(PlayError::NothingToReplay { path: path.clone() });
    }
    Ok(steps)
}

/// Where UCX says what it uses, if the user has not said where.
struct UcxLog {
    path: Option<PathBuf>,
}

impl UcxLog {
    fn new() -> Self {
        let taken = ["UCX_LOG_FILE", "UCX_LOG_LEVEL"]
            .iter()
            .any(|name| env::var_os(name).is_some());
        let name = format!("kvx-demo-{}.log", std::process::id());
        Self {
            path: (!taken).then(|| env::temp_dir().join(name)),
        }
    }

    fn variables(&self) -> Vec<(String, String)> {
        match self.path.as_ref().and_then(|path| path.to_str()) {
            Some(path) => vec![
                ("UCX_LOG_FILE".to_owned(), path.to_owned()),
                ("UCX_LOG_LEVEL".to_owned(), "info".to_owned()),
            ],
            None => Vec::new(),
        }
    }

    fn carrier(&self) -> String {
        match &self.path {
            Some(path) => match fs::read(path) {
                Ok(log) => UcxLanes::parse(&String::from_utf8_lossy(&log)).carrier(),
                Err(_) => "unknown".to_owned(),
            },
            None => "unknown (UCX_LOG_FILE or UCX_LOG_LEVEL is set)".to_owned(),
        }
    }
}

impl Drop for UcxLog {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = fs::remove_file(path);
        }
    }
}

/// What came of a turn.
struct Played {
    report: TurnReport,
    wrong_bytes: u64,
    /// Where the decode process's blocks lie, if that was asked.
    pieces: Vec<(u64, u64)>,
}

struct Stage {
    decode: Worker,
    prefill: Worker,
    nixl: NixlReport,
    regions: u64,
    end: Instant,
    limit: Duration,
}

impl Stage {
    /// Starts both processes and their engines.
    fn set(
        setup: Setup,
        interrupt: &Interrupt,
        log: &UcxLog,
        limit: Duration,
    ) -> Result<Self, PlayError> {
        let regions = side::layout(&setup)?.regions().len() as u64;
        let end = Instant::now() + limit;
        let decode = Worker::spawn_self("decode", &["demo-decode"], &[], interrupt)?;
        let variables = log.variables();
        let prefill = Worker::spawn_self("prefill", &["demo-prefill"], &variables, interrupt)?;
        let nixl = NixlReport {
            version: String::new(),
            backend: String::new(),
            transport: String::new(),
        };
        let mut stage = Self {
            decode,
            prefill,
            nixl,
            regions,
            end,
            limit,
        };
        stage.decode.send(&ToDecode::Start(setup.clone()))?;
        let decode_pid = stage.decode.id();
        stage
            .prefill
            .send(&ToPrefill::Start { setup, decode_pid })?;
        match stage.decode_says() {
            Ok(FromDecode::Ready { .. }) => {}
            Ok(_) => return Err(PlayError::OutOfTurn { role: "decode" }),
            Err(PlayError::GaveUp { role, why }) => return Err(PlayError::Start { role, why }),
            Err(error) => return Err(error),
        }
        match stage.prefill_says() {
            Ok(FromPrefill::Ready { nixl }) => stage.nixl = nixl,
            Ok(_) => return Err(PlayError::OutOfTurn { role: "prefill" }),
            Err(PlayError::GaveUp { role, why }) => return Err(PlayError::Start { role, why }),
            Err(error) => return Err(error),
        }
        Ok(stage)
    }

    fn left(&self) -> Result<Duration, PlayError> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            Err(PlayError::Timeout { limit: self.limit })
        } else {
            Ok(left)
        }
    }

    fn decode_says(&mut self) -> Result<FromDecode, PlayError> {
        let left = self.left()?;
        match self.decode.recv(left)? {
            FromDecode::Failed { why } => Err(PlayError::GaveUp {
                role: "decode",
                why,
            }),
            message => Ok(message),
        }
    }

    fn prefill_says(&mut self) -> Result<FromPrefill, PlayError> {
        let left = self.left()?;
        match self.prefill.recv(left)? {
            FromPrefill::Failed { why } => Err(PlayError::GaveUp {
                role: "prefill",
                why,
            }),
            message => Ok(message),
        }
    }

    fn play(&mut self, steps: &[Step]) -> Result<DemoReport, PlayError> {
        let bar = ProgressBar::new(steps.len() as u64);
        let style = "{bar:30} {pos}/{len} turns, {elapsed}  {msg}";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        let largest = steps
            .iter()
            .filter(|step| step.special.is_none())
            .max_by_key(|step| match step.expect {
                Expect::Read { tokens } => tokens,
                _ => 0,
            })
            .map(|step| step.turn);
        let mut report = DemoReport {
            ok: false,
            problems: Vec::new(),
            nixl: self.nixl.clone(),
            turns: Vec::new(),
            total_bytes: 0,
            wrong_bytes: 0,
            quarantined_at_exit: 0,
            leaked_blocks: 0,
            submit_p50_us: 0.0,
            submit_p99_us: 0.0,
            largest_read: None,
        };
        for step in steps {
            let what = step.special.map_or("reading and checking", Special::name);
            bar.set_message(format!("{} tokens, {what}", step.prompt.len()));
            let is_largest = largest == Some(step.turn);
            let Played {
                report: mut turn,
                wrong_bytes: wrong,
                pieces,
            } = self.turn(step, is_largest)?;
            turn.ok = wrong == 0 && self.is_as_it_must_be(step, &turn);
            turn.special = step.special.map(|special| special.name().to_owned());
            report.total_bytes += turn.bytes;
            report.wrong_bytes += wrong;
            if is_largest && turn.bytes > 0 {
                bar.set_message("measuring the baselines of the largest read");
                report.largest_read = Some(self.baseline(&turn, pieces)?);
            }
            report.turns.push(turn);
            bar.inc(1);
        }
        bar.finish_and_clear();
        let read = report.turns.iter().filter(|turn| turn.bytes > 0);
        let submits: Vec<f64> = read.map(|turn| turn.submit_us).collect();
        report.submit_p50_us = percentile(&submits, 50.0);
        report.submit_p99_us = percentile(&submits, 99.0);
        Ok(report)
    }

    /// Plays a turn; a revocation that came too late is tried again.
    fn turn(&mut self, step: &Step, want_pieces: bool) -> Result<Played, PlayError> {
        let revoke = step.special == Some(Special::LeaseRevoked);
        let mut tries = 0;
        loop {
            tries += 1;
            self.decode.send(&ToDecode::Finish {
                history: step.remote.clone(),
                ttl_ms: step.ttl_ms,
                order: step.order,
                want_pieces,
            })?;
            let FromDecode::Finished {
                kv_transfer_params,
                pieces,
            } = self.decode_says()?
            else {
                return Err(PlayError::OutOfTurn { role: "decode" });
            };
            let mut gap = (Duration::from_millis(step.gap_ms) / SPEED_UP).min(LONGEST_GAP);
            if step.expect == Expect::LeaseOver {
                // The user thinks for longer than the lease lasts.
                gap = gap.max(Duration::from_millis(step.ttl_ms.saturating_mul(2)));
            }
            std::thread::sleep(gap);
            self.prefill.send(&ToPrefill::Turn {
                turn: step.turn,
                prompt: step.prompt.clone(),
                local_hit_tokens: step.local_hit_tokens,
                order: step.order,
                kv_transfer_params: Some(kv_transfer_params),
                tell_when_submitted: revoke,
            })?;
            let mut answer = self.prefill_says()?;
            if revoke && answer == FromPrefill::Submitted {
                self.decode.send(&ToDecode::Revoke)?;
                if self.decode_says()? != FromDecode::Revoked {
                    return Err(PlayError::OutOfTurn { role: "decode" });
                }
                answer = self.prefill_says()?;
            }
            let FromPrefill::Turn {
                report,
                wrong_bytes,
            } = answer
            else {
                return Err(PlayError::OutOfTurn { role: "prefill" });
            };
            let too_late = revoke && report.bytes > 0 && wrong_bytes == 0;
            if !too_late || tries >= REVOKE_TRIES {
                return Ok(Played {
                    report,
                    wrong_bytes,
                    pieces,
                });
            }
        }
    }

    fn is_as_it_must_be(&self, step: &Step, turn: &TurnReport) -> bool {
        let recomputed = turn.decision == "recompute" && turn.bytes == 0;
        let right = match step.expect {
            Expect::Read { tokens } => {
                turn.decision == "read" && turn.read_tokens == u64::from(tokens)
            }
            Expect::Recompute => recomputed,
            Expect::LeaseOver => {
                recomputed && ["lease_expired", "lease_lost"].contains(&turn.reason.as_str())
            }
            Expect::ReadFails => recomputed && turn.reason == "lease_lost",
        };
        // A contiguous read needs no more than one descriptor for each region and run, but for runs
        // that are longer than any one descriptor may be.
        let splits = turn.bytes / ReaderConfig::default().max_descriptor_bytes.max(1);
        let merged = step.order != FreeOrder::Contiguous
            || turn.descriptors <= self.regions.saturating_mul(turn.runs.max(1)) + splits;
        right && merged
    }

    fn baseline(
        &mut self,
        turn: &TurnReport,
        pieces: Vec<(u64, u64)>,
    ) -> Result<LargestRead, PlayError> {
        self.prefill.send(&ToPrefill::Baseline { pieces })?;
        let FromPrefill::Baseline {
            memcpy_gbps,
            process_vm_readv_gbps,
        } = self.prefill_says()?
        else {
            return Err(PlayError::OutOfTurn { role: "prefill" });
        };
        Ok(LargestRead {
            turn: turn.turn,
            bytes: turn.bytes,
            gbps: turn.gbps,
            memcpy_gbps,
            process_vm_readv_gbps,
        })
    }

    /// Stops both processes and takes what they say of their blocks.
    fn strike(mut self, report: &mut DemoReport) -> Result<(), PlayError> {
        self.prefill.send(&ToPrefill::Stop)?;
        let FromPrefill::Stopped {
            quarantined,
            leaked_blocks,
        } = self.prefill_says()?
        else {
            return Err(PlayError::OutOfTurn { role: "prefill" });
        };
        report.quarantined_at_exit = quarantined;
        report.leaked_blocks = leaked_blocks;
        self.decode.send(&ToDecode::Stop)?;
        let FromDecode::Stopped { leaked_blocks } = self.decode_says()? else {
            return Err(PlayError::OutOfTurn { role: "decode" });
        };
        report.leaked_blocks += leaked_blocks;
        self.prefill.finish(END)?;
        self.decode.finish(END)?;
        Ok(())
    }
}

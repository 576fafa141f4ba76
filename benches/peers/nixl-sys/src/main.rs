//! A participant of `kvx bench compare`: NVIDIA's own `nixl-sys` crate, with its default settings.
//!
//! Reads go through prepared descriptor lists of all blocks (`prepare_xfer_dlist` once for either
//! side, then `make_xfer_req` for every read), the cheaper of the crate's two ways: for 16,384
//! scattered blocks they cost some 0.5 to 0.8 ms, new lists and `create_xfer_req` 2.2 to 2.6 ms.
//!
//! Settings: `progress_thread` (`true`, as by default, or `false`) and `transport` (`auto`, `tcp`).

mod engine;
mod memory;
#[path = "../../../../src/bench/pattern.rs"]
#[allow(dead_code, reason = "shared with the tool")]
mod pattern;
#[path = "../../../../src/bench/proto.rs"]
#[allow(dead_code, reason = "shared with the tool")]
mod proto;

use std::collections::HashMap;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
use rustix::time::{ClockId, clock_gettime};

use engine::{Case, Engine};
use memory::Memory;
use proto::{Answer, MARK, Request, Role, Sample};

type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    match run() {
        Ok(()) => end(),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Ends without the clean-up of libraries: with the system's RDMA libraries installed UCX crashes in
/// its own.
fn end() -> ExitCode {
    // SAFETY: ends the process; nothing is left to write.
    unsafe { libc::_exit(0) }
}

fn run() -> Result<(), Failure> {
    // Dies with its parent.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let parent = std::env::var("KVX_PARENT_PID").ok();
    let parent = parent
        .and_then(|pid| pid.parse().ok())
        .and_then(Pid::from_raw);
    if parent.is_some() && getppid() != parent {
        return Err("the parent is gone".into());
    }
    // Libraries print to standard output, also in the middle of a line of ours.
    let mut output = std::fs::File::from(io::stdout().as_fd().try_clone_to_owned()?);
    rustix::stdio::dup2_stdout(io::stderr().as_fd())?;

    let mut participant = Participant::default();
    let mut input = Lines::default();
    while let Some(line) = input.next(&participant)? {
        let answer = match participant.answer(&line) {
            Ok(answer) => answer,
            Err(error) => Answer::Failed {
                error: error.to_string(),
            },
        };
        let mut text = String::from(MARK);
        text.push_str(&serde_json::to_string(&answer)?);
        text.push('\n');
        output.write_all(text.as_bytes())?;
        if matches!(answer, Answer::Bye) {
            break;
        }
    }
    Ok(())
}

/// Lines of standard input; while there is none, a holder's agent is served.
#[derive(Default)]
struct Lines {
    buffer: Vec<u8>,
}

impl Lines {
    fn next(&mut self, participant: &Participant) -> Result<Option<String>, Failure> {
        let mut seen = 0;
        loop {
            if let Some(at) = self.buffer[seen..].iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=seen + at).collect();
                return Ok(Some(String::from_utf8_lossy(&line).into_owned()));
            }
            seen = self.buffer.len();
            let stdin = io::stdin();
            let wait = participant.idle()?.map(|pause| Timespec {
                tv_sec: 0,
                tv_nsec: pause.subsec_nanos().into(),
            });
            let mut ready = [PollFd::new(&stdin, PollFlags::IN)];
            match poll(&mut ready, wait.as_ref()) {
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(error.into()),
            }
            let mut data = vec![0; 1 << 16];
            let count = rustix::io::read(&stdin, &mut data)?;
            if count == 0 {
                return Ok(None);
            }
            self.buffer.extend_from_slice(&data[..count]);
        }
    }
}

/// Processor time of the whole process.
fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or_default(),
        u32::try_from(time.tv_nsec).unwrap_or_default(),
    )
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

#[derive(Default)]
struct Participant {
    engine: Option<Engine>,
    seed: u64,
    cases: HashMap<String, Case>,
}

impl Participant {
    fn idle(&self) -> Result<Option<Duration>, Failure> {
        self.engine.as_ref().map_or(Ok(None), Engine::idle)
    }

    fn engine(&self) -> Result<&Engine, Failure> {
        self.engine
            .as_ref()
            .ok_or_else(|| "it is not set up yet".into())
    }

    fn answer(&mut self, line: &str) -> Result<Answer, Failure> {
        let message = line.strip_prefix(MARK).ok_or("not a request")?;
        Ok(match serde_json::from_str(message)? {
            Request::Setup {
                role,
                shape,
                seed,
                settings,
                card,
            } => {
                if self.engine.is_some() {
                    return Err("it is set up already".into());
                }
                let memory = Memory::new(shape)?;
                if role == Role::Holder {
                    memory.fill(seed);
                }
                let engine = Engine::new(role, memory, &settings, card)?;
                let answer = Answer::Ready {
                    card: engine.card()?,
                    about: engine.about(),
                };
                (self.engine, self.seed) = (Some(engine), seed);
                answer
            }
            Request::Case {
                name,
                remote,
                local,
                ticket: _,
            } => {
                let case = self.engine()?.case(remote, local)?;
                self.cases.insert(name, case);
                Answer::Case { ticket: None }
            }
            Request::Run {
                names,
                times,
                verify,
                pause_us,
            } => self.run(&names, times, verify, Duration::from_micros(pause_us))?,
            Request::Cpu => Answer::Cpu {
                us: u64::try_from(cpu().as_micros())?,
            },
            Request::Quit => Answer::Bye,
        })
    }

    fn run(
        &self,
        names: &[String],
        times: u32,
        verify: u32,
        pause: Duration,
    ) -> Result<Answer, Failure> {
        let engine = self.engine()?;
        let cases = names
            .iter()
            .map(|name| self.cases.get(name).ok_or(format!("no case {name:?}")))
            .collect::<Result<Vec<_>, _>>()?;
        let sampled: Vec<(u32, u32)> = match times {
            0 => Vec::new(),
            _ => cases.iter().flat_map(|case| case.sampled(verify)).collect(),
        };
        let mut samples = Vec::new();
        for left in (0..times).rev() {
            if left == 0 {
                for (_, local) in &sampled {
                    engine.memory().poison(*local);
                }
            }
            if !pause.is_zero() {
                thread::sleep(pause);
            }
            samples.push(read(engine, &cases)?);
        }
        let mut wrong_bytes = 0;
        for (remote, local) in &sampled {
            wrong_bytes += engine.memory().wrong_bytes(self.seed, *remote, *local);
        }
        Ok(Answer::Ran {
            samples,
            checked_bytes: sampled.len() as u64 * engine.memory().bytes_of_block(),
            wrong_bytes,
        })
    }
}

fn read(engine: &Engine, cases: &[&Case]) -> Result<Sample, Failure> {
    let (before, start) = (cpu(), Instant::now());
    let requests = cases
        .iter()
        .map(|case| engine.submit(case))
        .collect::<Result<Vec<_>, _>>()?;
    let submit = start.elapsed();
    engine.wait(&requests)?;
    let total = start.elapsed();
    let cpu = cpu() - before;
    let blocks: u64 = cases.iter().map(|case| case.blocks()).sum();
    Ok(Sample {
        submit_us: micros(submit),
        total_us: micros(total),
        first_layer_us: None,
        descriptors: cases.iter().map(|case| engine.descriptors(case)).sum(),
        bytes: blocks * engine.memory().bytes_of_block(),
        cpu_us: micros(cpu),
    })
}

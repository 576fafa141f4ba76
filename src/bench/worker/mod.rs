//! `kvx bench-worker`: one end of the reads of a bench, for the participants that are this tool's
//! own. It speaks [`proto`](super::proto) with its parent.

mod bare;
mod blocks;
mod cases;
mod engine;
mod error;
mod raw;
mod settings;

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde_json::{Map, Value};

pub use self::error::WorkerError;
pub use self::settings::Settings;

use self::blocks::Checked;
use self::cases::BlockLists;
use super::proto::{Answer, Request, Role, Sample, Shape};
use super::row::Who;
use crate::proc::Parent;

/// Most times of one run: its samples go into one line.
const MAX_TIMES: u32 = 100_000;

/// What an end starts with.
#[derive(Debug, Clone)]
struct Start {
    shape: Shape,
    seed: u64,
    settings: Settings,
    card: Option<Value>,
}

/// A case as a reader is told it.
#[derive(Debug)]
struct NewCase {
    name: String,
    lists: BlockLists,
    ticket: Option<Value>,
}

/// The end whose blocks are read.
trait Holder {
    /// What the reader needs to know.
    fn card(&self) -> Result<Value, WorkerError>;

    /// Makes blocks ready to be read; what the reader needs to know.
    fn case(&mut self, name: &str, remote: Vec<u32>) -> Result<Option<Value>, WorkerError>;
}

/// The end that reads.
trait Reader {
    /// Takes a case.
    fn case(&mut self, case: NewCase) -> Result<(), WorkerError>;

    /// Gets ready for cases; not timed.
    fn prepare(&mut self, _: &[String]) -> Result<(), WorkerError> {
        Ok(())
    }

    /// Reads cases together.
    fn once(&mut self, names: &[String]) -> Result<Sample, WorkerError>;

    /// Overwrites a sample of a case's blocks.
    fn spoil(&mut self, name: &str, sample: u32) -> Result<(), WorkerError>;

    /// Checks the same sample.
    fn check(&mut self, name: &str, sample: u32) -> Result<Checked, WorkerError>;

    /// Ends a run, however it went.
    fn finish(&mut self) {}
}

enum End {
    None,
    Holder(Box<dyn Holder>),
    Reader(Box<dyn Reader>),
}

/// Serves the parent until it closes the pipe or says to quit.
///
/// # Errors
/// [`WorkerError`] when the parent says nonsense or is gone; everything else is answered.
pub fn serve(parent: &mut Parent) -> Result<(), WorkerError> {
    let mut end = End::None;
    while let Some(request) = parent.recv()? {
        if matches!(request, Request::Quit) {
            drop(end);
            parent.send(&Answer::Bye)?;
            return Ok(());
        }
        let answer = answer(&mut end, request).unwrap_or_else(|error| Answer::Failed {
            error: error.to_string(),
        });
        parent.send(&answer)?;
    }
    Ok(())
}

fn answer(end: &mut End, request: Request) -> Result<Answer, WorkerError> {
    match (request, end) {
        (
            Request::Setup {
                role,
                shape,
                seed,
                settings,
                card,
            },
            end,
        ) => {
            // The memory of what was there before comes back first.
            *end = End::None;
            let args = Start {
                shape,
                seed,
                settings: Settings::parse(settings)?,
                card,
            };
            let mut about = Map::new();
            let (made, card) = set_up(role, &args, &mut about)?;
            *end = made;
            Ok(Answer::Ready { card, about })
        }
        (Request::Case { name, remote, .. }, End::Holder(holder)) => Ok(Answer::Case {
            ticket: holder.case(&name, remote)?,
        }),
        (
            Request::Case {
                name,
                remote,
                local,
                ticket,
            },
            End::Reader(reader),
        ) => {
            reader.case(NewCase {
                name,
                lists: BlockLists { remote, local },
                ticket,
            })?;
            Ok(Answer::Case { ticket: None })
        }
        (
            Request::Run {
                names,
                times,
                verify,
                pause_us,
            },
            End::Reader(reader),
        ) => {
            let ran = run(reader.as_mut(), &names, times, verify, pause_us);
            reader.finish();
            ran
        }
        (Request::Run { .. }, End::Holder(_)) => {
            Err(WorkerError::OutOfTurn("a holder does not read"))
        }
        (Request::Case { .. } | Request::Run { .. }, End::None) => {
            Err(WorkerError::OutOfTurn("there was no setup yet"))
        }
        (Request::Cpu, _) => Ok(Answer::Cpu {
            us: process_cpu().as_micros() as u64,
        }),
        (Request::Quit, _) => Ok(Answer::Bye),
    }
}

fn set_up(
    role: Role,
    args: &Start,
    about: &mut Map<String, Value>,
) -> Result<(End, Option<Value>), WorkerError> {
    let who = args.settings.who;
    let end = match (who, role) {
        (Who::KvXfer, Role::Holder) => holder(engine::EngineHolder::start(args, about)?),
        (Who::KvXfer, Role::Reader) => reader(engine::EngineReader::start(args, about)?),
        (Who::OneDescriptor, Role::Holder) => holder(bare::BareHolder::start(args, about)?),
        (Who::OneDescriptor, Role::Reader) => reader(bare::BareReader::start(args, about)?),
        (Who::ProcessVmReadv | Who::Memcpy, _) if !args.settings.memory.is_host() => {
            return Err(WorkerError::Setting(format!(
                "the kernel and the processor cannot read {} memory",
                args.settings.memory
            )));
        }
        (Who::ProcessVmReadv, Role::Holder) => holder(raw::RawHolder::start(args, about)?),
        (Who::ProcessVmReadv, Role::Reader) => {
            about.insert("transport".into(), "cma".into());
            reader(raw::RawReader::by_system_call(args)?)
        }
        (Who::Memcpy, Role::Holder) => holder(raw::NoHolder),
        (Who::Memcpy, Role::Reader) => {
            about.insert("transport".into(), "memory".into());
            reader(raw::RawReader::by_copy(args)?)
        }
        (Who::NixlPython | Who::NixlSys | Who::Mooncake, _) => {
            return Err(WorkerError::OutOfTurn(
                "that participant is another program",
            ));
        }
    };
    let card = match &end {
        End::Holder(holder) => Some(holder.card()?),
        _ => None,
    };
    Ok((end, card))
}

fn holder(holder: impl Holder + 'static) -> End {
    End::Holder(Box::new(holder))
}

fn reader(reader: impl Reader + 'static) -> End {
    End::Reader(Box::new(reader))
}

fn run(
    reader: &mut dyn Reader,
    names: &[String],
    times: u32,
    verify: u32,
    pause_us: u64,
) -> Result<Answer, WorkerError> {
    if names.is_empty() || times == 0 || times > MAX_TIMES {
        return Err(WorkerError::OutOfTurn(
            "a run has at least one case and goes 1 to 100000 times",
        ));
    }
    reader.prepare(names)?;
    let mut samples = Vec::new();
    for left in (0..times).rev() {
        if left == 0 && verify > 0 {
            for name in names {
                reader.spoil(name, verify)?;
            }
        }
        if pause_us > 0 {
            std::thread::sleep(Duration::from_micros(pause_us));
        }
        samples.push(reader.once(names)?);
    }
    let mut checked = Checked::default();
    if verify > 0 {
        for name in names {
            let of_case = reader.check(name, verify)?;
            checked.bytes += of_case.bytes;
            checked.wrong += of_case.wrong;
        }
    }
    Ok(Answer::Ran {
        samples,
        checked_bytes: checked.bytes,
        wrong_bytes: checked.wrong,
    })
}

/// Processor time of this process.
fn process_cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// The same in microseconds.
fn process_cpu_us() -> f64 {
    process_cpu().as_secs_f64() * 1e6
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn ask(end: &mut End, request: Value) -> Result<Answer, WorkerError> {
        answer(end, serde_json::from_value(request).unwrap())
    }

    fn setup(role: &str, card: Value) -> Value {
        json!({
            "op": "setup", "role": role, "seed": 9, "card": card,
            "shape": {"regions": 3, "blocks": 40, "block_bytes": 64},
            "settings": {"who": "process_vm_readv", "huge_pages": false},
        })
    }

    fn case(remote: Value, local: Value) -> Value {
        json!({"op": "case", "name": "c", "remote": remote, "local": local})
    }

    fn run_of(times: u32, verify: u32) -> Value {
        json!({"op": "run", "names": ["c"], "times": times, "verify": verify})
    }

    #[test]
    fn two_ends_do_what_the_protocol_says() {
        let (mut holder, mut reader) = (End::None, End::None);
        let Answer::Ready { card, .. } = ask(&mut holder, setup("holder", Value::Null)).unwrap()
        else {
            panic!("not ready")
        };
        ask(&mut reader, setup("reader", card.unwrap())).unwrap();
        for (remote, local) in [(json!([5, 4]), json!([0, 39])), (json!([1]), json!([2]))] {
            // The second replaces the first.
            ask(&mut holder, case(remote.clone(), local.clone())).unwrap();
            ask(&mut reader, case(remote.clone(), local)).unwrap();
            let answer = ask(&mut reader, run_of(3, 10)).unwrap();
            let Answer::Ran {
                samples,
                checked_bytes,
                wrong_bytes,
            } = answer
            else {
                panic!("{answer:?}")
            };
            let bytes = remote.as_array().unwrap().len() as u64 * 3 * 64;
            assert_eq!((checked_bytes, wrong_bytes), (bytes, 0));
            assert_eq!(samples.len(), 3);
            assert!(samples.iter().all(|sample| sample.bytes == bytes));
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused_and_leaves_all_as_it_was() {
        let (mut holder, mut reader) = (End::None, End::None);
        assert!(ask(&mut holder, case(json!([1]), json!([1]))).is_err());
        let Answer::Ready { card, .. } = ask(&mut holder, setup("holder", Value::Null)).unwrap()
        else {
            panic!("not ready")
        };
        assert!(ask(&mut reader, setup("reader", json!({"pid": "x"}))).is_err());
        ask(&mut reader, setup("reader", card.unwrap())).unwrap();
        assert!(ask(&mut holder, run_of(1, 0)).is_err());
        assert!(ask(&mut holder, case(json!([40]), json!([]))).is_err());
        for (remote, local) in [
            (json!([]), json!([])),
            (json!([1, 2]), json!([1])),
            (json!([40]), json!([1])),
            (json!([1]), json!([40])),
        ] {
            assert!(ask(&mut reader, case(remote, local)).is_err());
        }
        assert!(ask(&mut reader, run_of(1, 0)).is_err(), "no such case");
        ask(&mut reader, case(json!([7]), json!([8]))).unwrap();
        assert!(ask(&mut reader, run_of(0, 0)).is_err());
        assert!(ask(&mut reader, run_of(u32::MAX, 0)).is_err());
        assert!(ask(&mut reader, run_of(1, 1)).is_ok());
        assert!(matches!(
            ask(&mut reader, json!({"op": "cpu"})),
            Ok(Answer::Cpu { us }) if us > 0
        ));
    }
}

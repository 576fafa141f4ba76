//! One end of a pair, as the parent sees it: a process of its own, or a target on another node.

use std::process::Command;
use std::time::Duration;

use serde_json::{Map, Value};

use super::control::Control;
use super::error::BenchError;
use super::freeze::{freeze, thaw};
use super::proto::{Answer, Request, Sample};
use crate::proc::{Interrupt, Worker};

/// Time to load the libraries, and to make and fill the memory.
pub const SETUP_LIMIT: Duration = Duration::from_secs(180);
/// Time for everything that moves no bytes.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Time for a run, besides what it takes by estimate.
pub const RUN_LIMIT: Duration = Duration::from_secs(90);
/// Time to end by itself.
const END_LIMIT: Duration = Duration::from_secs(5);

/// One end.
#[derive(Debug)]
pub struct Link {
    name: String,
    way: Way,
    frozen: bool,
}

#[derive(Debug)]
enum Way {
    Child(Worker),
    Target(Control),
}

/// What a run brought.
#[derive(Debug, Clone, PartialEq)]
pub struct Ran {
    /// One for each time.
    pub samples: Vec<Sample>,
    /// Bytes checked.
    pub checked_bytes: u64,
    /// Of those, wrong.
    pub wrong_bytes: u64,
}

impl Link {
    /// Starts a process.
    ///
    /// # Errors
    /// [`BenchError::Proc`].
    pub fn child(
        name: String,
        command: Command,
        interrupt: &Interrupt,
    ) -> Result<Self, BenchError> {
        let way = Way::Child(Worker::spawn(&name, command, interrupt)?);
        Ok(Self {
            name,
            way,
            frozen: false,
        })
    }

    /// Uses a target on another node.
    #[must_use]
    pub fn target(control: Control) -> Self {
        Self {
            name: "target".to_owned(),
            way: Way::Target(control),
            frozen: false,
        }
    }

    /// Sends a request; its answer is to be [taken](Self::answer) before the next.
    ///
    /// # Errors
    /// [`BenchError`] when the other end is gone.
    pub fn send(&mut self, request: &Request) -> Result<(), BenchError> {
        match &mut self.way {
            Way::Child(worker) => worker.send(request)?,
            Way::Target(control) => control.send(request)?,
        }
        Ok(())
    }

    /// Waits for an answer.
    ///
    /// # Errors
    /// [`BenchError`] when the other end is gone, silent, or says no.
    pub fn answer(&mut self, limit: Duration) -> Result<Answer, BenchError> {
        let answer = match &mut self.way {
            Way::Child(worker) => worker.recv(limit)?,
            Way::Target(control) => control.recv(limit)?,
        };
        match answer {
            Answer::Failed { error } => Err(BenchError::Refused(error)),
            answer => Ok(answer),
        }
    }

    fn ask(&mut self, request: &Request, limit: Duration) -> Result<Answer, BenchError> {
        self.send(request)?;
        self.answer(limit)
    }

    fn out_of_turn(&self) -> BenchError {
        BenchError::OutOfTurn(self.name.clone())
    }

    /// Takes the answer to a setup: the card, and what it runs on.
    ///
    /// # Errors
    /// [`BenchError`].
    pub fn ready(&mut self) -> Result<(Option<Value>, Map<String, Value>), BenchError> {
        match self.answer(SETUP_LIMIT)? {
            Answer::Ready { card, about } => Ok((card, about)),
            _ => Err(self.out_of_turn()),
        }
    }

    /// Tells it a case; its ticket.
    ///
    /// # Errors
    /// [`BenchError`].
    pub fn case(
        &mut self,
        name: String,
        (remote, local): (Vec<u32>, Vec<u32>),
        ticket: Option<Value>,
    ) -> Result<Option<Value>, BenchError> {
        let request = Request::Case {
            name,
            remote,
            local,
            ticket,
        };
        match self.ask(&request, ANSWER_LIMIT)? {
            Answer::Case { ticket } => Ok(ticket),
            _ => Err(self.out_of_turn()),
        }
    }

    /// Has it read.
    ///
    /// # Errors
    /// [`BenchError`].
    pub fn run(&mut self, names: &[String], times: u32, verify: u32) -> Result<Ran, BenchError> {
        let request = Request::Run {
            names: names.to_vec(),
            times,
            verify,
            pause_us: 0,
        };
        match self.ask(&request, RUN_LIMIT)? {
            Answer::Ran {
                samples,
                checked_bytes,
                wrong_bytes,
            } if !samples.is_empty() => Ok(Ran {
                samples,
                checked_bytes,
                wrong_bytes,
            }),
            _ => Err(self.out_of_turn()),
        }
    }

    /// Processor time that it has used, microseconds.
    ///
    /// # Errors
    /// [`BenchError`].
    pub fn cpu_us(&mut self) -> Result<u64, BenchError> {
        match self.ask(&Request::Cpu, ANSWER_LIMIT)? {
            Answer::Cpu { us } => Ok(us),
            _ => Err(self.out_of_turn()),
        }
    }

    /// Stops it, if it is a process of this machine.
    ///
    /// # Errors
    /// [`BenchError::NotFrozen`].
    pub fn freeze(&mut self) -> Result<(), BenchError> {
        if let (Way::Child(worker), false) = (&self.way, self.frozen) {
            freeze(worker.id())?;
            self.frozen = true;
        }
        Ok(())
    }

    /// Lets it go on.
    ///
    /// # Errors
    /// [`BenchError::NotFrozen`] when it is gone.
    pub fn thaw(&mut self) -> Result<(), BenchError> {
        if let (Way::Child(worker), true) = (&self.way, self.frozen) {
            thaw(worker.id())?;
            self.frozen = false;
        }
        Ok(())
    }

    /// Has it end, and sees to it that it does.
    pub fn quit(mut self) {
        let _ = self.thaw();
        let said = self.ask(&Request::Quit, END_LIMIT);
        if let (Way::Child(worker), Ok(_)) = (self.way, said)
            && let Err(error) = worker.finish(END_LIMIT)
        {
            tracing::warn!(participant = self.name, %error, "did not end well");
        }
    }
}

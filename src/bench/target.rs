//! `kvx target`: the holder of benches that run on other nodes. It talks to one bench at a time;
//! the blocks are in a process of their own, which ends with the bench.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::time::Duration;

use kv_xfer::memory::cuda::CudaError;
use serde_json::Value;
use thiserror::Error;

use super::args::TargetArgs;
use super::control::{Control, ControlError};
use super::fabric::FabricReport;
use super::link::{ANSWER_LIMIT, SETUP_LIMIT};
use super::proto::{Answer, Request, Role};
use super::row::Who;
use super::worker::{Settings, WorkerError};
use crate::memory::PoolMemory;
use crate::proc::{Interrupt, ProcError, Worker};
use crate::runtime::OpenError;

/// How often it looks for a bench, and whether it was interrupted.
const LOOK: Duration = Duration::from_millis(100);
/// Time for a new connection to say its first word: until then nobody else is heard.
const FIRST_WORD: Duration = Duration::from_secs(10);
/// Lines that make no sense, after which a connection is closed.
const MOST_NONSENSE: u32 = 16;
/// Time for the holder's process to end.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Why there is no target.
#[derive(Debug, Error)]
pub enum TargetError {
    /// No NIXL.
    #[error(transparent)]
    Nixl(#[from] OpenError),
    /// There is no such GPU.
    #[error(transparent)]
    Memory(#[from] CudaError),
    /// The address cannot be had.
    #[error("cannot listen at {address}: {source}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Ctrl-C.
    #[error("interrupted")]
    Interrupted,
}

/// Serves benches until it is interrupted.
///
/// # Errors
/// [`TargetError`]; [`TargetError::Interrupted`] is the way it ends.
pub fn serve(args: &TargetArgs, interrupt: &Interrupt) -> Result<(), TargetError> {
    let memory = args.memory.resolve()?;
    let fabric = FabricReport::look()?.to_string();
    let address = args.bind;
    let bind = |source| TargetError::Bind { address, source };
    let listener = TcpListener::bind(address).map_err(bind)?;
    listener.set_nonblocking(true).map_err(bind)?;
    let bound = listener.local_addr().map_err(bind)?;
    println!("{fabric}");
    println!("memory       {}, up to {} bytes", memory, args.max_bytes);
    println!("listening at {bound}");
    println!(
        "elsewhere    KVX_BENCH_PEER=HOST:{} kvx bench read",
        bound.port()
    );
    loop {
        if interrupt.is_raised() {
            return Err(TargetError::Interrupted);
        }
        match listener.accept() {
            Ok((stream, peer)) => match Control::new(stream, peer, interrupt) {
                Ok(control) => attend(args, memory, &fabric, control, peer, interrupt)?,
                Err(error) => tracing::debug!(%peer, %error, "gone at once"),
            },
            // Also when file descriptors are short: they will come back.
            Err(_) => std::thread::sleep(LOOK),
        }
    }
}

/// Serves one bench, however it behaves.
fn attend(
    args: &TargetArgs,
    memory: PoolMemory,
    fabric: &str,
    control: Control,
    peer: SocketAddr,
    interrupt: &Interrupt,
) -> Result<(), TargetError> {
    println!("{peer} is here");
    let mut visit = Visit {
        args,
        memory,
        fabric,
        control,
        interrupt,
        holder: None,
    };
    let end = visit.serve();
    // Everything that it had is given up before the next one is heard.
    if let Some(holder) = visit.holder.take()
        && let Err(error) = holder.finish(END_LIMIT)
    {
        tracing::debug!(%error, "the holder did not end well");
    }
    match end {
        Ok(()) => println!("{peer} has left"),
        Err(ControlError::Interrupted) => return Err(TargetError::Interrupted),
        Err(error) => println!("{peer} is lost: {error}"),
    }
    Ok(())
}

struct Visit<'a> {
    args: &'a TargetArgs,
    /// Where the blocks are.
    memory: PoolMemory,
    /// What this node has to carry bytes with, for the report.
    fabric: &'a str,
    control: Control,
    interrupt: &'a Interrupt,
    holder: Option<Worker>,
}

impl Visit<'_> {
    fn serve(&mut self) -> Result<(), ControlError> {
        let idle = Duration::from_secs(self.args.idle);
        let mut limit = FIRST_WORD.min(idle);
        let mut nonsense = 0;
        loop {
            let request = match self.control.recv(limit) {
                Ok(request) => request,
                Err(error @ ControlError::Nonsense { .. }) if nonsense < MOST_NONSENSE => {
                    nonsense += 1;
                    self.refuse(&error)?;
                    continue;
                }
                Err(error @ ControlError::TooLong { .. }) => {
                    // Best told, if it listens at all.
                    let _ = self.refuse(&error);
                    return Err(error);
                }
                Err(error) => return Err(error),
            };
            limit = idle;
            if matches!(request, Request::Quit) {
                return self.control.send(&Answer::Bye);
            }
            let answer = match self.answer(request) {
                Ok(answer) => answer,
                Err(VisitError::Proc(ProcError::Interrupted)) => {
                    return Err(ControlError::Interrupted);
                }
                Err(error) => Answer::Failed {
                    error: error.to_string(),
                },
            };
            self.control.send(&answer)?;
        }
    }

    fn refuse(&mut self, error: &ControlError) -> Result<(), ControlError> {
        self.control.send(&Answer::Failed {
            error: error.to_string(),
        })
    }

    fn answer(&mut self, request: Request) -> Result<Answer, VisitError> {
        match request {
            Request::Setup { .. } => {
                let request = self.checked(request)?;
                // What was there before goes first.
                self.holder = None;
                let arguments = ["bench-worker"];
                let holder = Worker::spawn_self("holder", &arguments, &[], self.interrupt)?;
                self.holder = Some(holder);
                self.relay(&request, SETUP_LIMIT)
            }
            Request::Run { .. } => Err(VisitError::NotHere),
            request => self.relay(&request, ANSWER_LIMIT),
        }
    }

    /// A setup as the holder's process is to have it.
    fn checked(&self, request: Request) -> Result<Request, VisitError> {
        let Request::Setup {
            role: Role::Holder,
            shape,
            seed,
            mut settings,
            ..
        } = request
        else {
            return Err(VisitError::NotHere);
        };
        let wanted = Settings::parse(settings.clone())?;
        if !matches!(wanted.who, Who::KvXfer | Who::OneDescriptor) {
            return Err(VisitError::NotHere);
        }
        let bytes = wanted
            .layout(&shape)?
            .block_bytes()
            .checked_mul(shape.blocks.into());
        let most = self.args.max_bytes;
        if bytes.is_none_or(|bytes| bytes > most) {
            return Err(VisitError::TooMuch { most });
        }
        let here = self.control.local_addr().map_err(VisitError::Gone)?.ip();
        let unspecified: IpAddr = match here.to_canonical() {
            IpAddr::V4(_) => [0, 0, 0, 0].into(),
            IpAddr::V6(_) => [0_u16; 8].into(),
        };
        let advertise = self.args.advertise.clone();
        let advertise = advertise.unwrap_or_else(|| here.to_canonical().to_string());
        let bind = SocketAddr::new(unspecified, self.args.side_channel_port);
        // Where it listens and what it says of itself is not the bench's to choose.
        settings.insert("memory".to_owned(), self.memory.to_string().into());
        settings.insert("bind".to_owned(), bind.to_string().into());
        settings.insert("advertise".to_owned(), Value::String(advertise));
        Ok(Request::Setup {
            role: Role::Holder,
            shape,
            seed,
            settings,
            card: None,
        })
    }

    fn relay(&mut self, request: &Request, limit: Duration) -> Result<Answer, VisitError> {
        let holder = self.holder.as_mut().ok_or(VisitError::NoSetup)?;
        let answer = holder.send(request).and_then(|()| holder.recv(limit));
        match answer {
            Ok(Answer::Ready { card, mut about }) => {
                about.insert("fabric".to_owned(), self.fabric.into());
                Ok(Answer::Ready { card, about })
            }
            Ok(answer) => Ok(answer),
            Err(error) => {
                self.holder = None;
                Err(error.into())
            }
        }
    }
}

/// Why a request is refused; goes to the bench as text.
#[derive(Debug, Error)]
enum VisitError {
    #[error("a target only holds blocks for kv-xfer and one-descriptor; it does not read")]
    NotHere,
    #[error("there was no setup yet")]
    NoSetup,
    #[error("the memory is more than the {most} bytes of the target's --max-bytes")]
    TooMuch { most: u64 },
    #[error("the connection is gone: {0}")]
    Gone(io::Error),
    #[error(transparent)]
    Settings(#[from] WorkerError),
    #[error(transparent)]
    Proc(#[from] ProcError),
}

//! Why a bench's process cannot do what it was asked.

use std::num::TryFromIntError;

use kv_xfer::descriptor::DescriptorError;
use kv_xfer::engine::{OfferError, StartError};
use kv_xfer::identity::IdentityError;
use kv_xfer::ids::NameError;
use kv_xfer::layout::{GeometryError, LayoutError, PairingError, RegionError};
use kv_xfer::memory::{AccessError, ClaimError, MemoryError, PoolError};
use kv_xfer::plan::PlanError;
use kv_xfer::transport::{ReadFault, TransportError};
use nix::errno::Errno;
use thiserror::Error;

use crate::proc::ProcError;
use crate::runtime::OpenError;

/// Why a bench's process cannot do what it was asked. It goes to the parent as text.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// NIXL is missing or does not work.
    #[error(transparent)]
    Nixl(#[from] OpenError),
    /// The engine did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The pool's geometry is impossible.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// The layout is impossible.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// There is no memory for the pool.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// A name is malformed.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The block hashes cannot be made.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// A block could not be written or read.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// A block lies outside of its region.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The pool's memory could not be written.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Destination blocks are in another read already.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// The lease was refused.
    #[error("the blocks cannot be leased: {0}")]
    Lease(String),
    /// The read was refused at once.
    #[error("the read was not taken: {0}")]
    Submit(String),
    /// The read failed.
    #[error("the read failed: {0}")]
    Read(String),
    /// A read did not end in time.
    #[error("the read did not end within {0:?}")]
    Late(std::time::Duration),
    /// The description does not parse.
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    /// The description was not believed.
    #[error(transparent)]
    Offer(#[from] OfferError),
    /// The two pools do not pair up.
    #[error(transparent)]
    Pairing(#[from] PairingError),
    /// The read cannot be planned.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The transport failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// A bare read failed.
    #[error(transparent)]
    Fault(#[from] ReadFault),
    /// The kernel refused to read another process's memory.
    #[error(
        "process_vm_readv from process {pid} failed ({errno}); it needs the same user, and \
         kernel.yama.ptrace_scope=0 or a parent in common"
    )]
    Readv {
        /// The other process.
        pid: i32,
        /// The kernel's answer.
        errno: Errno,
    },
    /// The kernel moved less than was asked for.
    #[error("process_vm_readv moved {moved} of {wanted} bytes")]
    Short {
        /// Bytes moved by the call at fault.
        moved: usize,
        /// Bytes it was asked for.
        wanted: usize,
    },
    /// Memory could not be mapped.
    #[error("{bytes} bytes cannot be mapped: {source}")]
    Map {
        /// How many.
        bytes: usize,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A count does not fit this machine.
    #[error(transparent)]
    Count(#[from] TryFromIntError),
    /// A setting, card or ticket does not parse.
    #[error("the {what} is not understood: {source}")]
    Json {
        /// What it is.
        what: &'static str,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// A setting that cannot be had.
    #[error("{0}")]
    Setting(String),
    /// A case that makes no sense.
    #[error("case {name}: {why}")]
    Case {
        /// Its name.
        name: String,
        /// What is wrong with it.
        why: String,
    },
    /// The parent asked for something out of turn.
    #[error("{0}")]
    OutOfTurn(&'static str),
    /// The other process.
    #[error(transparent)]
    Proc(#[from] ProcError),
}

impl WorkerError {
    pub(super) fn json(what: &'static str) -> impl FnOnce(serde_json::Error) -> Self {
        move |source| Self::Json { what, source }
    }
}

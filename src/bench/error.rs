//! Why a bench could not be carried out.

use std::io;
use std::path::PathBuf;

use kv_xfer::memory::cuda::CudaError;
use thiserror::Error;

use super::control::ControlError;
use super::fixture;
use super::report::ReportError;
use super::worker::WorkerError;
use crate::proc::ProcError;

/// Why a bench could not be carried out. That a participant is absent is no error.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BenchError {
    /// A process.
    #[error(transparent)]
    Proc(#[from] ProcError),
    /// The target on another node.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// A participant said no, in its own words.
    #[error("{0}")]
    Refused(String),
    /// A participant answered something else than was asked.
    #[error("the {0} answered out of turn")]
    OutOfTurn(String),
    /// A participant cannot be had here.
    #[error("{0}")]
    Absent(String),
    /// A process could not be frozen.
    #[error("process {pid} was not frozen in time")]
    NotFrozen {
        /// Which.
        pid: u32,
    },
    /// A layout that cannot be had.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// What is measured in this process.
    #[error(transparent)]
    Here(#[from] fixture::BenchError),
    /// There is no such GPU.
    #[error(transparent)]
    Memory(#[from] CudaError),
    /// A report could not be written.
    #[error(transparent)]
    Report(#[from] ReportError),
    /// Nothing is left to be measured.
    #[error("no case is left; --cases, --who or --max-bytes leave nothing to be measured")]
    Nothing,
    /// A file could not be written.
    #[error("{path}: {source}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl BenchError {
    /// Whether Ctrl-C ended it.
    #[must_use]
    pub fn is_interrupt(&self) -> bool {
        matches!(
            self,
            Self::Proc(ProcError::Interrupted)
                | Self::Control(ControlError::Interrupted)
                | Self::Here(fixture::BenchError::Proc(ProcError::Interrupted))
        )
    }
}

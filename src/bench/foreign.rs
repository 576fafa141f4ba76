//! The participants that are other programs.

use std::process::Command;

use super::error::BenchError;
use super::provision;
use super::row::Who;

/// The command of a participant that is another program, in one of its settings, speaking
/// [`proto`](super::proto) on its standard input and output.
///
/// # Errors
/// [`BenchError::Absent`], in its own words, when it cannot be had here.
pub fn participant(who: Who, setting: &str) -> Result<Command, BenchError> {
    // The setting travels in the set-up.
    let _ = setting;
    provision::participant(who).map_err(|error| BenchError::Absent(error.to_string()))
}

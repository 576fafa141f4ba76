//! `kvx bench latency`: what a read costs beyond the bytes, beside NIXL alone.

mod contact;
mod idle;
mod many;
mod one_block;

use std::time::Duration;

use super::fixture::BenchError;
use super::machine;
use super::row::{BenchReport, Row};
use crate::proc::Interrupt;
use crate::require;

/// How much is to be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatencySize {
    /// Reads of one block of each shape.
    pub samples: u32,
    /// How long nothing is done before the first read after idling.
    pub idle: Duration,
    /// Blocks of the large read: of 64 regions each.
    pub large_blocks: u32,
    /// Blocks of a region at first contact.
    pub contact_blocks: u32,
    /// Scattered blocks of the read whose cost for each descriptor is measured.
    pub random_blocks: u32,
}

/// Runs it.
///
/// # Errors
/// [`BenchError`] when something fails that no row could tell.
pub fn measure(size: &LatencySize, interrupt: &Interrupt) -> Result<BenchReport, BenchError> {
    let transport = require::open()?;
    let machine = machine::look(true);
    let mut rows: Vec<Row> = Vec::new();
    rows.extend(one_block::measure(size, &transport, interrupt)?);
    rows.extend(many::overhead(size, &transport, interrupt)?);
    rows.extend(many::submit(size, &transport, interrupt)?);
    rows.extend(idle::measure(size, &transport, interrupt)?);
    rows.extend(contact::measure(size, &transport, interrupt)?);
    let ok = rows
        .iter()
        .all(|row| row.more.get("ok").is_none_or(|ok| ok == true));
    Ok(BenchReport {
        bench: "latency".to_owned(),
        machine,
        rows,
        absent: Vec::new(),
        ok,
    })
}

//! One read at a time, timed.

use std::time::{Duration, Instant};

use kv_xfer::engine::{Engine, Landed, Offer, ReadReport, ReadRequest, ReleasePolicy};
use kv_xfer::identity::BlockHash;
use kv_xfer::memory::OwnedBlocks;

use super::fixture::{BenchError, LIMIT};
use super::row::{Row, Who};
use super::rows::{blank, tell, timed};
use super::stats::Times;

/// What one read took, seen by its caller.
#[derive(Debug, Clone, Default)]
pub struct Timing {
    /// How long submitting kept the caller.
    pub submit: Duration,
    /// From before the submission until the caller had the outcome.
    pub total: Duration,
    /// How long the caller's thread and the driver's were ready to run meanwhile and got no processor.
    pub kept_waiting: Duration,
    /// What the engine says.
    pub report: ReadReport,
}

/// Reads offered blocks from `first` on into `blocks` and waits.
///
/// # Errors
/// [`BenchError`] when it is refused or fails.
pub fn read(
    engine: &Engine,
    offer: &Offer,
    hashes: &[BlockHash],
    first: usize,
    blocks: OwnedBlocks,
) -> Result<(OwnedBlocks, Timing), BenchError> {
    let span = first..first.saturating_add(blocks.len());
    let start = Instant::now();
    let handle = engine.read(ReadRequest {
        offer,
        hashes,
        span,
        blocks,
        timeout: LIMIT,
        release: ReleasePolicy::Never,
    });
    let submit = start.elapsed();
    let handle = handle.map_err(|refused| BenchError::Submit(refused.to_string()))?;
    let outcome = handle.wait();
    let total = start.elapsed();
    let Landed { blocks, report } = outcome.map_err(|failure| failure.error)?;
    Ok((
        blocks,
        Timing {
            submit,
            total,
            kept_waiting: Duration::ZERO,
            report,
        },
    ))
}

/// Many one-block reads.
#[derive(Debug, Clone, Default)]
pub struct Probes {
    timings: Vec<Timing>,
}

impl Probes {
    /// Adds one.
    pub fn take(&mut self, timing: Timing) {
        self.timings.push(timing);
    }

    /// Times from submission to the outcome, as the caller saw them.
    #[must_use]
    pub fn total(&self) -> Times {
        self.of(|timing| timing.total)
    }

    /// Times of a part of each read.
    #[must_use]
    pub fn of(&self, part: impl Fn(&Timing) -> Duration) -> Times {
        self.timings.iter().map(part).collect()
    }

    /// A row of them, with where the time went.
    #[must_use]
    pub fn row(&self, case: &str, setting: &str) -> Row {
        let mut row = blank(case, Who::KvXfer, setting);
        if let Some(timing) = self.timings.last() {
            row.bytes = timing.report.bytes;
            row.descriptors = timing.report.descriptors;
        }
        let submits = self.of(|timing| timing.submit);
        row.submit_us = submits.median();
        row.submit_max_us = submits.max();
        let mut row = timed(row, &self.total());
        type Part = fn(&Timing) -> Duration;
        let parts: [(&str, Part); 5] = [
            ("queued", |t| t.report.queued),
            ("posting", |t| t.report.posting),
            ("checking", |t| t.report.checking),
            ("engine_total", |t| t.report.total),
            ("wake_up", |t| t.total.saturating_sub(t.report.total)),
        ];
        for (name, part) in parts {
            let times = self.of(part);
            tell(&mut row, &format!("{name}_p50_us"), times.median());
            tell(&mut row, &format!("{name}_p99_us"), times.quantile(0.99));
        }
        row
    }
}

//! Plots of a bench's results, as SVG.

mod bandwidth;
pub mod canvas;
mod comparison;
mod latency;

use std::collections::BTreeSet;

use thiserror::Error;

use super::report::machine;
use super::row::{BenchReport, Row};

pub use bandwidth::ReadCase;

/// Why a plot could not be drawn.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("the plot cannot be drawn: {0}")]
pub struct PlotError(pub(super) String);

/// One plot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plot {
    /// What it is called in file names: `bandwidth`, `latency`, `comparison`.
    pub name: &'static str,
    /// What it shows, in words.
    pub title: &'static str,
    /// The drawing.
    pub svg: String,
}

/// Every plot that a report has rows for.
///
/// # Errors
/// [`PlotError`].
pub fn draw_all(report: &BenchReport) -> Result<Vec<Plot>, PlotError> {
    let under = machine(&report.machine);
    type Draw = fn(&BenchReport, &str, &str) -> Result<Option<String>, PlotError>;
    let kinds: [(&'static str, &'static str, Draw); 3] = [
        (
            "bandwidth",
            "Bandwidth by block size and fragmentation",
            bandwidth::draw,
        ),
        ("latency", "How long reads take", latency::draw),
        (
            "comparison",
            "Time of each read, shortest to longest",
            comparison::draw,
        ),
    ];
    let mut plots = Vec::new();
    for (name, title, draw) in kinds {
        if let Some(svg) = draw(report, title, &under)? {
            plots.push(Plot { name, title, svg });
        }
    }
    Ok(plots)
}

/// The how-many-th setting of its participant a row has, in all of the report: the same in every plot.
fn variant(report: &BenchReport, row: &Row) -> usize {
    // The default first.
    let key = |row: &Row| {
        let special = !matches!(row.setting.as_str(), "" | "engine");
        (special, special.then(|| row.setting.clone()))
    };
    let settings: BTreeSet<_> = report
        .rows
        .iter()
        .filter(|other| other.who == row.who)
        .map(key)
        .collect();
    let own = key(row);
    settings.iter().position(|one| *one == own).unwrap_or(0)
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::row::{Machine, Who};
    use super::super::rows::{blank, timed};
    use super::super::stats::Times;
    use super::*;

    /// Made up, of all kinds.
    pub fn report() -> BenchReport {
        let mut rows = Vec::new();
        let orders = ["contiguous", "random", "reversed", "interleaved"];
        for (order, loss) in orders.into_iter().zip([1.0, 2.2, 1.1, 1.6]) {
            for (size, kib) in [
                ("4KiB", 4.0),
                ("16KiB", 16.0),
                ("256KiB", 256.0),
                ("1MiB", 1024.0),
            ] {
                for (who, setting, slower) in [
                    (Who::OneDescriptor, "", 0.9),
                    (Who::KvXfer, "", 1.0),
                    (Who::NixlPython, "progress-thread", 1.9),
                    (Who::NixlPython, "no-progress-thread", 1.4),
                    (Who::ProcessVmReadv, "", 1.1),
                ] {
                    let scattered = if who == Who::OneDescriptor { 1.0 } else { loss };
                    let us = 9000.0 * slower * (1.0 + scattered * 12.0 / kib);
                    let times: Times = (0..9).map(|n| us * (1.0 + f64::from(n) / 60.0)).collect();
                    let mut row = blank(format!("{order}-1024x{size}"), who, setting);
                    row.bytes = 64 << 20;
                    rows.push(timed(row, &times));
                }
            }
        }
        for (case, us) in [("one-block-64x8KiB", 230.0), ("one-block-1x8KiB", 21.0)] {
            for (who, setting, over) in [
                (Who::KvXfer, "engine", 20.0),
                (Who::OneDescriptor, "NIXL alone, same descriptors", 0.0),
            ] {
                let spread = |n: i32| us + over + f64::from(n % 37) + 4000.0 / f64::from(1 + n);
                let times: Times = (0..1000).map(spread).collect();
                rows.push(timed(blank(case, who, setting), &times));
            }
        }
        BenchReport {
            bench: "read".to_owned(),
            machine: Machine {
                cpu: "Processor <&> model".to_owned(),
                cores: 8,
                memory_bytes: 64 << 30,
                nixl: "1.5.1".to_owned(),
                kernel: "6.1".to_owned(),
                one_machine: true,
                ..Machine::default()
            },
            rows,
            absent: Vec::new(),
            ok: true,
        }
    }

    /// Every coordinate is a number.
    fn sound(svg: &str) {
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        assert!(!svg.contains("<&>"), "text is escaped");
    }

    #[test]
    fn all_kinds_are_drawn_and_name_the_machine() {
        let plots = draw_all(&report()).unwrap();
        let names: Vec<_> = plots.iter().map(|plot| plot.name).collect();
        assert_eq!(names, ["bandwidth", "latency", "comparison"]);
        for plot in &plots {
            sound(&plot.svg);
            assert!(plot.svg.contains("8 cores"), "{}", plot.name);
            assert!(plot.svg.contains("kv-xfer"), "{}", plot.name);
        }
        if let Ok(folder) = std::env::var("KVX_KEEP_PLOTS") {
            crate::bench::report::write_report(folder.as_ref(), &report()).unwrap();
        }
    }

    #[test]
    fn nothing_is_drawn_of_nothing() {
        let mut empty = report();
        empty.rows.clear();
        assert_eq!(draw_all(&empty).unwrap(), []);
    }

    #[test]
    fn one_row_is_drawn_and_impossible_numbers_are_not() {
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e300] {
            let mut one = report();
            one.rows.truncate(1);
            for plot in draw_all(&one).unwrap() {
                sound(&plot.svg);
            }
            for row in &mut one.rows {
                (row.gbps, row.median_ms, row.min_ms, row.max_ms) = (bad, bad, bad, bad);
                row.more.clear();
                row.more.insert("p50_us".to_owned(), serde_json::json!(bad));
                row.more.insert(
                    "histogram".to_owned(),
                    serde_json::json!([[bad, 1], ["x"], 3]),
                );
            }
            for plot in draw_all(&one).unwrap() {
                sound(&plot.svg);
            }
        }
    }
}

//! A bench's results for people: one page of Markdown, whose tables also read well in a terminal, and
//! the plots beside it.

use std::fmt::Write;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;
use thiserror::Error;

use super::plot::{self, PlotError};
use super::row::{BenchReport, Machine, Row, Who};

/// Why a report could not be written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReportError {
    /// A file or folder could not be written.
    #[error("{path} cannot be written: {source}", path = path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A plot could not be drawn.
    #[error(transparent)]
    Plot(#[from] PlotError),
}

/// Writes `<bench>.md` and its plots into a folder, which is made if it is not there. Returns the
/// files, the page first.
///
/// # Errors
/// [`ReportError`].
pub fn write_report(dir: &Path, report: &BenchReport) -> Result<Vec<PathBuf>, ReportError> {
    let write = |path: PathBuf, text: &str| match fs::write(&path, text) {
        Ok(()) => Ok(path),
        Err(source) => Err(ReportError::Write { path, source }),
    };
    fs::create_dir_all(dir).map_err(|source| ReportError::Write {
        path: dir.to_owned(),
        source,
    })?;
    let plots = plot::draw_all(report)?;
    let mut page = to_markdown(report);
    let mut files = Vec::new();
    for plot in &plots {
        let name = format!("{}-{}.svg", report.bench, plot.name);
        let _ = write!(page, "\n![{}]({name})\n", plot.title);
        files.push(write(dir.join(name), &plot.svg)?);
    }
    files.insert(0, write(dir.join(format!("{}.md", report.bench)), &page)?);
    Ok(files)
}

/// The page, without plots.
#[must_use]
pub fn to_markdown(report: &BenchReport) -> String {
    let mut page = format!(
        "# kvx bench {}\n\n{}\n",
        report.bench,
        machine(&report.machine)
    );
    let verdict = if report.ok {
        "Every checked byte was right and nothing failed."
    } else {
        "**Something failed or a byte was wrong: see below.**"
    };
    let _ = write!(page, "\n{verdict}\n");
    let reads: Vec<&Row> = report.rows.iter().filter(|row| row.gbps > 0.0).collect();
    if !reads.is_empty() {
        page.push_str("\n## Reads\n\n");
        page.push_str(&table(
            &[
                "case",
                "who",
                "median ms",
                "min – max",
                "GB/s",
                "submit µs",
                "CPU s/GiB",
                "bytes",
            ],
            reads.iter().map(|row| {
                vec![
                    row.case.clone(),
                    who(row),
                    number(row.median_ms),
                    format!("{} – {}", number(row.min_ms), number(row.max_ms)),
                    number(row.gbps),
                    blank_zero(row.submit_us),
                    blank_zero(row.cpu_s_per_gib),
                    if row.verified { "right" } else { "not checked" }.to_owned(),
                ]
            }),
        ));
    }
    let timed: Vec<&Row> = report
        .rows
        .iter()
        .filter(|row| percentile(row, "p50_us") > 0.0)
        .collect();
    if !timed.is_empty() {
        page.push_str("\n## Percentiles, µs\n\n");
        page.push_str(&table(
            &["case", "who", "samples", "p50", "p90", "p99", "p99.9"],
            timed.iter().map(|row| {
                let mut cells = vec![row.case.clone(), who(row), row.rounds.to_string()];
                let names = ["p50_us", "p90_us", "p99_us", "p999_us"];
                cells.extend(names.map(|name| number(percentile(row, name))));
                cells
            }),
        ));
    }
    let told: Vec<(&Row, String)> = report
        .rows
        .iter()
        .map(|row| (row, others(row)))
        .filter(|(_, text)| !text.is_empty())
        .collect();
    if !told.is_empty() {
        page.push_str("\n## Also measured\n\n");
        for (row, text) in told {
            let _ = writeln!(page, "- {}, {}: {text}", row.case, who(row));
        }
    }
    if !report.absent.is_empty() {
        page.push_str("\n## Did not take part\n\n");
        for absent in &report.absent {
            let _ = writeln!(
                page,
                "- {}: {}",
                labelled(absent.who, &absent.setting),
                absent.why
            );
        }
    }
    page
}

/// One line about the machine.
#[must_use]
pub fn machine(machine: &Machine) -> String {
    let mut parts = Vec::new();
    let mut part = |text: String, known: bool| {
        if known {
            parts.push(text);
        }
    };
    part(machine.cpu.clone(), !machine.cpu.is_empty());
    part(format!("{} cores", machine.cores), machine.cores > 0);
    let gib = machine.memory_bytes >> 30;
    part(format!("{gib} GiB"), gib > 0);
    part(machine.gpus.join(", "), !machine.gpus.is_empty());
    part(machine.rdma.join(", "), !machine.rdma.is_empty());
    part(format!("NIXL {}", machine.nixl), !machine.nixl.is_empty());
    part(
        format!("Linux {}", machine.kernel),
        !machine.kernel.is_empty(),
    );
    part(format!("load {}", number(machine.load)), machine.load > 0.0);
    let nodes = if machine.one_machine {
        "one machine"
    } else {
        "two machines"
    };
    part(nodes.to_owned(), true);
    parts.join(" · ")
}

/// A participant as it is written in tables and plots.
#[must_use]
pub fn who(row: &Row) -> String {
    labelled(row.who, &row.setting)
}

fn labelled(who: Who, setting: &str) -> String {
    let name = match who {
        Who::KvXfer => "kv-xfer",
        Who::NixlPython => "NIXL from Python",
        Who::NixlSys => "nixl-sys",
        Who::Mooncake => "Mooncake",
        Who::Memcpy => "memcpy",
        Who::ProcessVmReadv => "process_vm_readv",
        Who::OneDescriptor => "NIXL",
    };
    match setting
        .strip_prefix("NIXL ")
        .filter(|_| who == Who::OneDescriptor)
    {
        Some(rest) => format!("{name} {rest}"),
        None if setting.is_empty() || setting == "engine" => match who {
            Who::OneDescriptor => "NIXL, one descriptor".to_owned(),
            _ => name.to_owned(),
        },
        None => format!("{name}, {setting}"),
    }
}

/// A number out of what a row has to tell beside its fields; zero when it is not there.
#[must_use]
pub fn percentile(row: &Row, name: &str) -> f64 {
    let number = row.more.get(name).and_then(Value::as_f64);
    number.filter(|number| number.is_finite()).unwrap_or(0.0)
}

/// What a row has to tell that no table has.
fn others(row: &Row) -> String {
    const IN_TABLES: [&str; 6] = [
        "histogram",
        "p50_us",
        "p90_us",
        "p99_us",
        "p999_us",
        "max_us",
    ];
    let mut text = String::new();
    if let Some(first) = row.first_layer_ms {
        let _ = write!(text, "first layer after {} ms; ", number(first));
    }
    for (name, value) in &row.more {
        if IN_TABLES.contains(&name.as_str()) {
            continue;
        }
        let value = match value {
            Value::Number(n) => number(n.as_f64().unwrap_or(0.0)),
            Value::Bool(true) => "yes".to_owned(),
            Value::Bool(false) => "**no**".to_owned(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let _ = write!(text, "{} {value}; ", name.replace('_', " "));
    }
    text.trim_end_matches("; ").to_owned()
}

/// A number with three digits that count.
#[must_use]
pub fn number(number: f64) -> String {
    let digits = match number.abs() {
        n if n >= 100.0 || n == 0.0 => 0,
        n if n >= 10.0 => 1,
        n if n >= 1.0 => 2,
        n if n >= 0.1 => 3,
        _ => 4,
    };
    format!("{number:.digits$}")
}

fn blank_zero(value: f64) -> String {
    if value > 0.0 {
        number(value)
    } else {
        String::new()
    }
}

/// A Markdown table with padded cells; all columns but the first two to the right.
fn table(head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let rows: Vec<Vec<String>> = rows.collect();
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        let widest = cells.map(|cell| cell.chars().count()).max().unwrap_or(0);
        head.get(column)
            .map_or(0, |head| head.chars().count())
            .max(widest)
            .max(3)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let mut text = String::new();
    let mut line = |cells: &[String]| {
        for (column, (cell, width)) in cells.iter().zip(&widths).enumerate() {
            let _ = if column < 2 {
                write!(text, "| {cell:<width$} ")
            } else {
                write!(text, "| {cell:>width$} ")
            };
        }
        text.push_str("|\n");
    };
    line(
        &head
            .iter()
            .map(|head| (*head).to_owned())
            .collect::<Vec<_>>(),
    );
    let rule = |(column, width): (usize, &usize)| {
        let dashes = "-".repeat(width.saturating_sub(1));
        if column < 2 {
            format!("-{dashes}")
        } else {
            format!("{dashes}:")
        }
    };
    line(&widths.iter().enumerate().map(rule).collect::<Vec<_>>());
    for row in &rows {
        line(row);
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::rows::{blank, timed};
    use super::super::stats::Times;
    use super::*;
    use crate::bench::plot::tests::report;

    #[test]
    fn the_page_has_every_row_and_no_broken_number() {
        let page = to_markdown(&report());
        for row in report().rows {
            assert!(page.contains(&row.case), "{}", row.case);
        }
        assert!(!page.contains("NaN") && !page.contains("inf"), "{page}");
        assert!(page.contains("Every checked byte was right"));
    }

    #[test]
    fn files_are_written_and_named_after_the_bench() {
        let dir = tempfile::tempdir().unwrap();
        let files = write_report(&dir.path().join("new"), &report()).unwrap();
        assert!(files[0].ends_with("read.md"));
        assert!(files.len() >= 3, "{files:?}");
        assert!(
            files
                .iter()
                .all(|file| file.metadata().unwrap().len() > 100)
        );
        let page = fs::read_to_string(&files[0]).unwrap();
        assert!(page.contains("](read-latency.svg)"));
    }

    #[test]
    fn an_empty_report_is_a_page_without_plots() {
        let mut empty = report();
        empty.rows.clear();
        empty.ok = false;
        let dir = tempfile::tempdir().unwrap();
        let files = write_report(dir.path(), &empty).unwrap();
        assert_eq!(files.len(), 1);
        assert!(
            fs::read_to_string(&files[0])
                .unwrap()
                .contains("Something failed")
        );
    }

    #[test]
    fn one_row_is_enough() {
        let times: Times = [5.0, 6.0, 9.0].into_iter().collect();
        let mut row = timed(blank("one", Who::KvXfer, "engine"), &times);
        row.more.insert("fair".to_owned(), json!(false));
        let one = BenchReport {
            rows: vec![row],
            ..report()
        };
        let page = to_markdown(&one);
        assert!(page.contains("fair **no**"), "{page}");
        assert!(page.contains("| one  | kv-xfer |"), "{page}");
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_told() {
        let error = write_report(Path::new("/proc/nothing"), &report()).unwrap_err();
        assert!(error.to_string().contains("/proc/nothing"), "{error}");
    }

    #[test]
    fn numbers_are_short() {
        let shown: Vec<_> = [0.0, 0.01234, 0.5, 4.567, 45.67, 456.7].map(number).into();
        assert_eq!(shown, ["0", "0.0123", "0.500", "4.57", "45.7", "457"]);
    }
}

//! Bandwidth over block size: a panel for each order of blocks, a line for each participant, and the
//! transport's ceiling.

use std::collections::{BTreeMap, BTreeSet};

use super::canvas::{Canvas, GREY, LINE, PALE, Scale, Side, color, drawable, short};
use super::{PlotError, variant};
use crate::bench::report::who;
use crate::bench::row::{BenchReport, Row, Who};

const PANEL: (i32, i32) = (330, 260);
const LEFT: i32 = 70;
const TOP: i32 = 110;
const GAP: i32 = 60;

/// What a case's name says: `random-16384x8KiB`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadCase {
    /// The order of the blocks.
    pub order: String,
    /// How many.
    pub blocks: u64,
    /// Bytes of each.
    pub block_bytes: u64,
}

impl ReadCase {
    /// Takes a name apart; `None` when it is not of this kind.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let (order, size) = name.rsplit_once('-')?;
        let (blocks, bytes) = size.split_once('x')?;
        let units = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("B", 0)];
        let (number, shift) = units
            .iter()
            .find_map(|(unit, shift)| Some((bytes.strip_suffix(unit)?, shift)))?;
        Some(Self {
            order: order.to_owned(),
            blocks: blocks.parse().ok()?,
            block_bytes: number.parse::<u64>().ok()?.checked_mul(1 << shift)?,
        })
    }
}

fn bytes(bytes: f64) -> String {
    match bytes {
        b if b >= 1_048_576.0 => format!("{} MiB", short(b / 1_048_576.0)),
        b if b >= 1024.0 => format!("{} KiB", short(b / 1024.0)),
        b => format!("{} B", short(b)),
    }
}

type Points = BTreeMap<u64, f64>;

/// A line: who, in which of its settings, and its name.
type Series = (Who, usize, String);

pub(super) fn draw(
    report: &BenchReport,
    title: &str,
    note: &str,
) -> Result<Option<String>, PlotError> {
    // Order of blocks → participant → points.
    let mut panels: BTreeMap<String, BTreeMap<Series, Points>> = BTreeMap::new();
    for row in report.rows.iter().filter(|row| drawable(row.gbps)) {
        let Some(case) = ReadCase::parse(&row.case).filter(|case| case.block_bytes > 0) else {
            continue;
        };
        let lines = panels.entry(case.order).or_default();
        let points = lines.entry(series_of(report, row)).or_default();
        points.insert(case.block_bytes, row.gbps);
    }
    // One size is no curve: the comparison shows it.
    let sizes_of = |lines: &BTreeMap<Series, Points>| -> BTreeSet<u64> {
        lines
            .values()
            .flat_map(|points| points.keys().copied())
            .collect()
    };
    panels.retain(|_, lines| sizes_of(lines).len() > 1);
    let sizes: BTreeSet<u64> = panels.values().flat_map(sizes_of).collect();
    if panels.is_empty() {
        return Ok(None);
    }
    let series: BTreeSet<Series> = panels
        .values()
        .flat_map(|lines| lines.keys().cloned())
        .collect();
    let largest = panels
        .values()
        .flat_map(|lines| lines.values().flat_map(|points| points.values()))
        .fold(0.0, |a: f64, b| a.max(*b));
    let columns = i32::try_from(panels.len().min(2)).unwrap_or(1);
    let rows = i32::try_from(panels.len().div_ceil(2)).unwrap_or(1);
    let legend = 30 + LINE * i32::try_from(series.len()).unwrap_or(0);
    let size = (
        LEFT + columns * (PANEL.0 + GAP),
        TOP + rows * (PANEL.1 + GAP + 20) + legend,
    );
    let mut svg = String::new();
    let canvas = Canvas::new(&mut svg, (size.0.max(760), size.1), title, note)?;
    for ((order, lines), at) in panels.iter().zip(0..) {
        let left = LEFT + at % columns * (PANEL.0 + GAP);
        let top = TOP + at / columns * (PANEL.1 + GAP + 20);
        let x = Scale::log(
            sizes.iter().map(|size| *size as f64),
            (left, left + PANEL.0),
        );
        let y = Scale::linear(largest, (top + PANEL.1, top));
        panel(&canvas, order, (x, y), (left, top), &sizes)?;
        for (who, points) in lines {
            let at = |(size, gbps): (&u64, &f64)| (x.at(*size as f64), y.at(*gbps));
            let path: Vec<_> = points.iter().map(at).collect();
            let color = color(who.0, who.1);
            if who.0 == Who::OneDescriptor {
                canvas.dashed(path, color, 2)?;
            } else {
                canvas.line(path.clone(), color, 2)?;
                for point in path {
                    canvas.dot(point, 4, color)?;
                }
            }
        }
    }
    let top = size.1 - legend + 10;
    for (who, n) in series.iter().zip(0..) {
        let y = top + n * LINE;
        let color = color(who.0, who.1);
        let path = vec![(LEFT, y), (LEFT + 34, y)];
        if who.0 == Who::OneDescriptor {
            canvas.dashed(path, color, 2)?;
        } else {
            canvas.line(path, color, 2)?;
            canvas.dot((LEFT + 17, y), 4, color)?;
        }
        canvas.label((LEFT + 44, y), &who.2, Side::Left)?;
    }
    canvas.finish()?;
    Ok(Some(svg))
}

fn series_of(report: &BenchReport, row: &Row) -> Series {
    let mut name = who(row);
    if row.who == Who::OneDescriptor && row.setting.is_empty() {
        name.push_str(": the ceiling");
    }
    (row.who, variant(report, row), name)
}

fn panel(
    canvas: &Canvas<'_>,
    order: &str,
    (x, y): (Scale, Scale),
    (left, top): (i32, i32),
    sizes: &BTreeSet<u64>,
) -> Result<(), PlotError> {
    canvas.label((left, top - 16), &format!("{order} blocks"), Side::Left)?;
    for tick in y.ticks() {
        let at = y.at(tick);
        canvas.line(vec![(left, at), (left + PANEL.0, at)], PALE, 1)?;
        canvas.note((left - 8, at), &short(tick), Side::Right)?;
    }
    canvas.note((left - 40, top - 16), "GB/s", Side::Left)?;
    let bottom = top + PANEL.1;
    canvas.line(vec![(left, bottom), (left + PANEL.0, bottom)], GREY, 1)?;
    let mut free = i32::MIN;
    for size in sizes {
        let at = x.at(*size as f64);
        canvas.line(vec![(at, bottom), (at, bottom + 4)], GREY, 1)?;
        // Labels that would run into each other are left out.
        if at >= free {
            canvas.note((at, bottom + 14), &bytes(*size as f64), Side::Middle)?;
            free = at + 56;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_cases_are_taken_apart() {
        let case = ReadCase::parse("random-16384x8KiB").unwrap();
        assert_eq!(
            (case.order.as_str(), case.blocks, case.block_bytes),
            ("random", 16384, 8192)
        );
        assert_eq!(ReadCase::parse("a-b-1x2MiB").unwrap().order, "a-b");
        for other in [
            "one-block",
            "random-x8KiB",
            "random-4x",
            "random-4x8kB",
            "",
            "4x8KiB",
        ] {
            assert_eq!(ReadCase::parse(other), None, "{other}");
        }
        assert_eq!(ReadCase::parse("r-1x99999999999999999GiB"), None);
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(
            [64.0, 8192.0, 1_048_576.0].map(bytes),
            ["64 B", "8 KiB", "1 MiB"]
        );
    }
}

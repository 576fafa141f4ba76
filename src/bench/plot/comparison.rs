//! Bars: the median time of every participant, case by case, with the shortest and the longest.

use super::canvas::{Canvas, GREY, LINE, PALE, Scale, Side, color, drawable, time};
use super::{PlotError, variant};
use crate::bench::report::who;
use crate::bench::row::{BenchReport, Row};

const TOP: i32 = 90;
const LEFT: i32 = 320;
const WIDTH: i32 = 480;
const BAR: i32 = 26;
/// Room of a case around its bars: title above, axis below.
const AROUND: i32 = 70;
/// Most cases in one plot.
const MOST: usize = 16;

pub(super) fn draw(
    report: &BenchReport,
    title: &str,
    note: &str,
) -> Result<Option<String>, PlotError> {
    let mut cases: Vec<(&str, Vec<&Row>)> = Vec::new();
    for row in report.rows.iter().filter(|row| drawable(row.median_ms)) {
        match cases.iter_mut().find(|(case, _)| *case == row.case) {
            Some((_, rows)) => rows.push(row),
            None => cases.push((&row.case, vec![row])),
        }
    }
    // Where nobody is compared with anybody, a bar says nothing.
    if cases.iter().any(|(_, rows)| rows.len() > 1) {
        cases.retain(|(_, rows)| rows.len() > 1);
    }
    cases.truncate(MOST);
    if cases.is_empty() {
        return Ok(None);
    }
    let bars: usize = cases.iter().map(|(_, rows)| rows.len()).sum();
    let count = |n: usize| i32::try_from(n).unwrap_or(0);
    let height = TOP + count(bars) * BAR + count(cases.len()) * AROUND;
    let mut svg = String::new();
    let canvas = Canvas::new(&mut svg, (LEFT + WIDTH + 130, height), title, note)?;
    let mut top = TOP;
    for (case, rows) in &cases {
        panel(&canvas, report, (case, rows), top)?;
        top += count(rows.len()) * BAR + AROUND;
    }
    canvas.finish()?;
    Ok(Some(svg))
}

fn panel(
    canvas: &Canvas<'_>,
    report: &BenchReport,
    (case, rows): (&str, &[&Row]),
    top: i32,
) -> Result<(), PlotError> {
    let longest = |row: &&Row| {
        if drawable(row.max_ms) {
            row.max_ms.max(row.median_ms)
        } else {
            row.median_ms
        }
    };
    let x = Scale::linear(
        rows.iter().map(longest).fold(0.0, f64::max),
        (LEFT, LEFT + WIDTH),
    );
    canvas.label((24, top), case, Side::Left)?;
    let first = top + LINE;
    let bottom = first + BAR * i32::try_from(rows.len()).unwrap_or(0);
    for tick in x.ticks() {
        let at = x.at(tick);
        canvas.line(vec![(at, first), (at, bottom)], PALE, 1)?;
        canvas.note((at, bottom + 12), &time(tick * 1e3), Side::Middle)?;
    }
    for (row, n) in rows.iter().zip(0..) {
        let middle = first + n * BAR + BAR / 2;
        let color = color(row.who, variant(report, row));
        let end = x.at(row.median_ms);
        canvas.filled([(LEFT, middle - 8), (end, middle + 8)], color, 0.85)?;
        let mut far = end;
        if drawable(row.min_ms) && drawable(row.max_ms) && row.max_ms > row.min_ms {
            let (from, to) = (x.at(row.min_ms), x.at(row.max_ms));
            canvas.line(vec![(from, middle), (to, middle)], GREY, 1)?;
            for end in [from, to] {
                canvas.line(vec![(end, middle - 4), (end, middle + 4)], GREY, 1)?;
            }
            far = far.max(to);
        }
        canvas.note((LEFT - 12, middle), &who(row), Side::Right)?;
        let median = format!("{:.3}", row.median_ms);
        let median = if row.median_ms < 1.0 {
            format!("{:.1} µs", row.median_ms * 1e3)
        } else {
            format!(
                "{} ms",
                median
                    .get(..median.len().min(5))
                    .unwrap_or("")
                    .trim_end_matches('.')
            )
        };
        canvas.note((far + 8, middle), &median, Side::Left)?;
    }
    canvas.line(vec![(LEFT, first), (LEFT, bottom)], GREY, 1)
}

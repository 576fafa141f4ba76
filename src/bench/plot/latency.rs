//! Distributions of times: for each row the histogram, and on it the percentiles.

use serde_json::Value;

use super::PlotError;
use super::canvas::{Canvas, GREY, LINE, PALE, Scale, Side, color, drawable, time};
use crate::bench::report::{percentile, who};
use crate::bench::row::{BenchReport, Row};

const STRIP: i32 = 54;
const TOP: i32 = 110;
const LEFT: i32 = 400;
const WIDTH: i32 = 560;
/// Most rows in one plot.
const MOST: usize = 24;
/// Samples under which a row has no distribution.
const FEWEST: u32 = 20;
const DOTS: [(&str, &str); 4] = [
    ("p50_us", "50 %"),
    ("p90_us", "90 %"),
    ("p99_us", "99 %"),
    ("p999_us", "99.9 %"),
];

pub(super) fn draw(
    report: &BenchReport,
    title: &str,
    note: &str,
) -> Result<Option<String>, PlotError> {
    let rows: Vec<&Row> = report
        .rows
        .iter()
        .filter(|row| row.rounds >= FEWEST && drawable(percentile(row, "p50_us")))
        .take(MOST)
        .collect();
    if rows.is_empty() {
        return Ok(None);
    }
    let height = STRIP * i32::try_from(rows.len()).unwrap_or(0);
    let bottom = TOP + height;
    let mut svg = String::new();
    let size = (LEFT + WIDTH + 60, bottom + 60);
    let canvas = Canvas::new(&mut svg, size, title, note)?;
    let of = |row: &&Row| DOTS.map(|(name, _)| percentile(row, name));
    let first = |row: &&Row| histogram(row).first().map_or(0.0, |bucket| bucket.0);
    let x = Scale::log(
        rows.iter().flat_map(of).chain(rows.iter().map(first)),
        (LEFT, LEFT + WIDTH),
    );
    for tick in x.ticks() {
        let at = x.at(tick);
        canvas.line(vec![(at, TOP), (at, bottom)], PALE, 1)?;
        canvas.note((at, bottom + 14), &time(tick), Side::Middle)?;
    }
    canvas.line(vec![(LEFT, bottom), (LEFT + WIDTH, bottom)], GREY, 1)?;
    let legend =
        "Each dot: the time that 50, 90, 99 and 99.9 % of the reads do not exceed. Logarithmic.";
    canvas.note((LEFT, TOP - 24), legend, Side::Left)?;
    for (row, n) in rows.iter().zip(0..) {
        let base = TOP + (n + 1) * STRIP - 12;
        let color = color(row.who, 0);
        let counts = histogram(row);
        let most = counts.iter().fold(0.0, |a: f64, b| a.max(b.1));
        for (end, count) in counts {
            // Buckets are a fourth of a doubling wide.
            let (from, to) = (x.at(end / 2_f64.powf(0.25)), x.at(end));
            let tall = (count / most * f64::from(STRIP - 22)).round() as i32;
            if to > from {
                canvas.filled([(from, base - tall), (to, base)], color, 0.25)?;
            }
        }
        let points: Vec<_> = DOTS
            .iter()
            .map(|(name, _)| percentile(row, name))
            .filter(|time| drawable(*time))
            .map(|time| (x.at(time), base))
            .collect();
        canvas.line(points.clone(), color, 2)?;
        for point in points {
            canvas.dot(point, 4, color)?;
        }
        canvas.label((LEFT - 14, base - LINE + 2), &row.case, Side::Right)?;
        canvas.note((LEFT - 14, base), &who(row), Side::Right)?;
        let p99 = percentile(row, "p99_us");
        if drawable(p99) {
            let at = x.at(p99);
            canvas.note((at, base - 13), &time(p99.round()), Side::Middle)?;
        }
    }
    canvas.finish()?;
    Ok(Some(svg))
}

/// Ends of buckets and counts; what is malformed is left out.
fn histogram(row: &Row) -> Vec<(f64, f64)> {
    let buckets = row.more.get("histogram").and_then(Value::as_array);
    let pair = |bucket: &Value| {
        let end = bucket.get(0)?.as_f64()?;
        let count = bucket.get(1)?.as_f64()?;
        (drawable(end) && drawable(count)).then_some((end, count))
    };
    buckets.into_iter().flatten().filter_map(pair).collect()
}

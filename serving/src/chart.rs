//! Lines over a common axis, as SVG.

use kvx::bench::plot::PlotError;
use kvx::bench::plot::canvas::{Canvas, GREY, LINE, PALE, Scale, Side, drawable, short};
use plotters::style::RGBColor;

const SIZE: (i32, i32) = (860, 480);
const LEFT: i32 = 80;
const RIGHT: i32 = 620;
const TOP: i32 = 90;
/// Points beyond this many are not marked: their marks would hide the line.
const MOST_MARKS: usize = 40;
const BOTTOM: i32 = 410;
/// Okabe and Ito's colours, which stay apart for colour-blind readers.
const COLORS: [RGBColor; 6] = [
    RGBColor(213, 94, 0),
    RGBColor(0, 114, 178),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(190, 140, 0),
    RGBColor(130, 130, 130),
];

/// One line.
#[derive(Debug, Clone)]
pub struct Series {
    /// What it is called in the legend.
    pub name: String,
    /// Its points, by rising first number.
    pub points: Vec<(f64, f64)>,
}

/// Draws lines with their names at their ends; both axes begin at zero.
///
/// # Errors
/// [`PlotError`].
pub fn lines(
    title: &str,
    note: &str,
    (x_unit, y_unit): (&str, &str),
    series: &[Series],
) -> Result<String, PlotError> {
    let mut svg = String::new();
    let canvas = Canvas::new(&mut svg, SIZE, title, note)?;
    let points = || series.iter().flat_map(|one| one.points.iter());
    let largest = |of: fn(&(f64, f64)) -> f64| {
        points()
            .map(of)
            .filter(|number| drawable(*number))
            .fold(0.0, f64::max)
    };
    let x = Scale::linear(largest(|point| point.0), (LEFT, RIGHT));
    let y = Scale::linear(largest(|point| point.1), (BOTTOM, TOP));
    for tick in y.ticks() {
        let at = y.at(tick);
        canvas.line(vec![(LEFT, at), (RIGHT, at)], PALE, 1)?;
        canvas.note((LEFT - 8, at), &short(tick), Side::Right)?;
    }
    for tick in x.ticks() {
        canvas.note((x.at(tick), BOTTOM + 16), &short(tick), Side::Middle)?;
    }
    canvas.line(vec![(LEFT, BOTTOM), (RIGHT, BOTTOM)], GREY, 1)?;
    canvas.note(((LEFT + RIGHT) / 2, BOTTOM + 40), x_unit, Side::Middle)?;
    canvas.note((LEFT - 8, TOP - 16), y_unit, Side::Right)?;
    // Names that would lie on each other are moved apart, from below.
    let mut names: Vec<(i32, usize)> = series
        .iter()
        .enumerate()
        .filter_map(|(n, one)| Some((y.at(one.points.last()?.1), n)))
        .collect();
    names.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
    let mut free = BOTTOM + LINE;
    for (at, n) in names {
        let Some(one) = series.get(n) else { continue };
        let color = COLORS.get(n % COLORS.len()).copied().unwrap_or(GREY);
        let line: Vec<(i32, i32)> = one
            .points
            .iter()
            .map(|(a, b)| (x.at(*a), y.at(*b)))
            .collect();
        canvas.line(line.clone(), color, 2)?;
        if line.len() <= MOST_MARKS {
            for point in line {
                canvas.dot(point, 4, color)?;
            }
        }
        let at = at.min(free - LINE);
        free = at;
        canvas.text((RIGHT + 12, at), &one.name, 14, color, Side::Left)?;
    }
    canvas.finish()?;
    Ok(svg)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_line_has_its_name_and_nothing_breaks_on_odd_numbers() {
        let series = |name: &str, points: &[(f64, f64)]| Series {
            name: name.into(),
            points: points.to_vec(),
        };
        let svg = lines(
            "T",
            "n",
            ("x", "y"),
            &[
                series("first", &[(1.0, 2.0), (3.0, 4.0)]),
                series("second", &[(1.0, f64::NAN), (f64::INFINITY, 4.0)]),
                series("empty", &[]),
            ],
        )
        .unwrap();
        assert!(svg.contains("first") && svg.contains("second"));
        assert!(lines("T", "n", ("x", "y"), &[]).is_ok());
    }
}

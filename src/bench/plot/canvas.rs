//! What all plots are drawn with: text, marks, scales and colours.

use plotters::coord::Shift;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::PlotError;
use crate::bench::row::Who;

/// Height of a line of text, pixels.
pub const LINE: i32 = 20;
/// What recedes: axes, grids, notes.
pub const GREY: RGBColor = RGBColor(110, 110, 110);
/// Lines behind the data.
pub const PALE: RGBColor = RGBColor(225, 225, 225);
const INK: RGBColor = RGBColor(30, 30, 30);

/// Where text stands in relation to its point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Begins there.
    Left,
    /// Is centred on it.
    Middle,
    /// Ends there.
    Right,
}

/// A drawing in progress.
pub struct Canvas<'a> {
    area: DrawingArea<SVGBackend<'a>, Shift>,
}

fn broken(error: impl std::fmt::Display) -> PlotError {
    PlotError(error.to_string())
}

impl<'a> Canvas<'a> {
    /// An empty drawing with its title and, below it, a note.
    pub fn new(
        svg: &'a mut String,
        (width, height): (i32, i32),
        title: &str,
        note: &str,
    ) -> Result<Self, PlotError> {
        let size = (width.unsigned_abs(), height.unsigned_abs());
        let area = SVGBackend::with_string(svg, size).into_drawing_area();
        area.fill(&WHITE).map_err(broken)?;
        let canvas = Self { area };
        canvas.text((24, 26), title, 20, INK, Side::Left)?;
        canvas.text((24, 50), note, 13, GREY, Side::Left)?;
        Ok(canvas)
    }

    /// Ends the drawing.
    pub fn finish(self) -> Result<(), PlotError> {
        self.area.present().map_err(broken)
    }

    /// Text whose middle line is at `y`.
    pub fn text(
        &self,
        at: (i32, i32),
        text: &str,
        size: i32,
        color: RGBColor,
        side: Side,
    ) -> Result<(), PlotError> {
        let h = match side {
            Side::Left => HPos::Left,
            Side::Middle => HPos::Center,
            Side::Right => HPos::Right,
        };
        let style = TextStyle::from(("sans-serif", size).into_font())
            .color(&color)
            .pos(Pos::new(h, VPos::Center));
        self.area.draw_text(text, &style, at).map_err(broken)
    }

    /// Ordinary text.
    pub fn label(&self, at: (i32, i32), text: &str, side: Side) -> Result<(), PlotError> {
        self.text(at, text, 14, INK, side)
    }

    /// A note: smaller and paler.
    pub fn note(&self, at: (i32, i32), text: &str, side: Side) -> Result<(), PlotError> {
        self.text(at, text, 12, GREY, side)
    }

    /// A line through points.
    pub fn line(
        &self,
        points: Vec<(i32, i32)>,
        color: RGBColor,
        width: u32,
    ) -> Result<(), PlotError> {
        let style = ShapeStyle::from(&color).stroke_width(width);
        let element = PathElement::new(points, style);
        self.area.draw(&element).map_err(broken)
    }

    /// A line of dashes through points.
    pub fn dashed(
        &self,
        points: Vec<(i32, i32)>,
        color: RGBColor,
        width: u32,
    ) -> Result<(), PlotError> {
        let style = ShapeStyle::from(&color).stroke_width(width);
        let element = DashedPathElement::new(points, 7, 4, style);
        self.area.draw(&element).map_err(broken)
    }

    /// A filled box; `strength` from 0, nothing, to 1.
    pub fn filled(
        &self,
        corners: [(i32, i32); 2],
        color: RGBColor,
        strength: f64,
    ) -> Result<(), PlotError> {
        let style = color.mix(strength).filled();
        self.area
            .draw(&Rectangle::new(corners, style))
            .map_err(broken)
    }

    /// A dot with a white rim.
    pub fn dot(&self, at: (i32, i32), radius: i32, color: RGBColor) -> Result<(), PlotError> {
        let rim = Circle::new(at, radius + 1, WHITE.filled());
        self.area.draw(&rim).map_err(broken)?;
        self.area
            .draw(&Circle::new(at, radius, color.filled()))
            .map_err(broken)
    }
}

/// Okabe and Ito's colours, which stay apart for colour-blind readers; a second setting of one
/// participant is paler.
pub fn color(who: Who, variant: usize) -> RGBColor {
    let base = match who {
        Who::KvXfer => RGBColor(0, 114, 178),
        Who::NixlPython => RGBColor(213, 94, 0),
        Who::NixlSys => RGBColor(204, 121, 167),
        Who::Mooncake => RGBColor(0, 158, 115),
        Who::Memcpy => RGBColor(130, 130, 130),
        Who::ProcessVmReadv => RGBColor(190, 140, 0),
        Who::OneDescriptor => RGBColor(20, 20, 20),
    };
    let paler = |part: u8| {
        let steps = u16::try_from(variant.min(3)).unwrap_or(3);
        let left = u16::from(u8::MAX - part);
        part.saturating_add(u8::try_from(left * steps / 5).unwrap_or(0))
    };
    RGBColor(paler(base.0), paler(base.1), paler(base.2))
}

/// From numbers to pixels.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    from: f64,
    to: f64,
    pixels: (i32, i32),
    logarithmic: bool,
}

/// A number that can be drawn.
pub fn drawable(number: f64) -> bool {
    number.is_finite() && number > 0.0 && number < 1e15
}

impl Scale {
    /// From zero to a little above the largest.
    pub fn linear(largest: f64, pixels: (i32, i32)) -> Self {
        let to = if drawable(largest) {
            largest * 1.06
        } else {
            1.0
        };
        Self {
            from: 0.0,
            to,
            pixels,
            logarithmic: false,
        }
    }

    /// Over all of these numbers, with some room.
    pub fn log(numbers: impl Iterator<Item = f64>, pixels: (i32, i32)) -> Self {
        let (from, to) = numbers
            .filter(|number| drawable(*number))
            .fold((f64::MAX, f64::MIN), |(a, b), n| (a.min(n), b.max(n)));
        let (from, to) = if from <= to { (from, to) } else { (1.0, 10.0) };
        Self {
            from: from / 1.3,
            to: to * 1.3,
            pixels,
            logarithmic: true,
        }
    }

    /// Where a number lies; at the end of the scale when it is outside.
    pub fn at(&self, number: f64) -> i32 {
        let map = |n: f64| {
            if self.logarithmic {
                n.max(1e-12).ln()
            } else {
                n
            }
        };
        let (from, to) = (map(self.from), map(self.to));
        let share = ((map(number) - from) / (to - from)).clamp(0.0, 1.0);
        let share = if share.is_finite() { share } else { 0.0 };
        let length = f64::from(self.pixels.1 - self.pixels.0);
        self.pixels.0 + (share * length).round() as i32
    }

    /// Round numbers along it.
    pub fn ticks(&self) -> Vec<f64> {
        let mut ticks = Vec::new();
        if self.logarithmic {
            let decades = self.to.log10() - self.from.log10();
            let steps: &[f64] = if decades > 3.0 {
                &[1.0]
            } else {
                &[1.0, 2.0, 5.0]
            };
            for power in self.from.log10().floor() as i32..=self.to.log10().ceil() as i32 {
                ticks.extend(steps.iter().map(|step| step * 10_f64.powi(power)));
            }
        } else {
            let rough = self.to / 5.0;
            let power = 10_f64.powf(rough.log10().floor());
            let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power);
            let step = step
                .into_iter()
                .find(|step| *step >= rough)
                .unwrap_or(rough);
            ticks.extend((0..=6).map(|n| f64::from(n) * step));
        }
        ticks.retain(|tick| *tick >= self.from && *tick <= self.to);
        ticks
    }
}

/// A tick's number, short.
pub fn short(number: f64) -> String {
    if number >= 1.0 || number == 0.0 {
        let text = format!("{number:.1}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        format!("{number:.3}").trim_end_matches('0').to_owned()
    }
}

/// A time in microseconds, in its best unit.
pub fn time(us: f64) -> String {
    match us {
        us if us >= 1e6 => format!("{} s", short(us / 1e6)),
        us if us >= 1e3 => format!("{} ms", short(us / 1e3)),
        us => format!("{} µs", short(us)),
    }
}

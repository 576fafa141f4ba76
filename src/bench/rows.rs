//! Rows as the latency and the scale bench make them.

use serde_json::{Map, Value};

use super::row::{Row, Who};
use super::stats::{Times, rounded};

/// A row of nothing yet.
#[must_use]
pub fn blank(case: impl Into<String>, who: Who, setting: impl Into<String>) -> Row {
    Row {
        case: case.into(),
        who,
        setting: setting.into(),
        transport: "ucx".to_owned(),
        rounds: 0,
        median_ms: 0.0,
        min_ms: 0.0,
        max_ms: 0.0,
        submit_us: 0.0,
        submit_max_us: 0.0,
        first_layer_ms: None,
        cpu_s_per_gib: 0.0,
        descriptors: 0,
        bytes: 0,
        gbps: 0.0,
        verified: false,
        more: Map::new(),
    }
}

/// Puts times into a row: median and ends, percentiles, histogram and, where the bytes are known,
/// the rate.
#[must_use]
pub fn timed(mut row: Row, times: &Times) -> Row {
    row.rounds = u32::try_from(times.len()).unwrap_or(u32::MAX);
    row.median_ms = times.median() / 1e3;
    row.min_ms = times.min() / 1e3;
    row.max_ms = times.max() / 1e3;
    if times.median() > 0.0 {
        row.gbps = row.bytes as f64 / times.median() / 1e3;
    }
    times.percentiles_into("", &mut row.more);
    row.more.insert("histogram".to_owned(), times.histogram());
    row
}

/// Adds a number to what a row has to tell.
pub fn tell(row: &mut Row, name: &str, number: f64) {
    row.more.insert(name.to_owned(), rounded(number));
}

/// Adds whether a property holds.
pub fn hold(row: &mut Row, name: &str, holds: bool) {
    row.more.insert(name.to_owned(), Value::Bool(holds));
}

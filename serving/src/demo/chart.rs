//! The plot: time to first token by context length, with and without the transfer.

use kvx::bench::plot::PlotError;

use super::report::TurnReport;
use crate::chart::{Series, lines};

/// Draws it.
pub(super) fn ttft(turns: &[TurnReport], under: &str) -> Result<String, PlotError> {
    let series = |name: &str, of: fn(&TurnReport) -> f64| Series {
        name: name.to_owned(),
        points: turns
            .iter()
            .map(|turn| (turn.prompt_tokens as f64, of(turn)))
            .collect(),
    };
    lines(
        "Time to first token by length of the prompt",
        under,
        ("tokens of the prompt", "ms"),
        &[
            series("everything computed again", |turn| turn.ttft_off_ms),
            series("decode node's blocks read", |turn| turn.ttft_on_ms),
            series("of that, the transfer", |turn| turn.transfer_ms),
        ],
    )
}

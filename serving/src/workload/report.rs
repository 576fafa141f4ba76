//! What a load showed: percentiles by group, off and on, and the blocks that were kept over time.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};
use kvx::bench::plot::PlotError;
use kvx::bench::stats::Times;
use serde::Serialize;

use super::hold::Sample;
use crate::chart::{Series, lines};

/// A line under the header and one under the last row.
const STYLE: TableStyle = TableStyle::new()
    .header_separator(LineStyle::none().fill('─').junction('─'))
    .bottom_border(LineStyle::none().fill('─').junction('─'));

/// Whether decode nodes offered their blocks to the next turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// They did not.
    Off,
    /// They did.
    On,
}

/// The turns of one group in one mode.
#[derive(Debug, Clone, Serialize)]
pub struct Group {
    /// The group: tokens of the first question, or `≤` the most tokens of its prompts.
    pub group: String,
    /// Off or on.
    pub mode: Mode,
    /// `first` turns, or `later` ones.
    pub turns: &'static str,
    /// How many turns.
    pub requests: usize,
    /// Turns without an answer.
    pub failed: usize,
    /// Prompt tokens, median.
    pub prompt_tokens: u64,
    /// Time to first token, ms, median.
    pub ttft_p50_ms: f64,
    /// The same, 90th percentile.
    pub ttft_p90_ms: f64,
    /// The same, 99th percentile.
    pub ttft_p99_ms: f64,
    /// Share of the turns whose blocks the router knew.
    pub hit_rate: f64,
    /// Tokens that prefill nodes read from decode nodes.
    pub read_tokens: u64,
    /// Bytes of those tokens' KV.
    pub read_bytes: u64,
    /// Tokens that prefill nodes computed.
    pub computed_tokens: u64,
    /// Time of a read, ms, median of those that were made.
    pub transfer_p50_ms: f64,
}

/// How many blocks decode nodes kept for next turns at a moment.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Pinned {
    /// Off or on.
    pub mode: Mode,
    /// Since the load's begin, seconds.
    pub seconds: f64,
    /// Blocks under leases.
    pub blocks: u64,
}

/// The outcome of a load, off and on.
#[derive(Debug, Clone, Serialize)]
pub struct LoadReport {
    /// Every turn had an answer, the same off and on, and no block leaked.
    pub ok: bool,
    /// What was wrong.
    pub problems: Vec<String>,
    /// The model.
    pub model: String,
    /// Processor and cores.
    pub machine: String,
    /// Percentiles.
    pub rows: Vec<Group>,
    /// Blocks under leases of decode nodes while the load was held.
    pub pinned: Vec<Pinned>,
    /// Time that the load took off and on, seconds.
    pub seconds: [f64; 2],
    /// Every answer was the same off and on.
    pub texts_equal: bool,
    /// Blocks that were not given back.
    pub leaked_blocks: u64,
}

/// The group of a sample: its conversation's, or that of its prompt's length, by powers of two.
fn group_of(sample: &Sample) -> String {
    /// Shorter prompts are one group.
    const SHORT: u64 = 256;
    let by_length = || match &sample.answer {
        Ok(answer) => {
            let most = answer.prompt_tokens.checked_next_power_of_two();
            format!("≤{}", most.unwrap_or(u64::MAX).max(SHORT))
        }
        Err(_) => "no answer".to_owned(),
    };
    sample.group.clone().unwrap_or_else(by_length)
}

/// How many turns that were answered both times have other texts.
pub(super) fn different_texts(off: &[Sample], on: &[Sample]) -> usize {
    let texts: BTreeMap<(usize, usize), &str> = off
        .iter()
        .filter_map(|one| {
            Some((
                (one.talk, one.turn),
                one.answer.as_ref().ok()?.text.as_str(),
            ))
        })
        .collect();
    on.iter()
        .filter(|one| {
            let (before, now) = (texts.get(&(one.talk, one.turn)), one.answer.as_ref().ok());
            before.is_some_and(|before| now.is_some_and(|now| now.text != *before))
        })
        .count()
}

/// Puts samples into groups, first turns apart from later ones.
pub(super) fn groups(mode: Mode, samples: &[Sample], bytes_per_token: u64) -> Vec<Group> {
    let mut by: BTreeMap<(String, bool), Vec<&Sample>> = BTreeMap::new();
    for sample in samples {
        let key = (group_of(sample), sample.turn > 0);
        by.entry(key).or_default().push(sample);
    }
    by.into_iter()
        .map(|((group, later), samples)| {
            let answers = || {
                samples
                    .iter()
                    .filter_map(|sample| sample.answer.as_ref().ok())
            };
            let ttft: Times = answers().map(|answer| answer.ttft).collect();
            let prompt: Times = answers()
                .map(|answer| answer.prompt_tokens as f64)
                .collect();
            let sum = |name| samples.iter().map(|sample| sample.count(name)).sum::<u64>();
            let read_tokens = sum("/prefill/read_tokens");
            let transfers: Times = answers()
                .filter_map(|answer| answer.report.pointer("/prefill/transfer_ms")?.as_f64())
                .filter(|ms| *ms > 0.0)
                .collect();
            let hits = samples.iter().filter(|sample| sample.hit()).count();
            Group {
                group,
                mode,
                turns: if later { "later" } else { "first" },
                requests: samples.len(),
                failed: samples.len() - ttft.len(),
                prompt_tokens: prompt.median() as u64,
                ttft_p50_ms: ttft.median() / 1e3,
                ttft_p90_ms: ttft.quantile(0.9) / 1e3,
                ttft_p99_ms: ttft.quantile(0.99) / 1e3,
                hit_rate: hits as f64 / samples.len().max(1) as f64,
                read_tokens,
                read_bytes: read_tokens.saturating_mul(bytes_per_token),
                computed_tokens: sum("/prefill/computed_tokens"),
                transfer_p50_ms: transfers.median(),
            }
        })
        .collect()
}

impl LoadReport {
    /// Rows in the order in which people compare them.
    pub(super) fn sort(&mut self) {
        self.rows.sort_by(|a, b| {
            (a.prompt_tokens_of_group(), &a.group, a.turns, a.mode).cmp(&(
                b.prompt_tokens_of_group(),
                &b.group,
                b.turns,
                b.mode,
            ))
        });
    }

    /// For people.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut table = Table::new();
        table.load_style(STYLE);
        table.set_header([
            "group",
            "turns",
            "transfer",
            "requests",
            "prompt",
            "TTFT p50 ms",
            "p90",
            "p99",
            "hits",
            "read",
            "MiB",
            "read ms",
            "computed",
        ]);
        for row in &self.rows {
            table.add_row([
                row.group.clone(),
                row.turns.to_owned(),
                format!("{:?}", row.mode).to_lowercase(),
                row.requests.to_string(),
                row.prompt_tokens.to_string(),
                format!("{:.0}", row.ttft_p50_ms),
                format!("{:.0}", row.ttft_p90_ms),
                format!("{:.0}", row.ttft_p99_ms),
                format!("{:.0} %", row.hit_rate * 100.0),
                row.read_tokens.to_string(),
                format!("{:.1}", row.read_bytes as f64 / f64::from(1 << 20)),
                format!("{:.1}", row.transfer_p50_ms),
                row.computed_tokens.to_string(),
            ]);
        }
        for column in 3..13 {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        let most = self.pinned.iter().map(|one| one.blocks).max().unwrap_or(0);
        let mut text = format!("{table}\n\n{} on {}.\n", self.model, self.machine);
        let [off, on] = self.seconds;
        let _ = writeln!(
            text,
            "The load took {off:.0} s off and {on:.0} s on; decode nodes kept up to {most} blocks for next turns; \
             {} blocks leaked.",
            self.leaked_blocks
        );
        if self.texts_equal {
            text.push_str("Every answer was the same, off and on.\n");
        }
        for problem in &self.problems {
            let _ = writeln!(text, "PROBLEM: {problem}");
        }
        text
    }

    /// The plots: file name and drawing.
    pub(super) fn plots(&self) -> Result<Vec<(&'static str, String)>, PlotError> {
        let under = format!("{}; {}", self.model, self.machine);
        let series = |mode: Mode, name: &str, of: fn(&Group) -> f64| {
            let rows = self.rows.iter();
            let mut points: Vec<(f64, f64)> = rows
                .filter(|row| row.mode == mode && row.turns == "later" && row.requests > row.failed)
                .map(|row| (row.prompt_tokens as f64, of(row)))
                .collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            Series {
                name: name.to_owned(),
                points,
            }
        };
        let ttft = lines(
            "Time to first token of later turns",
            &under,
            ("tokens of the prompt, median", "ms"),
            &[
                series(Mode::Off, "computed again, p50", |row| row.ttft_p50_ms),
                series(Mode::On, "blocks read, p50", |row| row.ttft_p50_ms),
                series(Mode::Off, "computed again, p99", |row| row.ttft_p99_ms),
                series(Mode::On, "blocks read, p99", |row| row.ttft_p99_ms),
            ],
        )?;
        let kept_in = |mode: Mode, name: &str| Series {
            name: name.to_owned(),
            points: self
                .pinned
                .iter()
                .filter(|one| one.mode == mode)
                .map(|one| (one.seconds, one.blocks as f64))
                .collect(),
        };
        let kept = lines(
            "Blocks that decode nodes keep for next turns",
            &under,
            ("seconds", "blocks"),
            &[
                kept_in(Mode::On, "transfer on"),
                kept_in(Mode::Off, "transfer off"),
            ],
        )?;
        Ok(vec![("load-ttft.svg", ttft), ("load-pinned.svg", kept)])
    }
}

impl Group {
    /// A group's length, if its name is a number of tokens.
    fn prompt_tokens_of_group(&self) -> u64 {
        self.group.trim_start_matches('≤').parse().unwrap_or(0)
    }
}

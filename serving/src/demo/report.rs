//! What the demo tells: one JSON object for programs, tables and a sentence for people.

use std::fmt::Write as _;

use comfy_table::{CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};
use serde::Serialize;

/// Columns of a terminal that the tables fit into.
const WIDTH: u16 = 118;
/// A line under the header and one under the last row.
const STYLE: TableStyle = TableStyle::new()
    .header_separator(LineStyle::none().fill('─').junction('─'))
    .bottom_border(LineStyle::none().fill('─').junction('─'));
/// Tokens of history from which the ratio of the times is judged.
pub const LONG_HISTORY: u64 = 4096;

/// Why an answer is computed instead of read, in the words of decisions.
const BELOW_THRESHOLD: &str = "below_threshold";
/// Why there is nothing to read: fewer tokens than a block are missing.
const COVERED: &str = "local_hit_covers";
/// The nodes' `--kv-recompute-threshold`.
const THRESHOLD: u64 = 64;

/// One turn, in the pass with the transfer and in the one without.
#[derive(Debug, Clone, Serialize)]
pub struct TurnReport {
    /// Number of the turn, from 1.
    pub turn: u32,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens that no earlier turn had.
    pub new_tokens: u64,
    /// Time to first token without the transfer, ms.
    pub ttft_off_ms: f64,
    /// Time to first token with it, ms.
    pub ttft_on_ms: f64,
    /// Tokens that the prefill node read from the decode node.
    pub read_tokens: u64,
    /// Tokens that it had itself.
    pub local_tokens: u64,
    /// Tokens that it computed.
    pub computed_tokens: u64,
    /// Tokens that it computed without the transfer.
    pub computed_off_tokens: u64,
    /// Time of that read, ms.
    pub transfer_ms: f64,
    /// `read`, `recompute`, `nothing` or `none`.
    pub decision: String,
    /// Why.
    pub reason: String,
    /// The router knew the conversation's blocks.
    pub hit: bool,
    /// The answer with the transfer.
    pub text_on: String,
    /// The answer without it.
    pub text_off: String,
}

/// One conversation, off and on.
#[derive(Debug, Clone, Serialize)]
pub struct PassReport {
    /// Whether the prefill node's own prefix cache was cleared between turns.
    pub prefix_cache_cleared: bool,
    /// Its turns.
    pub turns: Vec<TurnReport>,
    /// Every answer is the same with and without the transfer.
    pub texts_equal: bool,
    /// Share of the turns after the first whose blocks the router knew.
    pub hit_rate: f64,
}

impl PassReport {
    /// Puts the turns of one conversation together.
    #[must_use]
    pub fn new(prefix_cache_cleared: bool, turns: Vec<TurnReport>) -> Self {
        let later = turns.iter().skip(1);
        let hits = later.clone().filter(|turn| turn.hit).count();
        Self {
            prefix_cache_cleared,
            texts_equal: turns.iter().all(|turn| turn.text_on == turn.text_off),
            hit_rate: hits as f64 / (later.count().max(1)) as f64,
            turns,
        }
    }
}

/// The outcome of the demo.
#[derive(Debug, Clone, Serialize)]
pub struct DemoReport {
    /// Everything was as it must be.
    pub ok: bool,
    /// What was wrong, one sentence each.
    pub problems: Vec<String>,
    /// The model.
    pub model: String,
    /// What carried the bytes, such as `Carried by NIXL 1.5.1 / UCX`.
    pub carried_by: String,
    /// Processor and cores.
    pub machine: String,
    /// Turns with the prefill node's prefix cache cleared in between.
    pub turns: Vec<TurnReport>,
    /// Every answer is the same with and without the transfer, in all passes.
    pub texts_equal: bool,
    /// Share of the turns after the first whose blocks the router knew.
    pub hit_rate: f64,
    /// Time to first token with the transfer as a share of that without, at 4,096 tokens of history and
    /// more: the largest. Null when no turn was that long.
    pub ttft_ratio_long: Option<f64>,
    /// Time of the transfer as a share of the time to first token, in those turns: the largest.
    pub transfer_share_long: Option<f64>,
    /// Blocks that were still in use, claimed or in quarantine at the end; 0 when all is well.
    pub leaked_blocks: u64,
    /// The other passes.
    pub more: Vec<PassReport>,
}

impl DemoReport {
    /// Judges the passes, of which the first was with the cache cleared.
    #[must_use]
    pub fn judge(passes: Vec<PassReport>, leaked_blocks: u64, block_tokens: u64) -> Self {
        let mut problems = Vec::new();
        for pass in &passes {
            let name = name(pass);
            for turn in &pass.turns {
                let number = turn.turn;
                if turn.text_on != turn.text_off {
                    problems.push(format!("{name}, turn {number}: the texts differ"));
                }
                if number > 1 && !turn.hit {
                    problems.push(format!(
                        "{name}, turn {number}: the router did not know the blocks"
                    ));
                }
                // An answer too short to be worth reading is computed, too, where the rest is at hand.
                let short = if turn.reason == BELOW_THRESHOLD {
                    THRESHOLD
                } else if turn.reason == COVERED {
                    block_tokens
                } else {
                    0
                };
                let most = turn.new_tokens + block_tokens + short;
                if number > 1 && turn.computed_tokens > most {
                    problems.push(format!(
                        "{name}, turn {number}: {} tokens computed for {} new ones",
                        turn.computed_tokens, turn.new_tokens
                    ));
                }
            }
        }
        if leaked_blocks > 0 {
            problems.push(format!("{leaked_blocks} blocks were not given back"));
        }
        let texts_equal = passes.iter().all(|pass| pass.texts_equal);
        let mut passes = passes.into_iter();
        let first = passes.next();
        let hit_rate = first.as_ref().map_or(0.0, |pass| pass.hit_rate);
        let turns = first.map_or_else(Vec::new, |pass| pass.turns);
        let long = || {
            turns
                .iter()
                .filter(|turn| turn.prompt_tokens - turn.new_tokens >= LONG_HISTORY)
        };
        let largest = |of: &dyn Fn(&TurnReport) -> f64| long().map(of).reduce(f64::max);
        Self {
            ok: problems.is_empty(),
            ttft_ratio_long: largest(&|turn| turn.ttft_on_ms / turn.ttft_off_ms),
            transfer_share_long: largest(&|turn| turn.transfer_ms / turn.ttft_on_ms),
            problems,
            model: String::new(),
            carried_by: String::new(),
            machine: String::new(),
            texts_equal,
            hit_rate,
            leaked_blocks,
            more: passes.collect(),
            turns,
        }
    }

    /// For people.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        let _ = writeln!(
            text,
            "The prefill node's own prefix cache is cleared between turns:\n{}",
            table(&self.turns)
        );
        for pass in &self.more {
            let _ = writeln!(text, "It is kept:\n{}", table(&pass.turns));
        }
        let _ = writeln!(text, "The answers, with the transfer and without:");
        for turn in &self.turns {
            let (on, off) = (shorten(&turn.text_on), shorten(&turn.text_off));
            if turn.text_on == turn.text_off {
                let _ = writeln!(text, "  {:>2} both: {on}", turn.turn);
            } else {
                let _ = writeln!(text, "  {:>2} on:   {on}\n     off:  {off}", turn.turn);
            }
        }
        let _ = writeln!(
            text,
            "\n{} on {}. {}.",
            self.model, self.machine, self.carried_by
        );
        if let (Some(ratio), Some(share)) = (self.ttft_ratio_long, self.transfer_share_long) {
            let _ = writeln!(
                text,
                "What you learn: from {LONG_HISTORY} tokens of history on, time to first token with the transfer is \
                 at most {ratio:.2} of that without;\nthe transfer itself is at most {:.1} % of it.",
                share * 100.0
            );
        }
        let _ = writeln!(
            text,
            "Texts {}; {:.0} % of the turns after the first were hits; {} blocks leaked.",
            if self.texts_equal {
                "are equal"
            } else {
                "DIFFER"
            },
            self.hit_rate * 100.0,
            self.leaked_blocks
        );
        for problem in &self.problems {
            let _ = writeln!(text, "PROBLEM: {problem}");
        }
        text
    }
}

fn name(pass: &PassReport) -> &'static str {
    if pass.prefix_cache_cleared {
        "prefix cache cleared"
    } else {
        "prefix cache kept"
    }
}

fn shorten(text: &str) -> String {
    const MOST: usize = 96;
    let line: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.chars().count() <= MOST {
        return line;
    }
    line.chars().take(MOST).chain(['…']).collect()
}

fn table(turns: &[TurnReport]) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE).set_width(WIDTH);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header([
        "turn",
        "prompt",
        "TTFT off ms",
        "on ms",
        "on/off",
        "had",
        "read",
        "ms",
        "computed",
        "off",
        "decision: reason",
    ]);
    for turn in turns {
        let decision = if turn.decision == "none" {
            "first turn".to_owned()
        } else {
            format!("{}: {}", turn.decision, turn.reason)
        };
        table.add_row([
            turn.turn.to_string(),
            turn.prompt_tokens.to_string(),
            format!("{:.0}", turn.ttft_off_ms),
            format!("{:.0}", turn.ttft_on_ms),
            format!("{:.2}", turn.ttft_on_ms / turn.ttft_off_ms),
            turn.local_tokens.to_string(),
            turn.read_tokens.to_string(),
            format!("{:.1}", turn.transfer_ms),
            turn.computed_tokens.to_string(),
            turn.computed_off_tokens.to_string(),
            decision,
        ]);
    }
    for column in 0..10 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// A turn of which all is well.
    pub(in crate::demo) fn turn(number: u32) -> TurnReport {
        let prompt = u64::from(number) * 500;
        TurnReport {
            turn: number,
            prompt_tokens: prompt,
            new_tokens: 450,
            ttft_off_ms: prompt as f64 * 4.0,
            ttft_on_ms: 1800.0,
            read_tokens: prompt.saturating_sub(460),
            local_tokens: 0,
            computed_tokens: 460,
            computed_off_tokens: prompt,
            transfer_ms: 12.0,
            decision: "read".into(),
            reason: "worth_reading".into(),
            hit: number > 1,
            text_on: "Yes.".into(),
            text_off: "Yes.".into(),
        }
    }

    #[test]
    fn a_good_run_is_judged_good() {
        let pass = PassReport::new(true, (1..=10).map(turn).collect());
        let report = DemoReport::judge(vec![pass], 0, 16);
        assert!(report.ok, "{:?}", report.problems);
        assert!(report.texts_equal);
        assert!((report.hit_rate - 1.0).abs() < 1e-9);
        // Turn 10 alone has that much history.
        assert!((report.ttft_ratio_long.unwrap() - 0.09).abs() < 1e-9);
        assert!(report.to_text().contains("worth_reading"));
    }

    #[test]
    fn whatever_is_wrong_is_named() {
        let mut turns: Vec<_> = (1..=3).map(turn).collect();
        turns[1].text_off = "No.".into();
        turns[2].hit = false;
        turns[2].computed_tokens = 467;
        let report = DemoReport::judge(vec![PassReport::new(false, turns)], 3, 16);
        assert!(!report.ok && !report.texts_equal);
        let all = report.problems.join("\n");
        for part in [
            "turn 2: the texts differ",
            "turn 3: the router",
            "467 tokens computed",
            "3 blocks",
        ] {
            assert!(all.contains(part), "{all}");
        }
    }
}

//! What the demo tells: one JSON object for programs, a table and a sentence for people.

use std::fmt::Write as _;

use comfy_table::{CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};
use serde::{Deserialize, Serialize};

/// Columns of a terminal that the table fits into.
const WIDTH: u16 = 120;
const MIB: f64 = (1 << 20) as f64;

/// A line under the header and one under the last row.
const STYLE: TableStyle = TableStyle::new()
    .header_separator(LineStyle::none().fill('─').junction('─'))
    .bottom_border(LineStyle::none().fill('─').junction('─'));

/// The outcome of a demo.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DemoReport {
    /// Everything was as it must be. See [`DemoReport::judge`].
    pub ok: bool,
    /// What was wrong, one sentence each.
    pub problems: Vec<String>,
    /// What carried the bytes.
    pub nixl: NixlReport,
    /// Every turn.
    pub turns: Vec<TurnReport>,
    /// Bytes that were read, all turns.
    pub total_bytes: u64,
    /// Bytes that differed from what they must be; 0 when all is well.
    pub wrong_bytes: u64,
    /// Destination blocks that were still in quarantine at the end; 0 when all is well.
    pub quarantined_at_exit: u64,
    /// Blocks of either side that were never given back; 0 when all is well.
    pub leaked_blocks: u64,
    /// How long `submit` kept its caller, µs, median.
    pub submit_p50_us: f64,
    /// The same, 99th percentile.
    pub submit_p99_us: f64,
    /// The largest read beside its baselines, all in this run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub largest_read: Option<LargestRead>,
}

/// What carried the bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NixlReport {
    /// NIXL's version.
    pub version: String,
    /// Its backend, such as `UCX`.
    pub backend: String,
    /// What the backend used, such as `cma`.
    pub transport: String,
}

/// One turn of a conversation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TurnReport {
    /// Number of the turn, from 1.
    pub turn: u32,
    /// What is special about it, such as "history edited".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub special: Option<String>,
    /// Whether it went as it must.
    pub ok: bool,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens whose blocks the prefill engine had.
    pub local_hit_tokens: u64,
    /// `read` or `recompute`.
    pub decision: String,
    /// Why.
    pub reason: String,
    /// Tokens read from the decode engine.
    pub read_tokens: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Descriptors that a read block by block and region by region would take.
    pub descriptors_unmerged: u64,
    /// Descriptors that it took.
    pub descriptors: u64,
    /// Runs of blocks that were consecutive on both sides.
    pub runs: u64,
    /// How long `submit` kept its caller, µs.
    pub submit_us: f64,
    /// From the decision to the end of the read, ms.
    pub total_ms: f64,
    /// Rate from submit to the end of the read, GB/s (10^9 bytes a second).
    pub gbps: f64,
    /// Bytes that were compared with what they must be, and equal it.
    pub verified: u64,
}

/// The largest read, and the same bytes moved in other ways.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LargestRead {
    /// Which turn it was.
    pub turn: u32,
    /// Bytes.
    pub bytes: u64,
    /// Its rate, GB/s.
    pub gbps: f64,
    /// A plain copy within one process, GB/s.
    pub memcpy_gbps: f64,
    /// `process_vm_readv` of the same pieces, GB/s; absent where the kernel forbids it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process_vm_readv_gbps: Option<f64>,
}

impl DemoReport {
    /// Fills in `problems` and `ok` from the rest.
    pub fn judge(&mut self) {
        let mut problems = Vec::new();
        if self.turns.is_empty() {
            problems.push("no turn ran".to_owned());
        }
        for turn in &self.turns {
            if !turn.ok {
                let special = turn.special.as_deref().unwrap_or("plain");
                problems.push(format!(
                    "turn {} ({special}) did not go as it must: {}, {}",
                    turn.turn, turn.decision, turn.reason
                ));
            }
            if turn.verified != turn.bytes {
                problems.push(format!(
                    "turn {}: {} of {} bytes are right",
                    turn.turn, turn.verified, turn.bytes
                ));
            }
        }
        for (count, what) in [
            (self.wrong_bytes, "bytes were wrong"),
            (
                self.quarantined_at_exit,
                "blocks were in quarantine at the end",
            ),
            (self.leaked_blocks, "blocks were never given back"),
        ] {
            if count != 0 {
                problems.push(format!("{count} {what}"));
            }
        }
        self.ok = problems.is_empty();
        self.problems = problems;
    }

    /// The table, what carried the bytes, and what a user learns; lines of at most 120 columns.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = format!("{}\n\n", self.table());
        let nixl = &self.nixl;
        let _ = writeln!(
            text,
            "Carried by NIXL {} / {} / {}. submit: p50 {:.0} µs, p99 {:.0} µs.",
            nixl.version, nixl.backend, nixl.transport, self.submit_p50_us, self.submit_p99_us
        );
        if let Some(largest) = &self.largest_read {
            let _ = write!(
                text,
                "Largest read: {:.0} MiB at {:.1} GB/s; the same bytes by memcpy {:.1} GB/s",
                largest.bytes as f64 / MIB,
                largest.gbps,
                largest.memcpy_gbps
            );
            match largest.process_vm_readv_gbps {
                Some(rate) => {
                    let _ = writeln!(text, ", by raw process_vm_readv {rate:.1} GB/s.");
                }
                None => text.push_str(" (process_vm_readv is not allowed here).\n"),
            }
        }
        for problem in &self.problems {
            let _ = writeln!(text, "WRONG: {problem}");
        }
        text.push_str(&self.lesson());
        text.push('\n');
        text
    }

    fn table(&self) -> Table {
        let mut table = Table::new();
        table
            .load_style(STYLE)
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_width(WIDTH)
            .set_header([
                "turn",
                "prompt",
                "hit",
                "decision: reason",
                "read",
                "MiB",
                "desc.",
                "merged",
                "submit µs",
                "ms",
                "GB/s",
                "verified B",
            ]);
        for turn in &self.turns {
            let mut decision = format!("{}: {}", turn.decision, turn.reason);
            if let Some(special) = &turn.special {
                decision = format!("[{special}] {decision}");
            }
            let measured = |text: String| if turn.bytes > 0 { text } else { "-".to_owned() };
            table.add_row([
                turn.turn.to_string(),
                turn.prompt_tokens.to_string(),
                turn.local_hit_tokens.to_string(),
                decision,
                turn.read_tokens.to_string(),
                measured(format!("{:.1}", turn.bytes as f64 / MIB)),
                measured(turn.descriptors_unmerged.to_string()),
                measured(turn.descriptors.to_string()),
                measured(format!("{:.0}", turn.submit_us)),
                measured(format!("{:.2}", turn.total_ms)),
                measured(format!("{:.1}", turn.gbps)),
                measured(turn.verified.to_string()),
            ]);
        }
        for (index, column) in table.column_iter_mut().enumerate() {
            if index != 3 {
                column.set_cell_alignment(CellAlignment::Right);
            }
            column.set_padding((0, 1));
        }
        table
    }

    /// One sentence that says what the numbers mean to somebody who serves models.
    fn lesson(&self) -> String {
        if !self.ok {
            return "The demo failed: do not rely on this build on this machine.".to_owned();
        }
        let read: u64 = self.turns.iter().map(|turn| turn.read_tokens).sum();
        let hit: u64 = self.turns.iter().map(|turn| turn.local_hit_tokens).sum();
        let prompt: u64 = self.turns.iter().map(|turn| turn.prompt_tokens).sum();
        let percent = |part: u64| 100.0 * part as f64 / (prompt.max(1)) as f64;
        format!(
            "What you learn: of {prompt} prompt tokens the prefill engine read {read} ({:.0} %) from \
             the decode engine and had {hit}\n({:.0} %) itself, so it computes only the remaining \
             {:.0} %; all {} bytes were checked and none was wrong.",
            percent(read),
            percent(hit),
            percent(prompt.saturating_sub(read + hit)),
            self.total_bytes
        )
    }
}

/// The value that `percent` percent of the values do not exceed (nearest rank); 0 without values.
#[must_use]
pub fn percentile(values: &[f64], percent: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (percent / 100.0 * sorted.len() as f64).ceil() as usize;
    let at = rank.saturating_sub(1).min(sorted.len().saturating_sub(1));
    sorted.get(at).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(turn: u32, bytes: u64) -> TurnReport {
        TurnReport {
            turn,
            special: (bytes == 0).then(|| "under the threshold".to_owned()),
            ok: true,
            prompt_tokens: 24_000,
            local_hit_tokens: 2_000,
            decision: if bytes > 0 { "read" } else { "recompute" }.to_owned(),
            reason: "22000 tokens are worth reading, the threshold is 64".to_owned(),
            read_tokens: bytes / 32_768,
            bytes,
            descriptors_unmerged: 88_000,
            descriptors: 12_345,
            runs: 193,
            submit_us: 31.4,
            total_ms: 187.23,
            gbps: 3.91,
            verified: bytes,
        }
    }

    fn report() -> DemoReport {
        let mut report = DemoReport {
            ok: false,
            problems: Vec::new(),
            nixl: NixlReport {
                version: "1.5.1".into(),
                backend: "UCX".into(),
                transport: "cma".into(),
            },
            turns: vec![turn(1, 720_896_000), turn(2, 0)],
            total_bytes: 720_896_000,
            wrong_bytes: 0,
            quarantined_at_exit: 0,
            leaked_blocks: 0,
            submit_p50_us: 20.0,
            submit_p99_us: 40.0,
            largest_read: Some(LargestRead {
                turn: 1,
                bytes: 720_896_000,
                gbps: 3.91,
                memcpy_gbps: 10.2,
                process_vm_readv_gbps: None,
            }),
        };
        report.judge();
        report
    }

    #[test]
    fn text_fits_a_terminal() {
        let text = report().to_text();
        for line in text.lines() {
            assert!(line.chars().count() <= usize::from(WIDTH), "{line}");
        }
        assert!(text.contains("What you learn"), "{text}");
        assert!(text.contains("88000") && text.contains("12345"), "{text}");
    }

    #[test]
    fn json_has_the_promised_fields() {
        let value = serde_json::to_value(report()).unwrap();
        assert_eq!(value["ok"], true);
        assert_eq!(value["wrong_bytes"], 0);
        assert_eq!(value["quarantined_at_exit"], 0);
        for field in ["version", "backend", "transport"] {
            assert!(value["nixl"][field].is_string(), "{field}");
        }
        for field in [
            "turn",
            "prompt_tokens",
            "local_hit_tokens",
            "decision",
            "reason",
            "read_tokens",
            "bytes",
            "descriptors_unmerged",
            "descriptors",
            "submit_us",
            "total_ms",
            "gbps",
            "verified",
        ] {
            assert!(!value["turns"][0][field].is_null(), "{field}");
        }
    }

    #[test]
    fn anything_amiss_is_a_problem() {
        let edits: [fn(&mut DemoReport); 6] = [
            |r| r.wrong_bytes = 1,
            |r| r.quarantined_at_exit = 1,
            |r| r.leaked_blocks = 1,
            |r| r.turns[0].verified -= 1,
            |r| r.turns[1].ok = false,
            |r| r.turns.clear(),
        ];
        for edit in edits {
            let mut report = report();
            assert!(report.ok);
            edit(&mut report);
            report.judge();
            assert!(!report.ok);
            assert_eq!(report.problems.len(), 1);
            assert!(report.to_text().contains("WRONG: "));
        }
    }

    #[test]
    fn percentiles_are_nearest_ranks() {
        let values: Vec<_> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(percentile(&values, 50.0), 50.0);
        assert_eq!(percentile(&values, 99.0), 99.0);
        assert_eq!(percentile(&values, 100.0), 100.0);
        assert_eq!(percentile(&[7.0], 50.0), 7.0);
        assert_eq!(percentile(&[], 50.0), 0.0);
    }
}

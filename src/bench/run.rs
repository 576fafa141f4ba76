//! Rounds: in each, every participant does the same read once, in turn; the order turns from round
//! to round, so that whatever else the machine does hits all alike.

use std::collections::BTreeMap;

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value, json};

use super::cases::Case;
use super::contender::{Contender, Group, SAME_DESCRIPTORS};
use super::error::BenchError;
use super::row::{Absent, Row, Who};
use super::team::{Measured, Surroundings, Team};

/// A round takes at least about this long, microseconds: a short read is made several times.
const SHORTEST_ROUND_US: f64 = 5_000.0;
/// Most times of a round.
const MAX_TIMES: f64 = 500.0;

/// How thoroughly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thoroughness {
    /// Rounds that count, after one that does not.
    pub rounds: u32,
    /// Blocks of each case that are checked, in a round of its own.
    pub verify: u32,
}

/// What came of a bench.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outcome {
    /// One for every case and participant.
    pub rows: Vec<Row>,
    /// Who did not take part, or not to the end.
    pub absent: Vec<Absent>,
    /// What the other node has to carry bytes with, as it says.
    pub fabric: Option<String>,
}

impl Outcome {
    /// Whether every checked byte was right and none of this project's reads failed.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        let ours = |absent: &Absent| Contender::new(absent.who, "").is_ours();
        !self.rows.is_empty()
            && self.rows.iter().all(|row| row.verified)
            && !self.absent.iter().any(ours)
    }
}

/// Measures all groups, with progress on stderr.
///
/// # Errors
/// [`BenchError`] at Ctrl-C, or when the target is lost.
pub fn run(
    groups: &[Group],
    around: &Surroundings,
    how: Thoroughness,
) -> Result<Outcome, BenchError> {
    let steps: usize = groups
        .iter()
        .map(|group| group.cases.len() * group.contenders.len())
        .sum();
    if steps == 0 {
        return Err(BenchError::Nothing);
    }
    let bar = ProgressBar::new(steps as u64);
    let style = "{bar:30} {pos}/{len} rows, {elapsed}  {msg}";
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style);
    }
    let mut outcome = Outcome::default();
    for group in groups {
        bar.set_message("making memory");
        let mut team = Team::gather(group, around)?;
        outcome.fabric = team.fabric().map(str::to_owned);
        let mut rows = Vec::new();
        for case in &group.cases {
            bar.set_message(case.name.clone());
            rows.extend(measure_case(&mut team, case, how)?);
            bar.inc(group.contenders.len() as u64);
        }
        for absent in team.take_absent() {
            if !outcome.absent.contains(&absent) {
                outcome.absent.push(absent);
            }
        }
        for (contender, carrier) in team.part() {
            let of_it =
                |row: &&mut Row| row.who == contender.who && row.setting == contender.setting;
            for row in rows.iter_mut().filter(of_it) {
                row.transport.clone_from(&carrier);
            }
        }
        outcome.rows.extend(rows);
    }
    bar.finish_and_clear();
    Ok(outcome)
}

/// What the rounds of one participant brought.
#[derive(Debug, Default)]
struct Tally {
    rounds: Vec<Round>,
    wrong_bytes: u64,
    checked_bytes: u64,
    about: Map<String, Value>,
    times: u32,
}

#[derive(Debug, Clone, Copy)]
struct Round {
    total_us: f64,
    submit_us: f64,
    submit_max_us: f64,
    first_layer_us: Option<f64>,
    cpu_s_per_gib: f64,
    descriptors: u64,
    bytes: u64,
}

impl Round {
    fn of(measured: &Measured) -> Self {
        let samples = &measured.ran.samples;
        let of =
            |value: fn(&super::proto::Sample) -> f64| median(samples.iter().map(value).collect());
        let bytes: u64 = samples.iter().map(|sample| sample.bytes).sum();
        let gib = bytes as f64 / f64::from(1_u32 << 30);
        let first: Vec<_> = samples.iter().filter_map(|s| s.first_layer_us).collect();
        let last = samples.last();
        Self {
            total_us: of(|sample| sample.total_us),
            submit_us: of(|sample| sample.submit_us),
            submit_max_us: samples.iter().map(|s| s.submit_us).fold(0.0, f64::max),
            first_layer_us: (!first.is_empty()).then(|| median(first)),
            cpu_s_per_gib: measured.cpu_us as f64 / 1e6 / gib.max(1e-12),
            descriptors: last.map_or(0, |sample| sample.descriptors),
            bytes: last.map_or(0, |sample| sample.bytes),
        }
    }
}

fn measure_case(team: &mut Team, case: &Case, how: Thoroughness) -> Result<Vec<Row>, BenchError> {
    let mut tallies: BTreeMap<String, Tally> = BTreeMap::new();
    // Each tells whether the participant at a place of the list did its part.
    let step = |team: &mut Team,
                first: usize,
                act: &mut dyn FnMut(&mut Team, usize) -> Result<(), BenchError>| {
        let count = team.pairs().len();
        let mut failed = Vec::new();
        for place in 0..count {
            let index = (first + place) % count;
            if let Err(error) = act(team, index) {
                failed.push((index, error));
            }
        }
        failed.sort_by_key(|(index, _)| std::cmp::Reverse(*index));
        for (index, error) in failed {
            team.dismiss(index, error)?;
        }
        Ok::<(), BenchError>(())
    };
    step(team, 0, &mut |team, index| {
        team.tell(index, case)?;
        let measured = team.measure(index, case, 1, 0)?;
        // Once more: the first read also meets the peer.
        let again = team.measure(index, case, 1, 0)?;
        let fastest = Round::of(&measured)
            .total_us
            .min(Round::of(&again).total_us);
        let tally = tally(&mut tallies, team, index);
        tally.times = (SHORTEST_ROUND_US / fastest.max(0.1)).clamp(1.0, MAX_TIMES) as u32;
        Ok(())
    })?;
    for round in 0..how.rounds {
        step(team, round as usize, &mut |team, index| {
            let times = tally(&mut tallies, team, index).times.max(1);
            let measured = team.measure(index, case, times, 0)?;
            tally(&mut tallies, team, index)
                .rounds
                .push(Round::of(&measured));
            Ok(())
        })?;
    }
    step(team, 0, &mut |team, index| {
        let checked = team.measure(index, case, 1, how.verify)?.ran;
        let about = team.pairs().get(index).map(|pair| pair.about.clone());
        let tally = tally(&mut tallies, team, index);
        tally.checked_bytes = checked.checked_bytes;
        tally.wrong_bytes = checked.wrong_bytes;
        tally.about = about.unwrap_or_default();
        Ok(())
    })?;
    // Only those that got through to the end.
    let mut rows: Vec<Row> = team
        .pairs()
        .iter()
        .filter_map(|pair| {
            let tally = tallies.get(&pair.contender.name())?;
            Some(row(case, &pair.contender, tally))
        })
        .collect();
    compare_with_bare(&mut rows);
    Ok(rows)
}

fn tally<'a>(tallies: &'a mut BTreeMap<String, Tally>, team: &Team, index: usize) -> &'a mut Tally {
    let name = team.pairs().get(index).map(|pair| pair.contender.name());
    tallies.entry(name.unwrap_or_default()).or_default()
}

fn row(case: &Case, contender: &Contender, tally: &Tally) -> Row {
    let rounds = &tally.rounds;
    let of = |value: fn(&Round) -> f64| median(rounds.iter().map(value).collect());
    let total_us = of(|round| round.total_us);
    let totals = || rounds.iter().map(|round| round.total_us);
    let first: Vec<_> = rounds.iter().filter_map(|r| r.first_layer_us).collect();
    let last = rounds.last();
    let bytes = last.map_or(0, |round| round.bytes);
    let mut more = Map::new();
    more.insert("times_per_round".into(), tally.times.into());
    more.insert("checked_bytes".into(), tally.checked_bytes.into());
    more.insert("wrong_bytes".into(), tally.wrong_bytes.into());
    if case.reads.len() > 1 {
        more.insert("reads_together".into(), case.reads.len().into());
    }
    for name in ["library", "version", "memory", "huge_pages", "gpu", "lanes"] {
        if let Some(value) = tally.about.get(name) {
            more.insert(name.into(), value.clone());
        }
    }
    Row {
        case: case.name.clone(),
        who: contender.who,
        setting: contender.setting.clone(),
        transport: "unknown".to_owned(),
        rounds: u32::try_from(rounds.len()).unwrap_or(u32::MAX),
        median_ms: total_us / 1e3,
        min_ms: totals().fold(f64::INFINITY, f64::min) / 1e3,
        max_ms: totals().fold(0.0, f64::max) / 1e3,
        submit_us: of(|round| round.submit_us),
        submit_max_us: rounds.iter().map(|r| r.submit_max_us).fold(0.0, f64::max),
        first_layer_ms: (!first.is_empty()).then(|| median(first) / 1e3),
        cpu_s_per_gib: of(|round| round.cpu_s_per_gib),
        descriptors: last.map_or(0, |round| round.descriptors),
        bytes,
        gbps: bytes as f64 / total_us.max(1e-3) / 1e3,
        verified: tally.checked_bytes > 0 && tally.wrong_bytes == 0,
        more,
    }
}

/// Tells what the engine adds to the very same descriptors, where those were measured, too.
fn compare_with_bare(rows: &mut [Row]) {
    let bare = rows
        .iter()
        .find(|row| row.who == Who::OneDescriptor && row.setting == SAME_DESCRIPTORS)
        .map(|row| row.median_ms);
    let ceiling = rows
        .iter()
        .find(|row| row.who == Who::OneDescriptor && row.setting.is_empty())
        .map(|row| row.median_ms);
    for row in rows.iter_mut().filter(|row| row.who == Who::KvXfer) {
        if let Some(bare) = bare {
            let us = (row.median_ms - bare) * 1e3 / row.descriptors.max(1) as f64;
            row.more
                .insert("overhead_us_per_descriptor".into(), json!(us));
        }
        if let Some(ceiling) = ceiling {
            let share = ceiling / row.median_ms.max(1e-9);
            row.more
                .insert("share_of_one_descriptor".into(), json!(share));
        }
    }
}

/// The middle of some numbers, or the mean of the two in the middle; zero of none.
#[must_use]
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match (values.get(middle.wrapping_sub(1)), values.get(middle)) {
        (Some(a), Some(b)) if values.len().is_multiple_of(2) => (a + b) / 2.0,
        (_, Some(value)) => *value,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_is_found() {
        assert!((median(vec![3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median(vec![4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
        assert!((median(vec![7.0]) - 7.0).abs() < 1e-9);
        assert!(median(Vec::new()).abs() < 1e-9);
    }

    #[test]
    fn an_absent_peer_is_no_failure_and_a_failed_read_of_ours_is() {
        let absent = |who| Absent {
            who,
            setting: String::new(),
            why: "x".into(),
        };
        let contender = Contender::new(Who::KvXfer, "");
        let case = Case {
            name: "c".into(),
            reads: vec![(vec![0], vec![0])],
        };
        let tally = Tally {
            checked_bytes: 1,
            ..Tally::default()
        };
        let mut outcome = Outcome {
            rows: vec![row(&case, &contender, &tally)],
            absent: vec![absent(Who::Mooncake)],
            fabric: None,
        };
        assert!(outcome.is_ok());
        outcome.absent.push(absent(Who::KvXfer));
        assert!(!outcome.is_ok());
        outcome.absent.pop();
        outcome.rows[0].verified = false;
        assert!(!outcome.is_ok());
        assert!(!Outcome::default().is_ok());
    }
}

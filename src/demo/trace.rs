//! Reads traces of real chat traffic in Mooncake's format and finds the conversations in them.
//!
//! A line is one request: `{"timestamp": ms, "input_length": tokens, "output_length": tokens,
//! "hash_ids": [one per 512 tokens of input]}`. Equal ids at the head of two requests mean equal
//! tokens. Mooncake's repository has such traces (`FAST25-release/traces`).

use std::collections::HashMap;
use std::io::{self, BufRead};

use serde::Deserialize;
use thiserror::Error;

/// Tokens that one of a trace's ids stands for.
pub const TOKENS_PER_ID: u64 = 512;
/// Longest accepted line, bytes; a prompt of a million tokens needs some 20 KB.
const MAX_LINE_BYTES: u64 = 1 << 20;
/// Most requests that are read.
const MAX_REQUESTS: usize = 1_000_000;
/// Longest accepted prompt or answer, tokens.
const MAX_TOKENS: u64 = 10_000_000;
/// A request continues another one when it begins with all its full blocks, and these are at least so
/// many. The first block alone is not enough: it often holds a system prompt that all share.
const MIN_SHARED_IDS: usize = 2;

/// Why a trace was refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TraceError {
    /// There is no such file, or it may not be read.
    #[error("cannot open the trace: {0}")]
    Open(#[source] io::Error),
    /// It could not be read.
    #[error("cannot read the trace at line {line}: {source}")]
    Io {
        /// Line number, from 1.
        line: usize,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A line is longer than any request can be.
    #[error("line {line} of the trace is longer than {MAX_LINE_BYTES} bytes; is it a trace?")]
    LongLine {
        /// Line number, from 1.
        line: usize,
    },
    /// A line is no request.
    #[error(
        "line {line} of the trace is not a request in Mooncake's format (timestamp, input_length, \
         output_length, hash_ids): {source}"
    )]
    Json {
        /// Line number, from 1.
        line: usize,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// The numbers of a request contradict each other.
    #[error("line {line} of the trace: {why}")]
    Request {
        /// Line number, from 1.
        line: usize,
        /// What is wrong.
        why: String,
    },
    /// It has more requests than are read.
    #[error("the trace has more than {MAX_REQUESTS} requests; cut it")]
    TooLong,
    /// It has none.
    #[error("the trace has no requests")]
    Empty,
}

#[derive(Debug, Deserialize)]
struct Request {
    timestamp: u64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

/// One request of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turn {
    /// When it came, ms after the trace's start.
    pub at_ms: u64,
    /// Time since the turn before it, ms.
    pub gap_ms: u64,
    /// Tokens of the prompt, history included.
    pub input_tokens: u64,
    /// Leading tokens that it shares with the prompt before it, in whole blocks of the trace.
    pub shared_tokens: u64,
    /// Tokens of the answer.
    pub output_tokens: u64,
}

/// The requests of one chat, oldest first.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Conversation {
    /// Its turns.
    pub turns: Vec<Turn>,
}

/// Reads a trace and groups its requests into conversations, in the order in which these begin.
///
/// # Errors
/// [`TraceError`], with the number of the line at fault.
pub fn read_conversations(reader: impl BufRead) -> Result<Vec<Conversation>, TraceError> {
    let mut groups = Groups::default();
    let mut lines = Lines { reader, line: 0 };
    let mut requests = 0;
    while let Some(text) = lines.next()? {
        if text.trim_ascii().is_empty() {
            continue;
        }
        requests += 1;
        if requests > MAX_REQUESTS {
            return Err(TraceError::TooLong);
        }
        groups.add(parse(lines.line, &text)?);
    }
    if requests == 0 {
        return Err(TraceError::Empty);
    }
    Ok(groups.conversations)
}

/// The conversations worth replaying: at least two turns, all prompts at most `max_tokens` long (turns
/// from the first longer one on are cut), `max_turns` turns in all.
#[must_use]
pub fn select(
    conversations: &[Conversation],
    max_turns: usize,
    max_tokens: u64,
) -> Vec<Conversation> {
    let mut left = max_turns;
    let mut selected = Vec::new();
    for conversation in conversations {
        let fitting = conversation.turns.iter();
        let turns: Vec<_> = fitting
            .take_while(|turn| turn.input_tokens.saturating_add(turn.output_tokens) <= max_tokens)
            .take(left)
            .copied()
            .collect();
        if turns.len() >= 2 {
            left -= turns.len();
            selected.push(Conversation { turns });
        }
    }
    selected
}

struct Lines<R> {
    reader: R,
    line: usize,
}

impl<R: BufRead> Lines<R> {
    fn next(&mut self) -> Result<Option<Vec<u8>>, TraceError> {
        self.line += 1;
        let line = self.line;
        let mut text = Vec::new();
        let mut limited = io::Read::take(&mut self.reader, MAX_LINE_BYTES);
        let read = limited
            .read_until(b'\n', &mut text)
            .map_err(|source| TraceError::Io { line, source })?;
        if read as u64 == MAX_LINE_BYTES && !text.ends_with(b"\n") {
            return Err(TraceError::LongLine { line });
        }
        Ok((read > 0).then_some(text))
    }
}

fn parse(line: usize, text: &[u8]) -> Result<Request, TraceError> {
    let request: Request =
        serde_json::from_slice(text).map_err(|source| TraceError::Json { line, source })?;
    let refuse = |why: String| Err(TraceError::Request { line, why });
    if request.input_length == 0 || request.input_length > MAX_TOKENS {
        return refuse(format!(
            "input_length is {}; 1 to {MAX_TOKENS} tokens are accepted",
            request.input_length
        ));
    }
    if request.output_length > MAX_TOKENS {
        return refuse(format!(
            "output_length is {}; up to {MAX_TOKENS} tokens are accepted",
            request.output_length
        ));
    }
    let expected = request.input_length.div_ceil(TOKENS_PER_ID);
    if request.hash_ids.len() as u64 != expected {
        return refuse(format!(
            "{} hash_ids for {} tokens; {expected} are expected, one per {TOKENS_PER_ID} tokens",
            request.hash_ids.len(),
            request.input_length
        ));
    }
    Ok(request)
}

#[derive(Default)]
struct Groups {
    conversations: Vec<Conversation>,
    /// The ids of each conversation's last prompt.
    last_ids: Vec<Vec<u64>>,
    /// Conversation by the id of the last full block of its last prompt.
    by_end: HashMap<u64, usize>,
}

impl Groups {
    fn add(&mut self, request: Request) {
        let ids = &request.hash_ids;
        // Ids are chained, so that an equal id at the end means equal tokens before it. The longest
        // match is the closest ancestor.
        let continued = ids
            .iter()
            .skip(MIN_SHARED_IDS - 1)
            .rev()
            .find_map(|id| self.by_end.get(id).copied());
        let index = continued.unwrap_or_else(|| {
            self.conversations.push(Conversation::default());
            self.last_ids.push(Vec::new());
            self.conversations.len() - 1
        });
        let turns = &mut self.conversations[index].turns;
        let before = &self.last_ids[index];
        let shared = ids.iter().zip(before).take_while(|(a, b)| a == b).count() as u64;
        let gap = turns
            .last()
            .map_or(0, |last| request.timestamp.saturating_sub(last.at_ms));
        turns.push(Turn {
            at_ms: request.timestamp,
            gap_ms: gap,
            input_tokens: request.input_length,
            shared_tokens: (shared * TOKENS_PER_ID).min(request.input_length),
            output_tokens: request.output_length,
        });
        let full = usize::try_from(request.input_length / TOKENS_PER_ID).unwrap_or(usize::MAX);
        if full >= MIN_SHARED_IDS
            && let Some(end) = ids.get(full - 1)
        {
            self.by_end.insert(*end, index);
        }
        self.last_ids[index] = request.hash_ids;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(at: u64, input: u64, output: u64, ids: &[u64]) -> String {
        format!(
            "{{\"timestamp\": {at}, \"input_length\": {input}, \"output_length\": {output}, \
             \"hash_ids\": {ids:?}}}\n"
        )
    }

    fn read(text: &str) -> Result<Vec<Conversation>, TraceError> {
        read_conversations(text.as_bytes())
    }

    #[test]
    fn requests_with_a_common_head_are_one_conversation() {
        let text = line(0, 1100, 10, &[0, 1, 2])
            + &line(50, 1030, 10, &[0, 7, 8])
            + &line(1000, 1700, 20, &[0, 1, 3, 4])
            + "\n"
            + &line(3000, 1536, 5, &[0, 1, 3]);
        let conversations = read(&text).unwrap();
        assert_eq!(conversations.len(), 2);
        let turns = &conversations[0].turns;
        assert_eq!(turns.len(), 3);
        let facts = |t: &Turn| (t.gap_ms, t.input_tokens, t.shared_tokens, t.output_tokens);
        assert_eq!(facts(&turns[0]), (0, 1100, 0, 10));
        assert_eq!(facts(&turns[1]), (1000, 1700, 1024, 20));
        assert_eq!(facts(&turns[2]), (2000, 1536, 1536, 5));
    }

    #[test]
    fn a_shared_system_prompt_joins_nothing() {
        let text = line(0, 512, 1, &[0]) + &line(1, 600, 1, &[0, 1]) + &line(2, 600, 1, &[0, 2]);
        assert_eq!(read(&text).unwrap().len(), 3);
    }

    #[test]
    fn bad_lines_are_named() {
        let good = line(0, 512, 1, &[0]);
        for (bad, at) in [
            ("{".to_owned(), 2),
            ("[]".to_owned(), 2),
            ("\u{0}".to_owned(), 2),
            ("{\"timestamp\": -1}".to_owned(), 2),
            (line(0, 0, 1, &[]), 2),
            (line(0, u64::MAX, 1, &[1]), 2),
            (line(0, 513, 1, &[1]), 2),
            (line(0, 1, u64::MAX, &[1]), 2),
            (format!("\n{}", line(0, 1, 1, &[1, 2])), 3),
        ] {
            match read(&(good.clone() + &bad)) {
                Err(TraceError::Json { line, .. } | TraceError::Request { line, .. }) => {
                    assert_eq!(line, at, "{bad}");
                }
                other => panic!("{bad}: {other:?}"),
            }
        }
        assert!(matches!(read(""), Err(TraceError::Empty)));
        let long = "x".repeat(MAX_LINE_BYTES as usize + 1);
        assert!(matches!(
            read(&(good + &long)),
            Err(TraceError::LongLine { line: 2 })
        ));
    }

    #[test]
    fn a_selection_is_bounded() {
        let turn = |input_tokens| Turn {
            at_ms: 0,
            gap_ms: 0,
            input_tokens,
            shared_tokens: 0,
            output_tokens: 10,
        };
        let conversation = |inputs: &[u64]| Conversation {
            turns: inputs.iter().copied().map(turn).collect(),
        };
        let all = [
            conversation(&[100]),
            conversation(&[100, 200, 900]),
            conversation(&[900, 100]),
            conversation(&[100, 200, 300]),
            conversation(&[100, 200]),
        ];
        let lengths = |max_turns, max_tokens| -> Vec<_> {
            let selected = select(&all, max_turns, max_tokens);
            selected.iter().map(|c| c.turns.len()).collect()
        };
        assert_eq!(lengths(100, 500), [2, 3, 2]);
        assert_eq!(lengths(4, 500), [2, 2]);
        assert_eq!(lengths(1, 500), [0usize; 0]);
        assert_eq!(lengths(0, 500), [0usize; 0]);
    }
}

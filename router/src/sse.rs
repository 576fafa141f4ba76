//! Cuts a stream of server-sent events into events, byte for byte.
//!
//! Whatever comes out, put together again, is exactly what went in: comments, blank lines, any of the
//! three line ends, and anything that is no event at all. Only whole events come out as
//! [`Piece::Event`], and nothing waits for more than the end of its event.

use bytes::{Bytes, BytesMut};
use memchr::memchr2;

/// A part of the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Piece {
    /// A whole event with the blank line that ends it.
    Event(Bytes),
    /// Bytes that are no event, or part of one that is too long.
    Plain(Bytes),
}

/// Finds where the events of a stream end.
#[derive(Debug)]
pub(crate) struct Scanner {
    /// What has come and not yet gone out.
    held: BytesMut,
    /// How much of `held` was looked at.
    seen: usize,
    /// The line has no bytes yet.
    line_empty: bool,
    /// The line is the event's first.
    line_first: bool,
    line_is_comment: bool,
    /// The last byte was a CR: an LF belongs to the same line end.
    after_cr: bool,
    limit: usize,
    /// The event is too long: its parts pass as they come.
    passing: bool,
    oversized: u64,
}

impl Scanner {
    /// Events longer than `limit` come out in plain parts.
    pub fn new(limit: usize) -> Self {
        Self {
            held: BytesMut::new(),
            seen: 0,
            line_empty: true,
            line_first: true,
            line_is_comment: false,
            after_cr: false,
            limit,
            passing: false,
            oversized: 0,
        }
    }

    /// How many events were too long, since this was last asked.
    pub fn take_oversized(&mut self) -> u64 {
        std::mem::take(&mut self.oversized)
    }

    /// Whether what came out ended in the middle of an event.
    pub fn is_within_event(&self) -> bool {
        self.passing
    }

    /// Takes bytes in and gives out what is complete.
    pub fn push(&mut self, bytes: &[u8], out: &mut Vec<Piece>) {
        self.held.extend_from_slice(bytes);
        while let Some(rest) = self.held.get(self.seen..)
            && let Some(&next) = rest.first()
        {
            if std::mem::take(&mut self.after_cr) && next == b'\n' {
                self.seen = self.seen.saturating_add(1);
                if self.seen == 1 {
                    // The CR has gone out already.
                    self.release(Piece::Plain, out);
                }
                continue;
            }
            let end = memchr2(b'\r', b'\n', rest);
            if self.line_empty && end != Some(0) {
                self.line_empty = false;
                self.line_is_comment = next == b':';
            }
            let Some(at) = end else {
                self.seen = self.held.len();
                break;
            };
            self.after_cr = rest.get(at) == Some(&b'\r');
            self.seen = self.seen.saturating_add(at).saturating_add(1);
            if self.line_empty {
                let whole = !std::mem::take(&mut self.passing);
                self.release(if whole { Piece::Event } else { Piece::Plain }, out);
                self.line_first = true;
            } else if self.line_first && self.line_is_comment {
                self.release(Piece::Plain, out);
            } else {
                self.line_first = false;
            }
            self.line_empty = true;
        }
        if !self.passing && self.held.len() > self.limit {
            self.passing = true;
            self.oversized = self.oversized.saturating_add(1);
        }
        if self.passing && !self.held.is_empty() {
            self.release(Piece::Plain, out);
        }
    }

    /// The stream has ended: gives out what is left, as an event that lacks its end.
    pub fn finish(&mut self) -> Option<Piece> {
        let rest = self.held.split().freeze();
        self.seen = 0;
        match rest.is_empty() {
            true => None,
            false => Some(Piece::Event(rest)),
        }
    }

    /// Gives out all that was looked at.
    fn release(&mut self, piece: fn(Bytes) -> Piece, out: &mut Vec<Piece>) {
        let bytes = self.held.split_to(self.seen.min(self.held.len()));
        self.seen = 0;
        out.push(piece(bytes.freeze()));
    }
}

/// The data of an event: its `data` lines, put together. `None` if it has none, or is no UTF-8.
pub(crate) fn data(event: &[u8]) -> Option<String> {
    let mut data: Option<String> = None;
    for line in Lines(event) {
        if let Some((_, value)) = data_line(line.text) {
            let value = std::str::from_utf8(value).ok()?;
            match &mut data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
                None => data = Some(value.to_owned()),
            }
        }
    }
    data
}

/// The event with `data` for its data. All other lines, and the way in which its lines are written,
/// stay as they are.
pub(crate) fn with_data(event: &[u8], data: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(event.len());
    let mut written = false;
    for line in Lines(event) {
        match data_line(line.text) {
            None => {
                out.extend_from_slice(line.text);
                out.extend_from_slice(line.end);
            }
            Some(_) if written => {}
            Some((name, _)) => {
                written = true;
                for (i, part) in data.split('\n').enumerate() {
                    if i > 0 && line.end.is_empty() {
                        out.push(b'\n');
                    }
                    out.extend_from_slice(name);
                    out.extend_from_slice(part.as_bytes());
                    out.extend_from_slice(line.end);
                }
            }
        }
    }
    out
}

/// A `data` line: what stands before its value, and the value.
fn data_line(line: &[u8]) -> Option<(&[u8], &[u8])> {
    const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
    let text = line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(line);
    let value = match text.strip_prefix(b"data")? {
        [] => &[],
        [b':', b' ', value @ ..] | [b':', value @ ..] => value,
        _ => return None,
    };
    line.split_at_checked(line.len().saturating_sub(value.len()))
}

struct Lines<'a>(&'a [u8]);

struct Line<'a> {
    text: &'a [u8],
    end: &'a [u8],
}

impl<'a> Iterator for Lines<'a> {
    type Item = Line<'a>;

    fn next(&mut self) -> Option<Line<'a>> {
        if self.0.is_empty() {
            return None;
        }
        let at = memchr2(b'\r', b'\n', self.0).unwrap_or(self.0.len());
        let (text, rest) = self.0.split_at_checked(at)?;
        let end = match rest {
            [b'\r', b'\n', ..] => 2,
            [_, ..] => 1,
            [] => 0,
        };
        let (end, rest) = rest.split_at_checked(end)?;
        self.0 = rest;
        Some(Line { text, end })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn scan(parts: &[&[u8]], limit: usize) -> (Vec<Piece>, u64) {
        let mut scanner = Scanner::new(limit);
        let mut out = Vec::new();
        for part in parts {
            scanner.push(part, &mut out);
        }
        out.extend(scanner.finish());
        (out, scanner.take_oversized())
    }

    fn event(text: &'static str) -> Piece {
        Piece::Event(Bytes::from_static(text.as_bytes()))
    }

    fn plain(text: &'static str) -> Piece {
        Piece::Plain(Bytes::from_static(text.as_bytes()))
    }

    fn joined(pieces: &[Piece]) -> Vec<u8> {
        let bytes = |piece: &Piece| match piece {
            Piece::Event(bytes) | Piece::Plain(bytes) => bytes.to_vec(),
        };
        pieces.iter().flat_map(bytes).collect()
    }

    #[test]
    fn events_end_with_blank_lines_of_any_kind() {
        let (pieces, _) = scan(
            &[b"data: a\n\ndata: b\r\n\r\ndata: c\r\rid: 1\ndata: d\n\n"],
            1000,
        );
        assert_eq!(
            pieces,
            [
                event("data: a\n\n"),
                event("data: b\r\n\r"),
                plain("\n"),
                event("data: c\r\r"),
                event("id: 1\ndata: d\n\n")
            ]
        );
    }

    #[test]
    fn nothing_waits_for_more_than_its_event() {
        let mut scanner = Scanner::new(1000);
        let mut out = Vec::new();
        scanner.push(b"data: a\r\n\r", &mut out);
        assert_eq!(out.len(), 1, "a CR ends a line by itself");
        scanner.push(b"\n: still here\n", &mut out);
        assert_eq!(out[1..], [plain("\n"), plain(": still here\n")]);
        scanner.push(b"data: b\n", &mut out);
        assert_eq!(out.len(), 3);
        assert_eq!(scanner.finish(), Some(event("data: b\n")));
        assert_eq!(scanner.finish(), None);
    }

    #[test]
    fn too_long_events_pass_in_parts_and_the_next_is_whole_again() {
        let (pieces, oversized) = scan(&[b"data: 0123", b"45678", b"9\n", b"\ndata: b\n\n"], 12);
        assert_eq!(oversized, 1);
        assert_eq!(
            pieces,
            [
                plain("data: 012345678"),
                plain("9\n"),
                plain("\n"),
                event("data: b\n\n")
            ]
        );
    }

    #[test]
    fn data_is_put_together_and_written_in_the_same_way() {
        let event = b": c\r\nid: 7\r\ndata:{\r\ndata: }\r\nretry: 1\r\n\r\n";
        assert_eq!(data(event).as_deref(), Some("{\n}"));
        assert_eq!(
            with_data(event, "{}"),
            b": c\r\nid: 7\r\ndata:{}\r\nretry: 1\r\n\r\n"
        );
        assert_eq!(with_data(b"data: a\n\n", "x\ny"), b"data: x\ndata: y\n\n");
        assert_eq!(with_data(b"data: a", "x\ny"), b"data: x\ndata: y");
        assert_eq!(data(b"data\n\n").as_deref(), Some(""));
        assert_eq!(data(b"\xef\xbb\xbfdata: a\n\n").as_deref(), Some("a"));
        assert_eq!(data(b"database: a\n: data: b\n\n"), None);
        assert_eq!(data(b"data: \xff\n\n"), None);
    }

    proptest! {
        #[test]
        fn what_comes_out_is_what_went_in(
            parts in prop::collection::vec("[a:\\r\\n d]{0,9}", 0..12),
            limit in 1_usize..40,
        ) {
            let parts: Vec<_> = parts.iter().map(|part| part.as_bytes()).collect();
            let whole = parts.concat();
            let (pieces, _) = scan(&parts, limit);
            prop_assert_eq!(joined(&pieces), &whole[..]);
            // And with no limit, however the stream is cut, its events are the same but for LFs that
            // come late.
            let events = |pieces: &[Piece]| -> Vec<Vec<u8>> {
                pieces.iter().filter_map(|piece| match piece {
                    Piece::Event(bytes) => Some(bytes.to_vec()),
                    Piece::Plain(_) => None,
                }).collect()
            };
            let (cut, _) = scan(&parts, usize::MAX);
            let (uncut, _) = scan(&[&whole], usize::MAX);
            prop_assert_eq!(events(&cut), events(&uncut));
            prop_assert!(cut.iter().all(|piece| with_data(&joined(std::slice::from_ref(piece)), "").len() < 200));
        }
    }
}

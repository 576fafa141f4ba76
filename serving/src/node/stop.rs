//! Stop strings: where the text ends, also when a stop string comes in pieces.

/// Looks for stop strings in a text that arrives piece by piece. Text that may be the beginning of
/// a stop string is held back until it is known not to be.
#[derive(Debug, Clone, Default)]
pub struct StopScanner {
    stops: Vec<String>,
    held: String,
}

/// What a piece of text led to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scanned {
    /// Text that can be shown.
    pub text: String,
    /// Whether a stop string was found; the text ends before it.
    pub stopped: bool,
}

impl StopScanner {
    /// A scanner for these strings. Empty ones are ignored.
    #[must_use]
    pub fn new(stops: &[String]) -> Self {
        Self {
            stops: stops.iter().filter(|s| !s.is_empty()).cloned().collect(),
            held: String::new(),
        }
    }

    /// Takes the next piece.
    pub fn push(&mut self, piece: &str) -> Scanned {
        self.held.push_str(piece);
        let found = self.stops.iter().filter_map(|stop| self.held.find(stop));
        if let Some(at) = found.min() {
            let mut text = std::mem::take(&mut self.held);
            text.truncate(at);
            return Scanned {
                text,
                stopped: true,
            };
        }
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop));
        let at = self.held.len().saturating_sub(keep.max().unwrap_or(0));
        let rest = self.held.split_off(at);
        Scanned {
            text: std::mem::replace(&mut self.held, rest),
            stopped: false,
        }
    }

    /// The text that is still held back: nothing more comes.
    #[must_use]
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Bytes at the end of `text` that are the beginning of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let cuts = stop.char_indices().map(|(at, _)| at);
    cuts.rev()
        .find(|at| stop.get(..*at).is_some_and(|start| text.ends_with(start)))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|s| (*s).to_owned()).collect();
        let mut scanner = StopScanner::new(&stops);
        let mut text = String::new();
        for piece in pieces {
            let scanned = scanner.push(piece);
            text.push_str(&scanned.text);
            if scanned.stopped {
                return (text, true);
            }
        }
        text.push_str(&scanner.finish());
        (text, false)
    }

    #[test]
    fn a_stop_string_may_come_in_pieces() {
        assert_eq!(
            run(&["END"], &["one E", "N", "D two"]),
            ("one ".into(), true)
        );
        assert_eq!(
            run(&["END"], &["one E", "N", "X"]),
            ("one ENX".into(), false)
        );
        assert_eq!(run(&["aab"], &["aa", "ab"]), ("a".into(), true));
        assert_eq!(run(&["é!"], &["caf", "é", "!"]), ("caf".into(), true));
    }

    #[test]
    fn the_first_of_several_counts_and_empty_ones_do_not() {
        assert_eq!(run(&["y", "x"], &["a x y"]), ("a ".into(), true));
        assert_eq!(run(&[""], &["a"]), ("a".into(), false));
    }

    proptest! {
        #[test]
        fn pieces_make_no_difference(
            text in "[ab]{0,24}",
            stop in "[ab]{1,4}",
            cuts in prop::collection::vec(0..24_usize, 0..6),
        ) {
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| (*cut).min(text.len())).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&str> = cuts.windows(2).map(|cut| &text[cut[0]..cut[1]]).collect();
            let found = run(&[&stop], &pieces);
            let expected = match text.find(&stop) {
                Some(at) => (text[..at].to_owned(), true),
                None => (text.clone(), false),
            };
            prop_assert_eq!(found, expected);
        }
    }
}

//! The conversation of the demo: an assistant of a lending library, whose tool answers each question with
//! some hundred tokens of the catalogue. Always the same for the same seed.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

const SYSTEM: &str = "You are the assistant of a lending library. Answer from the tool's results, in one or two short sentences.";

const QUESTIONS: &[&str] = &[
    "Which of these books would you give to a child of nine?",
    "Which shelf holds the most books of this list?",
    "Recommend one of them for a long train journey and say why.",
    "Which of these books is the oldest?",
    "Name two that are on loan.",
    "Which of them are about the sea?",
    "What would a gardener like to read?",
    "Which author appears more than once?",
    "Pick a book for a reading group and say why.",
    "Which of these would you put in the window in winter?",
    "Name one that is being repaired.",
    "Which book would you read first yourself?",
];

const WHAT: &[&str] = &[
    "The Lamp",
    "A Garden",
    "The Tide",
    "Letters",
    "The Clockmaker",
    "A Short History",
    "The Atlas",
    "Winter",
    "The Orchard",
    "Songs",
    "The Ferry",
    "A House",
    "The Cartographer",
    "Bread",
];
const OF: &[&str] = &[
    "of Small Rivers",
    "at the Edge of the Marsh",
    "for Beginners",
    "from the North",
    "and the Heron",
    "under the Mill",
    "of Salt",
    "in Seven Rooms",
    "without Maps",
    "of the Last Ferry",
    "by Candlelight",
    "for Patient People",
];
const WHO: &[&str] = &[
    "Ada Linden",
    "Tomas Reuter",
    "Mirela Costa",
    "John Okafor",
    "Greta Halvorsen",
    "Paul Anand",
    "Ines Duarte",
    "Samuel Brock",
    "Yuki Arai",
    "Clara Voss",
];
const STATE: &[&str] = &["on the shelf", "on loan", "being repaired", "reserved"];

/// The system message.
#[must_use]
pub fn system() -> Value {
    json!({"role": "system", "content": SYSTEM})
}

/// What is added to the history in turn `turn`, from 0: a question and what the tool found. `rows` rows of
/// the catalogue are some 20 tokens each.
#[must_use]
pub fn turn(seed: u64, turn: usize, rows: usize) -> [Value; 2] {
    let mut rng =
        ChaCha8Rng::seed_from_u64(seed ^ (turn as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let mut found = String::from("title; author; year; shelf; state\n");
    for _ in 0..rows {
        let mut pick = |list: &'static [&'static str]| {
            let at = rng.random_range(0..list.len());
            list.get(at).copied().unwrap_or_default()
        };
        let (what, of, who, state) = (pick(WHAT), pick(OF), pick(WHO), pick(STATE));
        let (year, shelf) = (rng.random_range(1850..2024), rng.random_range(1..40));
        found.push_str(&format!("{what} {of}; {who}; {year}; {shelf}; {state}\n"));
    }
    let question = QUESTIONS
        .get(turn % QUESTIONS.len())
        .copied()
        .unwrap_or_default();
    [
        json!({"role": "user", "content": question}),
        json!({"role": "tool", "content": found}),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_makes_the_same_conversation() {
        assert_eq!(turn(7, 3, 20), turn(7, 3, 20));
        assert_ne!(turn(7, 3, 20), turn(8, 3, 20));
        assert_ne!(turn(7, 3, 20)[1], turn(7, 4, 20)[1]);
    }
}

//! What the demo plays: turn by turn, which text the decode engine has in its blocks, which prompt the
//! prefill engine gets, what it has itself, and what must come of it.

use super::allocator::FreeOrder;
use super::history::History;
use super::trace::Conversation;

/// Below so many tokens a read is not worth its fixed cost: the policy's default.
pub const THRESHOLD: u32 = 64;
/// Tokens of the built-in conversations after their first and their last turn.
const GROWTH: (u32, u32) = (2_048, 24_576);
/// Tokens of the text for the special turns.
const SPECIAL_TOKENS: u32 = 8_192;
/// Tokens by which the text ends inside a block, and tokens of the user's next message.
const TAIL: u32 = 5;
const MESSAGE: u32 = 200;
/// How long a lease lasts that is to be alive when it is used, ms.
const LONG_TTL_MS: u64 = 480_000;
/// How long a lease lasts that is to have expired when it is used, ms.
const SHORT_TTL_MS: u64 = 50;

/// What is out of the ordinary in a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Special {
    /// The prefill engine still has the first half of the blocks.
    PartialLocalHit,
    /// It has nearly all of them.
    UnderThreshold,
    /// The user rewrote the text from the middle on.
    HistoryEdited,
    /// The user took longer to answer than the lease lasts.
    LeaseExpired,
    /// The decode engine needs the blocks back while they are read.
    LeaseRevoked,
}

impl Special {
    /// All of them, in the order in which they are played.
    pub const ALL: [Self; 5] = [
        Self::PartialLocalHit,
        Self::UnderThreshold,
        Self::HistoryEdited,
        Self::LeaseExpired,
        Self::LeaseRevoked,
    ];

    /// A name for reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::PartialLocalHit => "partial local hit",
            Self::UnderThreshold => "under the threshold",
            Self::HistoryEdited => "history edited",
            Self::LeaseExpired => "lease expired",
            Self::LeaseRevoked => "lease revoked",
        }
    }
}

/// What must come of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// So many tokens are read.
    Read {
        /// Tokens, whole blocks.
        tokens: u32,
    },
    /// Nothing is worth reading: the prefill engine computes all it lacks.
    Recompute,
    /// The lease is over before the read begins: recompute, and not a byte is used.
    LeaseOver,
    /// The lease ends while the read runs: the read fails, and not a byte is used.
    ReadFails,
}

/// One turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Number of the turn, from 1.
    pub turn: u32,
    /// What is out of the ordinary.
    pub special: Option<Special>,
    /// In which order the decode engine's allocator hands out blocks.
    pub order: FreeOrder,
    /// What the decode engine has in its blocks: prompt and answer of the turn before.
    pub remote: History,
    /// How long its lease lasts, ms.
    pub ttl_ms: u64,
    /// Time between the turn before and this one, ms.
    pub gap_ms: u64,
    /// The prompt of this turn.
    pub prompt: History,
    /// Tokens at its head whose blocks the prefill engine has, whole blocks.
    pub local_hit_tokens: u32,
    /// What must come of it.
    pub expect: Expect,
}

/// The built-in play: one conversation of `turns` turns for each order of allocation, which grows from
/// 2k to 24k tokens, then the special turns.
#[must_use]
pub fn built_in(turns: u32, block_tokens: u32, seed: u64) -> Vec<Step> {
    let mut steps = Vec::new();
    let orders = [
        FreeOrder::Contiguous,
        FreeOrder::Descending,
        FreeOrder::Holes,
        FreeOrder::Shuffled,
    ];
    for (conversation, order) in (0_u64..).zip(orders) {
        for turn in 0..turns {
            let (first, last) = GROWTH;
            let grown = u64::from(last - first) * u64::from(turn) / u64::from((turns - 1).max(1));
            let tokens = first + u32::try_from(grown).unwrap_or(u32::MAX - first);
            let name = seed.wrapping_add(conversation);
            steps.push(plain(
                order,
                text(name, tokens + TAIL),
                MESSAGE,
                0,
                block_tokens,
            ));
        }
    }
    steps.extend(
        (100_u64..)
            .zip(Special::ALL)
            .map(|(conversation, special)| {
                let remote = text(seed.wrapping_add(conversation), SPECIAL_TOKENS + TAIL);
                special_step(special, remote, block_tokens)
            }),
    );
    number(steps)
}

/// A play after real conversations: each turn but a conversation's first reads what the turn before
/// left with the decode engine, as far as the trace says that the prompt still begins with it.
#[must_use]
pub fn of_trace(conversations: &[Conversation], block_tokens: u32, seed: u64) -> Vec<Step> {
    let mut steps = Vec::new();
    for (name, conversation) in (0_u64..).zip(conversations) {
        for pair in conversation.turns.windows(2) {
            let [before, turn] = pair else { continue };
            let limit = |tokens: u64| u32::try_from(tokens).unwrap_or(u32::MAX);
            let left = limit(before.input_tokens.saturating_add(before.output_tokens));
            let remote = text(seed.wrapping_add(name), left);
            let mut prompt = remote.clone();
            prompt.set_len(limit(turn.input_tokens));
            // The trace knows prompts in pieces of 512 tokens and answers not at all: a prompt that
            // goes on with all of the one before it is taken to go on with the answer, too.
            let whole = before.input_tokens / super::trace::TOKENS_PER_ID;
            if turn.shared_tokens < whole.saturating_mul(super::trace::TOKENS_PER_ID) {
                prompt.edit(limit(turn.shared_tokens));
            }
            let mut step = plain(FreeOrder::Shuffled, remote, 0, 0, block_tokens);
            step.expect = expectation(&step.remote, &prompt, 0, block_tokens);
            step.prompt = prompt;
            step.gap_ms = turn.gap_ms;
            if turn.gap_ms >= LONG_TTL_MS && matches!(step.expect, Expect::Read { .. }) {
                // The user took longer than a lease lasts.
                step.ttl_ms = SHORT_TTL_MS;
                step.expect = Expect::LeaseOver;
            }
            steps.push(step);
        }
    }
    number(steps)
}

fn number(mut steps: Vec<Step>) -> Vec<Step> {
    for (turn, step) in (1..).zip(&mut steps) {
        step.turn = turn;
    }
    steps
}

fn text(conversation: u64, tokens: u32) -> History {
    let mut history = History::new(conversation);
    history.set_len(tokens);
    history
}

fn plain(
    order: FreeOrder,
    remote: History,
    message: u32,
    local_hit_tokens: u32,
    block_tokens: u32,
) -> Step {
    let mut prompt = remote.clone();
    prompt.set_len(remote.len().saturating_add(message));
    Step {
        turn: 0,
        special: None,
        order,
        ttl_ms: LONG_TTL_MS,
        gap_ms: 0,
        local_hit_tokens,
        expect: expectation(&remote, &prompt, local_hit_tokens, block_tokens),
        remote,
        prompt,
    }
}

fn special_step(special: Special, remote: History, block_tokens: u32) -> Step {
    let whole = whole_blocks(remote.len(), block_tokens);
    let hit = match special {
        Special::PartialLocalHit => whole_blocks(whole / 2, block_tokens),
        Special::UnderThreshold => {
            // As little as can be below the threshold, in whole blocks.
            let tail = remote.len() - whole;
            let room = (THRESHOLD - 1).saturating_sub(tail);
            whole - whole_blocks(room, block_tokens)
        }
        _ => 0,
    };
    let mut step = plain(FreeOrder::Shuffled, remote, MESSAGE, hit, block_tokens);
    match special {
        Special::PartialLocalHit | Special::UnderThreshold => {}
        Special::HistoryEdited => {
            step.prompt.edit(SPECIAL_TOKENS / 2 + 3);
            step.expect = expectation(&step.remote, &step.prompt, hit, block_tokens);
        }
        Special::LeaseExpired => {
            step.ttl_ms = SHORT_TTL_MS;
            step.expect = Expect::LeaseOver;
        }
        Special::LeaseRevoked => step.expect = Expect::ReadFails,
    }
    step.special = Some(special);
    step
}

/// What an undisturbed turn must come to: whole blocks of the common head, less what is there already.
fn expectation(remote: &History, prompt: &History, hit: u32, block_tokens: u32) -> Expect {
    let offered = remote.len().min(prompt.len()).saturating_sub(hit);
    let common = remote
        .tokens()
        .iter()
        .zip(prompt.tokens())
        .take_while(|(a, b)| **a == *b)
        .count();
    let common = u32::try_from(common).unwrap_or(u32::MAX);
    let tokens = whole_blocks(common, block_tokens).saturating_sub(hit);
    if offered < THRESHOLD || tokens == 0 {
        Expect::Recompute
    } else {
        Expect::Read { tokens }
    }
}

fn whole_blocks(tokens: u32, block_tokens: u32) -> u32 {
    tokens - tokens % block_tokens.max(1)
}

#[cfg(test)]
mod tests {
    use super::super::trace::Turn;
    use super::*;

    fn read_tokens(steps: &[Step]) -> u64 {
        let tokens = steps.iter().map(|step| match step.expect {
            Expect::Read { tokens } => u64::from(tokens),
            _ => 0,
        });
        tokens.sum()
    }

    #[test]
    fn the_built_in_play_grows_and_has_every_special_turn() {
        let steps = built_in(6, 16, 1);
        assert_eq!(steps.len(), 4 * 6 + 5);
        assert!(steps.iter().zip(1..).all(|(step, turn)| step.turn == turn));
        let lengths: Vec<_> = steps[..6].iter().map(|step| step.remote.len()).collect();
        assert!(lengths.is_sorted());
        assert_eq!((lengths[0], lengths[5]), (2_053, 24_581));
        let specials: Vec<_> = steps.iter().filter_map(|step| step.special).collect();
        assert_eq!(specials, Special::ALL);
        // 32 KiB a token on a rank of eight of Qwen3-32B.
        assert!(read_tokens(&steps) * 32_768 > 10_000_000_000);
        assert_eq!(built_in(1, 16, 1).len(), 4 + 5);
    }

    #[test]
    fn special_turns_expect_what_they_are_for() {
        for block_tokens in [1, 16, 64, 256] {
            let steps = built_in(1, block_tokens, 1);
            let step = |special| {
                let step = steps.iter().find(|step| step.special == Some(special));
                step.unwrap()
            };
            let expect = |special| step(special).expect;
            let whole = whole_blocks(8_197, block_tokens);
            assert_eq!(
                expect(Special::PartialLocalHit),
                Expect::Read {
                    tokens: whole - step(Special::PartialLocalHit).local_hit_tokens
                }
            );
            assert_eq!(expect(Special::UnderThreshold), Expect::Recompute);
            assert_eq!(
                expect(Special::HistoryEdited),
                Expect::Read {
                    tokens: whole_blocks(4_099, block_tokens)
                }
            );
            assert_eq!(expect(Special::LeaseExpired), Expect::LeaseOver);
            assert_eq!(expect(Special::LeaseRevoked), Expect::ReadFails);
            for step in &steps {
                assert_eq!(step.local_hit_tokens % block_tokens, 0);
            }
            let under = step(Special::UnderThreshold);
            let left = under.remote.len() - under.local_hit_tokens;
            assert!((1..THRESHOLD).contains(&left), "{left}");
        }
    }

    #[test]
    fn a_trace_is_read_as_far_as_its_prompts_agree() {
        let turn = |input_tokens, shared_tokens| Turn {
            at_ms: 0,
            gap_ms: 0,
            input_tokens,
            shared_tokens,
            output_tokens: 100,
        };
        let conversation = Conversation {
            turns: vec![
                turn(1_000, 0),
                turn(1_500, 512),
                turn(3_000, 512),
                turn(600, 512),
            ],
        };
        let steps = of_trace(&[conversation], 16, 1);
        let expect: Vec<_> = steps.iter().map(|step| step.expect).collect();
        assert_eq!(
            expect,
            [
                // Goes on with all of the first prompt (one whole piece), so with its answer, too.
                Expect::Read { tokens: 1_088 },
                // Two pieces were whole, one agrees.
                Expect::Read { tokens: 512 },
                // A shorter prompt that agrees in one piece.
                Expect::Read { tokens: 512 },
            ]
        );
    }

    #[test]
    fn a_gap_longer_than_the_lease_finds_it_over() {
        let turn = |gap_ms| Turn {
            at_ms: 0,
            gap_ms,
            input_tokens: 1_000,
            shared_tokens: 512,
            output_tokens: 100,
        };
        let turns = vec![turn(0), turn(479_999), turn(480_000)];
        let steps = of_trace(&[Conversation { turns }], 16, 1);
        assert!(matches!(steps[0].expect, Expect::Read { .. }));
        assert_eq!(steps[1].expect, Expect::LeaseOver);
        assert_eq!(steps[1].ttl_ms, SHORT_TTL_MS);
    }
}

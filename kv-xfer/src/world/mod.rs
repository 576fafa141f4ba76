//! The virtual world: whole clusters in one thread, for tests and for `kvx sim`. Not for serving.
//!
//! A history is one run of a few engines that hold blocks for each other, read them, crash, start
//! again, lose each other, are told late or twice, and share a router that keeps descriptors and hands
//! them out: fresh, stale, doubled, damaged, or of another conversation. What runs is the engines' own
//! code: driver, helper lanes, meetings, fences, lease table, notices, side-channel answers, offers and
//! decisions. What is replaced is what makes runs differ: threads by a scheduler that picks whose round
//! is next, time by clocks that it moves, the transport by a fabric whose every byte it lands, the
//! side channel's sockets by calls that it may lose. Every choice comes from the seed, so that a
//! history replays exactly.
//!
//! After every step the world looks for what must never be (see [`Rule`]); at the end of a history it
//! stops making trouble and demands that all reads have ended, all blocks have come home, and everyone
//! who is alive can still be read from.
//!
//! ```
//! use kv_xfer::world::{Scenario, World};
//!
//! let outcome = World::run(7, &Scenario::default());
//! assert!(outcome.violations.is_empty());
//! assert_eq!(outcome.hash, World::run(7, &Scenario::default()).hash);
//! ```
#![forbid(unsafe_code)]

mod agent;
mod app;
mod chaos;
mod checks;
mod content;
mod dice;
mod fabric;
mod life;
mod net;
mod quiet;
mod record;
mod router;
mod script;
mod time;
mod turns;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use self::script::{Act, Play, Which};

use self::dice::{Dice, mix};
use self::fabric::{Fabric, FabricFaults};
use self::life::{Life, Place};
use self::net::{Net, NetFaults};
use self::record::{Descriptor, LeaseRecord, ReadRecord};
use self::time::Time;
use crate::memory::KvPool;

/// What a history is made of, besides its seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scenario {
    /// Steps of the scheduler before trouble ends.
    pub steps: u32,
    /// Keep what happened as text.
    pub trace: bool,
}

impl Default for Scenario {
    fn default() -> Self {
        Self {
            steps: 160,
            trace: false,
        }
    }
}

/// What must never be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Rule {
    /// A destination was handed back while something in flight might write into it, or bytes landed in
    /// a block that was no destination.
    LateWrite,
    /// Bytes that landed are not what the holder promised.
    ChangedBytes,
    /// Blocks of other tokens than the prompt's were landed, or a good descriptor's were not believed.
    OtherTokens,
    /// A read had not ended by its deadline, or had no end, or something waited for ever.
    NoEnd,
    /// A read ended twice.
    TwoEnds,
    /// What was damaged or meant for another was believed.
    Believed,
    /// A lease's remaining time was taken for more or less than it was.
    WrongTime,
    /// A peer that was alive could not be read from, or reads from it failed with another's trouble.
    HeldUp,
    /// A restarted engine was taken for its predecessor.
    WrongLife,
    /// A block was free twice, or had two owners, or never came home.
    LostOrDoubled,
    /// A lease ended for no reason, or before its time.
    LeaseEnded,
    /// A lease word was the same after a reuse, or was given twice.
    WordReused,
    /// The transport was used in a way that it forbids.
    Misuse,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LateWrite => "late_write",
            Self::ChangedBytes => "changed_bytes",
            Self::OtherTokens => "other_tokens",
            Self::NoEnd => "no_end",
            Self::TwoEnds => "two_ends",
            Self::Believed => "believed",
            Self::WrongTime => "wrong_time",
            Self::HeldUp => "held_up",
            Self::WrongLife => "wrong_life",
            Self::LostOrDoubled => "lost_or_doubled",
            Self::LeaseEnded => "lease_ended",
            Self::WordReused => "word_reused",
            Self::Misuse => "misuse",
        })
    }
}

/// Something that must never be, and was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Which rule was broken.
    pub rule: Rule,
    /// At which event of the history.
    pub event: u64,
    /// What was seen.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at event {}: {}", self.rule, self.event, self.what)
    }
}

/// How often what happened in a history.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tally {
    /// Reads that were submitted.
    pub reads: u64,
    /// Reads whose blocks landed.
    pub landed: u64,
    /// Reads that failed with their blocks.
    pub returned: u64,
    /// Reads that failed with their blocks in quarantine.
    pub quarantined: u64,
    /// Leases that were granted.
    pub leases: u64,
    /// Engines that crashed, lost their driver, or were shut down in the middle.
    pub ended: u64,
    /// Windows that were posted.
    pub windows: u64,
}

impl Tally {
    /// Adds another history's.
    pub fn add(&mut self, other: &Self) {
        let pairs = [
            (&mut self.reads, other.reads),
            (&mut self.landed, other.landed),
            (&mut self.returned, other.returned),
            (&mut self.quarantined, other.quarantined),
            (&mut self.leases, other.leases),
            (&mut self.ended, other.ended),
            (&mut self.windows, other.windows),
        ];
        for (sum, more) in pairs {
            *sum = sum.saturating_add(more);
        }
    }
}

/// How a history went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// How many events it had.
    pub events: u64,
    /// A number that two runs share only if the same things happened in the same order.
    pub hash: u64,
    /// What must never be, and was.
    pub violations: Vec<Violation>,
    /// How often what happened.
    pub tally: Tally,
    /// The events as text, if the scenario asks for them.
    pub trace: Vec<String>,
}

/// Violations that are kept of one history: the first ones tell the story.
const MAX_VIOLATIONS: usize = 8;

/// One history in progress.
pub struct World {
    dice: Dice,
    /// How often what goes wrong.
    troubles: Troubles,
    time: Time,
    fabric: Fabric,
    net: Net,
    places: Vec<Place>,
    /// Every life so far; `None` once it is over.
    lives: Vec<Option<Life>>,
    /// Every life's pool, for as long as the history lasts.
    pools: Vec<Arc<KvPool>>,
    leases: Vec<LeaseRecord>,
    reads: Vec<ReadRecord>,
    /// What the router keeps.
    descriptors: Vec<Descriptor>,
    requests: u64,
    events: u64,
    hash: u64,
    violations: Vec<Violation>,
    tally: Tally,
    /// Clocks have jumped: what they say about each other is void.
    jumped: bool,
    /// No more trouble is made.
    calm: bool,
    /// The place that the scheduler is busy with.
    focus: usize,
    trace: Option<Vec<String>>,
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World")
            .field("events", &self.events)
            .finish_non_exhaustive()
    }
}

/// How often what goes wrong, in a thousand, drawn for each history: in some, only one thing does.
#[derive(Debug, Clone, Copy, Default)]
struct Troubles {
    fabric: FabricFaults,
    net: NetFaults,
    fail_quiet: u32,
    fail_doubt: u32,
    hang: u32,
    lose_letter: u32,
    double_letter: u32,
    stray_letter: u32,
    crash: u32,
    cut: u32,
    jump: u32,
    lose_driver: u32,
    shut_down: u32,
    hang_meeting: u32,
    stale: u32,
    damage: u32,
    mixed_up: u32,
    drop_handle: u32,
    /// A new life draws its predecessor's lease words.
    same_words: u32,
}

impl Troubles {
    fn draw(dice: &mut Dice) -> Self {
        // Each kind is absent in two histories of five.
        let mut some = |most: usize| {
            if dice.chance(400) {
                0
            } else {
                u32::try_from(dice.within(1, most)).unwrap_or(0)
            }
        };
        Self {
            fabric: FabricFaults {
                refuse: some(60),
                doubtful_post: some(40),
                slow_post: some(60),
                unreachable: some(150),
                immortal: some(60),
                at_once: some(1000),
            },
            net: NetFaults {
                lost: some(200),
                stale: some(200),
                damaged: some(200),
                slow: some(200),
            },
            fail_quiet: some(80),
            fail_doubt: some(80),
            hang: some(120),
            lose_letter: some(300),
            double_letter: some(300),
            stray_letter: some(500),
            crash: some(400),
            cut: some(400),
            jump: some(300),
            lose_driver: some(60),
            shut_down: some(120),
            hang_meeting: some(200),
            stale: some(400),
            damage: some(200),
            mixed_up: some(250),
            drop_handle: some(400),
            same_words: some(600),
        }
    }
}

impl World {
    /// Runs one history.
    #[must_use]
    pub fn run(seed: u64, scenario: &Scenario) -> Outcome {
        let mut dice = Dice::new(seed, 0);
        let troubles = Troubles::draw(&mut dice);
        let mut world = Self::new(seed, dice, troubles, scenario.trace);
        let places = world.dice.within(2, 4);
        for _ in 0..places {
            world.add_place();
        }
        for _ in 0..scenario.steps {
            world.try_step();
            if !world.violations.is_empty() {
                // What follows from a broken rule says nothing new.
                return world.finish();
            }
        }
        world.end_well();
        world.finish()
    }

    fn new(seed: u64, dice: Dice, troubles: Troubles, trace: bool) -> Self {
        let (time, fabric) = (Time::default(), Fabric::default());
        {
            let mut state = fabric.state();
            state.faults = troubles.fabric;
            state.dice = Some(Dice::new(seed, 1));
        }
        let side = Dice::new(seed, 2);
        Self {
            dice,
            troubles,
            net: Net::new(fabric.clone(), time.clone(), troubles.net, side),
            time,
            fabric,
            places: Vec::new(),
            lives: Vec::new(),
            pools: Vec::new(),
            leases: Vec::new(),
            reads: Vec::new(),
            descriptors: Vec::new(),
            requests: 0,
            events: 0,
            hash: seed,
            violations: Vec::new(),
            tally: Tally::default(),
            jumped: false,
            calm: false,
            focus: 0,
            trace: trace.then(Vec::new),
        }
    }

    fn finish(mut self) -> Outcome {
        self.tally.windows = self.fabric.state().windows;
        Outcome {
            events: self.events,
            hash: self.hash,
            violations: std::mem::take(&mut self.violations),
            tally: self.tally,
            trace: self.trace.take().unwrap_or_default(),
        }
    }

    /// Something happened: `code` and numbers that tell it apart, and words for a trace.
    fn note(&mut self, code: u8, a: usize, b: u64, words: impl FnOnce() -> String) {
        self.events = self.events.saturating_add(1);
        self.hash = mix(self.hash, u64::from(code) << 56 ^ (a as u64) << 40 ^ b);
        if let Some(trace) = &mut self.trace {
            let at = Duration::from_nanos(self.time.now());
            trace.push(format!("{:>5} {at:>12.3?}  {}", self.events, words()));
        }
    }

    /// A rule is broken.
    fn blame(&mut self, rule: Rule, what: impl FnOnce() -> String) {
        if self.violations.len() < MAX_VIOLATIONS {
            let (event, what) = (self.events, what());
            if let Some(trace) = &mut self.trace {
                trace.push(format!("      VIOLATION {rule}: {what}"));
            }
            self.violations.push(Violation { rule, event, what });
        }
    }
}

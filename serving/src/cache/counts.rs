//! The states of blocks, and how many blocks are in which.

use std::fmt;

/// Where a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// Holds nothing.
    Free,
    /// Holds a full block of tokens that a later request may start with; nobody holds it.
    Cached,
    /// A request holds it, perhaps leases as well.
    Active,
    /// Only leases hold it.
    Leased,
    /// The destination of a read.
    Claimed,
    /// The destination of a failed read that may still write into it.
    Quarantined,
}

impl State {
    /// Every state.
    pub const ALL: [Self; 6] = [
        Self::Free,
        Self::Cached,
        Self::Active,
        Self::Leased,
        Self::Claimed,
        Self::Quarantined,
    ];

    /// A stable name for metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Cached => "cached",
            Self::Active => "active",
            Self::Leased => "leased",
            Self::Claimed => "claimed",
            Self::Quarantined => "quarantined",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// How many blocks are in each state. Together they are the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// [`State::Free`].
    pub free: usize,
    /// [`State::Cached`].
    pub cached: usize,
    /// [`State::Active`].
    pub active: usize,
    /// [`State::Leased`].
    pub leased: usize,
    /// [`State::Claimed`].
    pub claimed: usize,
    /// [`State::Quarantined`].
    pub quarantined: usize,
}

impl Counts {
    /// Blocks in one state.
    #[must_use]
    pub const fn of(&self, state: State) -> usize {
        match state {
            State::Free => self.free,
            State::Cached => self.cached,
            State::Active => self.active,
            State::Leased => self.leased,
            State::Claimed => self.claimed,
            State::Quarantined => self.quarantined,
        }
    }

    pub(super) fn add(&mut self, state: State) {
        let count = self.at(state);
        *count = count.saturating_add(1);
    }

    pub(super) fn moved(&mut self, from: State, to: State) {
        let count = self.at(from);
        *count = count.saturating_sub(1);
        self.add(to);
    }

    fn at(&mut self, state: State) -> &mut usize {
        match state {
            State::Free => &mut self.free,
            State::Cached => &mut self.cached,
            State::Active => &mut self.active,
            State::Leased => &mut self.leased,
            State::Claimed => &mut self.claimed,
            State::Quarantined => &mut self.quarantined,
        }
    }
}

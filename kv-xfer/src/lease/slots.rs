//! The slots behind the lease table: one per lease word, with the lease that has it, in a list from
//! the oldest grant to the newest.

use std::num::NonZeroU64;

use crate::clock::MonoTime;
use crate::ids::{BlockId, LeaseId, RequestId};

/// Bits of a lease id that name its slot; the rest number the grant. Lease ids thus rise with age,
/// are never reused, and find their slot without a search.
const SLOT_BITS: u32 = 24;
/// Highest grant number that fits into a lease id.
const MAX_SEQ: u64 = (1 << (64 - SLOT_BITS)) - 1;
/// No slot.
const NONE: u32 = u32::MAX;

/// A lease that holds.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) request: RequestId,
    pub(super) blocks: Vec<BlockId>,
    pub(super) deadline: MonoTime,
    /// Ranks that have released it by request id.
    pub(super) released_by: u32,
    /// Ranks that must.
    pub(super) release_of: u32,
    older: u32,
    newer: u32,
}

#[derive(Debug)]
enum State {
    Free,
    Live(Live),
    /// Ended, and its word not advanced yet.
    Ended,
}

#[derive(Debug)]
struct Slot {
    /// What the word table holds for this slot: the word of its lease, or of its next one.
    word: NonZeroU64,
    /// The last lease in it.
    lease: LeaseId,
    state: State,
}

/// All slots. Made on first use, so that a large maximum costs nothing.
#[derive(Debug)]
pub(super) struct Slots {
    slots: Vec<Slot>,
    free: Vec<u32>,
    oldest: u32,
    newest: u32,
    live: usize,
    next_seq: u64,
    word_base: u64,
    max: u32,
}

impl Slots {
    pub(super) const fn new(max: u32, word_base: u64) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            oldest: NONE,
            newest: NONE,
            live: 0,
            next_seq: 1,
            word_base,
            max,
        }
    }

    /// The word that a slot starts with: scattered over all 64 bits, so that neither another slot
    /// nor another incarnation comes near it by counting.
    pub(super) fn initial_word(&self, slot: u32) -> NonZeroU64 {
        // The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection.
        let mut x = self
            .word_base
            .wrapping_add(u64::from(slot).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        NonZeroU64::new(x ^ (x >> 31)).unwrap_or(NonZeroU64::MIN)
    }

    /// What the word table holds, or should hold, for `slot`.
    pub(super) fn word(&self, slot: u32) -> NonZeroU64 {
        self.slots
            .get(widen(slot))
            .map_or_else(|| self.initial_word(slot), |s| s.word)
    }

    pub(super) const fn ids_left(&self) -> bool {
        self.next_seq <= MAX_SEQ
    }

    /// Whether [`insert`](Self::insert) would find a slot.
    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty() || self.slots.len() < widen(self.max)
    }

    /// Puts a lease into a free slot, as the newest. `None` when there is none.
    pub(super) fn insert(
        &mut self,
        request: RequestId,
        blocks: Vec<BlockId>,
        deadline: MonoTime,
    ) -> Option<(LeaseId, u32, NonZeroU64)> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => self.add_slot()?,
        };
        let lease = LeaseId((self.next_seq << SLOT_BITS) | u64::from(slot));
        let older = self.newest;
        let entry = self.slots.get_mut(widen(slot))?;
        entry.lease = lease;
        entry.state = State::Live(Live {
            request,
            blocks,
            deadline,
            released_by: 0,
            release_of: 0,
            older,
            newer: NONE,
        });
        let word = entry.word;
        self.next_seq = self.next_seq.saturating_add(1);
        self.live = self.live.saturating_add(1);
        match self.live_mut(older) {
            Some(before) => before.newer = slot,
            None => self.oldest = slot,
        }
        self.newest = slot;
        Some((lease, slot, word))
    }

    fn add_slot(&mut self) -> Option<u32> {
        let slot = u32::try_from(self.slots.len()).ok()?;
        if slot >= self.max {
            return None;
        }
        self.slots.push(Slot {
            word: self.initial_word(slot),
            lease: LeaseId(0),
            state: State::Free,
        });
        Some(slot)
    }

    /// The slot of a lease that holds.
    pub(super) fn find(&self, lease: LeaseId) -> Option<u32> {
        let slot = slot_of(lease);
        let entry = self.slots.get(widen(slot))?;
        (entry.lease == lease && matches!(entry.state, State::Live(_))).then_some(slot)
    }

    pub(super) fn live(&self, slot: u32) -> Option<(LeaseId, NonZeroU64, &Live)> {
        let entry = self.slots.get(widen(slot))?;
        match &entry.state {
            State::Live(live) => Some((entry.lease, entry.word, live)),
            State::Free | State::Ended => None,
        }
    }

    pub(super) fn live_mut(&mut self, slot: u32) -> Option<&mut Live> {
        match &mut self.slots.get_mut(widen(slot))?.state {
            State::Live(live) => Some(live),
            State::Free | State::Ended => None,
        }
    }

    /// When a lease ends, if it holds.
    pub(super) fn deadline(&self, lease: LeaseId) -> Option<MonoTime> {
        let entry = self.slots.get(widen(slot_of(lease)))?;
        match &entry.state {
            State::Live(live) if entry.lease == lease => Some(live.deadline),
            State::Live(_) | State::Free | State::Ended => None,
        }
    }

    /// How many leases hold.
    pub(super) const fn live_count(&self) -> usize {
        self.live
    }

    /// The slot of the lease that was granted first among those that hold.
    pub(super) fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }

    /// Ends the lease in `slot`. The slot stays taken until [`vacate`](Self::vacate).
    pub(super) fn end(&mut self, slot: u32) -> Option<(LeaseId, NonZeroU64, Live)> {
        let entry = self.slots.get_mut(widen(slot))?;
        if !matches!(entry.state, State::Live(_)) {
            return None;
        }
        let State::Live(live) = std::mem::replace(&mut entry.state, State::Ended) else {
            return None;
        };
        let (lease, word) = (entry.lease, entry.word);
        self.live = self.live.saturating_sub(1);
        match self.live_mut(live.older) {
            Some(before) => before.newer = live.newer,
            None => self.oldest = live.newer,
        }
        match self.live_mut(live.newer) {
            Some(after) => after.older = live.older,
            None => self.newest = live.older,
        }
        Some((lease, word, live))
    }

    /// The word to store before `slot` can be used again, if `lease` ended there and had `word`.
    pub(super) fn advanced_word(&self, slot: u32, lease: LeaseId, word: u64) -> Option<NonZeroU64> {
        let entry = self.slots.get(widen(slot))?;
        let ended = matches!(entry.state, State::Ended);
        // Never zero: a reader's landing place starts as zero, and must not match by that.
        (ended && entry.lease == lease && entry.word.get() == word)
            .then(|| entry.word.checked_add(1).unwrap_or(NonZeroU64::MIN))
    }

    /// Gives back a slot whose word has been advanced to `word`.
    pub(super) fn vacate(&mut self, slot: u32, word: NonZeroU64) {
        if let Some(entry) = self.slots.get_mut(widen(slot)) {
            entry.word = word;
            entry.state = State::Free;
            self.free.push(slot);
        }
    }
}

fn slot_of(lease: LeaseId) -> u32 {
    u32::try_from(lease.0 & ((1 << SLOT_BITS) - 1)).unwrap_or(NONE)
}

/// Slot numbers fit into `usize` on every target that NIXL has; elsewhere they find no slot.
fn widen(slot: u32) -> usize {
    usize::try_from(slot).unwrap_or(usize::MAX)
}

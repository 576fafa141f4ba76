//! The lease table.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::Duration;

use super::deadlines::Deadlines;
use super::ended::{EndReason, EndedLease, FreedBlocks, RetireError, RetireFailed};
use super::slots::Slots;
use super::terms::{
    Grant, GrantError, GrantRefused, LeaseConfig, LeaseConfigError, NewLease, ReleaseIgnored,
    ReleaseOutcome, RenewOutcome, WordTableTooSmall,
};
use crate::clock::MonoTime;
use crate::ids::{BlockId, LeaseId, LeaseWord, RequestId, WordSlot};
use crate::memory::ControlWords;

/// What a lease table has done since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LeaseCounters {
    /// Leases granted.
    pub granted: u64,
    /// Grants refused.
    pub refused: u64,
    /// Renewals that moved a deadline.
    pub renewed: u64,
    /// Renewals of leases that do not hold, or came after the deadline.
    pub renewals_ignored: u64,
    /// Leases that ended by release.
    pub released: u64,
    /// Releases that did nothing: duplicates, unknown leases, wrong words.
    pub releases_ignored: u64,
    /// Leases that ended by their deadline.
    pub expired: u64,
    /// Leases that the holder took back.
    pub revoked: u64,
    /// Ended leases whose blocks were freed.
    pub retired: u64,
}

/// A lease that holds, seen from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseView<'a> {
    /// The lease as it was granted, with its present deadline.
    pub grant: Grant,
    /// Whose blocks they are.
    pub request: &'a RequestId,
    /// The blocks.
    pub blocks: &'a [BlockId],
}

/// Every lease of one holder. See the [module](super) for the rule it keeps.
#[derive(Debug)]
pub struct LeaseTable {
    config: LeaseConfig,
    slots: Slots,
    by_request: HashMap<RequestId, u32>,
    deadlines: Deadlines,
    counters: LeaseCounters,
    live_blocks: u64,
}

impl LeaseTable {
    /// An empty table.
    ///
    /// # Errors
    /// [`LeaseConfigError`] when the configuration makes no sense.
    pub fn new(config: LeaseConfig) -> Result<Self, LeaseConfigError> {
        config.validate()?;
        Ok(Self {
            config,
            slots: Slots::new(config.max_leases, config.word_base),
            by_request: HashMap::new(),
            deadlines: Deadlines::default(),
            counters: LeaseCounters::default(),
            live_blocks: 0,
        })
    }

    /// The word that `slot` starts with, and that its first lease will have.
    #[must_use]
    pub fn initial_word(&self, slot: WordSlot) -> LeaseWord {
        LeaseWord(self.slots.initial_word(slot.0).get())
    }

    /// Writes the present word of every slot. To be done once, before the first descriptor leaves:
    /// until then readers find no valid word and recompute.
    ///
    /// # Errors
    /// [`WordTableTooSmall`] when there are fewer words than [`LeaseConfig::max_leases`].
    pub fn publish_words(&self, words: &dyn ControlWords) -> Result<(), WordTableTooSmall> {
        for slot in 0..self.config.max_leases {
            if !words.store(WordSlot(slot), self.slots.word(slot).get()) {
                return Err(WordTableTooSmall {
                    slot,
                    needed: self.config.max_leases,
                });
            }
        }
        Ok(())
    }

    /// Promises to keep blocks unchanged until the deadline. The word table needs no store: the
    /// slot already holds the word that the lease gets.
    ///
    /// # Errors
    /// [`GrantRefused`], with the blocks.
    pub fn grant(&mut self, now: MonoTime, new: NewLease) -> Result<Grant, GrantRefused> {
        let NewLease {
            request,
            blocks,
            ttl,
        } = new;
        let ttl = ttl.unwrap_or(self.config.default_ttl);
        let error = if blocks.is_empty() {
            GrantError::NoBlocks
        } else if ttl.is_zero() {
            GrantError::ZeroTtl
        } else if !self.slots.ids_left() {
            GrantError::IdsExhausted
        } else if !self.slots.has_room() {
            self.full()
        } else {
            return self.insert(now, request, blocks, ttl);
        };
        Err(self.refuse(error, blocks))
    }

    fn insert(
        &mut self,
        now: MonoTime,
        request: RequestId,
        blocks: Vec<BlockId>,
        ttl: Duration,
    ) -> Result<Grant, GrantRefused> {
        let deadline = now.saturating_add(ttl.min(self.config.max_ttl));
        let count = count(&blocks);
        let by_request = match self.by_request.entry(request.clone()) {
            Entry::Vacant(vacant) => vacant,
            Entry::Occupied(taken) => {
                let lease = self.slots.live(*taken.get()).map_or(LeaseId(0), |l| l.0);
                return Err(self.refuse(GrantError::RequestLeased { lease }, blocks));
            }
        };
        let Some((lease, slot, word)) = self.slots.insert(request, blocks, deadline) else {
            // `has_room` was asked; an empty list of blocks here would be a fault of this module.
            let error = self.full();
            return Err(self.refuse(error, Vec::new()));
        };
        by_request.insert(slot);
        self.deadlines.insert(deadline, lease);
        self.live_blocks = self.live_blocks.saturating_add(count);
        self.counters.granted = self.counters.granted.saturating_add(1);
        Ok(Grant {
            lease,
            slot: WordSlot(slot),
            word: LeaseWord(word.get()),
            deadline,
        })
    }

    /// Moves a lease's deadline to `extension` from now, if that is later than it is. A lease whose
    /// deadline has passed is not brought back, whether or not [`expire`](Self::expire) has run.
    pub fn renew(&mut self, now: MonoTime, lease: LeaseId, extension: Duration) -> RenewOutcome {
        let slot = self.slots.find(lease);
        self.renew_slot(now, slot, extension)
    }

    /// [`renew`](Self::renew) by the request's name, as vLLM's heartbeats (`HB:{request},…`) do.
    pub fn renew_request(
        &mut self,
        now: MonoTime,
        request: &RequestId,
        extension: Duration,
    ) -> RenewOutcome {
        let slot = self.by_request.get(request).copied();
        self.renew_slot(now, slot, extension)
    }

    fn renew_slot(
        &mut self,
        now: MonoTime,
        slot: Option<u32>,
        extension: Duration,
    ) -> RenewOutcome {
        let wanted = now.saturating_add(extension.min(self.config.max_ttl));
        let outcome = match slot.and_then(|slot| self.slots.live_mut(slot)) {
            None => RenewOutcome::Unknown,
            Some(live) if live.deadline <= now => RenewOutcome::TooLate,
            Some(live) if live.deadline >= wanted => RenewOutcome::Unchanged(live.deadline),
            Some(live) => {
                live.deadline = wanted;
                self.deadlines.settle(&self.slots);
                RenewOutcome::Extended(wanted)
            }
        };
        let counter = match outcome {
            RenewOutcome::Extended(_) => &mut self.counters.renewed,
            RenewOutcome::Unchanged(_) => return outcome,
            RenewOutcome::TooLate | RenewOutcome::Unknown => &mut self.counters.renewals_ignored,
        };
        *counter = counter.saturating_add(1);
        outcome
    }

    /// The only reader of a lease has its bytes, or wants none. A second release of the same lease
    /// does nothing. A release after the deadline that finds the lease still there ends it as
    /// released: its word had not moved.
    pub fn release(&mut self, lease: LeaseId, word: LeaseWord) -> ReleaseOutcome {
        let Some(slot) = self.slots.find(lease) else {
            return self.ignore(ReleaseIgnored::NotLive);
        };
        match self.slots.live(slot) {
            Some((_, held, _)) if held.get() == word.0 => self.release_slot(slot),
            _ => self.ignore(ReleaseIgnored::WrongWord),
        }
    }

    /// One of `ranks` reader ranks is done, as vLLM's notification `{request}:{ranks}` says. The
    /// lease ends when as many have said so. Should they disagree about how many they are, the
    /// largest number counts.
    pub fn release_request(&mut self, request: &RequestId, ranks: u32) -> ReleaseOutcome {
        if ranks == 0 {
            return self.ignore(ReleaseIgnored::ZeroRanks);
        }
        let slot = self.by_request.get(request).copied();
        let Some((slot, live)) = slot.and_then(|slot| Some((slot, self.slots.live_mut(slot)?)))
        else {
            return self.ignore(ReleaseIgnored::NotLive);
        };
        live.released_by = live.released_by.saturating_add(1);
        live.release_of = live.release_of.max(ranks);
        if live.released_by < live.release_of {
            return ReleaseOutcome::Counted {
                seen: live.released_by,
                of: live.release_of,
            };
        }
        self.release_slot(slot)
    }

    fn release_slot(&mut self, slot: u32) -> ReleaseOutcome {
        match self.end(slot, EndReason::Released) {
            Some(ended) => ReleaseOutcome::Ended(ended),
            None => self.ignore(ReleaseIgnored::NotLive),
        }
    }

    fn ignore(&mut self, why: ReleaseIgnored) -> ReleaseOutcome {
        self.counters.releases_ignored = self.counters.releases_ignored.saturating_add(1);
        ReleaseOutcome::Ignored(why)
    }

    /// Takes one lease back. Readers notice by its word.
    pub fn revoke(&mut self, lease: LeaseId) -> Option<EndedLease> {
        let slot = self.slots.find(lease)?;
        self.end(slot, EndReason::Revoked)
    }

    /// Takes back the lease of a request, for instance one that was aborted.
    pub fn revoke_request(&mut self, request: &RequestId) -> Option<EndedLease> {
        let slot = self.by_request.get(request).copied()?;
        self.end(slot, EndReason::Revoked)
    }

    /// Takes back the `count` leases that were granted first.
    pub fn revoke_oldest(&mut self, count: usize) -> Vec<EndedLease> {
        std::iter::from_fn(|| self.revoke_one())
            .take(count)
            .collect()
    }

    /// Takes back leases, those granted first before others, until they hold `blocks` blocks
    /// together or none are left. A block under several leases counts once for each: the caller,
    /// who counts the references, asks again if too few came free.
    pub fn revoke_until(&mut self, blocks: u64) -> Vec<EndedLease> {
        let mut found = 0_u64;
        let mut ended = Vec::new();
        while found < blocks {
            let Some(one) = self.revoke_one() else { break };
            found = found.saturating_add(count(&one.blocks));
            ended.push(one);
        }
        ended
    }

    /// Takes back every lease, at shutdown.
    pub fn revoke_all(&mut self) -> Vec<EndedLease> {
        std::iter::from_fn(|| self.revoke_one()).collect()
    }

    fn revoke_one(&mut self) -> Option<EndedLease> {
        let slot = self.slots.oldest()?;
        self.end(slot, EndReason::Revoked)
    }

    /// Ends every lease whose deadline is `now` or earlier, the earliest deadline first,
    /// and of equal ones the older lease.
    pub fn expire(&mut self, now: MonoTime) -> Vec<EndedLease> {
        self.expire_some(now, usize::MAX)
    }

    /// Like [`expire`](Self::expire), but at most `limit` leases, so that whoever shares the table
    /// is not kept waiting by all of them. Fewer means that there are no more.
    pub fn expire_some(&mut self, now: MonoTime, limit: usize) -> Vec<EndedLease> {
        std::iter::from_fn(|| {
            let (deadline, lease) = self.deadlines.first()?;
            if deadline > now {
                return None;
            }
            let slot = self.slots.find(lease)?;
            self.end(slot, EndReason::Expired)
        })
        .take(limit)
        .collect()
    }

    /// When [`expire`](Self::expire) has something to do next.
    #[must_use]
    pub fn next_deadline(&self) -> Option<MonoTime> {
        self.deadlines.first().map(|(deadline, _)| deadline)
    }

    fn end(&mut self, slot: u32, reason: EndReason) -> Option<EndedLease> {
        let (lease, word, live) = self.slots.end(slot)?;
        self.deadlines.settle(&self.slots);
        self.by_request.remove(&live.request);
        self.live_blocks = self.live_blocks.saturating_sub(count(&live.blocks));
        let counter = match reason {
            EndReason::Released => &mut self.counters.released,
            EndReason::Expired => &mut self.counters.expired,
            EndReason::Revoked => &mut self.counters.revoked,
        };
        *counter = counter.saturating_add(1);
        Some(EndedLease {
            lease,
            request: live.request,
            slot: WordSlot(slot),
            word: LeaseWord(word.get()),
            reason,
            blocks: live.blocks,
        })
    }

    /// Advances the word of an ended lease, *then* gives its blocks out and its slot back. From
    /// here on every reader of the lease finds another word.
    ///
    /// # Errors
    /// [`RetireFailed`], with the lease, when it is of another lease table or the word table has no
    /// such slot. Its blocks stay out of use.
    // The error is as large as the lease it gives back, which is what it is for.
    #[allow(clippy::result_large_err)]
    pub fn retire(
        &mut self,
        ended: EndedLease,
        words: &dyn ControlWords,
    ) -> Result<FreedBlocks, RetireFailed> {
        let slot = ended.slot;
        let advanced = self.slots.advanced_word(slot.0, ended.lease, ended.word.0);
        let Some(advanced) = advanced else {
            let lease = ended.lease;
            let error = RetireError::Foreign { lease };
            return Err(RetireFailed { error, ended });
        };
        if !words.store(slot, advanced.get()) {
            let error = RetireError::NoSuchSlot { slot };
            return Err(RetireFailed { error, ended });
        }
        self.slots.vacate(slot.0, advanced);
        self.counters.retired = self.counters.retired.saturating_add(1);
        Ok(FreedBlocks {
            lease: ended.lease,
            request: ended.request,
            blocks: ended.blocks,
            reason: ended.reason,
        })
    }

    /// A lease that holds.
    #[must_use]
    pub fn get(&self, lease: LeaseId) -> Option<LeaseView<'_>> {
        self.view(self.slots.find(lease)?)
    }

    /// The lease of a request.
    #[must_use]
    pub fn get_request(&self, request: &RequestId) -> Option<LeaseView<'_>> {
        self.view(*self.by_request.get(request)?)
    }

    fn view(&self, slot: u32) -> Option<LeaseView<'_>> {
        let (lease, word, live) = self.slots.live(slot)?;
        Some(LeaseView {
            grant: Grant {
                lease,
                slot: WordSlot(slot),
                word: LeaseWord(word.get()),
                deadline: live.deadline,
            },
            request: &live.request,
            blocks: &live.blocks,
        })
    }

    /// How many leases hold.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.slots.live_count()
    }

    /// Whether no lease holds.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.slots.live_count() == 0
    }

    /// How many blocks the leases hold, a block under several of them counted once for each.
    #[must_use]
    pub const fn blocks(&self) -> u64 {
        self.live_blocks
    }

    /// How many leases have ended and are not retired: those that wait for it, and those whose
    /// [`EndedLease`] was dropped. Zero once all work is done, or blocks were lost.
    #[must_use]
    pub const fn unretired(&self) -> u64 {
        let c = &self.counters;
        c.released
            .saturating_add(c.expired)
            .saturating_add(c.revoked)
            .saturating_sub(c.retired)
    }

    /// What the table has done so far.
    #[must_use]
    pub const fn counters(&self) -> LeaseCounters {
        self.counters
    }

    /// The configuration.
    #[must_use]
    pub const fn config(&self) -> &LeaseConfig {
        &self.config
    }

    #[cfg(test)]
    pub(super) fn deadline_entries(&self) -> usize {
        self.deadlines.entries()
    }

    const fn full(&self) -> GrantError {
        GrantError::Full {
            max: self.config.max_leases,
            unretired: self.unretired(),
        }
    }

    fn refuse(&mut self, error: GrantError, blocks: Vec<BlockId>) -> GrantRefused {
        self.counters.refused = self.counters.refused.saturating_add(1);
        GrantRefused { error, blocks }
    }
}

fn count(blocks: &[BlockId]) -> u64 {
    u64::try_from(blocks.len()).unwrap_or(u64::MAX)
}

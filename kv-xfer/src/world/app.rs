//! What serving engines do with the library: they lease, read, cancel, renew, revoke.

use std::time::Duration;

use super::content::{self, BLOCK_TOKENS, CONVERSATIONS, HISTORIES, NAMES, PROMPT_BLOCKS};
use super::life::Owner;
use super::record::{Accepted, Descriptor, LeaseRecord, ReadRecord, ReadState};
use super::router::{HandedOut, Wrong};
use super::{Rule, World};
use crate::engine::{
    Direction, LeaseError, LeaseSpec, Prompt, ReadRequest, ReleasePolicy, SubmitRefused,
};
use crate::ids::{BlockId, RequestId};
use crate::policy::{Action, LeaseAction};

/// Offers that an engine keeps.
const OFFERS: usize = 6;
/// How far clocks' readings of each other may be off: half a slow round trip, and drift.
const CLOCK_SLACK: Duration = Duration::from_millis(600);
/// The longest time that a read is given.
pub(super) const LONGEST_READ: Duration = Duration::from_secs(2);

impl World {
    /// An engine leases some blocks.
    pub(super) fn lease_some(&mut self, no: usize) {
        let conversation = self.dice.below(CONVERSATIONS);
        let history = self.dice.below(HISTORIES);
        let count = self.dice.within(1, PROMPT_BLOCKS);
        let mut shared = Vec::new();
        if self.dice.chance(250) {
            // Another lease of the same beginning shares its blocks.
            let hashes = content::prompt(conversation, history);
            let of = |lease: &&LeaseRecord| {
                lease.life == no && !lease.freed && std::ptr::eq(lease.hashes, hashes)
            };
            if let Some(lease) = self.leases.iter().find(of) {
                shared.clone_from(&lease.blocks);
            }
        }
        let ttl = self.dice.chance(600).then(|| {
            let (shortest, longest) = (Duration::from_millis(50), Duration::from_secs(20));
            self.dice.time(shortest, longest)
        });
        self.lease(no, conversation, history, count, shared, ttl);
    }

    /// Leases blocks of a prompt; the lease's number.
    pub(super) fn lease(
        &mut self,
        no: usize,
        conversation: usize,
        history: usize,
        count: usize,
        shared: Vec<u32>,
        ttl: Option<Duration>,
    ) -> Option<usize> {
        self.requests = self.requests.saturating_add(1);
        let request = RequestId::new(format!("request-{}", self.requests)).ok()?;
        // The last block may be partly filled: it has no hash then, and cannot be read.
        let missing = if self.calm { 0 } else { self.dice.below(2) };
        let hashes = content::prompt(conversation, history);
        let order = self.dice.below(3);
        let mix = self.dice.word();
        let life = self.life(no)?;
        let mut blocks = shared;
        blocks.truncate(count);
        let old = blocks.len();
        let mut fresh = life.free();
        fresh.truncate(count.saturating_sub(old));
        match order {
            0 => fresh.reverse(),
            1 => {
                let by = usize::try_from(mix)
                    .unwrap_or(0)
                    .checked_rem(fresh.len())
                    .unwrap_or(0);
                fresh.rotate_left(by);
            }
            _ => {}
        }
        blocks.extend(fresh);
        if blocks.is_empty() {
            return None;
        }
        let refilled = blocks.iter().skip(old).all(|block| life.refill(*block));
        let tokens = (blocks.len() * BLOCK_TOKENS as usize).saturating_sub(missing) as u64;
        let full = usize::try_from(tokens / u64::from(BLOCK_TOKENS)).unwrap_or(0);
        let tags: Vec<u64> = blocks
            .iter()
            .map(|block| life.tags.get(*block as usize).copied().unwrap_or(0))
            .collect();
        let leased = life.stepped.engine.lease(LeaseSpec {
            request,
            blocks: blocks.iter().copied().map(BlockId).collect(),
            tokens,
            hashes: hashes.get(..full).unwrap_or_default().to_vec(),
            ttl,
            direction: if order == 0 {
                Direction::PrefillToDecode
            } else {
                Direction::DecodeToPrefill
            },
            tenant: Some("tenant"),
            conversation: NAMES.get(conversation).copied(),
        });
        let place = life.place;
        if !refilled {
            self.blame(Rule::LostOrDoubled, || {
                format!("life {no} cannot write into {blocks:?}")
            });
        }
        let leased = match leased {
            Ok(leased) => leased,
            Err(refused) => {
                let kept = refused
                    .blocks
                    .iter()
                    .map(|block| block.0)
                    .eq(blocks.iter().copied());
                if !kept || !matches!(refused.error, LeaseError::Table(_)) {
                    self.blame(Rule::LostOrDoubled, || format!("no lease: {refused:?}"));
                }
                self.take_freed(no);
                return None;
            }
        };
        let ticket = leased.remote.ticket.as_ref()?.unverified();
        let reference = ticket.lease;
        let until = ticket.stamp + ticket.remaining;
        let twice = self.leases.iter().any(|lease| {
            lease.life == no
                && (lease.id == leased.lease
                    || (lease.slot == reference.slot.0 && lease.word == reference.word.0))
        });
        if twice {
            self.blame(Rule::WordReused, || {
                format!("lease {} has another's name or word", leased.lease)
            });
        }
        if let Some(life) = self.life(no) {
            for block in &blocks {
                match life.owner(*block) {
                    Some(Owner::Leases(count)) => {
                        life.own(*block, Owner::Leases(count.saturating_add(1)));
                    }
                    _ => life.own(*block, Owner::Leases(1)),
                }
            }
        }
        let lease = self.leases.len();
        self.note(20, no, leased.lease.0, || {
            format!("life {no}: lease {} of blocks {blocks:?}", leased.lease)
        });
        self.leases.push(LeaseRecord {
            life: no,
            id: leased.lease,
            slot: reference.slot.0,
            word: reference.word.0,
            blocks,
            tags,
            hashes,
            until,
            freed: false,
            may_release: false,
            may_revoke: false,
        });
        self.tally.leases = self.tally.leases.saturating_add(1);
        self.keep_descriptor(Descriptor {
            remote: leased.remote,
            lease,
            place,
            conversation,
            history,
        });
        self.take_freed(no);
        Some(lease)
    }

    /// An engine gets a descriptor and does with it what it should, or less.
    pub(super) fn read_some(&mut self, no: usize) {
        let Some(handed) = self.hand_out() else {
            return;
        };
        let Some(accepted) = self.accept(no, &handed) else {
            return;
        };
        let hashes = content::prompt(handed.conversation, handed.history);
        let local_hit = self.dice.below(3) as u64 * u64::from(BLOCK_TOKENS);
        let threshold = if self.dice.chance(200) { 8 } else { 0 };
        let (careless, again) = (self.dice.chance(100), self.dice.chance(150));
        let Some(life) = self.life(no) else { return };
        let decision = life.stepped.engine.decide(
            &accepted.offer,
            &Prompt {
                tokens: (hashes.len() * BLOCK_TOKENS as usize) as u64,
                hashes,
                local_hit_tokens: local_hit,
                threshold,
            },
        );
        let matched = accepted.offer.matching_blocks(hashes);
        let all = accepted.offer.ticket().runs.len();
        let span = match decision.action {
            _ if careless => 0..all,
            Action::Read {
                first_block,
                blocks,
                ..
            } => {
                let first = first_block as usize;
                first..first.saturating_add(blocks as usize)
            }
            Action::Recompute | Action::Nothing => {
                if decision.lease == LeaseAction::Release && self.dice.chance(500) {
                    self.release(no, &accepted);
                }
                return;
            }
        };
        if span.end > matched && !careless {
            self.blame(Rule::OtherTokens, || {
                format!("{decision:?} is of blocks that do not match")
            });
        }
        let shortest = if self.dice.chance(200) { 1 } else { 150 };
        let timeout = self
            .dice
            .time(Duration::from_millis(shortest), LONGEST_READ);
        let policies = [
            ReleasePolicy::Always,
            ReleasePolicy::Always,
            ReleasePolicy::AfterLanded,
            ReleasePolicy::Never,
        ];
        let policy = self.dice.pick(&policies).copied().unwrap_or_default();
        self.read(no, &accepted, hashes, span.clone(), timeout, policy);
        if again {
            // The same descriptor, twice.
            self.read(no, &accepted, hashes, span, timeout, policy);
        }
    }

    /// Has an engine accept a descriptor, or one that it has accepted before.
    fn accept(&mut self, no: usize, handed: &HandedOut) -> Option<Accepted> {
        let life = self.life(no)?;
        let engine = &life.stepped.engine;
        let remote = &handed.descriptor.remote;
        let conversation = NAMES.get(handed.conversation).copied();
        let accepted = engine.accept(remote, Some(handed.tenant), conversation);
        let offer = match accepted {
            Ok(offer) => offer,
            Err(error) => {
                if handed.wrong == Wrong::Nothing {
                    self.blame(Rule::OtherTokens, || {
                        format!("a good descriptor was refused: {error}")
                    });
                }
                return None;
            }
        };
        if handed.wrong != Wrong::Nothing {
            self.blame(Rule::Believed, || {
                format!("a descriptor that is {:?} was believed", handed.wrong)
            });
            return None;
        }
        let remaining = engine.lease_remaining(&offer);
        let lease = handed.descriptor.lease;
        let ticket = offer.ticket();
        let holder_now = self.places.get(handed.descriptor.place).map(|place| {
            use crate::clock::Clock;
            place.clock.now()
        });
        let truly =
            (ticket.stamp + ticket.remaining).saturating_since(holder_now.unwrap_or(ticket.stamp));
        let (most, least) = (ticket.remaining, truly.saturating_sub(CLOCK_SLACK));
        if remaining > most || (!self.jumped && remaining < least) {
            self.blame(Rule::WrongTime, || {
                format!("a lease with {truly:?} left, {most:?} when it was described, was taken for {remaining:?}")
            });
        }
        let accepted = Accepted { offer, lease };
        let life = self.life(no)?;
        if life.accepted.len() >= OFFERS {
            life.accepted.remove(0);
        }
        life.accepted.push(accepted.clone());
        Some(accepted)
    }

    /// Starts a read of an offer; the read's number.
    pub(super) fn read(
        &mut self,
        no: usize,
        accepted: &Accepted,
        wanted: &'static [crate::identity::BlockHash],
        span: std::ops::Range<usize>,
        timeout: Duration,
        policy: ReleasePolicy,
    ) -> Option<usize> {
        let rotate = self.dice.below(16);
        let unattended = !self.calm && self.dice.chance(100);
        let lease = accepted.lease;
        let read = self.reads.len();
        let life = self.life(no)?;
        let mut free = life.free();
        if free.len() < span.len() {
            // The model has done with what it has.
            for block in 0..u32::try_from(life.owners.len()).unwrap_or(0) {
                if life.owner(block) == Some(Owner::Model) {
                    life.own(block, Owner::Free);
                }
            }
            free = life.free();
        }
        if free.len() < span.len() || span.is_empty() {
            return None;
        }
        let by = rotate.checked_rem(free.len()).unwrap_or(0);
        free.rotate_left(by);
        free.truncate(span.len());
        let claimed = life
            .pool()
            .claim(free.iter().copied().map(BlockId).collect());
        let blocks = match claimed {
            Ok(blocks) => blocks,
            Err(error) => {
                self.blame(Rule::LostOrDoubled, || {
                    format!("a free block cannot be claimed: {error}")
                });
                return None;
            }
        };
        let deadline = life.now() + timeout;
        let first = span.start;
        let submitted = life.stepped.engine.read(ReadRequest {
            offer: &accepted.offer,
            hashes: wanted,
            span,
            blocks,
            timeout,
            release: policy,
        });
        let handle = match submitted {
            Ok(handle) => handle,
            Err(SubmitRefused { error, blocks }) => {
                let back = blocks.into_ids();
                if !back.iter().map(|block| block.0).eq(free.iter().copied()) {
                    self.blame(Rule::LostOrDoubled, || {
                        format!("{error}, and gave back {back:?}")
                    });
                }
                return None;
            }
        };
        for block in &free {
            life.own(*block, Owner::Read(read));
        }
        life.open.push(read);
        let id = handle.id();
        if unattended && policy != ReleasePolicy::Never {
            // It may have ended, and released its lease, before anybody looks.
            self.may_release(lease);
        }
        let lease_id = self.leases.get(lease).map_or(0, |lease| lease.id.0);
        self.note(21, no, id.0, || {
            format!(
                "life {no}: read {} of lease {lease_id} into {free:?}, {policy:?}, {timeout:?}",
                id.0
            )
        });
        self.reads.push(ReadRecord {
            life: no,
            id,
            handle: Some(handle),
            dropped: false,
            unattended,
            lease,
            first,
            dest: free,
            wanted,
            deadline,
            policy,
            state: ReadState::Running,
        });
        self.tally.reads = self.tally.reads.saturating_add(1);
        Some(read)
    }

    /// Tells a holder that an offer is not needed.
    pub(super) fn release(&mut self, no: usize, accepted: &Accepted) {
        self.may_release(accepted.lease);
        let Some(life) = self.life(no) else { return };
        let told = life.stepped.engine.release(&accepted.offer);
        self.note(22, no, u64::from(told), || {
            format!("life {no}: releases an offer")
        });
    }

    /// Cancels a read, or drops its handle.
    pub(super) fn cancel_some(&mut self, no: usize) {
        let drop_it = self.dice.chance(self.troubles.drop_handle);
        let draw = self.dice.below(8);
        let Some(life) = self.life(no) else { return };
        let at = draw.checked_rem(life.open.len()).unwrap_or(0);
        let Some(read) = life.open.get(at).copied() else {
            return;
        };
        self.cancel(read, drop_it);
    }

    pub(super) fn cancel(&mut self, read: usize, drop_it: bool) {
        let Some(record) = self.reads.get_mut(read) else {
            return;
        };
        let (no, id, lease) = (record.life, record.id, record.lease);
        if drop_it {
            let Some(handle) = record.handle.take() else {
                return;
            };
            record.dropped = true;
            let releases = record.policy != ReleasePolicy::Never;
            drop(handle);
            if releases {
                self.may_release(lease);
            }
        } else if let Some(handle) = &record.handle {
            handle.cancel();
        } else {
            return;
        }
        self.note(23, no, id.0, || {
            let what = if drop_it { "drops" } else { "cancels" };
            format!("life {no}: {what} read {}", id.0)
        });
    }

    /// Asks a holder to keep a lease, or tells it that it is not needed.
    pub(super) fn keep_some(&mut self, no: usize) {
        let (draw, release) = (self.dice.below(OFFERS), self.dice.chance(300));
        let extension = self
            .dice
            .time(Duration::from_millis(10), Duration::from_secs(10));
        let Some(life) = self.life(no) else { return };
        let at = draw.checked_rem(life.accepted.len()).unwrap_or(0);
        let Some(accepted) = life.accepted.get(at) else {
            return;
        };
        if release {
            let accepted = accepted.clone();
            return self.release(no, &accepted);
        }
        let asked = life.stepped.engine.keep(&accepted.offer, extension);
        self.note(24, no, u64::from(asked), || {
            format!("life {no}: asks to keep a lease {extension:?}")
        });
    }

    /// The model is done with a block.
    pub(super) fn free_some(&mut self, no: usize) {
        let draw = self.dice.below(64);
        let Some(life) = self.life(no) else { return };
        let at = u32::try_from(draw.checked_rem(life.owners.len()).unwrap_or(0)).unwrap_or(0);
        if life.owner(at) == Some(Owner::Model) {
            life.own(at, Owner::Free);
            self.note(25, no, u64::from(at), || {
                format!("life {no}: frees block {at}")
            });
        }
    }

    /// A holder takes leases back, or extends one.
    pub(super) fn revoke_some(&mut self, no: usize) {
        let choice = self.dice.below(3);
        let (draw, blocks) = (self.dice.below(64), self.dice.within(1, 6) as u64);
        let extension = self
            .dice
            .time(Duration::from_millis(10), Duration::from_secs(5));
        let live: Vec<usize> = (0..self.leases.len())
            .filter(|at| {
                self.leases
                    .get(*at)
                    .is_some_and(|lease| lease.life == no && !lease.freed)
            })
            .collect();
        let at = draw.checked_rem(live.len()).unwrap_or(0);
        let Some(at) = live.get(at).copied() else {
            return;
        };
        if choice == 0 {
            for lease in &live {
                if let Some(lease) = self.leases.get_mut(*lease) {
                    lease.may_revoke = true;
                }
            }
            let Some(life) = self.life(no) else { return };
            let given = life.stepped.engine.revoke_until(blocks);
            self.note(26, no, given, || {
                format!("life {no}: revokes {given} blocks")
            });
        } else if choice == 1 {
            self.revoke(at);
        } else {
            let Some(id) = self.leases.get(at).map(|lease| lease.id) else {
                return;
            };
            let Some(life) = self.life(no) else { return };
            let until = life.now() + extension;
            if life.stepped.engine.renew(id, extension)
                && let Some(lease) = self.leases.get_mut(at)
            {
                lease.until = lease.until.max(until);
            }
            self.note(27, no, id.0, || format!("life {no}: renews lease {id}"));
        }
        self.take_freed(no);
    }

    pub(super) fn revoke(&mut self, lease: usize) {
        let Some(record) = self.leases.get_mut(lease) else {
            return;
        };
        record.may_revoke = true;
        let (no, id) = (record.life, record.id);
        let Some(life) = self.life(no) else { return };
        life.stepped.engine.revoke(id);
        self.note(28, no, id.0, || format!("life {no}: revokes lease {id}"));
        self.take_freed(no);
    }
}

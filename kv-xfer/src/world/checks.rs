//! What is looked at after every step.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use super::content;
use super::fabric::{Use, WordRead, Write};
use super::life::Owner;
use super::record::ReadState;
use super::{Rule, World};
use crate::clock::MonoTime;
use crate::engine::{
    ConnectError, FailedBlocks, Landed, ReadError, ReadFailure, ReadOutcome, ReleasePolicy,
    ReturnedBlocks,
};
use crate::lease::{EndReason, FreedBlocks};
use crate::memory::OwnedBlocks;

/// How much later than its deadline a read may end: how often the driver looks.
const LOOK: Duration = Duration::from_millis(1);

impl World {
    /// Looks at what a step of a life has led to.
    pub(super) fn look_after(&mut self, no: usize) {
        self.look_at_fabric();
        self.take_freed(no);
        self.take_outcomes(no);
        self.take_returned(no);
        let passed = std::mem::take(&mut self.fabric.state().passed);
        if !passed.is_zero() {
            self.time.pass(passed);
        }
    }

    /// Looks at what the fabric has moved.
    pub(super) fn look_at_fabric(&mut self) {
        let (writes, words, misuse) = {
            let mut state = self.fabric.state();
            if state.writes.is_empty() && state.words.is_empty() && state.misuse.is_none() {
                return;
            }
            (
                std::mem::take(&mut state.writes),
                std::mem::take(&mut state.words),
                state.misuse.take(),
            )
        };
        if let Some(misuse) = misuse {
            self.blame(Rule::Misuse, || misuse.to_owned());
        }
        for word in words {
            self.look_at_word(word);
        }
        for write in writes {
            self.look_at_write(write);
        }
    }

    /// A lease word was read: it must not be that of a lease whose blocks are free.
    fn look_at_word(&mut self, read: WordRead) {
        let of = |lease: &&super::record::LeaseRecord| {
            lease.life == read.holder && lease.slot == read.slot && lease.word == read.word
        };
        if let Some(lease) = self.leases.iter().find(of)
            && lease.freed
        {
            let id = lease.id;
            self.blame(Rule::WordReused, || {
                format!("the word of lease {id} was read as it was after its blocks were free")
            });
        }
    }

    /// The blocks of a pool that a range of addresses touches: the first and the last.
    pub(super) fn blocks_at(&self, life: usize, addr: u64, len: u64) -> Option<(u32, u32)> {
        let pool = self.pools.get(life)?;
        let region = pool.regions().iter().find(|region| {
            region
                .byte_len()
                .is_ok_and(|bytes| addr >= region.base && addr < region.base.saturating_add(bytes))
        })?;
        let block = |at: u64| {
            let index = at
                .saturating_sub(region.base)
                .checked_div(region.block_stride)?;
            u32::try_from(index).ok()
        };
        let last = addr.saturating_add(len).saturating_sub(1);
        Some((block(addr)?, block(last)?))
    }

    /// Bytes were written: into destinations of reads only, from the blocks that the read is of.
    fn look_at_write(&mut self, write: Write) {
        let (from, to) = {
            let state = self.fabric.state();
            (state.span(write.d.remote), state.span(write.d.local))
        };
        let Some(to) = to.filter(|to| to.life == write.life) else {
            self.blame(Rule::Misuse, || {
                format!("{write:?} is into memory of another life")
            });
            return;
        };
        if to.of != Use::Pool {
            return;
        }
        let local = self.blocks_at(to.life, write.d.local, write.d.len);
        let remote = from.and_then(|from| {
            let blocks = self.blocks_at(from.life, write.d.remote, write.d.len)?;
            Some((from.life, blocks))
        });
        let Some((first, last)) = local else {
            self.blame(Rule::Misuse, || format!("{write:?} is between blocks"));
            return;
        };
        for block in first..=last {
            let owner = self.life(to.life).and_then(|life| life.owner(block));
            let Some(Owner::Read(read)) = owner else {
                self.blame(Rule::LateWrite, || {
                    format!(
                        "bytes landed in block {block} of life {}, which is {owner:?}",
                        to.life
                    )
                });
                return;
            };
            let Some(record) = self.reads.get(read) else {
                continue;
            };
            let Some(lease) = self.leases.get(record.lease) else {
                continue;
            };
            let Some((life, blocks)) = remote else {
                self.blame(Rule::Misuse, || format!("{write:?} is from no pool"));
                return;
            };
            if life != lease.life {
                let (wanted, id) = (lease.life, record.id);
                self.blame(Rule::WrongLife, || {
                    format!("read {id:?} is of life {wanted} and got bytes of life {life}")
                });
                return;
            }
            let leased = lease.blocks.contains(&blocks.0) && lease.blocks.contains(&blocks.1);
            if !leased {
                let id = lease.id;
                self.blame(Rule::OtherTokens, || {
                    format!("lease {id} is not of blocks {blocks:?}, and they were read by it")
                });
            }
        }
    }

    /// Takes what leases have given back.
    pub(super) fn take_freed(&mut self, no: usize) {
        while let Some(freed) = self
            .life(no)
            .and_then(|life| life.stepped.engine.freed().try_recv().ok())
        {
            self.on_freed(no, freed);
        }
    }

    fn on_freed(&mut self, no: usize, freed: FreedBlocks) {
        let now = self.life(no).map_or(MonoTime::ZERO, |life| life.now());
        let found = self
            .leases
            .iter_mut()
            .find(|lease| lease.life == no && lease.id == freed.lease);
        let Some(lease) = found else {
            self.blame(Rule::LostOrDoubled, || {
                format!("{freed:?} was never leased")
            });
            return;
        };
        let twice = std::mem::replace(&mut lease.freed, true);
        let same = freed
            .blocks
            .iter()
            .map(|block| block.0)
            .eq(lease.blocks.iter().copied());
        let (until, may_release, may_revoke) = (lease.until, lease.may_release, lease.may_revoke);
        let id = freed.lease;
        if twice || !same {
            self.blame(Rule::LostOrDoubled, || {
                format!("lease {id} gave back {:?}", freed.blocks)
            });
            return;
        }
        let wrong = match freed.reason {
            EndReason::Released if !may_release => "was released, and nobody had said so",
            EndReason::Expired if now < until => "expired before its time",
            EndReason::Revoked if !may_revoke => "was revoked, and nobody had asked for it",
            _ => "",
        };
        if !wrong.is_empty() {
            self.blame(Rule::LeaseEnded, || {
                format!("lease {id} of life {no} {wrong}")
            });
        }
        self.note(2, no, id.0, || {
            format!("life {no}: lease {id} {}", freed.reason.as_str())
        });
        let reuse = self.dice.chance(700);
        let mut wrong = None;
        let Some(life) = self.life(no) else { return };
        for block in freed.blocks {
            match life.owner(block.0) {
                Some(Owner::Leases(1)) => {
                    life.own(block.0, Owner::Free);
                    // What a busy engine does: the block holds something else at once.
                    if reuse && !life.refill(block.0) {
                        wrong = Some((block, Owner::Free));
                    }
                }
                Some(Owner::Leases(more)) if more > 1 => {
                    life.own(block.0, Owner::Leases(more.saturating_sub(1)));
                }
                owner => wrong = owner.map(|owner| (block, owner)),
            }
        }
        if let Some((block, owner)) = wrong {
            self.blame(Rule::LostOrDoubled, || {
                format!("lease {id} gave back block {block}, which is {owner:?}")
            });
        }
    }

    /// Takes the outcomes of reads that have ended.
    fn take_outcomes(&mut self, no: usize) {
        let calm = self.calm;
        let open = self.life(no).map(|life| life.open.clone());
        for read in open.unwrap_or_default() {
            let record = self.reads.get(read);
            if record.is_some_and(|record| calm || !record.unattended) {
                self.take_outcome(no, read);
            }
        }
    }

    fn take_outcome(&mut self, no: usize, read: usize) {
        let Some(record) = self.reads.get_mut(read) else {
            return;
        };
        let Some(handle) = record.handle.as_mut() else {
            return;
        };
        let mut context = Context::from_waker(Waker::noop());
        if let Poll::Ready(outcome) = Pin::new(handle).poll(&mut context) {
            record.handle = None;
            self.on_outcome(no, read, outcome);
        }
    }

    fn on_outcome(&mut self, no: usize, read: usize, outcome: ReadOutcome) {
        let Some(record) = self.reads.get_mut(read) else {
            return;
        };
        let (id, state, policy, lease) = (record.id, record.state, record.policy, record.lease);
        if state != ReadState::Running {
            self.blame(Rule::TwoEnds, || {
                format!("read {id:?} of life {no} ended, and was {state:?}")
            });
            return;
        }
        let landed = outcome.is_ok();
        let name = match &outcome {
            Ok(_) => "landed",
            Err(failure) => failure.error.name(),
        };
        if policy == ReleasePolicy::Always || (landed && policy == ReleasePolicy::AfterLanded) {
            self.may_release(lease);
        }
        let code = name.bytes().fold(0, |sum: u64, byte| {
            sum.wrapping_mul(31).wrapping_add(u64::from(byte))
        });
        self.note(3, no, code ^ id.0, || {
            format!("life {no}: read {} {name}", id.0)
        });
        match outcome {
            Ok(Landed { blocks, .. }) => {
                self.tally.landed = self.tally.landed.saturating_add(1);
                self.look_at_landed(read, &blocks);
                self.come_home(no, read, blocks, Owner::Model);
            }
            Err(ReadFailure { error, blocks }) => {
                self.look_at_error(no, read, &error);
                match blocks {
                    FailedBlocks::Returned(blocks) => {
                        self.tally.returned = self.tally.returned.saturating_add(1);
                        self.come_home(no, read, blocks, Owner::Free);
                    }
                    FailedBlocks::Quarantined { blocks } => {
                        self.tally.quarantined = self.tally.quarantined.saturating_add(1);
                        if let Some(record) = self.reads.get_mut(read) {
                            record.state = ReadState::Quarantined;
                            let all = record.dest.len();
                            if all != blocks {
                                self.blame(Rule::LostOrDoubled, || {
                                    format!("read {id:?} has {all} blocks, {blocks} in quarantine")
                                });
                            }
                        }
                    }
                }
            }
        }
    }

    /// The blocks of a landed read hold what was promised, and what was wanted.
    fn look_at_landed(&mut self, read: usize, blocks: &OwnedBlocks) {
        let Some(record) = self.reads.get(read) else {
            return;
        };
        let Some(lease) = self.leases.get(record.lease) else {
            return;
        };
        let (id, first, count) = (record.id, record.first, record.dest.len());
        let end = first.saturating_add(count);
        let same = record
            .wanted
            .get(..end)
            .is_some_and(|w| lease.hashes.get(..end) == Some(w));
        let wrong = (0..count).find(|at| {
            let tag = lease.tags.get(first.saturating_add(*at));
            tag.is_none_or(|tag| !content::holds(blocks, *at, *tag))
        });
        let lease = lease.id;
        if !same {
            self.blame(Rule::OtherTokens, || {
                format!("read {id:?} landed other tokens than its prompt's")
            });
        }
        if let Some(at) = wrong {
            self.blame(Rule::ChangedBytes, || {
                format!(
                    "read {id:?} of lease {lease} landed, and its block {at} is not as promised"
                )
            });
        }
    }

    /// A read fails by trouble of its own holder only.
    fn look_at_error(&mut self, no: usize, read: usize, error: &ReadError) {
        let engine = match error {
            ReadError::Connect { engine, cause } => {
                if matches!(cause, ConnectError::Layout(_) | ConnectError::BadLayout(_)) {
                    self.blame(Rule::Believed, || format!("{error}"));
                }
                engine
            }
            ReadError::PeerRestarted {
                engine,
                expected,
                found,
            } => {
                if expected == found {
                    self.blame(Rule::WrongLife, || format!("{error}"));
                }
                engine
            }
            ReadError::BadDescriptor { engine, .. }
            | ReadError::NoSuchWord { engine, .. }
            | ReadError::LeaseLost { engine, .. }
            | ReadError::Transport { engine, .. }
            | ReadError::Deadline { engine, .. }
            | ReadError::PeerSilent { engine, .. }
            | ReadError::Device { engine, .. }
            | ReadError::Fenced { engine } => engine,
            ReadError::Cancelled | ReadError::ShuttingDown | ReadError::DriverGone => return,
        };
        let Some(record) = self.reads.get(read) else {
            return;
        };
        let holder = self.leases.get(record.lease).map(|lease| lease.life);
        let place = holder.and_then(|holder| self.fabric.state().places.get(holder).copied());
        let own = place
            .and_then(|place| self.places.get(place))
            .map(|place| &place.name);
        if own != Some(engine) {
            self.blame(Rule::HeldUp, || {
                format!("a read of life {no} failed by engine {engine}: {error}")
            });
        }
    }

    /// Takes the blocks that came out of quarantine or that nobody waited for.
    fn take_returned(&mut self, no: usize) {
        while let Some(ReturnedBlocks { read, blocks }) = self
            .life(no)
            .and_then(|life| life.stepped.engine.returned().try_recv().ok())
        {
            let of = |record: &super::record::ReadRecord| record.life == no && record.id == read;
            let Some(at) = self.reads.iter().position(of) else {
                self.blame(Rule::LostOrDoubled, || {
                    format!("{read:?} was returned and never made")
                });
                return;
            };
            // Its outcome was there before.
            self.take_outcome(no, at);
            let allowed = self.reads.get(at).is_some_and(|record| {
                record.state == ReadState::Quarantined
                    || (record.dropped && record.state == ReadState::Running)
            });
            if !allowed {
                let state = self.reads.get(at).map(|record| record.state);
                self.blame(Rule::TwoEnds, || {
                    format!("the blocks of {read:?}, {state:?}, were returned")
                });
            }
            self.note(4, no, read.0, || {
                format!("life {no}: the blocks of read {} return", read.0)
            });
            self.come_home(no, at, blocks, Owner::Free);
        }
    }

    /// Destinations are handed back: nothing can write into them any more.
    fn come_home(&mut self, no: usize, read: usize, blocks: OwnedBlocks, to: Owner) {
        let ids: Vec<u32> = blocks.ids().iter().map(|block| block.0).collect();
        let Some(record) = self.reads.get_mut(read) else {
            return;
        };
        record.state = ReadState::Home;
        let id = record.id;
        if record.dest != ids {
            let dest = record.dest.clone();
            self.blame(Rule::LostOrDoubled, || {
                format!("{id:?} took {dest:?} and gave back {ids:?}")
            });
        }
        let pool = std::sync::Arc::clone(blocks.pool());
        for block in blocks.ids() {
            let dangerous = pool.regions().iter().any(|region| {
                let addr = region.block_addr(*block).unwrap_or(0);
                self.fabric.state().may_write(addr, region.block_len)
            });
            if dangerous {
                self.blame(Rule::LateWrite, || {
                    format!("block {block} of {id:?} was handed back, and may still be written")
                });
            }
        }
        drop(blocks.into_ids());
        let Some(life) = self.life(no) else { return };
        life.open.retain(|open| *open != read);
        for block in ids {
            life.own(block, to);
        }
    }

    /// A lease may be released from now on.
    pub(super) fn may_release(&mut self, lease: usize) {
        if let Some(lease) = self.leases.get_mut(lease) {
            lease.may_release = true;
        }
    }

    /// After a round of a driver at `now`: reads past their deadline have ended.
    pub(super) fn look_at_deadlines(&mut self, no: usize, now: MonoTime, driven: bool) {
        let Some(life) = self.lives.get(no).and_then(Option::as_ref) else {
            return;
        };
        let late = life.open.iter().find_map(|read| {
            let record = self.reads.get(*read)?;
            let over = !driven || record.deadline.saturating_add(LOOK) <= now;
            (record.handle.is_some() && !record.unattended && over).then_some(record.id)
        });
        if let Some(id) = late {
            self.blame(Rule::NoEnd, || {
                if driven {
                    format!("read {id:?} of life {no} has not ended by its deadline")
                } else {
                    format!("read {id:?} of life {no} has not ended, and its driver has")
                }
            });
        }
    }
}

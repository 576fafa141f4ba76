//! The lease table against a model: any sequence of operations.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod lease_support;

use std::collections::{BTreeMap, HashMap, HashSet};

use kv_xfer::clock::MonoTime;
use kv_xfer::ids::{BlockId, LeaseId, LeaseWord, RequestId, WordSlot};
use kv_xfer::lease::{EndedLease, FreedBlocks, Grant, LeaseTable, NewLease, RenewOutcome};
use lease_support::{Words, at, blocks, holds, leases, request, secs, table};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Op {
    Grant {
        request: u64,
        blocks: u32,
        ttl: u64,
    },
    Renew {
        pick: usize,
        by: u64,
        by_request: bool,
    },
    Release {
        pick: usize,
    },
    ReleaseRank {
        pick: usize,
        of: u32,
    },
    Revoke {
        pick: usize,
    },
    RevokeOldest {
        count: usize,
    },
    RevokeUntil {
        blocks: u64,
    },
    Expire,
    Advance {
        by: u64,
    },
    Retire {
        pick: usize,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let pick = || 0..64_usize;
    prop_oneof![
        6 => (0..40_u64, 1..5_u32, 1..60_u64)
            .prop_map(|(request, blocks, ttl)| Op::Grant { request, blocks, ttl }),
        3 => (pick(), 1..60_u64, any::<bool>())
            .prop_map(|(pick, by, by_request)| Op::Renew { pick, by, by_request }),
        2 => pick().prop_map(|pick| Op::Release { pick }),
        2 => (pick(), 1..3_u32).prop_map(|(pick, of)| Op::ReleaseRank { pick, of }),
        1 => pick().prop_map(|pick| Op::Revoke { pick }),
        1 => (0..3_usize).prop_map(|count| Op::RevokeOldest { count }),
        1 => (0..8_u64).prop_map(|blocks| Op::RevokeUntil { blocks }),
        2 => Just(Op::Expire),
        3 => (0..20_u64).prop_map(|by| Op::Advance { by }),
        4 => pick().prop_map(|pick| Op::Retire { pick }),
    ]
}

#[derive(Debug, Clone)]
struct Held {
    grant: Grant,
    request: RequestId,
    blocks: Vec<BlockId>,
    deadline: MonoTime,
    seen: u32,
    of: u32,
}

/// What the table must do, with none of its shortcuts.
struct Model {
    table: LeaseTable,
    words: Words,
    now: MonoTime,
    live: BTreeMap<LeaseId, Held>,
    /// Every lease there was.
    all: Vec<(Grant, RequestId)>,
    waiting: Vec<EndedLease>,
    gone: HashMap<LeaseId, (RequestId, Vec<BlockId>)>,
    freed: HashSet<LeaseId>,
    used_words: HashSet<(WordSlot, LeaseWord)>,
}

const SLOTS: u32 = 12;

impl Model {
    fn new() -> Self {
        let (table, words) = table(SLOTS);
        Self {
            table,
            words,
            now: at(1),
            live: BTreeMap::new(),
            all: Vec::new(),
            waiting: Vec::new(),
            gone: HashMap::new(),
            freed: HashSet::new(),
            used_words: HashSet::new(),
        }
    }

    fn pick(&self, pick: usize) -> Option<(Grant, RequestId)> {
        let n = self.all.len();
        (n > 0).then(|| self.all[n - 1 - pick % n].clone())
    }

    fn ended(&mut self, ended: Vec<EndedLease>, expected: &[LeaseId]) {
        assert_eq!(leases(&ended), expected);
        for one in ended {
            let held = self.live.remove(&one.lease()).expect("ended twice");
            assert!(holds(&self.words, held.grant), "word moved before retiring");
            assert_eq!(one.block_count(), held.blocks.len());
            self.gone.insert(one.lease(), (held.request, held.blocks));
            self.waiting.push(one);
        }
    }

    fn oldest(&self, mut more: impl FnMut(&Held) -> bool) -> Vec<LeaseId> {
        let held = self.live.iter().take_while(|(_, held)| more(held));
        held.map(|(lease, _)| *lease).collect()
    }

    fn step(&mut self, op: &Op) {
        match *op {
            Op::Grant {
                request: r,
                blocks: n,
                ttl,
            } => self.grant(r, n, ttl),
            Op::Renew {
                pick,
                by,
                by_request,
            } => self.renew(pick, by, by_request),
            Op::Release { pick } => {
                let Some((g, _)) = self.pick(pick) else {
                    return;
                };
                let wrong = self.table.release(g.lease, LeaseWord(g.word.0 ^ 1));
                assert!(wrong.ended().is_none());
                let expected: Vec<_> = self
                    .live
                    .get(&g.lease)
                    .map(|_| g.lease)
                    .into_iter()
                    .collect();
                let ended = self.table.release(g.lease, g.word).ended();
                self.ended(ended.into_iter().collect(), &expected);
            }
            Op::ReleaseRank { pick, of } => {
                let Some((_, r)) = self.pick(pick) else {
                    return;
                };
                let mut expected = Vec::new();
                if let Some(held) = self.live.values_mut().find(|h| h.request == r) {
                    held.seen += 1;
                    held.of = held.of.max(of);
                    if held.seen >= held.of {
                        expected.push(held.grant.lease);
                    }
                }
                let ended = self.table.release_request(&r, of).ended();
                self.ended(ended.into_iter().collect(), &expected);
            }
            Op::Revoke { pick } => {
                let Some((g, _)) = self.pick(pick) else {
                    return;
                };
                let expected: Vec<_> = self
                    .live
                    .get(&g.lease)
                    .map(|_| g.lease)
                    .into_iter()
                    .collect();
                let ended = self.table.revoke(g.lease);
                self.ended(ended.into_iter().collect(), &expected);
            }
            Op::RevokeOldest { count } => {
                let mut left = count;
                let expected = self.oldest(|_| {
                    let more = left > 0;
                    left = left.saturating_sub(1);
                    more
                });
                let ended = self.table.revoke_oldest(count);
                self.ended(ended, &expected);
            }
            Op::RevokeUntil { blocks } => {
                let mut found = 0;
                let expected = self.oldest(|held| {
                    let more = found < blocks;
                    found += held.blocks.len() as u64;
                    more
                });
                let ended = self.table.revoke_until(blocks);
                self.ended(ended, &expected);
            }
            Op::Expire => {
                let mut due: Vec<_> = self
                    .live
                    .values()
                    .filter(|h| h.deadline <= self.now)
                    .collect();
                due.sort_by_key(|h| (h.deadline, h.grant.lease));
                let expected: Vec<_> = due.iter().map(|h| h.grant.lease).collect();
                let ended = self.table.expire(self.now);
                self.ended(ended, &expected);
            }
            Op::Advance { by } => self.now = self.now + secs(by),
            Op::Retire { pick } => self.retire(pick),
        }
    }

    fn grant(&mut self, r: u64, n: u32, ttl: u64) {
        let new = NewLease {
            request: request(r),
            blocks: blocks(0..n),
            ttl: Some(secs(ttl)),
        };
        let taken = self.live.values().any(|h| h.request == new.request);
        let full = self.live.len() + self.waiting.len() >= SLOTS as usize;
        match self.table.grant(self.now, new.clone()) {
            Ok(grant) => {
                assert!(!taken && !full);
                assert!(holds(&self.words, grant));
                assert!(
                    self.used_words.insert((grant.slot, grant.word)),
                    "word used again"
                );
                assert!(self.all.iter().all(|(old, _)| old.lease < grant.lease));
                assert_eq!(grant.deadline, self.now + secs(ttl));
                self.all.push((grant, new.request.clone()));
                let held = Held {
                    grant,
                    request: new.request,
                    blocks: new.blocks,
                    deadline: grant.deadline,
                    seen: 0,
                    of: 0,
                };
                self.live.insert(grant.lease, held);
            }
            Err(refused) => {
                assert!(taken || full);
                assert_eq!(refused.blocks, new.blocks);
            }
        }
    }

    fn renew(&mut self, pick: usize, by: u64, by_request: bool) {
        let Some((g, r)) = self.pick(pick) else {
            return;
        };
        let outcome = if by_request {
            self.table.renew_request(self.now, &r, secs(by))
        } else {
            self.table.renew(self.now, g.lease, secs(by))
        };
        let held = if by_request {
            self.live.values_mut().find(|h| h.request == r)
        } else {
            self.live.get_mut(&g.lease)
        };
        let expected = match held {
            None => RenewOutcome::Unknown,
            Some(h) if h.deadline <= self.now => RenewOutcome::TooLate,
            Some(h) if self.now + secs(by) <= h.deadline => RenewOutcome::Unchanged(h.deadline),
            Some(h) => {
                h.deadline = self.now + secs(by);
                RenewOutcome::Extended(h.deadline)
            }
        };
        assert_eq!(outcome, expected);
    }

    fn retire(&mut self, pick: usize) {
        if self.waiting.is_empty() {
            return;
        }
        let ended = self.waiting.swap_remove(pick % self.waiting.len());
        let (lease, reason) = (ended.lease(), ended.reason());
        let freed = self.table.retire(ended, &self.words).unwrap();
        let (grant, _) = self.all.iter().find(|(g, _)| g.lease == lease).unwrap();
        assert!(!holds(&self.words, *grant), "freed under a valid word");
        assert!(self.freed.insert(lease), "freed twice");
        let (request, blocks) = self.gone.remove(&lease).unwrap();
        let expected = FreedBlocks {
            lease,
            request,
            blocks,
            reason,
        };
        assert_eq!(freed, expected);
    }

    fn check(&self) {
        let t = &self.table;
        assert_eq!(t.len(), self.live.len());
        assert_eq!(t.unretired(), self.waiting.len() as u64);
        let blocks: usize = self.live.values().map(|h| h.blocks.len()).sum();
        assert_eq!(t.blocks(), blocks as u64);
        assert_eq!(
            t.next_deadline(),
            self.live.values().map(|h| h.deadline).min()
        );
        for held in self.live.values() {
            assert!(holds(&self.words, held.grant));
            let view = t.get(held.grant.lease).unwrap();
            assert_eq!(view.grant.deadline, held.deadline);
            assert_eq!(
                (view.request, view.blocks),
                (&held.request, &held.blocks[..])
            );
        }
    }
}

proptest! {
    #[test]
    fn the_table_does_what_the_model_does(ops in prop::collection::vec(op(), 1..120)) {
        let mut model = Model::new();
        for op in &ops {
            model.step(op);
            model.check();
        }
        // At shutdown everything comes back, exactly once.
        let expected = model.oldest(|_| true);
        let ended = model.table.revoke_all();
        model.ended(ended, &expected);
        while !model.waiting.is_empty() {
            model.retire(0);
        }
        model.check();
        prop_assert_eq!(model.freed.len(), model.all.len());
        let c = model.table.counters();
        prop_assert_eq!(c.granted, c.retired);
        prop_assert_eq!(c.granted, c.released + c.expired + c.revoked);
    }
}

//! Which lease ends next.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;

use super::slots::Slots;
use crate::clock::MonoTime;
use crate::ids::LeaseId;

/// Entries of ended leases that are not worth sweeping out.
const SWEEP_FLOOR: usize = 64;

/// The deadlines of all leases that hold, the earliest first. Renewals and releases, the frequent
/// operations, do not search it: a lease's entry stays where it is until it comes to the front, and
/// is put right or dropped there. Since renewals only ever move a deadline back, an entry is never
/// later than its lease's deadline; and the front entry is always exact.
#[derive(Debug, Default)]
pub(super) struct Deadlines(BinaryHeap<Reverse<(MonoTime, LeaseId)>>);

impl Deadlines {
    pub(super) fn insert(&mut self, deadline: MonoTime, lease: LeaseId) {
        self.0.push(Reverse((deadline, lease)));
    }

    /// The lease that ends first, and when.
    pub(super) fn first(&self) -> Option<(MonoTime, LeaseId)> {
        self.0.peek().map(|Reverse(first)| *first)
    }

    /// To be called after leases have ended or were renewed: makes the front entry exact, and sweeps
    /// when more than half of all entries are of leases that have ended. A sweep looks at every
    /// entry, but there are as many operations between two of them.
    pub(super) fn settle(&mut self, slots: &Slots) {
        while let Some(mut front) = self.0.peek_mut() {
            let Reverse((entry, lease)) = *front;
            match slots.deadline(lease) {
                None => drop(PeekMut::pop(front)),
                Some(deadline) if deadline > entry => *front = Reverse((deadline, lease)),
                Some(_) => break,
            }
        }
        if self.0.len()
            > slots
                .live_count()
                .saturating_mul(2)
                .saturating_add(SWEEP_FLOOR)
        {
            self.0
                .retain(|Reverse((_, lease))| slots.deadline(*lease).is_some());
        }
    }

    #[cfg(test)]
    pub(super) fn entries(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::clock::MonoTime;
    use crate::ids::{BlockId, RequestId};
    use crate::lease::{LeaseConfig, LeaseTable, NewLease};

    #[test]
    fn entries_of_ended_leases_do_not_pile_up() {
        let mut table = LeaseTable::new(LeaseConfig::new(2000, 0)).unwrap();
        let new = |i: u32| NewLease {
            request: RequestId::new(format!("r{i}")).unwrap(),
            blocks: vec![BlockId(0)],
            ttl: Some(Duration::from_secs(10 + u64::from(i))),
        };
        // The first holds the front, so that nothing behind it is dropped on the way.
        table.grant(MonoTime::ZERO, new(0)).unwrap();
        for i in 1..1000 {
            let grant = table.grant(MonoTime::ZERO, new(i)).unwrap();
            drop(table.revoke(grant.lease));
            assert!(table.deadline_entries() <= 2 + 64 + 1);
        }
        assert_eq!(table.len(), 1);
    }
}

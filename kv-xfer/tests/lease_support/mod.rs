//! What the tests of the lease table share.

use std::sync::Mutex;
use std::time::Duration;

use kv_xfer::clock::MonoTime;
use kv_xfer::ids::{BlockId, LeaseId, RequestId, WordSlot};
use kv_xfer::layout::{MemKind, RegionGeometry};
use kv_xfer::lease::{EndedLease, Grant, LeaseConfig, LeaseTable};
use kv_xfer::memory::ControlWords;

/// A word table in plain memory.
#[derive(Debug)]
pub struct Words(Mutex<Vec<u64>>);

impl Words {
    pub fn new(slots: usize) -> Self {
        Self(Mutex::new(vec![0; slots]))
    }
}

impl ControlWords for Words {
    fn region(&self) -> RegionGeometry {
        RegionGeometry {
            base: 0x1000,
            block_len: 8,
            block_stride: 8,
            block_count: u32::try_from(self.0.lock().unwrap().len()).unwrap(),
            mem: MemKind::Dram,
            device: 0,
        }
    }

    fn load(&self, slot: WordSlot) -> Option<u64> {
        self.0.lock().unwrap().get(slot.0 as usize).copied()
    }

    fn store(&self, slot: WordSlot, value: u64) -> bool {
        match self.0.lock().unwrap().get_mut(slot.0 as usize) {
            Some(word) => *word = value,
            None => return false,
        }
        true
    }
}

pub fn secs(s: u64) -> Duration {
    Duration::from_secs(s)
}

pub fn at(s: u64) -> MonoTime {
    MonoTime::ZERO + secs(s)
}

pub fn request(i: u64) -> RequestId {
    RequestId::new(format!("request-{i}")).unwrap()
}

pub fn blocks(ids: impl IntoIterator<Item = u32>) -> Vec<BlockId> {
    ids.into_iter().map(BlockId).collect()
}

pub fn table(max: u32) -> (LeaseTable, Words) {
    let table = LeaseTable::new(LeaseConfig::new(max, 42)).unwrap();
    let words = Words::new(max as usize);
    table.publish_words(&words).unwrap();
    (table, words)
}

pub fn holds(words: &Words, grant: Grant) -> bool {
    words.load(grant.slot) == Some(grant.word.0)
}

pub fn leases(ended: &[EndedLease]) -> Vec<LeaseId> {
    ended.iter().map(EndedLease::lease).collect()
}

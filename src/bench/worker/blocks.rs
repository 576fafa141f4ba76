//! A pool whose blocks hold the pattern, and the check that blocks which were read hold it.

use std::sync::Arc;

use kv_xfer::ids::BlockId;
use kv_xfer::memory::{HostOptions, KvPool};
use serde_json::{Map, Value};

use super::error::WorkerError;
use super::settings::Settings;
use crate::bench::pattern;
use crate::bench::proto::Shape;
use crate::memory::PoolMemory;

/// What blocks are overwritten with before a read that is checked.
pub const SPOILED: u8 = 0xA5;

/// A pool, with what the machine made of the wishes for its memory.
pub fn pool(
    shape: &Shape,
    settings: &Settings,
    about: &mut Map<String, Value>,
) -> Result<Arc<KvPool>, WorkerError> {
    let options = HostOptions::default()
        .huge_pages(settings.huge_pages)
        .populate(true);
    let layout = settings.layout(shape)?;
    let (pool, given) = settings.memory.pool(layout, shape.blocks, &options)?;
    about.insert("memory".into(), settings.memory.to_string().into());
    let what = match settings.memory {
        PoolMemory::Host => "huge_pages",
        PoolMemory::Cuda(_) => "gpu",
    };
    about.insert(what.into(), given.into());
    Ok(pool)
}

/// Fills every block.
pub fn fill(pool: &KvPool, seed: u64) -> Result<(), WorkerError> {
    let mut bytes = Vec::new();
    for (number, region) in (0..).zip(pool.regions()) {
        bytes.resize(usize::try_from(region.block_len)?, 0);
        for block in 0..region.block_count {
            pattern::fill(seed, number, block, &mut bytes);
            pool.memory()
                .write(region.block_addr(BlockId(block))?, &bytes)?;
        }
    }
    Ok(())
}

/// Overwrites a block in all regions.
pub fn spoil(pool: &KvPool, block: u32) -> Result<(), WorkerError> {
    let mut bytes = Vec::new();
    for region in pool.regions() {
        bytes.resize(usize::try_from(region.block_len)?, SPOILED);
        pool.memory()
            .write(region.block_addr(BlockId(block))?, &bytes)?;
    }
    Ok(())
}

/// Bytes checked, and those of them that are wrong.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Checked {
    /// Bytes checked.
    pub bytes: u64,
    /// Of those, wrong.
    pub wrong: u64,
}

/// Checks that local block `local` holds, in one region, what remote block `remote` held.
pub fn check_region(
    pool: &KvPool,
    seed: u64,
    region: u32,
    remote: u32,
    local: u32,
    checked: &mut Checked,
) -> Result<(), WorkerError> {
    let index = usize::try_from(region)?;
    let geometry = pool.regions().get(index);
    let len = geometry.map_or(0, |geometry| geometry.block_len);
    let mut bytes = vec![0; usize::try_from(len)?];
    pool.read_block(index, BlockId(local), 0, &mut bytes)?;
    checked.bytes += len;
    checked.wrong += pattern::wrong_bytes(seed, region, remote, &bytes);
    Ok(())
}

/// `count` indices below `len`, spread evenly, the first and the last among them.
pub fn spread(len: usize, count: u32) -> impl Iterator<Item = usize> {
    let count = usize::try_from(count).unwrap_or(usize::MAX).min(len);
    let (last, steps) = (len.saturating_sub(1), count.saturating_sub(1).max(1));
    (0..count).map(move |i| last / steps * i + last % steps * i / steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_spread_over_everything() {
        let sample = |len, count| spread(len, count).collect::<Vec<_>>();
        assert_eq!(sample(10, 0), [0usize; 0]);
        assert_eq!(sample(0, 5), [0usize; 0]);
        assert_eq!(sample(1, 5), [0]);
        assert_eq!(sample(3, 5), [0, 1, 2]);
        assert_eq!(sample(10, 2), [0, 9]);
        assert_eq!(sample(100_000, 3), [0, 49_999, 99_999]);
        assert!(sample(1000, 256).is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn a_filled_pool_is_right_and_a_spoiled_block_is_not() {
        let shape = Shape {
            regions: 2,
            blocks: 4,
            block_bytes: 64,
        };
        let pool = pool(&shape, &Settings::default(), &mut Map::new()).unwrap();
        fill(&pool, 3).unwrap();
        spoil(&pool, 1).unwrap();
        let check = |region, remote, local| {
            let mut checked = Checked::default();
            check_region(&pool, 3, region, remote, local, &mut checked).unwrap();
            assert_eq!(checked.bytes, 64);
            checked.wrong
        };
        assert_eq!(check(1, 3, 3), 0);
        assert!(check(1, 2, 3) > 32);
        assert!(check(0, 1, 1) > 48);
    }
}

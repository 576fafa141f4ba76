//! The K and V rows of a layer in the blocks of a pool.

use half::f16;
use half::slice::HalfFloatSliceExt;
use kv_xfer::ids::BlockId;
use kv_xfer::layout::{Component, ModelGeometry};
use kv_xfer::memory::KvPool;
use pulp::bytemuck;

use super::ModelError;

const ELEMENT: u64 = size_of::<f16>() as u64;

/// Where one component of one layer lies in a block: `[heads][tokens][elements]`.
#[derive(Debug, Clone, Copy)]
struct Place {
    region: usize,
    offset: u64,
}

/// A pool, known to be cut for the model.
pub(super) struct PagedCache<'a> {
    pool: &'a KvPool,
    /// Per layer: keys, values.
    places: Vec<[Place; 2]>,
    /// Tokens of a block.
    pub block_tokens: usize,
    head_dim: usize,
}

impl<'a> PagedCache<'a> {
    /// Checks that the pool is cut for the model, keys and values apart.
    pub(super) fn new(
        pool: &'a KvPool,
        geometry: &ModelGeometry,
        head_dim: usize,
    ) -> Result<Self, ModelError> {
        let wrong = |why: &str| ModelError::Pool {
            why: why.to_owned(),
        };
        let layout = pool.layout();
        let theirs = layout.model();
        let is_same = theirs.layers() == geometry.layers()
            && theirs.attention() == geometry.attention()
            && theirs.dtype() == geometry.dtype()
            && theirs.indexer() == geometry.indexer();
        if !is_same || layout.tp() != 1 {
            return Err(wrong("it is cut for another model, or for several ranks"));
        }
        let [mut keys, mut values] = [const { Vec::new() }; 2];
        for chunk in layout.chunks() {
            let place = Place {
                region: usize::try_from(chunk.region).unwrap_or(usize::MAX),
                offset: chunk.offset,
            };
            match chunk.component {
                Component::K => keys.push(place),
                Component::V => values.push(place),
                _ => return Err(wrong("keys and values are not separate")),
            }
        }
        Ok(Self {
            pool,
            places: keys.into_iter().zip(values).map(Into::into).collect(),
            block_tokens: usize::try_from(layout.block_tokens()).unwrap_or(usize::MAX),
            head_dim,
        })
    }

    fn place(&self, layer: usize, component: usize, head: usize, slot: usize) -> Place {
        let place = self.places[layer][component];
        let row = (head * self.block_tokens + slot) * self.head_dim;
        Place {
            offset: place.offset + row as u64 * ELEMENT,
            ..place
        }
    }

    /// Writes one head's rows of consecutive tokens, the first of which is at `position`.
    pub(super) fn write(
        &self,
        layer: usize,
        component: usize,
        head: usize,
        blocks: &[BlockId],
        position: usize,
        rows: &[f16],
    ) -> Result<(), ModelError> {
        self.runs(
            position,
            rows.len() / self.head_dim,
            |block, slot, range| {
                let place = self.place(layer, component, head, slot);
                let rows = &rows[range.start * self.head_dim..range.end * self.head_dim];
                let bytes = bytemuck::cast_slice(rows.reinterpret_cast());
                Ok(self
                    .pool
                    .write_block(place.region, blocks[block], place.offset, bytes)?)
            },
        )
    }

    /// Reads one head's rows of consecutive tokens, the first of which is at `position`.
    pub(super) fn read(
        &self,
        layer: usize,
        component: usize,
        head: usize,
        blocks: &[BlockId],
        position: usize,
        rows: &mut [f16],
    ) -> Result<(), ModelError> {
        self.runs(
            position,
            rows.len() / self.head_dim,
            |block, slot, range| {
                let place = self.place(layer, component, head, slot);
                let rows = &mut rows[range.start * self.head_dim..range.end * self.head_dim];
                let bytes = bytemuck::cast_slice_mut(rows.reinterpret_cast_mut());
                Ok(self
                    .pool
                    .read_block(place.region, blocks[block], place.offset, bytes)?)
            },
        )
    }

    /// Calls `f` for every part of consecutive tokens that lies in one block: with the block's index
    /// in the table, the first slot in it, and which of the tokens they are.
    fn runs(
        &self,
        position: usize,
        count: usize,
        mut f: impl FnMut(usize, usize, std::ops::Range<usize>) -> Result<(), ModelError>,
    ) -> Result<(), ModelError> {
        let mut done = 0;
        while done < count {
            let (block, slot) = (
                (position + done) / self.block_tokens,
                (position + done) % self.block_tokens,
            );
            let end = count.min(done + self.block_tokens - slot);
            f(block, slot, done..end)?;
            done = end;
        }
        Ok(())
    }
}

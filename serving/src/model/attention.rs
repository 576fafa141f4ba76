//! Attention over a paged cache.
//!
//! The unit of work is a KV head and a span of a sequence's queries; the query heads that share the
//! KV head are computed together, so that its rows are read once. Keys are taken in tiles of
//! [`KEY_TILE`] by position. A query meets the tiles in order and sums within a tile in order, so its
//! bits depend on its own position alone: not on the block size, nor on which queries are computed
//! beside it.

use std::array;

use half::f16;
use half::slice::HalfFloatSliceExt;
use kv_xfer::ids::BlockId;
use pulp::{Arch, Simd, WithSimd};

use super::ModelError;
use super::paged::PagedCache;
use super::simd::{exp, multiply};

/// Keys that a query meets at once.
const KEY_TILE: usize = 64;
/// Tokens of a sequence whose queries are one unit of work: many, since the tiles of keys are
/// converted once for all of them.
pub(super) const QUERY_SPAN: usize = 128;
/// Queries whose sums are in registers together.
const ROWS: usize = 6;

/// One unit of work.
pub(super) struct Span<'a> {
    pub cache: &'a PagedCache<'a>,
    pub layer: usize,
    pub kv_head: usize,
    /// Query heads of the KV head.
    pub group: usize,
    pub head_dim: usize,
    pub blocks: &'a [BlockId],
    /// Position of the first token.
    pub position: usize,
    /// Rotated queries, `[tokens][group][head_dim]`.
    pub queries: Vec<f32>,
}

impl Span<'_> {
    /// What the queries attend to, in their own order.
    pub(super) fn attend(self) -> Result<Vec<f32>, ModelError> {
        Arch::new().dispatch(self)
    }
}

/// The running state of the queries: the greatest score, and sums relative to it.
struct State {
    out: Vec<f32>,
    max: Vec<f32>,
    sum: Vec<f32>,
}

/// One tile of keys and values.
struct Tile {
    first: usize,
    half: Vec<f16>,
    full: Vec<f32>,
    /// `[head_dim][KEY_TILE]`.
    keys: Vec<f32>,
    /// `[KEY_TILE][head_dim]`.
    values: Vec<f32>,
}

impl Tile {
    fn new(head_dim: usize) -> Self {
        Self {
            first: 0,
            half: vec![f16::ZERO; KEY_TILE * head_dim],
            full: vec![0.0; KEY_TILE * head_dim],
            keys: vec![0.0; KEY_TILE * head_dim],
            values: vec![0.0; KEY_TILE * head_dim],
        }
    }

    /// Loads the tokens from `first` to `end`. The rest of the tile is zero: what lies there is not
    /// the sequence's, and zero times it must be zero.
    fn load(&mut self, span: &Span<'_>, first: usize, end: usize) -> Result<(), ModelError> {
        self.first = first;
        let dim = span.head_dim;
        let used = (end - first).min(KEY_TILE) * dim;
        for component in [0, 1] {
            let (half, rest) = self.half.split_at_mut(used);
            let cache = span.cache;
            cache.read(
                span.layer,
                component,
                span.kv_head,
                span.blocks,
                first,
                half,
            )?;
            rest.fill(f16::ZERO);
            let full = match component {
                0 => &mut self.full,
                _ => &mut self.values,
            };
            self.half.convert_to_f32_slice(full);
        }
        transpose(&self.full, &mut self.keys, dim);
        Ok(())
    }
}

/// `[KEY_TILE][dim]` to `[dim][KEY_TILE]`, in squares that stay in the nearest cache.
#[inline(always)]
fn transpose(rows: &[f32], columns: &mut [f32], dim: usize) {
    const SIDE: usize = 16;
    for key in (0..KEY_TILE).step_by(SIDE) {
        for element in (0..dim).step_by(SIDE) {
            let square: [&[f32; SIDE]; SIDE] = array::from_fn(|i| {
                let row = &rows[(key + i) * dim + element..];
                row.first_chunk().unwrap_or(&[0.0; SIDE])
            });
            for j in 0..SIDE {
                let column = &mut columns[(element + j) * KEY_TILE + key..][..SIDE];
                for (out, row) in column.iter_mut().zip(square) {
                    *out = row[j];
                }
            }
        }
    }
}

impl WithSimd for Span<'_> {
    type Output = Result<Vec<f32>, ModelError>;

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) -> Self::Output {
        let dim = self.head_dim;
        let scale = 1.0 / (dim as f32).sqrt();
        self.queries.iter_mut().for_each(|value| *value *= scale);
        let rows = self.queries.len() / dim;
        let end = self.position + rows / self.group;
        let mut state = State {
            out: vec![0.0; rows * dim],
            max: vec![f32::NEG_INFINITY; rows],
            sum: vec![0.0; rows],
        };
        let mut tile = Tile::new(dim);
        for first in (0..end).step_by(KEY_TILE) {
            tile.load(&self, first, end)?;
            // Queries before the tile do not see it.
            let mut row = first.saturating_sub(self.position) * self.group;
            while row + ROWS <= rows {
                step::<S, ROWS>(simd, &self, &tile, &mut state, row);
                row += ROWS;
            }
            while row + 3 <= rows {
                step::<S, 3>(simd, &self, &tile, &mut state, row);
                row += 3;
            }
            while row < rows {
                step::<S, 1>(simd, &self, &tile, &mut state, row);
                row += 1;
            }
        }
        for (out, sum) in state.out.chunks_exact_mut(dim).zip(&state.sum) {
            for value in out {
                *value /= sum;
            }
        }
        Ok(state.out)
    }
}

/// Shows one tile to `N` queries.
#[inline(always)]
fn step<S: Simd, const N: usize>(
    simd: S,
    span: &Span<'_>,
    tile: &Tile,
    state: &mut State,
    first_row: usize,
) {
    let dim = span.head_dim;
    let mut scores = [[0.0_f32; KEY_TILE]; N];
    let queries = array::from_fn(|i| &span.queries[(first_row + i) * dim..][..dim]);
    multiply::<S, N>(
        simd,
        queries,
        &tile.keys,
        scores.each_mut().map(|row| &mut row[..]),
        [0.0; N],
    );
    let mut scales = [1.0_f32; N];
    for (i, scores) in scores.iter_mut().enumerate() {
        let row = first_row + i;
        let position = span.position + row / span.group;
        let seen = (position + 1).saturating_sub(tile.first).min(KEY_TILE);
        scales[i] = soften(simd, scores, seen, &mut state.max[row], &mut state.sum[row]);
    }
    let mut outs = state.out[first_row * dim..][..N * dim].chunks_exact_mut(dim);
    let outs = array::from_fn(|_| outs.next().unwrap_or_default());
    multiply::<S, N>(
        simd,
        scores.each_ref().map(|row| &row[..]),
        &tile.values,
        outs,
        scales,
    );
}

/// Turns scores into weights relative to the greatest score so far. Returns what earlier sums are
/// multiplied by.
#[inline(always)]
fn soften<S: Simd>(
    simd: S,
    scores: &mut [f32; KEY_TILE],
    seen: usize,
    max: &mut f32,
    sum: &mut f32,
) -> f32 {
    if seen == 0 {
        scores.fill(0.0);
        return 1.0;
    }
    scores[seen..].fill(f32::NEG_INFINITY);
    let vectors = S::as_mut_simd_f32s(scores).0;
    let mut greatest = simd.splat_f32s(*max);
    for vector in vectors.iter() {
        greatest = simd.max_f32s(greatest, *vector);
    }
    let greatest = simd.reduce_max_f32s(greatest);
    let mut total = simd.splat_f32s(0.0);
    for vector in vectors.iter_mut() {
        *vector = exp(simd, simd.sub_f32s(*vector, simd.splat_f32s(greatest)));
        total = simd.add_f32s(total, *vector);
    }
    let old = *max - greatest;
    // Sums of no key are zero, whatever they are multiplied by.
    let scale = if old == 0.0 { 1.0 } else { old.exp() };
    *max = greatest;
    *sum = *sum * scale + simd.reduce_sum_f32s(total);
    scale
}

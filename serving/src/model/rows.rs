//! What is done to each token's row alone: normalisation, rotation, gating. Sums have a fixed order,
//! so a row's bits do not depend on the rows beside it.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::ModelConfig;
use super::simd::exp;

/// Partial sums of a norm: enough for the widest registers, the same number everywhere.
const SUMS: usize = 16;

/// Normalises every row by its root mean square and weighs it.
pub(super) fn rms_norm(rows: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let width = weight.len();
    let mut out = vec![0.0; rows.len()];
    out.par_chunks_exact_mut(width)
        .zip(rows.par_chunks_exact(width))
        .with_min_len(16)
        .for_each(|(out, row)| Arch::new().dispatch(|| rms_norm_row(out, row, weight, eps)));
    out
}

#[inline(always)]
fn rms_norm_row(out: &mut [f32], row: &[f32], weight: &[f32], eps: f32) {
    let mut sums = [0.0_f32; SUMS];
    let (parts, rest) = row.as_chunks::<SUMS>();
    for part in parts {
        for (sum, value) in sums.iter_mut().zip(part) {
            *sum += value * value;
        }
    }
    for (sum, value) in sums.iter_mut().zip(rest) {
        *sum += value * value;
    }
    let mean = sums.iter().sum::<f32>() / row.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    for ((out, value), weight) in out.iter_mut().zip(row).zip(weight) {
        *out = value * scale * weight;
    }
}

/// Adds `product` to `rows`.
pub(super) fn add(rows: &mut [f32], product: &[f32]) {
    for (value, more) in rows.iter_mut().zip(product) {
        *value += more;
    }
}

/// `silu(gate) · up` of rows that hold the gate and then the up part.
pub(super) fn gate(rows: &[f32], ffn_width: usize) -> Vec<f32> {
    let mut out = vec![0.0; rows.len() / 2];
    out.par_chunks_exact_mut(ffn_width)
        .zip(rows.par_chunks_exact(2 * ffn_width))
        .with_min_len(4)
        .for_each(|(out, row)| {
            let (gate, up) = row.split_at(ffn_width);
            Arch::new().dispatch(Gate { out, gate, up });
        });
    out
}

struct Gate<'a> {
    out: &'a mut [f32],
    gate: &'a [f32],
    up: &'a [f32],
}

impl WithSimd for Gate<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (out, out_rest) = S::as_mut_simd_f32s(self.out);
        let (gates, gates_rest) = S::as_simd_f32s(self.gate);
        let (ups, ups_rest) = S::as_simd_f32s(self.up);
        for ((out, gate), up) in out.iter_mut().zip(gates).zip(ups) {
            *out = silu(simd, *gate, *up);
        }
        let rest = silu(
            simd,
            simd.partial_load_f32s(gates_rest),
            simd.partial_load_f32s(ups_rest),
        );
        simd.partial_store_f32s(out_rest, rest);
    }
}

/// Not a closure, which would not be compiled for the vector instructions.
#[inline(always)]
fn silu<S: Simd>(simd: S, gate: S::f32s, up: S::f32s) -> S::f32s {
    let below = simd.add_f32s(simd.splat_f32s(1.0), exp(simd, simd.neg_f32s(gate)));
    simd.mul_f32s(simd.div_f32s(gate, below), up)
}

/// The angles of every position, computed once so that they are the same everywhere.
pub(super) struct Rope {
    /// Per position, for each pair of elements: cosine and sine.
    table: Vec<[f32; 2]>,
    pairs: usize,
}

impl Rope {
    pub(super) fn new(config: &ModelConfig) -> Self {
        let pairs = config.head_dim / 2;
        let base = f64::from(config.rope_base);
        let mut table = Vec::with_capacity(config.context * pairs);
        for position in 0..config.context {
            for pair in 0..pairs {
                let exponent = -2.0 * pair as f64 / config.head_dim as f64;
                let (sin, cos) = (position as f64 * base.powf(exponent)).sin_cos();
                table.push([cos as f32, sin as f32]);
            }
        }
        Self { table, pairs }
    }

    /// Rotates heads that lie side by side. Neighbours are a pair: a GGUF's rows of Q and K are
    /// stored in that order for llama models.
    pub(super) fn rotate(&self, heads: &mut [f32], position: usize) {
        let from = position * self.pairs;
        let angles = &self.table[from..from + self.pairs];
        for head in heads.chunks_exact_mut(2 * self.pairs) {
            for (pair, [cos, sin]) in head.as_chunks_mut::<2>().0.iter_mut().zip(angles) {
                let [a, b] = *pair;
                *pair = [a * cos - b * sin, a * sin + b * cos];
            }
        }
    }
}

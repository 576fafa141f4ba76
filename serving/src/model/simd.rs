//! Vector code that several kernels share.

use pulp::Simd;

/// Below this the exponential is zero: the result would be no normal number.
const LOWEST: f32 = -87.3;
const HIGHEST: f32 = 88.3;
/// Adding it leaves the nearest whole number in the low bits.
const ROUND: f32 = 12_582_912.0;
const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;
/// Of Cephes' `expf`, highest power first; the error is about one unit in the last place.
const POLYNOMIAL: [f32; 6] = [
    1.987_569_1e-4,
    1.398_199_9e-3,
    8.333_452e-3,
    4.166_579_6e-2,
    1.666_666_5e-1,
    0.5,
];

/// The exponential of every lane.
#[inline(always)]
pub(super) fn exp<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let splat = |value| simd.splat_f32s(value);
    let is_zero = simd.less_than_f32s(x, splat(LOWEST));
    let x = simd.max_f32s(simd.min_f32s(x, splat(HIGHEST)), splat(LOWEST));
    let rounded = simd.mul_add_e_f32s(x, splat(std::f32::consts::LOG2_E), splat(ROUND));
    let whole = simd.sub_f32s(rounded, splat(ROUND));
    let rest = simd.mul_add_e_f32s(whole, splat(-LN_2_HIGH), x);
    let rest = simd.mul_add_e_f32s(whole, splat(-LN_2_LOW), rest);
    let [first, others @ ..] = POLYNOMIAL;
    let mut sum = splat(first);
    for factor in others {
        sum = simd.mul_add_e_f32s(sum, rest, splat(factor));
    }
    let square = simd.mul_f32s(rest, rest);
    let value = simd.mul_add_e_f32s(sum, square, simd.add_f32s(rest, splat(1.0)));
    // Adds the whole part to the exponent.
    let shift = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(rounded), simd.splat_u32s(23));
    let bits = simd.add_u32s(simd.transmute_u32s_f32s(value), shift);
    simd.select_f32s(is_zero, splat(0.0), simd.transmute_f32s_u32s(bits))
}

/// The rows of a product that are computed at once, and the rows of a matrix `[depth, columns]`.
///
/// Each element is one chain of fused multiply-adds in the order of the depth, whatever the tile's
/// shape, so a row's bits do not depend on the rows computed beside it. `scale` is what the old
/// element is multiplied by first.
#[inline(always)]
pub(super) fn multiply<S: Simd, const ROWS: usize>(
    simd: S,
    left: [&[f32]; ROWS],
    right: &[f32],
    out: [&mut [f32]; ROWS],
    scale: [f32; ROWS],
) {
    let columns = out.first().map_or(0, |row| row.len());
    let mut out = out.map(|row| S::as_mut_simd_f32s(row).0);
    let vectors = columns / S::F32_LANES;
    let mut from = 0;
    if S::REGISTER_COUNT >= 32 {
        while from + 4 <= vectors {
            tile::<S, ROWS, 4>(simd, left, right, columns, &mut out, from, scale);
            from += 4;
        }
    }
    while from + 2 <= vectors {
        tile::<S, ROWS, 2>(simd, left, right, columns, &mut out, from, scale);
        from += 2;
    }
    while from < vectors {
        tile::<S, ROWS, 1>(simd, left, right, columns, &mut out, from, scale);
        from += 1;
    }
}

#[inline(always)]
fn tile<S: Simd, const ROWS: usize, const VECTORS: usize>(
    simd: S,
    left: [&[f32]; ROWS],
    right: &[f32],
    columns: usize,
    out: &mut [&mut [S::f32s]; ROWS],
    from: usize,
    scale: [f32; ROWS],
) {
    let depth = right.len() / columns;
    let left = left.map(|row| &row[..depth]);
    let mut sums = [[simd.splat_f32s(0.0); VECTORS]; ROWS];
    for row in 0..ROWS {
        let old = &out[row][from..from + VECTORS];
        let scale = simd.splat_f32s(scale[row]);
        for vector in 0..VECTORS {
            sums[row][vector] = simd.mul_f32s(old[vector], scale);
        }
    }
    for (index, line) in right.chunks_exact(columns).enumerate() {
        let line = &S::as_simd_f32s(line).0[from..from + VECTORS];
        for row in 0..ROWS {
            let factor = simd.splat_f32s(left[row][index]);
            for vector in 0..VECTORS {
                sums[row][vector] = simd.mul_add_e_f32s(factor, line[vector], sums[row][vector]);
            }
        }
    }
    for row in 0..ROWS {
        out[row][from..from + VECTORS].copy_from_slice(&sums[row]);
    }
}

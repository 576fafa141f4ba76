//! What a holder's blocks contain: every 8-byte word tells where it belongs, so that a block that
//! came from elsewhere, in part or not at all shows.
//!
//! Word `w` of block `b` of region `r` is, as a little-endian 64-bit number that wraps around,
//! `(seed + r * 2^52 + b * 2^24 + w + 1) * 0x9E37_79B9_7F4A_7C15`. Block lengths are multiples of 8.

/// An odd constant that spreads neighbours over all bits: 2^64 divided by the golden ratio, as in
/// Knuth's multiplicative hashing.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// One word.
#[must_use]
pub fn word(seed: u64, region: u32, block: u32, index: u64) -> u64 {
    let place = (u64::from(region) << 52)
        .wrapping_add(u64::from(block) << 24)
        .wrapping_add(index)
        .wrapping_add(1);
    seed.wrapping_add(place).wrapping_mul(SPREAD)
}

/// Fills a block.
pub fn fill(seed: u64, region: u32, block: u32, out: &mut [u8]) {
    let (words, _) = out.as_chunks_mut::<8>();
    for (index, bytes) in (0..).zip(words) {
        *bytes = word(seed, region, block, index).to_le_bytes();
    }
}

/// How many bytes of a block are wrong.
#[must_use]
pub fn wrong_bytes(seed: u64, region: u32, block: u32, data: &[u8]) -> u64 {
    let (words, _) = data.as_chunks::<8>();
    let mut wrong = 0;
    for (index, bytes) in (0..).zip(words) {
        let right = word(seed, region, block, index).to_le_bytes();
        if right != *bytes {
            wrong += right.iter().zip(bytes).filter(|(a, b)| a != b).count() as u64;
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::{fill, word, wrong_bytes};

    #[test]
    fn a_filled_block_is_right_and_only_where_it_belongs() {
        let mut block = vec![0; 4096];
        fill(1, 2, 3, &mut block);
        assert_eq!(wrong_bytes(1, 2, 3, &block), 0);
        assert!(wrong_bytes(1, 2, 4, &block) > 500);
        assert!(wrong_bytes(1, 1, 3, &block) > 500);
        assert!(wrong_bytes(2, 2, 3, &block) > 500);
        assert!(wrong_bytes(1, 2, 3, &[0; 4096]) > 4000);
    }

    #[test]
    fn other_programs_can_compute_it() {
        assert_eq!(word(0, 0, 0, 0), 0x9E37_79B9_7F4A_7C15);
        assert_eq!(
            word(7, 3, 5, 9),
            0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(7 + (3 << 52) + (5 << 24) + 10)
        );
    }
}

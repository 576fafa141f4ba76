//! Reading and writing integers: fixed ones little-endian, counts as LEB128.

/// The input ended, or an integer is not in its one shortest form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Malformed {
    /// Fewer bytes than needed.
    Short,
    /// A varint with needless bytes, or above 64 bits.
    Varint,
}

/// What is left to read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Input<'a> {
    rest: &'a [u8],
}

impl<'a> Input<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(super) fn remaining(&self) -> usize {
        self.rest.len()
    }

    pub(super) fn take(&mut self, n: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.rest.split_at_checked(n).ok_or(Malformed::Short)?;
        self.rest = rest;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or(Malformed::Short)?;
        self.rest = rest;
        Ok(*taken)
    }

    pub(super) fn u8(&mut self) -> Result<u8, Malformed> {
        let (byte, rest) = self.rest.split_first().ok_or(Malformed::Short)?;
        self.rest = rest;
        Ok(*byte)
    }

    pub(super) fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }

    /// A varint in its shortest form; anything else is refused, so that one value has one encoding.
    pub(super) fn varint(&mut self) -> Result<u64, Malformed> {
        let mut value = 0_u64;
        for shift in (0..64_u32).step_by(7) {
            let byte = self.u8()?;
            let bits = u64::from(byte & 0x7f);
            let placed = bits.wrapping_shl(shift);
            if placed.wrapping_shr(shift) != bits {
                return Err(Malformed::Varint);
            }
            value |= placed;
            if byte & 0x80 == 0 {
                if byte == 0 && shift != 0 {
                    return Err(Malformed::Varint);
                }
                return Ok(value);
            }
        }
        Err(Malformed::Varint)
    }
}

/// Appends a varint in its shortest form.
pub(super) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    loop {
        let [low, ..] = value.to_le_bytes();
        value = value.wrapping_shr(7);
        if value == 0 {
            out.push(low & 0x7f);
            return;
        }
        out.push(low | 0x80);
    }
}

/// Signed to unsigned, small magnitudes to small values.
pub(super) fn zigzag(value: i64) -> u64 {
    (value.wrapping_shl(1) ^ value.wrapping_shr(63)).cast_unsigned()
}

/// The inverse of [`zigzag`].
pub(super) fn unzigzag(value: u64) -> i64 {
    value.wrapping_shr(1).cast_signed() ^ (value & 1).cast_signed().wrapping_neg()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn only_the_shortest_varint_is_read() {
        for bad in [
            &[0x80, 0x00][..],
            &[0xff; 10],
            &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02],
            &[0x81, 0x80, 0x00],
        ] {
            assert_eq!(Input::new(bad).varint(), Err(Malformed::Varint), "{bad:?}");
        }
        assert_eq!(Input::new(&[0x80]).varint(), Err(Malformed::Short));
        assert_eq!(Input::new(&[]).varint(), Err(Malformed::Short));
    }

    proptest! {
        #[test]
        fn varints_round_trip(value: u64, shift in 0_u32..64) {
            let value = value >> shift;
            let mut out = Vec::new();
            put_varint(&mut out, value);
            let mut input = Input::new(&out);
            prop_assert_eq!(input.varint(), Ok(value));
            prop_assert_eq!(input.remaining(), 0);
        }

        #[test]
        fn zigzags_round_trip(value: i64) {
            prop_assert_eq!(unzigzag(zigzag(value)), value);
        }
    }

    #[test]
    fn zigzag_keeps_small_values_small() {
        assert_eq!([0, -1, 1, -2].map(zigzag), [0, 1, 2, 3]);
    }
}

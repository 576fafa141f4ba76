//! Block ids in decimal, eight digits at a time: lists of thousands of ids are most of the text of a
//! descriptor that writes them out.

use super::runs::{BlockRuns, to_usize};

const ZEROS: u64 = 0x3030_3030_3030_3030;
/// The first number of eight digits.
const EIGHT_DIGITS: u32 = 10_000_000;
/// The first number of nine digits.
const NINE_DIGITS: u32 = 100_000_000;

/// Appends a JSON array of the ids.
pub(super) fn put_ids(out: &mut Vec<u8>, ids: &BlockRuns) {
    out.push(b'[');
    let start = out.len();
    let longest = ids.max_id().map_or(0, |id| id.0);
    let each = digits(longest).saturating_add(1);
    // Numbers are written as whole words, each over the end of the one before.
    let room = ids.len().saturating_mul(each).saturating_add(16);
    out.resize(start.saturating_add(room), 0);
    let mut rest = out.get_mut(start..).unwrap_or_default();
    for run in ids.runs() {
        if run.first() == run.last() {
            rest = put_id(rest, run.first().0);
        } else {
            for id in run.iter() {
                rest = put_id(rest, id.0);
            }
        }
    }
    let left = rest.len();
    let end = out.len().saturating_sub(left);
    out.truncate(end);
    // The last comma gives way.
    if end > start {
        out.pop();
    }
    out.push(b']');
}

/// Bytes that [`put_ids`] makes room for.
pub(super) fn room(ids: &BlockRuns) -> usize {
    let each = digits(ids.max_id().map_or(0, |id| id.0)).saturating_add(1);
    ids.len().saturating_mul(each).saturating_add(32)
}

fn digits(id: u32) -> usize {
    to_usize(id.checked_ilog10().unwrap_or(0)).saturating_add(1)
}

/// Writes an id and a comma, where there is room for a word more than that, and returns the rest.
#[inline]
fn put_id(mut place: &mut [u8], id: u32) -> &mut [u8] {
    if id < EIGHT_DIGITS {
        let (word, len) = shortest(eight(id));
        let comma = u64::from(b',').wrapping_shl(len << 3);
        return put(place, word | comma, len.saturating_add(1));
    }
    let (mut word, mut len) = (eight(id.wrapping_rem(NINE_DIGITS)) | ZEROS, 8);
    if id < NINE_DIGITS {
        (word, len) = shortest(eight(id));
    } else {
        let (high, digits) = shortest(eight(id.wrapping_div(NINE_DIGITS)));
        place = put(place, high, digits);
    }
    put(put(place, word, len), u64::from(b','), 1)
}

#[inline]
fn put(place: &mut [u8], word: u64, len: u32) -> &mut [u8] {
    if let Some(bytes) = place.first_chunk_mut() {
        *bytes = word.to_le_bytes();
    }
    place.get_mut(to_usize(len)..).unwrap_or_default()
}

/// The eight digits of a number below [`NINE_DIGITS`] as bytes 0 to 9, the highest digit lowest.
#[inline]
fn eight(n: u32) -> u64 {
    let halves = u64::from(n.wrapping_div(10_000)) | u64::from(n.wrapping_rem(10_000)) << 32;
    // A division by 100 in each half, then by 10 in each quarter.
    let hundreds = (halves.wrapping_mul(10_486) >> 20) & 0x0000_007f_0000_007f;
    let quarters = hundreds | halves.wrapping_sub(hundreds.wrapping_mul(100)) << 16;
    let tens = (quarters.wrapping_mul(103) >> 10) & 0x000f_000f_000f_000f;
    tens | quarters.wrapping_sub(tens.wrapping_mul(10)) << 8
}

/// The digits without leading zeros as text, and how many they are.
#[inline]
fn shortest(digits: u64) -> (u64, u32) {
    let zeros = (digits.trailing_zeros() >> 3).min(7);
    let word = (digits | ZEROS).wrapping_shr(zeros << 3);
    (word, 8_u32.wrapping_sub(zeros))
}

/// Reads a number of at most seven digits, as JSON writes it, and how many bytes it takes. `None` for
/// anything else, and within eight bytes of the end.
#[inline]
pub(super) fn take_id(from: &[u8]) -> Option<(u32, usize)> {
    let word = u64::from_le_bytes(*from.first_chunk()?) ^ ZEROS;
    // Bits where a byte is above 9. Only bytes after the first such one may be marked wrongly.
    let other = (word.wrapping_add(0x7676_7676_7676_7676) | word) & 0x8080_8080_8080_8080;
    let bits = other.trailing_zeros() & !7;
    let leading_zero = bits > 8 && word & 0xff == 0;
    if bits == 0 || bits > 56 || leading_zero {
        return None;
    }
    let digits = word.wrapping_shl(64_u32.wrapping_sub(bits));
    let pairs = digits.wrapping_mul(10).wrapping_add(digits >> 8);
    let first = (pairs & 0x0000_00ff_0000_00ff).wrapping_mul(0x000f_4240_0000_0064);
    let second = ((pairs >> 16) & 0x0000_00ff_0000_00ff).wrapping_mul(0x0000_2710_0000_0001);
    let value = u32::try_from(first.wrapping_add(second) >> 32).ok()?;
    Some((value, usize::try_from(bits >> 3).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::BlockId;
    use proptest::prelude::*;

    fn written(ids: &[u32]) -> String {
        let mut out = b"x".to_vec();
        let ids: Vec<_> = ids.iter().copied().map(BlockId).collect();
        put_ids(&mut out, &BlockRuns::from_ids(&ids));
        String::from_utf8(out).unwrap().split_off(1)
    }

    #[test]
    fn numbers_of_every_length_are_written_and_read() {
        assert_eq!(written(&[]), "[]");
        let mut ids = vec![0, u32::MAX, 42_949_672];
        for power in 0..10 {
            let ten = 10_u32.pow(power);
            ids.extend([ten - 1, ten, ten + 1, ten.saturating_mul(9)]);
        }
        assert_eq!(written(&ids), serde_json::to_string(&ids).unwrap());
        for id in ids {
            assert_eq!(written(&[id]), format!("[{id}]"));
            let read = take_id(format!("{id},        ").as_bytes());
            let len = id.to_string().len();
            assert_eq!(read, (len <= 7).then_some((id, len)));
        }
    }

    #[test]
    fn what_is_not_a_number_in_json_is_not_read() {
        for bad in [
            "",
            "1",
            "01,      ",
            "-1,      ",
            ",1      ",
            " 1        ",
            "é1       ",
        ] {
            assert_eq!(take_id(bad.as_bytes()), None, "{bad}");
        }
        assert_eq!(take_id(b"12.5e3 ]"), Some((12, 2)));
        assert_eq!(take_id(b"0\xff\xff\xff\xff\xff\xff\xff"), Some((0, 1)));
    }

    proptest! {
        #[test]
        fn lists_are_written_as_serde_json_writes_them(ids: Vec<u32>, shift in 0_u32..32) {
            let ids: Vec<_> = ids.into_iter().map(|id| id >> shift).collect();
            prop_assert_eq!(written(&ids), serde_json::to_string(&ids).unwrap());
        }

        #[test]
        fn bytes_are_read_up_to_what_is_no_digit(bytes: [u8; 8], digits in 1_usize..=7) {
            let mut bytes = bytes;
            for byte in &mut bytes[..digits] {
                *byte = b'1' + *byte % 9;
            }
            let end = bytes.iter().position(|byte| !byte.is_ascii_digit());
            let expected = end.map(|end| {
                let text = std::str::from_utf8(&bytes[..end]).unwrap();
                (text.parse().unwrap(), end)
            });
            prop_assert_eq!(take_id(&bytes), expected);
        }
    }
}

//! Reading MessagePack that came over the wire: bounded depth, exact types, nothing left over.

use rmpv::{Value, ValueRef};
use thiserror::Error;

/// Deepest nesting accepted. The deepest map that vLLM sends has four levels; rmpv counts the
/// payload of a string or array as one more.
const MAX_DEPTH: usize = 12;

/// Why bytes are not the MessagePack that was expected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Malformed {
    /// Not MessagePack, cut short, or nested too deeply.
    #[error("not MessagePack, cut short, or nested too deeply")]
    Syntax,
    /// Bytes follow the value.
    #[error("{0} bytes follow the value")]
    Trailing(usize),
    /// A map with text keys was expected.
    #[error("expected a map with text keys")]
    NotAMap,
    /// A key occurs twice.
    #[error("the key {0:?} occurs twice")]
    Duplicate(String),
    /// A key is absent.
    #[error("the key {0:?} is absent")]
    Missing(&'static str),
    /// A value has the wrong type or is out of range.
    #[error("{key:?} is not {expected}")]
    Type {
        /// The key.
        key: &'static str,
        /// What was expected.
        expected: &'static str,
    },
}

/// Reads exactly one value.
pub(crate) fn parse(bytes: &[u8]) -> Result<ValueRef<'_>, Malformed> {
    let mut rest = bytes;
    let value = rmpv::decode::read_value_ref_with_max_depth(&mut rest, MAX_DEPTH)
        .map_err(|_| Malformed::Syntax)?;
    if rest.is_empty() {
        Ok(value)
    } else {
        Err(Malformed::Trailing(rest.len()))
    }
}

/// Writes one value.
pub(crate) fn write(value: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    // Writing to a vector does not fail; a short buffer would be refused by every reader.
    let _ = rmpv::encode::write_value(&mut out, value);
    out
}

/// Builds a map with text keys.
pub(crate) fn map<const N: usize>(entries: [(&str, Value); N]) -> Value {
    Value::Map(
        entries
            .into_iter()
            .map(|(k, v)| (Value::from(k), v))
            .collect(),
    )
}

/// The entries of a map with text keys, each at most once. Unknown keys are the caller's to ignore.
#[derive(Debug)]
pub(crate) struct Fields<'v, 'a>(Vec<(&'v str, &'v ValueRef<'a>)>);

impl<'v, 'a> Fields<'v, 'a> {
    pub(crate) fn of(value: &'v ValueRef<'a>) -> Result<Self, Malformed> {
        let ValueRef::Map(entries) = value else {
            return Err(Malformed::NotAMap);
        };
        let mut fields = Vec::with_capacity(entries.len());
        for (key, value) in entries {
            let ValueRef::String(key) = key else {
                return Err(Malformed::NotAMap);
            };
            fields.push((key.as_str().ok_or(Malformed::NotAMap)?, value));
        }
        fields.sort_by_key(|(key, _)| *key);
        let twice = fields
            .iter()
            .zip(fields.iter().skip(1))
            .find(|(a, b)| a.0 == b.0);
        match twice {
            Some((entry, _)) => Err(Malformed::Duplicate(entry.0.chars().take(64).collect())),
            None => Ok(Self(fields)),
        }
    }

    /// The entries, sorted by key.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&'v str, &'v ValueRef<'a>)> + '_ {
        self.0.iter().copied()
    }

    /// The value of a key; `None` when it is absent or nil.
    pub(crate) fn opt(&self, key: &'static str) -> Option<&'v ValueRef<'a>> {
        let at = self.0.binary_search_by_key(&key, |(k, _)| k).ok()?;
        self.0
            .get(at)
            .map(|(_, value)| *value)
            .filter(|value| !matches!(value, ValueRef::Nil))
    }

    pub(crate) fn get(&self, key: &'static str) -> Result<&'v ValueRef<'a>, Malformed> {
        self.opt(key).ok_or(Malformed::Missing(key))
    }

    pub(crate) fn text(&self, key: &'static str) -> Result<&'v str, Malformed> {
        as_text(self.get(key)?).ok_or(wrong(key, "text"))
    }

    pub(crate) fn bin(&self, key: &'static str) -> Result<&'a [u8], Malformed> {
        as_bin(self.get(key)?).ok_or(wrong(key, "bytes"))
    }

    pub(crate) fn bin32(&self, key: &'static str) -> Result<[u8; 32], Malformed> {
        self.bin(key)?
            .try_into()
            .map_err(|_| wrong(key, "32 bytes"))
    }

    pub(crate) fn u64(&self, key: &'static str) -> Result<u64, Malformed> {
        as_u64(self.get(key)?).ok_or(wrong(key, "an unsigned 64-bit number"))
    }

    pub(crate) fn u32(&self, key: &'static str) -> Result<u32, Malformed> {
        as_u32(self.get(key)?).ok_or(wrong(key, "an unsigned 32-bit number"))
    }

    /// A number that defaults to `default` when absent.
    pub(crate) fn u32_or(&self, key: &'static str, default: u32) -> Result<u32, Malformed> {
        match self.opt(key) {
            Some(value) => as_u32(value).ok_or(wrong(key, "an unsigned 32-bit number")),
            None => Ok(default),
        }
    }

    pub(crate) fn array(&self, key: &'static str) -> Result<&'v [ValueRef<'a>], Malformed> {
        match self.get(key)? {
            ValueRef::Array(values) => Ok(values),
            _ => Err(wrong(key, "an array")),
        }
    }

    /// An array whose elements all satisfy `read`; `None` when the key is absent or nil.
    pub(crate) fn list<T>(
        &self,
        key: &'static str,
        expected: &'static str,
        read: impl Fn(&'v ValueRef<'a>) -> Option<T>,
    ) -> Result<Option<Vec<T>>, Malformed> {
        match self.opt(key) {
            None => Ok(None),
            Some(ValueRef::Array(values)) => values
                .iter()
                .map(read)
                .collect::<Option<_>>()
                .map(Some)
                .ok_or(wrong(key, expected)),
            Some(_) => Err(wrong(key, expected)),
        }
    }
}

pub(crate) fn wrong(key: &'static str, expected: &'static str) -> Malformed {
    Malformed::Type { key, expected }
}

pub(crate) fn as_text<'v>(value: &'v ValueRef<'_>) -> Option<&'v str> {
    match value {
        ValueRef::String(text) => text.as_str(),
        _ => None,
    }
}

pub(crate) fn as_bin<'a>(value: &ValueRef<'a>) -> Option<&'a [u8]> {
    match value {
        ValueRef::Binary(bytes) => Some(bytes),
        _ => None,
    }
}

pub(crate) fn as_u64(value: &ValueRef<'_>) -> Option<u64> {
    match value {
        ValueRef::Integer(number) => number.as_u64(),
        _ => None,
    }
}

pub(crate) fn as_u32(value: &ValueRef<'_>) -> Option<u32> {
    as_u64(value).and_then(|number| u32::try_from(number).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_values_are_refused() {
        assert_eq!(parse(&[]), Err(Malformed::Syntax));
        assert_eq!(parse(&[0xc0, 0xc0]), Err(Malformed::Trailing(1)));
        // An array that claims four billion elements, a map likewise, a string likewise.
        for head in [0xdd, 0xdf, 0xdb, 0xc6] {
            assert_eq!(
                parse(&[head, 0xff, 0xff, 0xff, 0xff]),
                Err(Malformed::Syntax)
            );
        }
        // A megabyte of nested arrays.
        assert_eq!(parse(&vec![0x91; 1 << 20]), Err(Malformed::Syntax));
        let twice = [0x82, 0xa1, b'a', 1, 0xa1, b'a', 2];
        let value = parse(&twice).unwrap();
        assert_eq!(
            Fields::of(&value).unwrap_err(),
            Malformed::Duplicate("a".into())
        );
        let binkey = parse(&[0x81, 0xc4, 1, b'a', 1]).unwrap();
        assert_eq!(Fields::of(&binkey).unwrap_err(), Malformed::NotAMap);
    }

    #[test]
    fn types_are_exact() {
        let bytes = write(&map([
            ("n", Value::from(7)),
            ("neg", Value::from(-7)),
            ("f", Value::F64(7.0)),
            ("s", Value::from("x")),
            ("b", Value::Binary(vec![1])),
            ("nil", Value::Nil),
        ]));
        let value = parse(&bytes).unwrap();
        let f = Fields::of(&value).unwrap();
        assert_eq!(f.u32("n"), Ok(7));
        assert!(f.u32("neg").is_err());
        assert!(f.u64("f").is_err());
        assert_eq!(f.text("s"), Ok("x"));
        assert!(f.bin("s").is_err());
        assert!(f.text("b").is_err());
        assert_eq!(f.u32_or("nil", 3), Ok(3));
        assert_eq!(f.u64("gone"), Err(Malformed::Missing("gone")));
    }
}

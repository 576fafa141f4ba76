//! Reading the JSON text of a descriptor as engines write it, without looking at each byte of the
//! ticket and each digit of the block ids more than once. Nothing is refused here: whatever is not
//! plainly such a text is left to [`json_object`](super::json_object), which knows all of JSON and
//! says what is wrong.

use serde_json::{Deserializer, Map, Value};

use super::digits::take_id;
use super::json::{BLOCK_IDS, TICKET_KEY};
use super::json_object::Object;
use super::limits::DescriptorLimits;
use super::runs::BlockRuns;
use super::ticket_codec::{SealedTicket, TicketError};
use crate::ids::BlockId;

/// Reads an object. `None` when it is not one, when anything in it is beyond the limits, and for some
/// texts that are well, but unusual.
pub(super) fn read(text: &str, limits: &DescriptorLimits) -> Option<Object> {
    let mut reading = Reading {
        text,
        at: 0,
        limits,
    };
    let mut object = Object {
        fields: Map::new(),
        groups: None,
        ticket: None,
    };
    reading.take(b'{')?;
    loop {
        reading.take(b'"')?;
        let key = reading.plain_string()?;
        if key.bytes().any(|byte| byte < b' ') {
            return None;
        }
        reading.take(b':')?;
        match key {
            BLOCK_IDS => object.groups = Some(reading.groups()?),
            TICKET_KEY => {
                reading.take(b'"')?;
                object.ticket = Some(reading.ticket()?);
            }
            _ => {
                let value = reading.value()?;
                object.fields.insert(key.to_owned(), value);
            }
        }
        if reading.take(b',').is_none() {
            break;
        }
    }
    reading.take(b'}')?;
    reading.skip_space();
    (reading.at == text.len()).then_some(object)
}

/// What is left to read.
struct Reading<'a> {
    text: &'a str,
    at: usize,
    limits: &'a DescriptorLimits,
}

impl<'a> Reading<'a> {
    fn rest(&self) -> &'a [u8] {
        self.text.as_bytes().get(self.at..).unwrap_or_default()
    }

    fn advance(&mut self, bytes: usize) {
        self.at = self.at.saturating_add(bytes);
    }

    #[inline]
    fn skip_space(&mut self) {
        while let Some(b' ' | b'\n' | b'\t' | b'\r') = self.rest().first() {
            self.advance(1);
        }
    }

    /// Takes white space, and then this byte if it comes next.
    #[inline]
    fn take(&mut self, byte: u8) -> Option<()> {
        self.skip_space();
        (self.rest().first() == Some(&byte)).then(|| self.advance(1))
    }

    /// The rest of a string without escapes, after its first quote. Control characters may be in it,
    /// which JSON forbids.
    fn plain_string(&mut self) -> Option<&'a str> {
        let len = memchr::memchr2(b'"', b'\\', self.rest())?;
        let string = self.text.get(self.at..self.at.checked_add(len)?)?;
        self.advance(len);
        self.take(b'"')?;
        Some(string)
    }

    /// A ticket, after its first quote. Base64 has no quotes, no escapes and no control characters, and
    /// is all that is read.
    fn ticket(&mut self) -> Option<SealedTicket> {
        // Engines write it last: then nothing has to look for its end.
        let rest = self.text.get(self.at..)?;
        if let Some(ticket) = rest.strip_suffix("\"}") {
            match SealedTicket::parse(ticket, self.limits) {
                Ok(sealed) => {
                    self.advance(ticket.len().saturating_add(1));
                    return Some(sealed);
                }
                Err(TicketError::NotBase64) => {}
                Err(_) => return None,
            }
        }
        SealedTicket::parse(self.plain_string()?, self.limits).ok()
    }

    /// Any other value. It may be nested one level deeper than in the object that it is in, which the
    /// parser does not see here.
    fn value(&mut self) -> Option<Value> {
        self.skip_space();
        let rest = self.text.get(self.at..)?;
        let mut values = Deserializer::from_str(rest).into_iter();
        let value = values.next()?.ok()?;
        self.advance(values.byte_offset());
        Some(value)
    }

    /// Arrays of arrays of ids.
    fn groups(&mut self) -> Option<Vec<BlockRuns>> {
        let mut groups = Vec::new();
        let mut blocks_left = usize::try_from(self.limits.max_blocks).ok()?;
        let mut ids = Vec::with_capacity(512);
        self.take(b'[')?;
        if self.take(b']').is_some() {
            return Some(groups);
        }
        loop {
            ids.clear();
            self.ids(&mut ids, blocks_left)?;
            blocks_left = blocks_left.checked_sub(ids.len())?;
            if groups.len() >= self.limits.max_groups {
                return None;
            }
            groups.push(BlockRuns::from_ids(&ids));
            if self.take(b',').is_none() {
                break;
            }
        }
        self.take(b']')?;
        Some(groups)
    }

    fn ids(&mut self, ids: &mut Vec<BlockId>, most: usize) -> Option<()> {
        self.take(b'[')?;
        if self.take(b']').is_some() {
            return Some(());
        }
        let all = self.rest();
        let mut rest = all;
        loop {
            while let Some((b' ' | b'\n' | b'\t' | b'\r', after)) = rest.split_first() {
                rest = after;
            }
            let (id, len) = take_id(rest)?;
            if id > self.limits.max_block_id || ids.len() >= most {
                return None;
            }
            ids.push(BlockId(id));
            let (next, after) = rest.get(len..)?.split_first()?;
            rest = after;
            match next {
                b',' => {}
                b']' => break,
                _ => return None,
            }
        }
        self.advance(all.len().saturating_sub(rest.len()));
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::descriptor::json_object;
    use proptest::prelude::*;

    /// What both ways of reading say, as text.
    fn both(text: &str, limits: &DescriptorLimits) -> (Option<String>, Option<String>) {
        let mut slow = Deserializer::from_str(text);
        let object = json_object::read(&mut slow, limits).ok().flatten();
        let object = object.filter(|_| slow.end().is_ok());
        let show = |object: Option<Object>| object.map(|object| format!("{object:?}"));
        (show(read(text, limits)), show(object))
    }

    #[test]
    fn usual_texts_are_read_here() {
        let limits = DescriptorLimits::default();
        for text in [
            r#"{"remote_block_ids":[[1,2,3],[7]],"a":1}"#,
            "{\"a\":null,\n \"remote_block_ids\": [[1, 2, 3, 100000], []],\"b\":1.5e3,\"c\":[{}]} ",
            r#"{"remote_block_ids":[],"remote_block_ids":[[5]],"é":"\u00e9\n"        }"#,
        ] {
            let (quick, slow) = both(text, &limits);
            assert!(slow.is_some());
            assert_eq!(quick, slow, "{text}");
        }
    }

    #[test]
    fn limits_hold() {
        let limits = DescriptorLimits {
            max_blocks: 3,
            max_block_id: 99,
            max_groups: 2,
            ..DescriptorLimits::default()
        };
        for (ids, good) in [
            ("[[1,2],[3]]", true),
            ("[[1,2],[3,4]]", false),
            ("[[],[],[]]", false),
            ("[[99]]", true),
            ("[[100]]", false),
        ] {
            let text = format!("{{\"remote_block_ids\":{ids},\"tail\":12345678}}");
            let (quick, slow) = both(&text, &limits);
            assert_eq!((quick.is_some(), slow.is_some()), (good, good), "{text}");
        }
    }

    proptest! {
        /// Whatever is read here, is read the same by all of JSON.
        #[test]
        fn no_text_is_read_otherwise(
            parts in proptest::collection::vec(
                prop_oneof![
                    Just("{"), Just("}"), Just("["), Just("]"), Just("[["), Just("]]"), Just(","),
                    Just(":"), Just(" "), Just("\"remote_block_ids\":"), Just("\"kv_xfer\":"),
                    Just("\"a\":"), Just("\"\\n\":"), Just("\"b\u{1}\":"), Just("\"\""), Just("12"),
                    Just("0"), Just("-1"), Just("1.5"), Just("123456789"), Just("null"),
                    Just("\n"), Just("\"é\""),
                ],
                0..12,
            ),
        ) {
            let text = format!("{{{}}}", parts.concat());
            let (quick, slow) = both(&text, &DescriptorLimits::default());
            if quick.is_some() {
                prop_assert_eq!(quick, slow);
            }
        }
    }
}

//! Reading the JSON object: block ids go straight into runs, one by one and within the limits, and the
//! ticket is read where it lies, since a tree of JSON values takes many times the memory and the time.
//! All else is kept as values.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::json::{BLOCK_IDS, DescriptorError, TICKET_KEY};
use super::limits::DescriptorLimits;
use super::runs::BlockRuns;
use super::runs_codec::RunsError;
use super::ticket_codec::SealedTicket;
use crate::ids::BlockId;

/// The object's fields, and its block ids and ticket apart.
#[derive(Debug, Default)]
pub(super) struct Object {
    pub(super) fields: Map<String, Value>,
    /// `None` when null or absent.
    pub(super) groups: Option<Vec<BlockRuns>>,
    /// `None` when null or absent.
    pub(super) ticket: Option<SealedTicket>,
}

/// Reads an object; `None` for null.
///
/// # Errors
/// [`DescriptorError`] when it is something else or its block ids are not acceptable.
pub(super) fn read<'de, D: Deserializer<'de>>(
    from: D,
    limits: &DescriptorLimits,
) -> Result<Option<Object>, DescriptorError> {
    let mut reading = Reading {
        limits,
        blocks: 0,
        refused: None,
    };
    let read = ObjectSeed(&mut reading).deserialize(from);
    read.map_err(|error| {
        // Our own refusals travel beside the parser's error, which can only hold text.
        reading.refused.unwrap_or_else(|| DescriptorError::NotJson {
            cause: error.to_string(),
        })
    })
}

/// What the visitors share.
struct Reading<'a> {
    limits: &'a DescriptorLimits,
    blocks: u32,
    refused: Option<DescriptorError>,
}

impl Reading<'_> {
    fn refuse<E: serde::de::Error>(&mut self, error: impl Into<DescriptorError>) -> E {
        self.refused = Some(error.into());
        E::custom("refused")
    }

    fn wrong_ids<E: serde::de::Error>(&mut self, found: &'static str) -> E {
        self.refuse(DescriptorError::WrongType {
            field: BLOCK_IDS,
            expected: GROUPS,
            found,
        })
    }

    fn block_id<E: serde::de::Error>(&mut self, id: u64) -> Result<BlockId, E> {
        let block = match u32::try_from(id) {
            Ok(block) if block <= self.limits.max_block_id => BlockId(block),
            _ => return Err(self.bad_id(&id)),
        };
        match self.blocks.checked_add(1) {
            Some(blocks) if blocks <= self.limits.max_blocks => self.blocks = blocks,
            _ => {
                return Err(self.refuse(RunsError::TooManyBlocks {
                    max_blocks: self.limits.max_blocks,
                }));
            }
        }
        Ok(block)
    }

    fn bad_id<E: serde::de::Error>(&mut self, id: &dyn fmt::Display) -> E {
        self.refuse(DescriptorError::OutOfRange {
            field: BLOCK_IDS,
            value: id.to_string(),
            expected: "a block id that the limits allow",
        })
    }
}

const GROUPS: &str = "an array of arrays of block ids";

/// Visitor methods that hand the kind of value found to `$refuse`.
macro_rules! refuse {
    ($refuse:ident: $($kind:ident)*) => { $(refuse!(@ $refuse $kind);)* };
    (@ $refuse:ident bool) => {
        fn visit_bool<E: serde::de::Error>(self, _: bool) -> Result<Self::Value, E> {
            Err(self.$refuse("a boolean"))
        }
    };
    (@ $refuse:ident number) => {
        fn visit_u64<E: serde::de::Error>(self, _: u64) -> Result<Self::Value, E> {
            Err(self.$refuse("a number"))
        }
        fn visit_i64<E: serde::de::Error>(self, _: i64) -> Result<Self::Value, E> {
            Err(self.$refuse("a number"))
        }
        fn visit_f64<E: serde::de::Error>(self, _: f64) -> Result<Self::Value, E> {
            Err(self.$refuse("a number"))
        }
    };
    (@ $refuse:ident string) => {
        fn visit_str<E: serde::de::Error>(self, _: &str) -> Result<Self::Value, E> {
            Err(self.$refuse("a string"))
        }
    };
    (@ $refuse:ident null) => {
        fn visit_unit<E: serde::de::Error>(self) -> Result<Self::Value, E> {
            Err(self.$refuse("null"))
        }
    };
    (@ $refuse:ident array) => {
        fn visit_seq<A: SeqAccess<'de>>(self, _: A) -> Result<Self::Value, A::Error> {
            Err(self.$refuse("an array"))
        }
    };
    (@ $refuse:ident object) => {
        fn visit_map<A: MapAccess<'de>>(self, _: A) -> Result<Self::Value, A::Error> {
            Err(self.$refuse("an object"))
        }
    };
}

/// A seed that is its own visitor.
macro_rules! seed {
    ($name:ident -> $value:ty) => {
        struct $name<'a, 'b>(&'a mut Reading<'b>);

        impl<'de> DeserializeSeed<'de> for $name<'_, '_> {
            type Value = $value;
            fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<$value, D::Error> {
                from.deserialize_any(self)
            }
        }
    };
}

seed!(ObjectSeed -> Option<Object>);
seed!(TicketSeed -> Option<SealedTicket>);
seed!(GroupsSeed -> Option<Vec<BlockRuns>>);
seed!(GroupSeed -> BlockRuns);
seed!(IdSeed -> BlockId);

impl<'de> Visitor<'de> for ObjectSeed<'_, '_> {
    type Value = Option<Object>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Self::Value, A::Error> {
        let mut object = Object::default();
        while let Some(key) = from.next_key::<String>()? {
            if key == BLOCK_IDS {
                // Named twice, the last one counts, as for every other field.
                self.0.blocks = 0;
                object.groups = from.next_value_seed(GroupsSeed(self.0))?;
            } else if key == TICKET_KEY {
                object.ticket = from.next_value_seed(TicketSeed(self.0))?;
            } else {
                object.fields.insert(key, from.next_value()?);
            }
        }
        Ok(Some(object))
    }

    refuse!(not_an_object: bool number string array);
}

impl ObjectSeed<'_, '_> {
    fn not_an_object<E: serde::de::Error>(self, found: &'static str) -> E {
        self.0.refuse(DescriptorError::NotAnObject { found })
    }
}

impl<'de> Visitor<'de> for TicketSeed<'_, '_> {
    type Value = Option<SealedTicket>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a ticket")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
        SealedTicket::parse(text, self.0.limits)
            .map(Some)
            .map_err(|error| self.0.refuse(error))
    }

    refuse!(wrong: bool number array object);
}

impl TicketSeed<'_, '_> {
    fn wrong<E: serde::de::Error>(self, found: &'static str) -> E {
        self.0.refuse(DescriptorError::WrongType {
            field: TICKET_KEY,
            expected: "a string",
            found,
        })
    }
}

impl<'de> Visitor<'de> for GroupsSeed<'_, '_> {
    type Value = Option<Vec<BlockRuns>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(GROUPS)
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Self::Value, A::Error> {
        let mut groups = Vec::new();
        while let Some(group) = from.next_element_seed(GroupSeed(self.0))? {
            if groups.len() >= self.0.limits.max_groups {
                return Err(self.0.refuse(DescriptorError::TooManyGroups {
                    max_groups: self.0.limits.max_groups,
                }));
            }
            groups.push(group);
        }
        Ok(Some(groups))
    }

    refuse!(wrong: bool number string object);
}

impl GroupsSeed<'_, '_> {
    fn wrong<E: serde::de::Error>(self, found: &'static str) -> E {
        self.0.wrong_ids(found)
    }
}

impl<'de> Visitor<'de> for GroupSeed<'_, '_> {
    type Value = BlockRuns;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of block ids")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Self::Value, A::Error> {
        let mut runs = BlockRuns::new();
        while let Some(id) = from.next_element_seed(IdSeed(self.0))? {
            runs.push(id);
        }
        Ok(runs)
    }

    refuse!(wrong: bool number string null object);
}

impl GroupSeed<'_, '_> {
    fn wrong<E: serde::de::Error>(self, found: &'static str) -> E {
        self.0.wrong_ids(found)
    }
}

impl<'de> Visitor<'de> for IdSeed<'_, '_> {
    type Value = BlockId;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a block id")
    }

    fn visit_u64<E: serde::de::Error>(self, id: u64) -> Result<BlockId, E> {
        self.0.block_id(id)
    }

    fn visit_i64<E: serde::de::Error>(self, id: i64) -> Result<BlockId, E> {
        Err(self.0.bad_id(&id))
    }

    fn visit_f64<E: serde::de::Error>(self, id: f64) -> Result<BlockId, E> {
        Err(self.0.bad_id(&id))
    }

    refuse!(wrong: bool string null array object);
}

impl IdSeed<'_, '_> {
    fn wrong<E: serde::de::Error>(self, found: &'static str) -> E {
        self.0.wrong_ids(found)
    }
}

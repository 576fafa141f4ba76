//! `kv_transfer_params`: JSON to [`RemoteBlocks`] and back.

use std::num::{NonZeroU16, NonZeroU32};

use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Map, Value};
use thiserror::Error;

use super::digits;
use super::host::{Host, HostError};
use super::json_object::{self, Object};
use super::json_text;
use super::limits::DescriptorLimits;
use super::remote::{RemoteBlocks, TransferMode};
use super::runs::BlockRuns;
use super::runs_codec::RunsError;
use super::ticket_codec::TicketError;
use crate::ids::{EngineId, MAX_NAME_BYTES, NameError, RequestId};

/// The key of our one extra string.
pub const TICKET_KEY: &str = "kv_xfer";

const DO_REMOTE_PREFILL: &str = "do_remote_prefill";
const DO_REMOTE_DECODE: &str = "do_remote_decode";
pub(super) const BLOCK_IDS: &str = "remote_block_ids";
const ENGINE_ID: &str = "remote_engine_id";
const REQUEST_ID: &str = "remote_request_id";
const HOST: &str = "remote_host";
const PORT: &str = "remote_port";
const TP_SIZE: &str = "tp_size";
const DCP_SIZE: &str = "dcp_size";
const PP_SIZE: &str = "pp_size";
const NUM_TOKENS: &str = "remote_num_tokens";
const EXPIRY: &str = "remote_blocks_expiry_time";
const TRANSFER_MODE: &str = "transfer_mode";

/// The fields without which there is nothing to read. All null or absent: a miss.
const REMOTE: [&str; 5] = [BLOCK_IDS, ENGINE_ID, REQUEST_ID, HOST, PORT];

/// All fields that an unknown one must not stand in for.
const KNOWN: [&str; 14] = [
    DO_REMOTE_PREFILL,
    DO_REMOTE_DECODE,
    BLOCK_IDS,
    ENGINE_ID,
    REQUEST_ID,
    HOST,
    PORT,
    TP_SIZE,
    DCP_SIZE,
    PP_SIZE,
    NUM_TOKENS,
    EXPIRY,
    TRANSFER_MODE,
    TICKET_KEY,
];

/// Why JSON is not a descriptor. Recompute, whichever it is.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DescriptorError {
    /// The text is longer than accepted.
    #[error("kv_transfer_params has {len} bytes; at most {max_bytes} are accepted")]
    TooLong {
        /// Bytes of text.
        len: usize,
        /// The most accepted.
        max_bytes: usize,
    },
    /// The text is not JSON.
    #[error("kv_transfer_params is not JSON: {cause}")]
    NotJson {
        /// What the parser says, with line and column.
        cause: String,
    },
    /// The value is not an object.
    #[error("kv_transfer_params is {found}, not an object")]
    NotAnObject {
        /// The kind of value found.
        found: &'static str,
    },
    /// A field is null or absent while others of its kind are there.
    #[error("{field} is missing while other remote fields are there; a router has dropped it")]
    Missing {
        /// The field.
        field: &'static str,
    },
    /// A field has the wrong type.
    #[error("{field} is {found}, not {expected}")]
    WrongType {
        /// The field.
        field: &'static str,
        /// What it should be.
        expected: &'static str,
        /// The kind of value found.
        found: &'static str,
    },
    /// A number is out of range.
    #[error("{field} is {value}, not {expected}")]
    OutOfRange {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What it should be.
        expected: &'static str,
    },
    /// An engine or request id is not acceptable.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The host is not acceptable.
    #[error("{HOST}: {0}")]
    Host(#[from] HostError),
    /// More KV-cache groups than accepted.
    #[error("{BLOCK_IDS} has more than the {max_groups} groups that are accepted")]
    TooManyGroups {
        /// The most accepted.
        max_groups: usize,
    },
    /// The block ids break a limit.
    #[error("{BLOCK_IDS}: {0}")]
    Blocks(#[from] RunsError),
    /// Our string is not a ticket.
    #[error(transparent)]
    Ticket(#[from] TicketError),
    /// The ids in the array are not those of the ticket.
    #[error(
        "{BLOCK_IDS} names {found} blocks in {groups} groups and the ticket {ticket}, or others; \
         something on the way has changed one of them"
    )]
    BlocksDisagree {
        /// Blocks in the array.
        found: usize,
        /// Groups in the array.
        groups: usize,
        /// Blocks in the ticket.
        ticket: usize,
    },
    /// The token count beside the ticket is not the ticket's.
    #[error(
        "{NUM_TOKENS} is {found} and the ticket says {ticket}; something on the way has changed one \
         of them"
    )]
    TokensDisagree {
        /// Tokens beside the ticket.
        found: u64,
        /// Tokens in the ticket.
        ticket: u64,
    },
}

/// How block ids are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BlockIdsJson {
    /// Every id in `remote_block_ids`, as vLLM engines need it.
    #[default]
    Expanded,
    /// Only as runs in the ticket, for peers that are known to read it. Without a ticket the ids are
    /// written all the same.
    Omitted,
}

/// `kv_transfer_params`, decoded.
#[derive(Debug, Clone, PartialEq)]
pub enum Params {
    /// Nothing to read: a first turn, or a router that has no descriptor.
    Miss(Miss),
    /// Blocks to read.
    Remote(Box<RemoteBlocks>),
}

/// `kv_transfer_params` with nothing to read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Miss {
    /// The receiver is to decode with KV from elsewhere. True here makes no sense, but travels.
    pub do_remote_prefill: bool,
    /// The receiver is to prefill for another engine, and to describe its blocks when it is done.
    pub do_remote_decode: bool,
    /// All other fields, as they came.
    pub extra: Map<String, Value>,
}

impl Miss {
    /// What a router sends to a prefill engine when it has no descriptor.
    #[must_use]
    pub fn to_prefill() -> Self {
        Self {
            do_remote_decode: true,
            ..Self::default()
        }
    }

    /// The object, with the remote fields as nulls, as vLLM's routers write it.
    #[must_use]
    pub fn to_json_value(&self) -> Value {
        let mut map = self.extra.clone();
        map.insert(DO_REMOTE_PREFILL.into(), self.do_remote_prefill.into());
        map.insert(DO_REMOTE_DECODE.into(), self.do_remote_decode.into());
        for field in REMOTE {
            map.insert(field.into(), Value::Null);
        }
        Value::Object(map)
    }
}

impl Params {
    /// Decodes JSON text.
    ///
    /// # Errors
    /// [`DescriptorError`] when it is not an object with acceptable fields.
    pub fn from_json_str(text: &str, limits: &DescriptorLimits) -> Result<Self, DescriptorError> {
        if text.len() > limits.max_bytes {
            return Err(DescriptorError::TooLong {
                len: text.len(),
                max_bytes: limits.max_bytes,
            });
        }
        if let Some(object) = json_text::read(text, limits) {
            return Self::from_object(Some(object));
        }
        let mut from = serde_json::Deserializer::from_str(text);
        let object = json_object::read(&mut from, limits)?;
        from.end().map_err(|error| DescriptorError::NotJson {
            cause: error.to_string(),
        })?;
        Self::from_object(object)
    }

    /// Decodes a JSON value. `null` is a miss.
    ///
    /// # Errors
    /// [`DescriptorError`] when it is not an object with acceptable fields.
    pub fn from_json_value(
        value: Value,
        limits: &DescriptorLimits,
    ) -> Result<Self, DescriptorError> {
        Self::from_object(json_object::read(value, limits)?)
    }

    fn from_object(object: Option<Object>) -> Result<Self, DescriptorError> {
        let Some(Object {
            fields,
            groups,
            ticket,
        }) = object
        else {
            return Ok(Self::Miss(Miss::default()));
        };
        let mut fields = Fields(fields);
        let do_remote_prefill = fields.bool(DO_REMOTE_PREFILL)?;
        let do_remote_decode = fields.bool(DO_REMOTE_DECODE)?;
        if ticket.is_none() && groups.is_none() && !fields.any(&REMOTE) {
            let mut extra = fields.0;
            for field in REMOTE {
                extra.remove(field);
            }
            return Ok(Self::Miss(Miss {
                do_remote_prefill,
                do_remote_decode,
                extra,
            }));
        }
        let remote_block_ids = match (&ticket, groups) {
            (None, None) => return Err(DescriptorError::Missing { field: BLOCK_IDS }),
            (None, Some(groups)) => groups,
            (Some(sealed), None) => vec![sealed.unverified().runs.clone()],
            (Some(sealed), Some(groups)) => {
                let runs = &sealed.unverified().runs;
                if groups.as_slice() != std::slice::from_ref(runs) {
                    return Err(DescriptorError::BlocksDisagree {
                        found: groups
                            .iter()
                            .fold(0, |sum, group| sum.saturating_add(group.len())),
                        groups: groups.len(),
                        ticket: runs.len(),
                    });
                }
                groups
            }
        };
        let stated = fields.u64(NUM_TOKENS)?;
        let remote_num_tokens = match (&ticket, stated) {
            (None, stated) => stated.unwrap_or(0),
            (Some(sealed), None) => sealed.unverified().tokens,
            (Some(sealed), Some(found)) => {
                let ticket = sealed.unverified().tokens;
                if found != ticket {
                    return Err(DescriptorError::TokensDisagree { found, ticket });
                }
                found
            }
        };
        Ok(Self::Remote(Box::new(RemoteBlocks {
            do_remote_prefill,
            do_remote_decode,
            remote_block_ids,
            remote_engine_id: EngineId::new(fields.required_string(ENGINE_ID)?)?,
            remote_request_id: RequestId::new(fields.required_string(REQUEST_ID)?)?,
            remote_host: Host::new(fields.required_string(HOST)?)?,
            remote_port: fields.port()?,
            tp_size: fields.size(TP_SIZE)?,
            dcp_size: fields.size(DCP_SIZE)?,
            pp_size: fields.size(PP_SIZE)?,
            remote_num_tokens,
            remote_blocks_expiry_time: fields.seconds(EXPIRY)?,
            transfer_mode: fields.transfer_mode()?,
            ticket,
            extra: fields.0,
        })))
    }

    /// The JSON value.
    #[must_use]
    pub fn to_json_value(&self, ids: BlockIdsJson) -> Value {
        match self {
            Self::Miss(miss) => miss.to_json_value(),
            Self::Remote(blocks) => blocks.to_json_value(ids),
        }
    }
}

impl RemoteBlocks {
    /// The JSON value. An unknown field never takes the place of a known one.
    #[must_use]
    pub fn to_json_value(&self, ids: BlockIdsJson) -> Value {
        // Only maps with keys that are not strings fail.
        let written = Written {
            blocks: self,
            groups: self.written_ids(ids),
        };
        let mut value = serde_json::to_value(written).unwrap_or_default();
        if let (Some(ticket), Some(map)) = (&self.ticket, value.as_object_mut()) {
            map.insert(TICKET_KEY.to_owned(), ticket.to_text().into());
        }
        value
    }

    /// The JSON text.
    #[must_use]
    pub fn to_json_string(&self, ids: BlockIdsJson) -> String {
        // Block ids and the ticket are put in by hand, before the closing brace: neither needs
        // escaping, and looking for what does would take longer than all the rest. There is room for
        // all from the start: a buffer that grows is copied, and its pages are touched anew.
        let groups = self.written_ids(ids).unwrap_or_default();
        let room = groups.iter().fold(HEAD_BYTES, |room, group| {
            room.saturating_add(digits::room(group))
        });
        let ticket = self.ticket.as_ref();
        let mut text = Vec::with_capacity(
            ticket.map_or(room, |ticket| room.saturating_add(ticket.text_len())),
        );
        let head = Written {
            blocks: self,
            groups: None,
        };
        // Only maps with keys that are not strings fail.
        if serde_json::to_writer(&mut text, &head).is_err() || text.pop().is_none() {
            return String::new();
        }
        if self.written_ids(ids).is_some() {
            put_key(&mut text, BLOCK_IDS);
            text.push(b'[');
            for (index, group) in groups.iter().enumerate() {
                if index > 0 {
                    text.push(b',');
                }
                digits::put_ids(&mut text, group);
            }
            text.push(b']');
        }
        if let Some(ticket) = ticket {
            put_key(&mut text, TICKET_KEY);
            text.push(b'"');
            ticket.append_text(&mut text);
            text.push(b'"');
        }
        text.push(b'}');
        String::from_utf8(text).unwrap_or_default()
    }

    /// The block ids that are written out.
    fn written_ids(&self, ids: BlockIdsJson) -> Option<&[BlockRuns]> {
        (ids == BlockIdsJson::Expanded || self.ticket.is_none())
            .then_some(self.remote_block_ids.as_slice())
    }
}

/// Room for all but block ids and ticket, in most descriptors.
const HEAD_BYTES: usize = 768;

/// Appends the key of one more entry.
fn put_key(text: &mut Vec<u8>, key: &str) {
    for part in [",\"", key, "\":"] {
        text.extend_from_slice(part.as_bytes());
    }
}

/// Remote blocks on their way to JSON, but for the ticket.
struct Written<'a> {
    blocks: &'a RemoteBlocks,
    groups: Option<&'a [BlockRuns]>,
}

impl Serialize for Written<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let blocks = self.blocks;
        let mut map = to.serialize_map(None)?;
        map.serialize_entry(DO_REMOTE_PREFILL, &blocks.do_remote_prefill)?;
        map.serialize_entry(DO_REMOTE_DECODE, &blocks.do_remote_decode)?;
        if let Some(groups) = self.groups {
            map.serialize_entry(BLOCK_IDS, &Groups(groups))?;
        }
        map.serialize_entry(ENGINE_ID, blocks.remote_engine_id.as_str())?;
        map.serialize_entry(REQUEST_ID, blocks.remote_request_id.as_str())?;
        map.serialize_entry(HOST, blocks.remote_host.as_str())?;
        map.serialize_entry(PORT, &blocks.remote_port)?;
        map.serialize_entry(TP_SIZE, &blocks.tp_size)?;
        map.serialize_entry(DCP_SIZE, &blocks.dcp_size)?;
        map.serialize_entry(PP_SIZE, &blocks.pp_size)?;
        map.serialize_entry(NUM_TOKENS, &blocks.remote_num_tokens)?;
        map.serialize_entry(EXPIRY, &blocks.remote_blocks_expiry_time)?;
        if let Some(mode) = &blocks.transfer_mode {
            map.serialize_entry(TRANSFER_MODE, mode.as_str())?;
        }
        for (key, value) in &blocks.extra {
            if !KNOWN.contains(&key.as_str()) {
                map.serialize_entry(key, value)?;
            }
        }
        map.end()
    }
}

struct Groups<'a>(&'a [BlockRuns]);

impl Serialize for Groups<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.0.iter().map(Ids))
    }
}

struct Ids<'a>(&'a BlockRuns);

impl Serialize for Ids<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.0.iter().map(|id| id.0))
    }
}

/// The fields not taken yet.
struct Fields(Map<String, Value>);

impl Fields {
    /// Takes a field. Null counts as absent.
    fn take(&mut self, field: &'static str) -> Option<Value> {
        self.0.remove(field).filter(|value| !value.is_null())
    }

    /// Whether any of the fields is there and not null.
    fn any(&self, fields: &[&str]) -> bool {
        fields
            .iter()
            .any(|field| self.0.get(*field).is_some_and(|value| !value.is_null()))
    }

    fn bool(&mut self, field: &'static str) -> Result<bool, DescriptorError> {
        match self.take(field) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(other) => Err(wrong_type(field, "true or false", &other)),
        }
    }

    fn string(&mut self, field: &'static str) -> Result<Option<String>, DescriptorError> {
        match self.take(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(field, "a string", &other)),
        }
    }

    fn required_string(&mut self, field: &'static str) -> Result<String, DescriptorError> {
        self.string(field)?
            .ok_or(DescriptorError::Missing { field })
    }

    fn u64(&mut self, field: &'static str) -> Result<Option<u64>, DescriptorError> {
        let expected = "a whole number of at least 0";
        match self.take(field) {
            None => Ok(None),
            Some(Value::Number(number)) => match number.as_u64() {
                Some(value) => Ok(Some(value)),
                None => Err(DescriptorError::OutOfRange {
                    field,
                    value: number.to_string(),
                    expected,
                }),
            },
            Some(other) => Err(wrong_type(field, expected, &other)),
        }
    }

    fn port(&mut self) -> Result<NonZeroU16, DescriptorError> {
        let value = self
            .u64(PORT)?
            .ok_or(DescriptorError::Missing { field: PORT })?;
        u16::try_from(value)
            .ok()
            .and_then(NonZeroU16::new)
            .ok_or_else(|| out_of_range(PORT, value, "a port from 1 to 65535"))
    }

    /// A parallel size; one when absent, as in vLLM.
    fn size(&mut self, field: &'static str) -> Result<NonZeroU32, DescriptorError> {
        let Some(value) = self.u64(field)? else {
            return Ok(NonZeroU32::MIN);
        };
        u32::try_from(value)
            .ok()
            .and_then(NonZeroU32::new)
            .ok_or_else(|| out_of_range(field, value, "a size of at least 1"))
    }

    fn seconds(&mut self, field: &'static str) -> Result<Option<f64>, DescriptorError> {
        let expected = "a finite number of seconds";
        match self.take(field) {
            None => Ok(None),
            Some(Value::Number(number)) => match number.as_f64().filter(|s| s.is_finite()) {
                Some(seconds) => Ok(Some(seconds)),
                None => Err(DescriptorError::OutOfRange {
                    field,
                    value: number.to_string(),
                    expected,
                }),
            },
            Some(other) => Err(wrong_type(field, expected, &other)),
        }
    }

    fn transfer_mode(&mut self) -> Result<Option<TransferMode>, DescriptorError> {
        let Some(name) = self.string(TRANSFER_MODE)? else {
            return Ok(None);
        };
        if name == TransferMode::Pull.as_str() {
            return Ok(Some(TransferMode::Pull));
        }
        if name.len() > MAX_NAME_BYTES {
            return Err(NameError::TooLong {
                what: TRANSFER_MODE,
                len: name.len(),
            }
            .into());
        }
        Ok(Some(TransferMode::Other(name)))
    }
}

fn out_of_range(field: &'static str, value: u64, expected: &'static str) -> DescriptorError {
    DescriptorError::OutOfRange {
        field,
        value: value.to_string(),
        expected,
    }
}

fn wrong_type(field: &'static str, expected: &'static str, found: &Value) -> DescriptorError {
    DescriptorError::WrongType {
        field,
        expected,
        found: kind(found),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

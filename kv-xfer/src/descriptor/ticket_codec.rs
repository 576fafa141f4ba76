//! The text of a ticket: how it is sealed, carried and verified.
//!
//! URL-safe base64 without padding over (little-endian; counts as varints):
//!
//! ```text
//! version=1 | flags (bit 0: keyed) | incarnation u64 | lease id u64, slot u32, word u64
//!           | block tokens, tokens | remaining u64 ns, stamp u64 ns | fingerprint 32
//!           | block list | hashes 16 each, one per full block
//! tag 32
//! ```
//!
//! The tag is BLAKE3 over a digest of all bytes before it and over the [`Binding`]. With a cluster key
//! it is keyed, and proves that an engine of the cluster wrote the ticket for this request. Without
//! one it is a checksum: it finds damage and mix-ups, not malice. One ticket has one text, so that
//! any changed bit is found.

use std::sync::LazyLock;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::{GeneralPurposeConfig, Simd};
use thiserror::Error;

use super::key::{ClusterKey, digest};
use super::limits::DescriptorLimits;
use super::runs::BlockRuns;
use super::runs_codec::RunsError;
use super::ticket::{Binding, LeaseRef, Ticket, TicketFault, full_blocks};
use super::wire::{Input, Malformed, put_varint};
use crate::clock::MonoTime;
use crate::identity::BlockHash;
use crate::ids::{Incarnation, LeaseId, LeaseWord, WordSlot};
use crate::layout::LayoutFingerprint;

/// The version of the encoding that this build writes and reads.
pub const TICKET_VERSION: u8 = 1;

const FLAG_KEYED: u8 = 1;
const TAG_BYTES: usize = 32;
/// Bytes before the block list, with the counts at their longest.
const HEADER_BYTES: usize = 128;

/// Separate ticket tags from every other use of the cluster key and of BLAKE3.
const MAC_PURPOSE: &str = "kv-xfer 2026 ticket mac v1";
const CHECKSUM_CONTEXT: &str = "kv-xfer 2026 ticket checksum v1";

static BASE64: LazyLock<Simd> = LazyLock::new(|| {
    Simd::url_safe(
        GeneralPurposeConfig::new()
            .with_encode_padding(false)
            .with_decode_padding_mode(base64::engine::DecodePaddingMode::RequireNone)
            .with_decode_allow_trailing_bits(false),
    )
});

/// Why a ticket was refused. Recompute, whichever it is; the variant says what to repair.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TicketError {
    /// The text is longer than accepted.
    #[error("the ticket has {len} bytes of text; at most {max_bytes} are accepted")]
    TooLong {
        /// Bytes of text.
        len: usize,
        /// The most accepted.
        max_bytes: usize,
    },
    /// The text is not base64.
    #[error("the ticket is not URL-safe base64; it was damaged or rewritten on the way")]
    NotBase64,
    /// The encoding is of another version.
    #[error(
        "the ticket has version {found}, this build reads {TICKET_VERSION}; run the same release on \
         both sides"
    )]
    Version {
        /// The version found.
        found: u8,
    },
    /// A flag is set that this build does not know.
    #[error("the ticket has unknown flags {flags:#04x}; run the same release on both sides")]
    UnknownFlags {
        /// The flags.
        flags: u8,
    },
    /// The bytes end early.
    #[error("the ticket is cut short; it was damaged on the way")]
    Truncated,
    /// Bytes are left over.
    #[error("{extra} bytes too many in the ticket; it was damaged on the way")]
    Trailing {
        /// How many.
        extra: usize,
    },
    /// An integer is not in its one form.
    #[error("the ticket is not in its one form; it was damaged on the way")]
    NotCanonical,
    /// The block list is wrong.
    #[error("the ticket's block list: {0}")]
    Runs(#[from] RunsError),
    /// The contents break a rule.
    #[error("the ticket's contents: {0}")]
    Fault(#[from] TicketFault),
    /// The ticket is authenticated, but this engine has no key to check it with.
    #[error("the ticket is sealed with a cluster key and this engine has none; set the same key")]
    NoKey,
    /// This engine has a key, and the ticket is not authenticated.
    #[error(
        "the ticket is not sealed with a cluster key, as this engine demands; set the same key on its sender"
    )]
    NotAuthenticated,
    /// The tag is not that of these contents, this binding and this key.
    #[error(
        "the ticket's tag does not fit: it was damaged, or issued under another key or for another \
         engine, request, tenant or conversation"
    )]
    BadTag,
}

impl From<Malformed> for TicketError {
    fn from(malformed: Malformed) -> Self {
        match malformed {
            Malformed::Short => Self::Truncated,
            Malformed::Varint => Self::NotCanonical,
        }
    }
}

/// A ticket as it travels. Its contents can be had from [`verify`](Self::verify).
///
/// ```
/// use kv_xfer::clock::MonoTime;
/// use kv_xfer::descriptor::{Binding, BlockRuns, DescriptorLimits, LeaseRef, SealedTicket, Ticket};
/// use kv_xfer::identity::BlockHash;
/// use kv_xfer::ids::*;
/// use kv_xfer::layout::LayoutFingerprint;
/// use std::time::Duration;
///
/// let engine = EngineId::new("decode-0")?;
/// let request = RequestId::new("chatcmpl-1")?;
/// let binding = Binding { engine: &engine, request: &request, tenant: Some("acme"), conversation: None };
/// let ticket = Ticket {
///     incarnation: Incarnation(7),
///     lease: LeaseRef { id: LeaseId(1), slot: WordSlot(0), word: LeaseWord(3) },
///     runs: BlockRuns::from_ids(&[BlockId(4), BlockId(5)]),
///     block_tokens: 16,
///     tokens: 20,
///     hashes: vec![BlockHash([9; 16])],
///     remaining: Duration::from_secs(480),
///     stamp: MonoTime::from_nanos(1),
///     fingerprint: LayoutFingerprint([0; 32]),
/// };
/// let text = ticket.clone().seal(None, &binding)?.to_text();
/// let arrived = SealedTicket::parse(&text, &DescriptorLimits::default())?;
/// assert_eq!(arrived.verify(None, &binding)?, &ticket);
/// let other = Binding { tenant: Some("globex"), ..binding };
/// assert!(arrived.verify(None, &other).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SealedTicket {
    ticket: Ticket,
    keyed: bool,
    /// Everything that the text encodes: what the tag covers, and the tag.
    bytes: Vec<u8>,
}

impl Ticket {
    /// Writes the ticket down under a tag: keyed when there is a key, a checksum otherwise.
    ///
    /// # Errors
    /// [`TicketError::Fault`] when the ticket breaks a rule.
    pub fn seal(
        self,
        key: Option<&ClusterKey>,
        binding: &Binding<'_>,
    ) -> Result<SealedTicket, TicketError> {
        self.validate()?;
        let mut bytes = self.to_body(key.is_some())?;
        let tag = tag(&bytes, key, binding);
        bytes.extend_from_slice(tag.as_bytes());
        Ok(SealedTicket {
            ticket: self,
            keyed: key.is_some(),
            bytes,
        })
    }

    fn to_body(&self, keyed: bool) -> Result<Vec<u8>, TicketError> {
        let hash_bytes = self.hashes.len().saturating_mul(BlockHash::LEN);
        let widths = self.runs.widths();
        let run_bytes = widths.bytes(self.runs.runs().len());
        let mut out = Vec::with_capacity(
            HEADER_BYTES
                .saturating_add(run_bytes)
                .saturating_add(hash_bytes)
                .saturating_add(TAG_BYTES),
        );
        out.push(TICKET_VERSION);
        out.push(if keyed { FLAG_KEYED } else { 0 });
        out.extend_from_slice(&self.incarnation.0.to_le_bytes());
        out.extend_from_slice(&self.lease.id.0.to_le_bytes());
        out.extend_from_slice(&self.lease.slot.0.to_le_bytes());
        out.extend_from_slice(&self.lease.word.0.to_le_bytes());
        put_varint(&mut out, u64::from(self.block_tokens));
        put_varint(&mut out, self.tokens);
        out.extend_from_slice(&self.remaining_nanos()?.to_le_bytes());
        out.extend_from_slice(&self.stamp.as_nanos().to_le_bytes());
        out.extend_from_slice(&self.fingerprint.0);
        self.runs.encode_with(widths, &mut out);
        let start = out.len();
        out.resize(start.saturating_add(hash_bytes), 0);
        let (places, _) = out
            .get_mut(start..)
            .unwrap_or_default()
            .as_chunks_mut::<{ BlockHash::LEN }>();
        for (place, hash) in places.iter_mut().zip(&self.hashes) {
            *place = hash.0;
        }
        Ok(out)
    }

    fn from_body(body: &[u8], limits: &DescriptorLimits) -> Result<(Self, bool), TicketError> {
        let mut input = Input::new(body);
        let found = input.u8()?;
        if found != TICKET_VERSION {
            return Err(TicketError::Version { found });
        }
        let flags = input.u8()?;
        if flags & !FLAG_KEYED != 0 {
            return Err(TicketError::UnknownFlags { flags });
        }
        let incarnation = Incarnation(input.u64()?);
        let lease = LeaseRef {
            id: LeaseId(input.u64()?),
            slot: WordSlot(input.u32()?),
            word: LeaseWord(input.u64()?),
        };
        let block_tokens = u32::try_from(input.varint()?).map_err(|_| TicketError::NotCanonical)?;
        let tokens = input.varint()?;
        let remaining = Duration::from_nanos(input.u64()?);
        let stamp = MonoTime::from_nanos(input.u64()?);
        let fingerprint = LayoutFingerprint(input.array()?);
        let runs = BlockRuns::decode_from(&mut input, limits)?;
        let full = full_blocks(tokens, runs.len(), block_tokens)?;
        let hash_bytes = usize::try_from(full)
            .ok()
            .and_then(|full| full.checked_mul(BlockHash::LEN))
            .ok_or(TicketError::Truncated)?;
        let (hashes, _) = input.take(hash_bytes)?.as_chunks::<{ BlockHash::LEN }>();
        let hashes = hashes.iter().copied().map(BlockHash).collect();
        if input.remaining() != 0 {
            return Err(TicketError::Trailing {
                extra: input.remaining(),
            });
        }
        let ticket = Self {
            incarnation,
            lease,
            runs,
            block_tokens,
            tokens,
            hashes,
            remaining,
            stamp,
            fingerprint,
        };
        ticket.validate()?;
        Ok((ticket, flags & FLAG_KEYED != 0))
    }
}

impl SealedTicket {
    /// Reads a ticket's text. This checks its form and its own rules; the tag is checked by
    /// [`verify`](Self::verify).
    ///
    /// # Errors
    /// [`TicketError`] when the text is not one that [`to_text`](Self::to_text) writes.
    pub fn parse(text: &str, limits: &DescriptorLimits) -> Result<Self, TicketError> {
        if text.len() > limits.max_bytes {
            return Err(TicketError::TooLong {
                len: text.len(),
                max_bytes: limits.max_bytes,
            });
        }
        let bytes = BASE64.decode(text).map_err(|_| TicketError::NotBase64)?;
        let (body, _) = bytes
            .split_last_chunk::<TAG_BYTES>()
            .ok_or(TicketError::Truncated)?;
        let (ticket, keyed) = Ticket::from_body(body, limits)?;
        Ok(Self {
            ticket,
            keyed,
            bytes,
        })
    }

    /// The text: URL-safe base64 without padding, safe in JSON, headers and URLs.
    #[must_use]
    pub fn to_text(&self) -> String {
        BASE64.encode(&self.bytes)
    }

    /// Bytes of [`to_text`](Self::to_text).
    pub(super) fn text_len(&self) -> usize {
        base64::encoded_len(self.bytes.len(), false).unwrap_or(0)
    }

    /// Appends the text, in place.
    pub(super) fn append_text(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.resize(start.saturating_add(self.text_len()), 0);
        let place = out.get_mut(start..).unwrap_or_default();
        // There is room for all of it.
        let written = BASE64.encode_slice(&self.bytes, place).unwrap_or(0);
        out.truncate(start.saturating_add(written));
    }

    /// Checks the tag and gives the contents.
    ///
    /// # Errors
    /// [`TicketError::BadTag`] when contents, binding or key are not those it was sealed with;
    /// [`TicketError::NoKey`] and [`TicketError::NotAuthenticated`] when only one side has a key.
    pub fn verify(
        &self,
        key: Option<&ClusterKey>,
        binding: &Binding<'_>,
    ) -> Result<&Ticket, TicketError> {
        match (self.keyed, key) {
            (true, None) => return Err(TicketError::NoKey),
            (false, Some(_)) => return Err(TicketError::NotAuthenticated),
            _ => {}
        }
        let (body, found) = self
            .bytes
            .split_last_chunk::<TAG_BYTES>()
            .ok_or(TicketError::Truncated)?;
        // Comparing `blake3::Hash`es takes constant time.
        if tag(body, key, binding) != blake3::Hash::from_bytes(*found) {
            return Err(TicketError::BadTag);
        }
        Ok(&self.ticket)
    }

    /// True when the tag is keyed.
    #[must_use]
    pub fn is_keyed(&self) -> bool {
        self.keyed
    }

    /// The contents before anything has been verified: for showing, and for comparing with what
    /// travels beside them. Never read blocks on the strength of this.
    #[must_use]
    pub fn unverified(&self) -> &Ticket {
        &self.ticket
    }
}

/// The body is digested by itself, in one piece, so that BLAKE3 can use its widest vectors.
fn tag(body: &[u8], key: Option<&ClusterKey>, binding: &Binding<'_>) -> blake3::Hash {
    let body = blake3::hash(body);
    let (has_tenant, tenant) = optional(binding.tenant);
    let (has_conversation, conversation) = optional(binding.conversation);
    let parts: [&[u8]; 7] = [
        body.as_bytes(),
        binding.engine.as_str().as_bytes(),
        binding.request.as_str().as_bytes(),
        has_tenant,
        tenant,
        has_conversation,
        conversation,
    ];
    match key {
        Some(key) => blake3::Hash::from_bytes(key.tag(MAC_PURPOSE, &parts)),
        None => digest(blake3::Hasher::new_derive_key(CHECKSUM_CONTEXT), &parts),
    }
}

/// Tells an absent name from an empty one.
fn optional(name: Option<&str>) -> (&'static [u8], &[u8]) {
    match name {
        Some(name) => (&[1], name.as_bytes()),
        None => (&[0], &[]),
    }
}

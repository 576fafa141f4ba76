//! Cards, the handshake, incarnations: what engines know of each other.
//!
//! Everything here is pure: bytes in, values out; time is an argument. The sockets are in
//! [`side_channel`](crate::side_channel).
//!
//! - [`Card`]: what one rank of an engine tells its peers, and the codec of the reply that carries
//!   it ([`encode_reply`], [`decode_reply`]). The reply is the one that vLLM's NIXL connector
//!   speaks, with keys of our own that it ignores. Nothing inside is used before its checksum, its
//!   MAC (when a key is set) and its compatibility have been checked, in this order.
//! - [`CompatFactors`] and [`check_compatible`]: what two engines must have in common.
//! - [`PeerTable`]: who is known, being met, or left alone for a while.
//! - [`PeerAddr`]: where a peer listens; [`ClockOffset`]: how far apart two clocks are.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::indexing_slicing, clippy::arithmetic_side_effects)
)]

mod addr;
mod card;
mod clock_offset;
mod codec;
mod compat;
pub(crate) mod msgpack;
mod table;

pub use addr::{AddrError, MAX_HOST_BYTES, PeerAddr};
pub use card::{Card, Feature, Features, PROTOCOL_VERSION, PeerCard, VllmCard, VllmFields};
pub use clock_offset::ClockOffset;
pub use codec::{
    CardError, CardFault, CardLimits, CardPolicy, RegionIndex, decode_reply, encode_reply,
};
pub use compat::{CompatError, CompatFactors, VllmFactors, check_compatible};
pub use msgpack::Malformed;
pub use table::{
    CardOutcome, Expired, MeetNext, PeerConfig, PeerError, PeerKey, PeerState, PeerTable, Want,
};

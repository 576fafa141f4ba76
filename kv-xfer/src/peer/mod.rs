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
mod card_policy;
mod clock_offset;
mod compat;
mod decode;
mod encode;
pub(crate) mod msgpack;
mod standing;
mod table;

pub use addr::{AddrError, MAX_HOST_BYTES, PeerAddr};
pub use card::{Card, Feature, Features, PROTOCOL_VERSION, PeerCard, VllmCard, VllmFields};
pub use card_policy::{CardError, CardFault, CardLimits, CardPolicy, RegionIndex};
pub use clock_offset::ClockOffset;
pub use compat::{CompatError, CompatFactors, VllmFactors, check_compatible};
pub use decode::decode_reply;
pub use encode::encode_reply;
pub use msgpack::Malformed;
pub use standing::{
    CardOutcome, Expired, MeetNext, PeerConfig, PeerError, PeerKey, PeerState, Want,
};
pub use table::PeerTable;

//! Remote blocks: the descriptor of blocks on another engine, as it travels in `kv_transfer_params`.
//!
//! The JSON object has the fields that vLLM's connector writes and reads ([`RemoteBlocks`]). What is
//! ours rides in one more string, the [`Ticket`]: the blocks as runs, their hashes, the lease, and a
//! tag over all of it. A ticket arrives sealed ([`SealedTicket`]) and shows its contents only once
//! [`verify`](SealedTicket::verify) has checked the tag; the rest of the object was written by
//! routers and proxies, and says where to look but is not to be trusted.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::as_conversions
    )
)]

mod digits;
mod host;
mod json;
mod json_object;
mod json_text;
mod key;
mod limits;
mod remote;
mod runs;
mod runs_codec;
mod ticket;
mod ticket_codec;
mod wire;

pub use host::{Host, HostError};
pub use json::{BlockIdsJson, DescriptorError, Miss, Params, TICKET_KEY};
pub use key::{ClusterKey, KEY_FILE_VARIABLE, KEY_VARIABLE, KeyError, MIN_SECRET_BYTES};
pub use limits::DescriptorLimits;
pub use remote::{RemoteBlocks, TransferMode};
pub use runs::{BlockRun, BlockRuns, Step};
pub use runs_codec::RunsError;
pub use ticket::{Binding, LeaseRef, Ticket, TicketFault};
pub use ticket_codec::{SealedTicket, TICKET_VERSION, TicketError};

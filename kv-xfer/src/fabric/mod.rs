//! What carries the bytes: what there is, what is required, and what it turned out to be.
//!
//! NIXL chooses a transport for every peer and does not say which; where the fast one is missing it falls back to TCP
//! without a word. So:
//!
//! - [`Devices`] and [`Topology`] say what this machine has, from sysfs, and [`preflight`] what keeps it from being used;
//! - a [`Requirement`] is checked against that before anything moves ([`Surroundings::check`]), and restricts what UCX and
//!   libfabric may use ([`UcxSettings`], [`LibfabricSettings`]), so that anything else fails instead of being slow;
//! - once a peer is met, UCX's own log ([`UcxLanes`]), a read for measure and the NICs' [`Counters`] say what does carry
//!   its bytes: [`PeerFabric`].
//!
//! All that looks at the machine takes a root folder, so that it can be tested on trees of other machines.
#![forbid(unsafe_code)]

mod check;
mod counters;
mod devices;
mod pci;
mod peer;
mod plugin;
mod preflight;
mod requirement;
mod settings;
mod topology;
mod ucx_log;
mod ucx_proto;
mod verdict;

pub use check::Surroundings;
pub use counters::{Counters, Moved, NotCounted, PortBytes};
pub use devices::{Access, Devices, Gpu, RdmaDevice};
pub use pci::{BadBusId, BusId, Distance, PciPath, Place};
pub use peer::{Evidence, FabricConfig, LogWatch, PeerFabric};
pub use plugin::{Libfabric, Plugin, Unusable, libfabric_release};
pub use preflight::{Check, preflight};
pub use requirement::{Carrier, Requirement, UnknownRequirement, Unmet};
pub use settings::{
    Backend, ErrorHandling, LIBFABRIC, LibfabricSettings, UCX, UcxSettings, UnknownBackend,
};
pub use topology::{Near, Topology};
pub use ucx_log::{Lane, UcxLanes};
pub use ucx_proto::{Operation, Protocol};
pub use verdict::{Findings, Verdict};

//! The engine: driver thread, read handles, quarantine, leases.
#![forbid(unsafe_code)]

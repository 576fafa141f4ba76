//! The sockets of the handshake and of lease renewal.
#![forbid(unsafe_code)]

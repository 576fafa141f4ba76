//! Cards, the handshake, incarnations: what engines know of each other.
#![forbid(unsafe_code)]

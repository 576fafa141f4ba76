//! The descriptor of blocks that live on another engine, and its codecs.
#![forbid(unsafe_code)]

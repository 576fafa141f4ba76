//! A serving engine.

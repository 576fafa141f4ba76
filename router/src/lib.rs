//! A router.

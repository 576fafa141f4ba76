//! Nothing by itself: `tests/` model-checks files of the library.
#![forbid(unsafe_code)]

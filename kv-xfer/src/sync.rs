//! What model-checked code shares memory through. The tests of the models give those files another
//! `crate::sync`, of the model checker's own types, so that what is checked is what runs.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

pub(crate) use parking_lot::{Condvar, Mutex};

//! Read or recompute.
//!
//! A pure function of what is known when a request arrives: how much of its prompt lies on another
//! engine, how much of that is provably the same tokens, how much is here already, and how long the
//! blocks will be kept. Every answer carries its reason and its numbers, and says what becomes of
//! the lease.
#![forbid(unsafe_code)]

mod cost;
mod decision;

pub use cost::{COST_SAMPLES_NEEDED, CostModel, MAX_EFFECTIVE_THRESHOLD, ReadShape};
pub use decision::{
    Action, DEFAULT_LEASE_MARGIN, DEFAULT_THRESHOLD, Decision, DecisionInput, LeaseAction, Reason,
    decide, decide_with,
};

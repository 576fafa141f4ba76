//! `kvx bench` and `kvx target`: what a read costs, measured side by side with what others make of
//! the same read.

pub mod bare;
pub mod cli;
pub mod fixture;
pub mod here;
pub mod holders;
pub mod latency;
pub mod lease_trial;
pub mod load;
pub mod pair;
pub mod pattern;
pub mod plot;
pub mod probe;
pub mod proto;
pub mod report;
pub mod row;
pub mod rows;
pub mod scale;
pub mod stats;

//! `kvx bench` and `kvx target`: what a read costs, measured side by side with what others make of
//! the same read.

pub mod pattern;
pub mod proto;
pub mod row;
pub mod worker;

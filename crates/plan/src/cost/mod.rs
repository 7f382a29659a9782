//! What a group costs.

pub mod traffic;
pub mod units;

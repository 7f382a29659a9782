//! The row skeleton is generated (`cuda/row`, `cpu`); what is written by hand is the way there.

pub mod ladder;

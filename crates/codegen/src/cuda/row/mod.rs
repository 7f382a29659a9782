//! Row work as CUDA text: a body, spread over threads by a config.
//!
//! - Reads every argument once and writes every result once, unless a row is so long that it is read again.
//! - Sums are of `f32`, in an order that depends on the config alone: the same bits on every run.
//! - Rows, strides and addresses are words of the parameter; columns, dtypes and alignments are compiled in.

pub(crate) mod config;
pub(crate) mod emit;
pub(crate) mod facts;
pub(crate) mod following;
pub(crate) mod layout;
pub(crate) mod passes;
pub(crate) mod sides;
pub(crate) mod words;

//! Hand-written kernels, a folder a family.

pub mod row;

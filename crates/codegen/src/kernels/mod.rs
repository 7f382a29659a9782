//! Hand-written kernels, a folder a family.

pub mod matmul;
pub mod row;

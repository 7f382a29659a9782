//! Hand-written kernels, a folder a family.

pub mod attention;
pub mod ladder;
pub mod matmul;

//! Hand-written kernels, a folder a family.

pub mod attention;
pub mod matmul;
pub mod row;

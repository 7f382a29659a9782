//! Matmuls on CUDA: few rows by kernels of ours, many rows by a library with a plain kernel beside it.

pub(crate) mod plain;
pub mod skinny;

//! Matmuls on CUDA: few rows by kernels of ours, many rows by a library with a plain kernel beside it.

pub mod plain;
pub mod skinny;

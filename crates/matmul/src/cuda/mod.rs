//! Matmuls on CUDA: few rows, and 16-bit operands on Hopper's matrix units, by kernels of ours; others by a library with a plain kernel
//! beside it.

pub mod cross_entropy;
pub mod hopper;
pub mod plain;
mod sides;
pub mod skinny;
pub mod variant;

//! Matmuls on CUDA: few rows, 16-bit operands on Hopper's matrix units, and what a library does slower or not at all on the matrix units of
//! a warp, by kernels of ours; others by the library with a plain kernel beside it.

pub mod cross_entropy;
pub mod hopper;
pub mod mma;
pub mod mma_routed;
mod mma_time;
pub mod plain;
pub mod realigned;
mod route;
pub mod routed;
mod sides;
pub mod skinny;
pub mod strips;
pub mod variant;

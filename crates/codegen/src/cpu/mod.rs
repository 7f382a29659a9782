//! Row kernels on the CPU: the tile program, how a body becomes one, and the SIMD that runs it.

pub mod emit;
mod listing;
pub mod program;
#[allow(unsafe_code)]
pub mod simd;

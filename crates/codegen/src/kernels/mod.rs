//! Kernel families, one folder each: contract, CUDA, CPU and tests together.

pub mod append;
pub mod attention;
pub mod copy;
pub mod ladder;
pub mod matmul;
pub mod row;
pub mod scatter;

//! Row kernels: elementwise work, row reductions and column sums over one space of rows and columns, generated from a body.

#[allow(unsafe_code)]
pub mod cpu;
pub mod cuda;

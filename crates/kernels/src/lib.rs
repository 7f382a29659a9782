//! Kernel families, and the choice of the family that makes the kernel of a group.
//!
//! [`render`] tries the families of a target in order, and the first one that accepts a group makes its kernel. A planner gets the cost of that
//! kernel from the same families, through [`CpuCatalog`] and [`CudaCatalog`]. Families of row work, copies, appends and scatters are here, one folder each: contract, CUDA,
//! CPU and tests together. Matmuls and attention are crates of their own. Only the `cpu` modules contain `unsafe`.
#![deny(unsafe_code)]

pub mod append;
pub mod catalog;
pub mod copy;
pub mod ladder;
pub mod row;
pub mod scatter;

pub use append::AppendShape;
pub use catalog::{
    Backend, CpuCatalog, CudaCatalog, NoKernel, TaggedLine, candidates, render, render_copy, render_joined,
    tagged_source,
};
pub use copy::Piece;

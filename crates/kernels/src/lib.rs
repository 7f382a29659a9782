//! Kernel families, and which of them makes the kernel of a group.
//!
//! [`render`] asks the families of a target, in order, for the kernel of a group; a planner asks the same families through [`CpuCatalog`]
//! and [`CudaCatalog`] what the kernel would cost. Families of row work, copies, appends and scatters are here, one folder each: contract, CUDA,
//! CPU and tests together. Matmuls and attention are crates of their own. `unsafe` is in the `cpu` modules alone.
#![deny(unsafe_code)]

pub mod append;
pub mod catalog;
pub mod copy;
pub mod ladder;
pub mod row;
pub mod scatter;

pub use append::AppendShape;
pub use catalog::{
    Backend, CpuCatalog, CudaCatalog, NoKernel, TaggedLine, candidates, render, render_copy, tagged_source,
};
pub use copy::Piece;

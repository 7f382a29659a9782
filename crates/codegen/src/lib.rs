//! Kernels: a group of nodes becomes a source to compile and a launch to run.
//!
//! [`render`] asks the kernel families of a target, in order, for the kernel of a group. Row work is lowered to a [`Body`]
//! (what is compiled: columns, dtypes, arithmetic), which every family can take as a prologue or an epilogue. What comes out, a
//! [`Kernel`], is plain data: a device needs to know nothing of what it computes. Nothing here calls a driver.
//! `unsafe` is in `cpu/simd`, `cpu/task.rs` and the `cpu` modules of `kernels` alone.
#![deny(unsafe_code)]

pub mod argument;
pub mod body;
pub mod catalog;
mod compound;
pub mod cpu;
pub mod cuda;
pub mod kernel;
pub mod kernels;
pub mod library;
mod linear;
pub mod lower;
pub mod tile;

pub use argument::{ArgBinding, Argument, Lookup};
pub use body::{Access, ArgSpec, Body, Expr, ExprId, Stage};
pub use catalog::{
    Backend, CpuCatalog, CudaCatalog, NoKernel, TaggedLine, candidates, render, render_copy, tagged_source,
};
pub use kernel::{Execution, InPlace, Kernel, Launch, Request, Source, Variant};
pub use kernels::append::AppendShape;
pub use kernels::attention::backward::BackwardOperand;
pub use kernels::attention::block::AttentionBlock;
pub use kernels::attention::kernel::{
    AttentionKernel, AttentionMask, AttentionOperand, AttentionResult, AttentionShape, HeadStrides,
};
pub use kernels::attention::rows::AttentionRows;
pub use kernels::copy::Piece;
pub use kernels::matmul::kernel::{Epilogue, Matmul, Prologue, Role, RowArguments};
pub use kernels::matmul::shape::MatmulShape;
pub use library::{LibraryCall, LibraryEpilogue, LibraryLaunch, LibraryMatmul, Operand};

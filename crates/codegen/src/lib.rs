//! The kernel text: a group of nodes becomes a body, a body becomes a source.
//!
//! `lower` turns a group into a [`Body`] (what is compiled: columns, dtypes, arithmetic) and a [`Launch`] (what is known
//! at run time: rows, strides, which buffers). `render` makes the [`Source`] for a target. Nothing here calls a driver.
//! `unsafe` is in `cpu/simd` and in the `cpu` folders of `kernels` alone.
#![deny(unsafe_code)]

pub mod attention;
pub mod body;
mod compound;
pub mod cpu;
pub mod cuda;
pub mod epilogue;
pub mod kernels;
mod linear;
mod lower;
pub mod product;
pub mod source;
pub mod tile;

pub use attention::block::AttentionBlock;
pub use attention::rows::AttentionRows;
pub use attention::{
    AttentionKernel, AttentionMask, AttentionOperand, AttentionResult, AttentionShape, BackwardOperand, HeadStrides,
};
pub use body::{Access, ArgSpec, Body, Expr, ExprId, Stage};
pub use epilogue::{Epilogue, Operand};
pub use lower::lower;
pub use product::{Head, Product, Role, RowArguments, Tail};
pub use source::{
    AppendShape, ArgBinding, Backend, Geometry, Launch, Lowered, MatmulKernel, MatmulShape, Piece, Source, TaggedLine,
    render, tagged_source,
};

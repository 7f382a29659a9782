//! What a kernel is, and what kernels are made of.
//!
//! A kernel family takes a group of nodes and returns a [`Kernel`]: plain data, a source to compile and a launch to run, so that a device
//! needs to know nothing of what it computes. Row work is lowered to a [`Body`] (columns, dtypes, arithmetic), from which programs of
//! the CPU and CUDA text are generated, and which every family can take as a prologue or an epilogue. The families are in the crates above
//! this one. Nothing here calls a driver.
//! `unsafe` is in `cpu/simd`, `cpu/task.rs` and `cpu/family.rs` alone.
#![deny(unsafe_code)]

pub mod argument;
pub mod body;
mod compound;
pub mod cpu;
pub mod cuda;
pub mod kernel;
pub mod library;
pub mod linear;
pub mod lower;
pub mod matmul_shape;
pub mod rows;
pub mod tile;

pub use argument::{ArgBinding, Argument, Lookup, saturating_elements, strided_reach};
pub use body::{Access, ArgSpec, Body, Expr, ExprId, Stage};
pub use kernel::{Execution, Family, InPlace, Kernel, Launch, Offer, Request, Source, Variant};
pub use library::{LibraryCall, LibraryEpilogue, LibraryLaunch, LibraryMatmul, Operand};
pub use matmul_shape::MatmulShape;

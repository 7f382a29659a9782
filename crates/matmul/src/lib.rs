//! Matrix products with work on either side: `C = finish(prologue(A) B)`.
//!
//! - Shapes: `A: [m, k]`, `B: [k, n]` (one or two of them), sums of `[m, n]`. Any strides, any of f32, f16, bf16, i8.
//! - A may be filled by the caller (a norm or an activation on load). Accumulators are passed to the caller in blocks that are
//!   still in the cache; only what the caller stores reaches memory.
//! - Traffic: a part of the result reads its rows of A and its columns of B once.
//!
//! `unsafe` is only in `cpu`.
#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod cpu;
pub mod cuda;
pub mod fit;
pub mod kernel;
pub mod library;
mod routed;

pub use kernel::{Epilogue, Matmul, Prologue, Role};

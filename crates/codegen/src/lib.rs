//! Kernels as plain data, and the parts from which they are generated.
//!
//! A kernel family takes a group of nodes and returns a [`Kernel`]: plain data, a source to compile and a launch to run, so that a device
//! does not have to know what it computes. Row work is lowered to a [`Body`] (columns, dtypes, arithmetic), from which programs of
//! the CPU and CUDA text are generated, and which every family can take as a prologue or an epilogue. The families are in crates that depend on
//! this one. Nothing here calls a driver.
//!
//! ```
//! use deuteron_codegen::Source;
//! use deuteron_codegen::cpu::emit::emit;
//! use deuteron_codegen::cuda::row::variant::RowVariant;
//! use deuteron_codegen::cuda::{Arch, CudaTarget};
//! use deuteron_codegen::lower::lower_rows;
//! use deuteron_graph::Graph;
//! use deuteron_plan::{Machine, Strategy, Target, plan};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let graph: Graph = "x = input f32[1024,768] ; w = weight f32[768] ; b = weight f32[768]
//!                     n = layer_norm x w b ; y = gelu n ; out y".parse()?;
//! let h200 = Machine::profile("h200")?;
//! let plan = plan(&graph, Target::conceivable(&h200), Strategy::Fused, &[])?;
//! let lowered = lower_rows(&plan.groups[0].draft(&graph, &plan.placement), &[]);
//!
//! // For a CPU: three passes over the row. Sum; centre and sum squares; scale, shift, GELU, store.
//! assert_eq!(emit(&lowered.body).passes.len(), 3);
//! // For a GPU: CUDA text and one launch.
//! let target = CudaTarget::new(Arch::Sm90a, 132);
//! let kernel = RowVariant::new(lowered, &target).kernel(&target);
//! assert!(matches!(&kernel.source, Source::Cuda(source) if source.text.contains("__global__")));
//! # Ok(())
//! # }
//! ```
//!
//! Only `cpu/simd`, `cpu/task.rs` and `cpu/family.rs` contain `unsafe`.
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

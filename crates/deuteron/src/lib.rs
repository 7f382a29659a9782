//! Kernel fusion for transformers.
//!
//! ```
//! use deuteron::{Dtype, Engine, Gelu, Graph, Session, Strategy, Tensor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut graph = Graph::new("layer_norm_gelu");
//! let x = graph.input("x", Dtype::F32, [4, 8])?;
//! let w = graph.weight("w", Dtype::F32, [8])?;
//! let b = graph.weight("b", Dtype::F32, [8])?;
//! let normed = graph.layer_norm(x, w, b, 1e-5)?;
//! let y = graph.gelu(normed.y, Gelu::Tanh)?;
//! graph.output("y", y)?;
//!
//! let engine = Engine::cpu();
//! let mut session = Session::new(&engine, &graph, Strategy::Fused)?;
//! assert_eq!(session.plan().groups.len(), 1); // both ops in one kernel
//! let inputs = [Tensor::filled(Dtype::F32, [4, 8], 2.0)?, Tensor::filled(Dtype::F32, [8], 1.0)?,
//!               Tensor::filled(Dtype::F32, [8], 0.5)?];
//! session.run(&[&inputs[0], &inputs[1], &inputs[2]])?;
//! assert_eq!(session.output(0)?.shape(), &deuteron::Shape::from([4, 8]));
//! # Ok(())
//! # }
//! ```
//!
//! A [`Graph`] is planned ([`Plan`]), each group of the plan is lowered and rendered to a source, a device compiles and loads the
//! sources, and a [`Session`] runs them. Ready-made fused operations are in [`ops`].
#![forbid(unsafe_code)]

pub mod analyze;
pub mod bench;
pub mod calibrate;
pub mod catalog;
pub mod check;
pub mod cuda;
pub mod doctor;
pub mod emulate;
mod engine;
mod error;
pub mod fuse;
pub mod listing;
pub mod ops;
mod parallel;
pub mod presets;
pub mod profile;
pub mod seed;
mod session;
mod tensor;
pub mod times;
pub mod training;
pub mod tune;
pub mod verify;

pub use catalog::{Attributes, ExpertSizes, FusedOp, Heads, Norm, Reduction, Sizes};
pub use deuteron_codegen::cpu::simd::Isa;
pub use deuteron_device::{
    BorrowedMemory, CompiledKernel, Cpu, Device, DeviceError, Launching, MemoryStats, Recorded, Span,
};
/// Threads of the CPU device: their number and their origin.
pub mod threads {
    pub use deuteron_device::cpu::openmp::Runtime;
    pub use deuteron_device::cpu::{Pool, Sharing};
}
pub use deuteron_graph::*;
pub use deuteron_kernels::{Backend, ladder, render};
pub use deuteron_onnx as onnx;
pub use deuteron_plan::{
    Basis, Bytes, Chain, Cost, Group, GroupKind, Layout, Link, Machine, MachineError, MachineKind, PAGES, Page, Pin,
    Plan, PlanError, Quantity, Reason, Refusal, Saving, Scoring, ScoringError, Search, Seconds, Strategy, Structure,
    Target, Traffic, page, plan, plan_pinned,
};
pub use deuteron_reference as reference;
pub use deuteron_report as report;
pub use engine::Engine;
pub use error::{Error, UpdateProblem};
pub use session::{Session, SessionOptions};
pub use tensor::Tensor;

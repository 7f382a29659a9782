//! The description of a computation: the graph, its builder, its text form, its gradients.
//!
//! A [`Graph`] is a list of primitives ([`Op`]) in static single assignment, grouped into calls as the user wrote them.
//! It knows no device. The same calls give the same graph.
#![forbid(unsafe_code)]

mod activation;
mod block;
mod build;
mod call;
mod composite;
mod dtype;
mod error;
mod expand;
mod extract;
mod gradient;
mod graph;
mod infer;
pub mod memory;
mod named;
mod node;
mod op;
mod optimizer;
mod recompute;
mod shape;
mod text;
mod verify;

pub use activation::{Activation, Gelu};
pub use block::Block;
pub use build::{CrossEntropyResult, LayerNormResult, OpaqueCost, Quantized, RmsNormResult, ScoreOptions};
pub use composite::{Composite, CompositeKind, Mask, ScoreWork};
pub use dtype::{Dtype, UnknownDtype, round_to_odd};
pub use error::{GraphError, Operand};
pub use extract::extract;
pub use gradient::{Differentiated, differentiate};
pub use graph::{Call, Callee, Graph, Output, is_name};
pub use node::{CallId, Node, NodeId};
pub use op::{BinaryOp, CompareOp, InputKind, Op, Opaque, ReduceOp, UnaryOp, View, keep_threshold};
pub use optimizer::{Optimizer, StepScalars, UpdatedWeight, WeightUpdate};
pub use recompute::{Recomputed, attention_interior, first_backward, is_recomputed, recompute};
pub use shape::{MAX_RANK, Shape};

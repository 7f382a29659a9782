//! Errors of planning.

use deuteron_graph::{GraphError, Shape};

/// An error of planning.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// The graph is malformed.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// Nothing to compute.
    #[error("the graph has no outputs; declare one with `out NAME`")]
    NoOutputs,
    /// An unknown strategy.
    #[error("unknown plan `{0}`; expected naive, eager, unfused, greedy or fused")]
    UnknownStrategy(String),
    /// An input that row kernels cannot read.
    #[error(
        "input `{name}`: expected shape {shape} with a last axis of stride 1 (or 0, to repeat), contiguous if it is scattered \
             into a table, got shape {got} with strides {strides:?}; copy it to a contiguous tensor first"
    )]
    InputLayout {
        /// its name
        name: String,
        /// its shape in the graph
        shape: Shape,
        /// the shape given
        got: Shape,
        /// the strides given
        strides: Vec<usize>,
    },
    /// A fusion that cannot be forced or forbidden.
    #[error("cannot {verb} {what}: {why}")]
    Pin {
        /// `force`, `forbid`, or `combine` where several pins contradict each other
        verb: &'static str,
        /// the operations
        what: String,
        /// the reason, with its code
        why: String,
    },
    /// The wrong number of input layouts.
    #[error("expected {expected} input layouts, got {got}")]
    InputLayouts {
        /// inputs of the graph
        expected: usize,
        /// layouts given
        got: usize,
    },
}

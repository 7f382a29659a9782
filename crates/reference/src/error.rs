//! Errors of the interpreter.

use deuteron_graph::Shape;
use deuteron_graph::memory::OutOfMemory;

/// Invalid inputs of the interpreter.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ReferenceError {
    /// Too few or too many inputs.
    #[error("expected {expected} inputs, got {got}")]
    InputCount {
        /// inputs of the graph
        expected: usize,
        /// arrays given
        got: usize,
    },
    /// An input of another shape.
    #[error("input `{name}`: expected shape {expected}, got {got}")]
    InputShape {
        /// the input
        name: String,
        /// its shape in the graph
        expected: Shape,
        /// the array's shape
        got: Shape,
    },
    /// An array whose values do not fill its shape.
    #[error("input `{name}`: expected {expected} values, got {got}")]
    InputLength {
        /// the input
        name: String,
        /// elements of its shape
        expected: usize,
        /// values in the array
        got: usize,
    },
    /// Values that the memory at hand does not hold.
    #[error("the f64 reference needs about {bytes} bytes, which could not be reserved; use smaller sizes")]
    OutOfMemory {
        /// how much
        bytes: usize,
    },
    /// An opaque operation.
    #[error("`{name}` is opaque: it can be analysed, not run; replace it by operations the graph knows")]
    Opaque {
        /// the operation
        name: String,
    },
    /// A row that a table does not have, or a place where appended rows do not fit.
    #[error("{op} at node %{node}: index {index} is not in a table of {rows} rows")]
    IndexRange {
        /// gather, scatter_add or append
        op: &'static str,
        /// the node
        node: usize,
        /// the index
        index: f64,
        /// rows of the table, or places where the rows fit
        rows: usize,
    },
}

impl From<OutOfMemory> for ReferenceError {
    fn from(OutOfMemory { bytes }: OutOfMemory) -> ReferenceError {
        ReferenceError::OutOfMemory { bytes }
    }
}

//! Errors of building and reading graphs.

use crate::dtype::Dtype;
use crate::shape::Shape;

/// An operand as a message shows it: name, dtype and shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operand {
    /// the value's name, or `%n`
    pub name: String,
    /// its dtype
    pub dtype: Dtype,
    /// its shape
    pub shape: Shape,
}

impl std::fmt::Display for Operand {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}{}", self.name, self.dtype, self.shape)
    }
}

/// Why a call on the builder, or a line of text, was refused. The graph is unchanged after an error.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GraphError {
    /// Incompatible shapes or dtypes.
    #[error("{op}: expected {expected}, got {}", list(.operands))]
    Operands {
        /// the operation
        op: String,
        /// what the operation expects
        expected: String,
        /// what it was given
        operands: Vec<Operand>,
    },
    /// An attribute outside its range.
    #[error("{op}: {attribute} must be {expected}, got {got}")]
    Attribute {
        /// the operation
        op: String,
        /// the attribute
        attribute: &'static str,
        /// its range
        expected: String,
        /// what was given
        got: String,
    },
    /// A shape whose elements cannot be counted.
    #[error("{op}: a tensor of shape {shape} is too large; at most 2^48 elements and rank 8 are allowed")]
    TooLarge {
        /// the operation
        op: String,
        /// the shape
        shape: Shape,
    },
    /// A handle that belongs to another graph.
    #[error("{op}: node %{node} is not in this graph of {nodes} nodes")]
    UnknownNode {
        /// the operation
        op: String,
        /// the handle's index
        node: usize,
        /// how many nodes there are
        nodes: usize,
    },
    /// A duplicate name.
    #[error("the name `{0}` is taken; give each input and output a name of its own")]
    DuplicateName(String),
    /// A name the text form could not read back.
    #[error(
        "`{0}` is not a name; use letters, digits, `_`, `.`, `-` or `/`, begin with a letter or `_`, and take no word \
             of the text form (a dtype, `inf`, `transposed`, ..)"
    )]
    BadName(String),
    /// No gradient exists.
    #[error("no gradient with respect to {operand}: {why}")]
    NoGradient {
        /// the node
        operand: Operand,
        /// the reason
        why: &'static str,
    },
    /// The text form is malformed.
    #[error("line {line}, column {column}: {message}")]
    Parse {
        /// from 1
        line: usize,
        /// from 1
        column: usize,
        /// what was expected and what was found
        message: String,
    },
    /// A graph that breaks an invariant.
    #[error("malformed graph at node %{node}: {problem}")]
    Malformed {
        /// the node's index
        node: usize,
        /// the broken invariant
        problem: String,
    },
}

fn list(operands: &[Operand]) -> String {
    let all: Vec<String> = operands.iter().map(Operand::to_string).collect();
    if all.is_empty() { "no operands".into() } else { all.join(", ") }
}

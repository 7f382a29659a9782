//! The catalogue's entry of an op.

use deuteron_graph::{Activation, Gelu, Graph, GraphError, InputKind, Mask, NodeId, ScoreWork};

use super::sizes::TypeOf;
use super::words::Attribute;
use super::{Attributes, EPS, FusedOp, Norm, Reduction};

/// A fused op: everything that is known about it.
pub(crate) struct Entry {
    pub name: &'static str,
    /// its formula, as text
    pub formula: &'static str,
    /// its attributes, in the order in which they are shown
    pub attributes: &'static [Attribute],
    /// their usual values
    pub usual: Attributes,
    pub operands: &'static [Operand],
    /// names of its results
    pub outputs: Outputs,
    pub build: fn(&mut Builder<'_>) -> Made,
    pub backward: Backward,
    /// consists of row kernels, except for matmuls of scores
    pub is_rows: bool,
    /// attention, or begins with it
    pub attends: bool,
    /// its result is square
    pub is_square: bool,
}

/// Attributes of most ops.
pub(super) const USUAL: Attributes = Attributes {
    act: Some(Activation::GeluTanh),
    gelu: Gelu::Tanh,
    norm: Norm::Layer,
    eps: EPS,
    p: 0.1,
    mask: Mask::Causal,
    scale: None,
    scores: ScoreWork::NONE,
    group: 1,
    packed: false,
    residual: false,
    single: false,
    requantize: true,
    weighted: false,
    reduction: Reduction::Mean,
    smoothing: 0.0,
    ignored: None,
};

type Outputs = fn(&Attributes) -> &'static [&'static str];

/// The gradient of an op.
pub(crate) enum Backward {
    /// it has none
    None,
    /// as differentiation gives it
    Derived,
}

/// An operand of an op.
pub(crate) struct Operand {
    pub name: &'static str,
    pub kind: InputKind,
    /// its type, as `bench` and `fuse` have it
    pub of: TypeOf,
    /// whether there is one
    pub when: fn(&Attributes) -> bool,
    /// the weight of a linear layer, which is read in place if it is stored as `[out, in]`
    pub transposes: bool,
}

pub(super) const fn data(name: &'static str, of: TypeOf) -> Operand {
    Operand { name, kind: InputKind::Data, of, when: |_| true, transposes: false }
}

pub(super) const fn weight(name: &'static str, of: TypeOf) -> Operand {
    Operand { kind: InputKind::Weight, ..data(name, of) }
}

pub(super) const fn linear_weight(name: &'static str, of: TypeOf) -> Operand {
    Operand { transposes: true, ..weight(name, of) }
}

impl Operand {
    pub(super) const fn when(self, when: fn(&Attributes) -> bool) -> Operand {
        Operand { when, ..self }
    }
}

/// An op of rows with a gradient that returns `y`.
pub(super) const fn rows(
    name: &'static str,
    formula: &'static str,
    attributes: &'static [Attribute],
    operands: &'static [Operand],
    build: fn(&mut Builder<'_>) -> Made,
) -> Entry {
    let (usual, outputs, backward): (_, Outputs, _) = (USUAL, |_| &["y"], Backward::Derived);
    let (is_rows, attends, is_square) = (true, false, false);
    Entry { name, formula, attributes, usual, operands, outputs, build, backward, is_rows, attends, is_square }
}

/// An op around matmuls, likewise.
pub(super) const fn matmul(
    name: &'static str,
    formula: &'static str,
    attributes: &'static [Attribute],
    operands: &'static [Operand],
    build: fn(&mut Builder<'_>) -> Made,
) -> Entry {
    Entry { is_rows: false, ..rows(name, formula, attributes, operands, build) }
}

impl Entry {
    /// Returns other values than `y`.
    pub(super) const fn returns(self, outputs: Outputs) -> Entry {
        Entry { outputs, ..self }
    }

    /// The op with its usual attributes.
    pub fn usual(&'static self) -> FusedOp {
        FusedOp { entry: self, attributes: self.usual }
    }

    /// The op with some attributes changed.
    pub fn with(&'static self, change: impl FnOnce(&mut Attributes)) -> FusedOp {
        self.usual().with(change)
    }
}

/// An op that is being built.
pub(crate) struct Builder<'a> {
    pub g: &'a mut Graph,
    /// its operands, in order
    pub v: &'a [NodeId],
    pub a: Attributes,
    /// weights stored as `[out, in]`
    pub transposed: &'a [NodeId],
}

/// The result of a builder.
#[derive(Default)]
pub(crate) struct Built {
    /// values to return
    pub outputs: Vec<(&'static str, NodeId)>,
    /// statistics that the backward pass reads
    pub saved: Vec<(&'static str, NodeId)>,
    /// returned values that the backward pass reads, since recomputing them would repeat attention
    pub taken: Vec<NodeId>,
}

pub(super) type Made = Result<Built, GraphError>;

/// One result.
pub(super) fn y(node: NodeId) -> Made {
    Ok(Built { outputs: vec![("y", node)], ..Built::default() })
}

/// Defines entries, and the list of them in the order of `deuteron ops`.
macro_rules! entries {
    ($list:ident: $($entry:ident = $value:expr;)*) => {
        $(pub(crate) static $entry: &Entry = &$value;)*

        pub(crate) static $list: &[&Entry] = &[$($entry),*];
    };
}

pub(super) use entries;

//! Types of operands, as `bench` and `fuse` have them.

use deuteron_graph::{Dtype, Mask, Shape};

use super::Attributes;

/// An operand's type.
pub type OperandType = (Dtype, Shape);

/// An operand's type for some sizes.
pub(super) type TypeOf = fn(&Sizes, &Attributes) -> OperandType;

/// How the rows and columns of an attention op are divided into sequences and heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// maximum positions per sequence: the rows are divided into sequences
    pub positions: usize,
    /// features per head: the columns are divided into heads if they divide evenly, otherwise there is one head
    pub width: usize,
}

impl Default for Heads {
    /// Those of GPT-2.
    fn default() -> Heads {
        Heads { positions: 1024, width: 64 }
    }
}

/// Experts that rows are routed to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertSizes {
    /// how many
    pub count: usize,
    /// columns of each expert's result; by default those of the main operand
    pub columns: Option<usize>,
    /// experts of each row, where their results are weighted
    pub choices: usize,
}

impl Default for ExpertSizes {
    fn default() -> ExpertSizes {
        ExpertSizes { count: 8, columns: None, choices: 2 }
    }
}

/// The sizes that determine the operands' types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// rows of the main operand
    pub rows: usize,
    /// columns of the main operand
    pub cols: usize,
    /// storage type
    pub dtype: Dtype,
    /// of an op that attends
    pub heads: Heads,
    /// tokens of an embedding
    pub tokens: usize,
    /// positions of an embedding
    pub positions: usize,
    /// classes of a loss
    pub classes: usize,
    /// of an op that routes rows
    pub experts: ExpertSizes,
}

impl Sizes {
    /// Those of GPT-2 for some rows and columns.
    pub fn new(rows: usize, cols: usize, dtype: Dtype) -> Sizes {
        // GPT-2's tokens for a sequence of its length; for more rows fewer, so that the work stays.
        let classes = (50257 * 1024 / rows.max(1024)).max(512);
        let (heads, positions) = (Heads::default(), rows.max(1024));
        let experts = ExpertSizes::default();
        Sizes { rows, cols, dtype, heads, tokens: 50257, positions, classes, experts }
    }

    pub(super) fn of<const N: usize>(&self, shape: [usize; N]) -> OperandType {
        (self.dtype, Shape::from(shape))
    }

    /// Experts, and columns of each.
    pub(super) fn expert_columns(&self) -> [usize; 2] {
        [self.experts.count, self.experts.columns.unwrap_or(self.cols)]
    }

    /// Sequences, heads, positions of a sequence, features of a head.
    pub(super) fn attention(&self) -> [usize; 4] {
        let sequence = self.rows.clamp(1, self.heads.positions.max(1));
        let width = self.heads.width.max(1);
        let heads = if self.cols.is_multiple_of(width) { (self.cols / width).max(1) } else { 1 };
        [self.rows.div_ceil(sequence), heads, sequence, self.cols / heads]
    }
}

pub(super) fn full(s: &Sizes, _: &Attributes) -> OperandType {
    s.of([s.rows, s.cols])
}

/// A number for each column.
pub(super) fn vector(s: &Sizes, _: &Attributes) -> OperandType {
    s.of([s.cols])
}

pub(super) fn seed(_: &Sizes, _: &Attributes) -> OperandType {
    (Dtype::I32, Shape::scalar())
}

/// An index for each row.
pub(super) fn indices(s: &Sizes, _: &Attributes) -> OperandType {
    (Dtype::I32, Shape::from([s.rows]))
}

/// An expert for each row, or several.
pub(super) fn chosen(s: &Sizes, a: &Attributes) -> OperandType {
    if a.weighted { (Dtype::I32, Shape::from([s.rows, s.experts.choices])) } else { indices(s, a) }
}

/// Scores, square where a causal mask applies.
pub(super) fn scores(s: &Sizes, a: &Attributes) -> OperandType {
    let side = s.cols.max(1);
    match a.mask == Mask::Causal && s.rows.is_multiple_of(side) {
        true => s.of([s.rows / side, s.cols, s.cols]),
        false => s.of([s.rows, s.cols]),
    }
}

/// Twelve heads of 64 features, as many queries as keys: `rows` counts heads times queries.
pub(super) fn scored_heads(s: &Sizes, _: &Attributes) -> OperandType {
    s.of([s.rows.div_ceil(s.cols.max(1)).max(1), s.cols, 64])
}

/// A weight that keeps the width, or a mask of all columns.
pub(super) fn square(s: &Sizes, _: &Attributes) -> OperandType {
    s.of([s.cols, s.cols])
}

pub(super) fn widening(s: &Sizes, _: &Attributes) -> OperandType {
    s.of([s.cols, 4 * s.cols])
}

pub(super) fn wide_vector(s: &Sizes, _: &Attributes) -> OperandType {
    s.of([4 * s.cols])
}

pub(super) fn keys(s: &Sizes, a: &Attributes) -> OperandType {
    let [batch, heads, sequence, width] = s.attention();
    s.of([batch, heads.div_ceil(a.group.max(1)), sequence, width])
}

//! The tile program: the form of a row kernel on the CPU.
//!
//! A program processes one row at a time. A row is divided into strips of at most [`STRIP`] columns; within a pass every
//! instruction of `strip` is a SIMD loop over one strip, then the next strip follows. Values that a later pass needs are
//! `Kept` (a whole row of scratch) or read again from their argument. Reductions gather over all strips of a pass and
//! are finished, into a scalar, when the pass ends. Lanes are 32 bits wide: `f32`, or `i32` for indices; a truth value
//! is the `f32` 1 or 0.
//!
//! A *flat* program has no row structure (every argument is contiguous or a scalar): the executor hands it any range of
//! elements as one row.

use deuteron_graph::{BinaryOp, CompareOp, UnaryOp};

pub use crate::body::{Access, ArgSpec, IntegerOp};

/// Columns of one strip: 4 KiB of `f32`, so that a dozen tiles stay in a 48 KiB L1.
pub const STRIP: usize = 1024;

/// Lanes that a reduction accumulates in, on every instruction set: column `c` goes to lane `c % LANES`, and the lanes
/// are combined in one fixed tree. So a sum has the same order for any vector width.
pub const LANES: usize = 64;

/// A row kernel for the CPU.
#[derive(Debug, Clone, PartialEq)]
pub struct TileProgram {
    /// Columns of the space. 0 for a flat program, whose length is known at launch.
    pub cols: usize,
    /// Reads and writes no row structure; see the module's text.
    pub flat: bool,
    /// What it reads and writes, in the order of the launch's arguments.
    pub args: Vec<ArgSpec>,
    /// Strip-sized temporaries.
    pub tiles: u16,
    /// Row-sized temporaries, kept between passes.
    pub kept: u16,
    /// Scalar slots of one row.
    pub scalars: u16,
    /// Column-partial sums: each names the argument that receives the finished sum.
    pub partials: Vec<Partial>,
    /// Row coordinates it needs (for `iota` over a leading axis); divisors come with the launch.
    pub axes: u16,
    /// Run one after another, for each row.
    pub passes: Vec<Pass>,
}

impl TileProgram {
    /// Whether a row must be processed as a whole, because a part of its columns would change the result or store it twice.
    pub fn needs_whole_rows(&self) -> bool {
        let reduces = |pass: &Pass| pass.strip.iter().any(|inst| matches!(inst, Inst::Reduce { .. }));
        self.passes.iter().any(reduces) || self.args.iter().any(|spec| spec.written && spec.access == Access::PerRow)
    }
}

/// A sum over rows, one for each column.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Partial {
    /// The argument (`Access::Columns`) that receives it.
    pub arg: u16,
    /// Its width: the program's columns, or 1 for a sum of row scalars.
    pub width: usize,
}

/// One sweep over the row.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Pass {
    /// Scalar work before the sweep: every destination is a `Scalar`.
    pub row: Vec<Inst>,
    /// Work on each strip.
    pub strip: Vec<Inst>,
}

/// Where a value is read from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Src {
    /// A strip temporary.
    Tile(u16),
    /// A kept row.
    Kept(u16),
    /// An `f32` (or `i32`) argument with `Access::Row` or `GatheredRow`, read in place.
    Arg(u16),
    /// A scalar slot, the same for every column.
    Scalar(u16),
    /// A constant.
    Const(f32),
    /// An integer constant.
    ConstInt(i32),
}

/// Where a value is written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dst {
    /// A strip temporary.
    Tile(u16),
    /// A kept row.
    Kept(u16),
    /// A scalar slot: the instruction runs once a row, on scalar operands.
    Scalar(u16),
}

/// Functions of one value that the tile machine has: the primitives, and common compounds in one sweep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TileUnary {
    /// A primitive.
    Primitive(UnaryOp),
    /// `x * sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))`, the tanh form of GELU.
    GeluTanh,
    /// `x/2 (1 + erf(x / sqrt 2))`
    GeluErf,
    /// `x * sigmoid(x)`
    Silu,
    /// `i32` lanes to `f32`.
    IntToFloat,
    /// `f32` lanes to the nearest `i32`, saturating; NaN becomes 0.
    FloatToInt,
    /// To the nearest `f16`, as a store would leave it.
    RoundF16,
    /// To the nearest `bf16`, as a store would leave it.
    RoundBf16,
}

/// Row reductions of the tile machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TileReduce {
    /// Sum of `a`.
    Sum,
    /// Sum of `a * b`.
    Dot,
    /// Sum of `(a - b)^2`.
    Deviation,
    /// Largest `a`, NaN if any.
    Max,
    /// Largest `|a|`, NaN if any.
    AbsMax,
    /// Column of the first largest `a` (of the first NaN, if any), as `i32`.
    ArgMax,
}

/// The type of a comparison's operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LaneKind {
    /// `f32`
    Float,
    /// `i32`
    Int,
}

/// One instruction: a loop over a strip, or, with a scalar destination, one operation per row.
#[allow(missing_docs)] // the fields are those of the formula beside each variant
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Inst {
    /// Converts an argument's elements to lanes. Into a `Scalar` from a `PerRow` argument.
    Load { dst: Dst, arg: u16 },
    /// `dst = op(a)`
    Unary { op: TileUnary, dst: Dst, a: Src },
    /// `dst = op(a, b)`
    Binary { op: BinaryOp, dst: Dst, a: Src, b: Src },
    /// `dst = op(a, b)` of `i32` lanes
    Integer { op: IntegerOp, dst: Dst, a: Src, b: Src },
    /// `dst = a * b + c`, rounded once where the machine has the instruction.
    MulAdd { dst: Dst, a: Src, b: Src, c: Src },
    /// `dst = a * b * c + d`: a normed value scaled and shifted.
    MulMulAdd { dst: Dst, a: Src, b: Src, c: Src, d: Src },
    /// `dst = (a - b) * c * d + e`: a layer norm's last step.
    SubMulMulAdd { dst: Dst, a: Src, b: Src, c: Src, d: Src, e: Src },
    /// `dst = e^(a - b)`
    ExpSub { dst: Dst, a: Src, b: Src },
    /// `dst = 1 or 0`
    Compare { op: CompareOp, kind: LaneKind, dst: Dst, a: Src, b: Src },
    /// `dst = cond != 0 ? a : b`; lanes are moved as bits.
    Select { dst: Dst, cond: Src, a: Src, b: Src },
    /// The column number, `i32` lanes.
    ColumnIndex { dst: Dst },
    /// The row's coordinate `(row / divide) % modulo` of launch axis `axis`, `i32`. Scalar only.
    RowIndex { dst: Dst, axis: u16 },
    /// 1 where Philox keeps element `row * cols + column` (flat: the element), else 0. `seed` is an `i32` scalar.
    Keep { dst: Dst, seed: Src, offset: u32, threshold: u32 },
    /// Reduces over the pass; the scalar is ready after the pass. `b` counts only for `Dot`.
    Reduce { op: TileReduce, into: u16, a: Src, b: Src },
    /// Adds `a` to the column partial. In a row's scalar work (`width` 1), adds one value.
    ColumnAdd { partial: u16, a: Src },
    /// Converts lanes to the argument's dtype and stores them. In scalar work: one element of a `PerRow` argument.
    Store { arg: u16, a: Src },
}

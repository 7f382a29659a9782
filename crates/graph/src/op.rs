//! The closed list of primitive operations. Shape and dtype rules are in [`crate::infer`].

use std::fmt;

use crate::dtype::Dtype;
use crate::named;
use crate::shape::Shape;

/// The role of a graph input. Reports and loaders use it; kernels do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InputKind {
    /// Changes from call to call: activations, tokens, seeds, incoming gradients.
    Data,
    /// A parameter of the model.
    Weight,
}

named! {
    /// Functions of one value.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum UnaryOp {
        /// `-x`
        Neg = "neg",
        /// `|x|`
        Abs = "abs",
        /// `e^x`
        Exp = "exp",
        /// natural logarithm
        Log = "log",
        /// square root
        Sqrt = "sqrt",
        /// `1 / sqrt(x)`
        Rsqrt = "rsqrt",
        /// `1 / x`
        Reciprocal = "reciprocal",
        /// hyperbolic tangent
        Tanh = "tanh",
        /// the error function
        Erf = "erf",
        /// `1 / (1 + e^-x)`
        Sigmoid = "sigmoid",
        /// to the nearest integer, ties to even
        Round = "round",
    }
}

named! {
    /// Functions of two values.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum BinaryOp {
        /// `a + b`
        Add = "add",
        /// `a - b`
        Sub = "sub",
        /// `a * b`
        Mul = "mul",
        /// `a / b`
        Div = "div",
        /// the larger; NaN if either is NaN
        Max = "max",
        /// the smaller; NaN if either is NaN
        Min = "min",
    }
}

named! {
    /// Comparisons; all false when an operand is NaN, except `Ne`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum CompareOp {
        /// `a < b`
        Lt = "lt",
        /// `a <= b`
        Le = "le",
        /// `a == b`
        Eq = "eq",
        /// `a != b`
        Ne = "ne",
        /// `a > b`
        Gt = "gt",
        /// `a >= b`
        Ge = "ge",
    }
}

named! {
    /// Reductions over the last axis.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum ReduceOp {
        /// sum of the row
        Sum = "row_sum",
        /// sum of the row over its length
        Mean = "row_mean",
        /// largest value; NaN if any is NaN
        Max = "row_max",
        /// largest magnitude; NaN if any is NaN
        AbsMax = "row_absmax",
        /// index of the first largest value, `i32`; of the first NaN if there is one
        ArgMax = "row_argmax",
    }
}

/// A view: no arithmetic, and no memory traffic unless a consumer cannot read through it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum View {
    /// The same elements in row-major order under another shape.
    Reshape(Shape),
    /// Axis `i` of the result is axis `perm[i]` of the operand.
    Transpose(Vec<usize>),
    /// `length` indices of `axis` from `start`.
    Slice {
        /// the axis that is cut
        axis: usize,
        /// first index
        start: usize,
        /// how many
        length: usize,
    },
    /// Leading axes are added and axes of size 1 repeated until the shape is this.
    Broadcast(Shape),
}

/// An opaque operation, described but not defined: a graph that contains one is analysed, never run.
#[derive(Debug, Clone, PartialEq)]
pub struct Opaque {
    /// Its name in reports.
    pub name: String,
    /// dtype of the result
    pub dtype: Dtype,
    /// shape of the result
    pub shape: Shape,
    /// Total bytes moved, if not operands and result once each.
    pub bytes: Option<u64>,
    /// Floating point operations.
    pub flops: u64,
    /// Whether each element of the result depends only on the same element of the operands.
    pub elementwise: bool,
}

/// A primitive operation. Attributes are here, operands are in the node.
#[derive(Debug, Clone, PartialEq)]
pub enum Op {
    /// An input tensor of each run. No operands.
    Input {
        /// its role
        kind: InputKind,
        /// its dtype
        dtype: Dtype,
        /// its shape
        shape: Shape,
    },
    /// A scalar known when the graph is built. No operands.
    Const {
        /// its value, never NaN
        value: f64,
        /// its dtype
        dtype: Dtype,
    },
    /// `i32` index along `axis` of `shape`. No operands.
    Iota {
        /// the axis that is counted
        axis: usize,
        /// shape of the result
        shape: Shape,
    },
    /// Philox4x32-10: true where the element is kept. Operand: the seed, an `i32` scalar.
    /// An element is kept iff its u32 is at least [`keep_threshold`] of `drop`; its counter is its row-major index.
    Random {
        /// probability that an element is dropped, in `[0, 1)`
        drop: f64,
        /// the second half of the key, which distinguishes the dropouts of one graph
        offset: u32,
        /// shape of the result
        shape: Shape,
    },
    /// One float operand.
    Unary(UnaryOp),
    /// Two float operands of one dtype, broadcast against each other. All but `Div` also take `i32`, and wrap.
    Binary(BinaryOp),
    /// Two operands of one dtype (floats or `i32`), broadcast; the result is `bool`.
    Compare(CompareOp),
    /// Operands: condition (`bool`), value where true, value where false; all broadcast.
    Select,
    /// To another dtype: nearest even, saturating to `i8` and `i32`, where NaN becomes 0.
    Cast(Dtype),
    /// Over the last axis, which stays with size 1.
    RowReduce(ReduceOp),
    /// Sum over all axes but the last; the result has the shape of the last axis alone.
    ColumnSum,
    /// `[.., m, k] x [.., k, n] -> [.., m, n]`; a rank-2 second operand is used for every batch. The result of two `i8` is `f32`:
    /// their sums are exact in `i32` and rounded once. No gradient flows through those.
    Matmul {
        /// the first operand is stored `[.., k, m]`
        transpose_a: bool,
        /// the second operand is stored `[.., n, k]`
        transpose_b: bool,
    },
    /// Rows of a float, `i32` or `i8` table `[n, c]` picked by `i32` indices `[..]`: `[.., c]`.
    Gather,
    /// Operands: indices `[..]`, rows `[.., c]`. Adds each row to row `index` of a zero table `[rows, c]`.
    ScatterAdd {
        /// rows of the table
        rows: usize,
    },
    /// Operands: cache `[.., capacity, c]`, rows `[.., n, c]`, positions `i32[b]`. The cache, with the rows of sequence `i` of
    /// the axis `batch` in place of those from `positions[i]` on. All of them must fit: `positions[i] + n <= capacity`.
    Append {
        /// the leading axis that counts sequences
        batch: usize,
    },
    /// A change of index of one operand.
    View(View),
    /// Operands laid end to end along an axis.
    Concat {
        /// the axis that grows
        axis: usize,
    },
    /// The identity, through which no gradient flows.
    StopGradient,
    /// An operation known only by its cost. Any operands.
    Opaque(Opaque),
}

/// The smallest u32 of an element that [`Op::Random`] keeps: `floor(drop * 2^32)`, for `drop` in `[0, 1)`.
/// Philox gives every u32 equally often, so the share of dropped elements is `drop` to within `2^-32`. The product is exact,
/// since `2^32` is a power of two, and below `2^32`, so that the conversion is exact too.
pub fn keep_threshold(drop: f64) -> u32 {
    (drop * 4_294_967_296.0).floor() as u32
}

impl UnaryOp {
    /// Its value in `f64`.
    #[inline(always)]
    pub fn apply(self, x: f64) -> f64 {
        match self {
            UnaryOp::Neg => -x,
            UnaryOp::Abs => x.abs(),
            UnaryOp::Exp => x.exp(),
            UnaryOp::Log => x.ln(),
            UnaryOp::Sqrt => x.sqrt(),
            UnaryOp::Rsqrt => 1.0 / x.sqrt(),
            UnaryOp::Reciprocal => 1.0 / x,
            UnaryOp::Tanh => x.tanh(),
            UnaryOp::Erf => libm::erf(x),
            UnaryOp::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            UnaryOp::Round => x.round_ties_even(),
        }
    }
}

impl CompareOp {
    /// Whether it holds.
    #[inline(always)]
    pub fn holds(self, a: f64, b: f64) -> bool {
        match self {
            CompareOp::Lt => a < b,
            CompareOp::Le => a <= b,
            CompareOp::Eq => a == b,
            CompareOp::Ne => a != b,
            CompareOp::Gt => a > b,
            CompareOp::Ge => a >= b,
        }
    }
}

impl Op {
    /// The word of the text form, also the name of a kernel with only this op.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Input { kind: InputKind::Data, .. } => "input",
            Op::Input { kind: InputKind::Weight, .. } => "weight",
            Op::Const { .. } => "const",
            Op::Iota { .. } => "iota",
            Op::Random { .. } => "random",
            Op::Unary(op) => op.name(),
            Op::Binary(op) => op.name(),
            Op::Compare(op) => op.name(),
            Op::Select => "select",
            Op::Cast(_) => "cast",
            Op::RowReduce(op) => op.name(),
            Op::ColumnSum => "column_sum",
            Op::Matmul { .. } => "matmul",
            Op::Gather => "gather",
            Op::ScatterAdd { .. } => "scatter_add",
            Op::Append { .. } => "append",
            Op::View(View::Reshape(_)) => "reshape",
            Op::View(View::Transpose(_)) => "transpose",
            Op::View(View::Slice { .. }) => "slice",
            Op::View(View::Broadcast(_)) => "broadcast",
            Op::Concat { .. } => "concat",
            Op::StopGradient => "stop_gradient",
            Op::Opaque(_) => "opaque",
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

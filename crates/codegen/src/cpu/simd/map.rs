//! Elementwise loops: functions of one to three values, and conversions between formats.

use deuteron_graph::{BinaryOp, CompareOp, Dtype, UnaryOp};

use super::format::{BrainFloat, EightBitFloat, Format, HalfFloat, HalfFormat, SignedByte, Truth, Word};
use super::lanes::{Arithmetic, Simd};
use super::math;
use super::reduce::{Strip, reduce_made};
use super::sweep::{Body, Input, Output, sweep_rows};
use crate::cpu::program::{Inst, IntegerOp, LaneKind, Src, TileReduce, TileUnary};

/// A function of `N` lanes.
pub(in crate::cpu) trait Function<const N: usize>: Copy {
    fn apply<S: Arithmetic>(self, simd: S, x: [S::Float; N]) -> S::Float;
}

/// Lanes that a loop computes.
pub(super) trait Lanes {
    /// # Safety
    /// Columns `i .. i + WIDTH` of what they are made of can be read.
    unsafe fn full<S: Simd>(&self, simd: S, i: usize) -> S::Float;
    /// The first `count` count.
    ///
    /// # Safety
    /// Columns `i .. i + count` of what they are made of can be read, and `count < WIDTH`.
    unsafe fn partial<S: Simd>(&self, simd: S, i: usize, count: usize) -> S::Float;
    /// Goes to the next row, where they are made for several.
    fn next_row(&mut self);
}

/// Lanes, and where they go.
#[derive(Clone, Copy)]
pub(super) struct Made<L> {
    pub lanes: L,
    pub output: Output,
}

impl<L: Lanes> Body for Made<L> {
    #[inline(always)]
    fn streamed(&self) -> usize {
        self.output.stream_until
    }

    #[inline(always)]
    unsafe fn full<S: Simd, const STREAM: bool>(&self, simd: S, i: usize) {
        // SAFETY: the caller's promise; the sweep steps by `WIDTH`.
        unsafe { self.output.store::<S, STREAM>(simd, i, self.lanes.full(simd, i)) }
    }

    #[inline(always)]
    unsafe fn partial<S: Simd>(&self, simd: S, i: usize, count: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.output.store_partial(simd, i, self.lanes.partial(simd, i, count), count) }
    }

    #[inline(always)]
    fn next_row(&mut self) {
        self.lanes.next_row();
        self.output.next_row();
    }
}

/// A function of inputs.
#[derive(Clone, Copy)]
struct Map<F, const N: usize> {
    function: F,
    inputs: [Input; N],
}

impl<F: Function<N>, const N: usize> Lanes for Map<F, N> {
    #[inline(always)]
    unsafe fn full<S: Simd>(&self, simd: S, i: usize) -> S::Float {
        let mut x = [simd.splat(0.0); N];
        for (x, input) in x.iter_mut().zip(&self.inputs) {
            // SAFETY: the caller's promise, for each input.
            *x = unsafe { input.load(simd, i) };
        }
        self.function.apply(simd, x)
    }

    #[inline(always)]
    unsafe fn partial<S: Simd>(&self, simd: S, i: usize, count: usize) -> S::Float {
        let mut x = [simd.splat(0.0); N];
        for (x, input) in x.iter_mut().zip(&self.inputs) {
            // SAFETY: the caller's promise, for each input.
            *x = unsafe { input.load_partial(simd, i, count) };
        }
        self.function.apply(simd, x)
    }

    #[inline(always)]
    fn next_row(&mut self) {
        self.inputs.iter_mut().for_each(Input::next_row);
    }
}

/// Names a [`Function`]: `functions! { Name(simd, a, b) = expression; ... }`.
macro_rules! functions {
    ($($name:ident ( $simd:ident $(, $x:ident)* ) = $value:expr;)*) => {$(
        #[derive(Clone, Copy)]
        struct $name;
        impl Function<{ [$(stringify!($x)),*].len() }> for $name {
            #[inline(always)]
            fn apply<S: Arithmetic>(self, $simd: S, [$($x),*]: [S::Float; [$(stringify!($x)),*].len()]) -> S::Float {
                $value
            }
        }
    )*};
}

functions! {
    Neg(simd, x) = simd.neg(x);
    Abs(simd, x) = simd.abs(x);
    Exp(simd, x) = math::exp(simd, x);
    Log(simd, x) = math::log(simd, x);
    Sqrt(simd, x) = simd.sqrt(x);
    Rsqrt(simd, x) = math::rsqrt(simd, x);
    Reciprocal(simd, x) = math::reciprocal(simd, x);
    Tanh(simd, x) = math::tanh(simd, x);
    Erf(simd, x) = math::erf(simd, x);
    Sigmoid(simd, x) = math::sigmoid(simd, x);
    Round(simd, x) = simd.round(x);
    GeluTanh(simd, x) = math::gelu_tanh(simd, x);
    GeluErf(simd, x) = math::gelu_erf(simd, x);
    Silu(simd, x) = math::silu(simd, x);
    IntToFloat(simd, x) = simd.to_float(simd.bits(x));
    FloatToInt(simd, x) = simd.reinterpret(math::to_nearest_int(simd, x));
    AddInt(simd, a, b) = simd.reinterpret(simd.add_int(simd.bits(a), simd.bits(b)));
    SubInt(simd, a, b) = simd.reinterpret(simd.sub_int(simd.bits(a), simd.bits(b)));
    MulInt(simd, a, b) = simd.reinterpret(math::mul_int(simd, simd.bits(a), simd.bits(b)));
    RoundF16(simd, x) = HalfFloat::round(simd, x);
    RoundBf16(simd, x) = BrainFloat::round(simd, x);
    Add(simd, a, b) = simd.add(a, b);
    Sub(simd, a, b) = simd.sub(a, b);
    Mul(simd, a, b) = simd.mul(a, b);
    Div(simd, a, b) = simd.div(a, b);
    Max(simd, a, b) = simd.max(a, b);
    Min(simd, a, b) = simd.min(a, b);
    MulAdd(simd, a, b, c) = simd.mul_add(a, b, c);
    MulMulAdd(simd, a, b, c, d) = simd.mul_add(simd.mul(a, b), c, d);
    SubMulMulAdd(simd, a, b, c, d, e) = simd.mul_add(simd.mul(simd.sub(a, b), c), d, e);
    ExpSub(simd, a, b) = math::exp(simd, simd.sub(a, b));
    Less(simd, a, b) = truth(simd, simd.less(a, b));
    LessOrEqual(simd, a, b) = truth(simd, simd.less_or_equal(a, b));
    Greater(simd, a, b) = truth(simd, simd.less(b, a));
    GreaterOrEqual(simd, a, b) = truth(simd, simd.less_or_equal(b, a));
    Equal(simd, a, b) = truth(simd, simd.equal(a, b));
    NotEqual(simd, a, b) = lie(simd, simd.equal(a, b));
    LessInt(simd, a, b) = truth(simd, simd.less_int(simd.bits(a), simd.bits(b)));
    LessOrEqualInt(simd, a, b) = lie(simd, simd.less_int(simd.bits(b), simd.bits(a)));
    GreaterInt(simd, a, b) = truth(simd, simd.less_int(simd.bits(b), simd.bits(a)));
    GreaterOrEqualInt(simd, a, b) = lie(simd, simd.less_int(simd.bits(a), simd.bits(b)));
    EqualInt(simd, a, b) = truth(simd, simd.equal_int(simd.bits(a), simd.bits(b)));
    NotEqualInt(simd, a, b) = lie(simd, simd.equal_int(simd.bits(a), simd.bits(b)));
    Select(simd, condition, a, b) = simd.select(simd.equal(condition, simd.splat(0.0)), b, a);
}

/// What is done with the function of an instruction.
pub(in crate::cpu) trait Visitor {
    /// What that gives.
    type Output;
    /// Does it.
    fn visit<F: Function<N>, const N: usize>(self, function: F, operands: [Src; N]) -> Self::Output;
}

/// Passes the function of an elementwise instruction to `visitor`; none for moves, indices and reductions.
pub(in crate::cpu) fn visit<V: Visitor>(inst: Inst, visitor: V) -> Option<V::Output> {
    Some(match inst {
        Inst::Unary { op, a, .. } => visit_unary(op, a, visitor),
        Inst::Binary { op, a, b, .. } => match op {
            BinaryOp::Add => visitor.visit(Add, [a, b]),
            BinaryOp::Sub => visitor.visit(Sub, [a, b]),
            BinaryOp::Mul => visitor.visit(Mul, [a, b]),
            BinaryOp::Div => visitor.visit(Div, [a, b]),
            BinaryOp::Max => visitor.visit(Max, [a, b]),
            BinaryOp::Min => visitor.visit(Min, [a, b]),
        },
        Inst::Integer { op, a, b, .. } => match op {
            IntegerOp::Add => visitor.visit(AddInt, [a, b]),
            IntegerOp::Sub => visitor.visit(SubInt, [a, b]),
            IntegerOp::Mul => visitor.visit(MulInt, [a, b]),
        },
        Inst::Compare { op, kind, a, b, .. } => visit_compare(op, kind, [a, b], visitor),
        Inst::Select { cond, a, b, .. } => visitor.visit(Select, [cond, a, b]),
        Inst::MulAdd { a, b, c, .. } => visitor.visit(MulAdd, [a, b, c]),
        Inst::MulMulAdd { a, b, c, d, .. } => visitor.visit(MulMulAdd, [a, b, c, d]),
        Inst::SubMulMulAdd { a, b, c, d, e, .. } => visitor.visit(SubMulMulAdd, [a, b, c, d, e]),
        Inst::ExpSub { a, b, .. } => visitor.visit(ExpSub, [a, b]),
        Inst::Load { .. }
        | Inst::ColumnIndex { .. }
        | Inst::RowIndex { .. }
        | Inst::Keep { .. }
        | Inst::Reduce { .. }
        | Inst::ColumnAdd { .. }
        | Inst::Store { .. } => return None,
    })
}

fn visit_unary<V: Visitor>(op: TileUnary, a: Src, visitor: V) -> V::Output {
    match op {
        TileUnary::Primitive(UnaryOp::Neg) => visitor.visit(Neg, [a]),
        TileUnary::Primitive(UnaryOp::Abs) => visitor.visit(Abs, [a]),
        TileUnary::Primitive(UnaryOp::Exp) => visitor.visit(Exp, [a]),
        TileUnary::Primitive(UnaryOp::Log) => visitor.visit(Log, [a]),
        TileUnary::Primitive(UnaryOp::Sqrt) => visitor.visit(Sqrt, [a]),
        TileUnary::Primitive(UnaryOp::Rsqrt) => visitor.visit(Rsqrt, [a]),
        TileUnary::Primitive(UnaryOp::Reciprocal) => visitor.visit(Reciprocal, [a]),
        TileUnary::Primitive(UnaryOp::Tanh) => visitor.visit(Tanh, [a]),
        TileUnary::Primitive(UnaryOp::Erf) => visitor.visit(Erf, [a]),
        TileUnary::Primitive(UnaryOp::Sigmoid) => visitor.visit(Sigmoid, [a]),
        TileUnary::Primitive(UnaryOp::Round) => visitor.visit(Round, [a]),
        TileUnary::GeluTanh => visitor.visit(GeluTanh, [a]),
        TileUnary::GeluErf => visitor.visit(GeluErf, [a]),
        TileUnary::Silu => visitor.visit(Silu, [a]),
        TileUnary::IntToFloat => visitor.visit(IntToFloat, [a]),
        TileUnary::FloatToInt => visitor.visit(FloatToInt, [a]),
        TileUnary::RoundF16 => visitor.visit(RoundF16, [a]),
        TileUnary::RoundBf16 => visitor.visit(RoundBf16, [a]),
    }
}

fn visit_compare<V: Visitor>(op: CompareOp, kind: LaneKind, sides: [Src; 2], visitor: V) -> V::Output {
    match (kind, op) {
        (LaneKind::Float, CompareOp::Lt) => visitor.visit(Less, sides),
        (LaneKind::Float, CompareOp::Le) => visitor.visit(LessOrEqual, sides),
        (LaneKind::Float, CompareOp::Eq) => visitor.visit(Equal, sides),
        (LaneKind::Float, CompareOp::Ne) => visitor.visit(NotEqual, sides),
        (LaneKind::Float, CompareOp::Gt) => visitor.visit(Greater, sides),
        (LaneKind::Float, CompareOp::Ge) => visitor.visit(GreaterOrEqual, sides),
        (LaneKind::Int, CompareOp::Lt) => visitor.visit(LessInt, sides),
        (LaneKind::Int, CompareOp::Le) => visitor.visit(LessOrEqualInt, sides),
        (LaneKind::Int, CompareOp::Eq) => visitor.visit(EqualInt, sides),
        (LaneKind::Int, CompareOp::Ne) => visitor.visit(NotEqualInt, sides),
        (LaneKind::Int, CompareOp::Gt) => visitor.visit(GreaterInt, sides),
        (LaneKind::Int, CompareOp::Ge) => visitor.visit(GreaterOrEqualInt, sides),
    }
}

/// 1 where the mask is set, else 0.
#[inline(always)]
fn truth<S: Arithmetic>(simd: S, mask: S::Mask) -> S::Float {
    simd.select(mask, simd.splat(1.0), simd.splat(0.0))
}

/// 0 where the mask is set, else 1.
#[inline(always)]
fn lie<S: Arithmetic>(simd: S, mask: S::Mask) -> S::Float {
    simd.select(mask, simd.splat(0.0), simd.splat(1.0))
}

/// The columns of an instruction: `length` of them, all inputs and the output covering them, on each of `rows` rows.
///
/// The functions that take one are unsafe for the same reason: every input can be read, and the output written, on
/// columns `0 .. length` of every row, and the output overlaps an input only if they start at the same address.
#[derive(Clone, Copy)]
pub(super) struct Loop<S> {
    pub simd: S,
    pub rows: usize,
    pub length: usize,
    pub output: Output,
}

impl<S: Simd> Loop<S> {
    pub fn one_row(simd: S, length: usize, output: Output) -> Loop<S> {
        Loop { simd, rows: 1, length, output }
    }

    /// # Safety
    /// See [`Loop`].
    unsafe fn make(self, lanes: impl Lanes) {
        // SAFETY: the inputs and the output cover `length` columns, which is what the body reads and writes.
        unsafe { sweep_rows(self.simd, self.rows, self.length, Made { lanes, output: self.output }) }
    }

    /// # Safety
    /// See [`Loop`].
    pub unsafe fn map<F: Function<N>, const N: usize>(self, function: F, inputs: [Input; N]) {
        // SAFETY: passed on to the caller.
        unsafe { self.make(Map { function, inputs }) }
    }

    /// Every lane becomes `value`.
    /// # Safety
    /// See [`Loop`].
    pub unsafe fn splat(self, value: f32) {
        // SAFETY: passed on to the caller.
        unsafe { self.make(Splat(value)) }
    }

    /// Every lane of row `r` becomes element `r` of `values`.
    /// # Safety
    /// See [`Loop`]; there is a value for each row.
    pub unsafe fn spread(self, values: *const f32) {
        // SAFETY: passed on to the caller.
        unsafe { self.make(Spread(values)) }
    }

    /// Lane `i` becomes the integer `first + i`.
    /// # Safety
    /// See [`Loop`].
    pub unsafe fn count_from(self, first: i32) {
        // SAFETY: passed on to the caller.
        unsafe { self.make(Count(first)) }
    }

    /// Adds `a` to the output, which is read as well. (It is not an input, because it is written in place.)
    /// # Safety
    /// See [`Loop`].
    pub unsafe fn accumulate(self, a: Input) {
        let sum = Input::lanes(self.output.base);
        // SAFETY: passed on to the caller.
        unsafe { self.map(Add, [sum, a]) }
    }

    /// Converts elements at `from` to lanes; the next row is `row` bytes further.
    /// # Safety
    /// See [`Loop`]; `length` elements of `dtype` at `from` can be read, and so of the other rows.
    pub unsafe fn load(self, dtype: Dtype, from: *const u8, row: isize) {
        // SAFETY: passed on to the caller.
        unsafe {
            match dtype {
                Dtype::F32 | Dtype::I32 => self.make(Widen { _format: Word, from, row }),
                Dtype::F16 => self.make(Widen { _format: HalfFloat, from, row }),
                Dtype::Bf16 => self.make(Widen { _format: BrainFloat, from, row }),
                Dtype::I8 => self.make(Widen { _format: SignedByte, from, row }),
                Dtype::Bool => self.make(Widen { _format: Truth, from, row }),
                Dtype::F8e4m3 => self.make(Widen { _format: EightBitFloat, from, row }),
            }
        }
    }
}

struct Splat(f32);

impl Lanes for Splat {
    #[inline(always)]
    unsafe fn full<S: Simd>(&self, simd: S, _: usize) -> S::Float {
        simd.splat(self.0)
    }
    #[inline(always)]
    unsafe fn partial<S: Simd>(&self, simd: S, _: usize, _: usize) -> S::Float {
        simd.splat(self.0)
    }
    #[inline(always)]
    fn next_row(&mut self) {}
}

/// One value per row in all lanes.
struct Spread(*const f32);

impl Lanes for Spread {
    #[inline(always)]
    unsafe fn full<S: Simd>(&self, simd: S, _: usize) -> S::Float {
        // SAFETY: the caller's promise: a value for each row.
        simd.splat(unsafe { self.0.read() })
    }
    #[inline(always)]
    unsafe fn partial<S: Simd>(&self, simd: S, i: usize, _: usize) -> S::Float {
        // SAFETY: as above.
        unsafe { self.full(simd, i) }
    }
    #[inline(always)]
    fn next_row(&mut self) {
        self.0 = self.0.wrapping_add(1);
    }
}

/// The integer `self.0 + i` in lane `i`.
struct Count(i32);

impl Lanes for Count {
    #[inline(always)]
    unsafe fn full<S: Simd>(&self, simd: S, i: usize) -> S::Float {
        simd.reinterpret(simd.add_int(simd.count_up(), simd.splat_int(self.0.wrapping_add(i as i32))))
    }
    #[inline(always)]
    unsafe fn partial<S: Simd>(&self, simd: S, i: usize, _: usize) -> S::Float {
        // SAFETY: nothing is read.
        unsafe { self.full(simd, i) }
    }
    #[inline(always)]
    fn next_row(&mut self) {}
}

struct Widen<T> {
    _format: T,
    from: *const u8,
    /// Bytes to the next row.
    row: isize,
}

impl<T: Format> Lanes for Widen<T> {
    #[inline(always)]
    unsafe fn full<S: Simd>(&self, simd: S, i: usize) -> S::Float {
        // SAFETY: the caller's promise.
        unsafe { T::read(simd, self.from.add(i * T::BYTES)) }
    }
    #[inline(always)]
    unsafe fn partial<S: Simd>(&self, simd: S, i: usize, count: usize) -> S::Float {
        // SAFETY: the caller's promise.
        unsafe { T::read_partial(simd, self.from.add(i * T::BYTES), count) }
    }
    #[inline(always)]
    fn next_row(&mut self) {
        self.from = self.from.wrapping_offset(self.row);
    }
}

/// A computation whose results can be reduced in the same loop.
#[derive(Clone, Copy)]
pub(super) enum Chained {
    Add([Input; 2]),
    Sub([Input; 2]),
    Mul([Input; 2]),
    MulAdd([Input; 3]),
    MulMulAdd([Input; 4]),
    SubMulMulAdd([Input; 5]),
    ExpSub([Input; 2]),
}

impl Chained {
    /// An instruction that is one, its operands by their position.
    pub fn of(inst: Inst, input: impl Fn(usize, Src) -> Input) -> Option<Chained> {
        Some(match inst {
            Inst::Binary { op: BinaryOp::Add, a, b, .. } => Chained::Add([input(0, a), input(1, b)]),
            Inst::Binary { op: BinaryOp::Sub, a, b, .. } => Chained::Sub([input(0, a), input(1, b)]),
            Inst::Binary { op: BinaryOp::Mul, a, b, .. } => Chained::Mul([input(0, a), input(1, b)]),
            Inst::MulAdd { a, b, c, .. } => Chained::MulAdd([input(0, a), input(1, b), input(2, c)]),
            Inst::MulMulAdd { a, b, c, d, .. } => {
                Chained::MulMulAdd([input(0, a), input(1, b), input(2, c), input(3, d)])
            }
            Inst::SubMulMulAdd { a, b, c, d, e, .. } => {
                Chained::SubMulMulAdd([input(0, a), input(1, b), input(2, c), input(3, d), input(4, e)])
            }
            Inst::ExpSub { a, b, .. } => Chained::ExpSub([input(0, a), input(1, b)]),
            _ => return None,
        })
    }
}

impl<S: Simd> Loop<S> {
    /// Computes lanes and reduces them.
    ///
    /// # Safety
    /// See [`Loop`]; the strip's lanes and result can be written.
    pub unsafe fn chained(self, chained: Chained, op: TileReduce, strip: Strip) {
        // SAFETY: passed on to the caller.
        unsafe {
            match chained {
                Chained::Add(inputs) => self.mapped(Add, inputs, op, strip),
                Chained::Sub(inputs) => self.mapped(Sub, inputs, op, strip),
                Chained::Mul(inputs) => self.mapped(Mul, inputs, op, strip),
                Chained::MulAdd(inputs) => self.mapped(MulAdd, inputs, op, strip),
                Chained::MulMulAdd(inputs) => self.mapped(MulMulAdd, inputs, op, strip),
                Chained::SubMulMulAdd(inputs) => self.mapped(SubMulMulAdd, inputs, op, strip),
                Chained::ExpSub(inputs) => self.mapped(ExpSub, inputs, op, strip),
            }
        }
    }

    unsafe fn mapped<F: Function<N>, const N: usize>(
        self,
        function: F,
        inputs: [Input; N],
        op: TileReduce,
        strip: Strip,
    ) {
        let made = Made { lanes: Map { function, inputs }, output: self.output };
        // SAFETY: passed on to the caller.
        unsafe { reduce_made(self.simd, op, made, strip) }
    }
}

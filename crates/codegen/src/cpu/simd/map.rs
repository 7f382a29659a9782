//! Loops whose lanes do not meet: functions of one to three values, and moves between formats.

use deuteron_graph::{BinaryOp, CompareOp, Dtype, UnaryOp};

use super::format::{BrainFloat, EightBitFloat, Format, HalfFloat, HalfFormat, SignedByte, Truth, Word};
use super::lanes::Simd;
use super::math;
use super::reduce::{Strip, reduce_made};
use super::sweep::{Body, Input, Output, sweep_rows};
use crate::cpu::program::{Inst, LaneKind, Src, TileReduce, TileUnary};

/// A function of `N` lanes.
pub(super) trait Function<const N: usize>: Copy {
    fn apply<S: Simd>(self, simd: S, x: [S::Float; N]) -> S::Float;
}

/// Lanes that a loop makes.
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
            fn apply<S: Simd>(self, $simd: S, [$($x),*]: [S::Float; [$(stringify!($x)),*].len()]) -> S::Float {
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
    Equal(simd, a, b) = truth(simd, simd.equal(a, b));
    NotEqual(simd, a, b) = lie(simd, simd.equal(a, b));
    LessInt(simd, a, b) = truth(simd, simd.less_int(simd.bits(a), simd.bits(b)));
    NotLessInt(simd, a, b) = lie(simd, simd.less_int(simd.bits(a), simd.bits(b)));
    EqualInt(simd, a, b) = truth(simd, simd.equal_int(simd.bits(a), simd.bits(b)));
    NotEqualInt(simd, a, b) = lie(simd, simd.equal_int(simd.bits(a), simd.bits(b)));
    Select(simd, condition, a, b) = simd.select(simd.equal(condition, simd.splat(0.0)), b, a);
}

/// 1 where the mask is set, else 0.
#[inline(always)]
fn truth<S: Simd>(simd: S, mask: S::Mask) -> S::Float {
    simd.select(mask, simd.splat(1.0), simd.splat(0.0))
}

/// 0 where the mask is set, else 1.
#[inline(always)]
fn lie<S: Simd>(simd: S, mask: S::Mask) -> S::Float {
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
    unsafe fn map<F: Function<N>, const N: usize>(self, function: F, inputs: [Input; N]) {
        // SAFETY: passed on to the caller.
        unsafe { self.make(Map { function, inputs }) }
    }

    /// # Safety
    /// See [`Loop`].
    pub unsafe fn unary(self, op: TileUnary, a: Input) {
        let a = [a];
        // SAFETY: passed on to the caller.
        unsafe {
            match op {
                TileUnary::Primitive(UnaryOp::Neg) => self.map(Neg, a),
                TileUnary::Primitive(UnaryOp::Abs) => self.map(Abs, a),
                TileUnary::Primitive(UnaryOp::Exp) => self.map(Exp, a),
                TileUnary::Primitive(UnaryOp::Log) => self.map(Log, a),
                TileUnary::Primitive(UnaryOp::Sqrt) => self.map(Sqrt, a),
                TileUnary::Primitive(UnaryOp::Rsqrt) => self.map(Rsqrt, a),
                TileUnary::Primitive(UnaryOp::Reciprocal) => self.map(Reciprocal, a),
                TileUnary::Primitive(UnaryOp::Tanh) => self.map(Tanh, a),
                TileUnary::Primitive(UnaryOp::Erf) => self.map(Erf, a),
                TileUnary::Primitive(UnaryOp::Sigmoid) => self.map(Sigmoid, a),
                TileUnary::Primitive(UnaryOp::Round) => self.map(Round, a),
                TileUnary::GeluTanh => self.map(GeluTanh, a),
                TileUnary::GeluErf => self.map(GeluErf, a),
                TileUnary::Silu => self.map(Silu, a),
                TileUnary::IntToFloat => self.map(IntToFloat, a),
                TileUnary::RoundF16 => self.map(RoundF16, a),
                TileUnary::RoundBf16 => self.map(RoundBf16, a),
            }
        }
    }

    /// # Safety
    /// See [`Loop`].
    pub unsafe fn binary(self, op: BinaryOp, a: Input, b: Input) {
        // SAFETY: passed on to the caller.
        unsafe {
            match op {
                BinaryOp::Add => self.map(Add, [a, b]),
                BinaryOp::Sub => self.map(Sub, [a, b]),
                BinaryOp::Mul => self.map(Mul, [a, b]),
                BinaryOp::Div => self.map(Div, [a, b]),
                BinaryOp::Max => self.map(Max, [a, b]),
                BinaryOp::Min => self.map(Min, [a, b]),
            }
        }
    }

    /// # Safety
    /// See [`Loop`].
    pub unsafe fn compare(self, op: CompareOp, kind: LaneKind, a: Input, b: Input) {
        // SAFETY: passed on to the caller.
        unsafe {
            match (kind, op) {
                (LaneKind::Float, CompareOp::Lt) => self.map(Less, [a, b]),
                (LaneKind::Float, CompareOp::Le) => self.map(LessOrEqual, [a, b]),
                (LaneKind::Float, CompareOp::Eq) => self.map(Equal, [a, b]),
                (LaneKind::Float, CompareOp::Ne) => self.map(NotEqual, [a, b]),
                (LaneKind::Float, CompareOp::Gt) => self.map(Less, [b, a]),
                (LaneKind::Float, CompareOp::Ge) => self.map(LessOrEqual, [b, a]),
                (LaneKind::Int, CompareOp::Lt) => self.map(LessInt, [a, b]),
                (LaneKind::Int, CompareOp::Le) => self.map(NotLessInt, [b, a]),
                (LaneKind::Int, CompareOp::Eq) => self.map(EqualInt, [a, b]),
                (LaneKind::Int, CompareOp::Ne) => self.map(NotEqualInt, [a, b]),
                (LaneKind::Int, CompareOp::Gt) => self.map(LessInt, [b, a]),
                (LaneKind::Int, CompareOp::Ge) => self.map(NotLessInt, [a, b]),
            }
        }
    }

    /// # Safety
    /// See [`Loop`].
    pub unsafe fn select(self, condition: Input, a: Input, b: Input) {
        // SAFETY: passed on to the caller.
        unsafe { self.map(Select, [condition, a, b]) }
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

/// A computation whose results can be reduced in the same sweep.
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
    /// Computes lanes, and reduces them if that is asked for.
    ///
    /// # Safety
    /// See [`Loop`]; the strip's lanes and result can be written.
    pub unsafe fn chained(self, chained: Chained, reduced: Option<(TileReduce, Strip)>) {
        // SAFETY: passed on to the caller.
        unsafe {
            match chained {
                Chained::Add(inputs) => self.mapped(Add, inputs, reduced),
                Chained::Sub(inputs) => self.mapped(Sub, inputs, reduced),
                Chained::Mul(inputs) => self.mapped(Mul, inputs, reduced),
                Chained::MulAdd(inputs) => self.mapped(MulAdd, inputs, reduced),
                Chained::MulMulAdd(inputs) => self.mapped(MulMulAdd, inputs, reduced),
                Chained::SubMulMulAdd(inputs) => self.mapped(SubMulMulAdd, inputs, reduced),
                Chained::ExpSub(inputs) => self.mapped(ExpSub, inputs, reduced),
            }
        }
    }

    unsafe fn mapped<F: Function<N>, const N: usize>(
        self,
        function: F,
        inputs: [Input; N],
        reduced: Option<(TileReduce, Strip)>,
    ) {
        let lanes = Map { function, inputs };
        // SAFETY: passed on to the caller.
        unsafe {
            match reduced {
                Some((op, strip)) => reduce_made(self.simd, op, Made { lanes, output: self.output }, strip),
                None => self.make(lanes),
            }
        }
    }
}

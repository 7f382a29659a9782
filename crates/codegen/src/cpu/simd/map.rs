//! Loops whose lanes do not meet: functions of one to three values, and moves between formats.

use deuteron_graph::{BinaryOp, CompareOp, Dtype, UnaryOp};

use super::format::{BrainFloat, EightBitFloat, Format, HalfFloat, HalfFormat, SignedByte, Truth, Word};
use super::lanes::Simd;
use super::math;
use super::reduce::{Mapped, Strip, reduce_mapped};
use super::sweep::{Body, Input, Output, sweep};
use crate::cpu::program::{LaneKind, TileReduce, TileUnary};

/// A function of `N` lanes.
pub(super) trait Function<const N: usize>: Copy {
    fn apply<S: Simd>(self, simd: S, x: [S::Float; N]) -> S::Float;
}

struct Map<F, const N: usize> {
    function: F,
    inputs: [Input; N],
    output: Output,
}

impl<F: Function<N>, const N: usize> Body for Map<F, N> {
    #[inline(always)]
    fn streamed(&self) -> usize {
        self.output.stream_until
    }

    #[inline(always)]
    unsafe fn full<S: Simd, const STREAM: bool>(&self, simd: S, i: usize) {
        let mut x = [simd.splat(0.0); N];
        for (x, input) in x.iter_mut().zip(&self.inputs) {
            // SAFETY: the caller's promise, for each input.
            *x = unsafe { input.load(simd, i) };
        }
        let result = self.function.apply(simd, x);
        // SAFETY: the caller's promise; the sweep steps by `WIDTH`.
        unsafe { self.output.store::<S, STREAM>(simd, i, result) }
    }

    #[inline(always)]
    unsafe fn partial<S: Simd>(&self, simd: S, i: usize, count: usize) {
        let mut x = [simd.splat(0.0); N];
        for (x, input) in x.iter_mut().zip(&self.inputs) {
            // SAFETY: the caller's promise, for each input.
            *x = unsafe { input.load_partial(simd, i, count) };
        }
        let result = self.function.apply(simd, x);
        // SAFETY: the caller's promise.
        unsafe { self.output.store_partial(simd, i, result, count) }
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

/// The columns of an instruction: `length` of them, all inputs and the output covering them.
///
/// The functions that take one are unsafe for the same reason: every input can be read, and the output written, on
/// columns `0 .. length`, and the output overlaps an input only if they start at the same address.
#[derive(Clone, Copy)]
pub(super) struct Loop<S> {
    pub simd: S,
    pub length: usize,
    pub output: Output,
}

impl<S: Simd> Loop<S> {
    /// # Safety
    /// See [`Loop`].
    unsafe fn map<F: Function<N>, const N: usize>(self, function: F, inputs: [Input; N]) {
        // SAFETY: the inputs and the output cover `length` columns, which is what the body reads and writes.
        unsafe { sweep(self.simd, self.length, Map { function, inputs, output: self.output }) }
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
    pub unsafe fn mul_add(self, a: Input, b: Input, c: Input) {
        // SAFETY: passed on to the caller.
        unsafe { self.map(MulAdd, [a, b, c]) }
    }

    /// # Safety
    /// See [`Loop`].
    pub unsafe fn mul_mul_add(self, inputs: [Input; 4]) {
        // SAFETY: passed on to the caller.
        unsafe { self.map(MulMulAdd, inputs) }
    }

    /// # Safety
    /// See [`Loop`].
    pub unsafe fn sub_mul_mul_add(self, inputs: [Input; 5]) {
        // SAFETY: passed on to the caller.
        unsafe { self.map(SubMulMulAdd, inputs) }
    }

    /// # Safety
    /// See [`Loop`].
    pub unsafe fn exp_sub(self, a: Input, b: Input) {
        // SAFETY: passed on to the caller.
        unsafe { self.map(ExpSub, [a, b]) }
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
        // SAFETY: the output covers `length` columns.
        unsafe { sweep(self.simd, self.length, Splat { value, output: self.output }) }
    }

    /// Lane `i` becomes the integer `first + i`.
    /// # Safety
    /// See [`Loop`].
    pub unsafe fn count_from(self, first: i32) {
        // SAFETY: the output covers `length` columns.
        unsafe { sweep(self.simd, self.length, Count { first, output: self.output }) }
    }

    /// Adds `a` to the output, which is read as well. (It is not an input, because it is written in place.)
    /// # Safety
    /// See [`Loop`].
    pub unsafe fn accumulate(self, a: Input) {
        let sum = Input::lanes(self.output.base);
        // SAFETY: passed on to the caller.
        unsafe { self.map(Add, [sum, a]) }
    }

    /// Converts elements at `from` to lanes.
    /// # Safety
    /// See [`Loop`]; `length` elements of `dtype` at `from` can be read.
    pub unsafe fn load(self, dtype: Dtype, from: *const u8) {
        // SAFETY: passed on to the caller.
        unsafe {
            match dtype {
                Dtype::F32 | Dtype::I32 => self.load_as(Word, from),
                Dtype::F16 => self.load_as(HalfFloat, from),
                Dtype::Bf16 => self.load_as(BrainFloat, from),
                Dtype::I8 => self.load_as(SignedByte, from),
                Dtype::Bool => self.load_as(Truth, from),
                Dtype::F8e4m3 => self.load_as(EightBitFloat, from),
            }
        }
    }

    /// # Safety
    /// See [`Loop::load`].
    unsafe fn load_as<T: Format>(self, format: T, from: *const u8) {
        // SAFETY: `from` and the output cover `length` columns.
        unsafe { sweep(self.simd, self.length, Widen { _format: format, from, output: self.output }) }
    }
}

struct Splat {
    value: f32,
    output: Output,
}

impl Body for Splat {
    #[inline(always)]
    fn streamed(&self) -> usize {
        self.output.stream_until
    }

    #[inline(always)]
    unsafe fn full<S: Simd, const STREAM: bool>(&self, simd: S, i: usize) {
        // SAFETY: the caller's promise; the sweep steps by `WIDTH`.
        unsafe { self.output.store::<S, STREAM>(simd, i, simd.splat(self.value)) }
    }
    #[inline(always)]
    unsafe fn partial<S: Simd>(&self, simd: S, i: usize, count: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.output.store_partial(simd, i, simd.splat(self.value), count) }
    }
}

struct Count {
    first: i32,
    output: Output,
}

impl Body for Count {
    #[inline(always)]
    fn streamed(&self) -> usize {
        self.output.stream_until
    }

    #[inline(always)]
    unsafe fn full<S: Simd, const STREAM: bool>(&self, simd: S, i: usize) {
        let lanes = simd.add_int(simd.count_up(), simd.splat_int(self.first.wrapping_add(i as i32)));
        // SAFETY: the caller's promise; the sweep steps by `WIDTH`.
        unsafe { self.output.store::<S, STREAM>(simd, i, simd.reinterpret(lanes)) }
    }
    #[inline(always)]
    unsafe fn partial<S: Simd>(&self, simd: S, i: usize, count: usize) {
        let lanes = simd.add_int(simd.count_up(), simd.splat_int(self.first.wrapping_add(i as i32)));
        // SAFETY: the caller's promise.
        unsafe { self.output.store_partial(simd, i, simd.reinterpret(lanes), count) }
    }
}

struct Widen<T> {
    _format: T,
    from: *const u8,
    output: Output,
}

impl<T: Format> Body for Widen<T> {
    #[inline(always)]
    fn streamed(&self) -> usize {
        self.output.stream_until
    }

    #[inline(always)]
    unsafe fn full<S: Simd, const STREAM: bool>(&self, simd: S, i: usize) {
        // SAFETY: the caller's promise; the sweep steps by `WIDTH`.
        unsafe { self.output.store::<S, STREAM>(simd, i, T::read(simd, self.from.add(i * T::BYTES))) }
    }
    #[inline(always)]
    unsafe fn partial<S: Simd>(&self, simd: S, i: usize, count: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let lanes = T::read_partial(simd, self.from.add(i * T::BYTES), count);
            self.output.store_partial(simd, i, lanes, count)
        }
    }
}

/// An instruction whose results are reduced in the same sweep.
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

impl<S: Simd> Loop<S> {
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
        // SAFETY: passed on to the caller.
        unsafe { reduce_mapped(self.simd, op, Mapped { function, inputs, output: self.output }, strip) }
    }
}

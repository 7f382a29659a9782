//! Functions without a primitive, expressed with primitives. All are computed in `f32`; polynomials are accurate to
//! less than a unit of `f32`.

use deuteron_graph::{BinaryOp, CompareOp, Dtype, GraphError, NodeId, UnaryOp};

use crate::emit::{Emitter, unsupported};
use crate::ir::Function;

type Value = Result<NodeId, GraphError>;

/// `pi` in three parts, of which a multiple of the first two is exact.
const PI: [f64; 3] = [3.140625, 9.670_257_568_359_375e-4, 6.278_329_46e-7];

/// `sin(r) / r` in powers of `r^2`, up to a quarter turn.
const SINE: [f64; 8] = [
    1.0,
    -1.0 / 6.0,
    1.0 / 120.0,
    -1.0 / 5040.0,
    1.0 / 362_880.0,
    -1.0 / 39_916_800.0,
    1.0 / 6_227_020_800.0,
    -1.0 / 1_307_674_368_000.0,
];

/// `atan(t) / t` in powers of `t^2`, up to `tan(pi / 8)`.
const ARC_TANGENT: [f64; 10] =
    [1.0, -1.0 / 3.0, 1.0 / 5.0, -1.0 / 7.0, 1.0 / 9.0, -1.0 / 11.0, 1.0 / 13.0, -1.0 / 15.0, 1.0 / 17.0, -1.0 / 19.0];

const SINH: [f64; 5] = [1.0, 1.0 / 6.0, 1.0 / 120.0, 1.0 / 5040.0, 1.0 / 362_880.0];
const AREA_SINH: [f64; 5] = [1.0, -1.0 / 6.0, 3.0 / 40.0, -15.0 / 336.0, 105.0 / 3456.0];
const AREA_TANH: [f64; 5] = [1.0, 1.0 / 3.0, 1.0 / 5.0, 1.0 / 7.0, 1.0 / 9.0];

/// Below it a series is used instead of a difference of near equals.
const SMALL: f64 = 0.125;

impl Emitter<'_> {
    pub(crate) fn function(&mut self, function: Function, operands: &[NodeId]) -> Value {
        let dtype = self.graph.node(operands[0]).dtype;
        if !dtype.is_float() || operands.iter().any(|&x| self.graph.node(x).dtype != dtype) {
            return Err(unsupported(&format!("{dtype} arithmetic is not a primitive")));
        }
        let wide = operands.iter().map(|&x| self.widened(x)).collect::<Result<Vec<_>, _>>()?;
        let result = match (function, &wide[..]) {
            (Function::Floor, &[x]) => self.floor(x)?,
            (Function::Ceil, &[x]) => self.ceil(x)?,
            (Function::Sign, &[x]) => self.sign(x)?,
            (Function::Sin, &[x]) => self.wave(x, 0.0)?,
            (Function::Cos, &[x]) => self.wave(x, 0.5)?,
            (Function::Tan, &[x]) => {
                let (sine, cosine) = (self.wave(x, 0.0)?, self.wave(x, 0.5)?);
                self.graph.binary(BinaryOp::Div, sine, cosine)?
            }
            (Function::Atan, &[x]) => self.arc_tangent(x)?,
            (Function::Asin, &[x]) => {
                let (below, above) = (self.minus_from(1.0, x)?, self.plus(x, 1.0)?);
                let product = self.graph.mul(below, above)?;
                let root = self.graph.unary(UnaryOp::Sqrt, product)?;
                let tangent = self.graph.binary(BinaryOp::Div, x, root)?;
                self.arc_tangent(tangent)?
            }
            (Function::Acos, &[x]) => {
                let (below, above) = (self.minus_from(1.0, x)?, self.plus(x, 1.0)?);
                let share = self.graph.binary(BinaryOp::Div, below, above)?;
                let tangent = self.graph.unary(UnaryOp::Sqrt, share)?;
                let half = self.arc_tangent(tangent)?;
                self.graph.scale(half, 2.0)?
            }
            (Function::Sinh | Function::Cosh | Function::Asinh | Function::Acosh | Function::Atanh, &[x]) => {
                self.hyperbolic(function, x)?
            }
            (Function::Mod, &[a, b]) => {
                let share = self.graph.binary(BinaryOp::Div, a, b)?;
                let whole = self.floor(share)?;
                let product = self.graph.mul(whole, b)?;
                self.graph.sub(a, product)?
            }
            (Function::Remainder, &[a, b]) => {
                let share = self.graph.binary(BinaryOp::Div, a, b)?;
                let whole = self.trunc(share)?;
                let product = self.graph.mul(whole, b)?;
                self.graph.sub(a, product)?
            }
            (Function::Pow, &[base, exponent]) => self.any_power(base, exponent)?,
            _ => return Err(unsupported("one or two operands")),
        };
        if dtype == Dtype::F32 { Ok(result) } else { self.graph.cast(result, dtype) }
    }

    /// To a constant power: by multiplication where it is a small whole number, else by logarithm.
    pub(crate) fn power(&mut self, x: NodeId, exponent: f64) -> Value {
        let dtype = self.graph.node(x).dtype;
        if !dtype.is_float() {
            return Err(unsupported(&format!("{dtype} arithmetic is not a primitive")));
        }
        let is_whole = exponent.fract() == 0.0 && exponent.abs() <= 64.0;
        if is_whole && (1.0..=8.0).contains(&exponent) {
            let mut result = x;
            for _ in 1..exponent as usize {
                result = self.graph.mul(result, x)?;
            }
            return Ok(result);
        }
        let wide = self.widened(x)?;
        let result = if exponent == 0.0 {
            let one = self.graph.constant(1.0, Dtype::F32)?;
            let shape = self.graph.node(x).shape.clone();
            self.graph.broadcast(one, shape)?
        } else if is_whole {
            let mut square = wide;
            let mut result: Option<NodeId> = None;
            let mut left = exponent.abs() as u32;
            while left > 0 {
                if left % 2 == 1 {
                    result = Some(match result {
                        Some(result) => self.graph.mul(result, square)?,
                        None => square,
                    });
                }
                left /= 2;
                if left > 0 {
                    square = self.graph.mul(square, square)?;
                }
            }
            let result = result.unwrap_or(wide);
            if exponent < 0.0 { self.graph.unary(UnaryOp::Reciprocal, result)? } else { result }
        } else {
            let log = self.graph.unary(UnaryOp::Log, wide)?;
            let scaled = self.graph.scale(log, exponent)?;
            self.graph.unary(UnaryOp::Exp, scaled)?
        };
        if dtype == Dtype::F32 { Ok(result) } else { self.graph.cast(result, dtype) }
    }

    fn widened(&mut self, x: NodeId) -> Value {
        if self.graph.node(x).dtype == Dtype::F32 { Ok(x) } else { self.graph.cast(x, Dtype::F32) }
    }

    fn number(&mut self, value: f64) -> Value {
        self.graph.constant(value, Dtype::F32)
    }

    pub(crate) fn plus(&mut self, x: NodeId, value: f64) -> Value {
        let value = self.number(value)?;
        self.graph.add(x, value)
    }

    fn minus_from(&mut self, value: f64, x: NodeId) -> Value {
        let value = self.number(value)?;
        self.graph.sub(value, x)
    }

    fn against(&mut self, op: CompareOp, x: NodeId, value: f64) -> Value {
        let value = self.number(value)?;
        self.graph.compare(op, x, value)
    }

    pub(crate) fn floor(&mut self, x: NodeId) -> Value {
        let nearest = self.graph.unary(UnaryOp::Round, x)?;
        let is_above = self.graph.compare(CompareOp::Gt, nearest, x)?;
        let below = self.plus(nearest, -1.0)?;
        self.graph.select(is_above, below, nearest)
    }

    fn ceil(&mut self, x: NodeId) -> Value {
        let nearest = self.graph.unary(UnaryOp::Round, x)?;
        let is_below = self.graph.compare(CompareOp::Lt, nearest, x)?;
        let above = self.plus(nearest, 1.0)?;
        self.graph.select(is_below, above, nearest)
    }

    /// Towards zero.
    pub(crate) fn trunc(&mut self, x: NodeId) -> Value {
        let (floor, ceil) = (self.floor(x)?, self.ceil(x)?);
        let is_negative = self.against(CompareOp::Lt, x, 0.0)?;
        self.graph.select(is_negative, ceil, floor)
    }

    fn sign(&mut self, x: NodeId) -> Value {
        let (one, minus) = (self.number(1.0)?, self.number(-1.0)?);
        let is_negative = self.against(CompareOp::Lt, x, 0.0)?;
        // 0 and NaN stay what they are.
        let rest = self.graph.select(is_negative, minus, x)?;
        let is_positive = self.against(CompareOp::Gt, x, 0.0)?;
        self.graph.select(is_positive, one, rest)
    }

    /// `sin(x + phase pi)`, for a phase of 0 or a half: the nearest multiple of `pi` is taken off, and its parity is the sign.
    fn wave(&mut self, x: NodeId, phase: f64) -> Value {
        let turns = self.graph.scale(x, std::f64::consts::FRAC_1_PI)?;
        let turns = self.plus(turns, phase)?;
        let whole = self.graph.unary(UnaryOp::Round, turns)?;
        let multiple = self.plus(whole, -phase)?;
        let mut rest = x;
        for part in PI {
            let product = self.graph.scale(multiple, part)?;
            rest = self.graph.sub(rest, product)?;
        }
        let half = self.graph.scale(whole, 0.5)?;
        let even = self.graph.unary(UnaryOp::Round, half)?;
        let odd = self.graph.sub(half, even)?;
        let odd = self.graph.unary(UnaryOp::Abs, odd)?;
        let sign = self.graph.scale(odd, -4.0)?;
        let sign = self.plus(sign, 1.0)?;
        let sine = self.series(rest, &SINE)?;
        self.graph.mul(sine, sign)
    }

    /// `x` times a polynomial in `x^2`.
    fn series(&mut self, x: NodeId, coefficients: &[f64]) -> Value {
        let square = self.graph.mul(x, x)?;
        let mut sum = self.number(*coefficients.last().unwrap_or(&0.0))?;
        for &coefficient in coefficients.iter().rev().skip(1) {
            let product = self.graph.mul(sum, square)?;
            sum = self.plus(product, coefficient)?;
        }
        self.graph.mul(x, sum)
    }

    fn arc_tangent(&mut self, x: NodeId) -> Value {
        use std::f64::consts::{FRAC_PI_2, FRAC_PI_4};
        let size = self.graph.unary(UnaryOp::Abs, x)?;
        let is_large = self.against(CompareOp::Gt, size, 1.0)?;
        let inverse = self.graph.unary(UnaryOp::Reciprocal, size)?;
        let small = self.graph.select(is_large, inverse, size)?;
        // (t - 1) / (t + 1) turns by pi / 4.
        let is_half = self.against(CompareOp::Gt, small, std::f64::consts::SQRT_2 - 1.0)?;
        let (below, above) = (self.plus(small, -1.0)?, self.plus(small, 1.0)?);
        let turned = self.graph.binary(BinaryOp::Div, below, above)?;
        let reduced = self.graph.select(is_half, turned, small)?;
        let angle = self.series(reduced, &ARC_TANGENT)?;
        let further = self.plus(angle, FRAC_PI_4)?;
        let angle = self.graph.select(is_half, further, angle)?;
        let rest = self.minus_from(FRAC_PI_2, angle)?;
        let angle = self.graph.select(is_large, rest, angle)?;
        let negative = self.graph.unary(UnaryOp::Neg, angle)?;
        let is_negative = self.against(CompareOp::Lt, x, 0.0)?;
        self.graph.select(is_negative, negative, angle)
    }

    fn hyperbolic(&mut self, function: Function, x: NodeId) -> Value {
        match function {
            Function::Sinh | Function::Cosh => {
                let rising = self.graph.unary(UnaryOp::Exp, x)?;
                let negative = self.graph.unary(UnaryOp::Neg, x)?;
                let falling = self.graph.unary(UnaryOp::Exp, negative)?;
                let op = if function == Function::Sinh { BinaryOp::Sub } else { BinaryOp::Add };
                let both = self.graph.binary(op, rising, falling)?;
                let half = self.graph.scale(both, 0.5)?;
                if function == Function::Cosh { Ok(half) } else { self.or_series(x, half, &SINH) }
            }
            Function::Asinh => {
                let size = self.graph.unary(UnaryOp::Abs, x)?;
                let square = self.graph.mul(x, x)?;
                let above = self.plus(square, 1.0)?;
                let root = self.graph.unary(UnaryOp::Sqrt, above)?;
                let sum = self.graph.add(size, root)?;
                let log = self.graph.unary(UnaryOp::Log, sum)?;
                let sign = self.sign(x)?;
                let signed = self.graph.mul(log, sign)?;
                self.or_series(x, signed, &AREA_SINH)
            }
            Function::Acosh => {
                let (below, above) = (self.plus(x, -1.0)?, self.plus(x, 1.0)?);
                let product = self.graph.mul(below, above)?;
                let root = self.graph.unary(UnaryOp::Sqrt, product)?;
                let sum = self.graph.add(x, root)?;
                self.graph.unary(UnaryOp::Log, sum)
            }
            _ => {
                let (above, below) = (self.plus(x, 1.0)?, self.minus_from(1.0, x)?);
                let share = self.graph.binary(BinaryOp::Div, above, below)?;
                let log = self.graph.unary(UnaryOp::Log, share)?;
                let half = self.graph.scale(log, 0.5)?;
                self.or_series(x, half, &AREA_TANH)
            }
        }
    }

    /// A series near zero, the closed form elsewhere.
    fn or_series(&mut self, x: NodeId, closed: NodeId, coefficients: &[f64]) -> Value {
        let size = self.graph.unary(UnaryOp::Abs, x)?;
        let is_small = self.against(CompareOp::Lt, size, SMALL)?;
        let series = self.series(x, coefficients)?;
        self.graph.select(is_small, series, closed)
    }

    /// `|base|^exponent` with the sign of an odd power; NaN for a negative base and an exponent that is not whole.
    fn any_power(&mut self, base: NodeId, exponent: NodeId) -> Value {
        let size = self.graph.unary(UnaryOp::Abs, base)?;
        let log = self.graph.unary(UnaryOp::Log, size)?;
        let scaled = self.graph.mul(exponent, log)?;
        let magnitude = self.graph.unary(UnaryOp::Exp, scaled)?;
        let half = self.graph.scale(exponent, 0.5)?;
        let even = self.graph.unary(UnaryOp::Round, half)?;
        let odd = self.graph.sub(half, even)?;
        let odd = self.graph.unary(UnaryOp::Abs, odd)?;
        // 0 for an even power, a half for an odd one, else between.
        let is_odd = self.against(CompareOp::Eq, odd, 0.5)?;
        let is_even = self.against(CompareOp::Eq, odd, 0.0)?;
        let negative = self.graph.unary(UnaryOp::Neg, magnitude)?;
        let undefined = self.graph.unary(UnaryOp::Log, base)?;
        let of_even = self.graph.select(is_even, magnitude, undefined)?;
        let of_negative = self.graph.select(is_odd, negative, of_even)?;
        let is_negative = self.against(CompareOp::Lt, base, 0.0)?;
        let signed = self.graph.select(is_negative, of_negative, magnitude)?;
        let is_zero = self.against(CompareOp::Eq, exponent, 0.0)?;
        let one = self.number(1.0)?;
        self.graph.select(is_zero, one, signed)
    }
}

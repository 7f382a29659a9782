//! The primitives that work on one element, in `f64`.

use deuteron_graph::{BinaryOp, CompareOp, UnaryOp};

#[inline(always)]
pub(crate) fn unary(op: UnaryOp, x: f64) -> f64 {
    match op {
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

/// What CUDA and vector libraries promise of exponentials, logarithms, roots and the like, in units of `f32`.
pub(crate) const FUNCTION_ULPS: f64 = 2.0;

/// A function as a kernel's library computes it: off by up to [`FUNCTION_ULPS`], by an amount that depends on `x` alone.
#[inline(always)]
pub(crate) fn library(op: UnaryOp, x: f64) -> f64 {
    let y = unary(op, x);
    match op {
        UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Round | UnaryOp::Sqrt | UnaryOp::Reciprocal => y,
        UnaryOp::Exp | UnaryOp::Log | UnaryOp::Rsqrt | UnaryOp::Tanh | UnaryOp::Erf | UnaryOp::Sigmoid => {
            let scattered = x.to_bits().wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 11;
            let share = scattered as f64 / (1u64 << 52) as f64 - 1.0;
            y + y * share * FUNCTION_ULPS * f64::from(f32::EPSILON)
        }
    }
}

#[inline(always)]
pub(crate) fn binary(op: BinaryOp, a: f64, b: f64) -> f64 {
    match op {
        BinaryOp::Add => a + b,
        BinaryOp::Sub => a - b,
        BinaryOp::Mul => a * b,
        BinaryOp::Div => a / b,
        BinaryOp::Max => larger(a, b),
        BinaryOp::Min => -larger(-a, -b),
    }
}

/// 1 where the comparison holds, else 0.
#[inline(always)]
pub(crate) fn compare(op: CompareOp, a: f64, b: f64) -> f64 {
    let holds = match op {
        CompareOp::Lt => a < b,
        CompareOp::Le => a <= b,
        CompareOp::Eq => a == b,
        CompareOp::Ne => a != b,
        CompareOp::Gt => a > b,
        CompareOp::Ge => a >= b,
    };
    holds as u8 as f64
}

/// The larger of two; NaN if either is (`f64::max` would drop it).
#[inline(always)]
pub(crate) fn larger(a: f64, b: f64) -> f64 {
    if a > b || a.is_nan() { a } else { b }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_passes_through_max_and_min() {
        for op in [BinaryOp::Max, BinaryOp::Min] {
            assert!(binary(op, f64::NAN, 1.0).is_nan());
            assert!(binary(op, 1.0, f64::NAN).is_nan());
        }
        assert_eq!(binary(BinaryOp::Max, f64::NEG_INFINITY, 1.0), 1.0);
        assert_eq!(binary(BinaryOp::Min, -3.0, 1.0), -3.0);
    }

    #[test]
    fn only_not_equal_holds_for_nan() {
        for op in CompareOp::ALL {
            assert_eq!(compare(op, f64::NAN, f64::NAN), (op == CompareOp::Ne) as u8 as f64);
        }
    }

    #[test]
    fn a_sigmoid_reaches_its_limits() {
        assert_eq!(unary(UnaryOp::Sigmoid, -1e4), 0.0);
        assert_eq!(unary(UnaryOp::Sigmoid, 1e4), 1.0);
        assert_eq!(unary(UnaryOp::Round, 2.5), 2.0);
        assert_eq!(unary(UnaryOp::Round, -3.5), -4.0);
    }
}

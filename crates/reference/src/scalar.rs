//! The primitives that work on one element, in `f64`.

use deuteron_graph::{BinaryOp, UnaryOp};

/// What CUDA and vector libraries promise of exponentials, logarithms, roots and the like, in units of `f32`.
pub(crate) const FUNCTION_ULPS: f64 = 2.0;

/// A function as a kernel's library computes it: off by up to [`FUNCTION_ULPS`], by an amount that depends on `x` alone.
#[inline(always)]
pub(crate) fn library(op: UnaryOp, x: f64) -> f64 {
    let y = op.apply(x);
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

/// Of two `i32`, wrapping.
#[inline(always)]
pub(crate) fn integer(op: BinaryOp, a: f64, b: f64) -> f64 {
    let (a, b) = (a as i32, b as i32);
    f64::from(match op {
        BinaryOp::Add => a.wrapping_add(b),
        BinaryOp::Sub => a.wrapping_sub(b),
        BinaryOp::Mul => a.wrapping_mul(b),
        BinaryOp::Max => a.max(b),
        BinaryOp::Min => a.min(b),
        // A graph divides floats only.
        BinaryOp::Div => 0,
    })
}

/// The larger of two; NaN if either is (`f64::max` would drop it).
#[inline(always)]
pub(crate) fn larger(a: f64, b: f64) -> f64 {
    if a > b || a.is_nan() { a } else { b }
}

#[cfg(test)]
mod tests {
    use deuteron_graph::CompareOp;

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
            assert_eq!(op.holds(f64::NAN, f64::NAN), op == CompareOp::Ne);
        }
    }

    #[test]
    fn a_sigmoid_reaches_its_limits() {
        assert_eq!(UnaryOp::Sigmoid.apply(-1e4), 0.0);
        assert_eq!(UnaryOp::Sigmoid.apply(1e4), 1.0);
        assert_eq!(UnaryOp::Round.apply(2.5), 2.0);
        assert_eq!(UnaryOp::Round.apply(-3.5), -4.0);
    }
}

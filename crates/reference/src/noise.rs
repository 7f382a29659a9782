//! The contribution of one step of a kernel to the error of a value, as a standard deviation.
//!
//! A rounding to nearest is off by up to half a spacing, evenly: a deviation of `1 / sqrt(12)` spacings. Functions are as good
//! as the kernels' libraries promise; sums are accumulated in `f32`.

use deuteron_graph::{Dtype, UnaryOp};

use crate::round::{round_to, smallest, ulp};

/// Deviations up to which a result is right.
pub(crate) const DEVIATIONS: f64 = 5.0;

/// The deviation of an even distribution over one spacing: `1 / sqrt(12)`.
const EVEN: f64 = 0.288_675_134_594_812_9;
/// Half the spacing of `f32` at 1: what one correct rounding is off at most.
const UNIT: f64 = 1.0 / (1u64 << 24) as f64;
/// Partial sums that a row is summed in, at least: a warp's lanes.
const LANES: usize = 32;

/// The deviation of rounding `y`, itself off by `off`, to `dtype`. A number that the dtype holds stays as it is if nothing before it was off, and
/// a zero if anything was: it is structural (a mask, a clamp, a dropped element), or what it cancelled from is off.
#[inline(always)]
pub(crate) fn rounding(dtype: Dtype, y: f64, off: f64) -> f64 {
    if !dtype.is_float() || y == 0.0 || (off == 0.0 && (round_to(dtype, y) == y || y.is_nan())) {
        return 0.0;
    }
    // Subnormals of f32 may be flushed to zero.
    let least = smallest(dtype);
    let reached = y.abs() + off;
    if y.abs() < least { least } else { EVEN * ulp(dtype, if reached.is_finite() { reached } else { y }) }
}

/// The deviation of a function computed in `f32`. The argument of an exponential is scaled to a power of two first, which
/// is off by a unit of the argument. A composite may be computed by another formula, good to a few units of its argument:
/// `x` times a probability. The probability is then off by units of 1, however small the function in the graph is.
#[inline(always)]
pub(crate) fn function(op: UnaryOp, in_composite: bool, x: f64, y: f64) -> f64 {
    let units = match op {
        UnaryOp::Tanh | UnaryOp::Erf if in_composite => return 2.0 * UNIT,
        UnaryOp::Sigmoid if in_composite => return UNIT,
        UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Round => return 0.0,
        UnaryOp::Sqrt | UnaryOp::Reciprocal | UnaryOp::Log | UnaryOp::Rsqrt => 1.0,
        UnaryOp::Tanh | UnaryOp::Erf => 2.0,
        UnaryOp::Exp => 1.0 + x.abs() / 2.0,
        UnaryOp::Sigmoid => 2.0 + x.abs() * (1.0 - y) / 2.0,
    };
    let off = units * UNIT * y.abs();
    // Zero times an infinite argument.
    if off.is_nan() { 0.0 } else { off }
}

/// The deviation of a quotient computed in `f32` before it is stored.
#[inline(always)]
pub(crate) fn quotient(y: f64) -> f64 {
    UNIT * y.abs()
}

/// Additions that one partial sum of a row goes through.
pub(crate) fn row_steps(terms: usize) -> usize {
    terms.min(terms.div_ceil(LANES) + LANES.ilog2() as usize)
}

/// The variance that `steps` additions in `f32` add, per square of the magnitude of the sum: the larger of the sum and of the
/// root of the summed squares, which is what terms of random signs reach.
///
/// The square of a spacing is on average half of the largest at its magnitude. Partial sums are as large as the sum where the large
/// terms come first. Tensor cores, which `truncating` allows for, drop bits instead of rounding: off by a whole spacing at most.
pub(crate) fn accumulation(steps: usize, truncating: bool) -> f64 {
    let step = EVEN * Dtype::F32.epsilon();
    let share = if truncating { 1.0 } else { 0.5 };
    steps as f64 * step * step * share
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rounding_is_off_by_half_a_spacing_evenly() {
        // Between 1 and 2 the spacing is epsilon; the next numbers up have twice that.
        for dtype in Dtype::FLOATS {
            let epsilon = dtype.epsilon();
            assert_eq!(rounding(dtype, 1.0 + epsilon / 3.0, 0.0), epsilon / 12f64.sqrt());
            assert_eq!(rounding(dtype, 2.0 - epsilon / 3.0, epsilon), 2.0 * epsilon / 12f64.sqrt());
            assert_eq!(rounding(dtype, 1.5, 0.0), 0.0, "a number that fits");
            assert!(rounding(dtype, 1.5, epsilon) > 0.0, "unless it is off");
            assert_eq!(rounding(dtype, 0.0, epsilon), 0.0);
        }
        assert_eq!(rounding(Dtype::I8, 1.3, 1.0), 0.0);
        assert_eq!(rounding(Dtype::F32, 1e-42, 1e-50), f64::from(f32::MIN_POSITIVE), "it may be flushed");
    }

    /// Sums of random signs in `f32`, in the order of the terms, against the deviation that is expected of them.
    #[test]
    fn sums_are_off_by_what_is_said_of_them() {
        for terms in [16usize, 256, 4096] {
            let (mut squares, trials) = (0.0, 400);
            for trial in 0..trials {
                let values = crate::Array::normal([terms], trial).rounded(Dtype::F32).values;
                let exact: f64 = values.iter().sum();
                let sum = values.iter().fold(0f32, |sum, &x| sum + x as f32);
                let magnitude = values.iter().map(|x| x * x).sum::<f64>().max(exact * exact);
                squares += (f64::from(sum) - exact).powi(2) / (accumulation(terms, false) * magnitude);
            }
            let ratio = (squares / trials as f64).sqrt();
            assert!((0.4..1.3).contains(&ratio), "{terms} terms: {ratio} of the deviation");
            assert_eq!(accumulation(4 * terms, false), 4.0 * accumulation(terms, false), "a root of the terms");
        }
        assert_eq!((row_steps(7), row_steps(32), row_steps(768)), (6, 6, 29));
    }
}

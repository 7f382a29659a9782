//! The functions against `f64`, over strided sweeps of all `f32` and the special ones.

use deuteron_graph::UnaryOp;

use super::{TILE, apply};
use crate::cpu::program::{Inst, Src, TileUnary};
use crate::cpu::simd::{Isa, math};

/// Every 1021st bit pattern (a prime, so that all fraction bits vary), and the special ones.
fn inputs() -> Vec<f32> {
    let mut all: Vec<f32> = (0..=u32::MAX).step_by(1021).map(f32::from_bits).collect();
    let edges = [
        0.0,
        f32::from_bits(1),
        f32::from_bits(0x007f_ffff),
        f32::MIN_POSITIVE,
        1.0 - f32::EPSILON / 2.0,
        1.0,
        1.0 + f32::EPSILON,
        0.625,
        0.925,
        2.0,
        4.0,
        88.722_83,
        88.722_84,
        87.336_54,
        103.972_08,
        103.972_09,
        104.0,
        8_388_608.0,
        f32::MAX,
        f32::INFINITY,
    ];
    all.extend(edges.iter().flat_map(|&x| [x, -x]));
    all.push(f32::NAN);
    // Dense where the functions bend.
    all.extend((-200_000..200_000).map(|i| i as f32 * 6.1e-5));
    all
}

/// The distance of neighbouring floats at `exact`.
fn ulp(exact: f64) -> f64 {
    let size = (exact.abs() as f32).clamp(f32::MIN_POSITIVE, f32::MAX);
    // The exponent of the exact value, not of its rounding, which may be the next power of two.
    let exponent = if f64::from(size) > exact.abs() && exact.abs() >= f64::from(f32::MIN_POSITIVE) {
        size.next_down().to_bits() >> 23
    } else {
        size.to_bits() >> 23
    };
    f64::powi(2.0, exponent as i32 - 127 - 23)
}

/// The largest error over the inputs, in what `unit` says of (input, exact result).
#[track_caller]
fn worst(isa: Isa, op: TileUnary, exact: fn(f64) -> f64, unit: fn(f64, f64) -> f64) -> f64 {
    let inputs = inputs();
    let results = apply(isa, Inst::Unary { op, dst: TILE, a: Src::Arg(0) }, &[&inputs]);
    let mut worst = 0.0f64;
    let overflow = f64::from(f32::MAX) * (1.0 + f64::powi(2.0, -25));
    for (&x, &got) in inputs.iter().zip(&results) {
        let expected = exact(f64::from(x));
        if expected.is_nan() || got.is_nan() {
            assert!(
                expected.is_nan() && got.is_nan(),
                "{} {op:?}({x:e}): expected {expected:e}, got {got:e}",
                isa.name()
            );
        } else if expected.abs() >= overflow || got.is_infinite() {
            let near = (expected / overflow).abs() > 1.0 - 1e-7;
            let right = got == expected as f32 || (near && got.abs() == f32::MAX);
            assert!(right, "{} {op:?}({x:e}): expected {expected:e}, got {got:e}", isa.name());
        } else {
            let error = (f64::from(got) - expected).abs();
            if error > 0.0 {
                worst = worst.max(error / unit(f64::from(x), expected));
            }
        }
    }
    worst
}

fn check_ulp(op: UnaryOp, bound: f64, exact: fn(f64) -> f64) {
    check(TileUnary::Primitive(op), bound, exact, |_, expected| ulp(expected));
}

#[track_caller]
fn check(op: TileUnary, bound: f64, exact: fn(f64) -> f64, unit: fn(f64, f64) -> f64) {
    for isa in Isa::available() {
        let worst = worst(isa, op, exact, unit);
        println!("{op:?} {}: {worst:.3}", isa.name());
        assert!(worst <= bound, "{op:?} on {}: expected at most {bound}, got {worst}", isa.name());
    }
}

/// A denormal result may be 0.
fn normal_ulp(_: f64, expected: f64) -> f64 {
    if expected < f64::from(f32::MIN_POSITIVE) { f64::powi(2.0, -126) } else { ulp(expected) }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn gelu_tanh(x: f64) -> f64 {
    let t = 2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
    x / (1.0 + (-t).exp())
}

fn gelu_erf(x: f64) -> f64 {
    0.5 * x * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2)
}

#[test]
fn exp_keeps_its_bound() {
    check(TileUnary::Primitive(UnaryOp::Exp), math::EXP_ULP, f64::exp, normal_ulp);
}

#[test]
fn log_keeps_its_bound() {
    check_ulp(UnaryOp::Log, math::LOG_ULP, f64::ln);
}

#[test]
fn tanh_keeps_its_bound() {
    check_ulp(UnaryOp::Tanh, math::TANH_ULP, f64::tanh);
}

#[test]
fn erf_keeps_its_bound() {
    check_ulp(UnaryOp::Erf, math::ERF_ULP, libm::erf);
}

#[test]
fn sigmoid_keeps_its_bound() {
    check(TileUnary::Primitive(UnaryOp::Sigmoid), math::SIGMOID_ULP, sigmoid, normal_ulp);
}

#[test]
fn roots_and_reciprocals_keep_their_bounds() {
    check_ulp(UnaryOp::Rsqrt, math::RSQRT_ULP, |x| 1.0 / x.sqrt());
    check_ulp(UnaryOp::Sqrt, math::CORRECT_ULP, f64::sqrt);
    check_ulp(UnaryOp::Reciprocal, math::CORRECT_ULP, |x| 1.0 / x);
}

#[test]
fn simple_functions_are_exact() {
    check_ulp(UnaryOp::Neg, 0.0, |x| -x);
    check_ulp(UnaryOp::Abs, 0.0, f64::abs);
    check_ulp(UnaryOp::Round, 0.0, f64::round_ties_even);
}

/// Half an ulp of 1, times the input; never less than the smallest normal number.
fn half_ulps_of_input(x: f64, _: f64) -> f64 {
    (f64::powi(2.0, -24) * x.abs()).max(f64::powi(2.0, -126))
}

#[test]
fn silu_keeps_its_bound() {
    check(TileUnary::Silu, math::SILU_EPSILONS, |x| x * sigmoid(x), half_ulps_of_input);
}

#[test]
fn gelu_tanh_keeps_its_bound() {
    check(TileUnary::GeluTanh, math::GELU_EPSILONS, gelu_tanh, half_ulps_of_input);
}

#[test]
fn gelu_erf_keeps_its_bound() {
    check(TileUnary::GeluErf, math::GELU_EPSILONS, gelu_erf, half_ulps_of_input);
}

/// Arguments of one window.
const WINDOW: usize = 4096;

/// The mean error over windows of 1/8 between -4 and 4, each with its centre, in what `unit` says of (input, exact result). A fit that is off to one
/// side there shows, however small its largest error is beside a rounding; roundings average out.
fn biases(isa: Isa, op: TileUnary, exact: fn(f64) -> f64, unit: fn(f64, f64) -> f64) -> Vec<(f64, f64)> {
    let inputs: Vec<f32> = (0..64 * WINDOW).map(|i| -4.0 + (i as f32 + 0.5) / (8 * WINDOW) as f32).collect();
    let results = apply(isa, Inst::Unary { op, dst: TILE, a: Src::Arg(0) }, &[&inputs]);
    let errors: Vec<f64> = inputs
        .iter()
        .zip(&results)
        .map(|(&x, &got)| {
            let expected = exact(f64::from(x));
            (f64::from(got) - expected) / unit(f64::from(x), expected)
        })
        .collect();
    let windows = inputs.chunks(WINDOW).zip(errors.chunks(WINDOW));
    windows
        .map(|(inputs, errors)| (f64::from(inputs[WINDOW / 2]), errors.iter().sum::<f64>() / WINDOW as f64))
        .collect()
}

/// The analysis behind the bounds takes errors at different arguments as independent, so that those to one side must be below a
/// rounding. What is left where a bound is above 0.1 is of roundings: `1 / (1 + e)` for a small `e`, arguments with few bits.
#[test]
fn errors_are_not_to_one_side() {
    let half_ulps = |_, expected| ulp(expected) / 2.0;
    let primitive = TileUnary::Primitive;
    type Function = fn(f64) -> f64;
    type Unit = fn(f64, f64) -> f64;
    let all: [(TileUnary, Function, Unit, f64); 7] = [
        (TileUnary::Silu, |x| x * sigmoid(x), half_ulps_of_input, 0.1),
        (TileUnary::GeluTanh, gelu_tanh, half_ulps_of_input, 0.35),
        (TileUnary::GeluErf, gelu_erf, half_ulps_of_input, 0.1),
        (primitive(UnaryOp::Exp), f64::exp, half_ulps, 0.3),
        (primitive(UnaryOp::Tanh), f64::tanh, half_ulps, 0.1),
        (primitive(UnaryOp::Erf), libm::erf, half_ulps, 0.3),
        (primitive(UnaryOp::Sigmoid), sigmoid, half_ulps, 0.3),
    ];
    for isa in Isa::available() {
        for (op, exact, unit, bound) in all {
            let biases = biases(isa, op, exact, unit);
            let (at, bias) = *biases.iter().max_by(|a, b| a.1.abs().total_cmp(&b.1.abs())).expect("windows");
            println!("{op:?} {}: {bias:.3} at {at:.2}", isa.name());
            assert!(bias.abs() <= bound, "{op:?} on {} is off by {bias:.3} on average around {at:.2}", isa.name());
        }
    }
}

#[test]
fn special_values() {
    let inf = f32::INFINITY;
    for isa in Isa::available() {
        let at = |op: TileUnary, x: f32| apply(isa, Inst::Unary { op, dst: TILE, a: Src::Arg(0) }, &[&[x]])[0];
        for op in [TileUnary::GeluTanh, TileUnary::GeluErf, TileUnary::Silu] {
            assert_eq!(at(op, inf), inf, "{op:?} on {}", isa.name());
            assert!(at(op, -inf).is_nan(), "{op:?} on {}", isa.name());
            assert_eq!(at(op, -1e30), 0.0, "{op:?} on {}", isa.name());
            assert_eq!(at(op, 0.0).to_bits(), 0, "{op:?} on {}", isa.name());
        }
        let primitive = TileUnary::Primitive;
        assert_eq!(at(primitive(UnaryOp::Exp), 0.0), 1.0);
        assert_eq!(at(primitive(UnaryOp::Log), 1.0).to_bits(), 0);
        assert_eq!(at(primitive(UnaryOp::Tanh), -0.0).to_bits(), (-0.0f32).to_bits());
        assert_eq!(at(primitive(UnaryOp::Erf), -0.0).to_bits(), (-0.0f32).to_bits());
        assert_eq!(at(primitive(UnaryOp::Round), -0.3).to_bits(), (-0.0f32).to_bits());
        assert_eq!(at(primitive(UnaryOp::Sigmoid), -inf), 0.0);
        assert_eq!(at(primitive(UnaryOp::Rsqrt), 0.0), inf);
    }
}

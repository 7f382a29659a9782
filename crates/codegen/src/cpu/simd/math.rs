//! Functions of one lane, written once for every instruction set.
//!
//! Errors are in units in the last place of the exact result (2^-149 where that is denormal), on every instruction set.
//! They were measured on every 53rd of all `f32`; the tests sweep every 1021st. Compounds are bounded relative to `|x|`.
//! NaN gives NaN. Denormal results are correct, except in `exp`, `sigmoid`, `silu` and the GELUs, where they are or may be 0.
//!
//! The coefficients are minimax fits of our own: Lawson's reweighted least squares on 600 Chebyshev nodes, the weight
//! being the one that makes the error relative to the function (targets from 40-digit arithmetic), then rounded to
//! `f32`. The error of each fit stands beside it, in units of 2^-24, half an ulp of 1.

use std::f32::consts::LOG2_E;

use super::lanes::Arithmetic;

/// Bound of `exp`, in ulp, where the result is normal; 0 below. With a fused multiply-add it is 0.9. It overflows to
/// infinity from 88.7228394 on, as the exact one.
pub const EXP_ULP: f64 = 1.5;
/// Bound of `log`, in ulp. `log(0) = -inf`, negative arguments give NaN.
pub const LOG_ULP: f64 = 1.0;
/// Bound of `sigmoid`, in ulp, where the result is normal; below, its error is at most 2^-126.
pub const SIGMOID_ULP: f64 = 2.5;
/// Bound of `tanh`, in ulp.
pub const TANH_ULP: f64 = 2.0;
/// Bound of `erf`, in ulp.
pub const ERF_ULP: f64 = 2.0;
/// Bound of `1 / sqrt(x)`, in ulp: two roundings.
pub const RSQRT_ULP: f64 = 1.5;
/// Bound of `sqrt` and of `1 / x`, in ulp: they round correctly.
pub const CORRECT_ULP: f64 = 0.5;
/// Bound of `silu`: the error is at most this times `2^-24 |x|`, and never more than `2^-126 |x|` beyond that.
pub const SILU_EPSILONS: f64 = 3.0;
/// Bound of both GELUs: the error is at most this times `2^-24 |x|`.
///
/// That is 1.5 ulp to 3 ulp of the result for positive `x`. In the negative tail it is an absolute error, as in every
/// `f32` implementation that multiplies `x` by a probability; ours decays with the tail and never changes sign.
/// `gelu(inf) = inf`; `gelu(-inf)` is `-inf * 0`, a NaN.
pub const GELU_EPSILONS: f64 = 3.0;

/// Horner's rule; the constant term comes first.
#[inline(always)]
fn polynomial<S: Arithmetic, const N: usize>(simd: S, x: S::Float, coefficients: [f32; N]) -> S::Float {
    let mut sum = simd.splat(coefficients[N - 1]);
    let mut k = N - 1;
    while k > 0 {
        k -= 1;
        sum = simd.mul_add(sum, x, simd.splat(coefficients[k]));
    }
    sum
}

/// `e^x = 2^n e^r`, with `n = round(x / ln 2)`, so that `|r| <= ln(2) / 2`.
#[inline(always)]
pub fn exp<S: Arithmetic>(simd: S, x: S::Float) -> S::Float {
    // Below -126 ln 2 the result would be denormal and is 0: a denormal costs every instruction set a trap, and
    // half of the scores under a causal mask are `-inf`. Above 89 it is infinite. NaN passes.
    let least = simd.splat(-87.336_54);
    let given = x;
    let x = simd.lesser(simd.splat(89.0), simd.greater(least, x));
    // Adding 1.5 * 2^23 rounds to a whole number, in one instruction less than rounding.
    let magic = simd.splat(12_582_912.0);
    let n = simd.sub(simd.mul_add(x, simd.splat(LOG2_E), magic), magic);
    // ln 2 in two parts, the first with 9 zero bits at its end, so that n times it is exact without an FMA as well.
    let r = simd.neg_mul_add(n, simd.splat(0.693_359_4), x);
    let r = simd.neg_mul_add(n, simd.splat(-2.121_944_4e-4), r);
    // 1, 1, and (e^r - 1 - r) / r^2; error 0.05.
    let p = polynomial(simd, r, [1.0, 1.0, 0.499_999_94, 0.166_665_2, 0.041_668_393, 0.008_368_781, 0.001_381_446_7]);
    simd.select(simd.less(given, least), simd.splat(0.0), simd.scale(p, n))
}

/// `2^y` to a relative error of 2 * 2^-24, below -126 0 or about the smallest normal number; the exponential of everything that adds 1 to it.
#[inline(always)]
fn exp2_quick<S: Arithmetic>(simd: S, y: S::Float) -> S::Float {
    let y = simd.clamp_exponent(y);
    // 2^f on [0, 1]; error 0.04. One coefficient less costs an error of 1.3, the same one wherever the fraction is the same, which
    // a mean over rows does not average out.
    let p = polynomial(
        simd,
        simd.fraction(y),
        [1.0, 0.693_147_06, 0.240_229_09, 0.055_486_184, 0.009_673_775, 0.001_248_229, 2.156_597_2e-4],
    );
    simd.scale_by_floor(p, y)
}

/// `2^y` as `exp2_quick`, 0 below -126.
#[inline(always)]
pub fn exp2<S: Arithmetic>(simd: S, y: S::Float) -> S::Float {
    simd.select(simd.less(y, simd.splat(-126.0)), simd.splat(0.0), exp2_quick(simd, y))
}

/// `log x = e ln 2 + log m`, with `m` in `[sqrt(1/2), sqrt 2)`.
#[inline(always)]
pub fn log<S: Arithmetic>(simd: S, x: S::Float) -> S::Float {
    let denormal = simd.less(x, simd.splat(f32::MIN_POSITIVE));
    let scaled = simd.select(denormal, simd.mul(x, simd.splat(8_388_608.0)), x);
    let shift = simd.select(denormal, simd.splat(-23.0), simd.splat(0.0));
    let bits = simd.bits(scaled);
    let exponent = simd.shift_right_signed::<23>(simd.sub_int(bits, simd.splat_int(0x3f35_04f3)));
    let m = simd.reinterpret(simd.sub_int(bits, simd.shift_left::<23>(exponent)));
    let e = simd.add(simd.to_float(exponent), shift);

    let f = simd.sub(m, simd.splat(1.0));
    // (log(1 + f) - f + f^2 / 2) / f^3; error 0.01.
    let p = polynomial(
        simd,
        f,
        [
            0.333_333_13,
            -0.250_000_1,
            0.200_021_19,
            -0.166_679_96,
            0.142_195_52,
            -0.124_055_89,
            0.118_881_63,
            -0.116_756_51,
            0.067_466_386,
        ],
    );
    let square = simd.mul(f, f);
    let tail = simd.mul_add(simd.mul(square, f), p, simd.mul(e, simd.splat(-2.121_944_4e-4)));
    let tail = simd.mul_add(square, simd.splat(-0.5), tail);
    let result = simd.mul_add(e, simd.splat(0.693_359_4), simd.add(f, tail));

    let zero = simd.splat(0.0);
    let result = simd.select(simd.less(x, simd.splat(f32::INFINITY)), result, x);
    let result = simd.select(simd.equal(x, zero), simd.splat(f32::NEG_INFINITY), result);
    simd.select(simd.less(x, zero), simd.splat(f32::NAN), result)
}

#[inline(always)]
pub(super) fn sigmoid<S: Arithmetic>(simd: S, x: S::Float) -> S::Float {
    let e = exp(simd, simd.neg(x));
    simd.reciprocal_from_one(simd.add(simd.splat(1.0), e))
}

/// `1 - 2 / (e^2a + 1)` for large `a = |x|`, a polynomial below, where the difference would cancel.
#[inline(always)]
pub fn tanh<S: Arithmetic>(simd: S, x: S::Float) -> S::Float {
    let a = simd.abs(x);
    let e = exp(simd, simd.add(a, a));
    let d = simd.reciprocal_from_one(simd.add(e, simd.splat(1.0)));
    let large = simd.neg_mul_add(d, simd.splat(2.0), simd.splat(1.0));
    // (tanh(a) - a) / a^3 on [0, 0.625], in a^2; error 0.003.
    let square = simd.mul(a, a);
    let p = polynomial(
        simd,
        square,
        [-0.333_333_3, 0.133_332_06, -0.053_946_763, 0.021_700_703, -0.008_177_399, 0.002_142_962],
    );
    let small = simd.mul_add(simd.mul(square, a), p, a);
    copy_sign(simd, simd.select(simd.less(a, simd.splat(0.625)), small, large), x)
}

/// `1 - erfc(a)` for large `a = |x|`, where the logarithm of `erfc` is close to a polynomial; another one below.
#[inline(always)]
pub(super) fn erf<S: Arithmetic>(simd: S, x: S::Float) -> S::Float {
    let a = simd.abs(x);
    let bounded = simd.lesser(simd.splat(4.0), a);
    // log2(erfc(a)) on [0.92, 4]; error 0.03. erfc(4) is a quarter of an ulp of 1.
    let power = polynomial(
        simd,
        bounded,
        [-2.822_992_7e-4, -1.626_892_1, -0.919_259_67, -0.149_941_61, 0.032_066_673, -0.004_390_435_8, 2.826_778e-4],
    );
    let large = copy_sign(simd, simd.sub(simd.splat(1.0), exp2_quick(simd, power)), x);
    // erf(a) / a - 1 on [0, 0.93], in a^2; error 0.01.
    let square = simd.mul(x, x);
    let p = polynomial(
        simd,
        square,
        [0.128_379_17, -0.376_126_32, 0.112_836_875, -0.026_858_943, 0.005_199_908, -8.130_024_7e-4, 8.316_817e-5],
    );
    let small = simd.mul_add(x, p, x);
    simd.select(simd.less(a, simd.splat(0.925)), small, large)
}

#[inline(always)]
pub(super) fn rsqrt<S: Arithmetic>(simd: S, x: S::Float) -> S::Float {
    simd.div(simd.splat(1.0), simd.sqrt(x))
}

#[inline(always)]
pub(super) fn reciprocal<S: Arithmetic>(simd: S, x: S::Float) -> S::Float {
    simd.div(simd.splat(1.0), x)
}

#[inline(always)]
pub(super) fn silu<S: Arithmetic>(simd: S, x: S::Float) -> S::Float {
    // Where the exponent's rounding shows, the result is a small part of x: the quick exponential is good enough.
    let e = exp2_quick(simd, simd.mul(x, simd.splat(-LOG2_E)));
    simd.mul(x, simd.reciprocal_from_one(simd.add(simd.splat(1.0), e)))
}

/// `x / (1 + 2^-y)`, with `y = 2 log2(e) sqrt(2/pi) (x + 0.044715 x^3)`.
#[inline(always)]
pub(super) fn gelu_tanh<S: Arithmetic>(simd: S, x: S::Float) -> S::Float {
    // -2 log2(e) sqrt(2/pi), and 0.044715 times it.
    const LINEAR: f32 = -2.302_208_2;
    const CUBIC: f32 = -0.102_943_24;
    let y = simd.mul(x, simd.mul_add(simd.mul(x, x), simd.splat(CUBIC), simd.splat(LINEAR)));
    let d = simd.add(simd.splat(1.0), exp2_quick(simd, y));
    simd.mul(x, simd.reciprocal_from_one(d))
}

/// `x P(N < x)` for a normal `N`. The smaller of the two tails is `2^p(|x|)`, the other one is 1 less that.
#[inline(always)]
pub(super) fn gelu_erf<S: Arithmetic>(simd: S, x: S::Float) -> S::Float {
    // log2(erfc(a / sqrt 2) / 2) on [0, 5.5]; error 0.09 times the tail, or times 1/256 where that is larger. It falls
    // on beyond 5.5, where the tail is under 2^-25.
    let power = polynomial(
        simd,
        simd.abs(x),
        [
            -1.0,
            -1.151_104_3,
            -0.459_221_4,
            -0.052_431_382,
            0.006_915_855_7,
            4.294_813_7e-5,
            -3.111_832_2e-4,
            8.955_34e-5,
            -1.405_609_9e-5,
            1.244_067_8e-6,
            -4.855_861e-8,
        ],
    );
    let tail = exp2(simd, power);
    let below = simd.select(simd.less(simd.splat(0.0), x), simd.sub(simd.splat(1.0), tail), tail);
    simd.mul(x, below)
}

#[inline(always)]
fn copy_sign<S: Arithmetic>(simd: S, size: S::Float, sign: S::Float) -> S::Float {
    let bit = simd.and(simd.bits(sign), simd.splat_int(i32::MIN));
    simd.reinterpret(simd.or(simd.bits(size), bit))
}

/// The nearest `i32`, ties to even, saturating; NaN becomes 0.
#[inline(always)]
pub(super) fn to_nearest_int<S: Arithmetic>(simd: S, x: S::Float) -> S::Int {
    // Two halves of 16 bits, because not every machine converts numbers beyond 2^21. Both are exact.
    let whole = simd.round(x);
    let high = simd.floor(simd.mul(whole, simd.splat(1.0 / 65_536.0)));
    let low = simd.neg_mul_add(high, simd.splat(65_536.0), whole);
    let near = simd.add_int(simd.shift_left::<16>(simd.to_int(high)), simd.to_int(low));
    let limit = simd.splat(2_147_483_648.0);
    let below = simd.select_int(simd.less(x, simd.neg(limit)), simd.splat_int(i32::MIN), near);
    let above = simd.select_int(simd.less_or_equal(limit, x), simd.splat_int(i32::MAX), below);
    simd.select_int(simd.equal(x, x), above, simd.splat_int(0))
}

/// The low halves of 64-bit products.
#[inline(always)]
pub(super) fn mul_int<S: Arithmetic>(simd: S, a: S::Int, b: S::Int) -> S::Int {
    let odd = simd.mul_even(simd.odd_to_even(a), simd.odd_to_even(b));
    simd.alternate(simd.mul_even(a, b), odd)
}

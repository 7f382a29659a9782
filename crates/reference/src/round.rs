//! Rounding of an `f64` to what a dtype stores: nearest, ties to even, in one step.
//!
//! `f64 -> f32 -> f16` would round twice and miss ties; here every format rounds once, directly.

use deuteron_graph::Dtype;

/// A binary float format.
struct Format {
    /// Bits after the leading one.
    fraction_bits: i32,
    /// Exponent of the smallest normal number.
    least_exponent: i32,
    /// The largest finite number.
    largest: f64,
    /// Whether what is larger becomes the largest number instead of infinity.
    saturates: bool,
}

const F16: Format = Format { fraction_bits: 10, least_exponent: -14, largest: 65504.0, saturates: false };
const BF16: Format =
    Format { fraction_bits: 7, least_exponent: -126, largest: 255.0 * (1u128 << 120) as f64, saturates: false };
const F8E4M3: Format = Format { fraction_bits: 3, least_exponent: -6, largest: 448.0, saturates: true };

/// The value that storing `x` as `dtype` leaves. `i8` saturates and takes NaN to 0; `f8e4m3` saturates at 448.
#[inline]
pub fn round_to(dtype: Dtype, x: f64) -> f64 {
    match dtype {
        Dtype::F32 => x as f32 as f64,
        Dtype::F16 => F16.round(x),
        Dtype::Bf16 => BF16.round(x),
        Dtype::F8e4m3 => F8E4M3.round(x),
        Dtype::I8 => x.round_ties_even() as i8 as f64,
        Dtype::I32 => x.round_ties_even() as i32 as f64,
        Dtype::Bool => (x != 0.0) as u8 as f64,
    }
}

/// Rounds all values in place.
pub fn round_slice(dtype: Dtype, values: &mut [f64]) {
    // One match outside of the loop, so that each loop is a straight line.
    match dtype {
        Dtype::F32 => values.iter_mut().for_each(|x| *x = *x as f32 as f64),
        Dtype::F16 => values.iter_mut().for_each(|x| *x = F16.round(*x)),
        Dtype::Bf16 => values.iter_mut().for_each(|x| *x = BF16.round(*x)),
        Dtype::F8e4m3 | Dtype::I8 | Dtype::I32 | Dtype::Bool => {
            values.iter_mut().for_each(|x| *x = round_to(dtype, *x));
        }
    }
}

/// The distance between neighbours of the format at the magnitude of `x`; 1 for integers.
#[inline]
pub fn ulp(dtype: Dtype, x: f64) -> f64 {
    match dtype {
        Dtype::F32 => power_of_two(exponent(x).clamp(-126, 127) - 23),
        Dtype::F16 => F16.quantum(x.abs().min(F16.largest)),
        Dtype::Bf16 => BF16.quantum(x.abs().min(BF16.largest)),
        Dtype::F8e4m3 => F8E4M3.quantum(x.abs().min(F8E4M3.largest)),
        Dtype::I8 | Dtype::I32 | Dtype::Bool => 1.0,
    }
}

/// The smallest magnitude that every kernel keeps apart from zero (GPUs and SIMD units may flush `f32` subnormals).
#[inline]
pub(crate) fn smallest(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 | Dtype::Bf16 => f32::MIN_POSITIVE as f64,
        Dtype::F16 => F16.quantum(0.0),
        Dtype::F8e4m3 => F8E4M3.quantum(0.0),
        Dtype::I8 | Dtype::I32 | Dtype::Bool => 0.0,
    }
}

impl Format {
    #[inline(always)]
    fn round(&self, x: f64) -> f64 {
        // Far above the largest number the trick below would overflow.
        if x.is_nan() {
            return x;
        }
        if x.abs() >= 2.0 * self.largest {
            return self.overflow(x);
        }
        // Adding 1.5 * 2^52 quanta leaves no bits below one quantum, and the addition rounds to nearest even.
        let shift = self.quantum(x) * (3u64 << 51) as f64;
        let rounded = (x + shift) - shift;
        if rounded.abs() > self.largest { self.overflow(x) } else { rounded.copysign(x) }
    }

    #[inline(always)]
    fn quantum(&self, x: f64) -> f64 {
        power_of_two(exponent(x).max(self.least_exponent) - self.fraction_bits)
    }

    fn overflow(&self, x: f64) -> f64 {
        if self.saturates { self.largest.copysign(x) } else { f64::INFINITY.copysign(x) }
    }
}

/// Floor of the binary logarithm of a normal `f64`; -1023 for zero and subnormals.
#[inline(always)]
fn exponent(x: f64) -> i32 {
    ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023
}

#[inline(always)]
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generator::Generator;

    /// All values of a format, from its definition, in rising order.
    fn all_positive(format: &Format) -> Vec<f64> {
        let mut values: Vec<f64> = Vec::new();
        let fractions = 1u64 << format.fraction_bits;
        let least = power_of_two(format.least_exponent - format.fraction_bits);
        values.extend((0..fractions).map(|fraction| fraction as f64 * least));
        for exponent in format.least_exponent.. {
            let step = power_of_two(exponent - format.fraction_bits);
            for fraction in 0..fractions {
                let value = (fractions + fraction) as f64 * step;
                if value > format.largest {
                    return values;
                }
                values.push(value);
            }
        }
        values
    }

    #[test]
    fn every_value_stays_and_every_midpoint_goes_to_even() {
        for (dtype, format) in [(Dtype::F16, F16), (Dtype::F8e4m3, F8E4M3)] {
            let values = all_positive(&format);
            for (position, pair) in values.windows(2).enumerate() {
                let middle = (pair[0] + pair[1]) / 2.0;
                let even = pair[position % 2];
                assert_eq!(round_to(dtype, pair[0]), pair[0]);
                assert_eq!(round_to(dtype, middle), even, "{dtype} between {} and {}", pair[0], pair[1]);
                assert_eq!(round_to(dtype, -middle), -even);
                // A bit above and below the tie, far below the precision of f32: rounding twice would miss it.
                assert_eq!(round_to(dtype, middle * (1.0 + f64::EPSILON)), pair[1]);
                assert_eq!(round_to(dtype, middle * (1.0 - f64::EPSILON)), pair[0]);
            }
        }
    }

    #[test]
    fn bf16_is_the_upper_half_of_f32() {
        let mut generator = Generator::new(3);
        for _ in 0..100_000 {
            let bits = generator.bits() as u32;
            let x = f32::from_bits(bits);
            if x.is_nan() {
                continue;
            }
            // Exact for f32 inputs: add half a unit less one plus the lowest kept bit, and cut.
            let expected = f32::from_bits(((bits as u64 + 0x7fff + ((bits >> 16) & 1) as u64) & 0xffff_0000) as u32);
            assert_eq!(round_to(Dtype::Bf16, x as f64), expected as f64, "{x:e}");
        }
        // Just above a tie, by less than f32 can tell.
        let tie = 1.0 + f64::powi(2.0, -8);
        assert_eq!(round_to(Dtype::Bf16, tie), 1.0);
        assert_eq!(round_to(Dtype::Bf16, tie + f64::powi(2.0, -40)), 1.0 + f64::powi(2.0, -7));
    }

    #[test]
    fn edges() {
        assert_eq!(round_to(Dtype::F16, 65519.999), 65504.0);
        assert_eq!(round_to(Dtype::F16, 65520.0), f64::INFINITY);
        assert_eq!(round_to(Dtype::F16, -1e300), f64::NEG_INFINITY);
        assert_eq!(round_to(Dtype::F16, f64::powi(2.0, -25)), 0.0);
        assert_eq!(round_to(Dtype::F16, f64::powi(2.0, -25) * 1.001), f64::powi(2.0, -24));
        assert!(round_to(Dtype::F16, f64::NAN).is_nan());
        assert!(round_to(Dtype::F16, -1e-300).is_sign_negative());
        assert_eq!(round_to(Dtype::Bf16, f64::MAX), f64::INFINITY);
        assert_eq!(round_to(Dtype::F32, 1e-50), 0.0);
        assert_eq!(round_to(Dtype::F8e4m3, 1e9), 448.0);
        assert_eq!(round_to(Dtype::F8e4m3, f64::NEG_INFINITY), -448.0);
        assert_eq!(round_to(Dtype::I8, 200.0), 127.0);
        assert_eq!(round_to(Dtype::I8, -200.0), -128.0);
        assert_eq!(round_to(Dtype::I8, f64::NAN), 0.0);
        assert_eq!(round_to(Dtype::I8, 2.5), 2.0);
        assert_eq!(round_to(Dtype::Bool, -0.5), 1.0);
    }

    #[test]
    fn an_ulp_is_the_distance_of_neighbours() {
        assert_eq!(ulp(Dtype::F32, 1.0), f32::EPSILON as f64);
        assert_eq!(ulp(Dtype::F16, 1.5), Dtype::F16.epsilon());
        assert_eq!(ulp(Dtype::Bf16, -3.0), 2.0 * Dtype::Bf16.epsilon());
        assert_eq!(ulp(Dtype::F16, 0.0), f64::powi(2.0, -24));
        assert_eq!(ulp(Dtype::F8e4m3, 448.0), 32.0);
        assert_eq!(ulp(Dtype::F16, 1e9), 32.0);
    }
}

//! Floats of at most 8 bits: what their bits stand for, and where their values lie.

/// What the patterns beyond the largest value are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Beyond {
    /// There are none.
    Nothing,
    /// All ones, of either sign, are NaN.
    Nan,
    /// The pattern of a negative zero is NaN.
    NanAtMinusZero,
    /// The largest exponent holds an infinity and NaN.
    Infinity,
}

/// A float with a sign, or none, and few bits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct SmallFloat {
    bits: u32,
    fraction: u32,
    bias: i32,
    pub largest: f64,
    beyond: Beyond,
}

impl SmallFloat {
    pub const E4M3: Self = SmallFloat { bits: 8, fraction: 3, bias: 7, largest: 448.0, beyond: Beyond::Nan };
    pub const E4M3_FNUZ: Self =
        SmallFloat { bits: 8, fraction: 3, bias: 8, largest: 240.0, beyond: Beyond::NanAtMinusZero };
    pub const E5M2: Self = SmallFloat { bits: 8, fraction: 2, bias: 15, largest: 57_344.0, beyond: Beyond::Infinity };
    pub const E5M2_FNUZ: Self =
        SmallFloat { bits: 8, fraction: 2, bias: 16, largest: 57_344.0, beyond: Beyond::NanAtMinusZero };
    pub const E2M1: Self = SmallFloat { bits: 4, fraction: 1, bias: 1, largest: 6.0, beyond: Beyond::Nothing };

    /// The value of a pattern.
    pub fn value_of_bits(self, pattern: u64) -> f64 {
        let sign_bit = 1 << (self.bits - 1);
        let (size, is_negative) = (pattern & (sign_bit - 1), pattern & sign_bit != 0);
        let fraction = size & ((1 << self.fraction) - 1);
        let exponent = (size >> self.fraction) as i32;
        let greatest = (sign_bit - 1) >> self.fraction;
        let is_nan = match self.beyond {
            Beyond::Nothing => false,
            Beyond::Nan => size == sign_bit - 1,
            Beyond::NanAtMinusZero => size == 0 && is_negative,
            Beyond::Infinity => size >> self.fraction == greatest && fraction > 0,
        };
        let share = fraction as f64 / f64::from(1 << self.fraction);
        let value = match exponent {
            _ if is_nan => f64::NAN,
            _ if self.beyond == Beyond::Infinity && size >> self.fraction == greatest => f64::INFINITY,
            0 => share * 2f64.powi(1 - self.bias),
            _ => (1.0 + share) * 2f64.powi(exponent - self.bias),
        };
        if is_negative { -value } else { value }
    }

    /// Logarithm of the least value with all of its fraction bits.
    pub fn least_exponent(self) -> i32 {
        1 - self.bias
    }

    /// How many bits a fraction has.
    pub fn fraction(self) -> i32 {
        self.fraction as i32
    }

    /// What a value beyond the largest becomes where it does not saturate.
    pub fn overflow(self) -> f64 {
        match self.beyond {
            Beyond::Infinity => f64::INFINITY,
            Beyond::Nan | Beyond::NanAtMinusZero => f64::NAN,
            Beyond::Nothing => self.largest,
        }
    }

    /// Whether it has a NaN.
    pub fn has_nan(self) -> bool {
        self.beyond != Beyond::Nothing
    }
}

/// The value of a pattern of 8 exponent bits without sign and fraction.
pub(crate) fn power_of_two(pattern: u64) -> f64 {
    if pattern & 0xff == 0xff { f64::NAN } else { 2f64.powi((pattern & 0xff) as i32 - 127) }
}

#[cfg(test)]
mod tests {
    use super::SmallFloat;

    #[test]
    fn patterns_stand_for_values() {
        let value = |format: SmallFloat, pattern: u64| format.value_of_bits(pattern);
        assert_eq!(value(SmallFloat::E4M3, 0x7e), 448.0);
        assert!(value(SmallFloat::E4M3, 0xff).is_nan());
        assert_eq!(value(SmallFloat::E4M3, 0x81), -2f64.powi(-9));
        assert_eq!(value(SmallFloat::E4M3_FNUZ, 0x7f), 240.0);
        assert!(value(SmallFloat::E4M3_FNUZ, 0x80).is_nan());
        assert_eq!(value(SmallFloat::E4M3_FNUZ, 0x01), 2f64.powi(-10));
        assert_eq!(value(SmallFloat::E5M2, 0x7b), 57_344.0);
        assert_eq!(value(SmallFloat::E5M2, 0xfc), f64::NEG_INFINITY);
        assert!(value(SmallFloat::E5M2, 0x7d).is_nan());
        assert_eq!(value(SmallFloat::E5M2_FNUZ, 0x7f), 57_344.0);
        assert_eq!(value(SmallFloat::E5M2_FNUZ, 0x01), 2f64.powi(-17));
        let all: Vec<f64> = (0..8).map(|pattern| value(SmallFloat::E2M1, pattern)).collect();
        assert_eq!(all, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
        assert_eq!(value(SmallFloat::E2M1, 15), -6.0);
    }
}

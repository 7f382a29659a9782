//! Element types: what a tensor stores, never what a kernel accumulates in.

use std::str::FromStr;

use crate::named;

named! {
    /// The storage type of a tensor's elements.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Dtype {
        /// 32-bit IEEE float.
        F32 = "f32",
        /// 16-bit IEEE float: 5 exponent bits, 10 fraction bits.
        F16 = "f16",
        /// The upper half of an `f32`: 8 exponent bits, 7 fraction bits.
        Bf16 = "bf16",
        /// Signed byte, the storage of quantised rows.
        I8 = "i8",
        /// 8-bit float, 4 exponent bits, 3 fraction bits, no infinity. Stores only.
        F8e4m3 = "f8e4m3",
        /// Indices: tokens, positions, seeds.
        I32 = "i32",
        /// One byte, 0 or 1.
        Bool = "bool",
    }
}

impl Dtype {
    /// The dtypes that arithmetic works on.
    pub const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::I8 | Dtype::F8e4m3 | Dtype::Bool => 1,
        }
    }

    /// Whether arithmetic works on it (`f8e4m3` is a store format only).
    pub fn is_float(self) -> bool {
        match self {
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => true,
            Dtype::I8 | Dtype::F8e4m3 | Dtype::I32 | Dtype::Bool => false,
        }
    }

    /// The spacing of values at 1; 1 for integers.
    pub fn epsilon(self) -> f64 {
        match self {
            Dtype::F32 => f64::powi(2.0, -23),
            Dtype::F16 => f64::powi(2.0, -10),
            Dtype::Bf16 => f64::powi(2.0, -7),
            Dtype::F8e4m3 => f64::powi(2.0, -3),
            Dtype::I8 | Dtype::I32 | Dtype::Bool => 1.0,
        }
    }
}

/// Rounds to `f32` so that further rounding to 16 bits gives the same as rounding the value directly (round to odd): a value between two neighbours becomes the
/// odd one, which is never a midpoint of two 16-bit values.
pub fn round_to_odd(value: f64) -> f32 {
    let near = value as f32;
    if f64::from(near) == value || value.is_nan() {
        return near;
    }
    // Bits of floats of one sign are in order of their magnitude.
    let towards_zero = near.to_bits() - u32::from(f64::from(near).abs() > value.abs());
    f32::from_bits(towards_zero | 1)
}

impl FromStr for Dtype {
    type Err = UnknownDtype;
    fn from_str(text: &str) -> Result<Self, UnknownDtype> {
        Dtype::find(text).ok_or_else(|| UnknownDtype(text.to_string()))
    }
}

/// An unknown dtype.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown dtype `{0}`; expected f32, f16, bf16, i8, f8e4m3, i32 or bool")]
pub struct UnknownDtype(pub String);

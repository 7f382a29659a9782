//! ONNX's element types, and the dtype of each in a graph.

use deuteron_graph::{Dtype, round_to_odd};
use half::{bf16, f16};

use crate::small_float::{SmallFloat, power_of_two};

/// An element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Element {
    F32,
    F16,
    Bf16,
    F64,
    F8e4m3,
    F8e4m3Fnuz,
    F8e5m2,
    F8e5m2Fnuz,
    F4e2m1,
    /// A power of two without sign.
    F8e8m0,
    I2,
    U2,
    I4,
    U4,
    I8,
    U8,
    I16,
    U16,
    I32,
    U32,
    I64,
    U64,
    Bool,
}

impl Element {
    /// From ONNX's number.
    pub fn from_number(number: i64) -> Option<Self> {
        Some(match number {
            1 => Element::F32,
            2 => Element::U8,
            3 => Element::I8,
            4 => Element::U16,
            5 => Element::I16,
            6 => Element::I32,
            7 => Element::I64,
            9 => Element::Bool,
            10 => Element::F16,
            11 => Element::F64,
            12 => Element::U32,
            13 => Element::U64,
            16 => Element::Bf16,
            17 => Element::F8e4m3,
            18 => Element::F8e4m3Fnuz,
            19 => Element::F8e5m2,
            20 => Element::F8e5m2Fnuz,
            21 => Element::U4,
            22 => Element::I4,
            23 => Element::F4e2m1,
            24 => Element::F8e8m0,
            25 => Element::U2,
            26 => Element::I2,
            _ => return None,
        })
    }

    /// That of a dtype of the graph.
    pub fn of(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Element::F32,
            Dtype::F16 => Element::F16,
            Dtype::Bf16 => Element::Bf16,
            Dtype::F8e4m3 => Element::F8e4m3,
            Dtype::I8 => Element::I8,
            Dtype::I32 => Element::I32,
            Dtype::Bool => Element::Bool,
        }
    }

    /// Its dtype in a graph: 64-bit floats become `f32`, all wider integers `i32`, bytes and parts of them `i8`. Small floats
    /// that a graph does not have become the next that holds all of their values.
    pub fn dtype(self) -> Dtype {
        match self {
            Element::F32 | Element::F64 | Element::F8e8m0 => Dtype::F32,
            Element::F16 | Element::F8e4m3Fnuz | Element::F8e5m2 | Element::F8e5m2Fnuz | Element::F4e2m1 => Dtype::F16,
            Element::Bf16 => Dtype::Bf16,
            Element::F8e4m3 => Dtype::F8e4m3,
            Element::I2 | Element::U2 | Element::I4 | Element::U4 | Element::I8 | Element::U8 => Dtype::I8,
            Element::I16 | Element::U16 | Element::I32 | Element::U32 | Element::I64 | Element::U64 => Dtype::I32,
            Element::Bool => Dtype::Bool,
        }
    }

    pub fn is_float(self) -> bool {
        matches!(self, Element::F32 | Element::F16 | Element::Bf16 | Element::F64)
    }

    /// What a small float is made of.
    pub fn small_float(self) -> Option<SmallFloat> {
        Some(match self {
            Element::F8e4m3 => SmallFloat::E4M3,
            Element::F8e4m3Fnuz => SmallFloat::E4M3_FNUZ,
            Element::F8e5m2 => SmallFloat::E5M2,
            Element::F8e5m2Fnuz => SmallFloat::E5M2_FNUZ,
            Element::F4e2m1 => SmallFloat::E2M1,
            _ => return None,
        })
    }

    /// The least and the largest value of an integer of at most 16 bits.
    pub fn range(self) -> Option<(f64, f64)> {
        Some(match self {
            Element::I2 => (-2.0, 1.0),
            Element::U2 => (0.0, 3.0),
            Element::I4 => (-8.0, 7.0),
            Element::U4 => (0.0, 15.0),
            Element::I8 => (-128.0, 127.0),
            Element::U8 => (0.0, 255.0),
            Element::I16 => (-32_768.0, 32_767.0),
            Element::U16 => (0.0, 65_535.0),
            _ => return None,
        })
    }

    /// Whether every value of another type with the same dtype is one of this.
    pub fn holds(self, other: Element) -> bool {
        match (self.range(), other.range()) {
            _ if self.dtype() != Dtype::I32 || self.bits() > 16 => true,
            (Some((least, most)), Some((low, high))) => least <= low && high <= most,
            _ => false,
        }
    }

    /// What it is in a graph whose floats all have one dtype.
    pub fn dtype_with(self, float: Option<Dtype>) -> Dtype {
        float.filter(|_| self.is_float()).unwrap_or(self.dtype())
    }

    /// What it is as an input of a graph: 8-bit floats, which a graph stores but does not read, are passed as 16-bit ones.
    pub fn input_dtype(self, float: Option<Dtype>) -> Dtype {
        match self.dtype_with(float) {
            Dtype::F8e4m3 => Dtype::F16,
            dtype => dtype,
        }
    }

    /// Bits of an element in the file.
    pub fn bits(self) -> usize {
        match self {
            Element::F64 | Element::I64 | Element::U64 => 64,
            Element::F32 | Element::I32 | Element::U32 => 32,
            Element::F16 | Element::Bf16 | Element::I16 | Element::U16 => 16,
            Element::F8e4m3 | Element::F8e4m3Fnuz | Element::F8e5m2 | Element::F8e5m2Fnuz | Element::F8e8m0 => 8,
            Element::I8 | Element::U8 | Element::Bool => 8,
            Element::F4e2m1 | Element::I4 | Element::U4 => 4,
            Element::I2 | Element::U2 => 2,
        }
    }

    /// Bytes of so many elements in the file: parts of bytes lie side by side, the first in the lowest bits.
    pub fn bytes_of(self, elements: usize) -> usize {
        elements.saturating_mul(self.bits()).div_ceil(8)
    }

    /// The values of elements from their bytes, at most `count`.
    pub fn values(self, bytes: &[u8], count: usize) -> impl ExactSizeIterator<Item = f64> {
        let bits = self.bits();
        (0..count.min(bytes.len() * 8 / bits)).map(move |index| match bits {
            8.. => self.decode(&bytes[index * (bits / 8)..][..bits / 8]),
            _ => self.value_of_bits(u64::from(bytes[index * bits / 8] >> (index * bits % 8))),
        })
    }

    /// The value of an element of whole bytes from these, little-endian.
    pub fn decode(self, bytes: &[u8]) -> f64 {
        let mut wide = [0; 8];
        wide[..bytes.len().min(8)].copy_from_slice(&bytes[..bytes.len().min(8)]);
        self.value_of_bits(u64::from_le_bytes(wide))
    }

    /// The value of an element from its bits, above which may be others.
    pub fn value_of_bits(self, bits: u64) -> f64 {
        let low = |width: u32| (bits << (64 - width)) as i64 >> (64 - width);
        match self {
            Element::F32 => f32::from_bits(bits as u32).into(),
            Element::F16 => f16::from_bits(bits as u16).into(),
            Element::Bf16 => bf16::from_bits(bits as u16).into(),
            Element::F64 => f64::from_bits(bits),
            Element::F8e4m3 => SmallFloat::E4M3.value_of_bits(bits),
            Element::F8e4m3Fnuz => SmallFloat::E4M3_FNUZ.value_of_bits(bits),
            Element::F8e5m2 => SmallFloat::E5M2.value_of_bits(bits),
            Element::F8e5m2Fnuz => SmallFloat::E5M2_FNUZ.value_of_bits(bits),
            Element::F4e2m1 => SmallFloat::E2M1.value_of_bits(bits),
            Element::F8e8m0 => power_of_two(bits),
            Element::I2 => low(2) as f64,
            Element::U2 => (bits & 3) as f64,
            Element::I4 => low(4) as f64,
            Element::U4 => (bits & 15) as f64,
            Element::I8 => (bits as i8).into(),
            Element::U8 => (bits as u8).into(),
            Element::I16 => (bits as i16).into(),
            Element::U16 => (bits as u16).into(),
            Element::I32 => (bits as i32).into(),
            Element::U32 => (bits as u32).into(),
            Element::I64 => bits as i64 as f64,
            Element::U64 => bits as f64,
            Element::Bool => f64::from(bits as u8 != 0),
        }
    }

    /// A computed value as this type holds it.
    pub fn round(self, value: f64) -> f64 {
        match self {
            Element::F32 => (value as f32).into(),
            Element::F16 => f16::from_f32(round_to_odd(value)).into(),
            Element::Bf16 => bf16::from_f32(round_to_odd(value)).into(),
            Element::F64 | Element::F8e4m3 | Element::F8e4m3Fnuz | Element::F8e5m2 | Element::F8e5m2Fnuz => value,
            Element::F4e2m1 | Element::F8e8m0 => value,
            Element::Bool => f64::from(value != 0.0),
            // What is beyond wraps.
            _ => match self.range() {
                Some((least, most)) => {
                    let (whole, span) = (value.trunc(), most - least + 1.0);
                    whole - span * ((whole - least) / span).floor()
                }
                None => value.trunc(),
            },
        }
    }

    /// Appends the bytes of a value as the graph's dtype stores it.
    pub fn encode(self, value: f64, into: &mut Vec<u8>) {
        encode(self.dtype(), value, into);
    }
}

/// Appends the bytes of a value in a dtype; integers beyond `i32` saturate.
pub(crate) fn encode(dtype: Dtype, value: f64, into: &mut Vec<u8>) {
    match dtype {
        Dtype::F32 => into.extend((value as f32).to_le_bytes()),
        Dtype::F16 => into.extend(f16::from_f32(round_to_odd(value)).to_le_bytes()),
        Dtype::Bf16 => into.extend(bf16::from_f32(round_to_odd(value)).to_le_bytes()),
        Dtype::I32 => into.extend((value as i32).to_le_bytes()),
        Dtype::I8 => into.push(value as i64 as u8),
        Dtype::F8e4m3 => into.push(f8e4m3_bits(value)),
        Dtype::Bool => into.push((value != 0.0) as u8),
    }
}

/// The shortest number that gives this `f32`: what was written as 1e-5 is 1e-5, not 9.99999974e-6.
pub(crate) fn as_written(value: f64) -> f64 {
    let narrow = value as f32;
    if f64::from(narrow) == value { narrow.to_string().parse().unwrap_or(value) } else { value }
}

/// The nearest of its values, of two the even one; beyond the largest, that one.
fn f8e4m3_bits(value: f64) -> u8 {
    if value.is_nan() {
        return 0x7f;
    }
    let size = value.abs();
    let nearest = (0..0x7f_u8).min_by(|&a, &b| {
        let distance = |bits: u8| (SmallFloat::E4M3.value_of_bits(bits.into()) - size).abs();
        distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))
    });
    nearest.unwrap_or(0) | if value.is_sign_negative() { 0x80 } else { 0 }
}

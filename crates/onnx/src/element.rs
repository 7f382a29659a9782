//! ONNX's element types, and the dtype of each in a graph.

use deuteron_graph::{Dtype, round_to_odd};
use half::{bf16, f16};

/// An element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Element {
    F32,
    F16,
    Bf16,
    F64,
    F8e4m3,
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

    /// Its dtype in a graph: 64-bit floats become `f32`, all wider integers `i32`, bytes `i8`.
    pub fn dtype(self) -> Dtype {
        match self {
            Element::F32 | Element::F64 => Dtype::F32,
            Element::F16 => Dtype::F16,
            Element::Bf16 => Dtype::Bf16,
            Element::F8e4m3 => Dtype::F8e4m3,
            Element::I8 | Element::U8 => Dtype::I8,
            Element::I16 | Element::U16 | Element::I32 | Element::U32 | Element::I64 | Element::U64 => Dtype::I32,
            Element::Bool => Dtype::Bool,
        }
    }

    pub fn is_float(self) -> bool {
        matches!(self, Element::F32 | Element::F16 | Element::Bf16 | Element::F64)
    }

    /// The least and the largest value of an integer of at most 16 bits.
    pub fn range(self) -> Option<(f64, f64)> {
        Some(match self {
            Element::I8 => (-128.0, 127.0),
            Element::U8 => (0.0, 255.0),
            Element::I16 => (-32_768.0, 32_767.0),
            Element::U16 => (0.0, 65_535.0),
            _ => return None,
        })
    }

    /// What it is in a graph whose floats all have one dtype.
    pub fn dtype_with(self, float: Option<Dtype>) -> Dtype {
        float.filter(|_| self.is_float()).unwrap_or(self.dtype())
    }

    /// Bytes of an element in the file.
    pub fn bytes(self) -> usize {
        match self {
            Element::F64 | Element::I64 | Element::U64 => 8,
            Element::F32 | Element::I32 | Element::U32 => 4,
            Element::F16 | Element::Bf16 | Element::I16 | Element::U16 => 2,
            Element::F8e4m3 | Element::I8 | Element::U8 | Element::Bool => 1,
        }
    }

    /// The value of an element from its little-endian bytes, of which there are [`Element::bytes`].
    pub fn decode(self, bytes: &[u8]) -> f64 {
        let mut wide = [0; 8];
        wide[..bytes.len().min(8)].copy_from_slice(&bytes[..bytes.len().min(8)]);
        self.value_of_bits(u64::from_le_bytes(wide))
    }

    /// The value of an element from its bits.
    pub fn value_of_bits(self, bits: u64) -> f64 {
        match self {
            Element::F32 => f32::from_bits(bits as u32).into(),
            Element::F16 => f16::from_bits(bits as u16).into(),
            Element::Bf16 => bf16::from_bits(bits as u16).into(),
            Element::F64 => f64::from_bits(bits),
            Element::F8e4m3 => f8e4m3(bits as u8),
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
            Element::F64 | Element::F8e4m3 => value,
            Element::Bool => f64::from(value != 0.0),
            _ => value.trunc(),
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

/// Sign, 4 exponent bits of bias 7, 3 fraction bits; all ones is NaN, there is no infinity.
fn f8e4m3(bits: u8) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 3 & 15), f64::from(bits & 7));
    let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
    match (exponent, bits & 7) {
        (15, 7) => f64::NAN,
        (0, _) => sign * fraction * f64::powi(2.0, -9),
        _ => sign * (1.0 + fraction / 8.0) * f64::powi(2.0, exponent - 7),
    }
}

/// The nearest of its values, of two the even one; beyond the largest, that one.
fn f8e4m3_bits(value: f64) -> u8 {
    if value.is_nan() {
        return 0x7f;
    }
    let size = value.abs();
    let nearest = (0..0x7f_u8).min_by(|&a, &b| {
        let distance = |bits: u8| (f8e4m3(bits) - size).abs();
        distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))
    });
    nearest.unwrap_or(0) | if value.is_sign_negative() { 0x80 } else { 0 }
}

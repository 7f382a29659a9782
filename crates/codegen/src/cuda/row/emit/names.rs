//! Names of types, operations and numbers in the text.

use deuteron_graph::{Activation, CompareOp, Dtype, ReduceOp};

/// What a value is in the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Float,
    Int,
    Truth,
}

/// The name of a storage type in [`PRELUDE`](super::PRELUDE).
pub fn type_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "F32",
        Dtype::F16 => "F16",
        Dtype::Bf16 => "Bf16",
        Dtype::I8 => "I8",
        Dtype::F8e4m3 => "F8",
        Dtype::I32 => "I32",
        Dtype::Bool => "Bool",
    }
}

pub(super) fn lane_type(kind: Kind) -> &'static str {
    match kind {
        Kind::Float => "F",
        Kind::Int => "I",
        Kind::Truth => "B",
    }
}

pub(super) fn scalar_type(kind: Kind) -> &'static str {
    match kind {
        Kind::Float => "float",
        Kind::Int => "int",
        Kind::Truth => "bool",
    }
}

pub(super) fn reduce_name(op: ReduceOp) -> &'static str {
    match op {
        ReduceOp::Sum | ReduceOp::Mean => "Sum",
        ReduceOp::Max => "Max",
        ReduceOp::AbsMax => "AbsMax",
        ReduceOp::ArgMax => "ArgMax",
    }
}

pub(super) fn shared_name(op: ReduceOp) -> &'static str {
    if op == ReduceOp::ArgMax { "s_best" } else { "s_reduce" }
}

/// The function of `prelude.cuh` that computes an activation as a whole.
pub(super) fn activation_name(activation: Activation) -> Option<&'static str> {
    match activation {
        Activation::GeluTanh => Some("gelu_tanh"),
        Activation::GeluErf => Some("gelu_erf"),
        Activation::Silu => Some("silu"),
        Activation::Relu => None,
    }
}

pub(super) fn compare_sign(op: CompareOp) -> &'static str {
    match op {
        CompareOp::Lt => "<",
        CompareOp::Le => "<=",
        CompareOp::Eq => "==",
        CompareOp::Ne => "!=",
        CompareOp::Gt => ">",
        CompareOp::Ge => ">=",
    }
}

/// Exact: numbers that are neither whole nor short are written as bits.
pub(super) fn float_literal(value: f32) -> String {
    if !value.is_finite() {
        return format!("__uint_as_float({:#010x}u)", value.to_bits());
    }
    // The shortest text that reads back as the same f32.
    format!("{value:e}f")
}

pub(super) fn int_literal(value: i32) -> String {
    if value == i32::MIN { "(-2147483647 - 1)".to_string() } else { format!("{value}") }
}

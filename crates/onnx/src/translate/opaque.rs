//! Opaque operators: their shapes and cost.

use deuteron_graph::Shape;

use super::{Call, Translator};
use crate::element::Element;

/// Operators that give each element from the same element of their operands.
const ELEMENTWISE: &[&str] = &[
    "Acos",
    "Acosh",
    "Asin",
    "Asinh",
    "Atan",
    "Atanh",
    "BitShift",
    "BitwiseAnd",
    "BitwiseNot",
    "BitwiseOr",
    "BitwiseXor",
    "Celu",
    "Cosh",
    "Elu",
    "HardSigmoid",
    "HardSwish",
    "LeakyRelu",
    "Mish",
    "PRelu",
    "Selu",
    "Shrink",
    "Sinh",
    "Softplus",
    "Softsign",
    "Swish",
    "Tan",
    "ThresholdedRelu",
];

/// Operators whose first result has the shape of the first operand.
const SAME_SHAPE: &[&str] = &[
    "BatchNormalization",
    "CumSum",
    "GroupNormalization",
    "Hardmax",
    "InstanceNormalization",
    "LpNormalization",
    "LRN",
    "RotaryEmbedding",
    "Scatter",
    "ScatterElements",
    "ScatterND",
    "TensorScatter",
    "GroupNorm",
];

/// Whether each element of the result depends on the same element of the operands alone.
pub(crate) fn is_elementwise(op: &str) -> bool {
    ELEMENTWISE.contains(&op)
}

/// One operation an element, for want of something better.
pub(crate) fn flops(results: &[(Element, Shape)]) -> u64 {
    results.iter().map(|(_, shape)| shape.elements() as u64).fold(0, u64::saturating_add)
}

impl Translator<'_, '_> {
    /// Type and shape of a result that the file does not state, where the operator's name is enough.
    pub(super) fn guessed(&self, call: &Call) -> Option<(Element, Shape)> {
        if call.node.outputs.iter().filter(|name| !name.is_empty()).count() != 1 {
            return None;
        }
        let operands = call.all();
        let first = *operands.first()?;
        if is_elementwise(call.node.op) {
            let mut shapes = operands.iter().map(|&id| self.ir.shape(id));
            let shape = shapes.try_fold(Shape::scalar(), |common, shape| common.broadcast(shape))?;
            return Some((self.ir.element(first), shape));
        }
        let same = |result: Element| Some((result, self.ir.shape(first).clone()));
        match call.node.op {
            op if SAME_SHAPE.contains(&op) => same(self.ir.element(first)),
            "QuantizeLinear" => same(self.ir.element(*operands.get(2).unwrap_or(&first))),
            "DequantizeLinear" => same(self.ir.element(*operands.get(1)?)),
            "GatherElements" => Some((self.ir.element(first), self.ir.shape(*operands.get(1)?).clone())),
            _ => None,
        }
    }
}

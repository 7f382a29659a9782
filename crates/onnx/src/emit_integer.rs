//! Integers and truth values in a graph that computes with floats.

use deuteron_graph::{BinaryOp, CompareOp, Dtype, GraphError, NodeId};

use crate::element::Element;
use crate::emit::{Emitter, unsupported};
use crate::ir::{Id, Kind, Reduction};

impl Emitter<'_> {
    /// Of two integers the one that compares.
    pub(crate) fn larger(&mut self, op: CompareOp, a: NodeId, b: NodeId) -> Result<NodeId, GraphError> {
        let is_first = self.graph.compare(op, a, b)?;
        self.graph.select(is_first, a, b)
    }

    /// Bytes and truth values as floats.
    pub(crate) fn byte_value(&mut self, x: NodeId, element: Element) -> Result<NodeId, GraphError> {
        self.cast(x, element, Element::F32)
    }

    /// Truth values and bytes are selected as floats.
    pub(crate) fn select(&mut self, operands: &[NodeId], element: Element) -> Result<NodeId, GraphError> {
        let dtype = element.dtype();
        if !matches!(dtype, Dtype::Bool | Dtype::I8) {
            return self.graph.select(operands[0], operands[1], operands[2]);
        }
        let (a, b) = (self.graph.cast(operands[1], Dtype::F32)?, self.graph.cast(operands[2], Dtype::F32)?);
        let chosen = self.graph.select(operands[0], a, b)?;
        if dtype == Dtype::I8 { self.graph.cast(chosen, dtype) } else { self.cast(chosen, Element::F32, element) }
    }

    /// Bytes are computed with as floats, which hold all sums and products of two of them; the results wrap.
    pub(crate) fn byte_arithmetic(&mut self, id: Id, operands: &[NodeId]) -> Result<NodeId, GraphError> {
        let node = self.ir.node(id);
        let mut floats = Vec::with_capacity(operands.len());
        for (&operand, &input) in operands.iter().zip(&node.inputs) {
            floats.push(self.byte_value(operand, self.ir.element(input))?);
        }
        let result = match (&node.kind, &floats[..]) {
            (Kind::Unary(op), &[x]) => self.graph.unary(*op, x)?,
            (Kind::Binary(op), &[a, b]) => {
                let result = self.graph.binary(*op, a, b)?;
                if *op == BinaryOp::Div { self.trunc(result)? } else { result }
            }
            (Kind::Function(function), floats) => self.function(*function, floats)?,
            (Kind::Reduce { op: op @ Reduction::ArgMax, axes, .. }, &[x]) => {
                return self.reduce(x, *op, axes, &node.shape);
            }
            (Kind::Reduce { op: op @ (Reduction::Max | Reduction::Min), axes, .. }, &[x]) => {
                self.reduce(x, *op, axes, &node.shape)?
            }
            _ => return Err(unsupported("sums of bytes are not a primitive")),
        };
        self.wrapped_byte(result)
    }

    /// The lowest 8 bits of a whole number.
    fn wrapped_byte(&mut self, x: NodeId) -> Result<NodeId, GraphError> {
        let above = self.plus(x, 128.0)?;
        let share = self.graph.scale(above, 1.0 / 256.0)?;
        let turns = self.floor(share)?;
        let excess = self.graph.scale(turns, 256.0)?;
        let signed = self.graph.sub(x, excess)?;
        self.graph.cast(signed, Dtype::I8)
    }

    /// An unsigned byte is stored as the signed one of the same bits.
    pub(crate) fn cast(&mut self, x: NodeId, from: Element, to: Element) -> Result<NodeId, GraphError> {
        let (own, target) = (self.graph.node(x).dtype, self.dtype(to));
        if from == Element::U8 && target.is_float() {
            let signed = self.graph.cast(x, target)?;
            let wrap = self.graph.constant(256.0, target)?;
            let upper = self.graph.add(signed, wrap)?;
            let zero = self.graph.constant(0.0, target)?;
            let is_upper = self.graph.compare(CompareOp::Lt, signed, zero)?;
            return self.graph.select(is_upper, upper, signed);
        }
        if to == Element::U8 && own.is_float() {
            let whole = self.trunc_of(x)?;
            let wrap = self.graph.constant(-256.0, own)?;
            let lower = self.graph.add(whole, wrap)?;
            let most = self.graph.constant(127.0, own)?;
            let is_upper = self.graph.compare(CompareOp::Gt, whole, most)?;
            let signed = self.graph.select(is_upper, lower, whole)?;
            return self.graph.cast(signed, Dtype::I8);
        }
        if to == Element::I8 && own.is_float() {
            let whole = self.trunc_of(x)?;
            return self.graph.cast(whole, Dtype::I8);
        }
        match (own, target) {
            (same, dtype) if same == dtype => {
                let shape = self.graph.node(x).shape.clone();
                self.graph.reshape(x, shape)
            }
            (dtype, Dtype::Bool) if dtype.is_float() || dtype == Dtype::I32 => {
                let zero = self.graph.constant(0.0, dtype)?;
                self.graph.compare(CompareOp::Ne, x, zero)
            }
            (Dtype::Bool, Dtype::I32) => {
                let one = self.graph.constant(1.0, Dtype::I32)?;
                let zero = self.graph.constant(0.0, Dtype::I32)?;
                self.graph.select(x, one, zero)
            }
            _ if from == Element::U8 || to == Element::U8 => Err(unsupported("unsigned bytes are not computed with")),
            (dtype, Dtype::I32) if dtype.is_float() => {
                Err(unsupported("a cast from floats to integers is not a primitive"))
            }
            (_, dtype) => self.graph.cast(x, dtype),
        }
    }

    /// Towards zero, where the value is not whole already.
    pub(crate) fn trunc_of(&mut self, x: NodeId) -> Result<NodeId, GraphError> {
        match self.graph.node(x).dtype {
            Dtype::F32 => self.trunc(x),
            dtype => {
                let wide = self.graph.cast(x, Dtype::F32)?;
                let whole = self.trunc(wide)?;
                self.graph.cast(whole, dtype)
            }
        }
    }
}

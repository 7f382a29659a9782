//! Quantised values. A value that is quantised and read back stays a float that was rounded and clipped; only one that
//! something else reads is stored as bytes.

use deuteron_graph::{BinaryOp, Shape, UnaryOp};

use super::call::{Results, axis_of};
use super::{Call, Problem, Translator};
use crate::element::Element;
use crate::ir::{Id, Kind, Reduction};

impl<'a> Translator<'a, '_> {
    pub(super) fn quantize(&mut self, call: &Call<'a, '_>) -> Results {
        match call.node.op {
            "QuantizeLinear" => Ok(vec![self.quantize_linear(call)?]),
            "DequantizeLinear" => Ok(vec![self.dequantize_linear(call)?]),
            _ => self.dynamic_quantize(call),
        }
    }

    /// Scale or zero point as it meets `x`: one value, one per index of an axis, or one per block of an axis.
    fn spread(&mut self, call: &Call, x: Id, of: Id) -> Result<Id, Problem> {
        let (shape, own) = (self.ir.shape(x).clone(), self.ir.shape(of).clone());
        let block = usize::try_from(call.int("block_size", 0)).unwrap_or(0);
        let axis = call.int("axis", 1);
        if own.elements() == 1 {
            return Ok(self.ir.reshape(of, Vec::new())?);
        }
        let axis = axis_of(axis, shape.rank())?;
        if own.rank() == 1 && own[0] == shape[axis] {
            return Ok(self.ir.along(of, axis, shape.rank())?);
        }
        let fits = block > 0
            && own.rank() == shape.rank()
            && shape.rank() < deuteron_graph::MAX_RANK
            && shape[axis].div_ceil(block) == own[axis];
        if !fits {
            return Err(Problem::Refused(format!(
                "one scale, one per index of axis {axis} or one per block of {shape} expected, got {own}"
            )));
        }
        let (mut single, mut many, mut joined) = (own.to_vec(), own.to_vec(), own.to_vec());
        single.insert(axis + 1, 1);
        many.insert(axis + 1, block);
        joined[axis] *= block;
        let split = self.ir.reshape(of, single)?;
        let repeated = self.ir.broadcast(split, &Shape::new(many))?;
        let repeated = self.ir.reshape(repeated, joined)?;
        Ok(self.ir.push(Kind::Slice { axis, start: 0, length: shape[axis] }, &[repeated])?)
    }

    /// The numbers that quantised values are.
    fn as_float(&mut self, x: Id, element: Element) -> Result<Id, Problem> {
        match self.floats.get(&x) {
            Some(&float) => Ok(float),
            None => Ok(self.ir.cast(x, element)?),
        }
    }

    fn dequantize_linear(&mut self, call: &Call) -> Result<Id, Problem> {
        let (x, scale) = (call.input(0)?, call.input(1)?);
        let element = self.ir.element(scale);
        let wanted = call.int("output_dtype", 0);
        if wanted != 0 && Element::from_number(wanted) != Some(element) {
            return Err(Problem::Opaque(format!("it gives ONNX element type {wanted}, not that of its scale")));
        }
        let mut result = self.as_float(x, element)?;
        if let Some(zero) = call.optional(2)
            && self.ir.scalar(zero) != Some(0.0)
        {
            let zero = self.as_float(zero, element)?;
            let zero = self.spread(call, x, zero)?;
            result = self.ir.binary(BinaryOp::Sub, result, zero)?;
        }
        let scale = self.spread(call, x, scale)?;
        Ok(self.ir.binary(BinaryOp::Mul, result, scale)?)
    }

    fn quantize_linear(&mut self, call: &Call) -> Result<Id, Problem> {
        let (x, scale) = (call.input(0)?, call.input(1)?);
        let zero = call.optional(2);
        let wanted = call.int("output_dtype", 0);
        let to = match (zero, Element::from_number(wanted)) {
            (Some(zero), _) => self.ir.element(zero),
            (None, Some(element)) => element,
            (None, None) if wanted == 0 => Element::U8,
            _ => return Err(Problem::Opaque(format!("it gives ONNX element type {wanted}, which is not known"))),
        };
        let precision = call.int("precision", 0);
        if precision != 0 && Element::from_number(precision) != Some(Element::F32) {
            return Err(Problem::Opaque(format!("it divides in ONNX element type {precision}")));
        }
        let saturates = call.int("saturate", 1) != 0;
        let divisor = self.spread(call, x, scale)?;
        let divisor = self.ir.cast(divisor, self.ir.element(x))?;
        let mut value = self.ir.binary(BinaryOp::Div, x, divisor)?;
        if to == Element::F8e4m3 {
            if !saturates {
                return Err(Problem::Opaque(
                    "a cast to an 8-bit float that does not saturate is not a primitive".into(),
                ));
            }
            return Ok(self.ir.cast(value, to)?);
        }
        value = self.ir.unary(UnaryOp::Round, value)?;
        if let Some(zero) = zero
            && self.ir.scalar(zero) != Some(0.0)
        {
            let zero = self.ir.cast(zero, self.ir.element(x))?;
            let zero = self.spread(call, x, zero)?;
            value = self.ir.binary(BinaryOp::Add, value, zero)?;
        }
        let Some((least, most)) = to.range() else {
            return Err(Problem::Opaque("it gives integers of more than 16 bits".to_string()));
        };
        value = self.clipped(value, least, most)?;
        let stored = self.ir.cast(value, to)?;
        self.floats.insert(stored, value);
        Ok(stored)
    }

    fn clipped(&mut self, x: Id, least: f64, most: f64) -> Result<Id, Problem> {
        let (least, most) = (self.ir.number(least, x), self.ir.number(most, x));
        let x = self.ir.binary(BinaryOp::Max, x, least)?;
        Ok(self.ir.binary(BinaryOp::Min, x, most)?)
    }

    /// Scale and zero point that fill the range of a byte, 0 included.
    fn dynamic_quantize(&mut self, call: &Call) -> Results {
        let x = call.input(0)?;
        let all: Vec<usize> = (0..self.ir.shape(x).rank()).collect();
        let zero = self.ir.number(0.0, x);
        let least = self.ir.reduce(Reduction::Min, x, all.clone(), false)?;
        let least = self.ir.binary(BinaryOp::Min, least, zero)?;
        let most = self.ir.reduce(Reduction::Max, x, all, false)?;
        let most = self.ir.binary(BinaryOp::Max, most, zero)?;
        let width = self.ir.binary(BinaryOp::Sub, most, least)?;
        let scale = self.ir.scale(width, 1.0 / 255.0)?;
        let below = self.ir.binary(BinaryOp::Div, least, scale)?;
        let below = self.ir.unary(UnaryOp::Neg, below)?;
        let below = self.clipped(below, 0.0, 255.0)?;
        let offset = self.ir.unary(UnaryOp::Round, below)?;
        let share = self.ir.binary(BinaryOp::Div, x, scale)?;
        let whole = self.ir.unary(UnaryOp::Round, share)?;
        let shifted = self.ir.binary(BinaryOp::Add, whole, offset)?;
        let value = self.clipped(shifted, 0.0, 255.0)?;
        let (stored, stored_offset) = (self.ir.cast(value, Element::U8)?, self.ir.cast(offset, Element::U8)?);
        self.floats.insert(stored, value);
        self.floats.insert(stored_offset, offset);
        Ok(vec![stored, scale, stored_offset])
    }

    /// Integers less their zero point, as floats.
    fn centred(&mut self, x: Id, zero: Option<Id>) -> Result<Id, Problem> {
        let float = self.as_float(x, Element::F32)?;
        let Some(zero) = zero.filter(|&zero| self.ir.scalar(zero) != Some(0.0)) else { return Ok(float) };
        if self.ir.shape(zero).elements() != 1 {
            return Err(Problem::Opaque("its zero points are per row or column".to_string()));
        }
        let zero = self.as_float(zero, Element::F32)?;
        let zero = self.ir.reshape(zero, Vec::new())?;
        Ok(self.ir.binary(BinaryOp::Sub, float, zero)?)
    }

    /// A product of integers. It is summed in floats, as what reads it scales it to floats.
    pub(super) fn integer_matmul(&mut self, call: &Call) -> Results {
        let a = self.centred(call.input(0)?, call.optional(2))?;
        let b = self.centred(call.input(1)?, call.optional(3))?;
        let product = self.ir.push(Kind::Matmul { transpose_a: false, transpose_b: false }, &[a, b])?;
        self.integer_result(product)
    }

    pub(super) fn integer_convolution(&mut self, call: &Call) -> Results {
        let x = self.centred(call.input(0)?, call.optional(2))?;
        let weight = self.centred(call.input(1)?, call.optional(3))?;
        let result = self.convolution(call, x, weight, None)?[0];
        self.integer_result(result)
    }

    fn integer_result(&mut self, value: Id) -> Results {
        let stored = self.ir.cast(value, Element::I32)?;
        self.floats.insert(stored, value);
        Ok(vec![stored])
    }

    /// A cast of what is known as floats reads the floats.
    pub(super) fn float_of(&self, x: Id, to: Element) -> Id {
        self.floats.get(&x).copied().filter(|_| to.is_float()).unwrap_or(x)
    }
}

//! Quantised values. A value that is quantised and read back stays a float that was rounded and clipped; only one that
//! something else reads is stored as bytes.

use deuteron_graph::{BinaryOp, Shape, UnaryOp};

use super::call::{Results, axis_of};
use super::{Call, Problem, Translator};
use crate::element::Element;
use crate::ir::{Id, Kind, Reduction};

/// So many products of two numbers of up to 255 add up to less than 2^24.
const EXACT_TERMS: usize = 258;

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
        if to.small_float().is_some() {
            return self.rounded_to_small_float(value, to, saturates);
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

    /// One value as a scalar, one per index of an axis along that axis; anything else as it is.
    fn per_line(&mut self, of: Id, axis: usize, rank: usize) -> Result<Id, Problem> {
        let own = self.ir.shape(of);
        Ok(match own.rank() {
            _ if own.elements() == 1 => self.ir.reshape(of, Vec::new())?,
            1 if axis < rank => self.ir.along(of, axis, rank)?,
            _ => of,
        })
    }

    /// Integers less their zero point, as floats. There is one zero point, or one per index of an axis.
    fn centred(&mut self, x: Id, zero: Option<Id>, axis: usize) -> Result<Id, Problem> {
        let float = self.as_float(x, Element::F32)?;
        let Some(zero) = zero.filter(|&zero| self.ir.scalar(zero) != Some(0.0)) else { return Ok(float) };
        let shape = self.ir.shape(float).clone();
        let zero = self.as_float(zero, Element::F32)?;
        let zero = self.per_line(zero, axis, shape.rank())?;
        let centred = self.ir.binary(BinaryOp::Sub, float, zero)?;
        if *self.ir.shape(centred) == shape {
            return Ok(centred);
        }
        let got = self.ir.shape(zero);
        Err(Problem::Refused(format!("a zero point, or one per index of axis {axis} of {shape}, expected, got {got}")))
    }

    /// Rows of the first operand of a product have zero points of their own, or columns of the second.
    fn centred_product(&mut self, a: Id, b: Id, zeros: [Option<Id>; 2]) -> Result<Id, Problem> {
        let (rows, cols) = (self.ir.shape(a).rank().saturating_sub(2), self.ir.shape(b).rank().saturating_sub(1));
        let a = self.centred(a, zeros[0], rows)?;
        let b = self.centred(b, zeros[1], cols)?;
        Ok(self.ir.push(Kind::Matmul { transpose_a: false, transpose_b: false }, &[a, b])?)
    }

    /// A product of integers. It is summed in floats, as what reads it scales it to floats.
    pub(super) fn integer_matmul(&mut self, call: &Call) -> Results {
        let zeros = [call.optional(2), call.optional(3)];
        let product = self.centred_product(call.input(0)?, call.input(1)?, zeros)?;
        let terms = self.ir.shape(call.input(0)?).cols();
        self.integer_result(call, product, terms)
    }

    pub(super) fn integer_convolution(&mut self, call: &Call) -> Results {
        let x = self.centred(call.input(0)?, call.optional(2), 1)?;
        let weight = self.centred(call.input(1)?, call.optional(3), 0)?;
        let result = self.convolution(call, x, weight, None)?[0];
        let terms = self.ir.shape(weight).iter().skip(1).product();
        self.integer_result(call, result, terms)
    }

    /// `QLinearMatMul`: a product of integers, scaled and rounded to integers again.
    pub(super) fn quantized_matmul(&mut self, call: &Call) -> Result<Id, Problem> {
        let (a, b) = (call.input(0)?, call.input(3)?);
        let product = self.centred_product(a, b, [Some(call.input(2)?), Some(call.input(5)?)])?;
        let rank = self.ir.shape(product).rank();
        let scales = [(call.input(1)?, rank - 2), (call.input(4)?, rank - 1), (call.input(6)?, rank - 2)];
        let zero = call.input(7)?;
        self.requantized(product, scales, (zero, rank - 2))
    }

    /// `QLinearConv`: a convolution of integers with a bias of integers, scaled and rounded to integers again.
    pub(super) fn quantized_convolution(&mut self, call: &Call) -> Result<Id, Problem> {
        let x = self.centred(call.input(0)?, Some(call.input(2)?), 1)?;
        let weight = self.centred(call.input(3)?, Some(call.input(5)?), 0)?;
        let bias = call.optional(8).map(|bias| self.ir.cast(bias, Element::F32)).transpose()?;
        let result = self.convolution(call, x, weight, bias)?[0];
        let scales = [(call.input(1)?, 1), (call.input(4)?, 1), (call.input(6)?, 1)];
        let zero = call.input(7)?;
        self.requantized(result, scales, (zero, 1))
    }

    /// `x * first * second / third`, rounded, with a zero point, as the zero point's type. Each scale is one number, or one per
    /// index of an axis.
    fn requantized(&mut self, x: Id, scales: [(Id, usize); 3], zero: (Id, usize)) -> Result<Id, Problem> {
        let (rank, to) = (self.ir.shape(x).rank(), self.ir.element(zero.0));
        let Some((least, most)) = to.range() else {
            return Err(Problem::Opaque("it gives something else than integers of at most 16 bits".to_string()));
        };
        let mut factors = Vec::with_capacity(scales.len());
        for (scale, axis) in scales {
            let scale = self.ir.cast(scale, Element::F32)?;
            factors.push(self.per_line(scale, axis, rank)?);
        }
        let factor = self.ir.binary(BinaryOp::Mul, factors[0], factors[1])?;
        let factor = self.ir.binary(BinaryOp::Div, factor, factors[2])?;
        let scaled = self.ir.binary(BinaryOp::Mul, x, factor)?;
        let mut value = self.ir.unary(UnaryOp::Round, scaled)?;
        if self.ir.scalar(zero.0) != Some(0.0) {
            let offset = self.as_float(zero.0, Element::F32)?;
            let offset = self.per_line(offset, zero.1, rank)?;
            value = self.ir.binary(BinaryOp::Add, value, offset)?;
        }
        if self.ir.shape(value) != self.ir.shape(x) {
            let (got, expected) = (self.ir.shape(value), self.ir.shape(x));
            return Err(Problem::Refused(format!("scales and a zero point within {expected} expected, got {got}")));
        }
        value = self.clipped(value, least, most)?;
        let stored = self.ir.cast(value, to)?;
        self.floats.insert(stored, value);
        Ok(stored)
    }

    /// As integers, if floats hold all sums of so many products of bytes.
    fn integer_result(&mut self, call: &Call, value: Id, terms: usize) -> Results {
        let stored = match terms <= EXACT_TERMS {
            true => self.ir.cast(value, Element::I32)?,
            false => {
                let why = format!("sums of {terms} products of bytes are not exact in floats");
                let results = vec![(Element::I32, self.ir.shape(value).clone())];
                self.opaque(call, why, 0, false, results)[0]
            }
        };
        self.floats.insert(stored, value);
        Ok(vec![stored])
    }
}

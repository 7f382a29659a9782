//! Operators on the bits of integers, where arithmetic gives the same.

use deuteron_graph::{BinaryOp, Dtype};

use super::call::Results;
use super::{Call, Problem, Translator};
use crate::constant::Constant;
use crate::element::Element;
use crate::ir::{Id, Kind};

impl<'a> Translator<'a, '_> {
    pub(super) fn bits(&mut self, call: &Call<'a, '_>) -> Results {
        match call.node.op {
            "BitShift" => Ok(vec![self.shifted_bits(call)?]),
            "BitwiseNot" => Ok(vec![self.inverted_bits(call)?]),
            _ => Ok(vec![self.reinterpreted(call)?]),
        }
    }

    /// A shift is a product with a power of two, or a division by one.
    fn shifted_bits(&mut self, call: &Call) -> Result<Id, Problem> {
        let (x, by) = (call.input(0)?, call.input(1)?);
        let is_left = match call.text("direction") {
            Some("LEFT") => true,
            Some("RIGHT") => false,
            other => {
                let got = other.unwrap_or_default();
                return Err(Problem::Refused(format!("direction of LEFT, RIGHT expected, got `{got}`")));
            }
        };
        let element = self.ir.element(x);
        if element.is_float() || !matches!(element.dtype(), Dtype::I8 | Dtype::I32) {
            return Err(Problem::Refused("integers expected".to_string()));
        }
        // Shifts by 31 and more leave nothing of the numbers that 32 bits hold but their highest bit, which is a sign here.
        let powers = (0..31).map(|shift| f64::powi(2.0, shift)).collect();
        let powers = self.ir.known(Constant::dense([31, 1].into(), powers, false), Element::I32);
        let by = self.ir.cast(by, Element::I32)?;
        let most = self.ir.known_scalar(30.0, Element::I32);
        let zero = self.ir.known_scalar(0.0, Element::I32);
        let least = self.ir.binary(BinaryOp::Max, by, zero)?;
        let index = self.ir.binary(BinaryOp::Min, least, most)?;
        let dims = self.ir.shape(index).to_vec();
        let power = self.ir.push(Kind::Gather, &[powers, index])?;
        let power = self.ir.reshape(power, dims)?;
        let wide = self.ir.cast(x, Element::I32)?;
        let op = if is_left { BinaryOp::Mul } else { BinaryOp::Div };
        let shifted = self.ir.binary(op, wide, power)?;
        let is_beyond = self.ir.compare(deuteron_graph::CompareOp::Gt, by, most)?;
        let result = self.ir.select(is_beyond, zero, shifted)?;
        Ok(self.ir.cast(result, element)?)
    }

    /// With all bits turned, an integer is what is left of -1, or of the largest without sign.
    fn inverted_bits(&mut self, call: &Call) -> Result<Id, Problem> {
        let x = call.input(0)?;
        let all = match self.ir.element(x) {
            Element::U8 => 255.0,
            Element::U16 => 65_535.0,
            Element::I8 | Element::I16 | Element::I32 | Element::I64 => -1.0,
            _ => return Err(Problem::Opaque("bits of this type cannot be inverted".to_string())),
        };
        let all = self.ir.number(all, x);
        Ok(self.ir.binary(BinaryOp::Sub, all, x)?)
    }

    /// The same bits as another type. Integers of equal width differ by a multiple of their span.
    fn reinterpreted(&mut self, call: &Call) -> Result<Id, Problem> {
        let x = call.input(0)?;
        let (from, number) = (self.ir.element(x), call.int("to", 0));
        let to = Element::from_number(number)
            .ok_or_else(|| Problem::Opaque(format!("it gives ONNX element type {number}, which is not known")))?;
        let is_whole =
            |element: Element| !element.is_float() && matches!(element.dtype(), Dtype::I8 | Dtype::I32 | Dtype::Bool);
        if from == to {
            return Ok(x);
        }
        if from.bits() != to.bits() || !is_whole(from) || !is_whole(to) || to == Element::Bool {
            return Err(Problem::Opaque("it reinterprets the bits of floats".to_string()));
        }
        Ok(self.ir.cast(x, to)?)
    }
}

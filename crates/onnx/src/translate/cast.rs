//! Casts. A graph has fewer types than ONNX: what it has no type for is rounded, clipped or wrapped in floats and then stored in
//! the next type that holds it.

use deuteron_graph::{BinaryOp, CompareOp, Dtype, UnaryOp};

use super::call::Results;
use super::{Call, Problem, Translator};
use crate::element::Element;
use crate::ir::{Function, Id, Kind};

/// Exponents of the least and the largest power of two of ONNX's type of powers of two.
const POWERS: (i32, i32) = (-127, 127);

impl<'a> Translator<'a, '_> {
    pub(super) fn cast(&mut self, call: &Call<'a, '_>) -> Results {
        let number = call.int("to", 0);
        let element = Element::from_number(number)
            .ok_or_else(|| Problem::Opaque(format!("it casts to ONNX element type {number}, which is not known")))?;
        self.cast_to(call, element)
    }

    pub(super) fn cast_like(&mut self, call: &Call<'a, '_>) -> Results {
        let element = self.ir.element(call.input(1)?);
        self.cast_to(call, element)
    }

    /// `saturate` and `round_mode` are about small floats alone.
    fn cast_to(&mut self, call: &Call, element: Element) -> Results {
        let saturates = call.int("saturate", 1) != 0;
        let mode = call.word("round_mode", &["up", "down", "nearest"])?;
        let x = call.input(0)?;
        if self.ir.element(x) == element {
            return Ok(vec![x]);
        }
        let x = self.float_of(x, element);
        Ok(vec![match element {
            Element::F8e8m0 => self.rounded_to_power_of_two(x, saturates, mode)?,
            _ if element.small_float().is_some() => {
                let x = self.wide(x)?;
                self.rounded_to_small_float(x, element, saturates)?
            }
            Element::I2 | Element::U2 | Element::I4 | Element::U4 => self.wrapped_to_part_of_byte(x, element)?,
            _ => self.ir.cast(x, element)?,
        }])
    }

    /// A cast of what is known as floats reads the floats.
    pub(super) fn float_of(&self, x: Id, to: Element) -> Id {
        self.floats.get(&x).copied().filter(|_| to.is_float()).unwrap_or(x)
    }

    fn wide(&mut self, x: Id) -> Result<Id, Problem> {
        let x = self.float_of(x, Element::F32);
        Ok(self.ir.cast(x, Element::F32)?)
    }

    /// The nearest value of a small float, of two the even one. The distance of its values is found by comparisons: the exponent is
    /// halved until a step of one is left.
    pub(super) fn rounded_to_small_float(&mut self, x: Id, to: Element, saturates: bool) -> Result<Id, Problem> {
        let Some(format) = to.small_float() else {
            return Err(Problem::Refused("a float of at most 8 bits expected".to_string()));
        };
        let x = self.wide(x)?;
        let size = self.ir.unary(UnaryOp::Abs, x)?;
        let distance = self.power_below(size, (format.least_exponent(), 16), -format.fraction())?;
        let steps = self.ir.binary(BinaryOp::Div, x, distance)?;
        let whole = self.ir.unary(UnaryOp::Round, steps)?;
        let mut value = self.ir.binary(BinaryOp::Mul, whole, distance)?;
        let (least, most) = (self.ir.number(-format.largest, x), self.ir.number(format.largest, x));
        if saturates || format.overflow() == format.largest {
            value = self.ir.binary(BinaryOp::Max, value, least)?;
            value = self.ir.binary(BinaryOp::Min, value, most)?;
        } else {
            let above = self.ir.compare(CompareOp::Gt, value, most)?;
            let below = self.ir.compare(CompareOp::Lt, value, least)?;
            let infinity = self.ir.number(f64::INFINITY, x);
            let over = match format.overflow().is_nan() {
                // Infinity times zero.
                true => self.ir.scale(infinity, 0.0)?,
                false => infinity,
            };
            let under = self.ir.unary(UnaryOp::Neg, over)?;
            value = self.ir.select(above, over, value)?;
            value = self.ir.select(below, under, value)?;
        }
        if !format.has_nan() {
            let is_number = self.ir.compare(CompareOp::Eq, x, x)?;
            let zero = self.ir.number(0.0, x);
            value = self.ir.select(is_number, value, zero)?;
        }
        // The graph rounds to the one that it has by itself.
        let direct = to.dtype() == Dtype::F8e4m3 && saturates && self.ir.constant(x).is_none();
        let stored = self.ir.cast(if direct { x } else { value }, to)?;
        self.floats.insert(stored, value);
        Ok(stored)
    }

    /// The power of two at or below a size, times another, for sizes from `2^least` to below `2^(least + 2 * reach)`.
    fn power_below(&mut self, size: Id, (least, reach): (i32, i32), other: i32) -> Result<Id, Problem> {
        let (mut rest, mut power) = (size, self.ir.number(2f64.powi(least + other), size));
        let mut step = reach;
        while step > 0 {
            let is_above = self.ir.compare_number(CompareOp::Ge, rest, 2f64.powi(least + step))?;
            let (mut lower, mut higher) = (rest, power);
            // A float holds no larger power of two.
            for part in if step > 64 { vec![step / 2; 2] } else { vec![step] } {
                lower = self.ir.scale(lower, 2f64.powi(-part))?;
                higher = self.ir.scale(higher, 2f64.powi(part))?;
            }
            rest = self.ir.select(is_above, lower, rest)?;
            power = self.ir.select(is_above, higher, power)?;
            step /= 2;
        }
        Ok(power)
    }

    /// A power of two next to the size of a number, 2^-127 for zero.
    fn rounded_to_power_of_two(&mut self, x: Id, saturates: bool, mode: &str) -> Result<Id, Problem> {
        let x = self.wide(x)?;
        let size = self.ir.unary(UnaryOp::Abs, x)?;
        let below = self.power_below(size, (POWERS.0, 128), 0)?;
        let limit = match mode {
            "up" => below,
            "down" => self.ir.number(f64::INFINITY, x),
            _ => self.ir.scale(below, 1.5)?,
        };
        let op = if mode == "nearest" { CompareOp::Ge } else { CompareOp::Gt };
        let is_over = self.ir.compare(op, size, limit)?;
        let above = self.ir.scale(below, 2.0)?;
        let mut value = self.ir.select(is_over, above, below)?;
        let largest = self.ir.number(2f64.powi(POWERS.1), x);
        let infinity = self.ir.number(f64::INFINITY, x);
        let nothing = self.ir.scale(infinity, 0.0)?;
        if saturates {
            value = self.ir.binary(BinaryOp::Min, value, largest)?;
        } else {
            let is_beyond = self.ir.compare(CompareOp::Gt, value, largest)?;
            value = self.ir.select(is_beyond, nothing, value)?;
        }
        let is_finite = self.ir.compare(CompareOp::Lt, size, infinity)?;
        value = self.ir.select(is_finite, value, nothing)?;
        Ok(self.ir.cast(value, Element::F8e8m0)?)
    }

    /// Integers of less than a byte: towards zero, and of what is too large the lowest bits.
    fn wrapped_to_part_of_byte(&mut self, x: Id, to: Element) -> Result<Id, Problem> {
        let Some((least, most)) = to.range() else {
            return Err(Problem::Refused("an integer of at most 16 bits expected".to_string()));
        };
        // The lowest byte of a wide integer has all bits that are kept.
        let is_wide = self.ir.element(x).dtype() == Dtype::I32;
        let x = if is_wide { self.ir.cast(x, Element::I8)? } else { x };
        let x = self.wide(x)?;
        let down = self.ir.push(Kind::Function(Function::Floor), &[x])?;
        let up = self.ir.push(Kind::Function(Function::Ceil), &[x])?;
        let is_negative = self.ir.compare_number(CompareOp::Lt, x, 0.0)?;
        let whole = self.ir.select(is_negative, up, down)?;
        let span = most - least + 1.0;
        let above = self.ir.offset(whole, -least)?;
        let share = self.ir.scale(above, 1.0 / span)?;
        let turns = self.ir.push(Kind::Function(Function::Floor), &[share])?;
        let excess = self.ir.scale(turns, span)?;
        let value = self.ir.binary(BinaryOp::Sub, whole, excess)?;
        Ok(self.ir.cast(value, to)?)
    }
}

//! `DFT`: a linear map of one axis, real and imaginary part by part.

use deuteron_graph::BinaryOp;

use super::call::{Results, axis_of};
use super::{Call, Problem, Translator};
use crate::ir::{Id, Kind};

impl<'a> Translator<'a, '_> {
    pub(super) fn fourier(&mut self, call: &Call<'a, '_>) -> Results {
        let x = call.input(0)?;
        let shape = self.ir.shape(x).clone();
        let last = shape.rank().saturating_sub(1);
        if shape.rank() < 2 || !matches!(shape[last], 1 | 2) {
            return Err(Problem::Refused(format!("a signal [.., n, 1 or 2] expected, got {shape}")));
        }
        // The axis is an attribute up to opset 19, an operand since.
        let axis = match call.optional(2) {
            Some(axis) => self.integers(axis, "axis")?.first().copied().unwrap_or(-2),
            None => call.int("axis", if call.opset < 20 { 1 } else { -2 }),
        };
        let axis = axis_of(axis, shape.rank())?;
        let (inverse, one_sided) = (call.int("inverse", 0) != 0, call.int("onesided", 0) != 0);
        if axis == last || (inverse && one_sided) {
            return Err(Problem::Opaque(
                "an inverse of one side, or along the parts of numbers, is not written out".into(),
            ));
        }
        let length = match call.optional(1) {
            Some(length) => self.integers(length, "length")?.first().copied().unwrap_or(0),
            None => shape[axis] as i64,
        };
        let length = usize::try_from(length).ok().filter(|&length| length > 0);
        let length = length.ok_or_else(|| "a length of at least 1 expected".to_string())?;
        let bins = if one_sided { length / 2 + 1 } else { length };
        self.reserve(bins.saturating_mul(shape[axis]).saturating_mul(2))?;
        let sign = if inverse { 1.0 } else { -1.0 };
        let factor = if inverse { 1.0 / length as f64 } else { 1.0 };
        // Beyond the length the signal is cut, before it filled with zeros.
        let table = |function: fn(f64) -> f64| -> Vec<f64> {
            let entry = |bin: usize, at: usize| {
                let angle = sign * 2.0 * std::f64::consts::PI * ((bin * at) % length) as f64 / length as f64;
                if at < length { factor * function(angle) } else { 0.0 }
            };
            (0..bins).flat_map(|bin| (0..shape[axis]).map(move |at| entry(bin, at))).collect()
        };
        let (cosine, sine) = (table(f64::cos), table(f64::sin));
        let mut part = |start: usize| self.ir.push(Kind::Slice { axis: last, start, length: 1 }, &[x]);
        let real = part(0)?;
        let imaginary = if shape[last] == 2 { Some(part(1)?) } else { None };
        let mut real_part = self.ir.linear_map(real, axis, bins, cosine.clone())?;
        let mut imaginary_part = self.ir.linear_map(real, axis, bins, sine.clone())?;
        if let Some(imaginary) = imaginary {
            let crossed: Id = self.ir.linear_map(imaginary, axis, bins, sine)?;
            let along = self.ir.linear_map(imaginary, axis, bins, cosine)?;
            real_part = self.ir.binary(BinaryOp::Sub, real_part, crossed)?;
            imaginary_part = self.ir.binary(BinaryOp::Add, imaginary_part, along)?;
        }
        Ok(vec![self.ir.push(Kind::Concat { axis: last }, &[real_part, imaginary_part])?])
    }
}

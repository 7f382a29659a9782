//! `DFT` and `STFT`: linear maps of one axis, real and imaginary part by part.

use std::f64::consts::PI;

use deuteron_graph::BinaryOp;

use super::call::{Results, axis_of};
use super::{Call, Problem, Translator};
use crate::ir::{Id, Kind};

/// A transform of an axis of `from` elements to `to` of them, both cut or filled with zeros to `length`.
#[derive(Clone, Copy)]
struct Transform {
    axis: usize,
    from: usize,
    to: usize,
    length: usize,
    is_inverse: bool,
}

impl Transform {
    /// The factors of the cosines or sines, in row-major order, each times a weight of the element that is read.
    fn table(&self, function: fn(f64) -> f64, weight: impl Fn(usize) -> f64) -> Vec<f64> {
        let sign = if self.is_inverse { 1.0 } else { -1.0 };
        let scale = if self.is_inverse { 1.0 / self.length as f64 } else { 1.0 };
        let entry = |to: usize, from: usize| {
            let angle = sign * 2.0 * PI * ((to * from) % self.length) as f64 / self.length as f64;
            if from < self.length { scale * weight(from) * function(angle) } else { 0.0 }
        };
        (0..self.to)
            .flat_map(|to| (0..self.from).map(move |from| (to, from)))
            .map(|(to, from)| entry(to, from))
            .collect()
    }
}

impl<'a> Translator<'a, '_> {
    pub(super) fn fourier(&mut self, call: &Call<'a, '_>) -> Results {
        match call.node.op {
            "STFT" => Ok(vec![self.short_time(call)?]),
            _ => Ok(vec![self.discrete(call)?]),
        }
    }

    fn discrete(&mut self, call: &Call) -> Result<Id, Problem> {
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
        if axis == last {
            return Err(Problem::Opaque(
                "a transform along the axis of real and imaginary parts is not supported".into(),
            ));
        }
        let (is_inverse, one_sided) = (call.int("inverse", 0) != 0, call.int("onesided", 0) != 0);
        let length = match call.optional(1) {
            Some(length) => self.integers(length, "length")?.first().copied().unwrap_or(0),
            // Half of an even number of frequencies, and the one in the middle.
            None if is_inverse && one_sided => (shape[axis] as i64 - 1).saturating_mul(2),
            None => shape[axis] as i64,
        };
        let length = usize::try_from(length).ok().filter(|&length| length > 0);
        let length = length.ok_or_else(|| "a length of at least 1 expected".to_string())?;
        let to = if one_sided && !is_inverse { length / 2 + 1 } else { length };
        let transform = Transform { axis, from: shape[axis], to, length, is_inverse };
        match is_inverse && one_sided {
            true => self.real_inverse(x, transform),
            false => self.transformed(x, transform),
        }
    }

    /// The real and, if there is one, the imaginary part of numbers whose last axis holds their parts.
    fn parts(&mut self, x: Id) -> Result<(Id, Option<Id>), Problem> {
        let axis = self.ir.shape(x).rank() - 1;
        let real = self.ir.push(Kind::Slice { axis, start: 0, length: 1 }, &[x])?;
        if self.ir.shape(x)[axis] == 1 {
            return Ok((real, None));
        }
        Ok((real, Some(self.ir.push(Kind::Slice { axis, start: 1, length: 1 }, &[x])?)))
    }

    fn reserve_tables(&mut self, transform: Transform) -> Result<(), Problem> {
        self.reserve(transform.to.saturating_mul(transform.from).saturating_mul(2))
    }

    fn transformed(&mut self, x: Id, transform: Transform) -> Result<Id, Problem> {
        self.reserve_tables(transform)?;
        let Transform { axis, to, .. } = transform;
        let last = self.ir.shape(x).rank() - 1;
        let (cosine, sine) = (transform.table(f64::cos, |_| 1.0), transform.table(f64::sin, |_| 1.0));
        let (real, imaginary) = self.parts(x)?;
        let mut real_part = self.ir.linear_map(real, axis, to, cosine.clone())?;
        let mut imaginary_part = self.ir.linear_map(real, axis, to, sine.clone())?;
        if let Some(imaginary) = imaginary {
            let crossed: Id = self.ir.linear_map(imaginary, axis, to, sine)?;
            let along = self.ir.linear_map(imaginary, axis, to, cosine)?;
            real_part = self.ir.binary(BinaryOp::Sub, real_part, crossed)?;
            imaginary_part = self.ir.binary(BinaryOp::Add, imaginary_part, along)?;
        }
        Ok(self.ir.push(Kind::Concat { axis: last }, &[real_part, imaginary_part])?)
    }

    /// The real signal of frequencies of which half are given. The others are their conjugates, so they count twice, but for the
    /// first and the one in the middle of an even number, of which the real part alone counts.
    fn real_inverse(&mut self, x: Id, transform: Transform) -> Result<Id, Problem> {
        self.reserve_tables(transform)?;
        let Transform { axis, to, length, .. } = transform;
        let weight = |bin: usize| match bin {
            0 => 1.0,
            bin if 2 * bin == length => 1.0,
            bin if 2 * bin < length => 2.0,
            _ => 0.0,
        };
        let (real, imaginary) = self.parts(x)?;
        let signal = self.ir.linear_map(real, axis, to, transform.table(f64::cos, weight))?;
        let Some(imaginary) = imaginary else { return Ok(signal) };
        let own = |bin: usize| if 2 * bin == length { 0.0 } else { weight(bin) };
        let crossed = self.ir.linear_map(imaginary, axis, to, transform.table(f64::sin, own))?;
        Ok(self.ir.binary(BinaryOp::Sub, signal, crossed)?)
    }

    /// A transform of each frame of a signal `[batch, n, 1 or 2]`, times a window: `[batch, frames, bins, 2]`.
    fn short_time(&mut self, call: &Call) -> Result<Id, Problem> {
        let x = call.input(0)?;
        let shape = self.ir.shape(x).clone();
        let &[batch, samples, parts @ (1 | 2)] = &shape[..] else {
            return Err(Problem::Refused(format!("a signal [batch, n, 1 or 2] expected, got {shape}")));
        };
        let mut number = |id: Id, what: &str| -> Result<usize, Problem> {
            let value = self.integers(id, what)?.first().copied().unwrap_or(0);
            let fits = usize::try_from(value).ok().filter(|&value| (1..=samples).contains(&value));
            fits.ok_or_else(|| Problem::Refused(format!("a {what} from 1 to {samples} expected, got {value}")))
        };
        let step = number(call.input(1)?, "frame_step")?;
        let stated = call.optional(3).map(|id| number(id, "frame_length")).transpose()?;
        let window = call.optional(2);
        let of_window = window.map(|window| self.ir.shape(window).clone());
        let length = match (stated, &of_window) {
            (Some(length), _) => length,
            (None, Some(of_window)) => of_window.elements(),
            (None, None) => samples,
        };
        if of_window.is_some_and(|of_window| of_window[..] != [length]) || !(1..=samples).contains(&length) {
            return Err(Problem::Refused(format!(
                "a window of frame_length elements, at most {samples}, expected, got {length}"
            )));
        }
        let one_sided = call.int("onesided", 1) != 0;
        if one_sided && parts == 2 {
            return Err(Problem::Refused("a real signal expected where onesided is set".to_string()));
        }
        let frames = 1 + (samples - length) / step;
        let positions =
            self.picked(x, 1, frames.saturating_mul(length), |index| index / length * step + index % length)?;
        let mut rows = self.ir.reshape(positions, vec![batch, frames, length, parts])?;
        if let Some(window) = window {
            let window = self.ir.along(window, 2, 4)?;
            rows = self.ir.binary(BinaryOp::Mul, rows, window)?;
        }
        let to = if one_sided { length / 2 + 1 } else { length };
        self.transformed(rows, Transform { axis: 2, from: length, to, length, is_inverse: false })
    }
}

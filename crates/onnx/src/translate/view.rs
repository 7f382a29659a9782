//! Operators that move elements without computing: shapes, axes, slices, joins.

use deuteron_graph::Shape;

use super::call::{Results, axes_of, axis_of};
use super::{Call, Problem, Translator};
use crate::constant::Constant;
use crate::ir::{Id, Kind};
use crate::limits::MAX_DIMS;
use crate::weight::shape_of;

impl<'a> Translator<'a, '_> {
    pub(super) fn view(&mut self, call: &Call<'a, '_>) -> Results {
        let x = call.input(0)?;
        let shape = self.ir.shape(x).clone();
        let result = match call.node.op {
            "Reshape" => {
                let dims = self.integers(call.input(1)?, "sizes")?;
                let dims = reshaped(&shape, &dims, call.int("allowzero", 0) != 0)?;
                self.ir.reshape(x, dims)?
            }
            "Flatten" => {
                let axis = call.int("axis", 1);
                let axis = if axis == shape.rank() as i64 { shape.rank() } else { axis_of(axis, shape.rank())? };
                let dims = vec![shape[..axis].iter().product(), shape[axis..].iter().product()];
                self.ir.reshape(x, dims)?
            }
            "Squeeze" => {
                let axes = match self.axes(call)? {
                    Some(axes) => axes_of(&axes, shape.rank())?,
                    None => (0..shape.rank()).filter(|&axis| shape[axis] == 1).collect(),
                };
                if let Some(axis) = axes.iter().find(|&&axis| shape[axis] != 1) {
                    return Err(Problem::Refused(format!("axes of size 1 expected, got axis {axis} of {shape}")));
                }
                let dims = (0..shape.rank()).filter(|axis| !axes.contains(axis)).map(|axis| shape[axis]).collect();
                self.ir.reshape(x, dims)?
            }
            "Unsqueeze" => {
                let axes = self.axes(call)?.ok_or_else(|| "axes expected, got none".to_string())?;
                if axes.len() > MAX_DIMS {
                    return Err(Problem::Refused(format!("at most {MAX_DIMS} axes expected, got {}", axes.len())));
                }
                let rank = shape.rank() + axes.len();
                let axes = axes_of(&axes, rank)?;
                let mut sizes = shape.iter().copied();
                let dims = (0..rank).map(|axis| if axes.contains(&axis) { 1 } else { sizes.next().unwrap_or(1) });
                self.ir.reshape(x, dims.collect())?
            }
            "Transpose" => {
                let permutation = match call.ints("perm") {
                    Some(axes) => axes.iter().map(|&axis| axis_of(axis, shape.rank())).collect::<Result<_, _>>()?,
                    None => (0..shape.rank()).rev().collect(),
                };
                self.ir.push(Kind::Transpose(permutation), &[x])?
            }
            "Expand" => {
                let dims = self.integers(call.input(1)?, "sizes")?;
                let target = shape_of(&call.node.label(), &dims)?;
                let common = shape.broadcast(&target);
                let common =
                    common.ok_or_else(|| format!("a shape that repeats into {target} expected, got {shape}"))?;
                self.ir.broadcast(x, &common)?
            }
            "Slice" => self.slice(call, x)?,
            "Split" => return self.split(call, x),
            "Concat" => self.concat(call)?,
            "Tile" => self.tile(call, x)?,
            _ => self.pad(call, x)?,
        };
        Ok(vec![result])
    }

    /// Axes as an attribute (up to opset 12, and in some functions) or as the second operand.
    fn axes(&self, call: &Call) -> Result<Option<Vec<i64>>, Problem> {
        match (call.ints("axes"), call.optional(1)) {
            (Some(axes), _) => Ok(Some(axes.to_vec())),
            (None, Some(id)) => Ok(Some(self.integers(id, "axes")?)),
            (None, None) => Ok(None),
        }
    }

    fn slice(&mut self, call: &Call, mut x: Id) -> Result<Id, Problem> {
        let starts = self.integers(call.input(1)?, "starts")?;
        let ends = self.integers(call.input(2)?, "ends")?;
        let axes = match call.optional(3) {
            Some(id) => self.integers(id, "axes")?,
            None => (0..starts.len() as i64).collect(),
        };
        let steps = match call.optional(4) {
            Some(id) => self.integers(id, "steps")?,
            None => vec![1; starts.len()],
        };
        if ends.len() != starts.len() || axes.len() != starts.len() || steps.len() != starts.len() {
            return Err(Problem::Refused("as many starts as ends, axes and steps expected".to_string()));
        }
        axes_of(&axes, self.ir.shape(x).rank())?;
        for index in 0..starts.len() {
            let axis = axis_of(axes[index], self.ir.shape(x).rank())?;
            x = self.slice_axis(x, axis, starts[index], ends[index], steps[index])?;
        }
        Ok(x)
    }

    fn slice_axis(&mut self, x: Id, axis: usize, start: i64, end: i64, step: i64) -> Result<Id, Problem> {
        let shape = self.ir.shape(x).clone();
        let size = shape[axis] as i64;
        let bound = |value: i64, least: i64, most: i64| {
            (if value < 0 { value.saturating_add(size) } else { value }).clamp(least, most)
        };
        if step == 0 {
            return Err(Problem::Refused("a step other than 0 expected".to_string()));
        }
        if step > 0 {
            let (start, end) = (bound(start, 0, size), bound(end, 0, size));
            let length = (end - start).max(0) as usize;
            if step == 1 || length <= 1 {
                return Ok(self.ir.push(Kind::Slice { axis, start: start as usize, length }, &[x])?);
            }
            return self.strided(x, axis, start as usize, length, step as usize);
        }
        let (start, end) = (bound(start, 0, size - 1), bound(end, -1, size - 1));
        let count = (start - end).max(0) as u64;
        let count = count.div_ceil(step.unsigned_abs()) as usize;
        self.picked(x, axis, count, |index| start as usize - index * step.unsigned_abs() as usize)
    }

    /// Every `step`-th of `length` indices: a view where whole steps divide the axis.
    fn strided(&mut self, x: Id, axis: usize, start: usize, length: usize, step: usize) -> Result<Id, Problem> {
        let shape = self.ir.shape(x).clone();
        let count = length.div_ceil(step);
        let (first, offset) = (start / step * step, start % step);
        if shape[axis].is_multiple_of(step) && first / step + count <= shape[axis] / step && shape.rank() < 8 {
            let mut dims = shape.to_vec();
            dims.splice(axis..=axis, [shape[axis] / step, step]);
            let split = self.ir.reshape(x, dims)?;
            let rows = self.ir.push(Kind::Slice { axis, start: first / step, length: count }, &[split])?;
            let column = self.ir.push(Kind::Slice { axis: axis + 1, start: offset, length: 1 }, &[rows])?;
            let mut dims = shape.to_vec();
            dims[axis] = count;
            return Ok(self.ir.reshape(column, dims)?);
        }
        self.picked(x, axis, count, |index| start + index * step)
    }

    /// Known elements along an axis, picked in any order; of unknown ones, slices joined again if they are few.
    pub(super) fn picked(
        &mut self,
        x: Id,
        axis: usize,
        count: usize,
        at: impl Fn(usize) -> usize,
    ) -> Result<Id, Problem> {
        let shape = self.ir.shape(x).clone();
        let mut dims = shape.to_vec();
        dims[axis] = count;
        let result = Shape::new(dims);
        let element = self.ir.element(x);
        if let Some(constant) = self.ir.node(x).constant.clone() {
            let elements = result.checked_elements().unwrap_or(usize::MAX);
            if self.ir.folder.spend(elements, elements.saturating_mul(8)) {
                let (inner, strides) = (result.strides(), constant.strides());
                let position = |flat: usize| {
                    let index = |axis: usize| flat / inner[axis] % result[axis];
                    let along = |i: usize| if i == axis { at(index(i)) } else { index(i) };
                    (0..result.rank()).map(|i| along(i) * strides[i]).sum()
                };
                let picked: Constant = constant.pick(&result, (0..elements).map(position));
                return Ok(self.ir.known(picked, element));
            }
        }
        if count > crate::limits::GATHER_SLICES {
            return Err(Problem::Opaque(format!("it picks {count} scattered indices")));
        }
        let parts = (0..count)
            .map(|index| self.ir.push(Kind::Slice { axis, start: at(index), length: 1 }, &[x]))
            .collect::<Result<Vec<_>, _>>()?;
        if parts.is_empty() {
            return Ok(self.ir.push(Kind::Slice { axis, start: 0, length: 0 }, &[x])?);
        }
        Ok(self.ir.push(Kind::Concat { axis }, &parts)?)
    }

    fn split(&mut self, call: &Call, x: Id) -> Results {
        let shape = self.ir.shape(x).clone();
        let axis = axis_of(call.int("axis", 0), shape.rank())?;
        let count = call.node.outputs.len();
        let sizes = match (call.ints("split"), call.optional(1)) {
            (Some(sizes), _) => sizes.to_vec(),
            (None, Some(id)) => self.integers(id, "sizes")?,
            (None, None) => {
                let even = shape[axis].div_ceil(count.max(1));
                (0..count).map(|i| even.min(shape[axis].saturating_sub(i * even)) as i64).collect()
            }
        };
        if sizes.len() != count {
            return Err(Problem::Refused(format!("{count} sizes expected, got {}", sizes.len())));
        }
        let mut start = 0usize;
        let mut results = Vec::new();
        for size in sizes {
            let length = usize::try_from(size).map_err(|_| format!("sizes of at least 0 expected, got {size}"))?;
            results.push(self.ir.push(Kind::Slice { axis, start, length }, &[x])?);
            start += length;
        }
        Ok(results)
    }

    fn concat(&mut self, call: &Call) -> Result<Id, Problem> {
        let first = call.input(0)?;
        let axis = axis_of(call.int("axis", 0), self.ir.shape(first).rank())?;
        // An empty part adds nothing: a cache before the first token.
        let all = call.all();
        self.ir.infer(&Kind::Concat { axis }, &all)?;
        let parts: Vec<Id> = all.iter().copied().filter(|&id| self.ir.shape(id)[axis] > 0).collect();
        Ok(self.ir.push(Kind::Concat { axis }, if parts.is_empty() { &all[..1] } else { &parts })?)
    }

    fn tile(&mut self, call: &Call, x: Id) -> Result<Id, Problem> {
        let shape = self.ir.shape(x).clone();
        let repeats = shape_of(&call.node.label(), &self.integers(call.input(1)?, "repeats")?)?;
        if repeats.rank() != shape.rank() {
            return Err(Problem::Refused(format!("{} repeats expected, got {}", shape.rank(), repeats.rank())));
        }
        let (mut single, mut many, mut result) = (Vec::new(), Vec::new(), Vec::new());
        for (&repeat, &size) in repeats.iter().zip(shape.iter()) {
            if repeat != 1 {
                single.push(1);
                many.push(repeat);
            }
            single.push(size);
            many.push(size);
            result.push(size.checked_mul(repeat).ok_or_else(|| "sizes that can be counted expected".to_string())?);
        }
        if single.len() > deuteron_graph::MAX_RANK {
            return Err(Problem::Opaque("it repeats more axes than a view can have".to_string()));
        }
        let split = self.ir.reshape(x, single)?;
        let repeated = self.ir.broadcast(split, &Shape::new(many))?;
        Ok(self.ir.reshape(repeated, result)?)
    }

    fn pad(&mut self, call: &Call, mut x: Id) -> Result<Id, Problem> {
        let rank = self.ir.shape(x).rank();
        let pads = self.integers(call.input(1)?, "pads")?;
        let axes = match call.optional(3) {
            Some(id) => {
                let axes = self.integers(id, "axes")?;
                axes_of(&axes, rank)?;
                axes.iter().map(|&axis| axis_of(axis, rank)).collect::<Result<_, _>>()?
            }
            None => (0..rank).collect::<Vec<_>>(),
        };
        if pads.len() != 2 * axes.len() {
            return Err(Problem::Refused(format!("{} pads expected, got {}", 2 * axes.len(), pads.len())));
        }
        let value = call.optional(2).map_or(Some(0.0), |id| self.ir.scalar(id));
        let constant = matches!(call.text("mode"), None | Some("constant" | ""));
        for (position, &axis) in axes.iter().enumerate() {
            for (pad, is_before) in [(pads[position], true), (pads[position + axes.len()], false)] {
                if pad == 0 {
                    continue;
                }
                let shape = self.ir.shape(x).clone();
                if pad < 0 {
                    let cut = usize::try_from(pad.unsigned_abs()).unwrap_or(usize::MAX);
                    let length = shape[axis].saturating_sub(cut);
                    let start = if is_before { shape[axis] - length } else { 0 };
                    x = self.ir.push(Kind::Slice { axis, start, length }, &[x])?;
                    continue;
                }
                let (Some(value), true) = (value, constant) else {
                    return Err(Problem::Opaque("it pads with other than a known value".to_string()));
                };
                let mut dims: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
                dims[axis] = pad;
                let border = Constant::filled(shape_of(&call.node.label(), &dims)?, value);
                let border = self.ir.known(border, self.ir.element(x));
                let parts = if is_before { [border, x] } else { [x, border] };
                x = self.ir.push(Kind::Concat { axis }, &parts)?;
            }
        }
        Ok(x)
    }
}

/// The sizes of a `Reshape`: 0 keeps the operand's, -1 is what is left.
fn reshaped(from: &Shape, dims: &[i64], allow_zero: bool) -> Result<Vec<usize>, Problem> {
    let mut sizes = Vec::with_capacity(dims.len());
    let mut open = None;
    for (axis, &size) in dims.iter().enumerate() {
        sizes.push(match size {
            -1 if open.is_none() => {
                open = Some(axis);
                1
            }
            0 if !allow_zero => match from.get(axis) {
                Some(&kept) => kept,
                None => return Err(Problem::Refused(format!("at most {} sizes of 0 expected", from.rank()))),
            },
            size if size >= 0 => size as usize,
            _ => return Err(Problem::Refused(format!("sizes of at least 0 and one -1 expected, got {dims:?}"))),
        });
    }
    if let Some(axis) = open {
        let known = sizes.iter().try_fold(1usize, |product, &size| product.checked_mul(size)).unwrap_or(0);
        let elements = from.elements();
        if known == 0 || !elements.is_multiple_of(known) {
            return Err(Problem::Refused(format!("sizes that divide {elements} elements expected, got {dims:?}")));
        }
        sizes[axis] = elements / known;
    }
    Ok(sizes)
}

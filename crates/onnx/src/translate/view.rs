//! Operators that move elements without computing: shapes, axes, slices, joins.

use deuteron_graph::Shape;

use super::call::{Results, axes_of, axis_of};
use super::{Call, Problem, Translator};
use crate::constant::Constant;
use crate::element::Element;
use crate::ir::{Id, Kind};
use crate::limits::MAX_DIMS;
use crate::weight::shape_of;

impl<'a> Translator<'a, '_> {
    pub(super) fn view(&mut self, call: &Call<'a, '_>) -> Results {
        let x = call.input(0)?;
        let shape = self.ir.shape(x).clone();
        let result = match call.node.op {
            "Reshape" => {
                let dims = match call.ints("shape") {
                    Some(dims) => dims.to_vec(),
                    None => self.integers(call.input(1)?, "sizes")?,
                };
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
            "DepthToSpace" | "SpaceToDepth" => self.blocks(call, x)?,
            "CenterCropPad" => self.center_crop(call, x)?,
            _ => self.pad(call, x)?,
        };
        Ok(vec![result])
    }

    /// Axes as an attribute (up to opset 12, and in some functions) or as the second operand.
    fn axes(&mut self, call: &Call) -> Result<Option<Vec<i64>>, Problem> {
        match (call.ints("axes"), call.optional(1)) {
            (Some(axes), _) => Ok(Some(axes.to_vec())),
            (None, Some(id)) => Ok(Some(self.integers(id, "axes")?)),
            (None, None) => Ok(None),
        }
    }

    fn slice(&mut self, call: &Call, mut x: Id) -> Result<Id, Problem> {
        // Up to opset 9 all of them are attributes.
        let mut list = |name: &'static str, position: usize| match (call.ints(name), call.optional(position)) {
            (Some(values), _) => Ok(Some(values.to_vec())),
            (None, Some(id)) => self.integers(id, name).map(Some),
            (None, None) => Ok(None),
        };
        let missing = || Problem::Refused("starts and ends expected".to_string());
        let starts = list("starts", 1)?.ok_or_else(missing)?;
        let ends = list("ends", 2)?.ok_or_else(missing)?;
        let axes = list("axes", 3)?.unwrap_or_else(|| (0..starts.len() as i64).collect());
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
            return self.gathered(x, axis, count, at);
        }
        let parts = (0..count)
            .map(|index| self.ir.push(Kind::Slice { axis, start: at(index), length: 1 }, &[x]))
            .collect::<Result<Vec<_>, _>>()?;
        if parts.is_empty() {
            return Ok(self.ir.push(Kind::Slice { axis, start: 0, length: 0 }, &[x])?);
        }
        Ok(self.ir.push(Kind::Concat { axis }, &parts)?)
    }

    /// Many scattered indices of an axis: rows of a table.
    fn gathered(&mut self, x: Id, axis: usize, count: usize, at: impl Fn(usize) -> usize) -> Result<Id, Problem> {
        self.reserve(count)?;
        let indices = (0..count).map(|index| at(index) as f64).collect();
        let indices = self.ir.known(Constant::dense([count].into(), indices, false), Element::I64);
        let last = self.ir.exchange(x, axis)?;
        let rank = self.ir.shape(last).rank();
        let mut order: Vec<usize> = (0..rank - 1).collect();
        order.insert(0, rank - 1);
        let first = self.ir.push(Kind::Transpose(order), &[last])?;
        let mut dims = self.ir.shape(first).to_vec();
        let table = self.ir.reshape(first, vec![dims[0], dims[1..].iter().product()])?;
        let rows = self.ir.push(Kind::Gather, &[table, indices])?;
        dims[0] = count;
        let rows = self.ir.reshape(rows, dims)?;
        let back: Vec<usize> = (1..rank).chain([0]).collect();
        let last = self.ir.push(Kind::Transpose(back), &[rows])?;
        Ok(self.ir.exchange(last, axis)?)
    }

    /// Blocks of an image as channels, and back.
    fn blocks(&mut self, call: &Call, x: Id) -> Result<Id, Problem> {
        let shape = self.ir.shape(x).clone();
        let size = usize::try_from(call.int("blocksize", 0)).unwrap_or(0);
        let &[n, c, h, w] = &shape[..] else {
            return Err(Problem::Refused(format!("an image [n, c, h, w] expected, got {shape}")));
        };
        let square = size.saturating_mul(size);
        let to_depth = call.node.op == "SpaceToDepth";
        let fits = size > 0
            && shape.elements() > 0
            && if to_depth { h.is_multiple_of(size) && w.is_multiple_of(size) } else { c.is_multiple_of(square) };
        if !fits {
            return Err(Problem::Refused(format!("a blocksize that divides {shape} expected, got {size}")));
        }
        let (split, order, joined) = if to_depth {
            let (h, w) = (h / size, w / size);
            (vec![n, c, h, size, w, size], vec![0, 3, 5, 1, 2, 4], vec![n, c * square, h, w])
        } else if call.word("mode", &["DCR", "CRD"])? == "DCR" {
            let c = c / square;
            (vec![n, size, size, c, h, w], vec![0, 3, 4, 1, 5, 2], vec![n, c, h * size, w * size])
        } else {
            let c = c / square;
            (vec![n, c, size, size, h, w], vec![0, 1, 4, 2, 5, 3], vec![n, c, h * size, w * size])
        };
        let split = self.ir.reshape(x, split)?;
        let ordered = self.ir.push(Kind::Transpose(order), &[split])?;
        Ok(self.ir.reshape(ordered, joined)?)
    }

    /// Axes cut or filled with zeros on both sides until they have a size.
    fn center_crop(&mut self, call: &Call, mut x: Id) -> Result<Id, Problem> {
        let shape = self.ir.shape(x).clone();
        let axes: Vec<usize> = match call.ints("axes") {
            Some(axes) => axes.iter().map(|&axis| axis_of(axis, shape.rank())).collect::<Result<_, _>>()?,
            None => (0..shape.rank()).collect(),
        };
        let sizes = self.integers(call.input(1)?, "sizes")?;
        if sizes.len() != axes.len() {
            return Err(Problem::Refused(format!("{} sizes expected, got {}", axes.len(), sizes.len())));
        }
        for (axis, size) in axes.into_iter().zip(sizes) {
            let size = usize::try_from(size).map_err(|_| format!("sizes of at least 0 expected, got {size}"))?;
            let old = self.ir.shape(x)[axis];
            if size <= old {
                x = self.ir.push(Kind::Slice { axis, start: (old - size) / 2, length: size }, &[x])?;
            } else {
                let before = (size - old) / 2;
                x = self.bordered(call, x, axis, before, 0.0, true)?;
                x = self.bordered(call, x, axis, size - old - before, 0.0, false)?;
            }
        }
        Ok(x)
    }

    /// One value before or after an axis.
    fn bordered(
        &mut self,
        call: &Call,
        x: Id,
        axis: usize,
        count: usize,
        value: f64,
        is_before: bool,
    ) -> Result<Id, Problem> {
        if count == 0 {
            return Ok(x);
        }
        let mut dims: Vec<i64> = self.ir.shape(x).iter().map(|&size| size as i64).collect();
        dims[axis] = i64::try_from(count).unwrap_or(i64::MAX);
        let border = Constant::filled(shape_of(&call.node.label(), &dims)?, value);
        let border = self.ir.known(border, self.ir.element(x));
        let parts = if is_before { [border, x] } else { [x, border] };
        Ok(self.ir.push(Kind::Concat { axis }, &parts)?)
    }

    fn split(&mut self, call: &Call, x: Id) -> Results {
        let shape = self.ir.shape(x).clone();
        let axis = axis_of(call.int("axis", 0), shape.rank())?;
        let count = call.node.outputs.len();
        let asked = call.int("num_outputs", count as i64);
        if asked != count as i64 {
            return Err(Problem::Refused(format!(
                "num_outputs of {count} expected, as results are named, got {asked}"
            )));
        }
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

    /// Pads are attributes up to opset 10, operands since.
    fn pad(&mut self, call: &Call, mut x: Id) -> Result<Id, Problem> {
        let rank = self.ir.shape(x).rank();
        let pads = match call.ints("pads") {
            Some(pads) => pads.to_vec(),
            None => self.integers(call.input(1)?, "pads")?,
        };
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
        let value = match (call.attribute("value").and_then(|attribute| attribute.float), call.optional(2)) {
            (Some(value), _) => Some(value.into()),
            (None, Some(id)) => self.scalar(id),
            (None, None) => Some(0.0),
        };
        let mode = call.word("mode", &["constant", "reflect", "edge", "wrap"])?;
        for (position, &axis) in axes.iter().enumerate() {
            let (before, after) = (pads[position], pads[position + axes.len()]);
            // Negative pads cut.
            for (pad, is_before) in [(before, true), (after, false)] {
                if pad < 0 {
                    let size = self.ir.shape(x)[axis];
                    let cut = usize::try_from(pad.unsigned_abs()).unwrap_or(usize::MAX);
                    let length = size.saturating_sub(cut);
                    let start = if is_before { size - length } else { 0 };
                    x = self.ir.push(Kind::Slice { axis, start, length }, &[x])?;
                }
            }
            let most = 1i64 << 40;
            if before > most || after > most {
                return Err(Problem::Refused(format!("pads of at most 2^40 expected, got {before} and {after}")));
            }
            let (before, after) = (before.max(0) as usize, after.max(0) as usize);
            if before + after == 0 {
                continue;
            }
            if mode == "constant" {
                let value =
                    value.ok_or_else(|| Problem::Opaque("its padding value depends on the input".to_string()))?;
                x = self.bordered(call, x, axis, before, value, true)?;
                x = self.bordered(call, x, axis, after, value, false)?;
                continue;
            }
            let size = self.ir.shape(x)[axis] as i64;
            if size == 0 || before + after > (1 << 24) {
                return Err(Problem::Refused(
                    "an axis that is not empty and fewer than 2^24 pads expected".to_string(),
                ));
            }
            let source = |index: usize| {
                let at = index as i64 - before as i64;
                (match mode {
                    "edge" => at.clamp(0, size - 1),
                    "wrap" => at.rem_euclid(size),
                    _ if size == 1 => 0,
                    _ => {
                        let period = 2 * (size - 1);
                        let within = at.rem_euclid(period);
                        within.min(period - within)
                    }
                }) as usize
            };
            x = self.picked(x, axis, before + size as usize + after, source)?;
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

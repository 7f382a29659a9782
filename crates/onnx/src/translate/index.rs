//! Operators that pick elements by index.

use deuteron_graph::Shape;

use super::call::{Results, axis_of};
use super::{Call, Problem, Translator};
use crate::constant::Positions;
use crate::element::Element;
use crate::ir::{Id, Kind};
use crate::limits::GATHER_SLICES;

impl<'a> Translator<'a, '_> {
    pub(super) fn index(&mut self, call: &Call<'a, '_>) -> Results {
        match call.node.op {
            "Gather" => Ok(vec![self.gather(call)?]),
            "GatherND" => self.gather_nd(call),
            "TopK" => self.top_k(call),
            "OneHot" => self.one_hot(call),
            _ => Ok(vec![self.gather_elements(call)?]),
        }
    }

    /// Single elements, where all is known.
    fn gather_elements(&mut self, call: &Call) -> Result<Id, Problem> {
        let (x, indices) = (call.input(0)?, call.input(1)?);
        let (from, to) = (self.ir.shape(x).clone(), self.ir.shape(indices).clone());
        let axis = axis_of(call.int("axis", 0), from.rank())?;
        let fits = to.rank() == from.rank() && (0..to.rank()).all(|other| other == axis || to[other] <= from[other]);
        if !fits {
            return Err(Problem::Refused(format!("indices within the shape {from} expected, got {to}")));
        }
        let ids = [x, indices].map(|id| self.ir.node(id).constant.clone());
        let [Some(data), Some(picks)] = ids else {
            return Err(Problem::Opaque("a gather of single elements is not a primitive".to_string()));
        };
        let (count, size) = (to.elements(), from[axis] as f64);
        let wrap = |index: f64| if index < 0.0 { index + size } else { index };
        if picks.distinct().any(|index| !(0.0..size).contains(&wrap(index))) {
            return Err(Problem::Refused(format!("indices below {size} expected")));
        }
        if !self.ir.folder.spend(count, count.saturating_mul(8)) {
            return Err(Problem::Opaque(format!("a constant of {count} elements is more than is folded")));
        }
        let (strides, inner) = (data.strides(), to.strides());
        let others = |flat: usize| -> usize {
            (0..to.rank()).filter(|&i| i != axis).map(|i| flat / inner[i] % to[i] * strides[i]).sum()
        };
        let positions =
            picks.values().enumerate().map(|(flat, index)| others(flat) + wrap(index) as usize * strides[axis]);
        let picked = data.pick(&to, positions);
        Ok(self.ir.known(picked, self.ir.element(x)))
    }

    fn gather(&mut self, call: &Call) -> Result<Id, Problem> {
        let (x, indices) = (call.input(0)?, call.input(1)?);
        let shape = self.ir.shape(x).clone();
        let axis = axis_of(call.int("axis", 0), shape.rank())?;
        if let Some(known) = self.known_gather(x, indices, axis)? {
            return Ok(known);
        }
        // Rows of a table: the axis comes first, the others are one.
        let mut permutation: Vec<usize> = (0..shape.rank()).collect();
        permutation.remove(axis);
        let others: Vec<usize> = permutation.iter().map(|&axis| shape[axis]).collect();
        permutation.insert(0, axis);
        let first = self.ir.push(Kind::Transpose(permutation), &[x])?;
        let table = self.ir.reshape(first, vec![shape[axis], others.iter().product()])?;
        let rows = self.ir.push(Kind::Gather, &[table, indices])?;
        let picked = self.ir.shape(indices).to_vec();
        let dims: Vec<usize> = picked.iter().chain(&others).copied().collect();
        let rank = picked.len();
        let result = self.ir.reshape(rows, dims)?;
        // The axes of the indices go where the axis was.
        let permutation = (rank..rank + axis).chain(0..rank).chain(rank + axis..rank + others.len()).collect();
        Ok(self.ir.push(Kind::Transpose(permutation), &[result])?)
    }

    /// Indices that are known: a slice if they follow each other, slices if they are few.
    fn known_gather(&mut self, x: Id, indices: Id, axis: usize) -> Result<Option<Id>, Problem> {
        let shape = self.ir.shape(x).clone();
        let Some(constant) = self.ir.node(indices).constant.clone() else { return Ok(None) };
        let count = constant.shape.elements();
        if !self.ir.folder.spend(count, count.saturating_mul(8)) {
            return Ok(None);
        }
        let size = shape[axis] as i64;
        let wrap = |index: i64| if index < 0 { index.saturating_add(size) } else { index };
        let positions: Vec<i64> = constant.values().map(|index| wrap(index as i64)).collect();
        if let Some(outside) = positions.iter().find(|index| !(0..size).contains(*index)) {
            return Err(Problem::Refused(format!("an index below {size} expected on axis {axis}, got {outside}")));
        }
        let in_sequence = positions.windows(2).all(|pair| pair[1] == pair[0] + 1);
        let picked = match positions.first() {
            _ if self.ir.node(x).constant.is_some() => {
                self.picked(x, axis, count, |index| positions[index] as usize)?
            }
            Some(&start) if in_sequence => {
                self.ir.push(Kind::Slice { axis, start: start as usize, length: count }, &[x])?
            }
            _ if count <= GATHER_SLICES => self.picked(x, axis, count, |index| positions[index] as usize)?,
            _ => return Ok(None),
        };
        let dims = shape[..axis].iter().chain(constant.shape.iter()).chain(&shape[axis + 1..]).copied().collect();
        Ok(Some(self.ir.reshape(picked, dims)?))
    }

    fn gather_nd(&mut self, call: &Call) -> Results {
        let (x, indices) = (call.input(0)?, call.input(1)?);
        let (data, index) = (self.ir.shape(x), self.ir.shape(indices));
        let batch = usize::try_from(call.int("batch_dims", 0)).unwrap_or(usize::MAX);
        let depth = index.cols();
        let Some(rest) = batch.checked_add(depth).and_then(|start| data.get(start..)) else {
            return Err(Problem::Refused(format!("indices of at most the rank of {data} expected, got {index}")));
        };
        let dims: Vec<usize> = index.leading().iter().chain(rest).copied().collect();
        let shape = Shape::new(dims);
        if let (0, Some(known)) = (batch, self.known_gather_nd(x, indices, &shape)?) {
            return Ok(vec![known]);
        }
        let results = vec![(self.ir.element(x), shape)];
        Ok(self.opaque(call, "a gather of several axes is not a primitive".to_string(), 0, false, results))
    }

    /// Slices by the indices of several axes, where all is known: exporters look masks up this way.
    fn known_gather_nd(&mut self, x: Id, indices: Id, shape: &Shape) -> Result<Option<Id>, Problem> {
        let [Some(data), Some(picks)] = [x, indices].map(|id| self.ir.node(id).constant.clone()) else {
            return Ok(None);
        };
        let (depth, elements) = (picks.shape.cols(), shape.checked_elements().unwrap_or(usize::MAX));
        let work = elements.saturating_add(picks.shape.elements());
        if depth == 0 || !self.ir.folder.spend(work, work.saturating_mul(8)) {
            return Ok(None);
        }
        let strides = data.strides();
        let mut starts = vec![0; picks.shape.rows()];
        for (position, index) in picks.values().enumerate() {
            let axis = position % depth;
            let size = data.shape[axis] as f64;
            let index = if index < 0.0 { index + size } else { index };
            if !(0.0..size).contains(&index) {
                return Err(Problem::Refused(format!("an index below {size} expected on axis {axis}, got {index}")));
            }
            starts[position / depth] += index as usize * strides[axis];
        }
        let (rest, along) = (data.shape[depth..].to_vec(), strides[depth..].to_vec());
        let inner: Vec<usize> = Positions::new(rest, along).collect();
        let positions = starts.iter().flat_map(|&start| inner.iter().map(move |&offset| start + offset));
        Ok(Some(self.ir.known(data.pick(shape, positions), self.ir.element(x))))
    }

    fn top_k(&mut self, call: &Call) -> Results {
        let x = call.input(0)?;
        let count = self.integers(call.input(1)?, "count")?;
        let shape = self.ir.shape(x);
        let axis = axis_of(call.int("axis", -1), shape.rank())?;
        let count = count.first().and_then(|&count| usize::try_from(count).ok()).filter(|&count| count <= shape[axis]);
        let count = count.ok_or_else(|| format!("a count of at most {} expected", shape[axis]))?;
        let mut dims = shape.to_vec();
        dims[axis] = count;
        let elements = shape.elements() as u64;
        let result = Shape::new(dims);
        let results = vec![(self.ir.element(x), result.clone()), (Element::I64, result)];
        Ok(self.opaque(call, "the largest few are not a primitive".to_string(), elements, false, results))
    }

    fn one_hot(&mut self, call: &Call) -> Results {
        let indices = call.input(0)?;
        let depth = self.integers(call.input(1)?, "depth")?;
        let depth = depth.first().and_then(|&depth| usize::try_from(depth).ok());
        let depth = depth.ok_or_else(|| "a depth of at least 0 expected".to_string())?;
        let mut dims = self.ir.shape(indices).to_vec();
        let axis = axis_of(call.int("axis", -1), dims.len() + 1)?;
        dims.insert(axis, depth);
        let shape = Shape::new(dims);
        if shape.checked_elements().is_none() {
            return Err(Problem::Refused(format!("a result of at most 2^48 elements expected, got {shape}")));
        }
        let results = vec![(self.ir.element(call.input(2)?), shape)];
        Ok(self.opaque(call, "a one-hot encoding is not a primitive".to_string(), 0, false, results))
    }
}

//! Operators that pick or place elements by index.

use deuteron_graph::{BinaryOp, CompareOp, Dtype, Shape, UnaryOp};

use super::call::{Results, axis_of};
use super::{Call, Problem, Translator};
use crate::constant::Constant;
use crate::element::Element;
use crate::ir::{Id, Kind, Logic, Reduction};
use crate::limits::{GATHER_SLICES, MAX_PATCH_ELEMENTS, SCATTER_ROUNDS, TOP_ROUNDS};

impl<'a> Translator<'a, '_> {
    pub(super) fn index(&mut self, call: &Call<'a, '_>) -> Results {
        match call.node.op {
            "Gather" => Ok(vec![self.gather(call)?]),
            "GatherND" => self.gather_nd(call),
            "TopK" => self.top_k(call),
            "OneHot" => Ok(vec![self.one_hot(call)?]),
            "ScatterND" => self.scatter(call, true),
            "ScatterElements" | "Scatter" => self.scatter(call, false),
            "ReverseSequence" => Ok(vec![self.reverse_sequence(call)?]),
            "Compress" => Ok(vec![self.compress(call)?]),
            _ => Ok(vec![self.gather_elements(call)?]),
        }
    }

    /// Elements of a flat tensor by known positions.
    pub(super) fn by_table(&mut self, flat: Id, table: &[usize], shape: &Shape) -> Result<Id, Problem> {
        let count = self.ir.shape(flat).elements();
        self.reserve(table.len())?;
        let indices = table.iter().map(|&at| at as f64).collect();
        let indices = self.ir.known(Constant::dense([table.len()].into(), indices, false), Element::I64);
        let column = self.ir.reshape(flat, vec![count, 1])?;
        let picked = self.ir.push(Kind::Gather, &[column, indices])?;
        Ok(self.ir.reshape(picked, shape.to_vec())?)
    }

    /// Single elements: by a table where the indices are known, by comparison with every place where not.
    fn gather_elements(&mut self, call: &Call) -> Result<Id, Problem> {
        let (x, indices) = (call.input(0)?, call.input(1)?);
        let (from, to) = (self.ir.shape(x).clone(), self.ir.shape(indices).clone());
        let axis = axis_of(call.int("axis", 0), from.rank())?;
        let fits = to.rank() == from.rank() && (0..to.rank()).all(|other| other == axis || to[other] <= from[other]);
        if !fits {
            return Err(Problem::Refused(format!("indices within the shape {from} expected, got {to}")));
        }
        let Some(picks) = self.ir.node(indices).constant.clone() else {
            return self.compared_elements(x, indices, axis);
        };
        let size = from[axis];
        let (strides, inner) = (from.strides(), to.strides());
        let mut table = Vec::with_capacity(to.elements());
        for (flat, index) in picks.values().enumerate() {
            let at = wrapped(index, size, axis)?;
            let others: usize =
                (0..to.rank()).filter(|&i| i != axis).map(|i| flat / inner[i] % to[i] * strides[i]).sum();
            table.push(others + at * strides[axis]);
        }
        let flat = self.ir.reshape(x, vec![from.elements()])?;
        self.by_table(flat, &table, &to)
    }

    fn compared_elements(&mut self, mut x: Id, indices: Id, axis: usize) -> Result<Id, Problem> {
        let to = self.ir.shape(indices).clone();
        let size = self.ir.shape(x)[axis];
        if to.elements().saturating_mul(size) > MAX_PATCH_ELEMENTS {
            return Err(Problem::Opaque("it gathers too many single elements".to_string()));
        }
        for other in (0..to.rank()).filter(|&other| other != axis) {
            x = self.ir.push(Kind::Slice { axis: other, start: 0, length: to[other] }, &[x])?;
        }
        // A new last axis counts the places: [.., picks, .., places].
        let last = self.ir.exchange(x, axis)?;
        let mut dims = self.ir.shape(last).to_vec();
        dims.insert(dims.len() - 1, 1);
        let table = self.ir.reshape(last, dims)?;
        let picks = self.ir.exchange(indices, axis)?;
        let mut dims = self.ir.shape(picks).to_vec();
        dims.push(1);
        let rank = dims.len();
        let picks = self.ir.reshape(picks, dims)?;
        let chosen = self.is_index(picks, rank - 1, size)?;
        let zero = self.ir.number(0.0, x);
        let only = self.ir.select(chosen, table, zero)?;
        let sum = self.ir.reduce(Reduction::Sum, only, vec![rank - 1], false)?;
        Ok(self.ir.exchange(sum, axis)?)
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
        // Indices that count from the end are looked up by comparison. Those of a model are not: token numbers are not
        // negative, and a run refuses indices that are.
        let rows = match self.is_given(indices, |index| index < 0.0) {
            true => self.compared_rows(table, indices)?,
            false => self.ir.push(Kind::Gather, &[table, indices])?,
        };
        let picked = self.ir.shape(indices).to_vec();
        let dims: Vec<usize> = picked.iter().chain(&others).copied().collect();
        let rank = picked.len();
        let result = self.ir.reshape(rows, dims)?;
        // The axes of the indices go where the axis was.
        let permutation = (rank..rank + axis).chain(0..rank).chain(rank + axis..rank + others.len()).collect();
        Ok(self.ir.push(Kind::Transpose(permutation), &[result])?)
    }

    /// Columns by their numbers.
    pub(super) fn features(&mut self, call: &Call) -> Results {
        let (x, columns) = (call.input(0)?, call.input(1)?);
        let (shape, count) = (self.ir.shape(x).clone(), self.ir.shape(columns).elements());
        if shape.rank() != 2 {
            return Err(Problem::Refused(format!("rows [n, c] expected, got {shape}")));
        }
        let picks = self.ir.reshape(columns, vec![count])?;
        let turned = self.ir.swap_last(x)?;
        let picked = self.ir.push(Kind::Gather, &[turned, picks])?;
        Ok(vec![self.ir.swap_last(picked)?])
    }

    /// Rows of a table by indices of which some count from the end.
    fn compared_rows(&mut self, table: Id, indices: Id) -> Result<Id, Problem> {
        let (size, cols) = (self.ir.shape(table)[0], self.ir.shape(table)[1]);
        let count = self.ir.shape(indices).elements();
        if count.saturating_mul(size).saturating_mul(cols) > MAX_PATCH_ELEMENTS {
            return Err(Problem::Opaque("a gather by so many negative indices is not a primitive".to_string()));
        }
        let picks = self.ir.reshape(indices, vec![count, 1])?;
        let chosen = self.is_index(picks, 1, size)?;
        let chosen = self.ir.reshape(chosen, vec![count, size, 1])?;
        let table = self.ir.reshape(table, vec![1, size, cols])?;
        let zero = self.ir.number(0.0, table);
        let only = self.ir.select(chosen, table, zero)?;
        Ok(self.ir.reduce(Reduction::Sum, only, vec![1], false)?)
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
        let has_negative = constant.distinct().any(|index| index < 0.0);
        let picked = match positions.first() {
            _ if self.ir.node(x).constant.is_some() => {
                self.picked(x, axis, count, |index| positions[index] as usize)?
            }
            Some(&start) if in_sequence => {
                self.ir.push(Kind::Slice { axis, start: start as usize, length: count }, &[x])?
            }
            _ if count <= GATHER_SLICES || has_negative => {
                self.picked(x, axis, count, |index| positions[index] as usize)?
            }
            _ => return Ok(None),
        };
        let dims = shape[..axis].iter().chain(constant.shape.iter()).chain(&shape[axis + 1..]).copied().collect();
        Ok(Some(self.ir.reshape(picked, dims)?))
    }

    fn gather_nd(&mut self, call: &Call) -> Results {
        let (x, indices) = (call.input(0)?, call.input(1)?);
        let (data, index) = (self.ir.shape(x).clone(), self.ir.shape(indices).clone());
        let batch = usize::try_from(call.int("batch_dims", 0)).unwrap_or(usize::MAX);
        let depth = index.cols();
        let leading = index.rank().saturating_sub(1);
        let rest = batch.checked_add(depth).and_then(|start| data.get(start..)).filter(|_| batch <= leading);
        let Some(rest) = rest.filter(|_| index[..batch] == data[..batch]) else {
            return Err(Problem::Refused(format!("indices of at most the rank of {data} expected, got {index}")));
        };
        let dims: Vec<usize> = index.leading().iter().chain(rest).copied().collect();
        let shape = Shape::new(dims);
        if shape.checked_elements().is_none() {
            return Err(Problem::Refused(format!("a result of at most 2^48 elements expected, got {shape}")));
        }
        if batch == 0 && depth == 1 && self.ir.node(indices).constant.is_none() {
            let table = self.ir.reshape(x, vec![data[0], rest.iter().product()])?;
            let picks = self.ir.reshape(indices, index.leading().to_vec())?;
            let rows = match self.is_given(indices, |index| index < 0.0) {
                true => self.compared_rows(table, picks)?,
                false => self.ir.push(Kind::Gather, &[table, picks])?,
            };
            return Ok(vec![self.ir.reshape(rows, shape.to_vec())?]);
        }
        let Some(picks) = self.given(indices) else {
            let results = vec![(self.ir.element(x), shape)];
            return Ok(self.opaque(call, "a gather of several axes is not a primitive".to_string(), 0, false, results));
        };
        self.reserve(shape.elements())?;
        let strides = data.strides();
        let slice: usize = rest.iter().product();
        let batches: usize = data[..batch].iter().product();
        let lines = picks.shape.elements() / depth.max(1);
        let per_batch: usize = data[batch..].iter().product();
        let values: Vec<f64> = picks.values().collect();
        let mut table = Vec::with_capacity(shape.elements());
        for line in 0..lines {
            let mut start = line / (lines / batches.max(1)).max(1) * per_batch;
            for (axis, &index) in values[line * depth..][..depth].iter().enumerate() {
                start += wrapped(index, data[batch + axis], batch + axis)? * strides[batch + axis];
            }
            table.extend(start..start + slice);
        }
        let flat = self.ir.reshape(x, vec![data.elements()])?;
        Ok(vec![self.by_table(flat, &table, &shape)?])
    }

    /// Updates put into data at known places, or combined with what is there.
    fn scatter(&mut self, call: &Call, of_slices: bool) -> Results {
        let ids = [call.input(0)?, call.input(1)?, call.input(2)?];
        let reduction = call.word("reduction", &["none", "add", "mul", "max", "min"])?;
        let [data, indices, updates] = ids.map(|id| self.ir.shape(id).clone());
        let axis = if of_slices { 0 } else { axis_of(call.int("axis", 0), data.rank())? };
        let Some(picks) = self.given(ids[1]) else {
            let results = vec![(self.ir.element(ids[0]), data)];
            return Ok(self.opaque(
                call,
                "a scatter by unknown indices is not a primitive".to_string(),
                0,
                false,
                results,
            ));
        };
        let misfit = || {
            Problem::Refused(format!(
                "indices and updates that fit the data {data} expected, got {indices} and {updates}"
            ))
        };
        self.reserve(data.elements().saturating_add(updates.elements()).saturating_add(indices.elements()))?;
        let strides = data.strides();
        let values: Vec<f64> = picks.values().collect();
        // Where each update goes.
        let mut places = Vec::with_capacity(updates.elements());
        if of_slices {
            let depth = indices.cols();
            let slice: usize = data.get(depth..).ok_or_else(misfit)?.iter().product();
            let lines = values.len().checked_div(depth).unwrap_or(0);
            if indices.rank() == 0 || lines.checked_mul(slice) != Some(updates.elements()) {
                return Err(misfit());
            }
            for line in values.chunks_exact(depth.max(1)) {
                let mut start = 0;
                for (axis, &index) in line.iter().enumerate() {
                    start += wrapped(index, data[axis], axis)? * strides[axis];
                }
                places.extend(start..start + slice);
            }
        } else {
            let fits = updates == indices
                && data.rank() == indices.rank()
                && (0..data.rank()).all(|other| other == axis || indices[other] <= data[other]);
            if !fits {
                return Err(misfit());
            }
            let inner = indices.strides();
            for (flat, &index) in values.iter().enumerate() {
                let at = wrapped(index, data[axis], axis)?;
                let others = (0..data.rank()).filter(|&i| i != axis);
                let others: usize = others.map(|i| flat / inner[i] % indices[i] * strides[i]).sum();
                places.push(others + at * strides[axis]);
            }
        }
        Ok(vec![self.combined(ids[0], ids[2], &places, reduction)?])
    }

    /// Data with updates at known places. Several updates of one place take turns.
    pub(super) fn combined(&mut self, data: Id, updates: Id, places: &[usize], reduction: &str) -> Result<Id, Problem> {
        let shape = self.ir.shape(data).clone();
        let (count, element) = (shape.elements(), self.ir.element(data));
        let flat = self.ir.reshape(data, vec![count])?;
        let updates = self.ir.reshape(updates, vec![places.len()])?;
        if reduction == "none" {
            let mut table: Vec<usize> = (0..count).collect();
            places.iter().enumerate().for_each(|(index, &place)| table[place] = count + index);
            let both = self.ir.push(Kind::Concat { axis: 0 }, &[flat, updates])?;
            return self.by_table(both, &table, &shape);
        }
        let (op, neutral) = match reduction {
            "add" => (BinaryOp::Add, 0.0),
            "mul" => (BinaryOp::Mul, 1.0),
            "max" => (BinaryOp::Max, element.range().map_or(f64::NEG_INFINITY, |(least, _)| least)),
            _ => (BinaryOp::Min, element.range().map_or(f64::INFINITY, |(_, most)| most)),
        };
        let mut turns: Vec<Vec<usize>> = Vec::new();
        let mut used = vec![0usize; count];
        for (index, &place) in places.iter().enumerate() {
            let turn = used[place];
            used[place] += 1;
            if turn >= SCATTER_ROUNDS {
                return Err(Problem::Opaque(format!(
                    "more than {SCATTER_ROUNDS} updates of one place are not combined"
                )));
            }
            if turn == turns.len() {
                turns.push(vec![places.len(); count]);
            }
            turns[turn][place] = index;
        }
        let border = self.ir.known(Constant::filled([1].into(), neutral), element);
        let both = self.ir.push(Kind::Concat { axis: 0 }, &[updates, border])?;
        let mut result = data;
        for table in turns {
            let update = self.by_table(both, &table, &shape)?;
            result = self.ir.binary(op, result, update)?;
        }
        Ok(result)
    }

    /// What a known condition picks along an axis, or of all elements. Places that the condition is too short for are left out.
    fn compress(&mut self, call: &Call) -> Result<Id, Problem> {
        let (x, condition) = (call.input(0)?, call.input(1)?);
        let shape = self.ir.shape(x).clone();
        let (x, axis) = match call.attribute("axis").and_then(|attribute| attribute.int) {
            Some(axis) => (x, axis_of(axis, shape.rank())?),
            None => (self.ir.reshape(x, vec![shape.elements()])?, 0),
        };
        let size = self.ir.shape(x)[axis];
        let given = self.given(condition);
        let given =
            given.ok_or_else(|| Problem::Opaque("how many elements it picks depends on the input".to_string()))?;
        if given.shape.rank() != 1 || given.shape.elements() > size {
            let got = &given.shape;
            return Err(Problem::Refused(format!("a condition of one axis of at most {size} expected, got {got}")));
        }
        self.reserve(given.shape.elements())?;
        let places: Vec<usize> =
            given.values().enumerate().filter(|(_, value)| *value != 0.0).map(|(place, _)| place).collect();
        self.picked(x, axis, places.len(), |index| places[index])
    }

    /// The beginning of each sequence turned round.
    fn reverse_sequence(&mut self, call: &Call) -> Result<Id, Problem> {
        let x = call.input(0)?;
        let shape = self.ir.shape(x).clone();
        let time = axis_of(call.int("time_axis", 0), shape.rank())?;
        let batch = axis_of(call.int("batch_axis", 1), shape.rank())?;
        let lengths = self.integers(call.input(1)?, "lengths")?;
        let fits =
            lengths.len() == shape[batch] && lengths.iter().all(|&length| (0..=shape[time] as i64).contains(&length));
        if !fits || time == batch {
            return Err(Problem::Refused(format!("{} lengths up to {} expected", shape[batch], shape[time])));
        }
        self.reserve(shape.elements())?;
        let strides = shape.strides();
        let source = |flat: usize| {
            let (at, length) =
                (flat / strides[time] % shape[time], lengths[flat / strides[batch] % shape[batch]] as usize);
            if at < length { flat - at * strides[time] + (length - 1 - at) * strides[time] } else { flat }
        };
        let table: Vec<usize> = (0..shape.elements()).map(source).collect();
        let flat = self.ir.reshape(x, vec![shape.elements()])?;
        self.by_table(flat, &table, &shape)
    }

    /// The largest few floats, one after the other. Of many, and of integers, each is compared with each; of too many, they are only
    /// described.
    fn top_k(&mut self, call: &Call) -> Results {
        let mut x = call.input(0)?;
        // Up to opset 9 the count is an attribute.
        let count = match call.attribute("k").and_then(|attribute| attribute.int) {
            Some(count) => vec![count],
            None => self.integers(call.input(1)?, "count")?,
        };
        let shape = self.ir.shape(x).clone();
        let axis = axis_of(call.int("axis", -1), shape.rank())?;
        let count = count.first().and_then(|&count| usize::try_from(count).ok()).filter(|&count| count <= shape[axis]);
        let count = count.ok_or_else(|| format!("a count of at most {} expected", shape[axis]))?;
        let largest = call.int("largest", 1) != 0;
        // In order is one of the orders that are allowed where none is asked for.
        call.without_effect(&["sorted"]);
        let is_integer = self.ir.element(x).dtype() == Dtype::I32;
        let compared = shape.elements().saturating_mul(shape[axis]);
        if count > 0 && (count > TOP_ROUNDS || is_integer) && compared <= MAX_PATCH_ELEMENTS {
            return self.ranked(x, axis, count, largest);
        }
        if count > TOP_ROUNDS || count == 0 || !self.ir.element(x).is_float() {
            let mut dims = shape.to_vec();
            dims[axis] = count;
            let result = Shape::new(dims);
            let results = vec![(self.ir.element(x), result.clone()), (Element::I64, result)];
            let why = "the largest of many are not a primitive".to_string();
            return Ok(self.opaque(call, why, shape.elements() as u64, false, results));
        }
        if !largest {
            x = self.ir.unary(UnaryOp::Neg, x)?;
        }
        let places = self.counting(shape[axis], Element::I64)?;
        let places = self.ir.along(places, axis, shape.rank())?;
        let (mut values, mut indices) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let place = self.ir.reduce(Reduction::ArgMax, x, vec![axis], true)?;
            values.push(self.ir.reduce(Reduction::Max, x, vec![axis], true)?);
            indices.push(place);
            let is_taken = self.ir.compare(deuteron_graph::CompareOp::Eq, places, place)?;
            let least = self.ir.number(f64::NEG_INFINITY, x);
            x = self.ir.select(is_taken, least, x)?;
        }
        let mut values = self.ir.push(Kind::Concat { axis }, &values)?;
        if !largest {
            values = self.ir.unary(UnaryOp::Neg, values)?;
        }
        Ok(vec![values, self.ir.push(Kind::Concat { axis }, &indices)?])
    }

    /// The largest by the number of those before each: of equal ones the first comes first.
    fn ranked(&mut self, x: Id, axis: usize, count: usize, largest: bool) -> Results {
        let last = self.ir.exchange(x, axis)?;
        let dims = self.ir.shape(last).to_vec();
        let size = self.ir.shape(last).cols();
        let lines = self.ir.shape(last).elements() / size;
        let rows = self.ir.reshape(last, vec![lines, size, 1])?;
        let cols = self.ir.reshape(last, vec![lines, 1, size])?;
        // Element [row, column]: whether value `column` comes before value `row`.
        let op = if largest { CompareOp::Gt } else { CompareOp::Lt };
        let mut is_ahead = self.ir.compare(op, cols, rows)?;
        let mut is_equal = self.ir.compare(CompareOp::Eq, cols, rows)?;
        if self.ir.element(x).is_float() {
            // What is no number comes first.
            let [of_col, of_row] =
                [self.ir.compare(CompareOp::Ne, cols, cols)?, self.ir.compare(CompareOp::Ne, rows, rows)?];
            let both = self.ir.push(Kind::Logic(Logic::And), &[of_col, of_row])?;
            is_equal = self.ir.push(Kind::Logic(Logic::Or), &[is_equal, both])?;
            let is_number = self.ir.push(Kind::Logic(Logic::Not), &[of_row])?;
            let only = self.ir.push(Kind::Logic(Logic::And), &[of_col, is_number])?;
            is_ahead = self.ir.push(Kind::Logic(Logic::Or), &[is_ahead, only])?;
        }
        let places = self.counting(size, Element::I64)?;
        let column = self.ir.reshape(places, vec![1, 1, size])?;
        let row = self.ir.reshape(places, vec![1, size, 1])?;
        let is_earlier = self.ir.compare(CompareOp::Lt, column, row)?;
        let is_tie = self.ir.push(Kind::Logic(Logic::And), &[is_equal, is_earlier])?;
        let is_before = self.ir.push(Kind::Logic(Logic::Or), &[is_ahead, is_tie])?;
        let counted = self.ir.cast(is_before, Element::F32)?;
        let rank = self.ir.reduce(Reduction::Sum, counted, vec![2], false)?;
        let rank = self.ir.reshape(rank, vec![lines, 1, size])?;
        // Each rank is the place of the one that has it.
        let wanted = self.counting(count, Element::F32)?;
        let wanted = self.ir.reshape(wanted, vec![1, count, 1])?;
        let has_it = self.ir.compare(CompareOp::Eq, rank, wanted)?;
        let number = self.ir.cast(has_it, Element::F32)?;
        let place = self.ir.reduce(Reduction::ArgMax, number, vec![2], false)?;
        let starts = (0..lines).map(|line| (line * size) as f64).collect();
        let starts = self.ir.known(Constant::dense([lines, 1].into(), starts, false), Element::I64);
        let at = self.ir.binary(BinaryOp::Add, place, starts)?;
        let table = self.ir.reshape(last, vec![lines * size, 1])?;
        let values = self.ir.push(Kind::Gather, &[table, at])?;
        let mut results = Vec::with_capacity(2);
        for result in [values, place] {
            let mut dims = dims.clone();
            if let Some(last) = dims.last_mut() {
                *last = count;
            }
            let result = self.ir.reshape(result, dims)?;
            results.push(self.ir.exchange(result, axis)?);
        }
        Ok(results)
    }

    fn one_hot(&mut self, call: &Call) -> Result<Id, Problem> {
        let indices = call.input(0)?;
        let depth = self.integers(call.input(1)?, "depth")?;
        let depth = depth.first().and_then(|&depth| usize::try_from(depth).ok());
        let depth = depth.ok_or_else(|| "a depth of at least 0 expected".to_string())?;
        let values = call.input(2)?;
        if self.ir.shape(values)[..] != [2] {
            let got = self.ir.shape(values);
            return Err(Problem::Refused(format!("two values expected, off and on, got shape {got}")));
        }
        let mut dims = self.ir.shape(indices).to_vec();
        let axis = axis_of(call.int("axis", -1), dims.len() + 1)?;
        dims.insert(axis, 1);
        let mut picks = self.ir.reshape(indices, dims)?;
        if self.ir.element(picks).is_float() {
            let whole = self.given(indices).ok_or_else(|| Problem::Opaque("its indices are floats".to_string()))?;
            let whole = whole.reshape(self.ir.shape(picks));
            picks = self.ir.known(whole, Element::I64);
        }
        let chosen = self.is_index(picks, axis, depth)?;
        let mut value = |start: usize| -> Result<Id, Problem> {
            let one = self.ir.push(Kind::Slice { axis: 0, start, length: 1 }, &[values])?;
            Ok(self.ir.reshape(one, Vec::new())?)
        };
        let (off, on) = (value(0)?, value(1)?);
        Ok(self.ir.select(chosen, on, off)?)
    }
}

/// An index within an axis, counted from the end if negative.
fn wrapped(index: f64, size: usize, axis: usize) -> Result<usize, Problem> {
    let at = if index < 0.0 { index + size as f64 } else { index };
    if (0.0..size as f64).contains(&at) {
        return Ok(at as usize);
    }
    Err(Problem::Refused(format!("an index below {size} expected on axis {axis}, got {index}")))
}

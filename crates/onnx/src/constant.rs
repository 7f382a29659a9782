//! Tensors with known values: shapes, axes, masks, tables of positions.
//!
//! An axis along which the values repeat is stored once, so a mask that is expanded to a batch costs no memory.

use std::cell::OnceCell;

use deuteron_graph::{Shape, memory};

/// The values. Truth values, which masks are made of, take a byte each.
#[derive(Debug, PartialEq)]
enum Data {
    Wide(Vec<f64>),
    Byte(Vec<u8>),
}

impl Clone for Data {
    fn clone(&self) -> Data {
        match self {
            Data::Wide(values) => Data::Wide(memory::copied(values)),
            Data::Byte(values) => Data::Byte(memory::copied(values)),
        }
    }
}

/// A tensor of known values. Whole numbers are exact up to 2^53, which no shape reaches.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Constant {
    pub shape: Shape,
    /// As many axes as the shape; each is the shape's size, or 1 where the values repeat.
    stored: Vec<usize>,
    data: Data,
    /// The value that is everywhere, once it was asked for: reading nodes ask each time.
    uniform: OnceCell<Option<f64>>,
}

impl Constant {
    /// Values in row-major order. Missing ones are zeros: the caller has checked the length.
    pub fn dense(shape: Shape, mut values: Vec<f64>, is_bool: bool) -> Self {
        values.resize(shape.elements(), 0.0);
        let data = match is_bool {
            true => Data::Byte(memory::collected(values.iter().map(|&x| (x != 0.0) as u8))),
            false => Data::Wide(values),
        };
        Constant { stored: shape.to_vec(), shape, data, uniform: OnceCell::new() }
    }

    /// One value everywhere.
    pub fn filled(shape: Shape, value: f64) -> Self {
        let empty = shape.elements() == 0;
        let stored = if empty { shape.to_vec() } else { vec![1; shape.rank()] };
        Constant {
            shape,
            stored,
            data: Data::Wide(if empty { Vec::new() } else { vec![value] }),
            uniform: OnceCell::new(),
        }
    }

    /// Elements in memory.
    pub fn stored_elements(&self) -> usize {
        match &self.data {
            Data::Wide(values) => values.len(),
            Data::Byte(values) => values.len(),
        }
    }

    /// The value at a stored position.
    pub fn get(&self, position: usize) -> f64 {
        match &self.data {
            Data::Wide(values) => values[position],
            Data::Byte(values) => values[position].into(),
        }
    }

    /// All values in row-major order.
    pub fn values(&self) -> impl ExactSizeIterator<Item = f64> + '_ {
        let strides = self.strides();
        Positions::new(self.shape.to_vec(), strides).map(|position| self.get(position))
    }

    /// The stored values, each once.
    pub fn distinct(&self) -> impl Iterator<Item = f64> + '_ {
        (0..self.stored_elements()).map(|position| self.get(position))
    }

    /// The value, if it is the same everywhere and there is one.
    pub fn uniform(&self) -> Option<f64> {
        *self.uniform.get_or_init(|| {
            let mut values = self.distinct();
            let first = values.next()?;
            values.all(|value| value == first).then_some(first)
        })
    }

    /// The values as whole numbers.
    pub fn integers(&self) -> Vec<i64> {
        memory::collected(self.values().map(|value| value as i64))
    }

    /// Strides of the stored values; 0 where they repeat.
    pub fn strides(&self) -> Vec<usize> {
        let mut strides = vec![0; self.stored.len()];
        let mut stride = 1;
        for axis in (0..self.stored.len()).rev() {
            if self.stored[axis] != 1 {
                strides[axis] = stride;
                stride *= self.stored[axis];
            }
        }
        strides
    }

    /// Stored sizes of a shape of which `self` is broadcast to, aligned at the end.
    fn stored_in(&self, rank: usize, axis: usize) -> usize {
        (axis + self.stored.len()).checked_sub(rank).map_or(1, |axis| self.stored[axis])
    }

    /// Elements that an elementwise operation on `operands` would store.
    pub fn elementwise_size(shape: &Shape, operands: &[&Constant]) -> usize {
        Self::stored_shape(shape, operands).iter().fold(1, |product: usize, &size| product.saturating_mul(size))
    }

    fn stored_shape(shape: &Shape, operands: &[&Constant]) -> Vec<usize> {
        let largest = |axis: usize| {
            let sizes = operands.iter().map(|operand| operand.stored_in(shape.rank(), axis));
            // An empty axis stays empty.
            if shape[axis] == 0 { 0 } else { sizes.max().unwrap_or(1) }
        };
        (0..shape.rank()).map(largest).collect()
    }

    /// A function of the operands' values, broadcast to `shape`.
    pub fn elementwise(shape: &Shape, operands: &[&Constant], is_bool: bool, f: impl Fn(&[f64]) -> f64) -> Self {
        let stored = Self::stored_shape(shape, operands);
        let count: usize = stored.iter().product();
        let mut walks: Vec<Positions> = operands
            .iter()
            .map(|operand| {
                let strides = operand.strides();
                let stride =
                    |axis: usize| (axis + strides.len()).checked_sub(stored.len()).map_or(0, |axis| strides[axis]);
                Positions::new(stored.clone(), (0..stored.len()).map(stride).collect())
            })
            .collect();
        let mut arguments = vec![0.0; operands.len()];
        let values = (0..count).map(|_| {
            for ((argument, walk), operand) in arguments.iter_mut().zip(&mut walks).zip(operands) {
                *argument = walk.next().map_or(0.0, |position| operand.get(position));
            }
            f(&arguments)
        });
        let data = if is_bool {
            Data::Byte(memory::collected(values.map(|value| (value != 0.0) as u8)))
        } else {
            Data::Wide(memory::collected(values))
        };
        Constant { shape: shape.clone(), stored, data, uniform: OnceCell::new() }
    }

    /// Repeats into a shape, without a copy.
    pub fn broadcast(&self, shape: &Shape) -> Self {
        let stored = Self::stored_shape(shape, &[self]);
        match stored.contains(&0) {
            true => Constant::dense(shape.clone(), Vec::new(), matches!(self.data, Data::Byte(_))),
            false => Constant { shape: shape.clone(), stored, data: self.data.clone(), uniform: OnceCell::new() },
        }
    }

    /// Picks elements: result position, in row-major order, to stored position.
    pub fn pick(&self, shape: &Shape, positions: impl Iterator<Item = usize>) -> Self {
        let data = match &self.data {
            Data::Wide(values) => Data::Wide(picked(values, shape.elements(), positions)),
            Data::Byte(values) => Data::Byte(picked(values, shape.elements(), positions)),
        };
        Constant { shape: shape.clone(), stored: shape.to_vec(), data, uniform: OnceCell::new() }
    }

    /// The same values under another shape.
    pub fn reshape(&self, shape: &Shape) -> Self {
        if self.stored_elements() == 1 && shape.elements() > 0 {
            return Constant::filled(shape.clone(), self.get(0));
        }
        self.pick(shape, Positions::new(self.shape.to_vec(), self.strides()))
    }

    /// Repeated axes as axes of size 1: it broadcasts to the same values.
    pub fn compact(&self) -> Constant {
        Constant {
            shape: Shape::new(self.stored.clone()),
            stored: self.stored.clone(),
            data: self.data.clone(),
            uniform: OnceCell::new(),
        }
    }

    /// Whether, on the last two axes, exactly those values are `seen` that lie on or before the causal border, counted
    /// from the end.
    pub fn is_causal(&self, seen: impl Fn(f64) -> bool) -> bool {
        let Some([rows, cols]) = self.shape.last_chunk::<2>().copied() else { return false };
        // A single row sees everything, which is no mask; more rows than columns leave rows without a key.
        if rows < 2 || cols < rows || self.stored[self.stored.len() - 2..] != [rows, cols] {
            return false;
        }
        let matrices = self.stored_elements() / (rows * cols);
        (0..matrices * rows).all(|line| {
            let border = line % rows + cols - rows;
            (0..cols).all(|col| seen(self.get(line * cols + col)) == (col <= border))
        })
    }

    /// Axes in another order.
    pub fn transpose(&self, shape: &Shape, permutation: &[usize]) -> Self {
        let strides = self.strides();
        let stored: Vec<usize> = permutation.iter().map(|&axis| self.stored[axis]).collect();
        let strides = permutation.iter().map(|&axis| strides[axis]).collect();
        let mut result = self.pick(&Shape::new(stored.clone()), Positions::new(stored.clone(), strides));
        (result.shape, result.stored) = (shape.clone(), stored);
        result
    }
}

fn picked<T: Copy>(values: &[T], count: usize, positions: impl Iterator<Item = usize>) -> Vec<T> {
    let mut picked = memory::room(count);
    picked.extend(positions.map(|position| values[position]));
    picked
}

/// Positions of the elements of a shape, in row-major order, under strides.
pub(crate) struct Positions {
    dims: Vec<usize>,
    strides: Vec<usize>,
    index: Vec<usize>,
    position: usize,
    left: usize,
}

impl Positions {
    pub fn new(dims: Vec<usize>, strides: Vec<usize>) -> Self {
        let left = dims.iter().product();
        Positions { index: vec![0; dims.len()], dims, strides, position: 0, left }
    }
}

impl Iterator for Positions {
    type Item = usize;
    fn next(&mut self) -> Option<usize> {
        self.left = self.left.checked_sub(1)?;
        let result = self.position;
        for axis in (0..self.dims.len()).rev() {
            self.index[axis] += 1;
            self.position += self.strides[axis];
            if self.index[axis] < self.dims[axis] {
                break;
            }
            self.position -= self.index[axis] * self.strides[axis];
            self.index[axis] = 0;
        }
        Some(result)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Positions {}

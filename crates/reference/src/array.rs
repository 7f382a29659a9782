//! Tensors of the reference: a shape and its values in row-major order, all `f64`.

use deuteron_graph::{Dtype, Shape};

use crate::generator::Generator;
use crate::round::round_slice;

/// A tensor. Booleans are 0 and 1, integers are whole numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Array {
    /// Sizes of the axes.
    pub shape: Shape,
    /// The values, last axis fastest.
    pub values: Vec<f64>,
}

impl Array {
    /// The values under a shape. Panics if they do not fill it: that is a mistake of the caller.
    pub fn new(shape: impl Into<Shape>, values: Vec<f64>) -> Self {
        let shape = shape.into();
        assert_eq!(shape.elements(), values.len(), "values of shape {shape}");
        Array { shape, values }
    }

    /// One value.
    pub fn scalar(value: f64) -> Self {
        Array { shape: Shape::scalar(), values: vec![value] }
    }

    /// The same value everywhere.
    pub fn filled(shape: impl Into<Shape>, value: f64) -> Self {
        let shape = shape.into();
        let values = vec![value; shape.elements()];
        Array { shape, values }
    }

    /// A function of the row-major index.
    pub fn from_fn(shape: impl Into<Shape>, value: impl FnMut(usize) -> f64) -> Self {
        let shape = shape.into();
        let values = (0..shape.elements()).map(value).collect();
        Array { shape, values }
    }

    /// Normal values, mean 0 and deviation 1.
    pub fn normal(shape: impl Into<Shape>, seed: u64) -> Self {
        let mut generator = Generator::new(seed);
        Array::from_fn(shape, |_| generator.normal())
    }

    /// Uniform values in `[low, high)`.
    pub fn uniform(shape: impl Into<Shape>, seed: u64, low: f64, high: f64) -> Self {
        let mut generator = Generator::new(seed);
        Array::from_fn(shape, |_| generator.uniform(low, high))
    }

    /// Whole numbers in `0..count`.
    pub fn indices(shape: impl Into<Shape>, seed: u64, count: usize) -> Self {
        let mut generator = Generator::new(seed);
        Array::from_fn(shape, |_| generator.below(count) as f64)
    }

    /// Each value as a dtype stores it.
    pub fn rounded(mut self, dtype: Dtype) -> Self {
        round_slice(dtype, &mut self.values);
        self
    }

    /// Number of rows: all axes but the last.
    pub fn rows(&self) -> usize {
        self.shape.rows()
    }

    /// Size of the last axis.
    pub fn cols(&self) -> usize {
        self.shape.cols()
    }

    /// One row of the last axis.
    pub fn row(&self, row: usize) -> &[f64] {
        &self.values[row * self.cols()..(row + 1) * self.cols()]
    }

    /// The element at an index of every axis.
    pub fn at(&self, index: &[usize]) -> f64 {
        assert_eq!(index.len(), self.shape.rank(), "an index for each axis of {}", self.shape);
        let position: usize = index.iter().zip(self.shape.strides()).map(|(i, stride)| i * stride).sum();
        self.values[position]
    }

    /// The largest finite magnitude; 0 if there is none.
    pub fn max_abs(&self) -> f64 {
        self.values.iter().filter(|x| x.is_finite()).fold(0.0, |largest, x| largest.max(x.abs()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_follow_the_row_major_order() {
        let array = Array::from_fn([2, 3, 5], |i| i as f64);
        assert_eq!(array.at(&[1, 2, 3]), 28.0);
        assert_eq!(array.row(4), [20.0, 21.0, 22.0, 23.0, 24.0]);
        assert_eq!(Array::scalar(3.0).at(&[]), 3.0);
    }

    #[test]
    fn the_largest_magnitude_is_of_finite_values() {
        assert_eq!(Array::new([4], vec![1.0, -2.0, f64::NAN, f64::INFINITY]).max_abs(), 2.0);
        assert_eq!(Array::filled([0], 1.0).max_abs(), 0.0);
    }
}

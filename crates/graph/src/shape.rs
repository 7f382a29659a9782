//! Shapes and the broadcasting rule.

use std::fmt;
use std::ops::Deref;

/// The sizes of a tensor's axes, outermost first. The empty shape is a scalar.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct Shape(Vec<usize>);

/// The most axes a tensor may have.
pub const MAX_RANK: usize = 8;

impl Shape {
    /// A shape of these sizes.
    pub fn new(dims: impl Into<Vec<usize>>) -> Self {
        Shape(dims.into())
    }

    /// The shape of one value.
    pub fn scalar() -> Self {
        Shape(Vec::new())
    }

    /// The sizes as a slice.
    pub fn dims(&self) -> &[usize] {
        &self.0
    }

    /// Number of axes.
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// Number of elements. Exact: shapes whose product overflows are refused when a node is made.
    pub fn elements(&self) -> usize {
        self.0.iter().product()
    }

    /// Number of elements, or `None` when it passes 2^48, far beyond any memory and safe to multiply by a dtype's bytes.
    pub fn checked_elements(&self) -> Option<usize> {
        // A zero anywhere makes the product zero, but the other sizes are still held to the limit.
        let product = self.0.iter().try_fold(1usize, |product, &size| product.checked_mul(size.max(1)))?;
        if product > 1 << 48 {
            return None;
        }
        Some(self.elements())
    }

    /// Size of the last axis; 1 for a scalar.
    pub fn cols(&self) -> usize {
        self.0.last().copied().unwrap_or(1)
    }

    /// Product of all axes but the last; 1 for a scalar or a vector.
    pub fn rows(&self) -> usize {
        self.leading().iter().product()
    }

    /// All axes but the last.
    pub fn leading(&self) -> &[usize] {
        &self.0[..self.0.len().saturating_sub(1)]
    }

    /// The same shape with another last axis. A scalar becomes a vector.
    pub fn with_cols(&self, cols: usize) -> Shape {
        let mut dims = self.0.clone();
        match dims.last_mut() {
            Some(last) => *last = cols,
            None => dims.push(cols),
        }
        Shape(dims)
    }

    /// Strides of the row-major order, in elements.
    pub fn strides(&self) -> Vec<usize> {
        let mut strides = vec![1; self.0.len()];
        for axis in (1..self.0.len()).rev() {
            strides[axis - 1] = strides[axis] * self.0[axis];
        }
        strides
    }

    /// The common shape of two operands: axes are aligned at the end, and an axis of size 1 repeats.
    pub fn broadcast(&self, other: &Shape) -> Option<Shape> {
        let rank = self.rank().max(other.rank());
        let mut dims = Vec::with_capacity(rank);
        for axis in 0..rank {
            match (self.size_from_end(rank - axis), other.size_from_end(rank - axis)) {
                (a, b) if a == b => dims.push(a),
                (1, b) => dims.push(b),
                (a, 1) => dims.push(a),
                _ => return None,
            }
        }
        Some(Shape(dims))
    }

    /// Whether `self` repeats into `target` without changing it.
    pub fn broadcasts_to(&self, target: &Shape) -> bool {
        self.broadcast(target).as_ref() == Some(target)
    }

    fn size_from_end(&self, position: usize) -> usize {
        self.rank().checked_sub(position).map_or(1, |axis| self.0[axis])
    }
}

impl Deref for Shape {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.0
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        Shape(dims.to_vec())
    }
}

impl From<&[usize]> for Shape {
    fn from(dims: &[usize]) -> Self {
        Shape(dims.to_vec())
    }
}

impl From<Vec<usize>> for Shape {
    fn from(dims: Vec<usize>) -> Self {
        Shape(dims)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, size) in self.0.iter().enumerate() {
            write!(f, "{}{size}", if i == 0 { "" } else { "," })?;
        }
        f.write_str("]")
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broadcasting_aligns_at_the_end() {
        let pairs = [
            ([2, 3].into(), Shape::from([3]), Some(Shape::from([2, 3]))),
            ([2, 1].into(), Shape::from([1, 5]), Some(Shape::from([2, 5]))),
            ([2, 3].into(), Shape::from([2]), None),
            (Shape::scalar(), Shape::from([4]), Some(Shape::from([4]))),
            ([0, 3].into(), Shape::from([1, 3]), Some(Shape::from([0, 3]))),
        ];
        for (a, b, expected) in pairs {
            assert_eq!(Shape::broadcast(&a, &b), expected, "{a} with {b}");
            assert_eq!(b.broadcast(&a), expected, "{b} with {a}");
        }
    }

    #[test]
    fn absurd_products_are_caught() {
        assert_eq!(Shape::from([usize::MAX, 2]).checked_elements(), None);
        assert_eq!(Shape::from([usize::MAX, 0]).checked_elements(), None);
        assert_eq!(Shape::from([0, 7]).checked_elements(), Some(0));
        assert_eq!(Shape::from([3, 7]).checked_elements(), Some(21));
    }
}

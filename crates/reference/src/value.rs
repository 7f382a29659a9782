//! A computed node: its elements, and their allowed errors.

use std::collections::BTreeSet;
use std::sync::Arc;

use deuteron_graph::{Dtype, Shape};

use crate::store::Store;
use crate::strided::{Strided, map};

/// A computed node.
#[derive(Debug, Clone)]
pub(crate) struct Value<'a> {
    pub dtype: Dtype,
    pub main: Strided<'a>,
    /// The reach of decisions that could have fallen the other way; `None`: zero.
    pub slack: Option<Strided<'static>>,
    /// The standard deviation of rounding errors.
    pub spread: Spread,
}

/// Axes of a tensor, one bit each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Axes(pub u64);

impl Axes {
    pub const NONE: Axes = Axes(0);

    pub fn all(rank: usize) -> Axes {
        Axes((1 << rank) - 1)
    }

    /// The axes that a condition holds for.
    pub fn where_(rank: usize, holds: impl Fn(usize) -> bool) -> Axes {
        Axes((0..rank).filter(|&axis| holds(axis)).fold(0, |bits, axis| bits | 1 << axis))
    }

    pub fn has(self, axis: usize) -> bool {
        self.0 >> axis & 1 == 1
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub fn with(self, other: Axes) -> Axes {
        Axes(self.0 | other.0)
    }

    /// The same axes of a tensor that has `more` leading ones.
    pub fn shifted(self, more: usize) -> Axes {
        Axes(self.0 << more)
    }
}

/// Standard deviations of the rounding errors of a value, per element.
///
/// An error is split in two: one that is independent from element to element, and one that all elements along some axes
/// have in common, because it came from a value that was repeated along them (a mean, a scale, a constant). Sums add
/// the first in squares, the second as it is.
#[derive(Debug, Clone, Default)]
pub(crate) struct Spread {
    /// Independent; `None`: zero.
    pub own: Option<Strided<'static>>,
    /// In common along `along`; `None`: zero.
    pub shared: Option<Strided<'static>>,
    pub along: Axes,
    /// Nodes whose rounding reached this value element by element. Two values with a common source have related errors.
    pub sources: Arc<BTreeSet<usize>>,
}

impl Spread {
    /// Exact in every kernel: inputs, integers, and what moves them without arithmetic.
    pub fn is_exact(&self) -> bool {
        self.own.is_none() && self.shared.is_none()
    }

    pub fn own(&self, shape: &Shape) -> Strided<'static> {
        or_zero(&self.own, shape)
    }

    pub fn shared(&self, shape: &Shape) -> Strided<'static> {
        or_zero(&self.shared, shape)
    }

    /// Both parts together; zero where exact.
    pub fn total(&self, shape: &Shape) -> Strided<'static> {
        match (&self.own, &self.shared) {
            (Some(own), Some(shared)) => map(shape, [own, shared], Store::PLAIN, |[own, shared]| norm(own, shared)),
            (Some(one), None) | (None, Some(one)) => one.clone(),
            (None, None) => Strided::scalar(0.0).broadcast(shape),
        }
    }

    /// As an operand of an operation of this shape: what is repeated is in common along the axes it is repeated over.
    pub fn repeated(&self, from: &Shape, to: &Shape) -> Spread {
        let missing = to.rank() - from.rank();
        let repeats = |axis: usize| to[axis] > 1 && (axis < missing || from[axis - missing] == 1);
        let axes = Axes::where_(to.rank(), repeats);
        let along = self.along.shifted(missing);
        // The error of a constant is in common to all elements and the same in every kernel: the run in the storage types
        // has it. Sums of its magnitudes would say much more than is true of sums that cancel.
        if axes.is_empty() || self.is_exact() || from.rank() == 0 {
            return Spread { along, ..self.clone() };
        }
        Spread { own: None, shared: Some(self.total(from)), along: along.with(axes), sources: self.sources.clone() }
    }

    /// Drops parts that are zero everywhere.
    pub fn settled(mut self) -> Spread {
        let lives = |part: Option<Strided<'static>>| part.filter(|part| part.any(|x| x != 0.0));
        (self.own, self.shared) = (lives(self.own), lives(self.shared));
        if self.shared.is_none() {
            self.along = Axes::NONE;
        }
        if self.is_exact() { Spread::default() } else { self }
    }
}

pub(crate) fn or_zero(part: &Option<Strided<'static>>, shape: &Shape) -> Strided<'static> {
    part.clone().unwrap_or_else(|| Strided::scalar(0.0).broadcast(shape))
}

/// The deviation of a sum of two independent errors.
#[inline(always)]
pub(crate) fn norm(a: f64, b: f64) -> f64 {
    (a * a + b * b).sqrt()
}

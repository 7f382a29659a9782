//! A computed node: its elements, and how far a kernel may lie from them.

use deuteron_graph::Dtype;

use crate::round::smallest;
use crate::scalar::FUNCTION_ULPS;
use crate::strided::Strided;

/// A computed node.
#[derive(Debug, Clone)]
pub(crate) struct Value<'a> {
    pub main: Strided<'a>,
    pub slack: Option<Strided<'static>>,
    pub reach: Reach,
}

/// Deviations that a value may be off: one element in 400 of a normal distribution lies beyond three.
const DEVIATIONS: f64 = 3.0;
/// Where an error reaches half the magnitude, nothing is known of the value but its sign.
const MOST_RELATIVE: f64 = 0.5;

/// The reach of rounding at a node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Reach {
    /// Relative error; 0 if exact.
    pub relative: f64,
    /// Below this magnitude a kernel may hold zero; 0 if exact.
    pub smallest: f64,
}

impl Reach {
    pub const EXACT: Reach = Reach { relative: 0.0, smallest: 0.0 };

    pub fn is_exact(self) -> bool {
        self.relative == 0.0
    }

    /// The absolute error of an element in a row of this root mean square. A computed zero is structural (a mask, a
    /// clamp, a dropped element), not the result of rounding.
    pub fn of(self, x: f64, row_scale: f64) -> f64 {
        if self.is_exact() || x == 0.0 || !x.is_finite() {
            return 0.0;
        }
        (DEVIATIONS * self.relative).min(MOST_RELATIVE) * x.abs().max(row_scale)
    }

    pub fn join(self, other: Reach) -> Reach {
        Reach { relative: self.relative.max(other.relative), smallest: self.smallest.max(other.smallest) }
    }

    /// One more error.
    pub fn step(self, relative: f64) -> Reach {
        Reach { relative: self.relative.hypot(relative), ..self }
    }

    /// One more rounding.
    pub fn rounded(self, dtype: Dtype) -> Reach {
        Reach { smallest: self.smallest.max(smallest(dtype)), ..self.step(dtype.epsilon() / 2.0) }
    }

    /// A function of the kernels' libraries, then one rounding.
    pub fn called(self, dtype: Dtype) -> Reach {
        self.step(FUNCTION_ULPS * Dtype::F32.epsilon()).rounded(dtype)
    }

    /// A sum of so many terms in `f32`, stored as `dtype`.
    pub fn summed(self, terms: usize, dtype: Dtype) -> Reach {
        self.step(Dtype::F32.epsilon() / 2.0 * (terms as f64).sqrt()).rounded(dtype)
    }
}

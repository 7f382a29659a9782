//! The answer that every kernel is held against: graphs computed in `f64`.
#![forbid(unsafe_code)]

mod array;
mod bounds;
mod error;
mod formulas;
mod generator;
mod matmul;
mod philox;
mod primitives;
mod random_graph;
mod random_steps;
mod reach;
mod reduce;
mod round;
mod scalar;
mod slack;
mod strided;

pub use array::Array;
pub use bounds::{Allowance, Comparison, compare, longest_reduction};
pub use error::ReferenceError;
pub use formulas::formula;
pub use generator::Generator;
pub use primitives::{Interpretation, Rounding, interpret, interpret_all};
pub use random_graph::{Case, op_counts, random_case};
pub use round::{round_slice, round_to, ulp};

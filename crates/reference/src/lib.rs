//! The answer that every kernel is held against: graphs computed in `f64`.
//!
//! - [`interpret`] runs the primitives of any graph, gradients included, exactly or rounded as if each value were stored.
//! - [`formula`] computes a composite straight from its mathematics, independently of its expansion.
//! - [`compare`] holds a result against the reference, within a bound computed from dtype and length.
//! - [`random_case`] makes graphs with inputs, for differential tests.
//!
//! ```
//! use deuteron_graph::{Dtype, Graph};
//! use deuteron_reference::{Allowance, Array, Rounding, compare, interpret, longest_reduction};
//!
//! let mut graph = Graph::new("rows");
//! let x = graph.input("x", Dtype::F16, [4, 129])?;
//! let y = graph.softmax(x)?;
//! graph.output("y", y)?;
//!
//! let inputs = [Array::normal([4, 129], 7).rounded(Dtype::F16)];
//! let exact = interpret(&graph, &inputs, Rounding::Exact)?;
//! let rounded = interpret(&graph, &inputs, Rounding::Storage)?;
//!
//! // Stands in for a kernel's result.
//! let got = exact.outputs[0].clone().rounded(Dtype::F16);
//! let allowance =
//!     Allowance { dtype: Dtype::F16, reduction: longest_reduction(&graph), factor: Allowance::FORWARD };
//! let slack = exact.slack[0].as_deref();
//! assert!(compare(&exact.outputs[0], &rounded.outputs[0], slack, &got, &allowance).holds());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
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
mod reach;
mod reduce;
mod round;
mod scalar;
mod slack;
mod store;
mod strided;
mod value;

pub use array::Array;
pub use bounds::{Allowance, Comparison, compare, longest_reduction};
pub use error::ReferenceError;
pub use formulas::formula;
pub use generator::Generator;
pub use primitives::{Interpretation, Rounding, interpret, interpret_all};
pub use random_graph::{Case, op_counts, random_case};
pub use round::{round_slice, round_to, ulp};

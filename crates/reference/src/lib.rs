//! The reference for every kernel: graphs computed in `f64`, with bounds for the errors of kernels.
//!
//! - [`interpret`] runs the primitives of any graph, gradients included, exactly or rounded as if each value were stored.
//! - [`formula`] computes a composite straight from its mathematics, independently of its expansion.
//! - [`bounded`] computes how large the errors of kernels may be, and compares results with these bounds.
//! - [`random_case`] makes graphs with inputs, for differential tests.
//!
//! ```
//! use deuteron_graph::{Dtype, Graph};
//! use deuteron_reference::{Array, bounded};
//!
//! let mut graph = Graph::new("rows");
//! let x = graph.input("x", Dtype::F16, [4, 129])?;
//! let y = graph.softmax(x)?;
//! graph.output("y", y)?;
//!
//! let inputs = [Array::normal([4, 129], 7).rounded(Dtype::F16)];
//! let expected = bounded(&graph, &inputs)?;
//!
//! // Stands in for a kernel's result.
//! let got = expected[0].exact.clone().rounded(Dtype::F16);
//! assert!(expected[0].compare(&got).holds());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod array;
mod bounds;
mod error;
mod formulas;
mod generator;
mod matmul;
mod noise;
mod philox;
mod picked;
mod primitives;
mod random_graph;
mod range;
mod reduce;
mod round;
mod scalar;
mod slack;
mod spread;
mod store;
mod strided;
mod threads;
mod value;

pub use array::Array;
pub use bounds::{Bounded, Comparison, Shares, bounded};
pub use error::ReferenceError;
pub use formulas::formula;
pub use generator::Generator;
pub use primitives::{Interpretation, Rounding, interpret, interpret_all};
pub use random_graph::{Case, MOST_ELEMENTS, op_counts, random_bounded_case, random_case, random_case_within};
pub use round::{round_slice, round_to, ulp};
pub use threads::on_own_thread;

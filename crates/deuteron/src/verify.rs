//! Verification: results against the f64 reference, within the bounds of its error analysis.

use deuteron_graph::{Dtype, Graph};
use deuteron_reference::{Array, Bounded, Comparison, bounded};
use serde::Serialize;

use crate::error::Error;
use crate::tensor::Tensor;

/// The expected results of a graph for some inputs, with a bound per element.
pub struct Expected {
    outputs: Vec<Bounded>,
}

/// A plan's results compared with the reference.
#[derive(Debug, Clone)]
pub struct Verification {
    /// one per output
    pub outputs: Vec<VerifiedOutput>,
}

/// One output compared with the reference.
#[derive(Debug, Clone)]
pub struct VerifiedOutput {
    /// its name
    pub name: String,
    /// dtype it is stored in
    pub dtype: Dtype,
    /// largest error and bound
    pub comparison: Comparison,
}

/// How much of the results a comparison with the reference covers.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Coverage {
    /// elements of all outputs
    pub elements: u64,
    /// elements that have no bound and were not checked: they depend on a divisor that may be 0, or on an undecided index
    pub without_bound: u64,
    /// elements whose bound is larger than every value of their output: they depend on undecided branches, or on a row whose keys are all masked
    pub loose: u64,
    /// outputs of which no element has a bound
    pub unchecked_outputs: Vec<String>,
}

impl Coverage {
    /// Whether some element of every output has a bound.
    pub fn is_whole(&self) -> bool {
        self.unchecked_outputs.is_empty()
    }

    /// Whether no element has a bound that says much.
    pub fn is_vacuous(&self) -> bool {
        self.elements > 0 && self.without_bound + self.loose == self.elements
    }
}

impl Expected {
    /// Interprets the graph, and computes the error bounds.
    pub fn new(graph: &Graph, inputs: &[Array]) -> Result<Expected, Error> {
        Ok(Expected { outputs: bounded(graph, inputs)? })
    }

    /// What was interpreted already.
    pub(crate) fn of(outputs: Vec<Bounded>) -> Expected {
        Expected { outputs }
    }

    /// The outputs in f64, with their bounds.
    pub fn outputs(&self) -> &[Bounded] {
        &self.outputs
    }

    /// Compares the outputs of a run.
    pub fn verify(&self, graph: &Graph, outputs: &[Tensor]) -> Result<Verification, Error> {
        let outputs = graph.outputs().iter().zip(&self.outputs).zip(outputs).map(|((output, expected), got)| {
            let comparison = expected.compare(&got.to_array()?);
            Ok(VerifiedOutput { name: output.name.clone(), dtype: expected.dtype, comparison })
        });
        Ok(Verification { outputs: outputs.collect::<Result<_, Error>>()? })
    }
}

impl Verification {
    /// Whether every output is within its bound.
    pub fn holds(&self) -> bool {
        self.outputs.iter().all(|output| output.comparison.holds())
    }

    /// The output whose error is the largest share of its bound.
    pub fn worst(&self) -> Option<&VerifiedOutput> {
        let checked = |output: &VerifiedOutput| output.comparison.is_checked();
        let order = |output: &VerifiedOutput| (checked(output), output.comparison.ratio);
        self.outputs.iter().max_by(|a, b| {
            let ((a_checked, a), (b_checked, b)) = (order(a), order(b));
            a_checked.cmp(&b_checked).then(a.total_cmp(&b))
        })
    }

    /// What was compared.
    pub fn coverage(&self) -> Coverage {
        let comparisons = || self.outputs.iter().map(|output| &output.comparison);
        Coverage {
            elements: comparisons().map(|comparison| comparison.shares.elements()).sum(),
            without_bound: comparisons().map(|comparison| comparison.shares.unbounded).sum(),
            loose: comparisons().map(|comparison| comparison.loose).sum(),
            unchecked_outputs: self
                .outputs
                .iter()
                .filter(|output| !output.comparison.is_checked())
                .map(|output| output.name.clone())
                .collect(),
        }
    }
}

//! Verification: results against the f64 reference, within the bounds of its error analysis.

use deuteron_graph::{Dtype, Graph};
use deuteron_reference::{Array, Bounded, Comparison, bounded};

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
        self.outputs.iter().max_by(|a, b| a.comparison.ratio.total_cmp(&b.comparison.ratio))
    }
}

//! Proof: results against the f64 reference, within bounds computed from dtype and reduction length.

use deuteron_graph::Graph;
use deuteron_reference::{
    Allowance, Array, Comparison, Interpretation, Rounding, compare, interpret, longest_reduction,
};

use crate::error::Error;
use crate::tensor::Tensor;

/// What a graph must give for some inputs: exactly, and as storage types allow.
pub struct Expected {
    exact: Interpretation,
    rounded: Interpretation,
    reduction: usize,
    factor: f64,
}

/// A plan's results held against the reference.
#[derive(Debug, Clone)]
pub struct Verification {
    /// one an output
    pub outputs: Vec<VerifiedOutput>,
}

/// One output held against the reference.
#[derive(Debug, Clone)]
pub struct VerifiedOutput {
    /// its name
    pub name: String,
    /// largest error and bound
    pub comparison: Comparison,
}

impl Expected {
    /// Interprets the graph twice. `backward` graphs are allowed 3 times the error of their storage type, others 2 times.
    pub fn new(graph: &Graph, inputs: &[Array], backward: bool) -> Result<Expected, Error> {
        Ok(Expected {
            exact: interpret(graph, inputs, Rounding::Exact)?,
            rounded: interpret(graph, inputs, Rounding::Storage)?,
            reduction: longest_reduction(graph),
            factor: if backward { 3.0 } else { 2.0 },
        })
    }

    /// Compares the outputs of a run.
    pub fn verify(&self, graph: &Graph, outputs: &[Tensor]) -> Result<Verification, Error> {
        let outputs = graph.outputs().iter().zip(outputs).enumerate().map(|(index, (output, got))| {
            let allowance = Allowance { dtype: got.dtype(), reduction: self.reduction, factor: self.factor };
            let slack = self.exact.slack[index].as_deref();
            let (exact, rounded) = (&self.exact.outputs[index], &self.rounded.outputs[index]);
            let comparison = compare(exact, rounded, slack, &got.to_array()?, &allowance);
            Ok(VerifiedOutput { name: output.name.clone(), comparison })
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

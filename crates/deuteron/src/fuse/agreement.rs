//! Comparison with results of another program.

use deuteron_graph::{Dtype, Graph};
use deuteron_onnx::TensorData;
use deuteron_plan::Strategy;
use deuteron_reference::Array;
use serde::Serialize;

use crate::engine::Engine;
use crate::error::Error;
use crate::session::Session;
use crate::tensor::Tensor;
use crate::verify::Expected;

/// The relative tolerance for another program's results: that of ONNX's own tests.
const RELATIVE: f64 = 1e-3;

/// The difference that is the largest share of its tolerance.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    /// the output that has it
    pub output: String,
    /// ours minus theirs; infinite where one is not finite, or the shapes differ
    pub difference: f64,
    /// the tolerance
    pub allowed: f64,
}

/// The difference between the results of the fused plan and given ones.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Agreement {
    /// outputs that were compared
    pub outputs: usize,
    /// the worst of them
    pub worst: Difference,
}

impl Agreement {
    /// Whether every element is within what is allowed.
    pub fn holds(&self) -> bool {
        self.worst.difference <= self.worst.allowed
    }
}

/// Runs the fused plan and compares each output with what is given for it. Allowed is, per element, the bound of our own
/// rounding twice, as the other program rounds too, and a thousandth of the value; integers and truth values must be equal.
pub fn agreement(engine: &Engine, graph: &Graph, inputs: &[Tensor], given: &[TensorData]) -> Result<Agreement, Error> {
    let mut session = Session::new(engine, graph, Strategy::Fused)?;
    let uploaded: Vec<Tensor> = inputs.iter().map(|tensor| tensor.to_device(engine)).collect::<Result<_, _>>()?;
    session.run(&uploaded.iter().collect::<Vec<_>>())?;
    let arrays: Vec<Array> = inputs.iter().map(Tensor::to_array).collect::<Result<_, _>>()?;
    let expected = Expected::new(graph, &arrays)?;
    let mut worst = Difference { output: String::new(), difference: 0.0, allowed: f64::INFINITY };
    for (index, (output, theirs)) in graph.outputs().iter().zip(given).enumerate() {
        let ours = session.output(index)?.to_array()?;
        let bounds = &expected.outputs()[index].bounds;
        let mut note = |difference: f64, allowed: f64| {
            // As a share of what is allowed; where nothing is, any difference is the worst.
            let share = |difference: f64, allowed: f64| if difference == 0.0 { 0.0 } else { difference / allowed };
            if worst.output.is_empty() || share(difference, allowed) > share(worst.difference, worst.allowed) {
                worst = Difference { output: output.name.clone(), difference, allowed };
            }
        };
        if ours.shape != theirs.shape {
            note(f64::INFINITY, 0.0);
            continue;
        }
        let is_float = theirs.dtype.is_float() || theirs.dtype == Dtype::F8e4m3;
        for ((&own, other), &bound) in ours.values.iter().zip(theirs.values()).zip(bounds) {
            let same = own == other || (own.is_nan() && other.is_nan());
            let difference = match (own - other).abs() {
                _ if same => 0.0,
                difference if difference.is_finite() => difference,
                _ => f64::INFINITY,
            };
            let relative = if is_float { RELATIVE * other.abs().max(1e-4) } else { 0.0 };
            note(difference, (2.0 * bound).max(relative));
        }
    }
    Ok(Agreement { outputs: given.len(), worst })
}

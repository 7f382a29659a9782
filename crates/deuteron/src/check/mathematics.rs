//! Checks the mathematics of the catalogue against references that use neither expansions nor `differentiate`.
//!
//! - Every call of a composite: its expansion in `f64` against its formula.
//! - Every gradient: the backward graph in `f64` against central differences of the forward graph, in which each composite is
//!   computed by its formula.
//!
//! Kernels are compared with the expansions, so that "verified" covers the formula too.

use std::collections::HashMap;

use deuteron_graph::{Callee, Composite, Dtype, Graph, NodeId, Op, Output, extract};
use deuteron_reference::{Array, Rounding, formula, interpret, interpret_all};

use crate::catalog::{ExpertSizes, FusedOp, Heads, OperandType, Sizes};
use crate::error::Error;
use crate::seed;

/// The number of comparisons with formulas and differences, and the mismatches.
#[derive(Debug, Default)]
pub(super) struct Findings {
    /// Calls of composites.
    pub calls: usize,
    /// Tensors of gradients.
    pub gradients: usize,
    /// Elements of them.
    pub elements: usize,
    pub problems: Vec<String>,
}

/// Maximum number of steps of a formula beside its sums; each may be off by an epsilon of the largest magnitude involved.
const STEPS: f64 = 16.0;

/// Small enough for a difference in every element: two sequences of three positions, two heads of two features.
fn sizes(dtype: Dtype) -> Sizes {
    Sizes {
        heads: Heads { positions: 3, width: 2 },
        tokens: 5,
        positions: 8,
        classes: 5,
        experts: ExpertSizes { count: 3, columns: Some(5), choices: 2 },
        ..Sizes::new(6, 4, dtype)
    }
}

/// Checks the formulas of an op of each dtype, and its gradient if it has one. Nothing is rounded: what differs by dtype are the casts.
pub(super) fn check(op: &FusedOp) -> Result<Findings, Error> {
    let mut findings = Findings::default();
    for dtype in Dtype::FLOATS {
        let types = op.operand_types_of(&sizes(dtype));
        let graph = op.graph(&types)?;
        compare_calls(&graph, &inputs(&graph)?, &mut findings)?;
        if op.has_backward() {
            compare_gradients(op, &types, &mut findings)?;
        }
    }
    Ok(findings)
}

/// Normal numbers; indices and bytes as `bench` has them.
fn inputs(graph: &Graph) -> Result<Vec<Array>, Error> {
    let seeded = seed::inputs(graph, 11)?;
    let of = |(position, tensor): (usize, &crate::Tensor)| match tensor.dtype().is_float() {
        true => Ok(Array::normal(tensor.shape().clone(), 17 + position as u64)),
        false => tensor.to_array(),
    };
    seeded.iter().enumerate().map(of).collect()
}

fn compare_calls(graph: &Graph, inputs: &[Array], findings: &mut Findings) -> Result<(), Error> {
    let values = interpret_all(graph, inputs, Rounding::Exact)?;
    let of = |ids: &[NodeId]| ids.iter().map(|id| values[id.index()].clone()).collect::<Vec<Array>>();
    for call in graph.calls() {
        let Callee::Composite(composite) = &call.callee else { continue };
        findings.calls += 1;
        let (operands, got) = (of(&call.inputs), of(&call.outputs));
        let expected = formula(composite, &operands);
        let bound = bound(composite, &operands, &expected);
        for (result, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let agrees = |(got, expected): (&f64, &f64)| {
                got == expected || (got.is_nan() && expected.is_nan()) || (got - expected).abs() <= bound
            };
            let pairs = || got.values.iter().zip(&expected.values);
            let wrong = pairs().position(|pair| !agrees(pair));
            if let Some(index) = wrong.or((got.shape != expected.shape).then_some(0)) {
                let (got, expected) = (got.values.get(index), expected.values.get(index));
                let name = composite.name();
                let what = format!(
                    "{name}: result {result} is {got:?} at element {index}, its formula gives {expected:?}, bound {bound:e}"
                );
                findings.problems.push(what);
            }
        }
    }
    Ok(())
}

/// The tolerance between two computations of a composite in `f64`: an epsilon of the largest product involved, for each term of
/// the longest sum. A norm amplifies the difference of a row from its mean.
fn bound(composite: &Composite, operands: &[Array], results: &[Array]) -> f64 {
    let terms = operands.iter().flat_map(|array| array.shape.iter().copied()).max().unwrap_or(1);
    let finite = operands.iter().chain(results).flat_map(|array| &array.values).filter(|value| value.is_finite());
    let largest = finite.fold(1.0, |largest: f64, value| largest.max(value.abs()));
    let scaled = match composite {
        Composite::LayerNorm { eps } | Composite::RmsNorm { eps } => 1.0 / eps.sqrt(),
        _ => 1.0,
    };
    STEPS * terms as f64 * f64::EPSILON * largest * largest * scaled
}

fn compare_gradients(op: &FusedOp, types: &[OperandType], findings: &mut Findings) -> Result<(), Error> {
    let training = op.training(types)?;
    let backward = op.backward_graph(types)?;
    let mut forward = Differences::new(training.forward().clone())?;
    // Backward takes operands, what forward saved for it, and gradients of the outputs, each by its name.
    let saving = training.saving()?;
    let saved = interpret(&saving.graph, &forward.inputs, Rounding::Exact)?.outputs;
    let mut by_name: HashMap<String, Array> = HashMap::new();
    by_name.extend(training.kept_names().into_iter().zip(saving.kept.iter().map(|&output| saved[output].clone())));
    let names = forward.graph.inputs().iter().map(|&id| forward.graph.label(id));
    by_name.extend(names.zip(forward.inputs.iter().cloned()));
    let names = forward.graph.outputs().iter().map(|output| format!("d_{}", output.name));
    by_name.extend(names.zip(forward.seeds.iter().cloned()));
    let given = backward.inputs().iter().map(|&id| by_name.get(&backward.label(id)).cloned());
    let Some(given) = given.collect::<Option<Vec<Array>>>() else {
        findings.problems.push("backward reads a value that forward does not return".to_string());
        return Ok(());
    };
    let gradients = interpret(&backward, &given, Rounding::Exact)?.outputs;
    for (output, gradient) in backward.outputs().iter().zip(&gradients) {
        let of = |id: &NodeId| format!("d_{}", forward.graph.label(*id)) == output.name;
        let Some(position) = forward.graph.inputs().iter().position(of) else {
            findings.problems.push(format!("{} is the gradient of no operand", output.name));
            continue;
        };
        forward.compare(position, gradient, findings)?;
    }
    Ok(())
}

/// A forward graph, whose outputs are contracted with random numbers to one number `L`.
struct Differences {
    graph: Graph,
    steps: Vec<Step>,
    inputs: Vec<Array>,
    /// One per output.
    seeds: Vec<Array>,
}

/// How some values of a graph are computed.
enum Step {
    /// Given.
    Input(NodeId),
    /// A primitive: a graph of its own, and the operands.
    Primitive(NodeId, Graph, Vec<NodeId>),
    /// A composite, by its formula: its operands and results.
    Formula(Composite, Vec<NodeId>, Vec<NodeId>),
}

impl Differences {
    fn new(graph: Graph) -> Result<Differences, Error> {
        let mut steps = Vec::new();
        for call in graph.calls() {
            if let Callee::Composite(composite) = &call.callee {
                steps.push(Step::Formula(*composite, call.inputs.clone(), call.outputs.clone()));
                continue;
            }
            for id in (call.start..call.end).filter_map(|index| graph.id(index)) {
                let node = graph.node(id);
                if matches!(node.op, Op::Input { .. }) {
                    steps.push(Step::Input(id));
                    continue;
                }
                let mut operands = node.inputs.clone();
                operands.sort_unstable();
                operands.dedup();
                let result = Output { name: "result".to_string(), node: id };
                steps.push(Step::Primitive(id, extract(&graph, &[result], &operands)?, operands));
            }
        }
        let inputs = inputs(&graph)?;
        let seed = |(position, output): (usize, &Output)| {
            Array::normal(graph.node(output.node).shape.clone(), 71 + position as u64)
        };
        let seeds = graph.outputs().iter().enumerate().map(seed).collect();
        Ok(Differences { graph, steps, inputs, seeds })
    }

    /// Compares the gradient of `L` in an input with differences.
    fn compare(&mut self, position: usize, gradient: &Array, findings: &mut Findings) -> Result<(), Error> {
        findings.gradients += 1;
        for (element, &analytic) in gradient.values.iter().enumerate() {
            findings.elements += 1;
            let (difference, bound) = self.slope(position, element)?;
            // A slope that is not a number agrees with nothing.
            if (analytic - difference).abs() <= bound {
                continue;
            }
            let name = self.graph.label(self.graph.inputs()[position]);
            findings.problems.push(format!(
                "d_{name} is {analytic} at element {element}, finite differences of the formula give {difference}, bound {bound:e}"
            ));
            break;
        }
        Ok(())
    }

    /// The slope of `L` in one element of an input, by a central difference, with its error bound.
    ///
    /// A difference over `h` is off by `h^2 L'''/6`, of which the difference over `2 h` has four times as much, and by the rounding of `L`
    /// over `h`: an epsilon of the terms of `L` for each node.
    fn slope(&mut self, position: usize, element: usize) -> Result<(f64, f64), Error> {
        let x = self.inputs[position].values[element];
        // The step at which both errors are about equal: the cube root of epsilon.
        let step = f64::EPSILON.cbrt() * x.abs().max(1.0);
        let mut at = |x: f64| {
            self.inputs[position].values[element] = x;
            self.contracted()
        };
        let [(far, _), (near, magnitude), (near_below, _), (far_below, _)] =
            [at(x + 2.0 * step)?, at(x + step)?, at(x - step)?, at(x - 2.0 * step)?];
        self.inputs[position].values[element] = x;
        let (wide, narrow) = ((far - far_below) / (4.0 * step), (near - near_below) / (2.0 * step));
        let rounding = f64::EPSILON * magnitude * self.graph.nodes().len() as f64 / step;
        Ok((narrow, (wide - narrow).abs() + rounding))
    }

    /// The sum of outputs times seeds, and of its magnitudes.
    fn contracted(&self) -> Result<(f64, f64), Error> {
        let mut values: Vec<Option<Array>> = vec![None; self.graph.nodes().len()];
        let mut given = self.inputs.iter();
        let of = |values: &[Option<Array>], ids: &[NodeId]| {
            ids.iter().filter_map(|id| values[id.index()].clone()).collect::<Vec<Array>>()
        };
        for step in &self.steps {
            match step {
                Step::Input(id) => values[id.index()] = given.next().cloned(),
                Step::Primitive(id, graph, operands) => {
                    let results = interpret(graph, &of(&values, operands), Rounding::Exact)?.outputs;
                    values[id.index()] = results.into_iter().next();
                }
                Step::Formula(composite, operands, results) => {
                    let computed = formula(composite, &of(&values, operands));
                    results.iter().zip(computed).for_each(|(id, value)| values[id.index()] = Some(value));
                }
            }
        }
        let (mut sum, mut magnitude) = (0.0, 0.0);
        let outputs = self.graph.outputs().iter().zip(&self.seeds);
        for (output, seed) in outputs.filter(|(output, _)| self.graph.node(output.node).dtype.is_float()) {
            let result = values[output.node.index()].iter().flat_map(|array| &array.values);
            for (value, seed) in result.zip(&seed.values) {
                sum += value * seed;
                magnitude += (value * seed).abs();
            }
        }
        Ok((sum, magnitude))
    }
}

#[cfg(test)]
mod tests {
    use deuteron_graph::Mask;

    use super::*;
    use crate::catalog::ATTENTION;

    #[test]
    fn every_expansion_and_gradient_of_the_catalogue_is_its_formula() {
        let (mut calls, mut gradients) = (0, 0);
        let worked = [
            ATTENTION.with(|a| (a.scores.soft_cap, a.scores.window, a.scores.documents) = (Some(0.7), Some(2), true)),
            ATTENTION.with(|a| (a.mask, a.scores.slopes, a.scores.bias) = (Mask::Full, true, true)),
        ];
        for op in FusedOp::variants().into_iter().chain(worked) {
            let findings = check(&op).unwrap();
            assert_eq!(findings.problems, Vec::<String>::new(), "{op:?}");
            assert_eq!(findings.gradients > 0, op.has_backward(), "{op:?}");
            (calls, gradients) = (calls + findings.calls, gradients + findings.gradients);
        }
        assert!(calls > 100 && gradients > 100, "{calls} calls, {gradients} gradients");
    }

    #[test]
    fn a_gradient_that_is_off_is_found() {
        // Of sum(seed silu(x)), by hand.
        let mut forward = Differences::new("x = input f32[3,4] ; y = silu x ; out y".parse().unwrap()).unwrap();
        let slope = |x: f64| {
            let sigmoid = 1.0 / (1.0 + (-x).exp());
            sigmoid * (1.0 + x * (1.0 - sigmoid))
        };
        let values = forward.inputs[0].values.iter().zip(&forward.seeds[0].values);
        let right = Array::new([3, 4], values.map(|(&x, seed)| seed * slope(x)).collect());
        let mut found = |gradient: &Array| {
            let mut findings = Findings::default();
            forward.compare(0, gradient, &mut findings).unwrap();
            findings.problems.len()
        };
        assert_eq!(found(&right), 0);
        for wrong in [right.values[7] * (1.0 + 1e-6), -right.values[7], 0.0, f64::NAN] {
            let mut gradient = right.clone();
            gradient.values[7] = wrong;
            assert_eq!(found(&gradient), 1, "{wrong}");
        }
    }

    #[test]
    fn an_expansion_that_is_off_is_found() {
        let graph: Graph = "x = input f32[3,4] ; y = softmax x ; out y".parse().unwrap();
        let x = Array::normal([3, 4], 5);
        let right = formula(&Composite::Softmax, std::slice::from_ref(&x));
        let limit = bound(&Composite::Softmax, std::slice::from_ref(&x), &right);
        assert!(limit > 0.0 && limit < 1e-10, "{limit:e}");
        let mut findings = Findings::default();
        compare_calls(&graph, std::slice::from_ref(&x), &mut findings).unwrap();
        assert_eq!((findings.calls, findings.problems.len()), (1, 0));
        // Masked scores do not make everything right.
        let masked = Array::filled([3, 4], f64::NEG_INFINITY);
        assert!(bound(&Composite::CausalMask, &[masked], &[]).is_finite());
    }
}

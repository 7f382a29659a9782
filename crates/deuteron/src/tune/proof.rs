//! Verification of a launch shape: against f64 for small kernels, otherwise against the suggested launch shape.

use deuteron_graph::{Dtype, Graph, Op, ReduceOp};
use deuteron_reference::{Array, Bounded, Comparison, ulp};

use crate::error::Error;
use crate::tensor::Tensor;
use crate::verify::Expected;

/// Elements of all values of a kernel up to which the reference is quick.
const QUICK: usize = 1 << 25;

/// The tolerance between two right results, relative to the error of rounding and summation order in one result: each
/// of the two is off by as much, and as much again comes from values that are rounded inside of the kernel.
const APART: f64 = 4.0;

/// The reference of results.
pub(super) enum Proof {
    /// f64
    Exact { part: Box<Graph>, expected: Box<Expected> },
    /// those of another launch shape, each with its largest magnitude
    Like { first: Vec<(Tensor, f64)>, reduction: usize },
}

impl Proof {
    /// Against f64, if the kernel is small. `part` is the graph of the kernel alone.
    pub fn exact(part: &Graph, inputs: &[Tensor]) -> Result<Option<Proof>, Error> {
        let elements: usize = part.nodes().iter().map(|node| node.shape.elements()).sum();
        // A buffer that no result depends on is none of the part's inputs.
        if elements > QUICK || part.inputs().len() != inputs.len() {
            return Ok(None);
        }
        let arrays: Vec<Array> = inputs.iter().map(Tensor::to_array).collect::<Result<_, _>>()?;
        let expected = Box::new(Expected::new(part, &arrays)?);
        Ok(Some(Proof::Exact { part: Box::new(part.clone()), expected }))
    }

    /// Compares with trusted results.
    pub fn like(part: &Graph, outputs: Vec<Tensor>) -> Result<Proof, Error> {
        let with_magnitude = |tensor: Tensor| {
            let magnitude = tensor.to_array()?.max_abs();
            Ok((tensor, magnitude))
        };
        let first = outputs.into_iter().map(with_magnitude).collect::<Result<_, Error>>()?;
        Ok(Proof::Like { first, reduction: longest_reduction(part) })
    }

    /// The mistake in results, if there is one.
    pub fn problem(&self, outputs: &[Tensor]) -> Result<Option<String>, Error> {
        match self {
            Proof::Exact { part, expected } => {
                let verification = expected.verify(part, outputs)?;
                let wrong = verification.worst().filter(|_| !verification.holds());
                Ok(wrong.map(|wrong| told(&wrong.name, &wrong.comparison, "f64")))
            }
            Proof::Like { first, reduction } => {
                for (index, ((first, magnitude), got)) in first.iter().zip(outputs).enumerate() {
                    let comparison = apart(first, *magnitude, got, *reduction)?;
                    if !comparison.holds() {
                        return Ok(Some(told(&index.to_string(), &comparison, "the suggested launch shape")));
                    }
                }
                Ok(None)
            }
        }
    }
}

fn told(output: &str, comparison: &Comparison, from: &str) -> String {
    let Comparison { error, bound, .. } = comparison;
    format!("output {output} is {error:.2e} from {from}, bound {bound:.2e}")
}

/// Elements with equal bits are right; the others are compared.
fn apart(first: &Tensor, magnitude: f64, got: &Tensor, reduction: usize) -> Result<Comparison, Error> {
    let dtype = got.dtype();
    let (first, got): (Vec<f64>, Vec<f64>) = first.differences(got)?.into_iter().unzip();
    let bounds = vec![distance(dtype, magnitude, reduction); first.len()];
    let [first, got] = [first, got].map(|values| Array::new([values.len()], values));
    Ok(Bounded { dtype, exact: first, bounds }.compare(&got))
}

/// The tolerance between two right results in a tensor of this largest magnitude. Bytes may differ by one step.
fn distance(dtype: Dtype, magnitude: f64, reduction: usize) -> f64 {
    match dtype {
        Dtype::F32 | Dtype::F16 | Dtype::Bf16 => {
            let accumulation = Dtype::F32.epsilon() * (reduction as f64).sqrt() * magnitude;
            APART * (2.0 * ulp(dtype, magnitude) + accumulation)
        }
        Dtype::I8 | Dtype::F8e4m3 => ulp(dtype, magnitude),
        Dtype::I32 | Dtype::Bool => 0.0,
    }
}

/// Terms of the longest sum in a graph, at least 1.
fn longest_reduction(graph: &Graph) -> usize {
    let terms = graph.nodes().iter().map(|node| {
        let operand = |position: usize| &graph.node(node.inputs[position]).shape;
        match &node.op {
            Op::RowReduce(ReduceOp::Sum | ReduceOp::Mean) => operand(0).cols(),
            Op::ColumnSum => operand(0).rows(),
            Op::Matmul { transpose_a, .. } => {
                let shape = operand(0);
                shape[shape.rank() - if *transpose_a { 2 } else { 1 }]
            }
            Op::ScatterAdd { .. } => operand(0).elements(),
            Op::RowReduce(ReduceOp::Max | ReduceOp::AbsMax | ReduceOp::ArgMax) => 1,
            Op::Input { .. } | Op::Const { .. } | Op::Iota { .. } | Op::Random { .. } => 1,
            Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast(_) => 1,
            Op::Gather | Op::Append { .. } | Op::View(_) | Op::Concat { .. } | Op::StopGradient | Op::Opaque(_) => 1,
        }
    });
    terms.max().unwrap_or(1).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(dtype: Dtype, values: &[f32]) -> Tensor {
        Tensor::from_f32(dtype, [values.len()], values).unwrap()
    }

    fn problem(dtype: Dtype, first: &[f32], got: &[f32]) -> Option<String> {
        let part: Graph = "x = input f32[8] ; y = relu x ; out y".parse().unwrap();
        Proof::like(&part, vec![tensor(dtype, first)]).unwrap().problem(&[tensor(dtype, got)]).unwrap()
    }

    #[test]
    fn roundings_pass_and_wrong_values_do_not() {
        let first = [1.0, -2.0, 0.5, 3.0];
        for dtype in Dtype::FLOATS {
            let step = dtype.epsilon() as f32 * 2.0;
            assert_eq!(problem(dtype, &first, &first), None);
            assert_eq!(problem(dtype, &first, &[1.0 + step, -2.0 - 2.0 * step, 0.5, 3.0]), None);
            assert!(problem(dtype, &first, &[1.0, -2.0, 0.0, 3.0]).is_some(), "an element that is missing");
            assert!(problem(dtype, &first, &[1.0, f32::NAN, 0.5, 3.0]).is_some(), "an element that was not written");
            assert!(problem(dtype, &first, &[-2.0, 1.0, 0.5, 3.0]).is_some(), "elements that are swapped");
        }
        assert_eq!(problem(Dtype::F32, &[f32::NAN, 1.0], &[f32::NAN, 1.0]), None);
        assert_eq!(problem(Dtype::I8, &[5.0, 6.0], &[5.0, 7.0]), None);
        assert!(problem(Dtype::I8, &[5.0, 6.0], &[5.0, 8.0]).is_some());
        let index = |value| Tensor::from_i32([1], &[value]).unwrap();
        let part: Graph = "x = input f32[8] ; y = relu x ; out y".parse().unwrap();
        let proof = Proof::like(&part, vec![index(3)]).unwrap();
        assert!(proof.problem(&[index(3)]).unwrap().is_none() && proof.problem(&[index(4)]).unwrap().is_some());
    }

    #[test]
    fn a_small_kernel_is_held_against_f64() {
        let part: Graph = "x = input f32[4] ; y = relu x ; out y".parse().unwrap();
        let inputs = [tensor(Dtype::F32, &[1.0, -1.0, 2.0, 3.0])];
        let proof = Proof::exact(&part, &inputs).unwrap().unwrap();
        assert_eq!(proof.problem(&[tensor(Dtype::F32, &[1.0, 0.0, 2.0, 3.0])]).unwrap(), None);
        let problem = proof.problem(&[tensor(Dtype::F32, &[1.0, -1.0, 2.0, 3.0])]).unwrap().unwrap();
        assert!(problem.contains("from f64"), "{problem}");
        let large: Graph = "x = input f32[20000,2000] ; y = relu x ; out y".parse().unwrap();
        assert!(Proof::exact(&large, &inputs).unwrap().is_none());
    }
}

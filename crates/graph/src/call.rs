//! Calls of composites: operands and attributes are checked, then the expansion is appended.

use crate::composite::{Composite, Mask};
use crate::dtype::Dtype;
use crate::error::GraphError;
use crate::expand::Expansion;
use crate::graph::Graph;
use crate::node::NodeId;
use crate::shape::Shape;

/// A mask of truth values or integers would be added as 0 and 1.
const FLOAT_MASK: &str = "a float mask that is added to the scores (of truth values, a select between 0 and -inf)";

impl Graph {
    /// Calls a composite: checks operands and attributes, appends the expansion, returns the results.
    pub fn call(&mut self, composite: Composite, inputs: &[NodeId]) -> Result<Vec<NodeId>, GraphError> {
        for &input in inputs {
            self.check_node(composite.name(), input)?;
        }
        let (least, most) = composite.arity();
        if inputs.len() < least || inputs.len() > most {
            let count = if least == most { format!("{least} operands") } else { format!("{least} or {most} operands") };
            return Err(self.refuse(&composite, inputs, &count));
        }
        check_attributes(&composite)?;
        self.check_operands(&composite, inputs)?;
        self.composite_call(composite, inputs, |graph| Expansion { graph }.expand(composite, inputs))
    }

    fn refuse(&self, composite: &Composite, inputs: &[NodeId], expected: &str) -> GraphError {
        GraphError::Operands {
            op: composite.name().to_string(),
            expected: expected.to_string(),
            operands: inputs.iter().map(|&id| self.operand(id)).collect(),
        }
    }

    /// Checks that the expansion's primitives would make too, with messages in terms of the composite.
    fn check_operands(&self, composite: &Composite, inputs: &[NodeId]) -> Result<(), GraphError> {
        let shape = |i: usize| &self.node(inputs[i]).shape;
        let dtype = |i: usize| self.node(inputs[i]).dtype;
        let ensure = |holds: bool, expected: &str| {
            if holds { Ok(()) } else { Err(self.refuse(composite, inputs, expected)) }
        };
        let float_first = !matches!(
            composite,
            Composite::Dequantize { .. } | Composite::QuantizedLinear { .. } | Composite::ExpertLinear { .. }
        );
        ensure(!float_first || dtype(0).is_float(), "a float operand (f32, f16 or bf16)")?;
        match composite {
            Composite::LayerNorm { .. } | Composite::RmsNorm { .. } => {
                ensure(shape(0).rank() >= 1 && shape(0).cols() > 0, "a tensor with a last axis that is not empty")?;
                for i in 1..inputs.len() {
                    ensure(*shape(i) == Shape::from([shape(0).cols()]), "weights of the size of the last axis")?;
                    ensure(dtype(i).is_float(), "float weights")?;
                }
                Ok(())
            }
            Composite::Softmax | Composite::QuantizeInt8 | Composite::QuantizeFp8 => {
                ensure(shape(0).rank() >= 1 && shape(0).cols() > 0, "a tensor with a last axis that is not empty")
            }
            Composite::CausalMask => ensure(shape(0).rank() >= 2, "scores of rank 2 or more"),
            Composite::Activation(_) => Ok(()),
            Composite::Swiglu | Composite::Geglu { .. } => {
                ensure(shape(0) == shape(1) && dtype(0) == dtype(1), "two tensors of one shape and dtype")
            }
            Composite::Dropout { .. } => {
                ensure(dtype(1) == Dtype::I32 && shape(1).elements() == 1, "a tensor and one i32 seed")
            }
            Composite::Linear { transposed } => {
                ensure(shape(0).rank() >= 1 && shape(1).rank() == 2, "x [.., in] and a weight of rank 2")?;
                let (rows, out) = if *transposed { (shape(1)[1], shape(1)[0]) } else { (shape(1)[0], shape(1)[1]) };
                ensure(shape(0).cols() == rows, "a weight whose inner size is the last axis of x")?;
                ensure(shape(0).rank() >= 2, "x of rank 2 or more")?;
                ensure(inputs.len() < 3 || *shape(2) == Shape::from([out]), "a bias of the weight's outer size")?;
                ensure((1..inputs.len()).all(|i| dtype(i) == dtype(0)), "operands of one dtype")
            }
            Composite::AttentionScores { .. } | Composite::Attention { .. } => {
                let (q, k) = (shape(0), shape(1));
                ensure(q.rank() >= 2 && k.rank() == q.rank(), "q and k of one rank, at least 2")?;
                ensure(
                    q[..q.rank() - 2] == k[..k.rank() - 2] && q.cols() == k.cols(),
                    "q [.., m, d] and k [.., n, d]",
                )?;
                ensure(k[k.rank() - 2] > 0 && q.cols() > 0, "at least one key and one feature")?;
                match composite {
                    Composite::Attention { .. } => {
                        let narrow = dtype(0) == Dtype::F32 && dtype(1).is_float();
                        let fits = dtype(2) == dtype(1) && (dtype(1) == dtype(0) || narrow);
                        ensure(fits, "operands of one dtype, or f32 queries over 16-bit keys and values")?;
                    }
                    _ => ensure(dtype(1) == dtype(0), "operands of one dtype")?,
                }
                let positions = match composite {
                    Composite::AttentionScores { mask: Mask::Cached, .. } => 2,
                    Composite::Attention { mask: Mask::Cached, .. } => 3,
                    Composite::AttentionScores { mask: Mask::Additive, .. } => {
                        return ensure(dtype(2).is_float(), FLOAT_MASK);
                    }
                    Composite::Attention { mask: Mask::Additive, .. } => {
                        return ensure(dtype(3).is_float(), FLOAT_MASK);
                    }
                    _ => return Ok(()),
                };
                let given = q.rank() >= 3 && dtype(positions) == Dtype::I32 && shape(positions)[..] == q[..1];
                ensure(given, "q [batch, .., m, d] and an i32 position for each sequence")
            }
            Composite::Dequantize { dtype: to } => {
                ensure(dtype(0) == Dtype::I8 && dtype(1) == Dtype::F32 && to.is_float(), "i8 rows and f32 scales")
            }
            Composite::QuantizedLinear { dtype: to } => {
                let bytes = dtype(0) == Dtype::I8 && dtype(2) == Dtype::I8;
                ensure(bytes && dtype(1) == Dtype::F32 && dtype(3) == Dtype::F32, "i8 rows, each with f32 scales")?;
                ensure(shape(0).rank() >= 2 && shape(2).rank() == 2, "x [.., rows, in] and a weight [out, in]")?;
                ensure(shape(0).cols() == shape(2)[1], "a weight whose inner size is the last axis of x")?;
                ensure(*shape(1) == shape(0).with_cols(1), "a scale for each row of x, [.., rows, 1]")?;
                let columns = Shape::from([shape(2)[0]]);
                ensure(
                    (3..inputs.len()).all(|i| *shape(i) == columns),
                    "scales and a bias of the weight's outer size",
                )?;
                ensure(inputs.len() < 5 || dtype(4).is_float(), "a float bias")?;
                ensure(to.is_float(), "a float result")
            }
            Composite::ExpertLinear { dtype: to } => {
                let bytes = dtype(0) == Dtype::I8 && dtype(3) == Dtype::I8;
                ensure(bytes && dtype(1) == Dtype::F32 && dtype(4) == Dtype::F32, "i8 rows, each with f32 scales")?;
                ensure(shape(0).rank() == 2 && shape(3).rank() == 3, "x [rows, in] and weights [experts, out, in]")?;
                ensure(shape(0).cols() == shape(3).cols(), "weights whose inner size is the last axis of x")?;
                ensure(*shape(1) == shape(0).with_cols(1), "a scale for each row of x, [rows, 1]")?;
                let picked = dtype(2) == Dtype::I32 && shape(2)[..] == shape(0)[..1];
                ensure(picked, "an i32 expert for each row of x")?;
                let columns = &shape(3)[..2];
                let whole = (4..inputs.len()).all(|i| shape(i)[..] == *columns);
                ensure(whole, "scales and biases [experts, out] of the weights")?;
                ensure(inputs.len() < 6 || dtype(5).is_float(), "a float bias")?;
                ensure(to.is_float(), "a float result")
            }
            Composite::RoutedLinear => {
                let (x, picked) = (shape(0), shape(1));
                ensure(shape(2).rank() == 3, "weights [experts, out, in]")?;
                let picks = dtype(1) == Dtype::I32 && matches!(picked.rank(), 1 | 2);
                ensure(picks, "i32 experts [rows] or [rows, choices]")?;
                let each = x.rank() >= 2 && *x.leading() == picked[..];
                ensure(each || (x.rank() == 2 && x[0] == picked[0]), "x [rows, in], or a row for each expert picked")?;
                ensure(x.cols() == shape(2).cols(), "weights whose inner size is the last axis of x")?;
                ensure(inputs.len() < 4 || shape(3)[..] == shape(2)[..2], "biases [experts, out] of the weights")?;
                ensure((2..inputs.len()).all(|i| dtype(i) == dtype(0)), "operands of one dtype")
            }
            Composite::WeightedSum => {
                let fits = shape(0).rank() >= 2 && *shape(0).leading() == shape(1)[..];
                ensure(fits && shape(1).cols() > 0, "x [.., choices, columns] and weights [.., choices]")?;
                ensure(dtype(1).is_float(), "float weights")
            }
            Composite::CrossEntropy => {
                ensure(shape(0).rank() >= 1 && shape(0).elements() > 0, "logits that are not empty")?;
                ensure(dtype(1) == Dtype::I32 && shape(1)[..] == *shape(0).leading(), "an i32 target for each row")
            }
            Composite::LinearCrossEntropy { .. } | Composite::LinearCrossEntropyGradient { .. } => {
                let matrices = shape(0).rank() == 2 && shape(1).rank() == 2 && shape(0).cols() == shape(1).cols();
                ensure(matrices && dtype(1) == dtype(0), "x [rows, in] and a weight [classes, in] of one dtype")?;
                if shape(0).rows() == 0 {
                    let expected = "at least 1: the mean of no losses is no number".to_string();
                    let (op, got) = (composite.name().to_string(), "0".to_string());
                    return Err(GraphError::Attribute { op, attribute: "rows", expected, got });
                }
                ensure(shape(0).cols() > 0 && shape(1).rows() > 0, "at least one class and one feature")?;
                let rows = shape(0).rows();
                ensure(dtype(2) == Dtype::I32 && shape(2)[..] == [rows], "an i32 target for each row")?;
                let per_row = |i: usize| dtype(i) == Dtype::F32 && shape(i)[..] == [rows, 1];
                ensure((3..inputs.len()).all(per_row), "logsumexp and gradients f32[rows, 1]")
            }
        }
    }
}

fn check_attributes(composite: &Composite) -> Result<(), GraphError> {
    let bad = |attribute, expected: &str, got: f64| {
        let (op, expected) = (composite.name().to_string(), expected.to_string());
        Err(GraphError::Attribute { op, attribute, expected, got: got.to_string() })
    };
    match *composite {
        Composite::LayerNorm { eps } | Composite::RmsNorm { eps } if !(eps.is_finite() && eps >= 0.0) => {
            return bad("eps", "finite and not negative", eps);
        }
        Composite::Dropout { p, .. } if !(0.0..1.0).contains(&p) => return bad("p", "in [0, 1)", p),
        Composite::Attention { p, .. } if !(0.0..1.0).contains(&p) => return bad("p", "in [0, 1)", p),
        Composite::AttentionScores { scale, .. } | Composite::Attention { scale, .. } if !scale.is_finite() => {
            return bad("scale", "finite", scale);
        }
        Composite::LinearCrossEntropy { smoothing, .. } | Composite::LinearCrossEntropyGradient { smoothing }
            if !(0.0..=1.0).contains(&smoothing) =>
        {
            return bad("smoothing", "in [0, 1]", smoothing);
        }
        _ => {}
    }
    Ok(())
}

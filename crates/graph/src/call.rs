//! Calls of composites: operands and attributes are checked, then the expansion is appended.

use crate::composite::{Composite, Mask, ScoreWork};
use crate::dtype::Dtype;
use crate::error::GraphError;
use crate::expand::Expansion;
use crate::graph::Graph;
use crate::node::{Node, NodeId};
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
                let (mask, next) = match composite {
                    Composite::Attention { mask, .. } => (*mask, 3),
                    Composite::AttentionScores { mask, .. } => (*mask, 2),
                    _ => return Ok(()),
                };
                match mask {
                    Mask::Full | Mask::Causal => {}
                    Mask::Additive => ensure(dtype(next).is_float(), FLOAT_MASK)?,
                    Mask::Cached => {
                        let given = q.rank() >= 3 && dtype(next) == Dtype::I32 && shape(next)[..] == q[..1];
                        ensure(given, "q [batch, .., m, d] and an i32 position for each sequence")?;
                    }
                }
                match composite {
                    Composite::Attention { work, .. } => {
                        let first = next + matches!(mask, Mask::Additive | Mask::Cached) as usize;
                        self.check_score_operands(work, inputs, first, &ensure)
                    }
                    _ => Ok(()),
                }
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

impl Graph {
    /// Checks the operands of the work on scores, the first of them at a position.
    fn check_score_operands(
        &self,
        work: &ScoreWork,
        inputs: &[NodeId],
        first: usize,
        ensure: &dyn Fn(bool, &str) -> Result<(), GraphError>,
    ) -> Result<(), GraphError> {
        let (q, k) = (&self.node(inputs[0]).shape, &self.node(inputs[1]).shape);
        let (queries, keys) = (q[q.rank() - 2], k[q.rank() - 2]);
        let scores = q.with_cols(keys);
        let mut rest = inputs[first..].iter().map(|&id| self.node(id));
        if work.slopes {
            let each = rest.next().is_some_and(|slopes| {
                let (shape, rank) = (&slopes.shape, slopes.shape.rank());
                let flat = rank >= 2 && shape[rank - 2..] == [1, 1];
                slopes.dtype == Dtype::F32 && flat && shape.broadcasts_to(&scores)
            });
            ensure(each, "f32 slopes [heads, 1, 1] that broadcast to the scores [.., heads, m, n]")?;
        }
        if work.bias {
            let fits = |bias: &Node| bias.dtype.is_float() && bias.shape.broadcasts_to(&scores);
            ensure(rest.next().is_some_and(fits), "a float bias that broadcasts to the scores [.., m, n]")?;
        }
        if work.documents {
            let of_keys = |documents: &Node| {
                let shape = &documents.shape[..];
                let each = shape == [keys] || (q.rank() >= 3 && shape == [q[0], keys]);
                documents.dtype == Dtype::I32 && each
            };
            ensure(rest.next().is_some_and(of_keys), "an i32 document for each key, [n] or [batch, n]")?;
            ensure(queries <= keys, "at most as many queries as keys: the last key is the last query's own")?;
        }
        Ok(())
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
        Composite::Attention { mask, work, .. } => return check_score_work(mask, &work),
        Composite::LinearCrossEntropy { smoothing, .. } | Composite::LinearCrossEntropyGradient { smoothing }
            if !(0.0..=1.0).contains(&smoothing) =>
        {
            return bad("smoothing", "in [0, 1]", smoothing);
        }
        _ => {}
    }
    Ok(())
}

fn check_score_work(mask: Mask, work: &ScoreWork) -> Result<(), GraphError> {
    let bad = |attribute, expected: &str, got: String| {
        Err(GraphError::Attribute { op: "attention".to_string(), attribute, expected: expected.to_string(), got })
    };
    // What is computed with it is an `f32`, whose inverse is one too.
    let usable = |cap: f64| (1e-30..=1e30).contains(&cap);
    match *work {
        ScoreWork { soft_cap: Some(cap), .. } if !usable(cap) => {
            bad("soft_cap", "positive, from 1e-30 to 1e30", cap.to_string())
        }
        ScoreWork { window: Some(0), .. } => bad("window", "at least 1: each query sees its own key", "0".to_string()),
        ScoreWork { window: Some(window), .. } if window > 1 << 24 => {
            bad("window", "at most 2^24, up to which positions are exact", window.to_string())
        }
        ScoreWork { bias: true, .. } if mask == Mask::Additive => {
            bad("mask", "full, causal or cached beside a bias: an additive mask is a bias already", mask.to_string())
        }
        ScoreWork { documents: true, .. } if mask == Mask::Cached => {
            bad("mask", "full, causal or additive beside documents: a cache holds one per sequence", mask.to_string())
        }
        _ => Ok(()),
    }
}

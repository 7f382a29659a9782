//! Optimisers as graphs: the new values of a weight and its moments, from the weight's gradient.
//!
//! An update is elementwise work in f32, one block per weight, so that one kernel reads a gradient once and writes every state in place.
//! Learning rate, weight decay and corrections of the moments' bias are operands: a schedule changes them without a new kernel, and weights that decay
//! have the arithmetic of those that do not, so that a GPU updates all of them in one kernel. The others are constants.
//!
//! Weight decay is decoupled: it shrinks the weight by `rate decay`, and never passes through the moments. With `g` the gradient:
//!
//! - AdamW: `m' = b1 m + (1 - b1) g`, `v' = b2 v + (1 - b2) g g`, `u = c1 m' / (sqrt(c2 v') + eps)`, where `c = 1 / (1 - b^step)`
//! - SGD: `m' = momentum m + g`, `u = m'`; without momentum `u = g`
//! - Lion: `u = sign(b1 m + (1 - b1) g)`, `m' = b2 m + (1 - b2) g`
//!
//! and `w' = w - rate (u + decay w)`.

use crate::block::Block;
use crate::dtype::Dtype;
use crate::error::GraphError;
use crate::graph::Graph;
use crate::node::NodeId;
use crate::op::{BinaryOp, CompareOp, ReduceOp, UnaryOp};

type Value = Result<NodeId, GraphError>;

/// An optimiser.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs)]
pub enum Optimizer {
    /// Two moments per weight.
    AdamW { beta1: f64, beta2: f64, eps: f64 },
    /// One moment, or none without momentum.
    Sgd { momentum: f64 },
    /// One moment.
    Lion { beta1: f64, beta2: f64 },
}

/// Scalars shared by all weights of a step, all `f32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepScalars {
    /// learning rate
    pub rate: NodeId,
    /// a factor of all gradients
    pub scale: NodeId,
    /// bias corrections of AdamW's moments: `1 / (1 - b^step)` of each; other optimisers do not use them
    pub corrections: [NodeId; 2],
}

/// The inputs of a weight's update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WeightUpdate<'a> {
    /// the weight, `f32`
    pub weight: NodeId,
    /// its gradient, of any float type
    pub gradient: NodeId,
    /// as many as [`Optimizer::moments`], `f32`
    pub moments: &'a [NodeId],
    /// weight decay, a scalar in `f32`; none for an update without it, which is other arithmetic than a decay of 0
    pub decay: Option<NodeId>,
    /// another dtype to also return the new weight in
    pub copy: Option<Dtype>,
}

/// New values of a weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpdatedWeight {
    /// the weight
    pub weight: NodeId,
    /// its moments
    pub moments: Vec<NodeId>,
    /// the weight in the requested dtype
    pub copy: Option<NodeId>,
}

impl Optimizer {
    /// The name on the command line, in files and in reports.
    pub fn name(&self) -> &'static str {
        match self {
            Optimizer::AdamW { .. } => "adamw",
            Optimizer::Sgd { .. } => "sgd",
            Optimizer::Lion { .. } => "lion",
        }
    }

    /// Number of moments per weight: values of the weight's shape that are kept from step to step, initially 0.
    pub fn moments(&self) -> usize {
        match self {
            Optimizer::AdamW { .. } => 2,
            Optimizer::Sgd { momentum } => usize::from(*momentum != 0.0),
            Optimizer::Lion { .. } => 1,
        }
    }

    /// The values of [`StepScalars::corrections`] in a step, counted from 1.
    pub fn corrections(&self, step: u64) -> Option<[f64; 2]> {
        match self {
            Optimizer::AdamW { beta1, beta2, .. } => {
                let steps = i32::try_from(step).unwrap_or(i32::MAX);
                Some([*beta1, *beta2].map(|beta| 1.0 / (1.0 - beta.powi(steps))))
            }
            Optimizer::Sgd { .. } | Optimizer::Lion { .. } => None,
        }
    }
}

impl Graph {
    /// The sum of squares of all elements of some tensors, a scalar in `f32`.
    pub fn sum_of_squares(&mut self, tensors: &[NodeId]) -> Value {
        let mut sums = Vec::with_capacity(tensors.len());
        for &tensor in tensors {
            self.check_node("sum_of_squares", tensor)?;
            let sum = self.block(Block::named("sum_of_squares"), |graph| {
                let x = graph.float(tensor)?;
                let squares = graph.mul(x, x)?;
                Ok(vec![graph.reduce(ReduceOp::Sum, squares)?])
            })?;
            let sum = if self.node(sum[0]).shape.rank() > 1 { self.column_sum(sum[0])? } else { sum[0] };
            sums.push(self.reshape(sum, [1])?);
        }
        let total = match sums.as_slice() {
            [] => return self.constant(0.0, Dtype::F32),
            [sum] => *sum,
            sums => {
                let row = self.concat(sums, 0)?;
                self.reduce(ReduceOp::Sum, row)?
            }
        };
        self.reshape(total, [])
    }

    /// One step of an optimiser on one weight.
    pub fn updated_weight(
        &mut self,
        optimizer: Optimizer,
        update: WeightUpdate<'_>,
        scalars: StepScalars,
    ) -> Result<UpdatedWeight, GraphError> {
        let expected = optimizer.moments();
        if update.moments.len() != expected {
            let (op, got) = (optimizer.name().to_string(), update.moments.len().to_string());
            return Err(GraphError::Attribute { op, attribute: "moments", expected: expected.to_string(), got });
        }
        let others = [update.weight, update.gradient, scalars.rate, scalars.scale].into_iter().chain(update.decay);
        for operand in update.moments.iter().copied().chain(others) {
            self.check_node(optimizer.name(), operand)?;
        }
        let mut results = self.block(Block::named(optimizer.name()), |graph| {
            let gradient = graph.float(update.gradient)?;
            let gradient = graph.mul(gradient, scalars.scale)?;
            let (change, mut results) = graph.change(optimizer, gradient, update.moments, scalars)?;
            let change = match update.decay {
                None => change,
                Some(decay) => {
                    let decayed = graph.mul(update.weight, decay)?;
                    graph.add(change, decayed)?
                }
            };
            let change = graph.mul(change, scalars.rate)?;
            let weight = graph.sub(update.weight, change)?;
            if let Some(dtype) = update.copy {
                results.push(graph.cast(weight, dtype)?);
            }
            results.push(weight);
            Ok(results)
        })?;
        // The block ends with the weight, before it the copy, if there is one, and before that the moments.
        let weight = results.pop().unwrap_or(update.weight);
        let copy = update.copy.and_then(|_| results.pop());
        Ok(UpdatedWeight { weight, moments: results, copy })
    }

    /// The update of a weight at a learning rate of 1, and its new moments.
    fn change(
        &mut self,
        optimizer: Optimizer,
        gradient: NodeId,
        moments: &[NodeId],
        scalars: StepScalars,
    ) -> Result<(NodeId, Vec<NodeId>), GraphError> {
        match (optimizer, moments) {
            (Optimizer::AdamW { beta1, beta2, eps }, &[first, second]) => {
                let first = self.mixed(beta1, first, gradient)?;
                let squares = self.mul(gradient, gradient)?;
                let second = self.mixed(beta2, second, squares)?;
                let unbiased = self.mul(second, scalars.corrections[1])?;
                let root = self.unary(UnaryOp::Sqrt, unbiased)?;
                let eps = self.constant(eps, Dtype::F32)?;
                let divisor = self.add(root, eps)?;
                let unbiased = self.mul(first, scalars.corrections[0])?;
                Ok((self.binary(BinaryOp::Div, unbiased, divisor)?, vec![first, second]))
            }
            (Optimizer::Sgd { momentum }, &[moment]) => {
                let kept = self.scale(moment, momentum)?;
                let moment = self.add(kept, gradient)?;
                Ok((moment, vec![moment]))
            }
            (Optimizer::Lion { beta1, beta2 }, &[moment]) => {
                let direction = self.mixed(beta1, moment, gradient)?;
                let sign = self.sign(direction)?;
                Ok((sign, vec![self.mixed(beta2, moment, gradient)?]))
            }
            // Of an optimiser without moments.
            _ => Ok((gradient, Vec::new())),
        }
    }

    /// `share old + (1 - share) new`
    fn mixed(&mut self, share: f64, old: NodeId, new: NodeId) -> Value {
        let (old, new) = (self.scale(old, share)?, self.scale(new, 1.0 - share)?);
        self.add(old, new)
    }

    fn sign(&mut self, x: NodeId) -> Value {
        let [zero, one, less] = [0.0, 1.0, -1.0].map(|value| self.constant(value, Dtype::F32));
        let (zero, one, less) = (zero?, one?, less?);
        let (above, below) = (self.compare(CompareOp::Gt, x, zero)?, self.compare(CompareOp::Lt, x, zero)?);
        // Of a NaN it is the NaN: zero times it.
        let else_zero = self.mul(x, zero)?;
        let not_above = self.select(below, less, else_zero)?;
        self.select(above, one, not_above)
    }

    fn float(&mut self, x: NodeId) -> Value {
        if self.node(x).dtype == Dtype::F32 { Ok(x) } else { self.cast(x, Dtype::F32) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_update_is_one_block_with_a_result_for_each_state() {
        let all = [
            Optimizer::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 },
            Optimizer::Sgd { momentum: 0.9 },
            Optimizer::Sgd { momentum: 0.0 },
            Optimizer::Lion { beta1: 0.9, beta2: 0.99 },
        ];
        for optimizer in all {
            let mut graph = Graph::new("update");
            let mut input = |name: &str, dtype, shape: &[usize]| graph.input(name, dtype, shape).unwrap();
            let (weight, gradient) = (input("w", Dtype::F32, &[3, 5]), input("g", Dtype::Bf16, &[3, 5]));
            let moments: Vec<NodeId> =
                (0..optimizer.moments()).map(|at| input(&format!("m{at}"), Dtype::F32, &[3, 5])).collect();
            let [rate, scale, first, second, decay] =
                ["rate", "scale", "c1", "c2", "decay"].map(|name| input(name, Dtype::F32, &[]));
            let before = graph.calls().len();
            let update =
                WeightUpdate { weight, gradient, moments: &moments, decay: Some(decay), copy: Some(Dtype::Bf16) };
            let scalars = StepScalars { rate, scale, corrections: [first, second] };
            let updated = graph.updated_weight(optimizer, update, scalars).unwrap();
            assert_eq!(graph.calls().len(), before + 1);
            assert_eq!(updated.moments.len(), moments.len());
            assert_eq!(graph.node(updated.copy.unwrap()).dtype, Dtype::Bf16);
            assert_eq!(graph.node(updated.weight).shape, graph.node(weight).shape);
            let few = WeightUpdate { moments: &[weight; 3], ..update };
            assert!(graph.updated_weight(optimizer, few, scalars).unwrap_err().to_string().contains("moments"));
        }
    }

    #[test]
    fn corrections_undo_the_bias_of_moments_that_begin_at_zero() {
        let adamw = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8 };
        let [first, second] = adamw.corrections(1).unwrap();
        assert!((first - 10.0).abs() < 1e-12 && (second - 100.0).abs() < 1e-10);
        assert_eq!(adamw.corrections(u64::MAX), Some([1.0, 1.0]));
        assert_eq!(Optimizer::Sgd { momentum: 0.9 }.corrections(1), None);
    }
}

//! The gradient of attention: found in a group, and lowered to the kernel that computes scores again.
//!
//! A group is taken if it is exactly what [`differentiate`] makes of an attention call, the scores included: it reads operands
//! and the gradient of the result, and stores the gradients of queries, keys and values. What that is is not written down
//! here: an attention call of the same sizes is differentiated and compared with the group, node by node.

use std::collections::{HashMap, HashSet};

use deuteron_graph::{BinaryOp, Composite, Dtype, Graph, Mask, NodeId, Op, differentiate};
use deuteron_plan::Draft;

use super::{Asked, AttentionKernel, AttentionOperand, AttentionResult, AttentionShape, Rule, Sharing, fit, read};
use crate::argument::{ArgBinding, Argument};

/// What an argument of the gradient is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BackwardOperand {
    /// what attention read
    Operand(AttentionOperand),
    /// the gradient of the result
    ResultGradient,
    /// gradients of queries, keys, values: one after the other
    Gradient(AttentionOperand),
}

impl AttentionKernel {
    /// The arguments of its gradient, in order.
    pub fn backward_operands(&self) -> impl Iterator<Item = BackwardOperand> + use<> {
        use AttentionOperand::{K, O, Q, V};
        let operands = self.operands().iter().filter(|&&operand| operand != O);
        let gradients = [Q, K, V].map(BackwardOperand::Gradient);
        operands
            .map(|&operand| BackwardOperand::Operand(operand))
            .chain([BackwardOperand::ResultGradient])
            .chain(gradients)
    }
}

/// The gradient of attention found in a group.
#[derive(Debug, Clone, PartialEq)]
pub struct FoundBackward {
    /// the attention; every head has keys of its own, at a stride of 0 where they are shared
    pub kernel: AttentionKernel,
    /// the run-time half; strides of the result are those of its gradient
    pub shape: AttentionShape,
    /// queries, keys and values
    pub operands: [NodeId; 3],
    /// what is added to the scores
    pub mask: Option<NodeId>,
    /// the seed of dropout
    pub seed: Option<NodeId>,
    /// the gradient of the result
    pub result_gradient: NodeId,
    /// gradients of queries, keys and values
    pub gradients: [NodeId; 3],
}

/// Sees a group as the gradient of attention, or `None`.
pub fn recognise(draft: &Draft) -> Option<FoundBackward> {
    let (graph, placement) = (draft.graph, draft.placement);
    let guess = Guess::new(draft)?;
    let attention = guess.call(graph)?;
    // Gradients leave; which is which is found by trying, as queries and keys may have one shape.
    let &[first, second, third] = draft.outputs else { return None };
    let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    let outputs = [first, second, third];
    let (gradients, same) = orders.iter().find_map(|order| {
        let gradients = order.map(|position| outputs[position]);
        attention.compare(graph, gradients).map(|same| (gradients, same))
    })?;
    let made: HashSet<NodeId> = same.inside.iter().copied().filter(|&id| placement.needs_kernel(graph, id)).collect();
    if made.len() != draft.nodes.len() || !draft.nodes.iter().all(|id| made.contains(id)) {
        return None;
    }
    let leaf = |leaf: NodeId| same.leaves.get(&leaf).copied();
    let operands = [leaf(attention.operands[0])?, leaf(attention.operands[1])?, leaf(attention.operands[2])?];
    let mask = attention.mask.and_then(leaf);
    let seed = attention.seed.and_then(leaf);
    let result_gradient = leaf(attention.result_gradient)?;
    let placed = placement.get(result_gradient)?;
    let Guess { kind, scale, p, offset, .. } = guess;
    let dtype = graph.node(operands[0]).dtype;
    if graph.node(placed.base).dtype != dtype {
        return None;
    }
    let asked = Asked { kind, scale, p, offset, wanted: AttentionResult::Values };
    let rule = Rule { asked, operands, mask, positions: None, seed };
    let (kernel, shape) = fit(draft, &rule, placed.layout.clone(), Sharing::Alone)?;
    // The score of a single key has no slope at all. The kernel subtracts two sums to get there, and they differ by rounding.
    // Without queries there are gradients of keys all the same, zeros, and the sizes do not tell of how many.
    if shape.keys == 1 || shape.queries == 0 {
        return None;
    }
    Some(FoundBackward { kernel, shape, operands, mask, seed, result_gradient, gradients })
}

/// Lowers a group that [`recognise`] takes.
pub(crate) fn lower(draft: &Draft, found: FoundBackward) -> LoweredBackward {
    let FoundBackward { kernel, shape, operands: [q, k, v], mask, seed, result_gradient, gradients } = found;
    let args = kernel.backward_operands().map(|operand| match operand {
        BackwardOperand::Operand(AttentionOperand::Q) => read(draft, q),
        BackwardOperand::Operand(AttentionOperand::K) => read(draft, k),
        BackwardOperand::Operand(AttentionOperand::V) => read(draft, v),
        BackwardOperand::Operand(AttentionOperand::Mask) => read(draft, mask.expect("the kernel has a mask")),
        BackwardOperand::Operand(AttentionOperand::Seed) => read(draft, seed.expect("the kernel has a seed")),
        // A guess is never of a cache, and the result is no operand.
        BackwardOperand::Operand(AttentionOperand::Positions | AttentionOperand::O) => read(draft, result_gradient),
        BackwardOperand::ResultGradient => read(draft, result_gradient),
        BackwardOperand::Gradient(AttentionOperand::Q) => ArgBinding::whole(draft.graph, gradients[0], 0, true),
        BackwardOperand::Gradient(AttentionOperand::K) => ArgBinding::whole(draft.graph, gradients[1], 0, true),
        BackwardOperand::Gradient(_) => ArgBinding::whole(draft.graph, gradients[2], 0, true),
    });
    LoweredBackward { args: args.collect(), kernel, shape }
}

/// The gradient of attention, lowered.
#[derive(Debug, Clone, PartialEq)]
pub struct LoweredBackward {
    /// the compile-time half
    pub kernel: AttentionKernel,
    /// strides of the result are those of its gradient
    pub shape: AttentionShape,
    /// as [`AttentionKernel::backward_operands`] lists them
    pub args: Vec<ArgBinding>,
}

impl LoweredBackward {
    /// What a device has to know of its arguments.
    pub fn arguments(&self) -> Vec<Argument> {
        let AttentionShape { batch, heads, queries, keys, .. } = self.shape;
        let elements = |operand: BackwardOperand| match operand {
            BackwardOperand::Operand(operand) => self.kernel.reach(&self.shape, operand),
            BackwardOperand::ResultGradient => self.kernel.reach(&self.shape, AttentionOperand::O),
            BackwardOperand::Gradient(AttentionOperand::Q) => batch * heads * queries * self.kernel.width,
            BackwardOperand::Gradient(_) => batch * heads * keys * self.kernel.width,
        };
        let operands = self.kernel.backward_operands().zip(&self.args);
        operands.map(|(operand, arg)| Argument::new(arg, elements(operand))).collect()
    }
}

/// The attention that a group may be the gradient of: what is read off its nodes, to be confirmed.
#[derive(Debug, Clone, Copy)]
struct Guess {
    /// a product of queries and keys
    scores: NodeId,
    kind: Mask,
    /// what is added to the scores, with this shape and dtype
    added: Option<NodeId>,
    scale: f64,
    p: f64,
    offset: u32,
}

impl Guess {
    fn new(draft: &Draft) -> Option<Guess> {
        let graph = draft.graph;
        // The scores come first: all else is made of them.
        let is_product = |id: &&NodeId| matches!(graph.node(**id).op, Op::Matmul { .. });
        let scores = *draft.nodes.iter().find(is_product)?;
        let mut guess = Guess { scores, kind: Mask::Full, added: None, scale: 1.0, p: 0.0, offset: 0 };
        let mut scaled = None;
        let (first, last) = (draft.nodes.first()?.index(), draft.nodes.last()?.index());
        for id in (first..=last).filter_map(|index| graph.id(index)) {
            let node = graph.node(id);
            let wide = |value: NodeId| match graph.node(value).op {
                Op::Cast(_) => graph.node(value).inputs[0],
                _ => value,
            };
            match node.op {
                Op::Binary(BinaryOp::Mul) if scaled.is_none() && wide(node.inputs[0]) == scores => {
                    let Op::Const { value, .. } = graph.node(node.inputs[1]).op else { return None };
                    (guess.scale, scaled) = (value, Some(id));
                }
                Op::Binary(BinaryOp::Add) if scaled.is_some() && scaled == node.inputs.first().copied() => {
                    (guess.kind, guess.added) = (Mask::Additive, Some(wide(node.inputs[1])));
                }
                Op::Select if scaled.is_some() && scaled == node.inputs.get(1).copied() => guess.kind = Mask::Causal,
                Op::Random { drop, offset, .. } => (guess.p, guess.offset) = (drop, offset),
                _ => {}
            }
        }
        Some(guess)
    }

    /// An attention call of this kind and its gradient.
    fn call(&self, graph: &Graph) -> Option<Differentiated> {
        let &[q, k] = graph.node(self.scores).inputs.as_slice() else { return None };
        let mut own = Graph::new("attention");
        let mut input = |name: &str, like: NodeId| {
            let node = graph.node(like);
            own.input(name, node.dtype, node.shape.clone()).ok()
        };
        let operands = [input("q", q)?, input("k", k)?, input("v", k)?];
        let mask = match self.added {
            Some(added) => Some(input("mask", added)?),
            None => None,
        };
        let seed = if self.p > 0.0 { Some(own.input("seed", Dtype::I32, []).ok()?) } else { None };
        let Guess { kind, scale, p, offset, .. } = *self;
        let inputs: Vec<NodeId> = operands.into_iter().chain(mask).chain(seed).collect();
        let result = own.call(Composite::Attention { mask: kind, scale, p, offset }, &inputs).ok()?;
        own.output("o", *result.first()?).ok()?;
        let joint = differentiate(&own, &operands).ok()?;
        let &[result_gradient] = joint.seeds.as_slice() else { return None };
        let gradients: Vec<NodeId> = joint.gradients.iter().map(|&(_, gradient)| gradient).collect();
        let gradients = <[NodeId; 3]>::try_from(gradients).ok()?;
        Some(Differentiated { graph: joint.graph, operands, mask, seed, result_gradient, gradients })
    }
}

/// An attention call and its gradient.
struct Differentiated {
    graph: Graph,
    operands: [NodeId; 3],
    mask: Option<NodeId>,
    seed: Option<NodeId>,
    result_gradient: NodeId,
    gradients: [NodeId; 3],
}

/// Two graphs that are the same from some nodes up to the inputs of the first.
#[derive(Default)]
struct Same {
    /// what stands in the second graph for an input of the first
    leaves: HashMap<NodeId, NodeId>,
    /// the others, in the second graph
    inside: Vec<NodeId>,
}

impl Differentiated {
    /// Compares the gradients with nodes of another graph.
    fn compare(&self, other: &Graph, gradients: [NodeId; 3]) -> Option<Same> {
        let mut same = Same::default();
        let mut known: HashMap<NodeId, NodeId> = HashMap::new();
        let mut waiting: Vec<(NodeId, NodeId)> = self.gradients.into_iter().zip(gradients).collect();
        while let Some((own, there)) = waiting.pop() {
            match known.insert(own, there) {
                Some(before) if before == there => continue,
                Some(_) => return None,
                None => {}
            }
            let (a, b) = (self.graph.node(own), other.node(there));
            if a.shape != b.shape || a.dtype != b.dtype {
                return None;
            }
            if matches!(a.op, Op::Input { .. }) {
                same.leaves.insert(own, there);
                continue;
            }
            if a.op != b.op || a.inputs.len() != b.inputs.len() {
                return None;
            }
            same.inside.push(there);
            waiting.extend(a.inputs.iter().copied().zip(b.inputs.iter().copied()));
        }
        same.inside.sort_unstable();
        same.inside.dedup();
        Some(same)
    }
}

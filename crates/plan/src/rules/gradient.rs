//! The operands of a gradient of attention.
//!
//! They are known if the group is exactly the result of [`differentiate`] for an attention call, including the scores: it reads operands
//! and the gradient of the result, and stores the gradients of queries, keys and values. The pattern is not written down here: an
//! attention call of the same sizes is differentiated and compared with the group, node by node.

use std::collections::{HashMap, HashSet};

use deuteron_graph::{BinaryOp, Composite, Dtype, Graph, Mask, NodeId, Op, differentiate};

use crate::chain::{AttentionGradientLink, AttentionRequest};
use crate::layout::Placement;

/// The operands and results of a group as the gradient of an attention call, or `None` if it is not exactly that.
pub(super) fn gradient_link(
    graph: &Graph,
    placement: &Placement,
    nodes: &[NodeId],
    outputs: &[NodeId],
) -> Option<AttentionGradientLink> {
    // Gradients leave; which is which is found by trying, as queries and keys may have one shape.
    let &[first, second, third] = outputs else { return None };
    let guess = Guess::new(graph, nodes)?;
    let attention = guess.call(graph)?;
    let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    let outputs = [first, second, third];
    let (gradients, same) = orders.iter().find_map(|order| {
        let gradients = order.map(|position| outputs[position]);
        attention.compare(graph, gradients).map(|same| (gradients, same))
    })?;
    let made: HashSet<NodeId> = same.inside.iter().copied().filter(|&id| placement.needs_kernel(graph, id)).collect();
    if made.len() != nodes.len() || !nodes.iter().all(|id| made.contains(id)) {
        return None;
    }
    let leaf = |leaf: NodeId| same.leaves.get(&leaf).copied();
    let [q, k, v] = attention.operands.map(leaf);
    let Guess { kind: mask, scale, p, offset, .. } = guess;
    let request = AttentionRequest {
        mask,
        scale,
        p,
        offset,
        operands: [q?, k?, v?],
        added: attention.mask.and_then(leaf),
        positions: None,
        seed: attention.seed.and_then(leaf),
    };
    Some(AttentionGradientLink { request, result_gradient: leaf(attention.result_gradient)?, gradients })
}

/// The attention whose gradient a group may be, derived from its nodes, to be confirmed.
#[derive(Debug, Clone, Copy)]
struct Guess {
    /// the matmul of queries and keys
    scores: NodeId,
    kind: Mask,
    /// what is added to the scores, with this shape and dtype
    added: Option<NodeId>,
    scale: f64,
    p: f64,
    offset: u32,
}

impl Guess {
    fn new(graph: &Graph, nodes: &[NodeId]) -> Option<Guess> {
        // The scores come first: all else is made of them.
        let is_matmul = |id: &&NodeId| matches!(graph.node(**id).op, Op::Matmul { .. });
        let scores = *nodes.iter().find(is_matmul)?;
        let mut guess = Guess { scores, kind: Mask::Full, added: None, scale: 1.0, p: 0.0, offset: 0 };
        let mut scaled = None;
        let (first, last) = (nodes.first()?.index(), nodes.last()?.index());
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
    /// the node of the second graph for an input of the first
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

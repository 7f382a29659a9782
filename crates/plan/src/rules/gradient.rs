//! The operands of a gradient of attention, and what its gradients become in the same kernel.
//!
//! The operands are known if the group is exactly the result of [`differentiate`] for an attention call, including the scores: it reads operands
//! and the gradient of the result, and stores the gradients of queries, keys and values. The pattern is not written down here: an
//! attention call of the same sizes is differentiated and compared with the group, node by node.

use std::collections::{HashMap, HashSet};

use deuteron_graph::{
    BinaryOp, CompareOp, Composite, Dtype, Graph, Mask, NodeId, Op, ScoreWork, Shape, UnaryOp, View, differentiate,
};

use crate::chain::{AttentionGradientLink, AttentionRequest, StoredGradient, copied};
use crate::layout::{Layout, Placement, merge_contiguous};

/// A gradient and what is stored of it.
#[derive(Debug, Clone)]
pub(super) struct Ending {
    /// of the call
    pub gradient: NodeId,
    /// what is made of it; none where it is stored itself
    pub nodes: Vec<NodeId>,
    /// where it is stored
    pub stored: StoredGradient,
    /// heads that are summed, of the axis before positions; 1 where none are
    pub group: usize,
}

impl Ending {
    /// The gradients, made by one of `core`, that `stored` holds, or whose sums over the heads of groups it holds: one in its own order or in
    /// another one, or several side by side. None where it holds anything else.
    pub fn all_of(graph: &Graph, placement: &Placement, core: &[NodeId], stored: NodeId) -> Vec<Ending> {
        let node = graph.node(stored);
        if !matches!(node.op, Op::Concat { .. }) {
            return Ending::of_value(graph, placement, core, stored).into_iter().collect();
        }
        let part = |(operand, &input): (usize, &NodeId)| {
            let placed = placement.get(input)?;
            let mut ending = match is_reordering(&placed.layout, graph.node(placed.base).shape.elements()) {
                true => Ending::of_value(graph, placement, core, placed.base)?,
                false => return None,
            };
            // Only one of both changes the order.
            if ending.stored.copy.is_some() && !placed.layout.is_contiguous() {
                return None;
            }
            ending.nodes.push(stored);
            ending.stored.joined = Some((stored, operand));
            (graph.node(ending.gradient).dtype == node.dtype).then_some(ending)
        };
        let parts: Option<Vec<Ending>> = node.inputs.iter().enumerate().map(part).collect();
        // A kernel stores a gradient once.
        let twice = |parts: &[Ending]| {
            parts.iter().enumerate().any(|(at, part)| parts[..at].iter().any(|other| other.gradient == part.gradient))
        };
        parts.filter(|parts| !twice(parts)).unwrap_or_default()
    }

    /// The gradient that a value holds, or whose sums over the heads of groups it holds.
    fn of_value(graph: &Graph, placement: &Placement, core: &[NodeId], stored: NodeId) -> Option<Ending> {
        let is_core = |id: NodeId| core.binary_search(&id).is_ok();
        let mut nodes = Vec::new();
        let (mut at, mut copy) = (stored, None);
        // A kernel stores its gradients in their own type: sums of gradients that were cast are another kernel's.
        let is_same_type = |gradient: NodeId| graph.node(gradient).dtype == graph.node(stored).dtype;
        // The same elements in another shape, or in another order.
        if !is_core(at)
            && let Some((base, layout)) = copied(graph, placement, at)
        {
            if !is_reordering(&layout, graph.node(base).shape.elements()) {
                return None;
            }
            nodes.push(at);
            (copy, at) = (Some(at), base);
        }
        let ending = |gradient, nodes, group| {
            let stored = StoredGradient { value: at, copy, joined: None };
            is_same_type(gradient).then_some(Ending { gradient, nodes, stored, group })
        };
        if is_core(at) {
            return ending(at, nodes, 1);
        }
        let node = graph.node(at);
        nodes.push(at);
        // Heads of a group are the rows of the sum, written out so or read in place.
        let placed = placement.get(*node.inputs.first()?).filter(|_| node.op == Op::ColumnSum)?;
        let (gradient, layout) = match is_core(placed.base) {
            true => (placed.base, placed.layout.clone()),
            false => {
                nodes.push(placed.base);
                let whole = placed.layout.is_contiguous()
                    && placed.layout.shape.elements() == graph.node(placed.base).shape.elements();
                copied(graph, placement, placed.base).filter(|(base, _)| whole && is_core(*base))?
            }
        };
        let shape = &graph.node(gradient).shape;
        let axis = shape.rank().checked_sub(3)?;
        let (outer, inner) = (shape[..axis].iter().product::<usize>(), shape[axis + 1] * shape[axis + 2]);
        let (group, columns) = (shape[axis], node.shape.elements());
        let heads = merge_contiguous(&Shape::from([group, outer, inner]), &[inner, group * inner, 1]);
        let in_order = layout.offset == 0 && merge_contiguous(&layout.shape, &layout.strides) == heads;
        if in_order && columns == outer * inner { ending(gradient, nodes, group) } else { None }
    }
}

/// Whether a layout goes over all of so many elements, each once.
fn is_reordering(layout: &Layout, elements: usize) -> bool {
    let mut axes: Vec<(usize, usize)> = (0..layout.shape.rank())
        .map(|axis| (layout.strides[axis], layout.shape[axis]))
        .filter(|&(_, size)| size != 1)
        .collect();
    axes.sort_unstable();
    let mut covered = 1;
    let dense = axes.iter().all(|&(stride, size)| {
        let follows = stride == covered;
        covered *= size;
        follows
    });
    layout.offset == 0 && layout.shape.elements() == elements && (dense || elements == 0)
}

/// Nodes after the gradient of attention, made by `core`, that its kernel may take, in order. `readers` of a node are those of its buffer.
pub(crate) fn after_gradient(
    graph: &Graph,
    placement: &Placement,
    core: &[NodeId],
    readers: &[Vec<NodeId>],
) -> Vec<NodeId> {
    let mut after = Vec::new();
    for &id in core.iter().filter(|id| matches!(graph.node(**id).op, Op::Matmul { .. })) {
        // A copy, a sum, a copy and a concatenation at most. What has other readers too is stored for them.
        let follows = |&id: &NodeId| match readers[id.index()].as_slice() {
            &[reader] if core.binary_search(&reader).is_err() => Some(reader),
            _ => None,
        };
        let path: Vec<NodeId> = std::iter::successors(follows(&id), follows).take(4).collect();
        let endings = path.iter().rev().map(|&stored| Ending::all_of(graph, placement, core, stored));
        after.extend(
            endings
                .into_iter()
                .find(|endings| !endings.is_empty())
                .into_iter()
                .flatten()
                .flat_map(|ending| ending.nodes),
        );
    }
    after.sort_unstable();
    after.dedup();
    after
}

/// The operands and results of a group as the gradient of an attention call, or `None` if it is not exactly that.
pub(super) fn gradient_link(
    graph: &Graph,
    placement: &Placement,
    nodes: &[NodeId],
    endings: &[Ending],
) -> Option<AttentionGradientLink> {
    // Gradients leave; which is which is found by trying, as queries and keys may have one shape.
    let [first, second, third] = endings else { return None };
    let guess = Guess::new(graph, nodes)?;
    let attention = guess.call(graph)?;
    let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    let outputs = [first, second, third];
    let (endings, same) = orders.iter().find_map(|order| {
        let endings = order.map(|position| outputs[position]);
        attention.compare(graph, endings.map(|ending| ending.gradient)).map(|same| (endings, same))
    })?;
    let group = endings[1].group;
    if endings[0].group != 1 || endings[2].group != group {
        return None;
    }
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
        work: guess.work(),
        added: attention.added.and_then(leaf),
        positions: None,
        slopes: attention.slopes.and_then(leaf),
        documents: attention.documents.and_then(leaf),
        seed: attention.seed.and_then(leaf),
    };
    let result_gradient = leaf(attention.result_gradient)?;
    let gradients = endings.map(|ending| ending.stored);
    Some(AttentionGradientLink { request, result_gradient, gradients, group })
}

/// The attention whose gradient a group may be, derived from its nodes, to be confirmed.
#[derive(Debug, Clone, Copy)]
struct Guess {
    /// the matmul of queries and keys
    scores: NodeId,
    kind: Mask,
    soft_cap: Option<f64>,
    window: Option<usize>,
    /// what each head's slope is, with this shape
    slopes: Option<NodeId>,
    /// what is added to the scores, with this shape and dtype
    added: Option<NodeId>,
    /// the document of each key, with this shape
    documents: Option<NodeId>,
    scale: f64,
    p: f64,
    offset: u32,
}

impl Guess {
    fn new(graph: &Graph, nodes: &[NodeId]) -> Option<Guess> {
        // The scores come first: all else is made of them.
        let is_matmul = |id: &&NodeId| matches!(graph.node(**id).op, Op::Matmul { .. });
        let scores = *nodes.iter().find(is_matmul)?;
        let mut guess = Guess {
            scores,
            kind: Mask::Full,
            soft_cap: None,
            window: None,
            slopes: None,
            added: None,
            documents: None,
            scale: 1.0,
            p: 0.0,
            offset: 0,
        };
        // The scores so far: scaled, then worked on, one node after another.
        let mut worked = None;
        let mut bent = None;
        let (first, last) = (nodes.first()?.index(), nodes.last()?.index());
        for id in (first..=last).filter_map(|index| graph.id(index)) {
            let node = graph.node(id);
            let input = |position: usize| node.inputs.get(position).copied();
            let constant = |position: usize| match input(position).map(|id| &graph.node(id).op) {
                Some(&Op::Const { value, .. }) => Some(value),
                _ => None,
            };
            match node.op {
                Op::Binary(BinaryOp::Mul) if worked.is_none() && wide(graph, input(0)?) == scores => {
                    (guess.scale, worked) = (constant(1)?, Some(id));
                }
                Op::Unary(UnaryOp::Tanh) if worked.is_some() && is_product_of(graph, input(0)?, worked) => {
                    bent = Some(id)
                }
                Op::Binary(BinaryOp::Mul) if bent.is_some() && bent == input(0) && guess.soft_cap.is_none() => {
                    // The gradient multiplies by it too, but by no constant.
                    if let Some(cap) = constant(1) {
                        (guess.soft_cap, worked) = (Some(cap), Some(id));
                    }
                }
                Op::Binary(BinaryOp::Add) if worked.is_some() && worked == input(0) => {
                    match slopes_of(graph, input(1)?) {
                        Some(slopes) => guess.slopes = Some(slopes),
                        None => guess.added = Some(wide(graph, input(1)?)),
                    }
                    worked = Some(id);
                }
                Op::Select if worked.is_some() && worked == input(1) => {
                    guess.hide(graph, input(0)?);
                    worked = Some(id);
                }
                Op::Random { drop, offset, .. } => (guess.p, guess.offset) = (drop, offset),
                _ => {}
            }
        }
        if guess.kind == Mask::Full && guess.added.is_some() {
            guess.kind = Mask::Additive;
        }
        Some(guess)
    }

    /// What a condition hides keys for: causality, a window, documents.
    fn hide(&mut self, graph: &Graph, condition: NodeId) {
        let node = graph.node(condition);
        let &[left, right] = node.inputs.as_slice() else { return };
        match node.op {
            Op::Compare(CompareOp::Le) => self.kind = Mask::Causal,
            Op::Compare(CompareOp::Gt) => {
                let limit = graph.node(right);
                if let (Op::Binary(BinaryOp::Sub), &[_, window]) = (&limit.op, limit.inputs.as_slice())
                    && let Op::Const { value, .. } = graph.node(window).op
                {
                    self.window = Some(value as usize);
                }
            }
            // Documents of keys, in another shape, and those of queries.
            Op::Compare(CompareOp::Eq) => {
                let viewed = |id: NodeId| match graph.node(id).op {
                    Op::View(View::Reshape(_)) => graph.node(id).inputs.first().copied(),
                    _ => None,
                };
                // Whether those of queries are a part of them, the comparison tells.
                self.documents = viewed(left).and(viewed(right));
            }
            _ => {}
        }
    }

    /// What is done to the scores, beside an additive mask.
    fn work(&self) -> ScoreWork {
        ScoreWork {
            soft_cap: self.soft_cap,
            slopes: self.slopes.is_some(),
            bias: self.added.is_some() && self.kind != Mask::Additive,
            window: self.window,
            documents: self.documents.is_some(),
        }
    }

    /// An attention call of this kind and its gradient.
    fn call(&self, graph: &Graph) -> Option<Differentiated> {
        let &[q, k] = graph.node(self.scores).inputs.as_slice() else { return None };
        let mut own = Graph::new("attention");
        let mut input = |name: &str, like: Option<NodeId>| match like.map(|like| graph.node(like)) {
            Some(node) => own.input(name, node.dtype, node.shape.clone()).ok().map(Some),
            None => Some(None),
        };
        let operands = [input("q", Some(q))??, input("k", Some(k))??, input("v", Some(k))??];
        let added = input("added", self.added)?;
        let slopes = input("slopes", self.slopes)?;
        let documents = input("documents", self.documents)?;
        let seed = if self.p > 0.0 { Some(own.input("seed", Dtype::I32, []).ok()?) } else { None };
        let Guess { kind, scale, p, offset, .. } = *self;
        // An additive mask comes before the operands of the work, its bias after slopes.
        let (mask, bias) = if kind == Mask::Additive { (added, None) } else { (None, added) };
        let rest = [mask, slopes, bias, documents, seed].into_iter().flatten();
        let inputs: Vec<NodeId> = operands.into_iter().chain(rest).collect();
        let result =
            own.call(Composite::Attention { mask: kind, scale, p, offset, work: self.work() }, &inputs).ok()?;
        own.output("o", *result.first()?).ok()?;
        let joint = differentiate(&own, &operands).ok()?;
        let &[result_gradient] = joint.seeds.as_slice() else { return None };
        let gradients: Vec<NodeId> = joint.gradients.iter().map(|&(_, gradient)| gradient).collect();
        let gradients = <[NodeId; 3]>::try_from(gradients).ok()?;
        let graph = joint.graph;
        Some(Differentiated { graph, operands, added, slopes, documents, seed, result_gradient, gradients })
    }
}

/// What a value is widened from.
fn wide(graph: &Graph, value: NodeId) -> NodeId {
    match graph.node(value).op {
        Op::Cast(_) => graph.node(value).inputs[0],
        _ => value,
    }
}

/// Whether a value is a product with this left factor.
fn is_product_of(graph: &Graph, value: NodeId, factor: Option<NodeId>) -> bool {
    let node = graph.node(value);
    node.op == Op::Binary(BinaryOp::Mul) && node.inputs.first().copied() == factor
}

/// The slopes, if a value is their product with the distances of keys, which are counted.
fn slopes_of(graph: &Graph, value: NodeId) -> Option<NodeId> {
    let node = graph.node(value);
    let &[distance, slopes] = node.inputs.as_slice() else { return None };
    let far = graph.node(distance);
    let counted = |id: &NodeId| matches!(graph.node(wide(graph, *id)).op, Op::Iota { .. });
    let is_distance = far.op == Op::Binary(BinaryOp::Sub) && far.inputs.first().is_some_and(counted);
    (node.op == Op::Binary(BinaryOp::Mul) && is_distance).then_some(slopes)
}

/// An attention call and its gradient.
struct Differentiated {
    graph: Graph,
    operands: [NodeId; 3],
    added: Option<NodeId>,
    slopes: Option<NodeId>,
    documents: Option<NodeId>,
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

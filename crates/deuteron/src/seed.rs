//! Inputs made from a seed: what `fuse` and `bench` run on when no data is given.

use deuteron_graph::{Call, Callee, CompareOp, Composite, CompositeKind, Dtype, Graph, InputKind, NodeId, Op, View};
use deuteron_reference::Generator;

use crate::error::Error;
use crate::tensor::Tensor;

/// Values repeat after this many: a prime, so that no two rows of a usual width are equal, and few enough to be generated in
/// milliseconds.
pub const PERIOD: usize = 1_048_573;

/// One tensor for each input of the graph. Data is normal, weights are normal of deviation 0.02 as GPT-2 begins, scales
/// of norms are about 1, indices are within what they pick from,
/// bytes fill their range.
pub fn inputs(graph: &Graph, seed: u64) -> Result<Vec<Tensor>, Error> {
    graph.inputs().iter().enumerate().map(|(position, &id)| input(graph, id, seed, position as u64)).collect()
}

fn input(graph: &Graph, id: NodeId, seed: u64, position: u64) -> Result<Tensor, Error> {
    let node = graph.node(id);
    let mut generator = Generator::new(seed ^ (position + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    if node.dtype == Dtype::I32 {
        let limit = index_limit(graph, id);
        return Tensor::tiled(Dtype::I32, node.shape.clone(), PERIOD, |_| generator.below(limit) as f64);
    }
    if node.dtype == Dtype::I8 {
        // Three deviations fill the range.
        return Tensor::tiled(Dtype::I8, node.shape.clone(), PERIOD, |_| 42.0 * quick_normal(&mut generator));
    }
    let is_weight = matches!(node.op, Op::Input { kind: InputKind::Weight, .. });
    let (centre, deviation) = match (is_norm_scale(graph, id), is_weight) {
        (true, _) => (1.0, 0.02),
        (false, true) => (0.0, 0.02),
        (false, false) => (0.0, 1.0),
    };
    Tensor::tiled(node.dtype, node.shape.clone(), PERIOD, |_| centre + deviation * quick_normal(&mut generator))
}

/// The sum of four uniform numbers, scaled to deviation 1: normal enough, and four to one call of the generator.
fn quick_normal(generator: &mut Generator) -> f64 {
    let bits = generator.bits();
    let sum: f64 = (0..4).map(|part| ((bits >> (16 * part)) & 0xFFFF) as f64).sum();
    (sum / 65_536.0 - 2.0) * f64::sqrt(3.0)
}

fn is_norm_scale(graph: &Graph, id: NodeId) -> bool {
    graph.calls().iter().any(|call| {
        let norm = matches!(call.callee, Callee::Composite(Composite::LayerNorm { .. } | Composite::RmsNorm { .. }));
        norm && call.inputs.get(1) == Some(&id)
    })
}

/// Rows of the table that an index picks from, or classes that a target is compared with.
fn index_limit(graph: &Graph, id: NodeId) -> usize {
    let losses = [CompositeKind::LinearCrossEntropy, CompositeKind::LinearCrossEntropyGradient];
    let is_loss = |callee: &Callee| matches!(callee, Callee::Composite(of) if losses.contains(&of.kind()));
    let is_target = |&target: &NodeId| target == id || is_reshape_of(graph, target, id);
    let targets_of = |call: &&Call| is_loss(&call.callee) && call.inputs.get(2).is_some_and(is_target);
    if let Some(call) = graph.calls().iter().find(targets_of) {
        return graph.node(call.inputs[1]).shape[0];
    }
    let mut limit = usize::MAX;
    for user in graph.ids() {
        let node = graph.node(user);
        let through = |&input: &NodeId| input == id || is_reshape_of(graph, input, id);
        if !node.inputs.iter().any(through) {
            continue;
        }
        match node.op {
            Op::Gather if through(&node.inputs[1]) => limit = limit.min(graph.node(node.inputs[0]).shape[0]),
            Op::ScatterAdd { rows } => limit = limit.min(rows),
            Op::Append { .. } => {
                let axis = node.shape.rank() - 2;
                limit = limit.min(node.shape[axis] - graph.node(node.inputs[1]).shape[axis] + 1);
            }
            Op::Compare(CompareOp::Eq) => limit = limit.min(node.shape.cols()),
            _ => {}
        }
    }
    // A seed of a random mask may be any number.
    if limit == usize::MAX { 1 << 30 } else { limit.max(1) }
}

/// Whether a value is another one in another shape.
pub(crate) fn is_reshape_of(graph: &Graph, view: NodeId, of: NodeId) -> bool {
    let node = graph.node(view);
    matches!(node.op, Op::View(View::Reshape(_))) && node.inputs[0] == of
}

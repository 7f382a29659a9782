//! Inputs made from a seed: what `fuse` and `bench` run on when no data is given.

use deuteron_graph::{
    BinaryOp, Call, Callee, CompareOp, Composite, CompositeKind, Dtype, Graph, InputKind, NodeId, Op, View,
};
use deuteron_reference::Generator;

use crate::error::Error;
use crate::tensor::Tensor;

/// Values repeat after this many: a prime, so that no two rows of a usual width are equal, and few enough to be generated in
/// milliseconds.
pub const PERIOD: usize = 1_048_573;

/// The seed of a random mask may be any number below this.
const SEEDS: usize = 1 << 30;

/// Other integers are below this, so that `i32` and `f32` hold the products and sums of a few: 64-bit integers of an ONNX file are computed
/// in 32 bits, where larger results would wrap.
const NUMBERS: usize = 1 << 10;

/// A factor of this magnitude hides what a mask marks: the least that models use is 1e4, which f16 holds.
const HIDING: f64 = 1e4;

/// One tensor for each input of the graph. Data is normal, weights are normal of deviation 0.02 as GPT-2 begins, scales
/// of norms are about 1, indices are within what they pick from, masks are 0 or 1, bytes fill their range.
pub fn inputs(graph: &Graph, seed: u64) -> Result<Vec<Tensor>, Error> {
    graph.inputs().iter().enumerate().map(|(position, &id)| input(graph, id, seed, position as u64)).collect()
}

fn input(graph: &Graph, id: NodeId, seed: u64, position: u64) -> Result<Tensor, Error> {
    let node = graph.node(id);
    let mut generator = Generator::new(seed ^ (position + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    if is_mask(graph, id) {
        // The first of a row is 1: a row that is hidden as a whole says nothing of a model.
        let cols = node.shape.cols().max(1);
        return Tensor::tiled(node.dtype, node.shape.clone(), PERIOD / cols.min(PERIOD) * cols, |index| {
            if index % cols == 0 { 1.0 } else { (generator.bits() & 1) as f64 }
        });
    }
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

/// Whether an input of integers marks what attention sees: by its name, or because it hides what it marks, as `(1 - mask) * -1e9` does.
fn is_mask(graph: &Graph, id: NodeId) -> bool {
    let node = graph.node(id);
    match node.dtype {
        Dtype::Bool => true,
        // Positions of masked tokens pick rows.
        Dtype::I8 | Dtype::I32 if graph.label(id).to_ascii_lowercase().contains("mask") => index_limit(graph, id) > 1,
        Dtype::I32 => hides(graph, id),
        _ => false,
    }
}

/// Whether an integer is used as a truth value or a factor alone, and somewhere hides what it is 0 for.
fn hides(graph: &Graph, id: NodeId) -> bool {
    // The input in other shapes and types, and what is 1 where it is 0.
    let mut forms = vec![false; graph.nodes().len()];
    forms[id.index()] = true;
    let mut found = false;
    for user in graph.ids() {
        let node = graph.node(user);
        let Some(of) = node.inputs.iter().position(|input| forms[input.index()]) else { continue };
        let is_integer = graph.node(node.inputs[of]).dtype == Dtype::I32;
        let other = |holds: &dyn Fn(f64) -> bool| {
            let others = node.inputs.iter().enumerate().filter(|&(position, _)| position != of);
            others.map(|(_, &input)| constant(graph, input)).any(|value| value.is_some_and(holds))
        };
        match &node.op {
            Op::View(_) | Op::Cast(_) => forms[user.index()] = true,
            Op::Binary(BinaryOp::Sub) if of == 1 && other(&|value| value == 1.0) => forms[user.index()] = true,
            Op::Binary(BinaryOp::Mul) if other(&|value| value.abs() >= HIDING) => found = true,
            Op::Compare(CompareOp::Eq | CompareOp::Ne) if other(&|value| value == 0.0 || value == 1.0) => found = true,
            // What an integer picks or counts is no mark; as a float it may be a factor.
            _ if is_integer => return false,
            _ => {}
        }
    }
    found
}

/// A constant, perhaps repeated by views.
fn constant(graph: &Graph, mut id: NodeId) -> Option<f64> {
    while let Op::View(_) = graph.node(id).op {
        id = graph.node(id).inputs[0];
    }
    match graph.node(id).op {
        Op::Const { value, .. } => Some(value),
        _ => None,
    }
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
            Op::Random { .. } => limit = limit.min(SEEDS),
            _ => {}
        }
    }
    if limit == usize::MAX { NUMBERS } else { limit.max(1) }
}

/// Whether a value is another one in another shape.
pub(crate) fn is_reshape_of(graph: &Graph, view: NodeId, of: NodeId) -> bool {
    let node = graph.node(view);
    matches!(node.op, Op::View(View::Reshape(_))) && node.inputs[0] == of
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values of the first input of a graph.
    fn first(text: &str) -> Vec<f64> {
        inputs(&text.parse().unwrap(), 3).unwrap()[0].to_array().unwrap().values
    }

    fn is_marks(values: &[f64]) -> bool {
        values.iter().all(|&value| value == 0.0 || value == 1.0) && values.contains(&0.0) && values.contains(&1.0)
    }

    /// As exporters write it: a cast, what is 1 where the mask is 0, a large negative number.
    #[test]
    fn a_mask_is_known_by_what_it_hides() {
        for text in [
            "a = input i32[3,129] ; f = cast a f32 ; i = sub 1.0 f ; y = mul i -3.4e38 ; out y",
            "a = input i32[3,129] ; v = reshape a [3,1,129] ; f = cast v f32 ; i = sub 1 f ; y = mul i -1e4 ; out y",
            "a = input i32[3,129] ; x = input f32[3,129] ; c = eq a 0 ; n = mul x -1e9 ; y = select c n x ; out y",
            "attention_mask = input i32[3,129] ; f = cast attention_mask f32 ; y = row_sum f ; out y",
            "MASK = input i8[3,129] ; f = cast MASK f32 ; y = row_sum f ; out y",
            "a = input bool[3,129] ; x = input f32[3,129] ; n = neg x ; y = select a x n ; out y",
        ] {
            let values = first(text);
            assert!(is_marks(&values), "{text}");
            assert!(values.iter().step_by(129).all(|&value| value == 1.0), "a row that nothing is seen in: {text}");
        }
    }

    #[test]
    fn other_integers_are_no_masks() {
        let picked =
            "a = input i32[129] ; t = weight f32[500,8] ; g = gather t a ; f = cast a f32 ; y = mul f -1e9 ; out g y";
        assert!(first(picked).iter().any(|&value| value > 1.0));
        let rows = "mask_positions = input i32[129] ; t = weight f32[1,8] ; y = gather t mask_positions ; out y";
        assert!(first(rows).iter().all(|&value| value == 0.0), "an index beyond the table");
        let counted = first("a = input i32[129] ; f = cast a f32 ; y = mul f 0.5 ; out y");
        assert!(counted.iter().any(|&value| value > 1.0) && counted.iter().all(|&value| value < NUMBERS as f64));
    }
}

//! Matmuls whose right operand is gathered, one matrix per row of the left one: experts.
//!
//! The gathered matrices are as large as all rows times a matrix. They are computed and multiplied for some rows at a time; the results, with slack and
//! spread, are concatenated.

use std::collections::HashMap;
use std::sync::Arc;

use deuteron_graph::{Graph, Node, NodeId, Op, Shape, View};

use crate::error::ReferenceError;
use crate::primitives::Evaluation;
use crate::spread::through_view;
use crate::strided::{Strided, concat};
use crate::value::{Axes, Spread, Value, or_zero};

/// Elements that are picked at a time, about; what is no larger is picked at once.
pub(crate) const PICKED: usize = 1 << 24;

/// A right operand that is picked.
pub(crate) struct Picked {
    /// The gather, then views of what it picks.
    chain: Vec<usize>,
    /// Rows of the first axis that are picked at a time.
    rows: usize,
}

/// Matmuls with such operands of more than this many elements. These are left out of the nodes that are computed, and what they read is kept for
/// the matmuls.
pub(crate) fn picked_operands(graph: &Graph, last_use: &mut [Option<usize>], most: usize) -> HashMap<usize, Picked> {
    let mut readers = vec![0usize; graph.nodes().len()];
    graph.outputs().iter().for_each(|output| readers[output.node.index()] += 1);
    for (index, node) in graph.nodes().iter().enumerate().filter(|(index, _)| last_use[*index].is_some()) {
        debug_assert!(node.inputs.iter().all(|input| input.index() < index));
        node.inputs.iter().for_each(|input| readers[input.index()] += 1);
    }
    let mut found = HashMap::new();
    for (index, node) in graph.nodes().iter().enumerate() {
        let matmul = matches!(node.op, Op::Matmul { .. }) && node.shape.rank() >= 3 && last_use[index].is_some();
        let Some(chain) = matmul.then(|| chain(graph, node, &readers)).flatten() else { continue };
        let gather = &graph.nodes()[chain[0]];
        if gather.shape.elements() <= most {
            continue;
        }
        let each = gather.shape.elements() / gather.shape[0].max(1);
        chain.iter().for_each(|&left_out| last_use[left_out] = None);
        for read in &gather.inputs {
            last_use[read.index()] = last_use[read.index()].max(Some(index));
        }
        found.insert(index, Picked { chain, rows: (most / each.max(1)).max(1) });
    }
    found
}

/// The gather that picks the right operand of a matmul and the reshapes between them, all of which keep the first axis and are read here
/// alone.
fn chain(graph: &Graph, matmul: &Node, readers: &[usize]) -> Option<Vec<usize>> {
    let first = |id: NodeId| graph.node(id).shape.first() == Some(&matmul.shape[0]);
    let mut at = matmul.inputs[1];
    let mut chain = Vec::new();
    loop {
        let node = graph.node(at);
        if readers[at.index()] != 1 || !first(at) {
            return None;
        }
        chain.push(at.index());
        match &node.op {
            Op::View(View::Reshape(_)) => at = node.inputs[0],
            Op::Gather if first(node.inputs[1]) && first(matmul.inputs[0]) => break,
            _ => return None,
        }
    }
    chain.reverse();
    Some(chain)
}

impl Picked {
    /// The matmul at `index`.
    pub fn multiplied<'a>(
        &self,
        evaluation: &Evaluation<'_, 'a>,
        index: usize,
        values: &[Option<Value<'a>>],
    ) -> Result<Value<'a>, ReferenceError> {
        let node = &evaluation.graph.nodes()[index];
        let gather = &evaluation.graph.nodes()[self.chain[0]];
        let read = [node.inputs[0], gather.inputs[0], gather.inputs[1]];
        let operands: Vec<&Value> = read.iter().filter_map(|id| values[id.index()].as_ref()).collect();
        let (left, table, indices) = (operands[0], operands[1], operands[2]);
        let mut parts = Vec::new();
        for start in (0..node.shape[0]).step_by(self.rows) {
            let rows = start..(start + self.rows).min(node.shape[0]);
            let of = |at: usize| some_rows(&evaluation.graph.nodes()[at], rows.len());
            let cut = |value: &Value<'a>| cut(value, rows.start, rows.len());
            let mut picked = evaluation.computed(self.chain[0], &of(self.chain[0]), &[table, &cut(indices)])?;
            for &view in &self.chain[1..] {
                picked = evaluation.computed(view, &of(view), &[&picked])?;
            }
            parts.push(evaluation.computed(index, &of(index), &[&cut(left), &picked])?);
        }
        Ok(together(&node.shape, &parts))
    }
}

/// The shape with another size of the first axis.
fn with_rows(shape: &Shape, rows: usize) -> Shape {
    Shape::new([&[rows], &shape[1..]].concat())
}

/// The node for some rows.
fn some_rows(node: &Node, rows: usize) -> Node {
    let shape = with_rows(&node.shape, rows);
    let op = match &node.op {
        Op::View(View::Reshape(_)) => Op::View(View::Reshape(shape.clone())),
        op => op.clone(),
    };
    Node { op, shape, ..node.clone() }
}

/// Some rows of a value.
fn cut<'a>(value: &Value<'a>, start: usize, length: usize) -> Value<'a> {
    let change = View::Slice { axis: 0, start, length };
    let shape = with_rows(&value.main.shape, length);
    Value {
        dtype: value.dtype,
        main: value.main.view(&change),
        slack: value.slack.as_ref().map(|slack| slack.view(&change).packed()),
        spread: through_view(&change, value, &shape),
    }
}

/// Rows of several values, one after another.
fn together(shape: &Shape, parts: &[Value<'_>]) -> Value<'static> {
    let joined = |of: &dyn Fn(&Value<'_>) -> Option<Strided<'static>>| {
        let some = parts.iter().any(|part| of(part).is_some());
        let each = || parts.iter().map(|part| or_zero(&of(part), &part.main.shape).broadcast(&part.main.shape));
        some.then(|| concat(shape, 0, &each().collect::<Vec<_>>().iter().collect::<Vec<_>>()))
    };
    let (own, shared) = (joined(&|part| part.spread.own.clone()), joined(&|part| part.spread.shared.clone()));
    let along = parts.iter().fold(Axes::NONE, |along, part| along.with(part.spread.along));
    let sources = parts.iter().flat_map(|part| part.spread.sources.iter().copied()).collect();
    Value {
        dtype: parts[0].dtype,
        main: concat(shape, 0, &parts.iter().map(|part| &part.main).collect::<Vec<_>>()),
        slack: joined(&|part| part.slack.clone()),
        spread: Spread { own, shared, along, sources: Arc::new(sources) }.settled(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array::Array;
    use crate::primitives::{Rounding, interpret_picking};

    /// The same elements, slack and spread whether matrices are picked at once, for some rows, or one by one.
    #[test]
    fn what_is_picked_at_a_time_changes_nothing() {
        for dtype in ["f32", "bf16"] {
            let text = format!(
                "x = input {dtype}[7,5] ; e = input i32[7,2] ; w = weight {dtype}[3,4,5] ; b = weight {dtype}[3,4] ; g = input f32[7,2]
y = gelu x ; l = routed_linear y e w b ; z = weighted_sum l g ; out z l"
            );
            let graph: Graph = text.parse().unwrap();
            let mut inputs: Vec<Array> = graph
                .inputs()
                .iter()
                .enumerate()
                .map(|(seed, &id)| Array::normal(graph.node(id).shape.clone(), seed as u64))
                .collect();
            inputs[1] = Array::from_fn([7, 2], |place| (place * 5 % 3) as f64);
            for rounding in [Rounding::Exact, Rounding::Analysed, Rounding::Storage] {
                let whole = interpret_picking(&graph, &inputs, rounding, usize::MAX).unwrap();
                for most in [1, 2 * 2 * 20, 3 * 2 * 20] {
                    let mut last_use = vec![Some(usize::MAX); graph.nodes().len()];
                    assert_eq!(picked_operands(&graph, &mut last_use, most).len(), 1);
                    assert_eq!(interpret_picking(&graph, &inputs, rounding, most).unwrap(), whole, "{dtype} {most}");
                }
            }
        }
    }
}

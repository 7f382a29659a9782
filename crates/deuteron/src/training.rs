//! A graph, the values that its gradient reads, and its gradient, in the form that another library's autograd needs.
//!
//! Forward runs as [`Training::forward`] where no gradient is wanted, and as [`Training::saving`] where one is: its results are
//! the outputs, then values that backward takes again. Backward ([`Training::backward`]) is made for the gradients that come in and those
//! that are wanted, and computes no others.

use deuteron_graph::{Graph, NodeId, Op, Output, attention_interior, differentiate, extract, recompute};
use deuteron_plan::{Saving, store_or_recompute, stored_when_fused};

use crate::error::Error;

/// A graph and the values that its gradient reads.
#[derive(Debug, Clone)]
pub struct Training {
    graph: Graph,
    /// Values that the forward pass stores for the backward pass.
    kept: Vec<NodeId>,
    /// Values that the backward pass recomputes from these and from the inputs; the interior of attention is always recomputed and not listed.
    again: Vec<NodeId>,
}

/// A forward graph that returns what the backward pass reads.
#[derive(Debug, Clone)]
pub struct SavingGraph {
    /// its outputs are those of the plain graph, then the other values that are kept
    pub graph: Graph,
    /// which of its outputs backward takes, in order
    pub kept: Vec<usize>,
}

impl Training {
    /// A graph whose backward pass reads these values.
    pub(crate) fn keeping(mut graph: Graph, kept: Vec<NodeId>) -> Result<Training, Error> {
        name_all(&mut graph, &kept)?;
        Ok(Training { graph, kept, again: Vec::new() })
    }

    /// A graph without a gradient.
    pub fn plain(graph: Graph) -> Training {
        Training { graph, kept: Vec::new(), again: Vec::new() }
    }

    /// A graph whose values are stored or recomputed, whichever moves fewer bytes.
    pub fn new(mut graph: Graph) -> Result<Training, Error> {
        let wrt: Vec<NodeId> = differentiable(&graph).collect();
        if wrt.is_empty() || !graph.outputs().iter().any(|output| graph.node(output.node).dtype.is_float()) {
            return Ok(Training::plain(graph));
        }
        let Joint { graph: rewritten, first, again } = Joint::new(&graph, &wrt, Saving::Traffic)?;
        let mut kept = Vec::new();
        for node in &rewritten.nodes()[first..] {
            for &input in node.inputs.iter().filter(|input| input.index() < first) {
                let root = root(&rewritten, input);
                let given = matches!(rewritten.node(root).op, Op::Input { .. });
                if !given && !is_made_by_readers(&rewritten.node(root).op) && !kept.contains(&root) {
                    kept.push(root);
                }
            }
        }
        kept.sort_unstable();
        name_all(&mut graph, &kept)?;
        Ok(Training { graph, kept, again })
    }

    /// The graph where no gradient is wanted.
    pub fn forward(&self) -> &Graph {
        &self.graph
    }

    /// The graph where one is.
    pub fn saving(&self) -> Result<SavingGraph, Error> {
        let mut graph = self.graph.clone();
        let mut kept = Vec::new();
        for &node in &self.kept {
            let known = graph.outputs().iter().position(|output| output.node == node);
            if known.is_none() {
                let taken = |name: &str| graph.outputs().iter().any(|output| output.name == name);
                let names = (0..).map(|number| format!("kept{number}"));
                let name = names.into_iter().find(|name| !taken(name)).unwrap_or_default();
                graph.output(&name, node)?;
            }
            kept.push(known.unwrap_or(graph.outputs().len() - 1));
        }
        Ok(SavingGraph { graph, kept })
    }

    /// Names of the values that the backward pass reads, in order.
    pub fn kept_names(&self) -> Vec<String> {
        self.kept.iter().map(|&node| self.graph.label(node)).collect()
    }

    /// The graph that takes operands, kept values and the gradients `d_<output>` of some outputs, and gives `d_<input>` of some
    /// inputs; by position among [`Graph::outputs`] and [`Graph::inputs`]. Inputs that it does not need are left out, so callers
    /// bind by name.
    pub fn backward(&self, of: &[bool], wrt: &[bool]) -> Result<Graph, Error> {
        let mut graph = self.graph.clone();
        let float = |position: usize| self.graph.node(self.graph.outputs()[position].node).dtype.is_float();
        graph.retain_outputs(|position| of.get(position) == Some(&true) && float(position));
        let wanted =
            graph.inputs().iter().zip(wrt).filter(|(input, wanted)| **wanted && graph.node(**input).dtype.is_float());
        let wanted: Vec<NodeId> = wanted.map(|(&input, _)| input).collect();
        let joint = differentiate(&graph, &wanted)?;
        let again = with_attention(&joint.graph, joint.first_backward, &self.again);
        let rewritten = recompute(&joint.graph, joint.first_backward, &again)?.graph;
        let gradients: Vec<Output> = rewritten.outputs()[graph.outputs().len()..].to_vec();
        let boundary: Vec<NodeId> = rewritten.inputs().iter().copied().chain(self.kept.iter().copied()).collect();
        let mut backward = extract(&rewritten, &gradients, &boundary)?;
        backward.set_name(&format!("{}_backward", self.graph.name()));
        Ok(backward)
    }
}

/// A graph and its gradients as one graph, whose backward part makes values again or takes them as they are stored, whatever saves more
/// bytes: what a step of training is made of. Its outputs are those of the graph, then `d_<input>` for each of `wrt`; the gradients of
/// outputs come in as inputs `d_<output>`.
pub fn with_gradients(graph: &Graph, wrt: &[NodeId], saving: Saving) -> Result<Graph, Error> {
    Ok(Joint::new(graph, wrt, saving)?.graph)
}

/// A graph and its gradients.
struct Joint {
    graph: Graph,
    /// where the backward part begins
    first: usize,
    /// values that it makes again, besides the interior of attention
    again: Vec<NodeId>,
}

impl Joint {
    fn new(graph: &Graph, wrt: &[NodeId], saving: Saving) -> Result<Joint, Error> {
        let joint = differentiate(graph, wrt)?;
        let first = joint.first_backward;
        let stored = stored_when_fused(&joint.graph, first);
        let again = store_or_recompute(&joint.graph, first, &|id| stored[id.index()], saving).again;
        let all = with_attention(&joint.graph, first, &again);
        Ok(Joint { graph: recompute(&joint.graph, first, &all)?.graph, first, again })
    }
}

/// Inputs that may have a gradient.
fn differentiable(graph: &Graph) -> impl Iterator<Item = NodeId> + '_ {
    graph.inputs().iter().copied().filter(|&input| graph.node(input).dtype.is_float())
}

/// Values that backward makes again, with the scores of attention: one kernel holds them and their gradient.
fn with_attention(graph: &Graph, first: usize, again: &[NodeId]) -> Vec<NodeId> {
    let mut all = again.to_vec();
    all.extend(attention_interior(graph, first));
    all.sort_unstable();
    all.dedup();
    all
}

/// The value that a view looks into.
fn root(graph: &Graph, mut node: NodeId) -> NodeId {
    while let Op::View(_) = graph.node(node).op {
        node = graph.node(node).inputs[0];
    }
    node
}

/// Whether every reader makes it for itself.
fn is_made_by_readers(op: &Op) -> bool {
    matches!(op, Op::Const { .. } | Op::Iota { .. } | Op::Random { .. })
}

/// Gives values unique names, by which forward and backward refer to them.
fn name_all(graph: &mut Graph, values: &[NodeId]) -> Result<(), Error> {
    let mut numbers = 0..;
    for &value in values {
        while graph.given_name(value).is_none() {
            let name = format!("kept{}", numbers.next().unwrap_or(0));
            if graph.find(&name).is_none() {
                graph.set_node_name(value, &name)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn training(text: &str) -> Training {
        Training::new(text.parse().unwrap()).unwrap()
    }

    #[test]
    fn what_a_product_reads_is_kept_and_what_rows_make_is_not() {
        let text = "x = input f32[4,8] ; y = layer_norm x w[8] b[8] ; p = linear y m[8,16] ; z = gelu p ; out z";
        let training = training(text);
        let saving = training.saving().unwrap();
        // The operand of the matmul, and its result, which the gradient of GELU reads; the output is not stored.
        assert!(training.kept_names().contains(&"p".to_string()), "{:?}", training.kept_names());
        assert!(!saving.kept.contains(&0), "{:?}", saving.kept);
        assert_eq!(saving.graph.outputs().len(), 1 + saving.kept.len());
    }

    #[test]
    fn a_gradient_is_made_for_what_is_asked() {
        let training = training("x = input f32[4,8] ; s = add x r[4,8] ; y = gelu s ; out s ; out y");
        let all = training.backward(&[true, true], &[true, true]).unwrap();
        let names = |graph: &Graph| graph.outputs().iter().map(|output| output.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&all), ["d_x", "d_r"]);
        let one = training.backward(&[true, false], &[false, true]).unwrap();
        assert_eq!(names(&one), ["d_r"]);
        assert_eq!(one.inputs().len(), 1, "the gradient of a sum reads only the incoming gradient");
    }

    #[test]
    fn the_gradient_from_kept_values_is_that_of_the_graph() {
        use deuteron_reference::{Array, Rounding, interpret};
        let text = "x = input f32[6,8] ; y = layer_norm x w[8] b[8] ; q = linear y m[8,24] ; \
                    c = reshape q [1,6,3,8] ; t = transpose c [0,2,1,3] ; a = attention t t t mask=causal ; \
                    d = dropout a seed:i32[] p=0.25 ; z = gelu d ; out z";
        let training = training(text);
        let graph = training.forward();
        let float = |id: &NodeId| graph.node(*id).dtype.is_float();
        let arrays: Vec<Array> = graph
            .inputs()
            .iter()
            .enumerate()
            .map(|(seed, id)| {
                let shape = graph.node(*id).shape.clone();
                if float(id) { Array::normal(shape, seed as u64) } else { Array::scalar(7.0) }
            })
            .collect();
        let wrt: Vec<NodeId> = graph.inputs().iter().copied().filter(float).collect();
        let joint = differentiate(graph, &wrt).unwrap();
        let upstream = Array::normal(graph.node(graph.outputs()[0].node).shape.clone(), 99);
        let all: Vec<Array> = arrays.iter().cloned().chain([upstream.clone()]).collect();
        let expected = interpret(&joint.graph, &all, Rounding::Exact).unwrap().outputs;
        let saving = training.saving().unwrap();
        let results = interpret(&saving.graph, &arrays, Rounding::Exact).unwrap().outputs;
        let backward = training.backward(&[true], &vec![true; graph.inputs().len()]).unwrap();
        let names = training.kept_names();
        let inputs: Vec<Array> = backward
            .inputs()
            .iter()
            .map(|&id| {
                let name = backward.label(id);
                if let Some(position) = graph.inputs().iter().position(|&input| graph.label(input) == name) {
                    arrays[position].clone()
                } else if let Some(position) = names.iter().position(|kept| *kept == name) {
                    results[saving.kept[position]].clone()
                } else {
                    assert_eq!(name, "d_z");
                    upstream.clone()
                }
            })
            .collect();
        let got = interpret(&backward, &inputs, Rounding::Exact).unwrap().outputs;
        assert_eq!(got.len(), wrt.len());
        for (got, expected) in got.iter().zip(&expected[1..]) {
            assert_eq!(got.shape, expected.shape);
            for (got, expected) in got.values.iter().zip(&expected.values) {
                assert!((got - expected).abs() <= 1e-9 * expected.abs().max(1.0), "{got} {expected}");
            }
        }
    }
}

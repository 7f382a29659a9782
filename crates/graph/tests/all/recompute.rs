//! Values computed again in backward: where the copies stand, and that nothing else changes.

use deuteron_graph::{Graph, GraphError, NodeId, Op, differentiate, first_backward, is_recomputed, recompute};
use deuteron_testkit::fixtures::GRAPHS;

fn differentiated(text: &str) -> (Graph, usize) {
    let graph: Graph = text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"));
    let wrt: Vec<NodeId> = graph.inputs().iter().filter(|&&id| graph.node(id).dtype.is_float()).copied().collect();
    let joint = differentiate(&graph, &wrt).unwrap();
    (joint.graph, joint.first_backward)
}

fn computed(graph: &Graph, first_backward: usize) -> Vec<NodeId> {
    let is_computed = |id: &NodeId| id.index() < first_backward && !matches!(graph.node(*id).op, Op::Input { .. });
    graph.ids().filter(is_computed).collect()
}

/// Compares the text up to the gradients of the last two calls, which no copy stands behind.
fn check(again: &[&str], expected: &str) {
    let (graph, first) = differentiated(
        "x = input f32[2,3] ; p = matmul x w[3,4] ; a = exp p ; b = silu a ; y = matmul b u[4,2] ; out y",
    );
    let named = |name: &&str| graph.ids().find(|&id| graph.label(id) == *name).unwrap();
    let again: Vec<NodeId> = again.iter().map(named).collect();
    let printed = recompute(&graph, first, &again).unwrap().graph.to_string();
    let strip = |text: &str| text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("\n");
    assert!(strip(&printed).starts_with(&strip(expected)), "\n{printed}");
}

#[test]
fn copies_stand_before_the_first_backward_call_that_needs_them() {
    let forward = "x = input f32[2,3]
        w = input f32[3,4]
        p = matmul x w
        a = exp p
        b = silu a
        u = input f32[4,2]
        y = matmul b u
        d_y = input f32[2,2]
    ";
    let all = "recompute(exp) {
          %9 = exp p
        }
        recompute(silu) {
          %10 = sigmoid %9
          %11 = mul %9 %10
        }
        grad(matmul) {
          %12 = matmul d_y u transpose_b
          %13 = matmul %11 d_y transpose_a
        }
        grad(silu) {
          %14 = sigmoid %9
    ";
    check(&["a", "%4", "b"], &(forward.to_string() + all));
    let operand = "grad(matmul) {
          %9 = matmul d_y u transpose_b
          %10 = matmul b d_y transpose_a
        }
        recompute(exp) {
          %11 = exp p
        }
        grad(silu) {
          %12 = sigmoid %11
    ";
    check(&["a"], &(forward.to_string() + operand));
    let result = "recompute(silu) {
          %9 = mul a %4
        }
        grad(matmul) {
          %10 = matmul d_y u transpose_b
          %11 = matmul %9 d_y transpose_a
        }
        grad(silu) {
          %12 = sigmoid a
    ";
    check(&["b"], &(forward.to_string() + result));
}

/// Every value that can be, and every one alone.
#[test]
fn whatever_is_computed_again_the_rest_stays() {
    for text in GRAPHS {
        let (graph, first) = differentiated(text);
        let all = computed(&graph, first);
        let mut choices: Vec<Vec<NodeId>> = all.iter().map(|&id| vec![id]).collect();
        choices.extend([Vec::new(), all]);
        for again in choices {
            let rewritten = recompute(&graph, first, &again).unwrap();
            let new = &rewritten.graph;
            new.verify().unwrap();
            let printed = new.to_string();
            let parsed: Graph = printed.parse().unwrap_or_else(|error| panic!("{error}\n{printed}"));
            assert_eq!(&parsed, new, "{printed}");

            assert_eq!(new.nodes()[..first], graph.nodes()[..first], "the forward part");
            assert_eq!(new.nodes().len(), graph.nodes().len() + rewritten.copies.len());
            let names = |graph: &Graph, ids: &[NodeId]| ids.iter().map(|&id| graph.label(id)).collect::<Vec<_>>();
            assert_eq!(names(new, new.inputs()), names(&graph, graph.inputs()));
            let names = |graph: &Graph| graph.outputs().iter().map(|output| output.name.clone()).collect::<Vec<_>>();
            assert_eq!(names(new), names(&graph));

            for &(value, copy) in &rewritten.copies {
                assert!(again.contains(&value) && is_recomputed(new, copy) && !is_recomputed(new, value));
                assert_eq!(new.node(value).op, new.node(copy).op);
            }
            let readers = new.ids().filter(|id| id.index() >= first).flat_map(|id| new.node(id).inputs.clone());
            assert!(readers.into_iter().all(|input| !again.contains(&input)), "a backward node reads what is not kept");
            if again.is_empty() {
                assert_eq!(new, &graph);
            }
        }
    }
}

#[test]
fn the_backward_part_is_found_by_its_blocks() {
    for text in GRAPHS {
        let (graph, first) = differentiated(text);
        let again: Graph = graph.to_string().parse().unwrap();
        // One fixture holds a block of that name in its forward part.
        let expected = if text.contains("grad(") { 0 } else { first };
        assert_eq!(first_backward(&again), Some(expected), "{text}");
    }
    let forward: Graph = GRAPHS[0].parse().unwrap();
    assert_eq!(first_backward(&forward), None);
}

#[test]
fn only_computed_forward_values_can_be_computed_again() {
    let (graph, first) = differentiated("x = input f32[2,3] ; y = exp x ; z = silu y ; out z");
    let refused =
        |first: usize, index: usize| recompute(&graph, first, &[graph.id(index).unwrap()]).unwrap_err().to_string();
    assert_eq!(refused(first, 0), "recompute: again must be values computed before %4, got %0");
    assert_eq!(refused(first, 4), "recompute: again must be values computed before %4, got %4");
    assert_eq!(refused(3, 1), "recompute: first_backward must be the first node of a call, got %3");
    let small: Graph = "x = input f32[2]".parse().unwrap();
    let unknown = recompute(&small, 1, &[graph.id(2).unwrap()]).unwrap_err();
    assert!(matches!(unknown, GraphError::UnknownNode { node: 2, nodes: 1, .. }), "{unknown}");
}

/// No recursion: the stack does not grow with the graph.
#[test]
fn a_long_chain_is_copied() {
    let mut graph = Graph::new("chain");
    let x = graph.input("x", deuteron_graph::Dtype::F32, [4]).unwrap();
    let mut y = x;
    for _ in 0..20_000 {
        y = graph.mul(y, y).unwrap();
    }
    graph.output("y", y).unwrap();
    let joint = differentiate(&graph, &[x]).unwrap();
    let again = computed(&joint.graph, joint.first_backward);
    let rewritten = recompute(&joint.graph, joint.first_backward, &again).unwrap();
    assert_eq!(rewritten.copies.len(), 19_999, "the last one is read by nothing");
    assert_eq!(rewritten.graph.calls().len(), joint.graph.calls().len() + 19_999);
}

//! The interpreter on small graphs: refusals, rounding, and where slack is born and goes.

use deuteron_graph::{BinaryOp, CompareOp, Dtype, Graph, GraphError, NodeId, ReduceOp, Shape, UnaryOp, differentiate};
use deuteron_reference::{Array, Interpretation, ReferenceError, Rounding, interpret, interpret_all, round_to};

/// A graph of float inputs, run exactly.
fn run(dtype: Dtype, inputs: &[Array], build: impl FnOnce(&mut Graph, &[NodeId]) -> NodeId) -> Interpretation {
    let mut graph = Graph::new("test");
    let ids: Vec<NodeId> = (inputs.iter().enumerate())
        .map(|(i, array)| graph.input(&format!("x{i}"), dtype, array.shape.clone()).unwrap())
        .collect();
    let output = build(&mut graph, &ids);
    graph.output("y", output).unwrap();
    interpret(&graph, inputs, Rounding::Exact).unwrap()
}

/// The slack that decisions leave. The result is repeated, since small tensors carry the reach of rounding too.
fn slack(dtype: Dtype, inputs: &[Array], build: impl FnOnce(&mut Graph, &[NodeId]) -> NodeId) -> Option<Vec<f64>> {
    let mut elements = 0;
    let slack = run(dtype, inputs, |graph, x| {
        let output = build(graph, x);
        let shape = graph.node(output).shape.clone();
        elements = shape.elements();
        graph.broadcast(output, [&[32], &shape[..]].concat()).unwrap()
    });
    slack.slack[0].as_ref().map(|slack| slack[..elements].to_vec())
}

fn vector(values: &[f64]) -> Array {
    Array::new([values.len()], values.to_vec())
}

#[test]
fn wrong_inputs_are_refused() {
    let mut graph = Graph::new("sum");
    let x = graph.input("x", Dtype::F32, [2, 3]).unwrap();
    let y = graph.reduce(ReduceOp::Sum, x).unwrap();
    graph.output("y", y).unwrap();
    let refused = |inputs: &[Array]| interpret(&graph, inputs, Rounding::Exact).unwrap_err();
    assert_eq!(refused(&[]), ReferenceError::InputCount { expected: 1, got: 0 });
    let turned =
        ReferenceError::InputShape { name: "x".into(), expected: Shape::from([2, 3]), got: Shape::from([3, 2]) };
    assert_eq!(refused(&[Array::filled([3, 2], 0.0)]), turned);
    let short = Array { shape: Shape::from([2, 3]), values: vec![0.0; 5] };
    assert_eq!(refused(&[short]), ReferenceError::InputLength { name: "x".into(), expected: 6, got: 5 });
}

#[test]
fn rows_that_a_table_lacks_are_refused() {
    let mut graph = Graph::new("embedding");
    let table = graph.weight("table", Dtype::F32, [4, 3]).unwrap();
    let indices = graph.input("indices", Dtype::I32, [2]).unwrap();
    let rows = graph.gather(table, indices).unwrap();
    graph.output("rows", rows).unwrap();
    let inputs = [Array::normal([4, 3], 1), vector(&[1.0, 4.0])];
    let error = interpret(&graph, &inputs, Rounding::Exact).unwrap_err();
    assert_eq!(error, ReferenceError::IndexRange { op: "gather", node: 2, index: 4.0, rows: 4 });
    let mut graph = Graph::new("scatter");
    let indices = graph.input("indices", Dtype::I32, [2]).unwrap();
    let updates = graph.input("updates", Dtype::F32, [2, 3]).unwrap();
    let table = graph.scatter_add(indices, updates, 5).unwrap();
    graph.output("table", table).unwrap();
    let inputs = [vector(&[-1.0, 4.0]), Array::normal([2, 3], 1)];
    let error = interpret(&graph, &inputs, Rounding::Exact).unwrap_err();
    assert_eq!(error, ReferenceError::IndexRange { op: "scatter_add", node: 2, index: -1.0, rows: 5 });
}

#[test]
fn appended_rows_replace_those_of_their_sequence() {
    let mut graph = Graph::new("cache");
    let cache = graph.input("cache", Dtype::F32, [2, 2, 3, 1]).unwrap();
    let rows = graph.input("rows", Dtype::F32, [2, 2, 2, 1]).unwrap();
    let positions = graph.input("positions", Dtype::I32, [2]).unwrap();
    // Sequences are the outer axis, then the inner one.
    for batch in [0, 1] {
        let appended = graph.append(cache, rows, positions, batch).unwrap();
        graph.output(["outer", "inner"][batch], appended).unwrap();
    }
    let counted = |shape: [usize; 4], first: usize| Array::from_fn(Shape::from(shape), |index| (first + index) as f64);
    let inputs = [counted([2, 2, 3, 1], 0), counted([2, 2, 2, 1], 20), vector(&[1.0, 0.0])];
    let outputs = interpret(&graph, &inputs, Rounding::Exact).unwrap().outputs;
    assert_eq!(outputs[0].values, [0, 20, 21, 3, 22, 23, 24, 25, 8, 26, 27, 11].map(f64::from));
    assert_eq!(outputs[1].values, [0, 20, 21, 22, 23, 5, 6, 24, 25, 26, 27, 11].map(f64::from));
    for wrong in [2.0, -1.0] {
        let inputs = [inputs[0].clone(), inputs[1].clone(), vector(&[0.0, wrong])];
        let error = interpret(&graph, &inputs, Rounding::Exact).unwrap_err();
        assert_eq!(error, ReferenceError::IndexRange { op: "append", node: 3, index: wrong, rows: 2 });
    }
    let error = differentiate(&graph, &[rows]).unwrap_err();
    assert!(matches!(error, GraphError::NoGradient { .. }), "{error}");
}

#[test]
fn storage_rounds_every_node_and_exact_none() {
    let mut graph = Graph::new("chain");
    let x = graph.input("x", Dtype::Bf16, [1000]).unwrap();
    let square = graph.mul(x, x).unwrap();
    let root = graph.unary(UnaryOp::Exp, square).unwrap();
    let wide = graph.cast(root, Dtype::F32).unwrap();
    let third = graph.scale(wide, 1.0 / 3.0).unwrap();
    graph.output("y", third).unwrap();
    // Not rounded yet: storing an input rounds it too.
    let x = Array::normal([1000], 1);
    let stored = interpret_all(&graph, std::slice::from_ref(&x), Rounding::Storage).unwrap();
    let exact = interpret_all(&graph, std::slice::from_ref(&x), Rounding::Exact).unwrap();
    for i in 0..1000 {
        let input = round_to(Dtype::Bf16, x.values[i]);
        let square = round_to(Dtype::Bf16, input * input);
        let exponential = round_to(Dtype::Bf16, square.exp());
        let third = round_to(Dtype::F32, exponential * round_to(Dtype::F32, 1.0 / 3.0));
        assert_eq!(stored.last().unwrap().values[i], third);
        assert_eq!(exact.last().unwrap().values[i], (x.values[i] * x.values[i]).exp() * (1.0 / 3.0));
    }
}

#[test]
fn bytes_round_in_both_modes() {
    let mut graph = Graph::new("bytes");
    let x = graph.input("x", Dtype::F32, [4]).unwrap();
    let bytes = graph.cast(x, Dtype::I8).unwrap();
    let eighths = graph.cast(x, Dtype::F8e4m3).unwrap();
    graph.output("bytes", bytes).unwrap();
    graph.output("eighths", eighths).unwrap();
    for rounding in [Rounding::Exact, Rounding::Storage] {
        let got = interpret(&graph, &[vector(&[2.5, -300.0, 1e9, 1.1])], rounding).unwrap();
        assert_eq!(got.outputs[0].values, [2.0, -128.0, 127.0, 1.0]);
        assert_eq!(got.outputs[1].values, [2.5, -288.0, 448.0, 1.125]);
        assert_eq!(got.slack, [None, None], "inputs are exact: their rounding is no matter of taste");
    }
}

#[test]
fn an_output_may_be_named_twice_and_be_an_input() {
    let mut graph = Graph::new("names");
    let x = graph.input("x", Dtype::F32, [3]).unwrap();
    let y = graph.unary(UnaryOp::Neg, x).unwrap();
    for (name, node) in [("a", y), ("b", x), ("c", y)] {
        graph.output(name, node).unwrap();
    }
    let got = interpret(&graph, &[vector(&[1.0, 2.0, 3.0])], Rounding::Exact).unwrap();
    assert_eq!(got.outputs[0], got.outputs[2]);
    assert_eq!(got.outputs[1].values, [1.0, 2.0, 3.0]);
}

#[test]
fn empty_tensors_pass() {
    let empty = Array::filled([0, 4], 0.0);
    let got = run(Dtype::F32, &[empty], |graph, x| {
        let y = graph.softmax(x[0]).unwrap();
        let z = graph.transpose(y, &[1, 0]).unwrap();
        graph.reduce(ReduceOp::Sum, z).unwrap()
    });
    assert_eq!(got.outputs[0], Array::filled([4, 1], 0.0));
}

/// `select(x y > limit, 1, 0)`: the product is computed, so it may fall on either side when it is close.
fn threshold(graph: &mut Graph, product: NodeId, limit: f64) -> NodeId {
    let dtype = graph.node(product).dtype;
    let (limit, one, zero) = (
        graph.constant(limit, dtype).unwrap(),
        graph.constant(1.0, dtype).unwrap(),
        graph.constant(0.0, dtype).unwrap(),
    );
    let above = graph.compare(CompareOp::Gt, product, limit).unwrap();
    graph.select(above, one, zero).unwrap()
}

#[test]
fn a_computed_near_tie_gives_slack_and_others_do_not() {
    // Products around 1, off by far less and by far more than f32 can tell.
    let (x, y) = (vector(&[3.0, 3.0, 3.0, 0.5]), vector(&[1.0 / 3.0, 0.3333334, 0.34, 2.0]));
    let build = |graph: &mut Graph, x: &[NodeId]| {
        let product = graph.mul(x[0], x[1]).unwrap();
        threshold(graph, product, 1.0)
    };
    let inputs = [x, y.rounded(Dtype::F32)];
    assert_eq!(slack(Dtype::F32, &inputs, build), Some(vec![1.0, 0.0, 0.0, 1.0]));
    // In bf16 the reach is 2^16 times as wide.
    assert_eq!(slack(Dtype::Bf16, &inputs, build), Some(vec![1.0, 1.0, 0.0, 1.0]));
}

#[test]
fn inputs_and_integers_are_exact() {
    let x = vector(&[1.0, 1.0 + f64::powi(2.0, -23), 2.0]);
    assert_eq!(slack(Dtype::F32, &[x], |graph, x| threshold(graph, x[0], 1.0)), None);
    // Positions as floats, shifted: exact, though computed.
    let got = slack(Dtype::F32, &[vector(&[0.0])], |graph, _| {
        let position = graph.iota([100], 0).unwrap();
        let position = graph.cast(position, Dtype::F32).unwrap();
        let shift = graph.constant(7.0, Dtype::F32).unwrap();
        let shifted = graph.add(position, shift).unwrap();
        threshold(graph, shifted, 50.0)
    });
    assert_eq!(got, None);
}

/// A maximum equals the element it came from, in every kernel; only a close rival can change which.
#[test]
fn the_gradient_of_a_maximum_has_slack_at_rivals_only() {
    let gradient_slack = |values: &[f64]| {
        let mut graph = Graph::new("max");
        let x = graph.input("x", Dtype::F32, [1, values.len()]).unwrap();
        let y = graph.unary(UnaryOp::Exp, x).unwrap();
        let largest = graph.reduce(ReduceOp::Max, y).unwrap();
        graph.output("y", largest).unwrap();
        let mut graph = differentiate(&graph, &[x]).unwrap().graph;
        let inputs = [Array::new([1, values.len()], values.to_vec()), Array::filled([1, 1], 1.0)];
        let repeated = graph.broadcast(graph.outputs()[1].node, [32, values.len()]).unwrap();
        graph.output("repeated", repeated).unwrap();
        let slack = interpret(&graph, &inputs, Rounding::Exact).unwrap().slack.remove(2);
        slack.map(|slack| slack[..values.len()].to_vec())
    };
    assert_eq!(gradient_slack(&[1.0, 2.0, 1.5, -3.0]), None);
    let rivals = gradient_slack(&[1.0, 2.0, 2.0 - f64::powi(2.0, -23), -3.0]).unwrap();
    assert!(rivals[1] > 0.0 && rivals[2] > 0.0);
    assert_eq!((rivals[0], rivals[3]), (0.0, 0.0));
}

#[test]
fn relu_is_continuous_and_its_gradient_is_not() {
    let values = [1.0, -1.0, 0.0];
    let got = slack(Dtype::F32, &[vector(&values), vector(&values)], |graph, x| {
        let product = graph.mul(x[0], x[1]).unwrap();
        let shifted = graph.sub(product, x[1]).unwrap();
        graph.relu(shifted).unwrap()
    });
    assert_eq!(got, None);
}

#[test]
fn a_rounding_near_a_half_gives_one_step() {
    // x * 10 is 2.5 and 2.4; computed, so the half may go either way.
    let got = slack(Dtype::F32, &[vector(&[0.25, 0.24]), vector(&[10.0, 10.0])], |graph, x| {
        let product = graph.mul(x[0], x[1]).unwrap();
        let inexact = graph.unary(UnaryOp::Reciprocal, product).unwrap();
        let back = graph.unary(UnaryOp::Reciprocal, inexact).unwrap();
        graph.unary(UnaryOp::Round, back).unwrap()
    });
    assert_eq!(got, Some(vec![1.0, 0.0]));
}

#[test]
fn argmax_of_rivals_gives_their_distance() {
    let rows = Array::new([2, 4], vec![1.0, 3.0, 2.0, 3.0, 1.0, 3.0, 2.0, 0.0]);
    let exact =
        slack(Dtype::F32, std::slice::from_ref(&rows), |graph, x| graph.reduce(ReduceOp::ArgMax, x[0]).unwrap());
    assert_eq!(exact, None, "the first largest input is a fact");
    let computed = slack(Dtype::F32, &[rows], |graph, x| {
        let y = graph.unary(UnaryOp::Exp, x[0]).unwrap();
        graph.reduce(ReduceOp::ArgMax, y).unwrap()
    });
    assert_eq!(computed, Some(vec![2.0, 0.0]));
}

/// A slack of 1 at element 2 of `[1, 2, 3]` rows, sent through one operation after another.
#[test]
fn slack_is_carried_through_every_kind_of_operation() {
    let carried = |then: &dyn Fn(&mut Graph, NodeId) -> NodeId| {
        let third = round_to(Dtype::F32, 1.0 / 3.0);
        let inputs = [Array::new([1, 3], vec![2.0, 3.0, third]), Array::new([1, 3], vec![4.0, 5.0, 3.0])];
        slack(Dtype::F32, &inputs, |graph, x| {
            let product = graph.mul(x[0], x[1]).unwrap();
            let step = threshold(graph, product, 1.0);
            then(graph, step)
        })
    };
    assert_eq!(carried(&|_, step| step), Some(vec![0.0, 0.0, 1.0]));
    let through = |op: UnaryOp| carried(&|graph, step| graph.unary(op, step).unwrap()).unwrap()[2];
    assert_eq!(through(UnaryOp::Neg), 1.0);
    // The step is 1 and may be off by 1 either way.
    assert_eq!(through(UnaryOp::Exp), 2f64.exp() - 1f64.exp());
    assert_eq!(through(UnaryOp::Reciprocal), f64::INFINITY, "it may divide by zero");
    let doubled = carried(&|graph, step| graph.add(step, step).unwrap());
    assert_eq!(doubled, Some(vec![0.0, 0.0, 2.0]));
    let scaled = carried(&|graph, step| graph.scale(step, -5.0).unwrap());
    assert_eq!(scaled, Some(vec![0.0, 0.0, 5.0]));
    let clamped = carried(&|graph, step| {
        let two = graph.constant(2.0, Dtype::F32).unwrap();
        graph.binary(BinaryOp::Max, step, two).unwrap()
    });
    assert_eq!(clamped, None, "the maximum hides it");
    let summed = carried(&|graph, step| graph.reduce(ReduceOp::Sum, step).unwrap());
    assert_eq!(summed, Some(vec![1.0]));
    let averaged = carried(&|graph, step| graph.reduce(ReduceOp::Mean, step).unwrap());
    assert_eq!(averaged, Some(vec![1.0 / 3.0]));
    let turned = carried(&|graph, step| graph.transpose(step, &[1, 0]).unwrap());
    assert_eq!(turned, Some(vec![0.0, 0.0, 1.0]));
    let cut = carried(&|graph, step| graph.slice(step, 1, 0, 2).unwrap());
    assert_eq!(cut, None);
    let joined = carried(&|graph, step| {
        let part = graph.slice(step, 1, 2, 1).unwrap();
        graph.concat(&[part, step], 1).unwrap()
    });
    assert_eq!(joined, Some(vec![1.0, 0.0, 0.0, 1.0]));
    let multiplied = carried(&|graph, step| {
        let three = graph.constant(-3.0, Dtype::F32).unwrap();
        let matrix = graph.broadcast(three, [3, 2]).unwrap();
        graph.matmul(step, matrix).unwrap()
    });
    assert_eq!(multiplied, Some(vec![3.0, 3.0]));
}

#[test]
fn a_single_number_carries_the_reach_of_rounding() {
    let (x, y) = (vector(&[1.1]).rounded(Dtype::F16), vector(&[1.3]).rounded(Dtype::F16));
    let got = run(Dtype::F16, &[x, y], |graph, x| graph.mul(x[0], x[1]).unwrap());
    let reach = got.slack[0].as_ref().unwrap()[0] / got.outputs[0].values[0];
    // One rounding to f16: more than half a unit, less than a few.
    assert!(reach >= Dtype::F16.epsilon() / 2.0 && reach <= 4.0 * Dtype::F16.epsilon(), "{reach}");
}

#[test]
fn masks_match_those_of_the_documented_generator() {
    let mut graph = Graph::new("random");
    let seed = graph.input("seed", Dtype::I32, Shape::scalar()).unwrap();
    let kept = graph.random(seed, [10], 0.5, 0).unwrap();
    graph.output("kept", kept).unwrap();
    let got = interpret(&graph, &[Array::scalar(0.0)], Rounding::Exact).unwrap();
    // Philox4x32-10 of counter 0 and key 0, the published vector: words above 2^31 are kept.
    let words = [0x6627e8d5u32, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8];
    let expected: Vec<f64> = words.iter().map(|&word| (word >= 1 << 31) as u8 as f64).collect();
    assert_eq!(got.outputs[0].values[..4], expected[..]);
}

//! The interpreter on small graphs: refusals, rounding, and where slack is born and goes.

use deuteron_graph::{Dtype, Graph, GraphError, Shape, UnaryOp, differentiate};
use deuteron_reference::{Array, Interpretation, ReferenceError, Rounding, interpret, interpret_all, round_to};

/// A graph that makes `y` of inputs `x0`, `x1` and so on, all of a dtype; also where the text says `float`.
fn graph(dtype: Dtype, inputs: &[Array], text: &str) -> Graph {
    let given = inputs.iter().enumerate().map(|(i, array)| format!("x{i} = input float{} ; ", array.shape));
    format!("{}{text} ; out y", given.collect::<String>()).replace("float", &dtype.to_string()).parse().unwrap()
}

fn run(dtype: Dtype, inputs: &[Array], text: &str) -> Interpretation {
    interpret(&graph(dtype, inputs, text), inputs, Rounding::Analysed).unwrap()
}

/// The slack that decisions leave.
fn slack(dtype: Dtype, inputs: &[Array], text: &str) -> Option<Vec<f64>> {
    run(dtype, inputs, text).slack.remove(0)
}

fn vector(values: &[f64]) -> Array {
    Array::new([values.len()], values.to_vec())
}

#[test]
fn wrong_inputs_are_refused() {
    let graph: Graph = "x = input f32[2,3] ; y = row_sum x ; out y".parse().unwrap();
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
    let graph: Graph = "t = weight f32[4,3] ; i = input i32[2] ; y = gather t i ; out y".parse().unwrap();
    let inputs = [Array::normal([4, 3], 1), vector(&[1.0, 4.0])];
    let error = interpret(&graph, &inputs, Rounding::Exact).unwrap_err();
    assert_eq!(error, ReferenceError::IndexRange { op: "gather", node: 2, index: 4.0, rows: 4 });
    let graph: Graph = "i = input i32[2] ; u = input f32[2,3] ; y = scatter_add i u rows=5 ; out y".parse().unwrap();
    let inputs = [vector(&[-1.0, 4.0]), Array::normal([2, 3], 1)];
    let error = interpret(&graph, &inputs, Rounding::Exact).unwrap_err();
    assert_eq!(error, ReferenceError::IndexRange { op: "scatter_add", node: 2, index: -1.0, rows: 5 });
}

#[test]
fn appended_rows_replace_those_of_their_sequence() {
    // Sequences are the outer axis, then the inner one.
    let text = "c = input f32[2,2,3,1] ; r = input f32[2,2,2,1] ; p = input i32[2]
outer = append c r p batch=0 ; inner = append c r p batch=1 ; out outer inner";
    let graph: Graph = text.parse().unwrap();
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
    let error = differentiate(&graph, &graph.inputs()[1..2]).unwrap_err();
    assert!(matches!(error, GraphError::NoGradient { .. }), "{error}");
}

#[test]
fn storage_rounds_every_node_and_exact_none() {
    let mut graph: Graph = "x = input bf16[1000] ; s = mul x x ; e = exp s ; w = cast e f32".parse().unwrap();
    let third = graph.scale(graph.find("w").unwrap(), 1.0 / 3.0).unwrap();
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
    let graph: Graph = "x = input f32[4] ; b = cast x i8 ; e = cast x f8e4m3 ; out b e".parse().unwrap();
    for rounding in [Rounding::Exact, Rounding::Analysed, Rounding::Storage] {
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
    let got = run(Dtype::F32, &[empty], "p = softmax x0 ; t = transpose p [1,0] ; y = row_sum t");
    assert_eq!(got.outputs[0], Array::filled([4, 1], 0.0));
}

/// 1 where a product is above 1: it is computed, so it may fall on either side when it is close.
const STEP: &str =
    "p = mul x0 x1 ; above = gt p 1 ; one = const 1 float ; zero = const 0 float ; y = select above one zero";

#[test]
fn a_computed_near_tie_gives_slack_and_others_do_not() {
    // Products around 1, off by far less and by far more than f32 can tell; the last one is exact.
    let (x, y) = (vector(&[3.0, 3.0, 3.0, 0.5]), vector(&[1.0 / 3.0, 0.3333334, 0.34, 2.0]));
    let inputs = [x, y.rounded(Dtype::F32)];
    assert_eq!(slack(Dtype::F32, &inputs, STEP), Some(vec![1.0, 0.0, 0.0, 0.0]));
    // In bf16 the reach is 2^16 times as wide.
    assert_eq!(slack(Dtype::Bf16, &inputs, STEP), Some(vec![1.0, 1.0, 0.0, 0.0]));
}

#[test]
fn inputs_and_integers_are_exact() {
    let x = vector(&[1.0, 1.0 + f64::powi(2.0, -23), 2.0]);
    assert_eq!(slack(Dtype::F32, &[x], "above = gt x0 1 ; y = select above 1 0"), None);
    // Positions as floats, shifted: exact, though computed.
    let text = "i = iota [100] axis=0 ; p = cast i f32 ; s = add p 7 ; above = gt s 50 ; y = select above 1 0";
    assert_eq!(slack(Dtype::F32, &[vector(&[0.0])], text), None);
}

/// A maximum equals the element it came from, in every kernel; only a close rival can change which.
#[test]
fn the_gradient_of_a_maximum_has_slack_at_rivals_only() {
    let gradient_slack = |values: &[f64]| {
        let inputs = [Array::new([1, values.len()], values.to_vec()), Array::filled([1, 1], 1.0)];
        let graph = graph(Dtype::F32, &inputs[..1], "e = exp x0 ; y = row_max e");
        let graph = differentiate(&graph, graph.inputs()).unwrap().graph;
        interpret(&graph, &inputs, Rounding::Analysed).unwrap().slack.remove(1)
    };
    assert_eq!(gradient_slack(&[1.0, 2.0, 1.5, -3.0]), None);
    let rivals = gradient_slack(&[1.0, 2.0, 2.0 - f64::powi(2.0, -23), -3.0]).unwrap();
    assert!(rivals[1] > 0.0 && rivals[2] > 0.0);
    assert_eq!((rivals[0], rivals[3]), (0.0, 0.0));
}

#[test]
fn relu_is_continuous_and_its_gradient_is_not() {
    let values = [1.0, -1.0, 0.0];
    let inputs = [vector(&values), vector(&values)];
    assert_eq!(slack(Dtype::F32, &inputs, "p = mul x0 x1 ; s = sub p x1 ; y = relu s"), None);
}

#[test]
fn a_rounding_near_a_half_gives_one_step() {
    // x * 10 is 2.5 and 2.4; computed, so the half may go either way.
    let inputs = [vector(&[0.25, 0.24]), vector(&[10.0, 10.0])];
    let text = "p = mul x0 x1 ; inexact = reciprocal p ; back = reciprocal inexact ; y = round back";
    assert_eq!(slack(Dtype::F32, &inputs, text), Some(vec![1.0, 0.0]));
}

#[test]
fn argmax_of_rivals_gives_their_distance() {
    let rows = Array::new([2, 4], vec![1.0, 3.0, 2.0, 3.0, 1.0, 3.0, 2.0, 0.0]);
    let exact = slack(Dtype::F32, std::slice::from_ref(&rows), "y = row_argmax x0");
    assert_eq!(exact, None, "the first largest input is a fact");
    assert_eq!(slack(Dtype::F32, &[rows], "e = exp x0 ; y = row_argmax e"), Some(vec![2.0, 0.0]));
    // A rival by one spacing of its argument, and one that is further off than any error.
    let close = Array::new([2, 3], vec![3.0, 1.0, 3.0 - f64::powi(2.0, -22), 3.0, 1.0, 3.0 - f64::powi(2.0, -12)]);
    assert_eq!(slack(Dtype::F32, &[close], "e = exp x0 ; y = row_argmax e"), Some(vec![2.0, 0.0]));
}

/// A slack of 1 at element 2 of `[1, 2, 3]` rows, sent through one operation after another.
#[test]
fn slack_is_carried_through_every_kind_of_operation() {
    let third = round_to(Dtype::F32, 1.0 / 3.0);
    let inputs = [Array::new([1, 3], vec![2.0, 3.0, third]), Array::new([1, 3], vec![4.0, 5.0, 3.0])];
    let carried = |then: &str| slack(Dtype::F32, &inputs, &format!("{} ; {then}", STEP.replace("y =", "step =")));
    // What is computed is rounded as well, by one spacing: nothing here reaches 8.
    let near = |got: f64, expected: f64| got >= expected && got <= expected + 8.0 * Dtype::F32.epsilon();
    let through = |op: &str| carried(&format!("y = {op} step")).unwrap()[2];
    assert_eq!(through("neg"), 1.0);
    // The step is 1 and may be off by 1 either way.
    assert!(near(through("exp"), 2f64.exp() - 1f64.exp()));
    assert_eq!(through("reciprocal"), f64::INFINITY, "it may divide by zero");
    for (then, expected) in [
        ("y = add step step", Some(vec![0.0, 0.0, 2.0])),
        ("y = mul step -5", Some(vec![0.0, 0.0, 5.0])),
        // The maximum hides it.
        ("y = max step 2", None),
        ("y = row_sum step", Some(vec![1.0])),
        ("y = row_mean step", Some(vec![1.0 / 3.0])),
        ("y = transpose step [1,0]", Some(vec![0.0, 0.0, 1.0])),
        ("y = slice step axis=1 start=0 length=2", None),
        ("part = slice step axis=1 start=2 length=1 ; y = concat part step axis=1", Some(vec![1.0, 0.0, 0.0, 1.0])),
        ("three = const -3 f32 ; matrix = broadcast three [3,2] ; y = matmul step matrix", Some(vec![3.0, 3.0])),
    ] {
        let got = carried(then);
        let all_near = |(got, expected): (&Vec<f64>, &Vec<f64>)| {
            got.len() == expected.len()
                && got
                    .iter()
                    .zip(expected)
                    .all(|(&got, &expected)| near(got, expected) && (got > 0.0) == (expected > 0.0))
        };
        assert!(got.as_ref().zip(expected.as_ref()).map_or(got == expected, all_near), "{then}: {got:?}");
    }
    assert_eq!(slack(Dtype::F32, &inputs, STEP), Some(vec![0.0, 0.0, 1.0]));
}

#[test]
fn a_single_number_carries_the_deviation_of_one_rounding() {
    let (x, y) = (vector(&[1.1]).rounded(Dtype::F16), vector(&[1.3]).rounded(Dtype::F16));
    let got = run(Dtype::F16, &[x, y], "y = mul x0 x1");
    // Evenly spread over one spacing, which between 1 and 2 is epsilon.
    let expected = Dtype::F16.epsilon() / 12f64.sqrt();
    assert_eq!(got.spread[0].as_ref().unwrap()[0] as f32, expected as f32);
}

#[test]
fn masks_match_those_of_the_documented_generator() {
    let graph: Graph = "seed = input i32[] ; y = random seed [10] drop=0.5 offset=0 ; out y".parse().unwrap();
    let got = interpret(&graph, &[Array::scalar(0.0)], Rounding::Exact).unwrap();
    // Philox4x32-10 of counter 0 and key 0, the published vector: words above 2^31 are kept.
    let words = [0x6627e8d5u32, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8];
    let expected: Vec<f64> = words.iter().map(|&word| (word >= 1 << 31) as u8 as f64).collect();
    assert_eq!(got.outputs[0].values[..4], expected[..]);
}

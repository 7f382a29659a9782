//! What is recognised, what is nearly recognised, and what is only described; on models written by hand.

use crate::support::writer;
use crate::support::writer::{F32, I64, Message, Size, Value, Writer, node};
use deuteron_graph::Graph;
use deuteron_onnx::{Imported, Options, import};
use deuteron_testkit::effort::cpu_time;

fn load(writer: Writer) -> Imported {
    let imported = import(&writer.finish(), &Options::default()).unwrap_or_else(|error| panic!("{error}"));
    imported.graph.verify().unwrap();
    let again: Graph = imported.graph.to_string().parse().unwrap();
    assert_eq!(again, imported.graph);
    imported
}

/// Composites in order, near misses and opaque operators, one a line.
fn report(imported: &Imported) -> String {
    let found =
        imported.recognised.iter().map(|found| format!("{} of {} at {}", found.what, found.operations, found.at));
    let near = imported.near_misses.iter().map(ToString::to_string);
    let opaque = imported.opaque.iter().map(|opaque| format!("opaque {}: {}", opaque.op_type, opaque.why));
    found.chain(near).chain(opaque).collect::<Vec<_>>().join("\n")
}

#[track_caller]
fn check(writer: Writer, expected: &str) {
    assert_eq!(report(&load(writer)), expected);
}

/// A layer norm in parts, with what a test changes of it.
struct Parts<'a> {
    mean_axis: i64,
    variance_axis: i64,
    exponent: f32,
    squared: &'a str,
    eps: &'a str,
}

const PARTS: Parts<'static> = Parts { mean_axis: -1, variance_axis: -1, exponent: 2.0, squared: "centred", eps: "eps" };

fn layer_norm(parts: &Parts) -> Writer {
    layer_norm_until(parts, "y")
}

fn layer_norm_until(parts: &Parts, output: &str) -> Writer {
    Writer::default()
        .input("x", &[2, 5, 8])
        .input("unknown", &[1])
        .weight("w", &[8])
        .weight("b", &[8])
        .scalar("exponent", parts.exponent)
        .scalar("eps", 1e-5)
        .call("ReduceMean", &["x"], &["mean"], &[("axes", Value::Ints(&[parts.mean_axis]))])
        .node("Sub", &["x", "mean"], "centred")
        .node("Pow", &[parts.squared, "exponent"], "square")
        .call("ReduceMean", &["square"], &["variance"], &[("axes", Value::Ints(&[parts.variance_axis]))])
        .node("Add", &[parts.eps, "variance"], "shifted")
        .node("Sqrt", &["shifted"], "deviation")
        .node("Div", &["centred", "deviation"], "normed")
        .node("Mul", &["w", "normed"], "scaled")
        .node("Add", &["scaled", "b"], "y")
        .output(output)
}

#[test]
fn a_layer_norm_in_parts() {
    check(layer_norm(&PARTS), "layer_norm of 9 at y");
}

#[test]
fn a_layer_norm_without_weights_or_bias() {
    check(layer_norm_until(&PARTS, "scaled"), "layer_norm of 8 at scaled");
    check(layer_norm_until(&PARTS, "normed"), "layer_norm of 7 at normed");
}

#[test]
fn near_misses_of_a_layer_norm_are_named() {
    let near = |parts: Parts| report(&load(layer_norm(&parts)));
    assert_eq!(
        near(Parts { variance_axis: 1, ..PARTS }),
        "nearly layer_norm at `y`: the variance is taken over axes [1], the last axis (2) is needed"
    );
    assert_eq!(
        near(Parts { mean_axis: 1, ..PARTS }),
        "nearly layer_norm at `y`: the mean is taken over axes [1], the last axis (2) is needed"
    );
    assert_eq!(near(Parts { exponent: 3.0, ..PARTS }), "nearly layer_norm at `y`: the `Pow` exponent is 3, expected 2");
    assert_eq!(
        near(Parts { squared: "x", ..PARTS }),
        "nearly layer_norm at `y`: the value that is squared is not the one that is divided"
    );
    assert_eq!(
        near(Parts { eps: "unknown", ..PARTS }),
        "nearly layer_norm at `y`: what is added to the variance is not a known number that is not negative"
    );
    assert_eq!(
        report(&load(layer_norm(&PARTS).node("Neg", &["variance"], "z").output("z"))),
        "nearly layer_norm at `y`: an interior value (`variance`) is also read by `z`"
    );
    assert_eq!(
        report(&load(layer_norm(&PARTS).output("mean"))),
        "nearly layer_norm at `y`: an interior value (`mean`) is an output"
    );
}

#[test]
fn an_rms_norm_in_parts() {
    let start = || {
        Writer::default()
            .input("x", &[2, 5, 8])
            .weight("w", &[8])
            .scalar("eps", 1e-6)
            .scalar("one", 1.0)
            .node("Mul", &["x", "x"], "square")
            .call("ReduceMean", &["square"], &["mean"], &[("axes", Value::Ints(&[2]))])
            .node("Add", &["mean", "eps"], "shifted")
            .node("Sqrt", &["shifted"], "root")
    };
    check(
        start()
            .node("Reciprocal", &["root"], "inverse")
            .node("Mul", &["x", "inverse"], "n")
            .node("Mul", &["n", "w"], "y")
            .output("y"),
        "rms_norm of 7 at y",
    );
    check(
        start()
            .node("Div", &["one", "root"], "inverse")
            .node("Mul", &["inverse", "x"], "n")
            .node("Mul", &["w", "n"], "y")
            .output("y"),
        "rms_norm of 7 at y",
    );
    check(start().node("Div", &["x", "root"], "y").output("y"), "rms_norm of 5 at y");
}

fn gelu_by_tanh(cubic: f32, factor: f32) -> Writer {
    Writer::default()
        .input("x", &[3, 8])
        .scalar("half", factor)
        .scalar("one", 1.0)
        .scalar("cubic", cubic)
        .scalar("slope", 0.797_884_6)
        .scalar("three", 3.0)
        .node("Pow", &["x", "three"], "cube")
        .node("Mul", &["cubic", "cube"], "scaled")
        .node("Add", &["x", "scaled"], "inner")
        .node("Mul", &["inner", "slope"], "argument")
        .node("Tanh", &["argument"], "tanh")
        .node("Add", &["tanh", "one"], "sum")
        .node("Mul", &["x", "sum"], "product")
        .node("Mul", &["half", "product"], "y")
        .output("y")
}

#[test]
fn gelu_in_parts() {
    check(gelu_by_tanh(0.044715, 0.5), "gelu of 8 at y");
    check(
        gelu_by_tanh(0.05, 0.5),
        "nearly gelu at `y`: the argument of `Tanh` is 0.797885 x + 0.039894 x^3, expected 0.797885 x + 0.035677 x^3",
    );
    check(
        gelu_by_tanh(0.044715, 1.0).node("Neg", &["y"], "z").output("z"),
        "nearly gelu at `product`: it is 1 x (1 + ..), expected 0.5 x (1 + ..)",
    );
    let erf = |root: f32| {
        Writer::default()
            .input("x", &[3, 8])
            .scalar("half", 0.5)
            .scalar("one", 1.0)
            .scalar("root", root)
            .node("Div", &["x", "root"], "argument")
            .node("Erf", &["argument"], "erf")
            .node("Add", &["one", "erf"], "sum")
            .node("Mul", &["half", "x"], "halved")
            .node("Mul", &["halved", "sum"], "y")
            .output("y")
    };
    check(erf(std::f32::consts::SQRT_2), "gelu of 5 at y");
    // Some models write few digits.
    check(erf(1.414_25), "gelu of 5 at y");
    assert!(
        report(&load(erf(1.5)))
            .starts_with("nearly gelu at `y`: the argument of `Erf` is 0.666667 x, expected 0.707107 x")
    );
}

#[test]
fn silu_and_its_gated_form() {
    let silu = || Writer::default().input("x", &[3, 8]).input("g", &[3, 8]).node("Sigmoid", &["x"], "s");
    check(silu().node("Mul", &["s", "x"], "y").output("y"), "silu of 2 at y");
    check(silu().node("Mul", &["x", "s"], "a").node("Mul", &["g", "a"], "y").output("y"), "swiglu of 3 at y");
    let steep = Writer::default().input("x", &[3, 8]).scalar("slope", 1.702).node("Mul", &["x", "slope"], "t");
    check(
        steep.node("Sigmoid", &["t"], "s").node("Mul", &["x", "s"], "y").output("y"),
        "nearly silu at `y`: the argument of `Sigmoid` is 1.702000 x, expected x (this is GELU by a sigmoid)",
    );
    let by_exponential = Writer::default().input("x", &[3, 8]).scalar("one", 1.0).node("Neg", &["x"], "n");
    check(
        by_exponential
            .node("Exp", &["n"], "e")
            .node("Add", &["e", "one"], "s")
            .node("Div", &["x", "s"], "y")
            .output("y"),
        "silu of 4 at y",
    );
}

#[test]
fn softmax_in_parts() {
    let softmax = |axis: i64| {
        Writer::default()
            .input("x", &[3, 8])
            .ints("axes", &[axis])
            .call("ReduceMax", &["x"], &["max"], &[("axes", Value::Ints(&[-1]))])
            .node("Sub", &["x", "max"], "shifted")
            .node("Exp", &["shifted"], "e")
            .node("ReduceSum", &["e", "axes"], "sum")
            .node("Div", &["e", "sum"], "y")
            .output("y")
    };
    check(softmax(-1), "softmax of 5 at y");
    check(softmax(0), "nearly softmax at `y`: the sum is taken over axes [0], the last axis (1) is needed");
}

#[test]
fn linear_needs_a_bias_a_column() {
    let linear = |bias: &[usize]| {
        let writer = Writer::default().input("x", &[3, 8]).weight("w", &[8, 4]).weight("b", bias);
        writer.node("MatMul", &["x", "w"], "p").node("Add", &["b", "p"], "y").output("y")
    };
    check(linear(&[4]), "linear of 2 at y");
    check(linear(&[1, 4]), "linear of 2 at y");
    check(linear(&[3, 4]), "linear of 1 at p\nnearly linear at `y`: the bias has shape [3,4], expected [4]");
    check(
        linear(&[4]).node("Neg", &["p"], "z").output("z"),
        "linear of 1 at p\nnearly linear at `y`: an interior value (`p`) is also read by `z`",
    );
}

/// Attention whose scores a test changes on their way to the softmax.
fn attention(scores: impl Fn(Writer) -> Writer) -> Writer {
    let writer = Writer::default()
        .input("q", &[1, 2, 4, 8])
        .input("k", &[1, 2, 4, 8])
        .input("v", &[1, 2, 4, 8])
        .scalar("scale", 0.25)
        .scalar("root", 4.0)
        .call("Transpose", &["k"], &["turned"], &[("perm", Value::Ints(&[0, 1, 3, 2]))])
        .node("MatMul", &["q", "turned"], "product");
    scores(writer).node("Softmax", &["scores"], "p").node("MatMul", &["p", "v"], "y").output("y")
}

fn attributes(imported: &Imported) -> String {
    let printed = imported.graph.to_string();
    let line = printed.lines().find(|line| line.contains("= attention ")).unwrap_or_else(|| panic!("{printed}"));
    line.split_once("= ").unwrap().1.to_string()
}

#[test]
fn attention_whatever_its_mask() {
    let lower = |fill: f32| -> Vec<f32> { (0..16).map(|i| if i % 4 <= i / 4 { 0.0 } else { fill }).collect() };
    let forms: [(&str, Writer); 6] = [
        ("q k v mask=full scale=0.25", attention(|w| w.node("Mul", &["product", "scale"], "scores"))),
        ("q k v mask=full scale=0.25", attention(|w| w.node("Div", &["product", "root"], "scores"))),
        (
            "q k v mask=causal scale=0.25",
            attention(|w| {
                w.floats("m", &[1, 1, 4, 4], &lower(-1e9)).node("Mul", &["scale", "product"], "s").node(
                    "Add",
                    &["m", "s"],
                    "scores",
                )
            }),
        ),
        (
            "q k v mask=full scale=0.25",
            attention(|w| {
                w.floats("m", &[4, 4], &[0.0; 16]).node("Mul", &["scale", "product"], "s").node(
                    "Add",
                    &["s", "m"],
                    "scores",
                )
            }),
        ),
        (
            "q k v m mask=additive scale=0.25",
            attention(|w| {
                w.input("m", &[1, 1, 1, 4]).node("Mul", &["scale", "product"], "s").node("Add", &["s", "m"], "scores")
            }),
        ),
        (
            "q k v mask=causal scale=1.0",
            attention(|w| {
                w.floats("t", &[4, 4], &(0..16).map(|i| f32::from(i % 4 <= i / 4)).collect::<Vec<_>>())
                    .scalar("zero", 0.0)
                    .scalar("hidden", f32::NEG_INFINITY)
                    .node("Equal", &["t", "zero"], "beyond")
                    .node("Where", &["beyond", "hidden", "product"], "scores")
            }),
        ),
    ];
    for (expected, writer) in forms {
        let imported = load(writer);
        assert_eq!(attributes(&imported), format!("attention {expected} p=0.0 offset=0"), "{}", imported.graph);
    }
}

#[test]
fn attention_that_gives_its_weights_away_is_a_near_miss() {
    let writer = attention(|w| w.node("Mul", &["product", "scale"], "scores")).output("p");
    check(writer, "softmax of 1 at p\nnearly attention at `y`: an interior value (`p`) is an output");
    let writer = attention(|w| w.node("Tanh", &["product"], "scores"));
    check(writer, "softmax of 1 at p\nnearly attention at `y`: the softmax is not of scale q k^T + mask");
}

#[test]
fn operators_without_counterpart_are_described() {
    let writer = Writer::default()
        .input("x", &[1, 3, 4096, 4096])
        .weight("w", &[64, 3, 3, 3])
        .typed_input("i", I64, &[Size::Is(3)])
        .call("Conv", &["x", "w"], &["c"], &[("pads", Value::Ints(&[1, 1, 1, 1]))])
        .node("HardSwish", &["c"], "h")
        .node("Sin", &["h"], "s")
        .node("BitwiseXor", &["i", "i"], "j")
        .domain_call("my.domain", "Secret", &["s"], &["t"], &[])
        .stated("t", &[1, 4])
        .output("t")
        .output("j");
    let imported = load(writer);
    assert_eq!(
        report(&imported),
        "opaque Conv: it has too many patches for a matmul\n\
         opaque BitwiseXor: the operator has no counterpart\n\
         opaque Secret: the domain `my.domain` is not known"
    );
    let conv = imported.graph.node(imported.opaque[0].node);
    assert_eq!(conv.shape[..], [1, 64, 4096, 4096]);
    let deuteron_graph::Op::Opaque(opaque) = &conv.op else { panic!("{conv:?}") };
    assert_eq!((opaque.flops, opaque.elementwise), (2 * 64 * 4096 * 4096 * 27, false));
}

#[test]
fn functions_are_inlined_with_their_attributes() {
    let body = node("LeakyRelu", "", &["a"], &["b"], &[("alpha", Value::Reference("slope"))]);
    let function = Message::default()
        .text(1, "Leaky")
        .text(10, "local")
        .text(4, "a")
        .text(5, "b")
        .message(7, &body)
        .message(9, &Message::default().text(1, "").number(2, 17));
    let writer = Writer::default()
        .input("x", &[4])
        .function(function)
        .domain_call("local", "Leaky", &["x"], &["y"], &[("slope", Value::Float(0.25))])
        .output("y");
    let printed = load(writer).graph.to_string();
    assert!(printed.contains("0.25") && printed.contains("max"), "{printed}");
}

#[test]
fn a_branch_on_a_known_condition_is_taken() {
    let branch = |op: &str| {
        Message::default()
            .message(1, &node(op, "", &["x"], &["inner"], &[]))
            .message(12, &writer::value_info("inner", F32, None))
    };
    let writer = |value: i64| {
        Writer::default()
            .input("x", &[4])
            .ints("number", &[value])
            .call("Cast", &["number"], &["condition"], &[("to", Value::Int(9))])
            .call(
                "If",
                &["condition"],
                &["y"],
                &[("then_branch", Value::Graph(branch("Exp"))), ("else_branch", Value::Graph(branch("Tanh")))],
            )
            .output("y")
    };
    assert!(load(writer(1)).graph.to_string().contains("exp"));
    assert!(load(writer(0)).graph.to_string().contains("tanh"));
}

#[test]
fn shape_arithmetic_is_folded() {
    let writer = Writer::default()
        .input("x", &[2, 6, 8])
        .ints("first", &[0])
        .ints("rest", &[4, -1])
        .node("Shape", &["x"], "shape")
        .node("Gather", &["shape", "first"], "batch")
        .call("Concat", &["batch", "rest"], &["sizes"], &[("axis", Value::Int(0))])
        .node("Reshape", &["x", "sizes"], "y")
        .output("y");
    let imported = load(writer);
    assert_eq!(imported.graph.node(imported.graph.outputs()[0].node).shape[..], [2, 4, 12]);
    assert_eq!(imported.graph.nodes().len(), 2, "{}", imported.graph);
}

/// Eight times as many operators take about eight times as long: 64 times would be quadratic.
#[test]
fn time_grows_as_the_number_of_operators() {
    let time = |count| {
        let file = random_operators(count);
        let imported = import(&file, &Options::default()).unwrap();
        imported.graph.verify().unwrap();
        assert!(imported.graph.nodes().len() > count / 2, "{}", imported.graph.nodes().len());
        cpu_time(|| import(&file, &Options::default()).unwrap()).as_secs_f64()
    };
    let (few, many) = (time(1000), time(8000));
    assert!(many < 24.0 * few, "{few} s for 1000 operators, {many} s for 8000");
}

/// A file of random operators on random earlier values.
fn random_operators(count: usize) -> Vec<u8> {
    let mut random = deuteron_reference::Generator::new(5);
    let mut writer = Writer::default().input("v0", &[4, 16]).weight("w", &[16, 16]).weight("b", &[16]);
    for index in 1..=count {
        let back = |random: &mut deuteron_reference::Generator| format!("v{}", index - 1 - random.below(index.min(8)));
        let (a, b, name) = (back(&mut random), back(&mut random), format!("v{index}"));
        let (a, b, name) = (a.as_str(), b.as_str(), name.as_str());
        writer = match random.below(8) {
            0 => writer.node("MatMul", &[a, "w"], name),
            1 => writer.node("Add", &[a, "b"], name),
            2 => writer.node("Softmax", &[a], name),
            3 => writer.node("Sigmoid", &[a], name),
            4 => writer.node("Tanh", &[a], name),
            5 => writer.node("Mul", &[a, b], name),
            6 => writer.node("Sub", &[a, b], name),
            _ => writer.node("Add", &[a, b], name),
        };
    }
    writer.output(&format!("v{count}")).finish()
}

/// Rotary tables that every layer computes again are one input.
#[test]
fn equal_tables_are_handed_in_once() {
    let writer = Writer::default()
        .input("x", &[2, 3])
        .floats("angles", &[3], &[0.1, 0.2, 0.4])
        .node("Cos", &["angles"], "first")
        .node("Cos", &["angles"], "second")
        .node("Mul", &["x", "first"], "y")
        .node("Mul", &["y", "second"], "z")
        .output("z");
    let imported = load(writer);
    let names: Vec<&str> = imported.weights.iter().map(|weight| weight.name.as_str()).collect();
    assert_eq!(names, ["constant.first"]);
}

#[test]
fn numbers_are_as_they_were_written() {
    assert!(load(layer_norm(&PARTS)).graph.to_string().contains("eps=1e-5"));
}

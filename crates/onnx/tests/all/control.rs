//! Loops and scans of known length, on models written by hand.

use crate::support::writer::{F32, I64, Message, Size, Value, Writer, node, value_info};
use crate::support::{evaluated, evaluated_at};
use deuteron_graph::Dtype;
use deuteron_onnx::{OnnxError, Options, TensorData, import};

const BOOL: u64 = 9;

/// A body that adds the number of the step, as a float, to a running sum, and gives its square too: `s, s * s`.
fn sums(condition: &str) -> Writer {
    let body = Writer::default()
        .typed_input("step", I64, &[])
        .typed_input("goes_on", BOOL, &[])
        .input("s", &[2])
        .call("Cast", &["step"], &["number"], &[("to", Value::Int(1))])
        .node("Add", &["s", "number"], "next")
        .node("Mul", &["next", "next"], "square")
        .ints("three", &[3]);
    match condition {
        "few" => body.node("Less", &["step", "three"], "cond"),
        "input" => body.node("Less", &["step", "limit"], "cond"),
        _ => body.node("Identity", &["goes_on"], "cond"),
    }
    .output("cond")
    .output("next")
    .output("square")
}

fn looped(count: &str, start: &str, body: Writer) -> Writer {
    Writer::default()
        .input("x", &[2])
        .typed_input("limit", I64, &[Size::Is(1)])
        .ints("four", &[4])
        .ints("zero", &[0])
        .ints("thousand", &[1000])
        .tensor(crate::support::writer::tensor("true", BOOL, &[]).bytes(9, &[1]))
        .tensor(crate::support::writer::tensor("false", BOOL, &[]).bytes(9, &[0]))
        .call("Loop", &[count, start, "x"], &["last", "squares"], &[("body", Value::Graph(body.graph))])
        .output("last")
        .output("squares")
}

fn values(writer: Writer) -> Vec<(Vec<usize>, Vec<f64>)> {
    evaluated(writer, &[("x", &[1.0, 5.0]), ("limit", &[7.0])])
}

fn refusal(writer: Writer) -> String {
    match import(&writer.finish(), &Options::default()) {
        Ok(imported) => panic!("{}", imported.graph),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_loop_runs_as_often_as_its_count_says() {
    // 1 + 0 + 1 + 2 + 3, and 5 and the same.
    let squares = vec![1.0, 25.0, 4.0, 36.0, 16.0, 64.0, 49.0, 121.0];
    let expected = vec![(vec![2], vec![7.0, 11.0]), (vec![4, 2], squares)];
    for start in ["", "true"] {
        assert_eq!(values(looped("four", start, sums("same"))), expected, "`{start}`");
    }
}

#[test]
fn a_loop_ends_by_its_condition() {
    // Steps 0 to 3: that of step 3 fails, after it.
    let ended = values(looped("", "true", sums("few")));
    assert_eq!(ended[0], (vec![2], vec![7.0, 11.0]));
    assert_eq!(ended[1].0, [4, 2]);
    assert_eq!(values(looped("thousand", "true", sums("few"))), ended);
    // Without a condition at the start, that of the body does not count.
    assert_eq!(values(looped("four", "", sums("input")))[0], (vec![2], vec![7.0, 11.0]));
}

#[test]
fn a_loop_without_steps_gives_what_it_was_given() {
    let said = refusal(looped("four", "false", sums("same")));
    assert!(said.contains("it runs zero steps, and its body does not state the shapes of its results"), "{said}");
    let stated = Writer::default()
        .typed_input("step", I64, &[])
        .typed_input("goes_on", BOOL, &[])
        .input("s", &[2])
        .node("Mul", &["s", "s"], "square");
    let graph =
        stated.output("goes_on").output("s").graph.message(12, &value_info("square", F32, Some(&[Size::Is(2)])));
    for (count, start) in [("four", "false"), ("zero", "true")] {
        let nothing = values(looped(count, start, Writer { graph: graph.clone(), ..Writer::default() }));
        assert_eq!(nothing, [(vec![2], vec![1.0, 5.0]), (vec![0, 2], vec![])]);
    }
}

#[test]
fn loops_of_unknown_or_great_length_are_refused() {
    let said = refusal(looped("thousand", "", sums("same")));
    assert!(said.contains("it takes at least 1000 steps, and at most 128 are unrolled"), "{said}");
    assert!(said.contains("control flow that depends on the input is not supported"), "{said}");
    let said = refusal(looped("", "true", sums("same")));
    assert!(said.contains("it takes at least 129 steps, and at most 128 are unrolled"), "{said}");
    let said = refusal(looped("limit", "", sums("same")));
    assert!(said.contains("its number of steps depends on the input"), "{said}");
    let said = refusal(looped("four", "true", sums("input")));
    assert!(said.contains("its condition depends on the input"), "{said}");
}

/// By its stated shapes it can be analysed all the same.
#[test]
fn a_loop_that_is_not_written_out_is_described() {
    let writer = looped("limit", "", sums("same")).stated("last", &[2]).stated("squares", &[4, 2]);
    let imported = import(&writer.finish(), &Options::default()).unwrap();
    assert_eq!(imported.opaque[0].op_type, "Loop");
    let unknown = sums("same").domain_call("strange", "Unknown", &["s"], &["u"], &[]).output("u");
    let writer = looped("four", "", unknown).stated("last", &[2]).stated("squares", &[4, 2]);
    let imported = import(&writer.finish(), &Options::default()).unwrap();
    assert!(imported.opaque[0].why.starts_with("its body cannot be unrolled (Unknown at `u`"), "{:?}", imported.opaque);
}

#[test]
fn a_loop_has_a_body_that_fits() {
    let body = Writer::default().input("s", &[2]).node("Neg", &["s"], "n").output("n");
    let said = refusal(looped("four", "", body));
    assert_eq!(said, "Loop at `last`: a body of 3 inputs and at least 2 outputs expected, got 1 and 1");
    let writer =
        Writer::default().input("x", &[2]).ints("four", &[4]).node("Loop", &["four", "", "x"], "y").output("y");
    assert_eq!(refusal(writer), "Loop at `y`: a body expected, got none");
}

/// Each level multiplies the work by 128. A body counts with its length each time that it is read.
#[test]
fn loops_within_loops_are_stopped() {
    let body = || {
        let ports = Writer::default().typed_input("step", I64, &[]).typed_input("goes_on", BOOL, &[]);
        ports.input("s", &[2]).output("goes_on").output("n")
    };
    let mut inner = body().node("Neg", &["s"], "n").graph.text(10, &"long ".repeat(1 << 16));
    for _ in 0..7 {
        inner = body().call("Loop", &["many", "", "s"], &["n"], &[("body", Value::Graph(inner))]).graph;
    }
    let writer = Writer::default()
        .input("x", &[2])
        .ints("many", &[128])
        .call("Loop", &["many", "", "x"], &["y"], &[("body", Value::Graph(inner))])
        .output("y");
    let error = import(&writer.finish(), &Options::default()).map(|imported| imported.graph.to_string()).unwrap_err();
    assert!(matches!(error, OnnxError::Limit { what: "operands of operations, functions inlined", .. }), "{error}");
}

/// A body of a scan over rows of two operands: `state * a + b`, which it also writes.
fn recurrence(attributes: &[(&str, Value)]) -> Message {
    let body = Writer::default()
        .input("state", &[2])
        .input("a", &[2])
        .input("b", &[2])
        .node("Mul", &["state", "a"], "product")
        .node("Add", &["product", "b"], "next")
        .node("Identity", &["next"], "row")
        .output("next")
        .output("row");
    let all = [&[("body", Value::Graph(body.graph)), ("num_scan_inputs", Value::Int(2))], attributes].concat();
    node("Scan", "", &["h", "x", "y"], &["last", "rows"], &all)
}

fn scanned(x: &[usize], y: &[usize], attributes: &[(&str, Value)]) -> Writer {
    let mut writer = Writer::default().input("h", &[2]).input("x", x).input("y", y);
    writer.graph = writer.graph.message(1, &recurrence(attributes));
    writer.output("last").output("rows")
}

#[test]
fn a_scan_passes_its_state_on() {
    let x: &[f64] = &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    let y: &[f64] = &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0];
    let data = [("h", &[1.0, 1.0][..]), ("x", x), ("y", y)];
    // (1, 1) -> (2, 2) -> (6, 9) -> (31, 55)
    let forward = evaluated(scanned(&[3, 2], &[3, 2], &[]), &data);
    assert_eq!(forward, [(vec![2], vec![31.0, 55.0]), (vec![3, 2], vec![2.0, 2.0, 6.0, 9.0, 31.0, 55.0])]);
    // Operands that are read along their second axis, the last row first, and rows that are written as columns, the last first.
    let attributes = [
        ("scan_input_axes", Value::Ints(&[1, -1])),
        ("scan_input_directions", Value::Ints(&[1, 1])),
        ("scan_output_axes", Value::Ints(&[1])),
        ("scan_output_directions", Value::Ints(&[1])),
    ];
    let data = [("h", &[1.0, 1.0][..]), ("x", &[5.0, 3.0, 1.0, 6.0, 4.0, 2.0]), ("y", &[1.0, 0.0, 1.0, 1.0, 1.0, 0.0])];
    let backward = evaluated(scanned(&[2, 3], &[2, 3], &attributes), &data);
    assert_eq!(backward, [(vec![2], vec![31.0, 55.0]), (vec![2, 3], vec![31.0, 6.0, 2.0, 55.0, 9.0, 2.0])]);
}

/// Up to opset 8 every operand has an axis of batches first, and the first operand states lengths.
#[test]
fn an_old_scan_has_batches() {
    let body = Writer::default()
        .input("state", &[1])
        .input("a", &[1])
        .node("Add", &["state", "a"], "next")
        .node("Identity", &["next"], "row")
        .output("next")
        .output("row");
    let attributes = [("body", Value::Graph(body.graph)), ("num_scan_inputs", Value::Int(1))];
    let writer = |lengths: &str| {
        Writer::default()
            .input("h", &[2, 1])
            .input("x", &[2, 3, 1])
            .typed_input("lengths", I64, &[Size::Is(2)])
            .call("Scan", &[lengths, "h", "x"], &["last", "rows"], &attributes)
            .output("last")
            .output("rows")
    };
    let data = [("h", &[0.0, 10.0][..]), ("x", &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), ("lengths", &[3.0, 3.0])];
    let results = evaluated_at(writer(""), 8, &data);
    assert_eq!(results, [(vec![2, 1], vec![6.0, 25.0]), (vec![2, 3, 1], vec![1.0, 3.0, 6.0, 14.0, 19.0, 25.0])]);
    let error = import(&writer("lengths").finish_at(8), &Options::default()).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("its sequences have different lengths"), "{error}");
}

#[test]
fn scans_that_do_not_fit_are_refused() {
    let said = refusal(scanned(&[3, 2], &[4, 2], &[]));
    assert_eq!(said, "Scan at `last`: scanned axes of one size expected, got [3,2] and [4,2]");
    let said = refusal(scanned(&[129, 2], &[129, 2], &[]));
    assert!(said.contains("it takes at least 129 steps, and at most 128 are unrolled"), "{said}");
    let said = refusal(scanned(&[3, 2], &[3, 2], &[("scan_input_directions", Value::Ints(&[0, 2]))]));
    assert_eq!(said, "Scan at `last`: 2 axes and directions of 0 or 1 expected, got [0, 0] and [0, 2]");
    let said = refusal(scanned(&[3, 2], &[3, 2], &[("num_scan_outputs", Value::Int(1))]));
    assert_eq!(said, "Scan at `last`: attributes of the operator set's schema expected, got `num_scan_outputs`");
}

/// A branch that fits at a length of 128 is computed at once; where no branch does, a length that fits one is looked for. If there is
/// none, the stated shape is enough.
#[test]
fn a_length_that_fits_a_branch_is_looked_for() {
    let branch = |frames: &[i64], op: &str| {
        let body = Writer::default().ints("frames", frames).node("Reshape", &["x", "frames"], "cut");
        let body = body.call("ReduceSum", &["cut"], &["sum"], &[("keepdims", Value::Int(0))]);
        body.node(op, &["sum"], "inner").output("inner").graph
    };
    let writer = |first: &[i64], second: &[i64]| {
        let branches =
            [("then_branch", Value::Graph(branch(first, "Neg"))), ("else_branch", Value::Graph(branch(second, "Exp")))];
        Writer::default()
            .typed_input("x", F32, &[Size::Is(1), Size::Open])
            .typed_input("rate", BOOL, &[])
            .call("If", &["rate"], &["chosen"], &branches)
            .stated("chosen", &[])
            .node("Tanh", &["chosen"], "y")
            .output("y")
    };
    let length = |first: &[i64], second: &[i64]| {
        let imported = import(&writer(first, second).finish(), &Options::default()).unwrap();
        let text = imported.graph.to_string();
        let size =
            text.split_once("x = input f32[1,").and_then(|(_, rest)| rest.split_once(']')).unwrap().0.to_string();
        (size, imported.opaque.len(), imported.notes)
    };
    let (size, described, _) = length(&[-1, 64], &[-1, 200]);
    assert_eq!((size.as_str(), described), ("128", 0));
    // 512 is the first guess that both divide.
    let (size, described, _) = length(&[-1, 256], &[-1, 512]);
    assert_eq!((size.as_str(), described), ("512", 0));
    let (size, described, notes) = length(&[-1, 7], &[-1, 11]);
    assert_eq!((size.as_str(), described), ("128", 1));
    assert!(
        notes.iter().any(|note| note.starts_with("neither branch of `chosen` fits the sizes (Reshape")),
        "{notes:?}"
    );
}

/// An image that is resized by a scale which is an input.
fn resized() -> Writer {
    Writer::default()
        .input("x", &[1, 1, 2, 3])
        .input("ratio", &[1])
        .floats("same", &[2], &[1.0, 1.0])
        .call("Concat", &["same", "ratio", "ratio"], &["scales"], &[("axis", Value::Int(0))])
        .call("Resize", &["x", "", "scales"], &["y"], &[("mode", Value::Text("nearest"))])
        .output("y")
}

/// Sizes that depend on an input of one element are those of an assumed value, or of the one that is given.
#[test]
fn an_input_of_one_element_settles_sizes() {
    let imported = import(&resized().finish(), &Options::default()).unwrap();
    let graph = &imported.graph;
    assert_eq!(graph.node(graph.outputs()[0].node).shape[..], [1, 1, 2, 3]);
    assert_eq!(imported.notes, ["sizes depend on the value of `ratio`: 1 is assumed (--inputs gives another)"]);
    let assumed: Vec<_> = imported.inputs.iter().map(|port| port.assumed.as_ref().map(TensorData::values)).collect();
    assert_eq!(assumed, [None, Some(vec![1.0])]);
    let given = TensorData::of_values(Dtype::F32, [1].into(), [2.0].into_iter());
    let imported = import(&resized().finish(), &Options::default().with_value("ratio", given)).unwrap();
    let graph = &imported.graph;
    assert_eq!(graph.node(graph.outputs()[0].node).shape[..], [1, 1, 4, 6]);
    assert_eq!(
        imported.notes,
        ["the graph depends on the values of `ratio`, and holds only for those that were given"]
    );
    assert!(imported.inputs.iter().all(|port| port.assumed.is_none()));
}

/// Where 1 gives no size, it is the side of an image.
#[test]
fn a_size_that_is_an_input_is_that_of_an_image() {
    let writer = Writer::default()
        .input("x", &[1, 1, 2, 3])
        .typed_input("side", I64, &[Size::Is(1)])
        .ints("patch", &[32])
        .ints("same", &[1, 1])
        .node("Div", &["side", "patch"], "patches")
        .call("Concat", &["same", "patches", "patches"], &["sizes"], &[("axis", Value::Int(0))])
        .call("Resize", &["x", "", "", "sizes"], &["y"], &[("mode", Value::Text("nearest"))])
        .output("y");
    let imported = import(&writer.finish(), &Options::default()).unwrap();
    assert_eq!(imported.graph.node(imported.graph.outputs()[0].node).shape[..], [1, 1, 8, 8]);
    assert_eq!(imported.notes, ["sizes depend on the value of `side`: 256 is assumed (--inputs gives another)"]);
}

/// Nothing is assumed of an input that no size depends on, or of one that has more elements.
#[test]
fn only_what_sizes_need_is_assumed() {
    let start = || Writer::default().input("x", &[2, 3]);
    let scaled = start().input("factor", &[1]).node("Mul", &["x", "factor"], "y").output("y");
    let imported = import(&scaled.finish(), &Options::default()).unwrap();
    assert!(imported.notes.is_empty() && imported.inputs.iter().all(|port| port.assumed.is_none()));
    let found = start().node("NonZero", &["x"], "y").output("y");
    assert!(refusal(found).contains("how many elements it finds depends on the input"));
    let stepped = looped("limit", "", sums("same"));
    assert!(refusal(stepped).contains("its number of steps depends on the input"), "how often a loop runs is no size");
}

/// What is found in given values is known.
#[test]
fn elements_of_given_values_are_found() {
    let writer = Writer::default()
        .typed_input("x", I64, &[Size::Is(4)])
        .node("NonZero", &["x"], "found")
        .call("Cast", &["found"], &["y"], &[("to", Value::Int(1))])
        .output("y");
    let given = TensorData::of_values(Dtype::I32, [4].into(), [0.0, 7.0, 0.0, -1.0].into_iter());
    let imported = import(&writer.finish(), &Options::default().with_value("x", given)).unwrap();
    assert_eq!(imported.graph.node(imported.graph.outputs()[0].node).shape[..], [1, 2]);
}

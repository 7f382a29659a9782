//! What is refused, and how it is told: every error, hostile files, external data, and a bounded run of the fuzz target.

use crate::support::writer;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::support::writer::{F32, I64, Message, Size, Value, Writer, node, tensor};
use deuteron_graph::GraphError;
use deuteron_onnx::{ExternalProblem, Imported, Location, OnnxError, Options, import, import_file};
use deuteron_testkit::{Scratch, fuzz};

fn refusal(file: &[u8]) -> OnnxError {
    import(file, &Options::default()).map(|imported| imported.graph.to_string()).expect_err("a refusal")
}

#[track_caller]
fn check(writer: Writer, expected: &str) {
    assert_eq!(refusal(&writer.finish()).to_string(), expected);
}

#[test]
fn bytes_that_are_no_model() {
    assert_eq!(
        refusal(b"").to_string(),
        "the file holds no graph; expected an ONNX ModelProto (weights alone are not enough)"
    );
    let cases: [(&[u8], &str); 5] = [
        (&[0x3a, 0x05, 0x01], "byte 0: a field of 5 bytes where 1 are left"),
        (&[0x3a, 0xff, 0xff, 0xff, 0xff, 0x0f], "byte 0: a field of 4294967295 bytes where 0 are left"),
        (&[0xff; 12], "byte 0: a number of more than 10 bytes"),
        (&[0x0b], "byte 0: wire type 3, expected 0, 1, 2 or 5"),
        (&[0x38, 0x01], "byte 0: field 7: expected a message"),
    ];
    for (bytes, expected) in cases {
        assert_eq!(refusal(bytes).to_string(), format!("{expected}; the file is damaged, or is no ONNX model"));
    }
}

#[test]
fn a_file_cut_anywhere_is_refused_or_read() {
    let file = Writer::default()
        .input("x", &[2, 4])
        .weight("w", &[4, 4])
        .node("MatMul", &["x", "w"], "y")
        .output("y")
        .finish();
    for length in 0..file.len() {
        let _ = fuzz::onnx(&file[..length]);
    }
    assert!(fuzz::onnx(&file).is_ok());
}

#[test]
fn messages_within_messages_are_limited() {
    // A branch within a branch, and so on: the depth of messages stops it.
    let mut graph = Message::default();
    for _ in 0..100 {
        graph = Message::default().message(1, &node("If", "", &[], &["y"], &[("then_branch", Value::Graph(graph))]));
    }
    let file = Message::default().message(7, &graph).0;
    // Branches are read when they are taken, so nothing deep was read.
    assert_eq!(
        refusal(&file).to_string(),
        "opset 0: expected 7 or later; convert it with onnx.version_converter.convert_version(model, 17)"
    );
    let mut body = Message::default()
        .message(1, &node("Identity", "", &["c"], &["y"], &[]))
        .message(12, &writer::value_info("y", F32, None));
    for _ in 0..100 {
        let call = node("If", "", &["c"], &["y"], &[("then_branch", Value::Graph(body))]);
        body = Message::default().message(1, &call).message(12, &writer::value_info("y", F32, None));
    }
    let truth = tensor("c", 9, &[]).bytes(9, &[1]);
    let file = Message::default().message(7, &body.message(5, &truth)).message(8, &Message::default().number(2, 17)).0;
    let error = refusal(&file);
    assert_eq!(error, OnnxError::Limit { what: "nesting of messages", limit: 32 }, "{error}");
}

#[test]
fn functions_that_call_themselves_are_stopped() {
    let function = Message::default()
        .text(1, "Self")
        .text(10, "local")
        .text(4, "a")
        .text(5, "b")
        .message(7, &node("Self", "local", &["a"], &["b"], &[]));
    let writer = Writer::default()
        .input("x", &[4])
        .function(function)
        .domain_call("local", "Self", &["x"], &["y"], &[])
        .output("y");
    check(
        writer,
        "functions and branches within each other: more than 32; no known model comes near, so the file is refused",
    );
}

#[test]
fn functions_that_multiply_are_stopped() {
    let mut writer = Writer::default().input("x", &[4]);
    for level in 0..24 {
        let inner = format!("F{}", level + 1);
        let mut function = Message::default().text(1, &format!("F{level}")).text(10, "local").text(4, "a").text(5, "b");
        function = function
            .message(7, &node(&inner, "local", &["a"], &["m"], &[]))
            .message(7, &node(&inner, "local", &["m"], &["b"], &[]));
        writer = writer.function(function);
    }
    let last = Message::default()
        .text(1, "F24")
        .text(10, "local")
        .text(4, "a")
        .text(5, "b")
        .message(7, &node("Neg", "", &["a"], &["b"], &[]));
    let start = processor_time();
    let error = refusal(&writer.function(last).domain_call("local", "F0", &["x"], &["y"], &[]).output("y").finish());
    assert!(matches!(error, OnnxError::Limit { what: "operands of operations, functions inlined", .. }), "{error}");
    let taken = processor_time() - start;
    assert!(taken < Duration::from_secs(5), "{taken:?}");
}

/// What this thread has used of a processor, or the time of day where Linux does not tell: others may keep the machine busy.
fn processor_time() -> Duration {
    let told = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let used = told.split(' ').next().and_then(|number| number.parse().ok());
    used.map_or_else(|| SystemTime::now().duration_since(UNIX_EPOCH).unwrap(), Duration::from_nanos)
}

/// The open axis of a state counts sequences, not their steps.
#[test]
fn states_of_recurrent_layers_have_a_batch() {
    let dims = [Size::Is(2), Size::Open, Size::Is(8)];
    let writer = |name: &str| Writer::default().typed_input(name, F32, &dims).node("Neg", &[name], "y").output("y");
    for (name, size) in [("state", 1), ("prev_hidden", 1), ("c0", 1), ("x", 128), ("chroma", 128)] {
        let imported = import(&writer(name).finish(), &Options::default()).unwrap();
        assert!(imported.graph.to_string().contains(&format!("{name} = input f32[2,{size},8]")), "{}", imported.graph);
    }
}

/// Without a name that says so, an axis may count samples of sound: a second of it is tried where shorter sequences do not fit.
#[test]
fn a_second_of_sound_is_tried_last() {
    let writer = Writer::default()
        .typed_input("x", F32, &[Size::Is(1), Size::Open])
        .ints("frames", &[-1, 1000])
        .node("Reshape", &["x", "frames"], "y")
        .output("y");
    let imported = import(&writer.finish(), &Options::default()).unwrap();
    assert!(imported.graph.to_string().contains("x = input f32[1,16000]"), "{}", imported.graph);
    assert_eq!(imported.notes, ["the file leaves `x.1` open: 16000 is assumed (--dim x.1=N, --seq)"]);
}

#[test]
fn sizes_have_to_be_known() {
    let writer = || {
        Writer::default()
            .typed_input("ids", I64, &[Size::Named("batch"), Size::Open])
            .typed_input("mask", I64, &[Size::Named("batch"), Size::Is(4)])
            .call("Cast", &["ids"], &["y"], &[("to", Value::Int(1))])
            .output("y")
    };
    // Without a word from the user, a size is assumed and said.
    let assumed = import(&writer().finish(), &Options::default()).unwrap();
    assert!(
        assumed.graph.to_string().starts_with("graph test\nids = input i32[1,128]\nmask = input i32[1,4]\n"),
        "{}",
        assumed.graph
    );
    assert_eq!(
        assumed.notes,
        [
            "the file leaves `batch` open: 1 is assumed (--dim batch=N, --batch)",
            "the file leaves `ids.1` open: 128 is assumed (--dim ids.1=N, --seq)",
        ]
    );
    let both = Options { batch: Some(8), sequence: Some(16), ..Options::default() };
    let imported = import(&writer().finish(), &both).unwrap();
    assert!(
        imported.graph.to_string().starts_with("graph test\nids = input i32[8,16]\nmask = input i32[8,4]\n"),
        "{}",
        imported.graph
    );
    assert_eq!(imported.notes, Vec::<String>::new());
    let options = Options::default().with_dim("batch", 3).with_dim("ids.1", 5).with_dim("ids.0", 2);
    let imported = import(&writer().finish(), &options).unwrap();
    assert!(
        imported.graph.to_string().starts_with("graph test\nids = input i32[2,5]\nmask = input i32[3,4]\n"),
        "{}",
        imported.graph
    );
}

/// A size that no dimension takes is an error, as is a batch or a sequence that nothing counts.
#[test]
fn sizes_that_change_nothing_are_refused() {
    let writer = || {
        Writer::default()
            .typed_input("ids", I64, &[Size::Named("rows"), Size::Is(4)])
            .call("Cast", &["ids"], &["y"], &[("to", Value::Int(1))])
            .output("y")
            .finish()
    };
    let refused = |options: Options| import(&writer(), &options).unwrap_err().to_string();
    assert_eq!(
        refused(Options::default().with_dim("nosuch", 3)),
        "the file has no dimension `nosuch`; its open dimensions are rows, or INPUT.AXIS such as x.0"
    );
    assert_eq!(
        refused(Options { sequence: Some(3), ..Options::default() }),
        "no input has an open dimension that counts the sequence, so --seq changes nothing; its open dimensions are rows"
    );
    let value = deuteron_onnx::TensorData::of_values(deuteron_graph::Dtype::I32, [2, 5].into(), (0..10).map(f64::from));
    assert_eq!(
        refused(Options::default().with_value("ids", value.clone())),
        "input `ids`: expected values of shape [rows,4], got [2,5]"
    );
    assert_eq!(refused(Options::default().with_value("x", value)), "the file has no input `x`; its inputs are ids");
}

/// A batch that the file fixes is changed where its operators allow it.
#[test]
fn a_fixed_batch_is_changed_or_told() {
    let options = Options { batch: Some(8), ..Options::default() };
    let start = || Writer::default().input("x", &[1, 6]).weight("w", &[6, 4]).node("MatMul", &["x", "w"], "y");
    let imported = import(&start().output("y").finish(), &options).unwrap();
    assert!(imported.graph.to_string().contains("x = input f32[8,6]"), "{}", imported.graph);
    let fixed = start().ints("sizes", &[1, 4]).node("Reshape", &["y", "sizes"], "z").output("z");
    assert_eq!(
        import(&fixed.finish(), &options).unwrap_err().to_string(),
        "the file is written for a batch of 1 and cannot take 8: Reshape at `z`: a shape of 32 elements expected for [8,4], \
         got [1,4]"
    );
}

/// No attribute, operand or value of an attribute is passed over in silence.
#[test]
fn what_is_not_honoured_is_refused() {
    let x = || Writer::default().input("x", &[2, 4]);
    check(
        x().call("Relu", &["x"], &["y"], &[("slope", Value::Float(0.5))]).output("y"),
        "Relu at `y`: attributes of the operator set's schema expected, got `slope`",
    );
    check(
        x().call("Gelu", &["x"], &["y"], &[("approximate", Value::Text("erf"))]).output("y"),
        "Gelu at `y`: approximate of none, tanh expected, got `erf`",
    );
    check(x().node("Relu", &["x", "x"], "y").output("y"), "Relu at `y`: at most 1 operands expected, got 2");
    let opaque = |writer: Writer| {
        let imported = import(&writer.finish_at(25), &Options::default()).unwrap();
        imported
            .opaque
            .iter()
            .map(|opaque| format!("{}: {}", opaque.op_type, opaque.why))
            .collect::<Vec<_>>()
            .join("; ")
    };
    let cast = [("to", Value::Int(8))];
    assert_eq!(
        opaque(x().call("Cast", &["x"], &["y"], &cast).stated("y", &[2, 4]).output("y")),
        "Cast: it casts to ONNX element type 8, which is not known"
    );
    let dropout = x().scalar("ratio", 0.5).tensor(tensor("training", 9, &[]).bytes(9, &[1]));
    assert_eq!(
        opaque(dropout.node("Dropout", &["x", "ratio", "training"], "y").stated("y", &[2, 4]).output("y")),
        "Dropout: it drops at random (training_mode is true); export the model for inference"
    );
    let heads = || Writer::default().input("q", &[1, 2, 4, 8]).input("k", &[1, 2, 4, 8]);
    check(
        heads().call("Attention", &["q", "k", "k"], &["y"], &[("window", Value::Int(2))]).output("y"),
        "Attention at `y`: attributes of the operator set's schema expected, got `window`",
    );
}

/// Indices that count from the end are wrapped, whether they are known or given.
#[test]
fn negative_indices_count_from_the_end() {
    let writer = Writer::default()
        .weight("w", &[5, 3])
        .typed_input("ids", I64, &[Size::Is(2)])
        .node("Gather", &["w", "ids"], "y")
        .output("y");
    let value = deuteron_onnx::TensorData::of_values(deuteron_graph::Dtype::I32, [2].into(), [-1.0, 1.0].into_iter());
    let file = writer.finish();
    let imported = import(&file, &Options::default().with_value("ids", value.clone())).unwrap();
    let weight = crate::support::values(&imported.weight("w", &file).unwrap());
    let graph = &imported.graph;
    let inputs = graph.inputs().iter().map(|&id| match graph.label(id).as_str() {
        "ids" => crate::support::values(&value),
        label => crate::support::values(&imported.weight(label, &file).unwrap()),
    });
    let inputs: Vec<_> = inputs.collect();
    let y = deuteron_reference::bounded(graph, &inputs).unwrap().remove(0).exact;
    assert_eq!(y.values, [weight.row(4), weight.row(1)].concat());
}

#[test]
fn tensors_have_to_be_tensors() {
    let input =
        |element: u64| Writer::default().typed_input("x", element, &[Size::Is(2)]).node("Neg", &["x"], "y").output("y");
    check(
        input(8),
        "`x` holds strings; expected a tensor of floats, integers or bools: cut the model behind its tokenizer with \
         onnx.utils.extract_model",
    );
    check(
        input(14),
        "`x` holds complex numbers; expected a tensor of floats, integers or bools: pass real and imaginary parts as two tensors",
    );
    check(
        input(99),
        "`x` holds elements of ONNX type 99, which is not known; expected a tensor of floats, integers or bools",
    );
    let no_shape =
        Writer { graph: Message::default().message(11, &writer::value_info("x", F32, None)), ..Writer::default() };
    check(no_shape, "input `x` is not a tensor with a shape; sequences, maps and shapeless tensors cannot be imported");
    let negative = Writer::default().tensor(Message::default().text(8, "w").number(2, F32).number(1, -3i64 as u64));
    check(negative, "`w` has size -3 on axis 0; expected a size of at least 0");
    let huge = Writer::default().tensor(tensor("w", F32, &[1 << 40, 1 << 40]));
    assert!(matches!(refusal(&huge.finish()), OnnxError::Graph(GraphError::TooLarge { .. })));
    let deep = Writer::default().tensor(tensor("w", F32, &[1; 100]));
    check(deep, "axes of a tensor: more than 64; no known model comes near, so the file is refused");
    let short = Writer::default().tensor(tensor("w", F32, &[4]).bytes(9, &[0; 12]));
    check(short, "tensor `w`: expected 16 bytes of data, got 12");
    let mixed = Writer::default().tensor(tensor("w", F32, &[4]).bytes(10, &[0; 16]));
    check(mixed, "tensor `w`: data of field 10 do not go with its element type; write it as raw_data");
    let chunks = Writer::default().tensor(tensor("w", F32, &[2]).bytes(4, &[0; 4]).bytes(4, &[0; 4]));
    check(chunks, "tensor `w`: data in more than one packed field; write it as raw_data");
    let giant = Writer::default().typed_input("x", F32, &[Size::Is(1 << 30), Size::Is(1 << 30)]);
    assert!(matches!(refusal(&giant.finish()), OnnxError::Graph(GraphError::TooLarge { .. })));
}

#[test]
fn operands_have_to_go_together() {
    let x = || Writer::default().input("x", &[2, 4]).weight("w", &[3, 5]);
    check(
        x().node("MatMul", &["x", "w"], "y").output("y"),
        "MatMul at `y`: matrices whose inner sizes agree expected, got [2,4] and [3,5]",
    );
    check(
        x().node("Add", &["x", "w"], "y").output("y"),
        "Add at `y`: shapes that broadcast expected, got [2,4] and [3,5]",
    );
    check(
        x().call("Softmax", &["x"], &["y"], &[("axis", Value::Int(2))]).output("y"),
        "Softmax at `y`: an axis from -2 to 1 expected, got 2",
    );
    check(
        x().ints("s", &[3, -1]).node("Reshape", &["x", "s"], "y").output("y"),
        "Reshape at `y`: sizes that divide 8 elements expected, got [3, -1]",
    );
    check(
        x().node("Neg", &["z"], "y").output("y"),
        "`y` reads `z`, which no node before it gives; nodes have to be in order of computation",
    );
    check(
        x().node("Neg", &["x"], "y").output("z"),
        "`graph output` reads `z`, which no node before it gives; nodes have to be in order of computation",
    );
    check(x().node("Sqrt", &[], "y").output("y"), "Sqrt at `y`: 1 operands expected, got 0");
    check(
        x().node("Secret", &["x"], "y").output("y"),
        "Secret at `y`: the operator has no counterpart, and the file does not state the shape of its result `y`, so it cannot \
         be analysed as an opaque operation either; state that shape in the graph's value_info to analyse it so \
         (onnx.shape_inference.infer_shapes knows the shapes of most operators of ONNX), or cut the model before and after it with \
         onnx.utils.extract_model",
    );
    check(
        x().node("NonZero", &["x"], "y").output("y"),
        "NonZero at `y`: how many elements it finds depends on the input, and the file does not state the shape of its result `y`, so it cannot \
         be analysed as an opaque operation either; state that shape in the graph's value_info to analyse it so \
         (onnx.shape_inference.infer_shapes knows the shapes of most operators of ONNX), or cut the model before and after it with \
         onnx.utils.extract_model",
    );
}

/// Shape inference does not help with these, so it is not advised.
#[test]
fn control_flow_and_unknown_types_are_not_supported() {
    let x = || Writer::default().input("x", &[2, 4]);
    let body = |writer: Writer| ("body", Value::Graph(writer.graph));
    let counted = body(Writer::default().input("s", &[]).input("c", &[]).output("c"));
    let scanned = body(Writer::default().input("s", &[2, 4]).node("NonZero", &["s"], "n").output("n"));
    let cases = [
        ("If", vec![], "the operator has no counterpart"),
        ("Loop", vec![counted], "its number of steps depends on the input"),
        (
            "Scan",
            vec![scanned, ("num_scan_inputs", Value::Int(1))],
            "its body cannot be unrolled (NonZero at `n`: how many",
        ),
    ];
    for (op, attributes, why) in cases {
        let said = refusal(&x().call(op, &["x"], &["y"], &attributes).output("y").finish()).to_string();
        assert!(said.starts_with(&format!("{op} at `y`: {why}")), "{said}");
        assert!(said.contains("control flow that depends on the input is not supported"), "{said}");
        assert!(said.contains("extract_model") && !said.contains("infer_shapes") && !said.contains("--dim"), "{said}");
    }
    let cast = x().call("Cast", &["x"], &["y"], &[("to", Value::Int(8))]).output("y").finish();
    let said = refusal(&cast).to_string();
    assert!(said.contains("this type is not supported") && !said.contains("infer_shapes"), "{said}");
}

#[test]
fn an_old_opset_is_refused() {
    let file = Writer::default().input("x", &[2]).node("Add", &["x", "x"], "y").output("y").finish_at(6);
    assert_eq!(refusal(&file), OnnxError::Opset { got: 6 });
    // Unless its operators never changed.
    let file = |attributes: &[(&str, Value)]| {
        Writer::default().input("x", &[2]).call("Neg", &["x"], &["y"], attributes).output("y").finish_at(1)
    };
    assert!(import(&file(&[]), &Options::default()).is_ok());
    let error = refusal(&file(&[("consumed_inputs", Value::Ints(&[0]))])).to_string();
    assert_eq!(error, "Neg at `y`: attributes of the operator set's schema expected, got `consumed_inputs`");
}

#[test]
fn values_too_large_to_fold_stay_operations() {
    // A billion elements are never made: the fill is one number, and the sum stays an operation.
    let writer = Writer::default()
        .input("x", &[1])
        .ints("sizes", &[32768, 32768])
        .node("ConstantOfShape", &["sizes"], "fill")
        .ints("axes", &[0])
        .node("ReduceSum", &["fill", "axes"], "sum")
        .node("Add", &["sum", "x"], "y")
        .output("y");
    let imported = import(&writer.finish(), &Options::default()).unwrap();
    assert!(imported.graph.to_string().contains("row_sum"), "{}", imported.graph);
    let range = Writer::default()
        .scalar("a", 0.0)
        .scalar("b", 1e30)
        .scalar("c", 1.0)
        .node("Range", &["a", "b", "c"], "y")
        .output("y");
    assert!(refusal(&range.finish()).to_string().starts_with("Range at `y`: a range of at most 2^24 numbers expected"));
}

/// A folder, and one for a model within it.
fn folders() -> (Scratch, PathBuf) {
    let folder = Scratch::make();
    let model = folder.join("model");
    std::fs::create_dir(&model).unwrap();
    (folder, model)
}

fn external(entries: &[(&str, &str)]) -> Vec<u8> {
    let entry = |(key, value): &(&str, &str)| Message::default().text(1, key).text(2, value);
    let stored =
        entries.iter().fold(tensor("w", F32, &[4]).number(14, 1), |tensor, pair| tensor.message(13, &entry(pair)));
    Writer::default().input("x", &[2, 4]).tensor(stored).node("Add", &["x", "w"], "y").output("y").finish()
}

fn problem(folder: &Path, entries: &[(&str, &str)]) -> ExternalProblem {
    let options = Options { folder: Some(folder.to_path_buf()), ..Options::default() };
    match import(&external(entries), &options) {
        Err(OnnxError::External { tensor, problem, .. }) if tensor == "w" => problem,
        other => panic!("{other:?}"),
    }
}

#[test]
fn external_data_lie_beneath_the_models_folder() {
    let (folder, model) = folders();
    std::fs::write(folder.join("secret.bin"), [0; 64]).unwrap();
    std::fs::write(model.join("w.bin"), [0; 24]).unwrap();
    std::fs::create_dir(model.join("inner")).unwrap();
    let at = |location: &str| problem(&model, &[("location", location)]);
    for location in ["../secret.bin", "inner/../../secret.bin", "..\\secret.bin", "inner/.."] {
        assert_eq!(at(location), ExternalProblem::LeavesFolder, "{location}");
    }
    let absolute = folder.join("secret.bin");
    for location in [absolute.to_str().unwrap(), "/etc/hostname", "\\\\host\\share", "C:\\w.bin", "C:w.bin", ""] {
        assert_eq!(at(location), ExternalProblem::NotRelative, "{location}");
    }
    assert!(matches!(at("missing.bin"), ExternalProblem::Unreadable { .. }));
    assert!(matches!(at("inner"), ExternalProblem::NotAFile(_)));
    assert!(matches!(at("."), ExternalProblem::NotAFile(_)));
    let with = |offset: &str| problem(&model, &[("location", "w.bin"), ("offset", offset)]);
    assert_eq!(with("9"), ExternalProblem::TooShort { expected: 25, got: 24 });
    assert_eq!(with("18446744073709551615"), ExternalProblem::TooShort { expected: u64::MAX, got: 24 });
    assert_eq!(with("-1"), ExternalProblem::NotANumber { key: "offset", value: "-1".to_string() });
    let options = Options { folder: Some(model), ..Options::default() };
    let wrong = import(&external(&[("location", "w.bin"), ("length", "12")]), &options);
    assert_eq!(wrong.unwrap_err().to_string(), "tensor `w`: expected 16 bytes of data, got 12");
    let no_folder = import(&external(&[("location", "w.bin")]), &Options::default()).unwrap_err();
    assert_eq!(
        no_folder.to_string(),
        "tensor `w`, external data `w.bin`: the model's folder is not known; import it from its file, or set the folder in \
         the options"
    );
}

#[cfg(unix)]
#[test]
fn external_data_are_not_reached_through_links() {
    use std::os::unix::fs::symlink;
    let (folder, model) = folders();
    std::fs::write(folder.join("secret.bin"), [0; 64]).unwrap();
    symlink(folder.join("secret.bin"), model.join("link.bin")).unwrap();
    symlink(&*folder, model.join("up")).unwrap();
    for (location, link) in [("link.bin", "link.bin"), ("up/secret.bin", "up"), ("./up/secret.bin", "up")] {
        let expected = ExternalProblem::Symlink(model.join(link));
        assert_eq!(problem(&model, &[("location", location)]), expected, "{location}");
    }
}

#[test]
fn external_data_are_found_and_read_when_asked_for() {
    let (_folder, model) = folders();
    let values: Vec<u8> = (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect();
    std::fs::create_dir(model.join("inner")).unwrap();
    std::fs::write(model.join("inner/w.bin"), &values).unwrap();
    let file = external(&[("location", "inner/w.bin"), ("offset", "8"), ("length", "16")]);
    let path = model.join("model.onnx");
    std::fs::write(&path, &file).unwrap();
    let imported: Imported = import_file(&path, &Options::default()).unwrap();
    assert!(matches!(imported.weights[0].location, Location::External(_)));
    assert_eq!(imported.weight("w", &file).unwrap().bytes, values[8..]);
    assert_eq!(imported.weight("z", &file), Err(OnnxError::UnknownWeight("z".to_string())));
    std::fs::remove_file(model.join("inner/w.bin")).unwrap();
    assert!(matches!(imported.weight("w", &file), Err(OnnxError::Unreadable { .. })));
    assert!(matches!(import_file(&model.join("none.onnx"), &Options::default()), Err(OnnxError::Unreadable { .. })));
}

/// A bounded run of what cargo-fuzz does without bounds.
#[test]
fn no_file_panics() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models");
    let names = [
        "plain_gpt_13",
        "plain_llama_13",
        "llama_dynamo_23",
        "vit_dynamo_20",
        "bert_runtime",
        "operators_17",
        "operators_23",
    ];
    let corpus: Vec<Vec<u8>> =
        names.iter().map(|name| std::fs::read(models.join(format!("{name}.onnx"))).unwrap()).collect();
    let deadline = Instant::now() + Duration::from_secs(4);
    let mut accepted = 0;
    for seed in 0..100_000 {
        accepted += fuzz::onnx(&fuzz::mutate_bytes(&corpus, seed)).is_ok() as usize;
        // A machine that does other things too takes longer.
        if accepted > 100 && Instant::now() > deadline {
            break;
        }
    }
    assert!(accepted > 100, "the mutations are too wild to test what is accepted: {accepted}");
}

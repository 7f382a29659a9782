//! Weights in every form that a file may hold them in, and the names and types they get.

use crate::support::writer::{F32, I64, Message, Size, Value, Writer, tensor};
use deuteron_graph::Dtype;
use deuteron_onnx::{Imported, Location, Options, import};

fn load(writer: Writer) -> (Imported, Vec<u8>) {
    let file = writer.finish();
    (import(&file, &Options::default()).unwrap_or_else(|error| panic!("{error}")), file)
}

/// `x + w` for a tensor `w` of 300 elements, more than are folded.
fn sum(element: u64, stored: Message) -> Writer {
    let x = Writer::default().typed_input("x", element, &[Size::Is(300)]);
    x.tensor(stored).node("Add", &["x", "w"], "y").output("y")
}

#[test]
fn floats_are_left_in_the_file() {
    let raw: Vec<u8> = (0..300).flat_map(|i| (i as f32).to_le_bytes()).collect();
    // As raw data, and as packed floats: the same bytes.
    for field in [9, 4] {
        let (imported, file) = load(sum(F32, tensor("w", F32, &[300]).bytes(field, &raw)));
        let weight = &imported.weights[0];
        let Location::Model { offset, length } = weight.location else { panic!("{weight:?}") };
        assert_eq!(file[offset..offset + length], raw);
        assert_eq!(weight.read(&file).unwrap().bytes, raw);
        assert!(weight.read(&file[..offset]).is_err());
    }
}

#[test]
fn floats_written_one_by_one_are_read() {
    let stored = (0..300).fold(tensor("w", F32, &[300]), |tensor, i| tensor.float(4, i as f32));
    let (imported, file) = load(sum(F32, stored));
    let raw: Vec<u8> = (0..300).flat_map(|i| (i as f32).to_le_bytes()).collect();
    assert_eq!(imported.weight("w", &file).unwrap().bytes, raw);
}

#[test]
fn wide_types_become_narrow_ones() {
    let doubles: Vec<u8> = (0..300).flat_map(|i| (i as f64 / 8.0).to_le_bytes()).collect();
    let singles: Vec<u8> = (0..300).flat_map(|i| (i as f32 / 8.0).to_le_bytes()).collect();
    let (imported, file) = load(sum(11, tensor("w", 11, &[300]).bytes(9, &doubles)));
    let data = imported.weight("w", &file).unwrap();
    assert_eq!((data.dtype, data.bytes), (Dtype::F32, singles));
    assert_eq!(imported.notes, ["`w` is f64 and becomes f32"]);

    // Half floats may be written as numbers, 1.0 is 0x3c00.
    let halves = (0..300).fold(Message::default(), |packed, _| packed.varint(0x3c00));
    let (imported, file) = load(sum(10, tensor("w", 10, &[300]).message(5, &halves)));
    let data = imported.weight("w", &file).unwrap();
    assert_eq!((data.dtype, data.bytes), (Dtype::F16, [0x00, 0x3c].repeat(300)));

    // Indices that do not count become a weight of 32 bits.
    let indices: Vec<u8> = (0..40i64).flat_map(|i| (i * i % 7).to_le_bytes()).collect();
    let gather = Writer::default()
        .input("table", &[7, 4])
        .tensor(tensor("ids", I64, &[40]).bytes(9, &indices))
        .node("Gather", &["table", "ids"], "y")
        .output("y");
    let (imported, file) = load(gather);
    let narrow: Vec<u8> = (0..40i32).flat_map(|i| (i * i % 7).to_le_bytes()).collect();
    assert_eq!(imported.weight("ids", &file).unwrap().bytes, narrow);
}

#[test]
fn names_are_made_readable_and_different() {
    let writer = Writer::default()
        .input("0:x", &[300])
        .weight("onnx::Add_1", &[300])
        .weight("onnx__Add_1", &[300])
        .node("Add", &["0:x", "onnx::Add_1"], "sum")
        .node("Add", &["sum", "onnx__Add_1"], "0:x/out")
        .output("0:x/out");
    let (imported, _) = load(writer);
    let names: Vec<(&str, &str)> =
        imported.weights.iter().map(|weight| (weight.name.as_str(), weight.original.as_str())).collect();
    assert_eq!(names, [("onnx__Add_1", "onnx::Add_1"), ("onnx__Add_1_2", "onnx__Add_1")]);
    assert_eq!(imported.graph.label(imported.graph.inputs()[0]), "_0_x");
    assert_eq!(imported.graph.outputs()[0].name, "_0_x/out");
}

#[test]
fn positions_and_masks_need_no_tensor() {
    let writer = Writer::default()
        .input("table", &[16, 4])
        .ints("zero", &[2])
        .tensor(tensor("start", I64, &[]).bytes(9, &2i64.to_le_bytes()))
        .tensor(tensor("end", I64, &[]).bytes(9, &10i64.to_le_bytes()))
        .tensor(tensor("step", I64, &[]).bytes(9, &1i64.to_le_bytes()))
        .input("x", &[8, 8])
        .scalar("hidden", -1e9)
        .node("Range", &["start", "end", "step"], "positions")
        .typed_input("shift", I64, &[Size::Is(8)])
        .node("Equal", &["positions", "shift"], "same")
        .call("Trilu", &["x"], &["lower"], &[("upper", Value::Int(0))])
        .output("same")
        .output("lower");
    let (imported, _) = load(writer);
    assert_eq!(imported.weights, []);
    assert_eq!(imported.opaque, []);
    assert!(imported.graph.to_string().contains("iota"), "{}", imported.graph);
}

/// An untrained model has biases of zeros and norms of ones: they are weights all the same.
#[test]
fn weights_that_happen_to_be_equal_stay_weights() {
    let writer = Writer::default()
        .input("x", &[2, 8])
        .weight("w", &[8, 4])
        .floats("b", &[4], &[0.0; 4])
        .node("MatMul", &["x", "w"], "p")
        .node("Add", &["p", "b"], "y")
        .output("y");
    let (imported, _) = load(writer);
    assert_eq!(imported.weights.iter().map(|weight| weight.name.as_str()).collect::<Vec<_>>(), ["w", "b"]);
    assert_eq!(imported.recognised[0].operations, 2);
}

#[test]
fn derived_sizes_are_computed() {
    let dims = [Size::Named("2*heads + past")];
    let file = Writer::default().typed_input("x", F32, &dims).node("Neg", &["x"], "y").output("y").finish();
    let imported = import(&file, &Options::default().with_dim("heads", 3).with_dim("past", 5)).unwrap();
    assert_eq!(imported.graph.node(imported.graph.inputs()[0]).shape[..], [11]);
}

/// Words of the text form are made names: no import fails for what a tensor is called.
#[test]
fn words_of_the_text_form_are_no_names() {
    for word in ["f32", "bf16", "bool", "inf", "transposed", "transpose_a", "elementwise", "1x"] {
        let writer = Writer::default().input("x", &[2, 4]).weight(word, &[4]).node("Add", &["x", word], "f16");
        let writer = writer.node("Neg", &["f16"], "inf").output("f16");
        let (imported, _) = load(writer);
        let again: deuteron_graph::Graph = imported.graph.to_string().parse().unwrap();
        assert_eq!(again, imported.graph, "{word}");
        assert_eq!(imported.weights[0].original, word);
    }
}

/// All floats of a model in another dtype: inputs, weights and constants, but not indices.
#[test]
fn a_model_is_converted_to_a_dtype() {
    let writer = Writer::default()
        .input("x", &[2, 8])
        .typed_input("ids", I64, &[Size::Is(2)])
        .weight("w", &[8, 4])
        .floats("table", &[3], &[0.1, 0.2, 0.3])
        .scalar("eps", 1e-5)
        .node("MatMul", &["x", "w"], "p")
        .node("Add", &["p", "eps"], "y")
        .node("Gather", &["table", "ids"], "z")
        .output("y")
        .output("z");
    let file = writer.finish();
    for dtype in [Dtype::Bf16, Dtype::F16] {
        let imported = import(&file, &Options { dtype: Some(dtype), ..Options::default() }).unwrap();
        let graph = &imported.graph;
        assert_eq!(imported.opaque, []);
        for output in graph.outputs() {
            assert_eq!(graph.node(output.node).dtype, dtype, "{graph}");
        }
        assert!(graph.ids().all(|id| graph.node(id).dtype != Dtype::F32), "{graph}");
        for weight in &imported.weights {
            let data = imported.weight(&weight.name, &file).unwrap();
            assert_eq!((data.dtype, data.bytes.len()), (dtype, 2 * weight.shape.elements()));
        }
        let table = imported.weights.iter().find(|weight| weight.shape.elements() == 3).unwrap();
        let table = table.read(&file).unwrap().values();
        assert!((table[1] - 0.2).abs() < 1e-3, "{table:?}");
    }
}

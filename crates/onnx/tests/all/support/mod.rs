//! Stored models with what ONNX Runtime computed of them.

pub mod writer;

use std::path::PathBuf;

use deuteron_graph::{Graph, InputKind, Op};
use deuteron_onnx::{Imported, Options, TensorData, import, import_file};
use deuteron_reference::{Array, Comparison, bounded};
use serde_json::Value;

pub fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/models")
}

pub fn bytes(name: &str) -> Vec<u8> {
    std::fs::read(folder().join(format!("{name}.onnx"))).unwrap()
}

fn record(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(folder().join(format!("{name}.json"))).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

pub fn options(name: &str) -> Options {
    let mut options = Options::default();
    for (dim, size) in record(name)["dims"].as_object().unwrap() {
        options.dims.insert(dim.clone(), size.as_u64().unwrap() as usize);
    }
    options
}

pub fn load(name: &str) -> Imported {
    let imported = import_file(&folder().join(format!("{name}.onnx")), &options(name));
    let imported = imported.unwrap_or_else(|error| panic!("{name}: {error}"));
    imported.graph.verify().unwrap();
    imported
}

/// Values of a weight as the reference takes them.
pub fn values(data: &TensorData) -> Array {
    Array::new(data.shape.clone(), data.values())
}

/// Shapes and values of the outputs of a model, in f64, for values of its inputs by their names.
pub fn evaluated(writer: writer::Writer, data: &[(&str, &[f64])]) -> Vec<(Vec<usize>, Vec<f64>)> {
    evaluated_at(writer, 17, data)
}

pub fn evaluated_at(writer: writer::Writer, opset: u64, data: &[(&str, &[f64])]) -> Vec<(Vec<usize>, Vec<f64>)> {
    let file = writer.finish_at(opset);
    let imported = import(&file, &Options::default()).unwrap_or_else(|error| panic!("{error}"));
    assert!(imported.opaque.is_empty(), "{:?}", imported.opaque);
    imported.graph.verify().unwrap();
    let graph: &Graph = &imported.graph;
    let array = |&id: &deuteron_graph::NodeId| {
        let label = graph.label(id);
        if let Op::Input { kind: InputKind::Weight, .. } = graph.node(id).op {
            return values(&imported.weight(&label, &file).unwrap());
        }
        let name = &imported.inputs.iter().find(|port| port.name == label).unwrap().original;
        let (_, given) = data.iter().find(|(given, _)| given == name).unwrap();
        Array::new(graph.node(id).shape.clone(), given.to_vec())
    };
    let inputs: Vec<Array> = graph.inputs().iter().map(array).collect();
    let results = bounded(graph, &inputs).unwrap();
    results.into_iter().map(|result| (result.exact.shape.to_vec(), result.exact.values)).collect()
}

/// The graph's inputs: those stored beside the model, and its weights.
fn inputs(name: &str, imported: &Imported) -> Vec<Array> {
    let (file, record) = (bytes(name), record(name));
    let graph: &Graph = &imported.graph;
    let array = |&id: &deuteron_graph::NodeId| {
        let label = graph.label(id);
        match graph.node(id).op {
            Op::Input { kind: InputKind::Weight, .. } => values(&imported.weight(&label, &file).unwrap()),
            // Numbers are written with as many digits as tell them apart in their type.
            _ => Array::new(graph.node(id).shape.clone(), numbers(&record["inputs"][&label]))
                .rounded(graph.node(id).dtype),
        }
    };
    graph.inputs().iter().map(array).collect()
}

/// Holds what ONNX Runtime computed in f32 against the imported graph, computed in f64.
pub fn check_values(name: &str, imported: &Imported) -> Vec<Comparison> {
    let inputs = inputs(name, imported);
    let expected = bounded(&imported.graph, &inputs).unwrap();
    let stored = record(name);
    let outputs = stored["outputs"].as_array().unwrap();
    assert_eq!(outputs.len(), expected.len(), "{name}: outputs");
    let mut comparisons = Vec::new();
    for (output, expected) in outputs.iter().zip(&expected) {
        let shape: Vec<usize> = numbers(&output["shape"]).iter().map(|&size| size as usize).collect();
        let got = Array::new(shape, numbers(&output["values"])).rounded(expected.dtype);
        comparisons.push(expected.compare(&got));
    }
    comparisons
}

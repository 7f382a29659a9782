//! Models as exporters write them: what is recognised in each, exactly, and what the imported graph computes.

use std::collections::BTreeMap;

use crate::support::{bytes, check_values, folder, load, options};
use deuteron_graph::{Callee, Composite, Graph, Mask};

/// Composites of every model: name, composites, masks of its attentions.
const MODELS: [(&str, &str, &str); 16] = [
    ("plain_gpt_13", "attention 2, gelu 2, layer_norm 5, linear 12", "causal causal"),
    ("plain_gpt_17", "attention 2, gelu 2, layer_norm 5, linear 12", "causal causal"),
    ("plain_llama_13", "attention 2, linear 14, rms_norm 5, swiglu 2", "causal causal"),
    ("plain_llama_dynamo_21", "attention 2, linear 14, rms_norm 5, swiglu 2", "causal causal"),
    // The head over the vocabulary is the ninth.
    ("gpt2_legacy_17", "attention 2, gelu 2, layer_norm 5, linear 9", "additive additive"),
    ("gpt2_dynamo_20", "attention 2, gelu 2, layer_norm 5, linear 9", "causal causal"),
    ("bert_legacy_14", "attention 2, gelu 2, layer_norm 5, linear 12", "additive additive"),
    ("bert_sdpa_17", "attention 2, gelu 2, layer_norm 5, linear 12", "additive additive"),
    ("bert_runtime", "attention 2, gelu 2, layer_norm 5, linear 12", "additive additive"),
    ("bert_dynamo_18", "attention 2, gelu 2, layer_norm 5, linear 12", "full full"),
    ("llama_legacy_17", "attention 2, linear 15, rms_norm 5, swiglu 2", "additive additive"),
    ("llama_dynamo_18", "attention 2, linear 15, rms_norm 5, swiglu 2", "causal causal"),
    ("llama_dynamo_23", "attention 2, linear 15, rms_norm 5, swiglu 2", "causal causal"),
    // The patches are the thirteenth.
    ("vit_legacy_14", "attention 2, gelu 2, layer_norm 5, linear 13", "full full"),
    ("vit_dynamo_20", "attention 2, gelu 2, layer_norm 5, linear 13", "full full"),
    ("external", "linear 1", ""),
];

/// Models of single operators.
const OPERATORS: [&str; 2] = ["operators_17", "operators_23"];

fn masks(graph: &Graph) -> String {
    let name = |mask: &Mask| match mask {
        Mask::Full => "full",
        Mask::Causal => "causal",
        Mask::Additive => "additive",
        Mask::Cached => "cached",
    };
    let masks = graph.calls().iter().filter_map(|call| match &call.callee {
        Callee::Composite(Composite::Attention { mask, .. }) => Some(name(mask)),
        _ => None,
    });
    masks.collect::<Vec<_>>().join(" ")
}

/// Bounds are for our kernels. ONNX Runtime has functions of its own, which may be as far off again.
const RUNTIME: f64 = 2.0;

#[test]
fn every_composite_is_found() {
    for (name, expected, expected_masks) in MODELS {
        let imported = load(name);
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        imported.recognised.iter().for_each(|found| *counts.entry(found.what).or_default() += 1);
        let counts: Vec<String> = counts.iter().map(|(what, count)| format!("{what} {count}")).collect();
        assert_eq!(counts.join(", "), expected, "{name}");
        assert_eq!(masks(&imported.graph), expected_masks, "{name}");
        assert_eq!(imported.near_misses, [], "{name}");
        assert_eq!(imported.opaque, [], "{name}");
        assert_eq!(imported.notes, Vec::<String>::new(), "{name}");
    }
}

#[test]
fn every_stored_model_is_in_the_list() {
    let stored = std::fs::read_dir(folder()).unwrap().filter_map(|entry| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        name.strip_suffix(".onnx").map(str::to_string)
    });
    let mut stored: Vec<String> = stored.collect();
    stored.sort();
    let mut listed: Vec<&str> = MODELS.iter().map(|(name, _, _)| *name).chain(OPERATORS).collect();
    listed.sort_unstable();
    assert_eq!(stored, listed);
}

#[test]
fn values_agree_with_the_runtime() {
    for (name, _, _) in MODELS {
        for comparison in check_values(name, &load(name)) {
            assert!(comparison.holds(), "{name}: {comparison:?}");
        }
    }
}

/// Every operator by itself, against the runtime.
#[test]
fn operators_agree_with_the_runtime() {
    for name in OPERATORS {
        let imported = load(name);
        assert_eq!(imported.opaque, [], "{name}");
        let outputs = imported.graph.outputs().to_vec();
        let failed: Vec<String> = check_values(name, &imported)
            .iter()
            .zip(&outputs)
            .filter(|(comparison, _)| comparison.ratio > RUNTIME)
            .map(|(comparison, output)| format!("{}: {comparison:?}", output.name))
            .collect();
        assert_eq!(failed, Vec::<String>::new(), "{name}");
    }
}

#[test]
fn the_graph_can_be_printed_and_read_back() {
    for (name, _, _) in MODELS {
        let graph = load(name).graph;
        let again: Graph = graph.to_string().parse().unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(again, graph, "{name}");
    }
}

#[test]
fn other_sizes_give_other_shapes() {
    let file = bytes("plain_gpt_13");
    for (batch, sequence) in [(1, 8), (3, 5), (2, 1)] {
        let options = options("plain_gpt_13").with_dim("batch", batch).with_dim("sequence", sequence);
        let imported = deuteron_onnx::import(&file, &options).unwrap();
        let output = imported.graph.node(imported.graph.outputs()[0].node);
        assert_eq!(output.shape[..], [batch, sequence, 8]);
        assert_eq!((imported.count("attention"), imported.count("layer_norm")), (2, 5));
    }
}

#[test]
fn weights_stay_where_they_are() {
    for (name, _, _) in MODELS {
        let (imported, file) = (load(name), bytes(name));
        for weight in &imported.weights {
            let data = imported.weight(&weight.name, &file).unwrap();
            assert_eq!(data.bytes.len(), weight.shape.elements() * weight.dtype.bytes(), "{name}: {}", weight.name);
        }
        let inline =
            imported.weights.iter().filter(|weight| matches!(weight.location, deuteron_onnx::Location::Model { .. }));
        assert!(inline.count() >= 2 || name == "external", "{name}");
    }
}

/// What a decomposed composite stands for is told.
#[test]
fn operations_are_counted() {
    let imported = load("plain_gpt_13");
    let at = |what: &str| imported.recognised.iter().find(|found| found.what == what).unwrap();
    assert_eq!((at("layer_norm").at.as_str(), at("layer_norm").operations), ("/blocks.0/ln_1/Add_1", 9));
    assert!(at("gelu").operations >= 8, "{:?}", at("gelu"));
    assert!(at("attention").operations >= 5, "{:?}", at("attention"));
}

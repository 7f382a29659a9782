//! The backend node tests of the `onnx` package: every one is right, or refused for a reason that is in a list.

use std::collections::BTreeMap;
use std::path::Path;

use deuteron_graph::{Graph, InputKind, Op};
use deuteron_onnx::{Imported, TensorData};
use deuteron_reference::{Array, bounded};
use deuteron_testkit::onnx_nodes::{Data, NodeTest, tests};

use crate::support::values;

/// The package's own tolerances.
const RELATIVE: f64 = 1e-3;
const ABSOLUTE: f64 = 1e-7;

/// Bounds are for our kernels; the package computes its results in their dtype, which may be as far off again.
const RUNTIME: f64 = 2.0;

/// Of the tests whose types are ours, this many have to run and be right.
const SHARE: f64 = 0.85;

/// Tests that the package has.
const TESTS: usize = 1765;

enum Outcome {
    Right,
    Wrong(String),
    Refused(String),
}

fn inputs(test: &NodeTest, data: &Data, imported: &Imported) -> Result<Vec<Array>, String> {
    let graph: &Graph = &imported.graph;
    let array = |&id: &deuteron_graph::NodeId| {
        let label = graph.label(id);
        if let Op::Input { kind: InputKind::Weight, .. } = graph.node(id).op {
            return Ok(values(&imported.weight(&label, &test.model).map_err(|error| error.to_string())?));
        }
        let original = imported.inputs.iter().find(|port| port.name == label).map(|port| &port.original);
        let given = data.inputs.iter().find(|(name, _)| Some(name) == original);
        given.map(|(_, value)| values(value)).ok_or(format!("no data for input `{label}`"))
    };
    graph.inputs().iter().map(array).collect()
}

/// Whether the package's result is what the graph gives.
fn agrees(expected: &deuteron_reference::Bounded, given: &TensorData) -> Result<(), String> {
    let given = values(given);
    // Where terms cancel, what is left is the rounding of the terms.
    let finite = given.values.iter().filter(|value| value.is_finite());
    let rounding = expected.dtype.epsilon() * finite.fold(0.0, |most: f64, value| most.max(value.abs()));
    let rounding = if expected.dtype.is_float() { rounding } else { 0.0 };
    if expected.exact.shape != given.shape {
        return Err(format!("shape {}, expected {}", expected.exact.shape, given.shape));
    }
    for (index, (&ours, &theirs)) in expected.exact.values.iter().zip(&given.values).enumerate() {
        let (ours, bound) = (deuteron_reference::round_to(expected.dtype, ours), expected.bounds[index]);
        let tolerance = (ABSOLUTE + RELATIVE * theirs.abs() + rounding).max(RUNTIME * bound);
        let same = ours == theirs || (ours.is_nan() && theirs.is_nan());
        let is_near = (ours - theirs).abs() <= tolerance;
        if !same && !is_near {
            return Err(format!("element {index} is {ours}, expected {theirs}"));
        }
    }
    Ok(())
}

fn run(test: &NodeTest) -> Outcome {
    // A model with text or sequences is refused before its data are read.
    let sets = match test.data() {
        Ok(sets) => sets,
        Err(error) => {
            let nothing = Data { inputs: Vec::new(), outputs: Vec::new() };
            return Outcome::Refused(test.import(&nothing).err().unwrap_or(error));
        }
    };
    for data in &sets {
        let imported = match test.import(data) {
            Ok(imported) => imported,
            Err(why) => return Outcome::Refused(why),
        };
        let result = inputs(test, data, &imported).and_then(|inputs| {
            let results = bounded(&imported.graph, &inputs).map_err(|error| error.to_string())?;
            if results.len() != data.outputs.len() {
                return Err(format!("{} outputs, expected {}", results.len(), data.outputs.len()));
            }
            results.iter().zip(&data.outputs).try_for_each(|(expected, given)| agrees(expected, given))
        });
        if let Err(why) = result {
            return Outcome::Wrong(why);
        }
    }
    Outcome::Right
}

/// Whether all inputs and outputs have a type that graphs compute with or index by.
fn has_our_types(test: &NodeTest) -> bool {
    deuteron_onnx::port_types(&test.model)
        .is_ok_and(|types| types.iter().all(|ty| matches!(ty, Some(1 | 6 | 7 | 9 | 10 | 16))))
}

/// A refusal without what differs from test to test: names, and numbers.
fn reason(why: &str) -> String {
    let mut parts = why.split('`');
    let mut text = parts.next().unwrap_or_default().to_string();
    while let (Some(_), Some(after)) = (parts.next(), parts.next()) {
        text.push_str("`..`");
        text.push_str(after);
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn node_tests_are_right_or_refused_for_a_reason() {
    let Some(tests) = tests() else {
        println!("warning: the onnx package is not installed: {TESTS} node tests are skipped");
        return;
    };
    let mut refused: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    let (mut wrong, mut right, mut ours, mut right_of_ours) = (Vec::new(), 0, 0, 0);
    for test in &tests {
        let is_ours = has_our_types(test);
        ours += usize::from(is_ours);
        match run(test) {
            Outcome::Right => {
                right += 1;
                right_of_ours += usize::from(is_ours);
            }
            Outcome::Wrong(why) => wrong.push(format!("{}: {why}", test.name)),
            Outcome::Refused(why) => refused.entry(reason(&why)).or_default().push(&test.name),
        }
    }
    println!("{} tests: {right} right, {} wrong; {right_of_ours} of {ours} of our types", tests.len(), wrong.len());
    let list: String = refused.iter().map(|(why, names)| format!("{why}\n    {}\n", names.join("\n    "))).collect();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/node_refusals.txt");
    if std::env::var_os("DEUTERON_BLESS").is_some() {
        std::fs::write(&path, &list).unwrap();
    }
    assert!(wrong.is_empty(), "{} are wrong:\n{}", wrong.len(), wrong.join("\n"));
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(stored, list, "the list of refusals changed: look at it, then DEUTERON_BLESS=1");
    let share = right_of_ours as f64 / ours as f64;
    assert!(share >= SHARE, "{right_of_ours} of {ours} tests of our types are right, {share:.3}");
    assert_eq!(tests.len(), TESTS, "another version of the package is installed");
}

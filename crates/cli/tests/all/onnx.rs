//! ONNX files: what flags mean for them, and results held against those of another program.

use std::io::Write;
use std::path::Path;
use std::process::Command;

use deuteron_testkit::Scratch;
use serde_json::Value;

use crate::support::Folder;

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn model(name: &str) -> String {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../onnx/tests/models");
    models.join(name).to_string_lossy().into_owned()
}

fn varint(into: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        into.push(value as u8 | 0x80);
        value >>= 7;
    }
    into.push(value as u8);
}

/// A `TensorProto` of f32 or i64 values.
fn tensor(name: &str, dims: &[u64], values: &[f64], is_float: bool) -> Vec<u8> {
    let raw: Vec<u8> = match is_float {
        true => values.iter().flat_map(|&value| (value as f32).to_le_bytes()).collect(),
        false => values.iter().flat_map(|&value| (value as i64).to_le_bytes()).collect(),
    };
    let mut file = Vec::new();
    for &size in dims {
        file.push(1 << 3);
        varint(&mut file, size);
    }
    file.extend([2 << 3, if is_float { 1 } else { 7 }]);
    for (field, bytes) in [(8, name.as_bytes()), (9, &raw[..])] {
        file.push(field << 3 | 2);
        varint(&mut file, bytes.len() as u64);
        file.extend(bytes);
    }
    file
}

/// A folder with the inputs of the stored record of a model, and with its outputs moved by `shift`.
fn data(name: &str, shift: f64) -> Scratch {
    let record: Value = serde_json::from_slice(&std::fs::read(model(&format!("{name}.json"))).unwrap()).unwrap();
    let numbers =
        |value: &Value| -> Vec<f64> { value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect() };
    let folder = Scratch::make();
    let write = |file: String, bytes: Vec<u8>| std::fs::write(folder.join(file), bytes).unwrap();
    let (batch, sequence) = (record["dims"]["batch"].as_u64().unwrap(), record["dims"]["sequence"].as_u64().unwrap());
    for (index, (name, values)) in record["inputs"].as_object().unwrap().iter().enumerate() {
        let values = numbers(values);
        let is_float = values.iter().any(|value| value.fract() != 0.0);
        let rest = values.len() as u64 / (batch * sequence);
        let dims = if rest == 1 { vec![batch, sequence] } else { vec![batch, sequence, rest] };
        write(format!("input_{index}.pb"), tensor(name, &dims, &values, is_float));
    }
    for (index, output) in record["outputs"].as_array().unwrap().iter().enumerate() {
        let dims: Vec<u64> = numbers(&output["shape"]).iter().map(|&size| size as u64).collect();
        let values: Vec<f64> = numbers(&output["values"]).iter().map(|value| value + shift).collect();
        write(format!("output_{index}.pb"), tensor("y", &dims, &values, true));
    }
    folder
}

/// A file is analysed without a flag, and what was assumed is said.
#[test]
fn a_file_is_analysed_at_first_try() {
    let folder = Folder::new();
    let output = folder.run(&["analyze", &model("plain_gpt_13.onnx"), "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let analysis: Value = serde_json::from_slice(&output.stdout).unwrap();
    let notes = analysis["notes"].to_string();
    assert!(notes.contains("the file leaves `sequence` open: 8 is assumed (--dim sequence=N, --seq)"), "{notes}");
}

/// Every flag changes the graph or is refused.
#[test]
fn flags_convert_and_reshape_or_are_refused() {
    let folder = Folder::new();
    let file = model("plain_gpt_13.onnx");
    let run = |words: &[&str]| folder.run(&[&["analyze", &file, "--json"], words].concat());
    let plain = run(&["--seq", "8"]);
    let changed = run(&["--seq", "8", "--batch", "8", "--dtype", "bf16"]);
    assert_eq!(changed.status.code(), Some(0), "{}", text(&changed.stderr));
    assert_ne!(text(&plain.stdout), text(&changed.stdout));
    assert!(text(&changed.stdout).contains("bf16"));
    let refused: [(&[&str], &str); 4] = [
        (&["--dtype", "bogus"], "unknown dtype `bogus`"),
        (&["--dtype", "i8"], "--dtype must be f32, f16 or bf16"),
        (&["--dim", "nosuch=3"], "the file has no dimension `nosuch`; its open dimensions are batch, sequence"),
        (&["--batch", "0"], "--batch must be at least 1"),
    ];
    for (words, message) in refused {
        let output = run(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(text(&output.stderr).contains(message), "{words:?} said {}", text(&output.stderr));
    }
}

/// `fuse` runs the file's own weights: on the inputs of the record it gives what ONNX Runtime gave, and no other results.
#[test]
fn results_are_held_against_given_ones() {
    let folder = Folder::new();
    let file = model("plain_gpt_13.onnx");
    let fuse = |given: &str| folder.run(&["fuse", &file, "--no-learn", "--inputs", given, "--outputs", given]);
    let right = data("plain_gpt_13", 0.0);
    let output = fuse(right.to_str().unwrap());
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}{}", text(&output.stderr));
    assert!(said.contains("Agrees with the results in"), "{said}");
    let wrong = data("plain_gpt_13", 0.25);
    let output = fuse(wrong.to_str().unwrap());
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("DOES NOT AGREE with the results in"), "{}", text(&output.stdout));
}

/// A file that masks keys by adding the smallest `f32`: every element has a bound, and results that are shifted do not agree.
#[test]
fn a_masked_model_is_checked() {
    let folder = Folder::new();
    for name in ["gpt2_legacy_17", "llama_legacy_17"] {
        let file = model(&format!("{name}.onnx"));
        let fuse = |given: &str| {
            let output = folder.run(&["fuse", &file, "--no-learn", "--json", "--inputs", given, "--outputs", given]);
            let report: Value = serde_json::from_slice(&output.stdout).unwrap();
            (output.status.code(), report)
        };
        let (code, report) = fuse(data(name, 0.0).to_str().unwrap());
        assert_eq!((code, &report["verified"]), (Some(0), &Value::Bool(true)), "{name}");
        assert!(report["bound"].as_f64().unwrap() < 1e-3 && report["worst_ratio"].as_f64().unwrap() > 0.0, "{name}");
        let coverage = &report["coverage"];
        assert!(coverage["elements"].as_u64().unwrap() > 100 && coverage["without_bound"] == 0, "{name}: {coverage}");
        for shift in [1e6, 0.01] {
            let (code, report) = fuse(data(name, shift).to_str().unwrap());
            let worst = &report["agreements"][0]["worst"];
            assert_eq!((code, &report["verified"]), (Some(1), &Value::Bool(true)), "{name} {shift}: {worst}");
            assert!(worst["difference"].as_f64() > worst["allowed"].as_f64(), "{name} {shift}: {worst}");
        }
    }
}

/// Whether Python has ONNX Runtime. Without it a test is skipped, and says so.
fn has_onnxruntime(test: &str) -> bool {
    let python = std::env::var_os("DEUTERON_PYTHON").unwrap_or("python3".into());
    let found = Command::new(&python).args(["-c", "import numpy, onnxruntime"]).output();
    let has = found.is_ok_and(|output| output.status.success());
    if !has {
        // Past the capture of the test harness: a skipped test must not look like one that ran.
        let _ = writeln!(std::io::stderr(), "skipped: needs onnxruntime: {test}");
    }
    has
}

/// Sequences of different lengths, padded on the left: rows whose keys are all masked agree as well, and `fuse` says that they are hardly checked.
#[test]
fn a_model_agrees_with_onnxruntime_behind_padding() {
    if !has_onnxruntime("a_model_agrees_with_onnxruntime_behind_padding") {
        return;
    }
    let (folder, file, inputs) = (Folder::new(), model("gpt2_legacy_17.onnx"), Scratch::make());
    let ids: Vec<f64> = (0..14).map(|token| f64::from(token * 5 % 29)).collect();
    let mask: Vec<f64> = (0..14).map(|at| f64::from(!(7..10).contains(&at))).collect();
    for (index, (name, values)) in [("input_ids", ids), ("attention_mask", mask)].iter().enumerate() {
        std::fs::write(inputs.join(format!("input_{index}.pb")), tensor(name, &[2, 7], values, false)).unwrap();
    }
    let path = inputs.to_str().unwrap();
    let output = folder.run(&["fuse", &file, "--no-learn", "--json", "--inputs", path, "--against", "onnxruntime"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", report["agreements"]);
    let (agreement, coverage) = (&report["agreements"][0], &report["coverage"]);
    assert!(agreement["worst"]["difference"].as_f64().unwrap() < 1e-4, "{agreement}");
    assert!(coverage["without_bound"] == 0 && coverage["loose"].as_u64().unwrap() > 0, "{coverage}");
    let said = text(&folder.run(&["fuse", &file, "--no-learn", "--inputs", path]).stdout);
    assert!(said.contains("elements have a bound above the largest value of their output"), "{said}");
}

/// A protobuf field of bytes.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut message = vec![number << 3 | 2];
    varint(&mut message, bytes.len() as u64);
    [message, bytes.to_vec()].concat()
}

/// An input or output: its name, ONNX's number of its type, its sizes.
fn port(name: &str, element: u8, dims: &[u8]) -> Vec<u8> {
    let shape: Vec<u8> = dims.iter().flat_map(|&size| field(1, &[1 << 3, size])).collect();
    let kind = [vec![1 << 3, element], field(2, &shape)].concat();
    [field(1, name.as_bytes()), field(2, &field(1, &kind))].concat()
}

/// A model whose output is its input as floats: the attribute `to` is 1, and has type 2, an integer, in field 20.
fn cast(element: u8) -> Vec<u8> {
    let attribute = [field(1, b"to"), vec![3 << 3, 1, 0xa0, 1, 2]].concat();
    let node = [field(1, b"x"), field(2, b"y"), field(4, b"Cast"), field(5, &attribute)].concat();
    let graph = [
        field(1, &node),
        field(2, b"cast"),
        field(11, &port("x", element, &[3, 64])),
        field(12, &port("y", 1, &[3, 64])),
    ];
    [vec![1 << 3, 8], field(7, &graph.concat()), field(8, &[2 << 3, 17])].concat()
}

/// Random integers are values of the file's type, so that another program is given the same ones.
#[test]
fn random_inputs_are_within_the_file_s_type() {
    if !has_onnxruntime("random_inputs_are_within_the_file_s_type") {
        return;
    }
    let folder = Folder::new();
    // u8, i8, u16, i16, i32, i64, bool.
    for element in [2, 3, 4, 5, 6, 7, 9] {
        let file = folder.write("cast.onnx", &cast(element));
        let output = folder.run(&["fuse", &file, "--no-learn", "--json", "--against", "onnxruntime"]);
        let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        assert_eq!(output.status.code(), Some(0), "{element}: {}{}", report["agreements"], text(&output.stderr));
        assert_eq!(report["agreements"][0]["worst"]["difference"], 0.0, "{element}");
    }
}

/// A quotient by what may be 0 has no bound: nothing of it is checked, so it is not verified.
#[test]
fn a_result_without_bounds_is_not_verified() {
    let folder = Folder::new();
    let whole = folder
        .write("whole.txt", "x = input f32[4,64] ; s = row_sum x ; d = sub s s ; z = add d 1e-9 ; y = div x z ; out y");
    let output = folder.run(&["fuse", &whole, "--no-learn"]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}{}", text(&output.stderr));
    assert!(said.contains("NOT VERIFIED against f64: no element of output y has a bound."), "{said}");
    assert!(said.contains("NOT VERIFIED: an output has no error bound.") && !said.contains("WRONG"), "{said}");
    let report: Value = serde_json::from_slice(&folder.run(&["fuse", &whole, "--no-learn", "--json"]).stdout).unwrap();
    assert_eq!((&report["verified"], &report["bound"]), (&Value::Bool(false), &Value::Null));
    assert_eq!(report["coverage"]["unchecked_outputs"], serde_json::json!(["y"]));
}

/// Every row of a whole model in int8 hangs on roundings that may go either way.
#[test]
fn a_result_with_wide_bounds_is_hardly_checked() {
    let folder = Folder::new();
    let output = folder.run(&["fuse", "box", "--dtype", "int8", "--seq", "8", "--no-learn"]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}{}", text(&output.stderr));
    assert!(said.contains("HARDLY CHECKED against f64") && !said.contains("WRONG"), "{said}");
    assert!(said.contains("but the error bounds are too wide to verify the results."), "{said}");
}

#[test]
fn data_that_cannot_be_used_is_refused() {
    let folder = Folder::new();
    let file = model("plain_gpt_13.onnx");
    let data = data("plain_gpt_13", 0.0);
    let path = data.to_str().unwrap();
    let broken = folder.write("x.npz", "PK");
    let refused: [(&[&str], &str); 4] = [
        (&["fuse", "norm_act", "--inputs", path], "--inputs is for .onnx files"),
        (&["fuse", &file, "--inputs", &broken], "numpy.savez"),
        (&["fuse", &file, "--outputs", path], "--inputs"),
        (&["fuse", &file, "--against", "other"], "--against: expected onnxruntime, got `other`"),
    ];
    for (words, message) in refused {
        let output = folder.run(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(text(&output.stderr).contains(message), "{words:?} said {}", text(&output.stderr));
    }
}

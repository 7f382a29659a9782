//! ONNX files: what flags mean for them, and results held against those of another program.

use std::path::Path;

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

/// A folder with the inputs of the stored record of `plain_gpt_13`, and with its outputs moved by `shift`.
fn data(shift: f64) -> Scratch {
    let record: Value = serde_json::from_slice(&std::fs::read(model("plain_gpt_13.json")).unwrap()).unwrap();
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
    let right = data(0.0);
    let output = fuse(right.to_str().unwrap());
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}{}", text(&output.stderr));
    assert!(said.contains("Agrees with the results in"), "{said}");
    let wrong = data(0.25);
    let output = fuse(wrong.to_str().unwrap());
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("DOES NOT AGREE with the results in"), "{}", text(&output.stdout));
}

#[test]
fn data_that_cannot_be_used_is_refused() {
    let folder = Folder::new();
    let file = model("plain_gpt_13.onnx");
    let data = data(0.0);
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

//! Measured launch shapes as a person hands them in and gets them back. No GPU is needed for it, only NVRTC for one test.

use std::path::Path;
use std::process::Output;

use deuteron::cuda::{Arch, CudaCatalog, CudaTarget, RowConfig, Tuning};
use deuteron::tune::launch_shapes;
use deuteron::{Dtype, FusedOp, Machine, Strategy, Target};
use serde_json::Value;

use crate::support::Folder;

/// The key of the only kernel of an op on an H200, and its launch shapes.
fn shapes(op: &str, rows: usize, cols: usize, dtype: Dtype) -> (String, Vec<RowConfig>) {
    let op = FusedOp::find(op).unwrap();
    let graph = op.graph(&op.operand_types(rows, cols, dtype)).unwrap();
    let machine = Machine::profile("h200").unwrap();
    let target = Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) };
    let cuda = CudaTarget::new(Arch::Sm90a, 132);
    launch_shapes(&graph, Strategy::Fused, target, &cuda).unwrap().swap_remove(0)
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).to_string()
}

#[test]
fn a_kernel_is_printed_with_the_launch_shape_of_the_file() {
    let folder = Folder::new();
    let (key, configs) = shapes("norm_act", 4096, 768, Dtype::Bf16);
    let words = ["kernel", "norm_act", "--rows", "4096", "--dtype", "bf16", "--device", "sm_90a", "--json", "--tuning"];
    let printed = |file: &str| {
        let output = folder.run_with_nvrtc(&[&words[..], &[file]].concat());
        if text(&output).contains("nvidia-cuda-nvrtc") {
            eprintln!("skipped: needs NVRTC: a_kernel_is_printed_with_the_launch_shape_of_the_file");
            return None;
        }
        assert!(output.status.success(), "{}", text(&output));
        let kernels: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(kernels[0]["key"], key.as_str());
        Some(kernels[0]["config"].as_str().unwrap().to_string())
    };
    let Some(untuned) = printed("none") else { return };
    assert_eq!(untuned, configs[0].to_string());
    for config in &configs[1..] {
        let mut tuning = Tuning::default();
        tuning.insert(&key, config.clone());
        let file = folder.write("tuning.txt", &tuning.to_string());
        assert_eq!(printed(&file), Some(config.to_string()));
        assert_eq!(std::fs::read_to_string(&file).unwrap(), tuning.to_string(), "a frozen file is not written");
    }
    // Of a kernel with other columns nothing is known.
    let mut other = Tuning::default();
    other.insert(&shapes("norm_act", 4096, 1024, Dtype::Bf16).0, configs[1].clone());
    assert_eq!(printed(&folder.write("other.txt", &other.to_string())), Some(untuned));
}

#[test]
fn bad_files_and_devices_without_launch_shapes_exit_with_2() {
    let folder = Folder::new();
    let bad = folder.write("bad.txt", "\nkey policy=registers vector=3\n");
    let missing = folder.path("missing.txt");
    let cases: [(&[&str], &[&str]); 6] = [
        (&["bench", "add_act", "--tuning", &bad], &["bad.txt", "line 2", "delete the line", "--tuning none"]),
        (&["fuse", "add_act", "--tuning", &bad], &["line 2"]),
        (&["check", "--cases", "1", "--tuning", &bad], &["line 2"]),
        (&["kernel", "add_act", "--device", "sm_90a", "--tuning", &bad], &["line 2"]),
        (&["kernel", "add_act", "--tuning", &missing], &["missing.txt", "expected a file of launch shapes"]),
        (&["bench", "add_act", "--rows", "4", "--device", "cpu", "--tune"], &["expected a GPU"]),
    ];
    for (arguments, words) in cases {
        let output = folder.run_with_nvrtc(arguments);
        let message = text(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
        assert!(words.iter().all(|word| message.contains(word)), "{arguments:?} should say {words:?}, said\n{message}");
    }
    assert!(!Path::new(&missing).exists());
}

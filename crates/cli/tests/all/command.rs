//! The command as a person or a script uses it: output, JSON fields, exit codes.

use std::process::Output;

use serde_json::Value;

use crate::support::{Folder, printed};

fn deuteron(arguments: &[&str]) -> Output {
    Folder::new().run(arguments)
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&printed(deuteron(arguments))).unwrap()
}

fn has_fields(value: &Value, fields: &[&str]) {
    for field in fields {
        assert!(!value[field].is_null(), "{field} is missing in {value}");
    }
}

#[test]
fn fuse_reports_what_the_issue_of_fusion_is_worth() {
    for extra in [&[][..], &["--backward"][..]] {
        let words = [&["fuse", "gpt2-block", "--seq", "32", "--json"][..], extra].concat();
        let report = json(&words);
        has_fields(&report, &["graph", "device", "verified", "max_error", "bound", "speedup", "groups", "refusals"]);
        assert_eq!(report["graph"], "gpt2-block");
        assert_eq!(report["verified"], true);
        assert!(report["max_error"].as_f64().unwrap() > 0.0, "an error of exactly 0 compares nothing");
        assert!(report["bound"].as_f64() > report["max_error"].as_f64());
        for plan in ["unfused", "fused"] {
            has_fields(&report[plan], &["kernels", "bytes", "ms", "spread"]);
        }
        assert!(report["fused"]["kernels"].as_u64() < report["unfused"]["kernels"].as_u64());
        assert!(report["fused"]["bytes"].as_u64() < report["unfused"]["bytes"].as_u64());
        has_fields(&report["groups"][0], &["name", "ops", "bytes", "ms"]);
    }
    let text = deuteron(&["fuse", "norm_act", "--rows", "1500", "--cols", "765", "--dtype", "bf16", "--all"]);
    let text = String::from_utf8_lossy(&text.stdout).to_string();
    for word in ["layer_norm + gelu", "unfused", "fused", "Verified against f64", "fewer bytes"] {
        assert!(text.contains(word), "{word} is missing in\n{text}");
    }
}

#[test]
fn fuse_takes_a_text_file() {
    let text = "x = input f32[3000,517] ; y = silu x ; s, inv = rms_norm y w[517] ; out s";
    let folder = Folder::new();
    let file = folder.write("graph.txt", text);
    assert_eq!(json(&["fuse", &file, "--json"])["fused"]["kernels"], 1);
    assert_eq!(json(&["fuse", &file, "--json", "--backward"])["verified"], true);
}

#[test]
fn the_catalogue_is_listed() {
    let ops = json(&["ops", "--json"]);
    let ops = ops.as_array().unwrap();
    assert_eq!(ops.len(), 29);
    for op in ops {
        has_fields(op, &["name", "formula", "forward", "backward", "cpu", "cuda", "dtypes"]);
    }
}

#[test]
fn bench_gives_a_row_a_size() {
    let rows = json(&["bench", "add_act", "softmax", "--rows", "3,17", "--cols", "65", "--json"]);
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 4);
    let fields = [
        "op",
        "direction",
        "rows",
        "cols",
        "dtype",
        "device",
        "fused_us",
        "unfused_us",
        "speedup",
        "bytes_fused",
        "bytes_unfused",
        "gbps",
        "copy_gbps",
        "fraction_of_copy",
    ];
    rows.iter().for_each(|row| has_fields(row, &fields));
    let row = &json(&["bench", "norm_act", "--elements", "5000", "--backward", "--dtype", "f16", "--json"])[0];
    assert_eq!((row["direction"].as_str(), row["dtype"].as_str()), (Some("backward"), Some("f16")));
}

#[test]
fn kernels_are_printed() {
    let kernels = json(&["kernel", "norm_act", "--json"]);
    has_fields(&kernels[0], &["name", "kind", "bytes_read", "bytes_written", "source"]);
    assert!(kernels[0]["source"].as_str().unwrap().contains("gelu_tanh"));
    let text = deuteron(&["kernel", "gpt2", "--backward", "--text", "--seq", "8"]).stdout;
    let folder = Folder::new();
    let file = folder.write("printed.txt", &String::from_utf8(text).unwrap());
    assert!(deuteron(&["kernel", &file]).status.success(), "what is printed can be read again");
}

#[test]
fn kernels_for_a_gpu_need_no_gpu() {
    let words = ["kernel", "norm_act", "--dtype", "bf16", "--json", "--device"];
    let with_nvrtc = |device: &str| Folder::new().run_with_nvrtc(&[&words[..], &[device]].concat());
    for device in ["sm_80", "sm_90a", "h200"] {
        let output = with_nvrtc(device);
        if output.status.code() == Some(2) {
            // Without NVRTC the answer is where it was looked for, and how to get it.
            let text = String::from_utf8_lossy(&output.stderr).to_string();
            assert!(text.contains("nvidia-cuda-nvrtc") && text.contains("looked in"), "{text}");
            continue;
        }
        let kernels: Value = serde_json::from_slice(&output.stdout).unwrap();
        let fields =
            ["registers", "predicted_registers", "spill_bytes", "shared_bytes", "occupancy", "config", "source"];
        has_fields(&kernels[0], &fields);
        assert_eq!(kernels[0]["spill_bytes"], 0, "{device}");
        assert!(
            kernels[0]["registers"].as_u64() > Some(15) && kernels[0]["occupancy"].as_f64() > Some(0.2),
            "{device}"
        );
        assert!(kernels[0]["source"].as_str().unwrap().contains("__global__"));
    }
    let unknown = with_nvrtc("sm_81");
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("expected one of sm_75"));
}

#[test]
fn plans_run_once_for_a_profiler() {
    let rows = json(&["bench", "norm_act", "--rows", "33", "--cols", "65", "--once", "--json", "--device", "cpu"]);
    let plans = &rows[0]["plans"];
    assert_eq!((plans[0]["plan"].as_str(), plans[1]["plan"].as_str()), (Some("unfused"), Some("fused")));
    let kernels = |plan: usize| plans[plan]["kernels"].as_array().unwrap().len();
    assert_eq!((kernels(0), kernels(1)), (2, 1));
    has_fields(&plans[1]["kernels"][0], &["name", "kind", "bytes_read", "bytes_written", "predicted_us", "launches"]);
}

#[test]
fn a_plan_runs_alone_for_a_profiler() {
    let sizes = ["--rows", "64", "--seq", "32", "--head", "16", "--cols", "64", "--dtype", "bf16", "--device", "cpu"];
    let kernels = |op: &str, plan: &str| -> usize {
        let rows = json(&[&["bench", op, "--once", "--plan", plan, "--json"][..], &sizes].concat());
        let plans = rows[0]["plans"].as_array().unwrap();
        let names: Vec<_> = plans.iter().map(|own| own["plan"].as_str().unwrap()).collect();
        assert_eq!(names, plan.split(',').collect::<Vec<_>>());
        plans[0]["kernels"].as_array().unwrap().len()
    };
    // Unfused, heads are put together by a kernel of its own.
    for (op, counts) in [("attention_add_norm", [7, 4, 1]), ("attention_block", [8, 5, 1])] {
        assert_eq!(["eager", "unfused", "fused"].map(|plan| kernels(op, plan)), counts, "{op}");
    }
    assert_eq!(kernels("attention_block", "fused,eager"), 1);
    for (words, message) in [
        (&["--once", "--plan", "naive"][..], "expected eager, unfused or fused"),
        (&["--plan", "eager"], "--once"),
        (&["--once", "--ladder", "--plan", "eager"], "--ladder"),
    ] {
        let refused = deuteron(&[&["bench", "attention_block"][..], words, &sizes].concat());
        assert_eq!(refused.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&refused.stderr).contains(message), "{words:?}: {refused:?}");
    }
}

#[test]
fn a_ladder_ends_with_the_generated_kernel() {
    let ladder = |op: &str| {
        let rungs = json(&["bench", op, "--ladder", "--rows", "64", "--cols", "64", "--json", "--device", "cpu"]);
        let rungs = rungs.as_array().unwrap().clone();
        assert!(rungs.len() > 1 && rungs.iter().all(|rung| rung["verified"] == true), "{rungs:?}");
        let once =
            json(&["bench", op, "--ladder", "--once", "--rows", "17", "--cols", "64", "--json", "--device", "cpu"]);
        let once = once.as_array().unwrap();
        assert!(once.iter().all(|rung| rung["verified"] == true), "{once:?}");
        assert!(once.iter().map(|rung| &rung["rung"]).eq(rungs.iter().map(|rung| &rung["rung"])), "{once:?}");
        rungs
    };
    let last = |rungs: &[Value]| rungs[rungs.len() - 1]["rung"].as_str().map(str::to_string);
    let rungs = ladder("add_act");
    assert_eq!(last(&rungs).as_deref(), Some("fused"));
    assert!(rungs.iter().all(|rung| rung["dtype"] == "f32" && rung["tflops"].is_null()), "{rungs:?}");
    // Each primitive a kernel, one element at a time, by vectors from narrow to wide, then by all threads; then one kernel.
    let rungs = ladder("softmax");
    let names: Vec<&str> = rungs.iter().map(|rung| rung["rung"].as_str().unwrap()).collect();
    assert!(names.len() > 3 && names[0] == "scalar" && names.ends_with(&["threads", "fused"]), "{names:?}");
    assert_eq!(rungs[0]["about"], "one kernel per primitive, one element at a time, one thread");
    let kernels: Vec<u64> = rungs.iter().map(|rung| rung["kernels"].as_u64().unwrap()).collect();
    let (naive, fused) = kernels.split_at(kernels.len() - 1);
    assert!(naive.iter().all(|&count| count > 2) && fused == [1], "{kernels:?}");
    let rungs = ladder("attention");
    assert_eq!(last(&rungs).as_deref(), Some("fused"));
    assert!(rungs.iter().all(|rung| rung["dtype"] == "bf16" && rung["tflops"].as_f64() > Some(0.0)), "{rungs:?}");
}

/// Reading and writing 1.1 Mi elements is too much for the caches; the rung before has ordinary stores.
#[test]
fn a_rung_with_stores_for_large_results_is_named_after_them() {
    for (threads, name) in [("2", "prefetched_stores"), ("8", "streaming_stores")] {
        let size = ["--rows", "1100", "--cols", "1024", "--device", "cpu", "--threads", threads, "--once", "--json"];
        let rungs = json(&[&["bench", "softmax", "--ladder"][..], &size].concat());
        let names: Vec<&str> = rungs.as_array().unwrap().iter().map(|rung| rung["rung"].as_str().unwrap()).collect();
        // Without machine code every large result streams.
        let is_named = names.ends_with(&["fused", name]) || names.ends_with(&["fused", "streaming_stores"]);
        assert!(is_named, "{threads} threads: {names:?}");
        assert!(rungs.as_array().unwrap().iter().all(|rung| rung["verified"] == true), "{rungs}");
    }
}

#[test]
fn a_ladder_of_a_matmul_on_a_cpu_ends_with_one_kernel() {
    let bench = |words: &[&str]| deuteron(&[&["bench", "matmul", "--ladder", "--device", "cpu"][..], words].concat());
    let size = ["--rows", "70", "--weights", "136x72", "--json"];
    let rungs: Value = serde_json::from_slice(&bench(&size).stdout).unwrap();
    let rungs = rungs.as_array().unwrap();
    let names: Vec<&str> = rungs.iter().map(|rung| rung["rung"].as_str().unwrap()).collect();
    assert_eq!(names, ["l1_scalar", "l2_tiled", "l3_vectors", "l4_packed", "l5_threads", "l6_fused"]);
    assert!(rungs.iter().all(|rung| rung["verified"] == true && rung["us"].as_f64() > Some(0.0)), "{rungs:?}");
    assert_eq!(rungs[0]["variant"], "2 kernels, 1 thread");
    assert!(rungs[5]["variant"].as_str().unwrap().starts_with("1 kernel, ") && rungs[5]["chosen"] == true, "{rungs:?}");
    let once: Value = serde_json::from_slice(&bench(&[&size[..], &["--once"]].concat()).stdout).unwrap();
    assert!(once.as_array().unwrap().iter().map(|rung| &rung["rung"]).eq(rungs.iter().map(|rung| &rung["rung"])));
    let refused = bench(&["--rows", "64", "--dtype", "bf16"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("f32 on a CPU"), "{refused:?}");
    // Its variants are kernels of a GPU.
    let variants = deuteron(&["bench", "matmul", "--rows", "64", "--device", "cpu"]);
    assert!(String::from_utf8_lossy(&variants.stderr).contains("expected a GPU"), "{variants:?}");
}

#[test]
fn ladders_of_launches_end_with_one() {
    let kernels = |op: &str| -> Vec<u64> {
        let rungs = json(&["bench", op, "--ladder", "--rows", "64", "--cols", "64", "--json", "--device", "cpu"]);
        let rungs = rungs.as_array().unwrap();
        assert!(rungs.iter().all(|rung| rung["verified"] == true && rung["dtype"] == "bf16"), "{rungs:?}");
        // A CPU has no recordings in which a driver could count.
        assert!(rungs.iter().all(|rung| rung["launches"].is_null() && rung["other_nodes"].is_null()), "{rungs:?}");
        // Before them every primitive is a kernel.
        let naive = rungs.iter().position(|rung| rung["rung"] == "threads").unwrap() + 1;
        assert!(rungs[..naive].iter().all(|rung| rung["kernels"].as_u64() > Some(10)), "{rungs:?}");
        rungs[naive..].iter().map(|rung| rung["kernels"].as_u64().unwrap()).collect()
    };
    assert_eq!(kernels("attention_add_norm"), [3, 2, 1]);
    assert_eq!(kernels("attention_block"), [4, 3, 1]);
}

#[test]
fn one_launch_is_measured_against_several() {
    let sizes = ["--rows", "64,96", "--seq", "32", "--cols", "64", "--dtype", "f32"];
    let rows = json(&[&["bench", "--crossover", "--json", "--device", "cpu"][..], &sizes].concat());
    let rows = rows.as_array().unwrap();
    let found: Vec<_> = rows.iter().map(|row| (row["op"].as_str().unwrap(), row["batch"].as_u64().unwrap())).collect();
    let both = |batch| [("attention_add_norm", batch), ("attention_block", batch)];
    assert_eq!(found, [both(2)[0], both(3)[0], both(2)[1], both(3)[1]]);
    for row in rows {
        assert!(row["apart_kernels"].as_u64() > Some(1) && row["one_kernels"].as_u64() == Some(1), "{row}");
        for field in ["apart_us", "apart_predicted_us", "one_us", "one_predicted_us"] {
            assert!(row[field].as_f64() > Some(0.0), "{field} of {row}");
        }
        // What the plan takes is what is predicted to be faster.
        let faster = row["one_predicted_us"].as_f64() <= row["apart_predicted_us"].as_f64();
        assert!(row["takes_one"].as_bool() == Some(faster) && row["over_best"].as_f64() >= Some(1.0), "{row}");
    }
    let refused = deuteron(&["bench", "softmax", "--crossover", "--rows", "64", "--device", "cpu"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("expected attention_add_norm or attention_block"));
}

#[test]
fn the_catalogue_is_checked() {
    let report = json(&["check", "--catalog", "--small", "--json", "--device", "cpu"]);
    assert_eq!(report["failures"], 0, "{report}");
    assert!(report["cases"].as_u64() > Some(400));
    let report = json(&["check", "--catalog", "--small", "--op", "attention,softmax", "--json", "--device", "cpu"]);
    let names: Vec<_> = report["ops"].as_object().unwrap().keys().cloned().collect();
    assert_eq!((names, report["failures"].as_u64()), (vec!["attention".into(), "softmax".into()], Some(0)), "{report}");
    let report = json(&["check", "--catalog", "--repeat", "3", "--json", "--device", "cpu"]);
    assert_eq!((report["failures"].as_u64(), report["repeats"].as_u64()), (Some(0), Some(3)), "{report}");
}

#[test]
fn check_runs_random_graphs() {
    let report = json(&["check", "--cases", "60", "--seed", "9", "--json"]);
    has_fields(&report, &["cases", "failures", "worst_ratio", "op_counts"]);
    assert_eq!((report["cases"].as_u64(), report["failures"].as_u64()), (Some(60), Some(0)), "{report}");
    let small = json(&["check", "--cases", "6", "--seed", "9", "--elements", "512", "--json"]);
    assert_eq!((small["elements"].as_u64(), report["elements"].as_u64()), (Some(512), Some(131_072)), "{small}");
    assert_eq!(small["failures"].as_u64(), Some(0), "{small}");
}

#[test]
fn bad_usage_and_bad_input_exit_with_2() {
    let folder = Folder::new();
    let malformed = folder.write("malformed.txt", "x = input f32[2,2]\ny = add x z\nout y");
    let binary = folder.write("empty.txt", "");
    let cases: [(&[&str], &str); 15] = [
        (&["frobnicate"], "unrecognized subcommand"),
        (&["check", "--elements", "511"], "expected a number from 512 to 131072"),
        (&["fuse"], "<GRAPH>"),
        (&["fuse", "gpt3"], "neither a file nor a known graph"),
        (&["fuse", "gpt2", "--seq", "4096"], "seq must be from 1 to 1024, got 4096"),
        (&["fuse", "gpt2", "--seq", "0"], "seq must be from 1 to 1024, got 0"),
        (&["fuse", "gpt2", "--dtype", "i8"], "unknown weights `i8`; expected f32, f16, bf16 or int8"),
        (&["fuse", "gpt2", "--dtype", "f99"], "unknown weights `f99`"),
        (&["fuse", "norm_act", "--device", "cuda:99"], "device `cuda:99`"),
        (&["fuse", "norm_act", "--threads", "0"], "--threads must be from 1"),
        (&["fuse", "norm_act", "--rows", "99999999999", "--cols", "99999999999"], "too large"),
        (&["fuse", "norm_quantize", "--backward"], "no backward"),
        (&["fuse", &malformed], "line 2, column 11: unknown value `z`"),
        (&["fuse", &binary], "no outputs"),
        (&["bench", "nothing"], "unknown op `nothing`"),
    ];
    for (arguments, message) in cases {
        let output = deuteron(arguments);
        let text = String::from_utf8_lossy(&output.stderr).to_string();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
        assert!(text.contains(message), "{arguments:?} should say `{message}`, said:\n{text}");
        assert!(output.stdout.is_empty() && !text.contains("panicked"), "{arguments:?}: {text}");
    }
}

#[test]
fn help_names_every_command() {
    let text = String::from_utf8(deuteron(&["--help"]).stdout).unwrap();
    for word in ["analyze", "explain", "fuse", "generate", "bench", "ops", "kernel", "check", "doctor", "Exit codes"] {
        assert!(text.contains(word), "{word} is missing in\n{text}");
    }
}

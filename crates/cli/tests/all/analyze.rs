//! `analyze` and `explain` as a person or a script uses them.

use std::path::Path;

use deuteron::report::{Analysis, parse};

use crate::support::{Folder, printed};

fn analyzed(folder: &Folder, arguments: &[&str]) -> Analysis {
    parse(&printed(folder.run(&[&["analyze"][..], arguments, &["--json"][..]].concat()))).unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

const GPT2: [&str; 7] = ["gpt2", "--device", "h200", "--batch", "8", "--dtype", "bf16"];

#[test]
fn gpt2_on_an_h200_is_planned_at_once_and_optimally() {
    let folder = Folder::new();
    let analysis = analyzed(&folder, &GPT2);
    assert!(analysis.optimal && analysis.search.text.starts_with("optimal among"), "{}", analysis.search.text);
    let plans = &analysis.plans;
    let greedy = plans.greedy.as_ref().unwrap();
    let kernels = [&plans.naive, &plans.eager, &plans.unfused, greedy].map(|plan| plan.kernels);
    assert!(kernels.is_sorted_by(|a, b| a >= b), "{kernels:?}");
    // Where a launch is cheap, a kernel more may be quicker.
    assert!(plans.chosen.kernels < plans.unfused.kernels, "{}", plans.chosen.kernels);
    assert!(plans.chosen.us <= greedy.us && plans.chosen.us < plans.unfused.us && plans.unfused.us < plans.eager.us);
    // The debug build of a machine that is busy with other work is slower than the bar of half a second; a search of all states takes minutes.
    assert!(analysis.planning_ms < 30_000.0, "{}", analysis.planning_ms);
    // Twelve equal layers: fusions are listed once, with their number.
    let attention = analysis.candidates.iter().find(|one| one.ops == ["scores", "mask", "softmax", "product"]).unwrap();
    assert_eq!((attention.count, attention.verdict.as_str(), attention.chosen), (12, "FUSE", true));
    let refused = analysis.candidates.iter().find(|one| one.ops == ["layer_norm", "linear"]).unwrap();
    // One launch could make the rows for its own matmul, and two are faster: no search takes it, and it cannot be forced.
    assert_eq!((refused.chosen, refused.reason.code.as_str()), (false, "E-PLAN-017"));
    assert!(!refused.forceable && refused.worth_us.is_none(), "{:?}", refused.reason);
    for one in &analysis.candidates {
        let sum = 0.4 * one.criteria.bandwidth
            + 0.2 * one.criteria.launch
            + 0.2 * one.criteria.registers
            + 0.1 * one.criteria.complexity
            + 0.1 * one.criteria.maintainability;
        assert!((sum - one.score).abs() < 1e-9, "{:?}", one.ops);
    }
    assert!(analysis.machine.numbers.iter().all(|number| !number.origin.is_empty()));
}

#[test]
fn decoding_turns_the_verdict_on_norm_and_product() {
    let folder = Folder::new();
    let analysis = analyzed(&folder, &["gpt2-block", "--device", "h200", "--seq", "1", "--dtype", "bf16"]);
    let fused = analysis.candidates.iter().find(|one| one.ops == ["layer_norm", "linear"]).unwrap();
    assert!(fused.chosen && fused.reason.code == "OK" && fused.worth_us.unwrap() > 0.0, "{:?}", fused.reason);
    // No bytes worth speaking of are saved, so the score says no; a launch less decides. That is listed.
    assert!(
        fused.verdict == "DO NOT FUSE"
            && analysis.disagreements.iter().any(|one| one.text.contains("layer_norm + linear"))
    );
    let words = ["gpt2-block", "--device", "h200", "--dtype", "bf16", "--batch", "8", "--flip"];
    let flips = analyzed(&folder, &words).flips;
    let turns = flips.iter().find(|flip| flip.text.starts_with("layer_norm + linear") && flip.what == "sequence");
    let turns = turns.unwrap_or_else(|| panic!("{flips:?}"));
    assert!(turns.to.parse::<usize>().unwrap() <= 8, "8 sequences of at most 8 tokens are few rows: {}", turns.text);
}

#[test]
fn gradients_store_or_recompute_by_bytes() {
    let folder = Folder::new();
    let words = ["gpt2-block", "--device", "h200", "--dtype", "bf16", "--batch", "8", "--backward"];
    let decided = analyzed(&folder, &words);
    let recompute = decided.recompute.unwrap();
    assert!(recompute.kept_bytes < recompute.kept_bytes_before && recompute.us < recompute.us_before);
    assert!(recompute.peak_bytes < recompute.peak_bytes_before, "no matrix of scores is kept");
    let kept = analyzed(&folder, &[&words[..], &["--keep-all"]].concat());
    assert!(kept.recompute.is_none() && kept.plans.chosen.us > decided.plans.chosen.us);
    assert_eq!(kept.plans.unfused, decided.plans.unfused, "the baseline stores everything in both");
}

#[test]
fn pins_have_a_price() {
    let folder = Folder::new();
    let words = ["norm_act", "--device", "h200", "--rows", "8192", "--dtype", "bf16"];
    let free = analyzed(&folder, &words);
    let pinned = analyzed(&folder, &[&words[..], &["--forbid", "layer_norm,gelu"]].concat());
    assert_eq!((free.plans.chosen.kernels, pinned.plans.chosen.kernels), (1, 2));
    let price = pinned.plans.chosen.us - free.plans.chosen.us;
    assert!(price > 0.0 && (pinned.pins[0].price_us - price).abs() < 1e-6, "{:?}", pinned.pins);
    let forced = analyzed(&folder, &[&GPT2[..], &["--force", "gelu,linear", "--conceivable"]].concat());
    assert!(forced.pins[0].price_us > 0.0 && forced.pins[0].places == 12, "{:?}", forced.pins);
    // Before Hopper no launch makes the rows of its own matmul.
    let on_ampere = GPT2.map(|word| if word == "h200" { "a100" } else { word });
    let refused = folder.run(&[&["analyze"][..], &on_ampere, &["--force", "layer_norm,linear"]].concat());
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("E-PLAN-004"), "{}", text(&refused.stderr));
}

#[test]
fn an_opaque_operation_is_analysed_with_the_rest_and_never_run() {
    let folder = Folder::new();
    let graph = folder.write(
        "rotary.txt",
        "x = input f32[4096,64] ; a = relu x ; s = opaque a f32[4096,64] name=Rotary flops=1048576 elementwise
         y = add s x ; z = opaque y f32[4096,8] name=TopK bytes=4194304 flops=1 ; out z",
    );
    let analysis = analyzed(&folder, &[&graph]);
    let names: Vec<&str> = analysis.ops.iter().map(|op| op.name.as_str()).collect();
    assert_eq!(names, ["relu", "Rotary", "add", "TopK"]);
    assert_eq!(analysis.plans.chosen.kernels, 2, "an elementwise operation is fused, another one stands alone");
    assert_eq!(analysis.before.last().unwrap().cost.read + analysis.before.last().unwrap().cost.written, 4194304);
    assert!(analysis.notes.iter().any(|note| note.contains("Rotary, TopK")), "{:?}", analysis.notes);
    let run = folder.run(&["fuse", &graph]);
    assert_eq!(run.status.code(), Some(2));
    assert!(text(&run.stderr).contains("`Rotary` is opaque"), "{}", text(&run.stderr));
}

#[test]
fn a_report_is_one_page_that_holds_everything() {
    let folder = Folder::new();
    let (page, picture) = (folder.path("report.html"), folder.path("roofline.svg"));
    let output = folder.run(&["fuse", "norm_act", "--rows", "64", "--html", &page, "--svg", &picture]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let page = std::fs::read_to_string(page).unwrap();
    for word in ["layer_norm + gelu", "gelu_tanh", "Content-Security-Policy", "measured"] {
        assert!(page.contains(word), "{word} is missing");
    }
    assert!(!page.contains("http://") || page.matches("http://").count() == page.matches("http://www.w3.org").count());
    assert!(std::fs::read_to_string(picture).unwrap().starts_with("<svg"));
    assert!(
        !Path::new(&folder.path("settings/deuteron/machines/cpu.toml")).exists(),
        "only a calibration is stored there"
    );
}

#[test]
fn sources_for_a_gpu_name_their_operations() {
    let folder = Folder::new();
    let analysis = analyzed(&folder, &["norm_act", "--dtype", "bf16", "--device", "h200"]);
    let fused = analysis.after.iter().find(|kernel| kernel.name == "layer_norm + gelu").unwrap();
    let line = |text: &str| fused.source.iter().find(|line| line.text.contains(text)).unwrap();
    assert_eq!((line("__global__").op.as_str(), line("rsqrt1").op.as_str()), ("", "layer_norm"));
    assert_eq!((line("gelu_tanh1").op.as_str(), line("store<").op.as_str()), ("gelu", "gelu"));
    assert!(analysis.before.iter().all(|kernel| kernel.source.len() > 40 && kernel.measured_registers.is_none()));
}

#[test]
fn registers_are_compiled_where_that_is_asked_for() {
    let folder = Folder::new();
    let words = ["analyze", "norm_act", "--dtype", "bf16", "--compile", "--json", "--device"];
    let with_nvrtc = |device: &str| folder.run_with_nvrtc(&[&words[..], &[device]].concat());
    let refused = with_nvrtc("cpu");
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("--compile is for"), "{}", text(&refused.stderr));
    let output = with_nvrtc("h200");
    if output.status.code() == Some(2) {
        // Without NVRTC the answer is where it was looked for, and how to get it.
        assert!(text(&output.stderr).contains("nvidia-cuda-nvrtc"), "{}", text(&output.stderr));
        return;
    }
    let analysis = parse(&text(&output.stdout)).unwrap();
    for kernel in analysis.before.iter().chain(&analysis.after) {
        assert!(kernel.measured_registers > Some(15) && kernel.cost.registers > 15, "{}", kernel.name);
    }
}

#[test]
fn matmuls_say_how_they_fill_a_gpu() {
    let folder = Folder::new();
    let words = ["analyze", "gpt2-block", "--batch", "8", "--dtype", "bf16", "--device"];
    let said = |device: &str| {
        let output = folder.run(&[&words[..], &[device]].concat());
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        text(&output.stdout)
    };
    let hopper = said("h200");
    for word in ["How its matmuls fill the GPU", "wave efficiency", "wgmma", "at most 168", "128 x 192"] {
        assert!(hopper.contains(word), "{word}:\n{hopper}");
    }
    let ampere = said("a100");
    assert!(ampere.contains("cuBLASLt"), "{ampere}");
    let conceivable = |device: &str| text(&folder.run(&[&words[..], &[device, "--conceivable"]].concat()).stdout);
    assert!(conceivable("h200").contains("This version generates all of its kernels.\n"));
    assert!(conceivable("a100").contains("all of its kernels but: "));
    assert!(!said("cpu").contains("fill the GPU"));
}

#[test]
fn expectations_hold_or_exit_with_1() {
    let folder = Folder::new();
    let good = folder.write("good.txt", "# the norm takes the activation in\nfused: layer_norm, gelu\n");
    let bad = folder.write("bad.txt", "not fused: layer_norm, gelu\n");
    let wrong = folder.write("wrong.txt", "glued: layer_norm, gelu\n");
    let run = |file: &str| folder.run(&["analyze", "norm_act", "--expect", file]);
    assert_eq!(run(&good).status.code(), Some(0));
    let violated = run(&bad);
    assert_eq!(violated.status.code(), Some(1));
    assert!(
        text(&violated.stderr).contains("line 1: expected `not fused: layer_norm, gelu`"),
        "{}",
        text(&violated.stderr)
    );
    assert_eq!(run(&wrong).status.code(), Some(2));
}

#[test]
fn two_analyses_are_compared() {
    let folder = Folder::new();
    let words = ["analyze", "norm_act", "--device", "h200", "--dtype", "bf16"];
    let old = folder.run(&[&words[..], &["--rows", "8192", "--json"]].concat()).stdout;
    let old = folder.write("old.json", &text(&old));
    let same = folder.run(&[&words[..], &["--rows", "8192", "--diff", &old]].concat());
    assert_eq!(text(&same.stdout).trim(), "no difference");
    let other = folder.run(&[&words[..], &["--rows", "16384", "--diff", &old]].concat());
    assert!(text(&other.stdout).contains("chosen") && text(&other.stdout).contains('%'), "{}", text(&other.stdout));
    let malformed = folder.write("malformed.json", "{");
    let refused = folder.run(&[&words[..], &["--diff", &malformed]].concat());
    assert_eq!(refused.status.code(), Some(2));
}

#[test]
fn a_users_machine_file_is_a_device() {
    let folder = Folder::new();
    let slow = "name = \"slow\"\nbased_on = \"h200\"\n[numbers]\ndram_gbps = { value = 400, origin = \"a test\" }\n";
    let slow = folder.write("slow.toml", slow);
    let words =
        |device: &str| analyzed(&folder, &["norm_act", "--rows", "65536", "--dtype", "bf16", "--device", device]);
    let (usual, slow) = (words("h200"), words(&slow));
    assert_eq!(slow.device, "slow");
    assert!(slow.plans.chosen.us > 5.0 * usual.plans.chosen.us);
    let broken = folder.write("broken.toml", "name = \"x\"\nkind = \"gpu\"\n");
    let refused = folder.run(&["analyze", "norm_act", "--device", &broken]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("`dram_gbps` is missing"), "{}", text(&refused.stderr));
}

#[test]
fn codes_are_explained() {
    let folder = Folder::new();
    let page = text(&folder.run(&["explain", "E-PLAN-004"]).stdout);
    for word in ["whole rows", "bottlenecks", "What to do", "layer_norm"] {
        assert!(page.contains(word), "{word} is missing in\n{page}");
    }
    assert_eq!(text(&folder.run(&["explain"]).stdout).lines().count(), deuteron::PAGES.len());
    let schema: serde_json::Value = serde_json::from_slice(&folder.run(&["explain", "--schema"]).stdout).unwrap();
    assert!(schema["properties"]["candidates"].is_object());
    assert_eq!(folder.run(&["explain", "E-PLAN-999"]).status.code(), Some(2));
}

#[test]
fn bad_input_exits_with_2_and_says_what_to_do() {
    let folder = Folder::new();
    let empty = folder.write("empty.onnx", "");
    let cases: [(&[&str], &str); 7] = [
        (
            &["analyze", "norm_act", "--device", "gtx9"],
            "expected cpu, cuda, cuda:N, a100, h100, h200, rtx4090, or a machine file",
        ),
        (&["analyze", "norm_act", "--force", "gelu"], "expected two operations or more"),
        (&["analyze", "norm_act", "--forbid", "gelu,softmax"], "the graph has gelu, layer_norm"),
        (&["analyze", "norm_act", "--dim", "batch=1"], "--dim does nothing for the op `norm_act`"),
        (&["analyze", &empty, "--dim", "batch"], "expected NAME=VALUE"),
        (&["analyze", "missing.onnx"], "missing.onnx"),
        (&["analyze", "norm_act", "--expect", "missing.txt"], "cannot read missing.txt"),
    ];
    for (arguments, message) in cases {
        let output = folder.run(arguments);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(
            said.contains(message) && !said.contains("panicked"),
            "{arguments:?} should say `{message}`, said:\n{said}"
        );
    }
}
